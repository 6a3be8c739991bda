#!/usr/bin/env bash
# Step 3, PPO: OPT-6.7B actor with LoRA, 350M critic, on one GPU.
#
# Hyper-parameters of DeepSpeed-Chat's step3_rlhf_finetuning/.../opt/single_gpu/run_6.7b_lora.sh.
# Hardware: one GPU of 80 GB.
# Time: not measured by us.
#
# bash run_6.7b_lora.sh [ACTOR_MODEL CRITIC_MODEL ACTOR_ZERO_STAGE CRITIC_ZERO_STAGE OUTPUT_DIR] [FLAGS]: as in
# DeepSpeed-Chat's script; flags override those below.
# The environment may set the variables below.
set -euo pipefail
cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/../../../.." # the repository root
POSITIONS=(ACTOR_MODEL CRITIC_MODEL --actor_zero_stage --critic_zero_stage OUTPUT_DIR)
# shellcheck source=training_scripts/positions.sh
source training_scripts/positions.sh

NUM_GPUS=${NUM_GPUS:-1}
ACTOR_MODEL=${ACTOR_MODEL:-output/step1_sft/opt/single_gpu/run_6.7b_lora/export}
CRITIC_MODEL=${CRITIC_MODEL:-output/step2_reward/opt/single_gpu/run_350m/export}
OFFLOAD=${OFFLOAD:-none}
OUTPUT_DIR=${OUTPUT_DIR:-output/step3_ppo/opt/single_gpu/run_6.7b_lora}

mkdir -p "$OUTPUT_DIR"
deepspeed --num_gpus "$NUM_GPUS" step3_ppo/main.py \
    --actor_model_name_or_path "$ACTOR_MODEL" \
    --critic_model_name_or_path "$CRITIC_MODEL" \
    --data_path Dahoas/rm-static \
    --data_split 2,4,4 \
    --per_device_generation_batch_size 8 \
    --per_device_training_batch_size 8 \
    --generation_batches 16 \
    --ppo_epochs 1 \
    --max_prompt_seq_len 256 \
    --max_answer_seq_len 256 \
    --actor_learning_rate 5e-4 \
    --critic_learning_rate 5e-6 \
    --num_train_epochs 1 \
    --gradient_accumulation_steps 16 \
    --lr_scheduler_type cosine \
    --num_warmup_steps 100 \
    --actor_gradient_checkpointing \
    --critic_gradient_checkpointing \
    --actor_zero_stage 0 \
    --critic_zero_stage 0 \
    --enable_hybrid_engine \
    --actor_lora_dim 128 \
    --actor_lora_module_name decoder.layers. \
    --offload "$OFFLOAD" \
    --output_dir "$OUTPUT_DIR" \
    "$@" 2>&1 | tee -ai "$OUTPUT_DIR/train.log"
