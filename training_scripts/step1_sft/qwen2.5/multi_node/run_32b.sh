#!/usr/bin/env bash
# Step 1, supervised fine-tuning: Qwen2.5-32B on several machines.
#
# Ours: DeepSpeed-Chat has no such script. The shape of its scripts, hyper-parameters not tuned.
# Hardware: four machines of eight GPUs of 80 GB.
# Memory: 26.8 of 80 GiB on each GPU at the peak, as planned by tools.plan.
# Time: not measured by us.
#
# HOSTFILE has one line "hostname slots=8" for each machine. All reach each other by ssh without a password and
# have this repository, the environment and OUTPUT_DIR under the same path.
#
# The variables below can be set from outside; flags of step1_sft/main.py may follow and win over those below.
set -euo pipefail
cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/../../../.." # the repository root

NUM_GPUS=${NUM_GPUS:-8} # on each machine
HOSTFILE=${HOSTFILE:-hostfile}
MODEL=${MODEL:-Qwen/Qwen2.5-32B}
OUTPUT_DIR=${OUTPUT_DIR:-output/step1_sft/qwen2.5/multi_node/run_32b}

# Without the file the launcher would quietly use this machine alone.
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
    --learning_rate 5e-6 \
    --weight_decay 0.0 \
    --num_train_epochs 2 \
    --gradient_accumulation_steps 1 \
    --lr_scheduler_type cosine \
    --num_warmup_steps 0 \
    --gradient_checkpointing \
    --zero_stage 3 \
    --output_dir "$OUTPUT_DIR" \
    "$@" 2>&1 | tee -ai "$OUTPUT_DIR/train.log"
