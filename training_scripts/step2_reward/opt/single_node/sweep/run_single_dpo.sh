#!/usr/bin/env bash
# Step 2, DPO: OPT-350M on one machine, one point of a sweep.
#
# Hyper-parameters of DeepSpeed-Chat's step2_dpo_finetuning/.../opt/single_node/sweep/run_single.sh.
# Hardware: eight GPUs of 80 GB in one machine.
# Time: not measured by us.
#
# A sweep loops over this script:
#   for ZERO_STAGE in 0 1 2 3; do for OFFLOAD in none all; do
#       export ZERO_STAGE OFFLOAD
#       bash training_scripts/step2_reward/opt/single_node/sweep/run_single_dpo.sh
#   done; done
#
# The environment may set the variables below; flags of step2_reward/main.py may follow and override those below.
set -euo pipefail
cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/../../../../.." # the repository root

NUM_GPUS=${NUM_GPUS:-8}
MODEL=${MODEL:-facebook/opt-350m}
ZERO_STAGE=${ZERO_STAGE:-0}
OFFLOAD=${OFFLOAD:-all}
OUTPUT_DIR=${OUTPUT_DIR:-output/step2_reward/opt/single_node/sweep/dpo_zero${ZERO_STAGE}_offload-${OFFLOAD}}

mkdir -p "$OUTPUT_DIR"
deepspeed --num_gpus "$NUM_GPUS" step2_reward/main.py \
    --model_name_or_path "$MODEL" \
    --loss dpo \
    --data_path \
        Dahoas/rm-static \
        Dahoas/full-hh-rlhf \
        Dahoas/synthetic-instruct-gptj-pairwise \
        yitingxie/rlhf-reward-datasets \
    --data_split 2,4,4 \
    --per_device_train_batch_size 4 \
    --per_device_eval_batch_size 4 \
    --max_seq_len 512 \
    --learning_rate 5e-5 \
    --weight_decay 0.1 \
    --dropout 0.0 \
    --num_train_epochs 1 \
    --gradient_accumulation_steps 1 \
    --lr_scheduler_type cosine \
    --num_warmup_steps 0 \
    --zero_stage "$ZERO_STAGE" \
    --offload "$OFFLOAD" \
    --output_dir "$OUTPUT_DIR" \
    "$@" 2>&1 | tee -ai "$OUTPUT_DIR/train.log"
