#!/usr/bin/env bash
# One algorithm on a task with verifiable answers (see build_inputs.py): sums of two digits, or word problems.
# Hardware: 1 CPU core, no GPU. Time: sums about 20 s for SFT, which all algorithms share, and half a minute per
# algorithm; word problems about 6 minutes and 2 minutes. They need `pip install --no-deps reasoning-gym`.
#   bash training_scripts/verifiable/run.sh grpo [further flags of step 3]
#   LEVEL=gsm bash training_scripts/verifiable/run.sh grpo
#   ALGORITHM: ppo, grpo, dr_grpo, rloo, reinforce++, reinforce++-baseline, distill, MODULE:FUNCTION, or sft alone
#   distill has the model of grpo as its teacher, which is trained first if it is missing, and trains on no reward.
# Knobs (environment): LEVEL (sums or gsm, default sums), OUTPUT_DIR (default output/verifiable/LEVEL), RUN_DIR
# (default OUTPUT_DIR/ALGORITHM).
set -euo pipefail
cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/../.."

ALGORITHM=${1:?"error: name an algorithm: ppo, grpo, dr_grpo, rloo, reinforce++, reinforce++-baseline, distill"}
shift
LEVEL=${LEVEL:-sums}
OUTPUT_DIR=${OUTPUT_DIR:-output/verifiable/$LEVEL}
RUN_DIR=${RUN_DIR:-$OUTPUT_DIR/${ALGORITHM//[:\/]/_}}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # the model is small: a second thread would only wait
export TQDM_DISABLE=1                         # progress bars of libraries would fill the logs

case $LEVEL in
sums)
  SFT_FLAGS=(
    --max_seq_len 16
    --per_device_train_batch_size 128
    --learning_rate 5e-3
    --num_train_epochs 8
  )
  FLAGS=(
    --max_prompt_seq_len 8
    --max_answer_seq_len 4
    --num_samples_per_prompt 4
    --per_device_generation_batch_size 50
    --per_device_training_batch_size 100
    --actor_learning_rate 1e-3
    --max_train_steps 60
  )
  CRITIC_LEARNING_RATE=2e-3
  ;;
gsm)
  SFT_FLAGS=(
    --max_seq_len 128
    --per_device_train_batch_size 16
    --learning_rate 3e-3
    --num_warmup_steps 50
    --num_train_epochs 5
  )
  FLAGS=(
    --eval_data_path "$OUTPUT_DIR/inputs/held_out.jsonl" # with numbers of no problem in SFT or training
    --eval_interval 10
    --max_prompt_seq_len 64
    --max_answer_seq_len 64
    --num_samples_per_prompt 8
    --per_device_generation_batch_size 32
    --per_device_training_batch_size 64
    --actor_learning_rate 2e-4
    --max_train_steps 40
  )
  CRITIC_LEARNING_RATE=1e-3
  ;;
*) echo "error: LEVEL=$LEVEL is neither sums nor gsm" >&2 && exit 1 ;;
esac
mkdir -p "$RUN_DIR"

if [ ! -d "$OUTPUT_DIR/sft/export" ]; then
  echo "== the SFT model, as careless as its teacher"
  python training_scripts/verifiable/build_inputs.py "$OUTPUT_DIR/inputs" "$LEVEL"
  python step1_sft/main.py \
    --model_name_or_path "$OUTPUT_DIR/inputs/base" \
    --data_path "$OUTPUT_DIR/inputs/sft.jsonl" \
    --data_split 1,0,0 \
    --data_output_path "$OUTPUT_DIR/cache" \
    --output_dir "$OUTPUT_DIR/sft" \
    --overwrite_output_dir \
    --template plain \
    --eval_iters 1 \
    --log_interval 50 \
    "${SFT_FLAGS[@]}" 2>&1 | tee -i "$OUTPUT_DIR/sft.log"
fi

if [ "$ALGORITHM" = sft ]; then exit; fi

REWARD=function:step3_ppo.rewards.examples.arithmetic:right_answer
OWN_FLAGS=(--reward "$REWARD" --kl_coef 0.01)
case "$ALGORITHM" in
  ppo) OWN_FLAGS+=(--critic_learning_rate "$CRITIC_LEARNING_RATE") ;; # the others have no critic
  distill)
    TEACHER="$OUTPUT_DIR/grpo/export"
    if [ ! -d "$TEACHER" ]; then LEVEL="$LEVEL" OUTPUT_DIR="$OUTPUT_DIR" bash training_scripts/verifiable/run.sh grpo; fi
    OWN_FLAGS=(--teacher_model_name_or_path "$TEACHER" --reward "0*$REWARD") # weight 0: right answers are only counted
    if [ "$LEVEL" = sums ]; then OWN_FLAGS+=(--eval_fraction 0.2); fi        # held-out sums
    ;;
esac

echo "== $ALGORITHM"
python step3_ppo/main.py \
  --algorithm "$ALGORITHM" \
  --actor_model_name_or_path "$OUTPUT_DIR/sft/export" \
  --data_path "$OUTPUT_DIR/inputs/prompts.jsonl" \
  --data_split 0,0,1 \
  --data_output_path "$OUTPUT_DIR/cache" \
  --output_dir "$RUN_DIR" \
  --overwrite_output_dir \
  --template plain \
  --enable_hybrid_engine \
  --packed \
  --num_warmup_steps 0 \
  --lr_scheduler_type constant \
  --num_train_epochs 100 \
  --log_interval 10 \
  "${FLAGS[@]}" "${OWN_FLAGS[@]}" "$@" 2>&1 | tee -i "$RUN_DIR/train.log"
echo "report: $RUN_DIR/report.html"
