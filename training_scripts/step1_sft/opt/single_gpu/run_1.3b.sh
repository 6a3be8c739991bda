#!/usr/bin/env bash
# Step 1, supervised fine-tuning: OPT-1.3B on one GPU, LoRA.
#
# Hyper-parameters of DeepSpeed-Chat's step1_supervised_finetuning/.../opt/single_gpu/run_1.3b.sh.
# Hardware: one GPU of 48 GB.
# Time: not measured by us.
# DeepSpeed-Chat published 2900 s for this step on one A6000-48G, with one data set.
#
# bash run_1.3b.sh [OUTPUT_DIR ZERO_STAGE] [FLAGS]: as in DeepSpeed-Chat's script; flags override those below.
# The environment may set the variables below.
set -euo pipefail
cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/../../../.." # the repository root
POSITIONS=(OUTPUT_DIR --zero_stage)
# shellcheck source=training_scripts/positions.sh
source training_scripts/positions.sh

NUM_GPUS=${NUM_GPUS:-1}
MODEL=${MODEL:-facebook/opt-1.3b}
OUTPUT_DIR=${OUTPUT_DIR:-output/step1_sft/opt/single_gpu/run_1.3b}

mkdir -p "$OUTPUT_DIR"
deepspeed --num_gpus "$NUM_GPUS" step1_sft/main.py \
    --model_name_or_path "$MODEL" \
    --data_path Dahoas/rm-static \
    --data_split 2,4,4 \
    --per_device_train_batch_size 16 \
    --per_device_eval_batch_size 16 \
    --max_seq_len 512 \
    --learning_rate 1e-3 \
    --weight_decay 0.0 \
    --num_train_epochs 1 \
    --gradient_accumulation_steps 8 \
    --lr_scheduler_type cosine \
    --num_warmup_steps 0 \
    --zero_stage 0 \
    --lora_dim 128 \
    --lora_module_name decoder.layers. \
    --enable_tensorboard \
    --output_dir "$OUTPUT_DIR" \
    "$@" 2>&1 | tee -ai "$OUTPUT_DIR/train.log"
