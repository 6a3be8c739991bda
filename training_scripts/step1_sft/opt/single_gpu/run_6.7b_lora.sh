#!/usr/bin/env bash
# Step 1, supervised fine-tuning: OPT-6.7B on one GPU, LoRA.
#
# Hyper-parameters of DeepSpeed-Chat's step1_supervised_finetuning/.../opt/single_gpu/run_6.7b_lora.sh.
# Hardware: one GPU of 80 GB.
# Time: not measured by us.
#
# bash run_6.7b_lora.sh [OUTPUT_DIR ZERO_STAGE] [FLAGS]: as in DeepSpeed-Chat's script; flags override those below.
# The environment may set the variables below.
set -euo pipefail
cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/../../../.." # the repository root
POSITIONS=(OUTPUT_DIR --zero_stage)
# shellcheck source=training_scripts/positions.sh
source training_scripts/positions.sh

NUM_GPUS=${NUM_GPUS:-1}
MODEL=${MODEL:-facebook/opt-6.7b}
OUTPUT_DIR=${OUTPUT_DIR:-output/step1_sft/opt/single_gpu/run_6.7b_lora}

mkdir -p "$OUTPUT_DIR"
deepspeed --num_gpus "$NUM_GPUS" step1_sft/main.py \
    --model_name_or_path "$MODEL" \
    --data_path \
        Dahoas/rm-static \
        Dahoas/full-hh-rlhf \
        Dahoas/synthetic-instruct-gptj-pairwise \
        yitingxie/rlhf-reward-datasets \
    --data_split 2,4,4 \
    --per_device_train_batch_size 8 \
    --per_device_eval_batch_size 8 \
    --max_seq_len 512 \
    --learning_rate 1e-3 \
    --weight_decay 0.0 \
    --num_train_epochs 16 \
    --gradient_accumulation_steps 16 \
    --lr_scheduler_type cosine \
    --num_warmup_steps 0 \
    --gradient_checkpointing \
    --zero_stage 0 \
    --lora_dim 128 \
    --lora_module_name decoder.layers. \
    --output_dir "$OUTPUT_DIR" \
    "$@" 2>&1 | tee -ai "$OUTPUT_DIR/train.log"
