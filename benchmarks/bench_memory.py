#!/usr/bin/env python
"""Peak memory of a step of SFT, against length and vocabulary, and of reward modelling, ours and TRL's.

python benchmarks/bench_memory.py --trl_python DIR/bin/python [--quick]

DIR is made by `bash benchmarks/make_peer_env.sh trl-1.16 DIR`. Each size runs in a separate process that
trains the random Llama of workload.py in fp32 on 4 rows or pairs: after a first short step, which allocates
the optimizer's moments, the kernel's peak is reset; the peak is the increase of resident memory in the
measured step: gradients, activations, and logits if they are materialised. Two thirds of every row are
trained on; the first third of a pair's sequences is their common prompt. `trl_labels_only` is TRL with its
output head as on a GPU, where it skips positions without a label. Ours splits its passes automatically; a
user of TRL may set micro-batches of one pair, `trl_accumulating`.

The last line is a JSON object; `ratio` is TRL's peak over ours at SFT's largest size, `reward_ratio` that of
the reward model, at the smallest vocabulary and the longest length. `growth` is the increase of the peak from
the smallest vocabulary to the largest at the longest length, with that of the logits of all positions.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]  # repository root, when run as a script

import torch
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from benchmarks.bench_train import build_ours
from benchmarks.measuring import (
    Peer,
    in_new_process,
    peak_since,
    print_result,
    print_table,
    read_args,
    reset_peak,
)
from benchmarks.workload import WARM_UP_TOKENS, memory_pairs, memory_rows, small_llama_config

ROWS = 4
WAYS = ("ours", "trl", "trl_labels_only", "logits")
TRL_WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "sft": {"trl": {"batch_size": ROWS}, "trl_labels_only": {"batch_size": ROWS, "labels_only": True}},
    "reward": {"trl": {"batch_size": ROWS}, "trl_accumulating": {"batch_size": 1, "accumulation": ROWS}},
}
LENGTHS = (256, 512, 1024)
VOCABULARIES = (8192, 32000, 128000)
QUICK_LENGTHS = (64,)
QUICK_VOCABULARIES = (8192,)
MIB = 2**20


def our_peak(task: str, length: int, vocabulary: int) -> int:
    """Peak bytes of our step in this process, which must be a new one."""
    model_class, build_rows = LlamaForCausalLM, memory_rows
    if task == "reward":
        model_class = LlamaForSequenceClassification
        build_rows = memory_pairs
    torch.manual_seed(0)
    rows = build_rows(ROWS, length, vocabulary)
    with tempfile.TemporaryDirectory() as folder:
        model_class(small_llama_config(vocab_size=vocabulary, num_labels=1)).save_pretrained(folder)
        trainer, batches = build_ours(
            task, rows, folder, num_tokens=vocabulary, per_device_train_batch_size=ROWS
        )
    trainer.train_step(1, [batches.collate(build_rows(ROWS, WARM_UP_TOKENS, vocabulary))])
    baseline = reset_peak()
    trainer.train_step(2, next(batches))
    return peak_since(baseline)


def measure(python: str, task: str, length: int, vocabulary: int) -> dict[str, float]:
    """Peak memory of a size in MiB, each in a separate process; TRL's too if its interpreter is given."""
    size = {"length": length, "vocabulary": vocabulary}
    size["ours"] = in_new_process(our_peak, task, length, vocabulary) / MIB
    for name, options in TRL_WAYS[task].items() if python else ():
        with Peer(python, task=task, length=length, vocabulary=vocabulary, **options) as peer:
            size[name] = peer.started["peak_bytes"] / MIB
    return size


def main() -> None:
    """Measure all sizes."""
    args = read_args(__doc__, peer_environment="trl-1.16")
    lengths = QUICK_LENGTHS if args.quick else LENGTHS
    vocabularies = QUICK_VOCABULARIES if args.quick else VOCABULARIES
    sizes = []
    for length in lengths:
        for vocabulary in vocabularies:
            size = measure(args.trl_python, "sft", length, vocabulary)
            size["logits"] = ROWS * length * vocabulary * 4 / MIB
            sizes.append(size)
    print(f"{ROWS} rows, MiB")
    print_table(sizes)
    reward = measure(args.trl_python, "reward", lengths[-1], vocabularies[0])
    print("reward model, pairs")
    print_table([reward])
    at_longest = sizes[-len(vocabularies) :]
    growth = {name: at_longest[-1][name] - at_longest[0][name] for name in WAYS if name in sizes[0]}
    print_result(
        "memory",
        sizes[-1]["ours"],
        sizes[-1].get("trl"),
        is_lower_better=True,
        runs=1,
        unit="MiB",
        reward_ratio=round(reward["trl"] / reward["ours"], 4) if args.trl_python else None,
        reward=reward,
        growth=growth,
        sizes=sizes,
    )


if __name__ == "__main__":
    main()
