#!/usr/bin/env bash
# Step 3, PPO: OPT-1.3B actor with LoRA, 350M critic, on one GPU.
#
# Hyper-parameters of DeepSpeed-Chat's step3_rlhf_finetuning/.../opt/single_gpu/run_1.3b.sh.
# Hardware: one GPU of 48 GB.
# Time: not measured by us.
# DeepSpeed-Chat published 1.2 h for this step on one A6000-48G, with one data set.
# DeepSpeed-Chat published 11.7 h on one A100-80G for 131.9k prompts of 256 tokens with answers of 256.
#
# bash run_1.3b.sh [ACTOR_MODEL CRITIC_MODEL ACTOR_ZERO_STAGE CRITIC_ZERO_STAGE OUTPUT_DIR] [FLAGS]: as in
# DeepSpeed-Chat's script; flags override those below.
# The environment may set the variables below.
set -euo pipefail
cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/../../../.." # the repository root
POSITIONS=(ACTOR_MODEL CRITIC_MODEL --actor_zero_stage --critic_zero_stage OUTPUT_DIR)
# shellcheck source=training_scripts/positions.sh
source training_scripts/positions.sh

NUM_GPUS=${NUM_GPUS:-1}
ACTOR_MODEL=${ACTOR_MODEL:-output/step1_sft/opt/single_gpu/run_1.3b/export}
CRITIC_MODEL=${CRITIC_MODEL:-output/step2_reward/opt/single_gpu/run_350m/export}
OUTPUT_DIR=${OUTPUT_DIR:-output/step3_ppo/opt/single_gpu/run_1.3b}

mkdir -p "$OUTPUT_DIR"
deepspeed --num_gpus "$NUM_GPUS" step3_ppo/main.py \
    --actor_model_name_or_path "$ACTOR_MODEL" \
    --critic_model_name_or_path "$CRITIC_MODEL" \
    --data_path Dahoas/rm-static \
    --data_split 2,4,4 \
    --per_device_generation_batch_size 16 \
    --per_device_training_batch_size 16 \
    --generation_batches 2 \
    --ppo_epochs 1 \
    --max_prompt_seq_len 256 \
    --max_answer_seq_len 256 \
    --actor_learning_rate 9.65e-6 \
    --critic_learning_rate 5e-6 \
    --num_train_epochs 1 \
    --gradient_accumulation_steps 2 \
    --lr_scheduler_type cosine \
    --num_warmup_steps 100 \
    --actor_gradient_checkpointing \
    --actor_zero_stage 0 \
    --critic_zero_stage 0 \
    --enable_hybrid_engine \
    --actor_lora_dim 128 \
    --actor_lora_module_name decoder.layers. \
    --output_dir "$OUTPUT_DIR" \
    "$@" 2>&1 | tee -ai "$OUTPUT_DIR/train.log"
