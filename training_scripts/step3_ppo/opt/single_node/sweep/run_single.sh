#!/usr/bin/env bash
# Step 3, PPO: OPT-1.3B actor, 350M critic, on one machine, one point of a sweep.
#
# Hyper-parameters of DeepSpeed-Chat's step3_rlhf_finetuning/.../opt/single_node/sweep/run_single.sh.
# Hardware: eight GPUs of 80 GB in one machine.
# Time: not measured by us.
#
# Stops after TEST_STOP_STEP steps. A sweep loops over this script:
#   for ZERO_STAGE in 0 1 2 3; do for OFFLOAD in none all; do for LORA_DIM in 0 128; do
#       export ZERO_STAGE OFFLOAD LORA_DIM
#       bash training_scripts/step3_ppo/opt/single_node/sweep/run_single.sh
#   done; done; done
#
# The environment may set the variables below; flags of step3_ppo/main.py may follow and override those below.
set -euo pipefail
cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/../../../../.." # the repository root

NUM_GPUS=${NUM_GPUS:-8}
ACTOR_MODEL=${ACTOR_MODEL:-output/step1_sft/opt/single_node/run_1.3b/export}
CRITIC_MODEL=${CRITIC_MODEL:-output/step2_reward/opt/single_node/run_350m/export}
ZERO_STAGE=${ZERO_STAGE:-2}
OFFLOAD=${OFFLOAD:-all}
LORA_DIM=${LORA_DIM:-0}
TEST_STOP_STEP=${TEST_STOP_STEP:-10}
OUTPUT_DIR=${OUTPUT_DIR:-output/step3_ppo/opt/single_node/sweep/zero${ZERO_STAGE}_offload-${OFFLOAD}_lora${LORA_DIM}}
LORA=()
if [[ "$LORA_DIM" != 0 ]]; then LORA=(--actor_lora_module_name decoder.layers.); fi

mkdir -p "$OUTPUT_DIR"
deepspeed --num_gpus "$NUM_GPUS" step3_ppo/main.py \
    --actor_model_name_or_path "$ACTOR_MODEL" \
    --critic_model_name_or_path "$CRITIC_MODEL" \
    --data_path Dahoas/rm-static \
    --data_split 2,4,4 \
    --per_device_generation_batch_size 4 \
    --per_device_training_batch_size 4 \
    --generation_batches 1 \
    --ppo_epochs 1 \
    --max_prompt_seq_len 256 \
    --max_answer_seq_len 256 \
    --actor_learning_rate 9.65e-6 \
    --critic_learning_rate 5e-6 \
    --actor_weight_decay 0 \
    --critic_weight_decay 0 \
    --num_train_epochs 1 \
    --gradient_accumulation_steps 1 \
    --lr_scheduler_type cosine \
    --num_warmup_steps 100 \
    --actor_zero_stage "$ZERO_STAGE" \
    --critic_zero_stage "$ZERO_STAGE" \
    --enable_hybrid_engine \
    --offload "$OFFLOAD" \
    --actor_lora_dim "$LORA_DIM" \
    "${LORA[@]}" \
    --print_answers \
    --test_stop_step "$TEST_STOP_STEP" \
    --output_dir "$OUTPUT_DIR" \
    "$@" 2>&1 | tee -ai "$OUTPUT_DIR/train.log"
