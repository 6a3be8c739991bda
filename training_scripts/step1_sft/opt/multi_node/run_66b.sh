#!/usr/bin/env bash
# Step 1, supervised fine-tuning: OPT-66B on several machines, LoRA.
#
# Hyper-parameters of DeepSpeed-Chat's step1_supervised_finetuning/.../opt/multi_node/run_66b.sh.
# Hardware: eight machines of eight GPUs of 80 GB.
# Time: not measured by us.
#
# HOSTFILE has one line "hostname slots=8" per machine. All machines reach each other by ssh without a password and
# have this repository, the environment and OUTPUT_DIR at the same path.
#
# bash run_66b.sh [OUTPUT_DIR ZERO_STAGE] [FLAGS]: as in DeepSpeed-Chat's script; flags override those below.
# The environment may set the variables below.
set -euo pipefail
cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/../../../.." # the repository root
POSITIONS=(OUTPUT_DIR --zero_stage)
# shellcheck source=training_scripts/positions.sh
source training_scripts/positions.sh

NUM_GPUS=${NUM_GPUS:-8} # per machine
HOSTFILE=${HOSTFILE:-hostfile}
MODEL=${MODEL:-facebook/opt-66b}
OUTPUT_DIR=${OUTPUT_DIR:-output/step1_sft/opt/multi_node/run_66b}

# Without the file the launcher would silently use only this machine.
if [[ ! -f "$HOSTFILE" ]]; then
    echo "HOSTFILE=$HOSTFILE: no such file; write one line 'hostname slots=8' for each machine" >&2
    exit 2
fi

mkdir -p "$OUTPUT_DIR"
deepspeed --num_gpus "$NUM_GPUS" --hostfile "$HOSTFILE" step1_sft/main.py \
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
    --learning_rate 1e-4 \
    --weight_decay 0.1 \
    --num_train_epochs 2 \
    --gradient_accumulation_steps 1 \
    --lr_scheduler_type cosine \
    --num_warmup_steps 0 \
    --gradient_checkpointing \
    --zero_stage 3 \
    --lora_dim 128 \
    --lora_module_name decoder.layers. \
    --output_dir "$OUTPUT_DIR" \
    "$@" 2>&1 | tee -ai "$OUTPUT_DIR/train.log"
