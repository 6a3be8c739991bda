#!/usr/bin/env bash
# Step 2, reward model: Qwen2.5-14B on one machine.
#
# Ours: DeepSpeed-Chat has no such script. The shape of its scripts, hyper-parameters not tuned.
# Hardware: eight GPUs of 80 GB in one machine.
# Memory: 34.6 of 80 GiB on each GPU at the peak, as planned by tools.plan.
# Time: not measured by us.
#
# The variables below can be set from outside; flags of step2_reward/main.py may follow and win over those below.
set -euo pipefail
cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/../../../.." # the repository root

NUM_GPUS=${NUM_GPUS:-8}
MODEL=${MODEL:-Qwen/Qwen2.5-14B}
OUTPUT_DIR=${OUTPUT_DIR:-output/step2_reward/qwen2.5/single_node/run_14b}

mkdir -p "$OUTPUT_DIR"
deepspeed --num_gpus "$NUM_GPUS" step2_reward/main.py \
    --model_name_or_path "$MODEL" \
    --data_path \
        Dahoas/rm-static \
        Dahoas/full-hh-rlhf \
        Dahoas/synthetic-instruct-gptj-pairwise \
        yitingxie/rlhf-reward-datasets \
    --data_split 2,4,4 \
    --per_device_train_batch_size 4 \
    --per_device_eval_batch_size 4 \
    --max_seq_len 512 \
    --learning_rate 1e-5 \
    --weight_decay 0.1 \
    --num_train_epochs 1 \
    --gradient_accumulation_steps 1 \
    --lr_scheduler_type cosine \
    --num_warmup_steps 0 \
    --gradient_checkpointing \
    --zero_stage 3 \
    --output_dir "$OUTPUT_DIR" \
    "$@" 2>&1 | tee -ai "$OUTPUT_DIR/train.log"
