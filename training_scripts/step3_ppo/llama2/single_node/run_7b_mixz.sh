#!/usr/bin/env bash
# Step 3, PPO: Llama-2-7B actor and critic with LoRA on one machine, without the MixZ++ of the original.
#
# Hyper-parameters of DeepSpeed-Chat's step3_rlhf_finetuning/.../llama2/run_llama2_7b_mixz.sh.
# Hardware: eight GPUs of 80 GB in one machine.
# Time: not measured by us.
#
# bash run_7b_mixz.sh [ACTOR_MODEL CRITIC_MODEL ACTOR_ZERO_STAGE CRITIC_ZERO_STAGE OUTPUT_DIR] [FLAGS]: as in
# DeepSpeed-Chat's script; flags override those below.
# The environment may set the variables below.
set -euo pipefail
cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/../../../.." # the repository root
POSITIONS=(ACTOR_MODEL CRITIC_MODEL --actor_zero_stage --critic_zero_stage OUTPUT_DIR)
# shellcheck source=training_scripts/positions.sh
source training_scripts/positions.sh

NUM_GPUS=${NUM_GPUS:-8}
ACTOR_MODEL=${ACTOR_MODEL:-output/step1_sft/llama2/single_node/run_7b_lora/export}
CRITIC_MODEL=${CRITIC_MODEL:-output/step2_reward/llama2/single_node/run_7b_lora/export}
OUTPUT_DIR=${OUTPUT_DIR:-output/step3_ppo/llama2/single_node/run_7b_mixz}

mkdir -p "$OUTPUT_DIR"
deepspeed --num_gpus "$NUM_GPUS" step3_ppo/main.py \
    --actor_model_name_or_path "$ACTOR_MODEL" \
    --critic_model_name_or_path "$CRITIC_MODEL" \
    --data_path Dahoas/rm-static \
    --data_split 2,4,4 \
    --per_device_generation_batch_size 1 \
    --per_device_training_batch_size 1 \
    --generation_batches 1 \
    --ppo_epochs 1 \
    --max_prompt_seq_len 256 \
    --max_answer_seq_len 256 \
    --actor_learning_rate 9.65e-6 \
    --critic_learning_rate 5e-6 \
    --actor_weight_decay 0.1 \
    --critic_weight_decay 0.1 \
    --num_train_epochs 1 \
    --gradient_accumulation_steps 1 \
    --lr_scheduler_type cosine \
    --num_warmup_steps 100 \
    --actor_gradient_checkpointing \
    --critic_gradient_checkpointing \
    --actor_zero_stage 3 \
    --critic_zero_stage 3 \
    --actor_lora_dim 64 \
    --actor_lora_module_name layers. \
    --critic_lora_dim 64 \
    --critic_lora_module_name layers. \
    --enable_hybrid_engine \
    --output_dir "$OUTPUT_DIR" \
    "$@" 2>&1 | tee -ai "$OUTPUT_DIR/train.log"
