#!/usr/bin/env python
"""Peak memory of a step of SFT, against length and vocabulary, and of reward modelling, ours and TRL's.

python benchmarks/bench_memory.py --trl_python DIR/bin/python [--quick]

DIR is made by `bash benchmarks/make_peer_env.sh trl-1.16 DIR`. Each size is a process of its own that trains
the random Llama of workload.py in fp32 on 4 rows or pairs: after a first short step, which makes the
optimizer's moments, the kernel's peak is reset, and what the measured step adds to resident memory is its
peak: gradients, activations, and what there is of logits. Two thirds of every row are learned; the first
third of a pair's sequences is their common prompt. `labels` is TRL with its output head as it is on a GPU,
where it skips what has no label.

The last line is a JSON object; `ratio` is TRL's peak over ours at SFT's largest size, `reward_ratio` that of
the reward model, at the smallest vocabulary and the longest length. `growth` is what the peak grows by from
the smallest vocabulary to the largest at the longest length, beside what the logits of all positions would
take.
"""

import math
import multiprocessing
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from benchmarks.measuring import Peer, peak_since, print_result, read_args, start_peak
from benchmarks.workload import WARM_UP_TOKENS, memory_pairs, memory_rows, small_llama_config

ROWS = 4
WAYS = ("ours", "trl", "trl_labels_only", "logits")
LENGTHS, VOCABULARIES = (256, 512, 1024), (8192, 32000, 128000)
QUICK_LENGTHS, QUICK_VOCABULARIES = (64,), (8192,)
MIB = 2**20


def our_peak(length: int, vocabulary: int, *, is_reward: bool) -> int:
    """Return the peak bytes of our step in this process, which must be a new one."""
    import torch
    from transformers import LlamaForCausalLM, LlamaForSequenceClassification

    from common.data.packed_batch import collate_pairs, collate_sft
    from common.engine.ds_config import build_config, build_engine
    from common.programs import startup, training_loop
    from common.ranks import distributed
    from common.runs.run_logger import RunLogger
    from step1_sft.arguments import SFTArguments
    from step1_sft.sft_trainer import SFTTrainer
    from step2_reward.arguments import RewardArguments
    from step2_reward.pair_trainer import RewardTrainer

    if is_reward:
        flags, kind, load = RewardArguments, RewardTrainer, training_loop.load_ranker
        model_class, build_rows, collate = LlamaForSequenceClassification, memory_pairs, collate_pairs
    else:
        flags, kind, load = SFTArguments, SFTTrainer, training_loop.load_policy
        model_class, build_rows, collate = LlamaForCausalLM, memory_rows, collate_sft
    startup.quiet_libraries()
    distributed.start()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        model_class(small_llama_config(vocab_size=vocabulary, num_labels=1)).save_pretrained(folder)
        more: dict[str, Any] = {"dtype": "fp32", "lr_scheduler_type": "constant", "log_interval": 10**9}
        args, config = flags(model_name_or_path=folder, **more), build_config(micro_batch_size=ROWS)
        model = load(args, config, vocabulary, dropout=0.0)
    is_packed, logger = training_loop.runs_packed(args, model), RunLogger(args, (), 10**9)
    trainer = kind(build_engine(model, config, args, 1), args, is_packed=is_packed, logger=logger)
    first, measured = (
        collate(build_rows(ROWS, num_tokens, vocabulary)) for num_tokens in (WARM_UP_TOKENS, length)
    )
    trainer.train_step(1, [first])
    baseline = start_peak()
    trainer.train_step(2, [measured])
    peak = peak_since(baseline)
    distributed.stop()
    return peak


def trl_peak(python: str, task: str, length: int, vocabulary: int, *, labels_only: bool = False) -> int:
    """Return the peak bytes of TRL's step, in a process of its own."""
    sizes = {"batch_size": ROWS, "length": length, "vocabulary": vocabulary}
    with Peer(python, task=task, labels_only=labels_only, **sizes) as peer:
        return peer.started["peak_bytes"]


def measure(python: str, length: int, vocabulary: int, *, is_reward: bool = False) -> dict[str, float]:
    """Return the peaks of a size in MiB; TRL's where there is an interpreter."""
    size = {"length": length, "vocabulary": vocabulary}
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        size["ours"] = pool.submit(our_peak, length, vocabulary, is_reward=is_reward).result() / MIB
    task = "reward_memory" if is_reward else "memory"
    if python:
        size["trl"] = trl_peak(python, task, length, vocabulary) / MIB
    if is_reward:
        return size
    if python:
        size["trl_labels_only"] = trl_peak(python, task, length, vocabulary, labels_only=True) / MIB
    return size | {"logits": ROWS * length * vocabulary * 4 / MIB}


def main() -> None:
    """Measure all sizes."""
    args = read_args(__doc__, peer_environment="trl-1.16")
    lengths = QUICK_LENGTHS if args.quick else LENGTHS
    vocabularies = QUICK_VOCABULARIES if args.quick else VOCABULARIES
    found = []
    print(f"{ROWS} rows, MiB       ours     TRL  labels  logits of all positions")
    for length in lengths:
        for vocabulary in vocabularies:
            size = measure(args.trl_python, length, vocabulary)
            found.append(size)
            shown = [size.get(name, math.nan) for name in WAYS]
            print(f"{length:>5} x {vocabulary:<8}{''.join(f'{mib:>8.0f}' for mib in shown)}", flush=True)
    reward = measure(args.trl_python, lengths[-1], vocabularies[0], is_reward=True)
    print(f"reward model, pairs: ours {reward['ours']:.0f}, TRL {reward.get('trl', math.nan):.0f}")
    at_longest = found[-len(vocabularies) :]
    growth = {name: at_longest[-1][name] - at_longest[0][name] for name in WAYS if name in found[0]}
    print_result(
        "memory",
        found[-1]["ours"],
        found[-1].get("trl"),
        is_lower_better=True,
        runs=1,
        unit="MiB",
        reward_ratio=round(reward["trl"] / reward["ours"], 4) if args.trl_python else None,
        reward=reward,
        growth=growth,
        sizes=found,
    )


if __name__ == "__main__":
    main()
