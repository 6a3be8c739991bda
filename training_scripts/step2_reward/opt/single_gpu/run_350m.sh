#!/usr/bin/env bash
# Step 2, reward model: OPT-350M on one GPU.
#
# Hyper-parameters of DeepSpeed-Chat's step2_reward_model_finetuning/.../opt/single_gpu/run_350m.sh.
# Hardware: one GPU of 48 GB.
# Time: not measured by us.
# DeepSpeed-Chat published 670 s for this step on one A6000-48G, with one data set.
#
# bash run_350m.sh [OUTPUT_DIR ZERO_STAGE] [FLAGS]: as in DeepSpeed-Chat's script; flags override those below.
# The environment may set the variables below.
set -euo pipefail
cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/../../../.." # the repository root
POSITIONS=(OUTPUT_DIR --zero_stage)
# shellcheck source=training_scripts/positions.sh
source training_scripts/positions.sh

NUM_GPUS=${NUM_GPUS:-1}
MODEL=${MODEL:-facebook/opt-350m}
OUTPUT_DIR=${OUTPUT_DIR:-output/step2_reward/opt/single_gpu/run_350m}

mkdir -p "$OUTPUT_DIR"
deepspeed --num_gpus "$NUM_GPUS" step2_reward/main.py \
    --model_name_or_path "$MODEL" \
    --data_path Dahoas/rm-static \
    --data_split 2,4,4 \
    --per_device_train_batch_size 16 \
    --per_device_eval_batch_size 16 \
    --max_seq_len 512 \
    --learning_rate 5e-5 \
    --weight_decay 0.1 \
    --dropout 0.0 \
    --num_train_epochs 1 \
    --gradient_accumulation_steps 4 \
    --lr_scheduler_type cosine \
    --num_warmup_steps 0 \
    --zero_stage 0 \
    --enable_tensorboard \
    --output_dir "$OUTPUT_DIR" \
    "$@" 2>&1 | tee -ai "$OUTPUT_DIR/train.log"
