#!/usr/bin/env python
"""TRL's SFTTrainer as the peer of bench_memory.py: the memory of one step. Run by TRL 1.16's Python.

DIR/bin/python benchmarks/trl_memory_peer.py --rows 8 --length 512 --vocabulary 32000

A process for each size. A first step of short rows makes the optimizer's moments and loads what is loaded
late; then what is free goes back to the system, the peak is reset, and the measured step follows: forward,
backward, clipping, AdamW, fp32. So `peak_bytes` holds gradients, activations and logits, not weights and
moments. One JSON line: peak_bytes, baseline_bytes (weights, moments, libraries), peak_was_reset, seconds,
loss. PeerProcess.start() returns it.

`start_peak` and `peak_since` are for our side too: they need no TRL.
"""

import argparse
import ctypes
import gc
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from benchmarks.peer_process import Turns

WARM_UP_TOKENS = 8


class Baseline(NamedTuple):
    """Where a measurement of memory begins."""

    resident_bytes: int
    was_reset: bool  # else the peak is that of the whole process so far: a lower one cannot be seen


def start_peak() -> Baseline:
    """Give free memory back to the system, reset the kernel's peak, return what is resident; Linux only."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc
        libc.malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
        was_reset = True
    except OSError:
        was_reset = False
    return Baseline(_status_bytes("VmRSS"), was_reset)


def peak_since(baseline: Baseline) -> int:
    """Return the bytes by which resident memory rose above the baseline at its highest."""
    return _status_bytes("VmHWM") - baseline.resident_bytes


def _status_bytes(name: str) -> int:
    """Return a line of /proc/self/status in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)[1]) * 1024


def build_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the short rows of the first step, then those of the measured one."""
    import torch

    from benchmarks.chat_rows import FIRST_ID

    generator = torch.Generator().manual_seed(args.seed)
    rows = []
    for length, prompt in ((WARM_UP_TOKENS, 1), (args.length, args.prompt_tokens)):
        ids = torch.randint(FIRST_ID, args.vocabulary, (args.rows, length), generator=generator)
        mask = [0] * prompt + [1] * (length - prompt)
        rows += [{"input_ids": row, "completion_mask": mask} for row in ids.tolist()]
    return rows


def build_meter(turns: Turns, found: dict[str, Any], facts: dict[str, Any]) -> Any:
    """Return a callback that measures from the end of the first step to that of the second."""
    import time

    from transformers import TrainerCallback

    class Meter(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                self.baseline, self.began = start_peak(), time.perf_counter()
                return
            peak = peak_since(self.baseline)
            turns.ready(
                peak_bytes=peak,
                baseline_bytes=self.baseline.resident_bytes,
                peak_was_reset=self.baseline.was_reset,
                seconds=time.perf_counter() - self.began,
                loss=float(found["losses"][-1]),
                **facts,
            )

    return Meter()


def main() -> None:
    """Measure one step."""
    turns = Turns()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, required=True, help="rows of the step")
    parser.add_argument("--length", type=int, required=True, help="tokens of each row")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument(
        "--prompt_tokens", type=int, default=0, help="tokens of each row that are not learned"
    )
    parser.add_argument(
        "--labels_only", action="store_true", help="score as TRL does on a GPU: trl_sft_peer.py"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    import torch
    import transformers
    import trl
    from datasets import Dataset

    from benchmarks.chat_rows import small_llama_config
    from benchmarks.ppo_models import build_tokenizer
    from benchmarks.trl_sft_peer import score_labels_only, training_options, watch_steps

    if args.labels_only:
        score_labels_only()
    torch.manual_seed(args.seed)
    config = small_llama_config(vocab_size=args.vocabulary, max_position_embeddings=max(2048, args.length))
    found: dict[str, Any] = {"losses": [], "padded_tokens": 0}
    facts = {
        "trl": trl.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "rows": args.rows,
        "length": args.length,
        "vocabulary": args.vocabulary,
        "labels_only": args.labels_only,
    }
    same = argparse.Namespace(batch_size=args.rows, accumulation=1, learning_rate=1e-5, seed=args.seed)
    with tempfile.TemporaryDirectory() as output_dir:
        options = training_options(output_dir, same) | {"num_train_epochs": 1}
        trainer = trl.SFTTrainer(
            model=transformers.LlamaForCausalLM(config),
            args=trl.SFTConfig(
                **options,
                train_sampling_strategy="sequential",
                max_length=args.length,
                completion_only_loss=True,
            ),
            train_dataset=Dataset.from_list(build_rows(args)),
            processing_class=build_tokenizer(),
            callbacks=[build_meter(turns, found, facts)],
        )
        watch_steps(trainer, found)
        trainer.train()


if __name__ == "__main__":
    main()
