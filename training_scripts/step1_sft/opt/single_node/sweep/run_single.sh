#!/usr/bin/env bash
# Step 1, supervised fine-tuning: OPT-1.3B on one machine, one point of a sweep.
#
# Hyper-parameters of DeepSpeed-Chat's step1_supervised_finetuning/.../opt/single_node/sweep/run_single.sh.
# Hardware: eight GPUs of 80 GB in one machine.
# Time: not measured by us.
#
# A sweep loops over this script:
#   for ZERO_STAGE in 0 1 2 3; do for OFFLOAD in none all; do for LORA_DIM in 0 128; do
#       export ZERO_STAGE OFFLOAD LORA_DIM
#       bash training_scripts/step1_sft/opt/single_node/sweep/run_single.sh
#   done; done; done
#
# The environment may set the variables below; flags of step1_sft/main.py may follow and override those below.
set -euo pipefail
cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/../../../../.." # the repository root

NUM_GPUS=${NUM_GPUS:-8}
MODEL=${MODEL:-facebook/opt-1.3b}
ZERO_STAGE=${ZERO_STAGE:-2}
OFFLOAD=${OFFLOAD:-all}
LORA_DIM=${LORA_DIM:-0}
OUTPUT_DIR=${OUTPUT_DIR:-output/step1_sft/opt/single_node/sweep/zero${ZERO_STAGE}_offload-${OFFLOAD}_lora${LORA_DIM}}
# LoRA flags only for a run with adapters.
LORA=()
if [[ "$LORA_DIM" != 0 ]]; then LORA=(--lora_module_name decoder.layers. --only_optimize_lora); fi

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
    --learning_rate 9.65e-6 \
    --weight_decay 0.0 \
    --num_train_epochs 16 \
    --gradient_accumulation_steps 1 \
    --lr_scheduler_type cosine \
    --num_warmup_steps 0 \
    --zero_stage "$ZERO_STAGE" \
    --offload "$OFFLOAD" \
    --lora_dim "$LORA_DIM" \
    "${LORA[@]}" \
    --output_dir "$OUTPUT_DIR" \
    "$@" 2>&1 | tee -ai "$OUTPUT_DIR/train.log"
