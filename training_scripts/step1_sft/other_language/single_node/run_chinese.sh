#!/usr/bin/env bash
# Step 1, supervised fine-tuning: BLOOM-1.1B on Chinese data, one machine.
#
# Hyper-parameters of DeepSpeed-Chat's step1_supervised_finetuning/.../other_language/run_chinese.sh.
# Hardware: eight GPUs of 80 GB in one machine.
# Time: not measured by us.
#
# The data sets come from the hub by name; docs/data.md describes what is read from each, and local copies.
#
# bash run_chinese.sh [OUTPUT_DIR ZERO_STAGE] [FLAGS]: as in DeepSpeed-Chat's script; flags override those below.
# The environment may set the variables below.
set -euo pipefail
cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/../../../.." # the repository root
POSITIONS=(OUTPUT_DIR --zero_stage)
# shellcheck source=training_scripts/positions.sh
source training_scripts/positions.sh

NUM_GPUS=${NUM_GPUS:-8}
MODEL=${MODEL:-bigscience/bloom-1b1}
OUTPUT_DIR=${OUTPUT_DIR:-output/step1_sft/other_language/single_node/run_chinese}

mkdir -p "$OUTPUT_DIR"
deepspeed --num_gpus "$NUM_GPUS" step1_sft/main.py \
    --model_name_or_path "$MODEL" \
    --data_path \
        wangrui6/Zhihu-KOL \
        Cohere/miracl-zh-queries-22-12 \
        Hello-SimpleAI/HC3-Chinese \
        mkqa-Chinese \
    --data_split 2,4,4 \
    --per_device_train_batch_size 8 \
    --per_device_eval_batch_size 8 \
    --max_seq_len 512 \
    --learning_rate 9.65e-6 \
    --weight_decay 0.0 \
    --num_train_epochs 16 \
    --gradient_accumulation_steps 1 \
    --lr_scheduler_type cosine \
    --num_warmup_steps 0 \
    --zero_stage 2 \
    --output_dir "$OUTPUT_DIR" \
    "$@" 2>&1 | tee -ai "$OUTPUT_DIR/train.log"
