"""What a run shows: one line a step, a progress bar, metrics.jsonl, TensorBoard, samples.jsonl, curves.png.

Only the first process prints and writes; on the others every call does nothing.
"""

import json
import math
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from common import distributed
from common.plots import plot_curves


class RunLogger:
    """The one place a program's numbers go to.

    `columns` are the metric names of the console line, in order; metrics.jsonl has all of them.
    """

    def __init__(
        self,
        output_dir: str,
        *,
        columns: Sequence[str],
        num_steps: int,
        log_interval: int = 1,
        tensorboard_dir: str | None = None,
    ) -> None:
        groups = {name.split("/")[0] + "/" for name in columns} - {"perf/"}
        self.prefix = groups.pop() if len(groups) == 1 else ""  # steps 1 and 2 have one kind of number each
        self.columns, self.log_interval, self.num_steps = list(columns), log_interval, num_steps
        self.is_on = distributed.is_main()
        self.folder = Path(output_dir) if output_dir and self.is_on else None
        self.started = time.monotonic()
        self.bar: tqdm | None = None
        self.writer: Any = None
        self._files: dict[str, Any] = {}
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "metrics.jsonl").write_text("")  # a new run: --overwrite_output_dir was asked for
            (self.folder / "samples.jsonl").unlink(missing_ok=True)
        if self.is_on and sys.stderr.isatty():
            self.bar = tqdm(total=num_steps, unit="step", dynamic_ncols=True, leave=False)
        if tensorboard_dir and self.is_on:
            from torch.utils.tensorboard import SummaryWriter  # slow to import, rarely asked for

            self.writer = SummaryWriter(tensorboard_dir)

    def note(self, text: str) -> None:
        """Print a line above the progress bar."""
        if self.is_on:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one step's numbers everywhere; `step` counts from 1."""
        if not self.is_on:
            return
        metrics = {**metrics, "perf/peak_memory_gib": peak_memory_gib()}
        row = {"step": step, "seconds": round(time.monotonic() - self.started, 3), **metrics}
        self._append("metrics.jsonl", row)
        if self.writer:
            for name, value in metrics.items():
                self.writer.add_scalar(name, value, step)
        if self.bar is not None:
            self.bar.update(step - self.bar.n)
        if step % self.log_interval == 0 or step == self.num_steps:
            shown = [name for name in self.columns if name in metrics]
            cells = [f"{name.removeprefix(self.prefix)} {_short(metrics[name])}" for name in shown]
            self.note(f"step {step:>5}/{self.num_steps}  " + "  ".join(cells))

    def log_event(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write numbers that come now and then (an evaluation), with a line of their own."""
        if not self.is_on:
            return
        self._append("metrics.jsonl", {"step": step, **metrics})
        if self.writer:
            for name, value in metrics.items():
                self.writer.add_scalar(name, value, step)
        self.note(
            f"step {step:>5}/{self.num_steps}  " + "  ".join(f"{n} {_short(v)}" for n, v in metrics.items())
        )

    def sample(self, step: int, **fields: Any) -> None:
        """Write one sample answer to samples.jsonl."""
        if self.is_on:
            self._append("samples.jsonl", {"step": step, **fields})

    def write_json(self, name: str, text: str) -> None:
        """Write a file of the run, such as its arguments."""
        if self.folder:
            (self.folder / name).write_text(text + "\n")

    def close(self) -> None:
        """Close the files and draw curves.png from metrics.jsonl."""
        for file in self._files.values():
            file.close()
        if self.bar is not None:
            self.bar.close()
        if self.writer:
            self.writer.close()
        if self.folder:
            plot_curves(self.folder / "metrics.jsonl", self.folder / "curves.png")

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        if self.folder is None:
            return
        if name not in self._files:
            self._files[name] = open(
                self.folder / name, "a", buffering=1, encoding="utf-8"
            )  # a line at a time
        # JSON has no word for infinity (the gradient norm of a step that fp16 skips) or NaN.
        row = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._files[name].write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")


def peak_memory_gib() -> float:
    """Return the most memory this process has held so far: the GPU's if there is one, else resident."""
    if distributed.has_gpu():
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def _short(value: float) -> str:
    if isinstance(value, int):
        return f"{value:>6}"
    return f"{value:>8.2e}" if value and (abs(value) < 1e-3 or abs(value) >= 1e5) else f"{value:>8.4f}"
