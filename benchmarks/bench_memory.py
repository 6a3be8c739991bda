#!/usr/bin/env python
"""Peak memory of an SFT step against length and vocabulary, ours and TRL's.

python benchmarks/bench_memory.py --trl_python DIR/bin/python [--quick]

DIR is made by `bash benchmarks/make_peer_env.sh trl-1.16 DIR`. Each size is a process of its own that trains
4 rows of the random Llama of workload.py in fp32: after a first short step, which makes the optimizer's
moments, the kernel's peak is reset, and what the measured step adds to resident memory is its peak:
gradients, activations, and what there is of logits. Two thirds of every row are learned. `labels` is TRL with
its output head as it is on a GPU, where it skips what has no label.

The last line is a JSON object; `ratio` is TRL's peak over ours at the largest size. `growth` is what the peak
grows by from the smallest vocabulary to the largest at the longest length, beside what the logits of all
positions would take.
"""

import math
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from benchmarks.measuring import Peer, peak_since, print_result, read_args, start_peak
from benchmarks.workload import WARM_UP_TOKENS, memory_rows, small_llama_config

ROWS = 4
WAYS = ("ours", "trl", "trl_labels_only", "logits")
LENGTHS, VOCABULARIES = (256, 512, 1024), (8192, 32000, 128000)
QUICK_LENGTHS, QUICK_VOCABULARIES = (64,), (8192,)
MIB = 2**20


def our_peak(length: int, vocabulary: int) -> int:
    """Return the peak bytes of our step in this process, which must be a new one."""
    import torch
    from transformers import LlamaForCausalLM

    from common.data.packed_batch import collate_sft
    from common.engine.ds_config import build_config, build_engine
    from common.models.policy_model import PolicyModel
    from common.programs import startup
    from common.ranks import distributed
    from common.runs.run_logger import RunLogger
    from step1_sft.arguments import SFTArguments
    from step1_sft.sft_trainer import SFTTrainer

    startup.quiet_libraries()
    distributed.start()
    args = SFTArguments(lr_scheduler_type="constant", log_interval=10**9)
    torch.manual_seed(0)
    model = LlamaForCausalLM(small_llama_config(vocab_size=vocabulary))
    policy = PolicyModel(model, num_valid_tokens=vocabulary)
    engine = build_engine(policy, build_config(micro_batch_size=ROWS), args, 1)
    trainer = SFTTrainer(engine, args, is_packed=False, logger=RunLogger(args, (), 10**9))
    first, measured = (
        collate_sft(memory_rows(ROWS, num_tokens, vocabulary)) for num_tokens in (WARM_UP_TOKENS, length)
    )
    trainer.train_step(1, [first])
    baseline = start_peak()
    trainer.train_step(2, [measured])
    peak = peak_since(baseline)
    distributed.stop()
    return peak


def trl_peak(python: str, length: int, vocabulary: int, *, labels_only: bool) -> int:
    """Return the peak bytes of TRL's step, in a process of its own."""
    sizes = {"batch_size": ROWS, "length": length, "vocabulary": vocabulary}
    with Peer(python, task="memory", labels_only=labels_only, **sizes) as peer:
        return peer.started["peak_bytes"]


def measure(python: str, length: int, vocabulary: int) -> dict[str, float]:
    """Return the peaks of a size in MiB; TRL's where there is an interpreter."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        size = {"ours": pool.submit(our_peak, length, vocabulary).result() / MIB}
    if python:
        size["trl"] = trl_peak(python, length, vocabulary, labels_only=False) / MIB
        size["trl_labels_only"] = trl_peak(python, length, vocabulary, labels_only=True) / MIB
    return (
        {"length": length, "vocabulary": vocabulary} | size | {"logits": ROWS * length * vocabulary * 4 / MIB}
    )


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
    at_longest = found[-len(vocabularies) :]
    growth = {name: at_longest[-1][name] - at_longest[0][name] for name in WAYS if name in found[0]}
    print_result(
        "memory",
        found[-1]["ours"],
        found[-1].get("trl"),
        is_lower_better=True,
        runs=1,
        unit="MiB",
        growth=growth,
        sizes=found,
    )


if __name__ == "__main__":
    main()
