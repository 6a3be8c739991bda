#!/usr/bin/env bash
# The whole pipeline: builds a small base model, trains SFT, reward model and PPO on conversations, measures the results.
# Hardware: 2 CPU cores, 4 GiB; no GPU, no model hub, no account. Time and memory: see README.md.
#   bash training_scripts/demo/run_demo.sh                    the small model, conversations composed from 68 topics
#   bash training_scripts/demo/run_demo.sh --data human       the small model, real conversations with slang and typos
#   bash training_scripts/demo/run_demo.sh --size smollm2     SmolLM2-135M-Instruct with LoRA, topics it was not trained on
# Knobs (environment): OUTPUT_DIR (default output/demo), NUM_RANKS (default: number of cores, at most 2; 1 with a GPU).
set -euo pipefail
cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/../.."

SIZE=small
DATA_KIND=composed
while [ $# -gt 0 ]; do
  case "$1" in
    --size) SIZE=${2:-}; shift 2 || true ;;
    --size=*) SIZE=${1#--size=}; shift ;;
    --data) DATA_KIND=${2:-none}; shift 2 || true ;;
    --data=*) DATA_KIND=${1#--data=}; shift ;;
    *) echo "error: unknown flag $1; there are --size small|smollm2 and --data composed|human" >&2; exit 2 ;;
  esac
done
case "$SIZE" in
  small | smollm2) ;;
  *) echo "error: --size '$SIZE' must be small or smollm2" >&2; exit 2 ;;
esac
case "$DATA_KIND" in
  composed | human) ;;
  *) echo "error: --data '$DATA_KIND' must be composed or human" >&2; exit 2 ;;
esac

OUTPUT_DIR=${OUTPUT_DIR:-output/demo}
if [ "$SIZE" = smollm2 ] && [ "$OUTPUT_DIR" = output/demo ]; then OUTPUT_DIR=output/demo_smollm2; fi
mkdir -p "$OUTPUT_DIR"

# shellcheck source=training_scripts/setup_env.sh
source training_scripts/setup_env.sh requirements-demo.txt

# One rank per core (at most two) on a CPU, one on a GPU: small matrix products gain more from ranks than from threads,
# and the curves are the same for any number of ranks.
CORES=$(env -u OMP_NUM_THREADS nproc) # nproc itself reads the variable
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
  NUM_RANKS=${NUM_RANKS:-1}
else
  NUM_RANKS=${NUM_RANKS:-$((CORES < 2 ? 1 : 2))}
  export DS_ACCELERATOR=cpu # DeepSpeed would choose the same, with a warning
fi
export OMP_NUM_THREADS=$((CORES / NUM_RANKS > 0 ? CORES / NUM_RANKS : 1))
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-2000} # threads that spin longer take a core from others
export TQDM_DISABLE=1         # progress bars of libraries would fill the logs
LAUNCH=(torchrun --standalone --nproc_per_node "$NUM_RANKS")
STARTED_AT=$(date +%s.%N)
DATA="$OUTPUT_DIR/inputs"
BASE="$DATA/base"

# shellcheck source=training_scripts/demo/settings_small.sh
source "training_scripts/demo/settings_$SIZE.sh"

echo "== 0. inputs: conversations, preference pairs, tokenizer and base model"
build_inputs --data "$DATA_KIND"

echo "== 1. supervised fine-tuning: learn to reply"
"${LAUNCH[@]}" step1_sft/main.py \
  --model_name_or_path "$BASE" \
  --data_path "$DATA/sft" \
  --data_split 1,0,0 \
  --data_output_path "$OUTPUT_DIR/cache" \
  --output_dir "$OUTPUT_DIR/step1" \
  --overwrite_output_dir \
  "${SFT_FLAGS[@]}" 2>&1 | tee -i "$OUTPUT_DIR/step1.log"

echo "== 2. reward model: learn which of two replies is kinder"
"${LAUNCH[@]}" step2_reward/main.py \
  --model_name_or_path "$OUTPUT_DIR/step1/export" \
  --data_path "$DATA/pairs" \
  --data_split 0,1,0 \
  --data_output_path "$OUTPUT_DIR/cache" \
  --output_dir "$OUTPUT_DIR/step2" \
  --overwrite_output_dir \
  "${REWARD_FLAGS[@]}" 2>&1 | tee -i "$OUTPUT_DIR/step2.log"
"${LAUNCH[@]}" step2_reward/rw_eval.py \
  --model_name_or_path "$OUTPUT_DIR/step2/export" \
  --data_path "$DATA/pairs/eval.jsonl" \
  --data_output_path "$OUTPUT_DIR/cache" \
  "${REWARD_EVAL_FLAGS[@]}" 2>&1 | tee -i "$OUTPUT_DIR/reward_eval.log"

echo "== 3. PPO: make the replies kinder"
"${LAUNCH[@]}" step3_ppo/main.py \
  --actor_model_name_or_path "$OUTPUT_DIR/step1/export" \
  --critic_model_name_or_path "$OUTPUT_DIR/step2/export" \
  --data_path "$DATA/prompts/train.jsonl" \
  --data_split 0,0,1 \
  --eval_data_path "$DATA/prompts/eval.jsonl" \
  --data_output_path "$OUTPUT_DIR/cache" \
  --output_dir "$OUTPUT_DIR/step3" \
  --overwrite_output_dir \
  "${PPO_FLAGS[@]}" 2>&1 | tee -i "$OUTPUT_DIR/step3.log"

echo "== 4. what was reached, on held-out conversations"
export OMP_NUM_THREADS=$CORES
python training_scripts/demo/measure.py "$OUTPUT_DIR" \
  --data "$DATA_KIND" \
  --started_at "$STARTED_AT" \
  "${MEASURE_FLAGS[@]}" 2>&1 | tee -i "$OUTPUT_DIR/measure.log"

python -m tools.report "$OUTPUT_DIR"/step1 "$OUTPUT_DIR"/step2 "$OUTPUT_DIR"/step3 --output "$OUTPUT_DIR/report.html"

echo
echo "report:  $OUTPUT_DIR/report.html"
echo "summary: $OUTPUT_DIR/summary.json"
echo "try it:  python chat.py $OUTPUT_DIR/step3/export"
