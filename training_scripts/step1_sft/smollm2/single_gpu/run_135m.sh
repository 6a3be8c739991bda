#!/usr/bin/env bash
# Step 1, supervised fine-tuning: SmolLM2-135M on one GPU.
#
# Ours: DeepSpeed-Chat has no such script. The shape of its scripts, hyper-parameters not tuned.
# Hardware: one GPU of 24 GB.
# Memory: 12.1 of 24 GiB on each GPU at the peak, as planned by tools.plan.
# Time: not measured by us.
#
# The variables below can be set from outside; flags of step1_sft/main.py may follow and win over those below.
set -euo pipefail
cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/../../../.." # the repository root

NUM_GPUS=${NUM_GPUS:-1}
MODEL=${MODEL:-HuggingFaceTB/SmolLM2-135M}
OUTPUT_DIR=${OUTPUT_DIR:-output/step1_sft/smollm2/single_gpu/run_135m}

mkdir -p "$OUTPUT_DIR"
deepspeed --num_gpus "$NUM_GPUS" step1_sft/main.py \
    --model_name_or_path "$MODEL" \
    --data_path Dahoas/rm-static \
    --data_split 2,4,4 \
    --per_device_train_batch_size 16 \
    --per_device_eval_batch_size 16 \
    --max_seq_len 512 \
    --learning_rate 5e-5 \
    --weight_decay 0.0 \
    --num_train_epochs 2 \
    --gradient_accumulation_steps 2 \
    --lr_scheduler_type cosine \
    --num_warmup_steps 0 \
    --zero_stage 0 \
    --output_dir "$OUTPUT_DIR" \
    "$@" 2>&1 | tee -ai "$OUTPUT_DIR/train.log"
