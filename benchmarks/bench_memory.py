#!/usr/bin/env python
"""Peak memory of a step of SFT, against length and vocabulary, and of reward modelling, ours and TRL's.

python benchmarks/bench_memory.py --trl_python DIR/bin/python [--quick]

DIR is made by `bash benchmarks/make_peer_env.sh trl-1.16 DIR`. Each size is a process of its own that trains
the random Llama of workload.py in fp32 on 4 rows or pairs: after a first short step, which makes the
optimizer's moments, the kernel's peak is reset, and what the measured step adds to resident memory is its
peak: gradients, activations, and what there is of logits. Two thirds of every row are learned; the first
third of a pair's sequences is their common prompt. `labels` is TRL with its output head as it is on a GPU,
where it skips what has no label. Ours cuts its passes by itself; a user of TRL may set micro-batches of one
pair, `trl_accumulating`.

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

    from common.data.global_batches import GlobalBatches
    from common.data.packed_batch import collate_pairs, collate_sft
    from common.engine.ds_config import build_config
    from common.programs import single_model, startup, training_loop
    from common.programs.startup import Start
    from common.ranks import distributed
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
    rows = build_rows(ROWS, length, vocabulary)
    sides = ("chosen_ids", "rejected_ids") if is_reward else ("input_ids",)
    lengths = [tuple(len(row[side]) for side in sides) for row in rows]
    batches = GlobalBatches(rows, collate, rows_per_micro_batch=ROWS, row_lengths=lengths)
    start = Start(args, None, None, ds_config=config)  # type: ignore[arg-type]
    trainer = single_model.build_trainer(kind, start, model, batches, 10**9)
    trainer.logger.open()
    trainer.train_step(1, [collate(build_rows(ROWS, WARM_UP_TOKENS, vocabulary))])
    baseline = start_peak()
    trainer.train_step(2, next(batches))
    peak = peak_since(baseline)
    distributed.stop()
    return peak


def trl_peak(python: str, task: str, length: int, vocabulary: int, **more: Any) -> float:
    """Return the peak of TRL's step in MiB, in a process of its own."""
    sizes = {"batch_size": ROWS, "length": length, "vocabulary": vocabulary}
    with Peer(python, task=task, **sizes | more) as peer:
        return peer.started["peak_bytes"] / MIB


def measure(python: str, length: int, vocabulary: int, *, is_reward: bool = False) -> dict[str, float]:
    """Return the peaks of a size in MiB; TRL's where there is an interpreter."""
    size = {"length": length, "vocabulary": vocabulary}
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        size["ours"] = pool.submit(our_peak, length, vocabulary, is_reward=is_reward).result() / MIB
    task = "reward_memory" if is_reward else "memory"
    if python:
        size["trl"] = trl_peak(python, task, length, vocabulary)
        if is_reward:
            size["trl_accumulating"] = trl_peak(
                python, task, length, vocabulary, batch_size=1, accumulation=ROWS
            )
        else:
            size["trl_labels_only"] = trl_peak(python, task, length, vocabulary, labels_only=True)
    if is_reward:
        return size
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
    ours, trl, accumulating = (reward.get(name, math.nan) for name in ("ours", "trl", "trl_accumulating"))
    print(f"reward model, pairs: ours {ours:.0f}, TRL {trl:.0f}, pair by pair {accumulating:.0f}")
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
