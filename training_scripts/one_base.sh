#!/usr/bin/env bash
# All three steps of an 8B model on one GPU of 24 GB: PPO whose actor, critic, reference and reward model are adapters of one base.
#
# Hardware: one GPU of 24 GB; with --load_in_4bit of 16 GB. As planned, not run on a GPU yet.
#
#   bash training_scripts/one_base.sh [FLAGS]                       flags of all three programs
#   STEPS=ppo bash training_scripts/one_base.sh --load_in_4bit      some of sft, reward, ppo
#
# Variables: MODEL, DATA (of preference pairs), OUTPUT_DIR, STEPS.
set -euo pipefail
cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/.." # the repository root

MODEL=${MODEL:-meta-llama/Llama-3.1-8B}
DATA=${DATA:-Dahoas/rm-static}
OUTPUT_DIR=${OUTPUT_DIR:-output/one_base}
STEPS=${STEPS:-sft reward ppo}

adapters=(--lora_dim 64 --gradient_checkpointing --lora_learning_rate 1e-4 --per_device_train_batch_size 4
    --gradient_accumulation_steps 8)
for step in $STEPS; do
    case $step in
    sft)
        words=(step1_sft/main.py --model_name_or_path "$MODEL" "${adapters[@]}")
        ;;
    reward)
        words=(step2_reward/main.py --model_name_or_path "$MODEL" "${adapters[@]}")
        ;;
    ppo)
        words=(step3_ppo/main.py
            --actor_model_name_or_path "$OUTPUT_DIR/sft/adapter"
            --critic_model_name_or_path "$OUTPUT_DIR/reward/adapter"
            --enable_hybrid_engine
            --release_inference_cache
            --actor_gradient_checkpointing
            --critic_gradient_checkpointing
            --offload optimizer
            --critic_offload optimizer
            --per_device_generation_batch_size 8
            --per_device_training_batch_size 8
            --generation_batches 4
            --gradient_accumulation_steps 4
            --max_tokens_per_micro_batch 512
            --max_tokens_per_scoring_pass 1024
            --max_prompt_seq_len 256
            --max_answer_seq_len 256)
        ;;
    *)
        echo "STEPS: $step must be one of sft, reward, ppo" >&2
        exit 2
        ;;
    esac
    mkdir -p "$OUTPUT_DIR/$step"
    deepspeed --num_gpus 1 "${words[@]}" --data_path "$DATA" --data_split 2,4,4 --output_dir "$OUTPUT_DIR/$step" "$@" 2>&1 |
        tee -ai "$OUTPUT_DIR/$step/train.log"
done
