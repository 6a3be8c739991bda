#!/usr/bin/env bash
# Step 3, PPO: OPT-66B actor with LoRA, 350M critic, on several machines.
#
# Hyper-parameters of DeepSpeed-Chat's step3_rlhf_finetuning/.../opt/multi_node/run_66b.sh.
# Hardware: eight machines of eight GPUs of 80 GB.
# Time: not measured by us.
#
# HOSTFILE has one line "hostname slots=8" per machine. All machines reach each other by ssh without a password and
# have this repository, the environment and OUTPUT_DIR at the same path.
#
# bash run_66b.sh [ACTOR_MODEL CRITIC_MODEL ACTOR_ZERO_STAGE CRITIC_ZERO_STAGE OUTPUT_DIR] [FLAGS]: as in
# DeepSpeed-Chat's script; flags override those below.
# The environment may set the variables below.
set -euo pipefail
cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/../../../.." # the repository root
POSITIONS=(ACTOR_MODEL CRITIC_MODEL --actor_zero_stage --critic_zero_stage OUTPUT_DIR)
# shellcheck source=training_scripts/positions.sh
source training_scripts/positions.sh

NUM_GPUS=${NUM_GPUS:-8} # per machine
HOSTFILE=${HOSTFILE:-hostfile}
ACTOR_MODEL=${ACTOR_MODEL:-output/step1_sft/opt/multi_node/run_66b/export}
CRITIC_MODEL=${CRITIC_MODEL:-output/step2_reward/opt/multi_node/run_350m/export}
OUTPUT_DIR=${OUTPUT_DIR:-output/step3_ppo/opt/multi_node/run_66b}

# Without the file the launcher would silently use only this machine.
if [[ ! -f "$HOSTFILE" ]]; then
    echo "HOSTFILE=$HOSTFILE: no such file; write one line 'hostname slots=8' for each machine" >&2
    exit 2
fi

mkdir -p "$OUTPUT_DIR"
deepspeed --num_gpus "$NUM_GPUS" --hostfile "$HOSTFILE" step3_ppo/main.py \
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
    --actor_learning_rate 5e-4 \
    --critic_learning_rate 5e-6 \
    --actor_weight_decay 0.1 \
    --critic_weight_decay 0.1 \
    --num_train_epochs 1 \
    --gradient_accumulation_steps 1 \
    --lr_scheduler_type cosine \
    --num_warmup_steps 100 \
    --actor_gradient_checkpointing \
    --actor_zero_stage 3 \
    --critic_zero_stage 3 \
    --enable_hybrid_engine \
    --inference_tp_size 8 \
    --tp_gather_partition_size 4 \
    --actor_lora_dim 128 \
    --actor_lora_module_name decoder.layers. \
    --output_dir "$OUTPUT_DIR" \
    "$@" 2>&1 | tee -ai "$OUTPUT_DIR/train.log"
