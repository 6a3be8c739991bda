#!/usr/bin/env python
"""Peak memory of an SFT step against length and vocabulary, ours and TRL's.

python benchmarks/bench_memory.py --trl_python DIR/bin/python [--quick]

DIR is made by `bash benchmarks/make_peer_env.sh trl-1.16 DIR`. Each size is a process of its own that trains
4 rows of the random Llama of chat_rows.py in fp32: after a first short step, which makes the optimizer's
moments, the kernel's peak is reset, and what the measured step adds to resident memory is its peak:
gradients, activations, and what there is of logits. Two thirds of every row are learned. `labels` is TRL with
its output head as it is on a GPU, where it skips what has no label.

The last line is a JSON object; `ratio` is TRL's peak over ours at the largest size. `growth` is what the peak
grows by from the smallest vocabulary to the largest at the longest length, beside what the logits of all
positions would take.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path

if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from benchmarks.peer_process import (
    OF_OUR_GROUP,
    WARM_UP_TOKENS,
    PeerProcess,
    leave_out,
    peak_since,
    start_peak,
)

ROWS = 4
WAYS = ("ours", "trl", "trl_labels_only", "logits")
LENGTHS, VOCABULARIES = (256, 512, 1024), (8192, 32000, 128000)
QUICK_LENGTHS, QUICK_VOCABULARIES = (64,), (8192,)


def measure_here(length: int, vocabulary: int) -> int:
    """Return the peak bytes of our step in this process."""
    import torch
    from transformers import LlamaForCausalLM

    from benchmarks.bench_train import SilentLogger, engine_of
    from benchmarks.chat_rows import FIRST_ID, small_llama_config
    from common.data.collators import collate_sft
    from common.data.packed_batch import PackedBatch
    from common.models.policy_model import PolicyModel
    from common.programs import startup
    from common.ranks import distributed
    from step1_sft.sft_trainer import SFTTrainer

    startup.quiet_libraries()
    distributed.start()
    torch.manual_seed(0)
    model = LlamaForCausalLM(small_llama_config(vocab_size=vocabulary))
    engine = engine_of(PolicyModel(model, num_valid_tokens=vocabulary))
    trainer = SFTTrainer(engine, is_packed=False, logger=SilentLogger())

    def batch(num_tokens: int, num_prompt: int) -> PackedBatch:
        rows = torch.randint(FIRST_ID, vocabulary, (ROWS, num_tokens)).tolist()
        mask = [False] * num_prompt + [True] * (num_tokens - num_prompt)
        return collate_sft([{"input_ids": r, "loss_mask": mask, "row_id": ""} for r in rows])

    trainer.train_step(1, [batch(WARM_UP_TOKENS, 1)])
    measured = batch(length, length // 3)
    baseline = start_peak()
    trainer.train_step(2, [measured])
    peak = peak_since(baseline)
    distributed.stop()
    return peak


def measure_ours(length: int, vocabulary: int) -> int:
    """Return the peak bytes of our step, in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name not in OF_OUR_GROUP}
    words = ["--here", str(length), str(vocabulary)]
    done = subprocess.run(
        [sys.executable, __file__, *words], env=environment, check=True, capture_output=True, text=True
    )
    return int(done.stdout.splitlines()[-1])


def measure_trl(python: str, length: int, vocabulary: int, *more: str) -> int:
    """Return the peak bytes of TRL's step, in a process of its own."""
    words = ["memory", "--batch_size", ROWS, "--length", length, "--vocabulary", vocabulary]
    script = Path(__file__).with_name("trl_train_peer.py")
    with PeerProcess(python, script, [*map(str, words), *more]) as peer:
        return peer.started["peak_bytes"]


def main() -> None:
    """Measure all sizes, or one of ours."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl_python", default="", help="interpreter of an environment with TRL 1.16")
    parser.add_argument("--quick", action="store_true", help="one small size; TRL may be left out")
    parser.add_argument("--here", nargs=2, type=int, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        print(measure_here(*args.here))
        return
    is_alone = leave_out(parser, args, "trl-1.16")
    lengths = QUICK_LENGTHS if args.quick else LENGTHS
    vocabularies = QUICK_VOCABULARIES if args.quick else VOCABULARIES
    mib = 2**20
    found = []
    print(f"{ROWS} rows, MiB       ours     TRL  labels  logits of all positions")
    for length in lengths:
        for vocabulary in vocabularies:
            ours = measure_ours(length, vocabulary) / mib
            size = {"length": length, "vocabulary": vocabulary, "ours": ours}
            if not is_alone:
                size["trl"] = measure_trl(args.trl_python, length, vocabulary) / mib
                labels = measure_trl(args.trl_python, length, vocabulary, "--labels_only")
                size["trl_labels_only"] = labels / mib
            size["logits"] = ROWS * length * vocabulary * 4 / mib
            found.append(size)
            shown = [size.get(name, math.nan) for name in WAYS]
            print(f"{length:>5} x {vocabulary:<8}{''.join(f'{mib:>8.0f}' for mib in shown)}", flush=True)
    at_longest = found[-len(vocabularies) :]
    growth = {name: at_longest[-1][name] - at_longest[0][name] for name in WAYS if name in found[0]}
    result = {
        "name": "memory",
        "device": "cpu",
        "threads": os.cpu_count(),
        "ours": found[-1]["ours"],
        "peer": None if is_alone else found[-1]["trl"],
        "ratio": None if is_alone else round(found[-1]["trl"] / found[-1]["ours"], 4),
        "runs": 1,
        "unit": "MiB",
        "growth": growth,
        "sizes": found,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
