# shellcheck shell=bash disable=SC2034
# Settings of `run_demo.sh --size smollm2`, sourced by it: a real pretrained chat model, LoRA in all three steps.
# Meant for a GPU (bf16 there by default). FEW_STEPS=1 runs a few steps of each, to see that all of it works.

build_inputs() {
  python training_scripts/demo/build_inputs.py "$DATA" "$@" --skip_base_model \
    --num_eval_pairs "$([ -n "${FEW_STEPS:-}" ] && echo 16 || echo 1000)"
  python training_scripts/demo/save_smollm2.py "$BASE"
}

steps() { if [ -n "${FEW_STEPS:-}" ]; then echo 2; else echo "$1"; fi; }
LORA_FLAGS=(
  --template chat
  --max_seq_len 128
  --per_device_train_batch_size 16
  --per_device_eval_batch_size 32
  --group_by_length
  --lora_dim 32
  --num_warmup_steps 10
  --log_interval 10
)
SFT_FLAGS=(
  "${LORA_FLAGS[@]}"
  --lora_learning_rate 5e-4
  --max_train_steps "$(steps 600)"
  --eval_iters "$(steps 40)"
)
REWARD_FLAGS=(
  "${LORA_FLAGS[@]}"
  --learning_rate 5e-4
  --lora_learning_rate 5e-4
  --max_train_steps "$(steps 400)"
  --eval_iters "$(steps 40)"
)
REWARD_EVAL_FLAGS=(
  --template chat
  --max_seq_len 128
  --per_device_eval_batch_size 32
)
PPO_FLAGS=(
  --eval_prompts "$([ -n "${FEW_STEPS:-}" ] && echo 4 || echo 256)"
  --eval_interval 20
  --template chat
  --enable_hybrid_engine
  --max_prompt_seq_len 96
  --max_answer_seq_len 48
  --per_device_generation_batch_size "$([ -n "${FEW_STEPS:-}" ] && echo 4 || echo 64)"
  --per_device_training_batch_size "$([ -n "${FEW_STEPS:-}" ] && echo 2 || echo 32)"
  --ppo_epochs 2
  --max_train_steps "$(steps 60)"
  --actor_lora_dim 32
  --critic_lora_dim 32
  --actor_lora_learning_rate 1e-4
  --critic_lora_learning_rate 3e-4
  --critic_learning_rate 3e-4
  --num_warmup_steps 5
  --kl_coef 0.2
  --value_clip_range 0
  --length_reward_tokens 10
)
MEASURE_FLAGS=(--template chat)
if [ -n "${FEW_STEPS:-}" ]; then MEASURE_FLAGS+=(--num_prompts 8 --num_scored 16 --batch_size 8); fi
