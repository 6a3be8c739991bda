"""Costs of a step: seconds, tokens, FLOPs and a GPU's memory of each phase."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator

import torch


class StepCosts:
    """The timers of this process: `watchdog.phase` runs them; a program reads them once per step.

    Time inside a nested timer counts for the outer one only: generation during an evaluation is evaluation.
    The phases of a step and the rest add up to its seconds. Costs between two steps, or in a skipped step,
    are reported with the next step. `peak_flops`: FLOP/s of the device; 0: unknown.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self.peak_flops = 0.0
        self.seconds, self.tokens = Counter(), Counter()  # by phase, on this rank
        self.peaks = Counter()  # bytes of a GPU by phase
        self.peak = 0  # bytes of a GPU, of the whole run
        self._running = ""
        self.begin_step()

    @contextlib.contextmanager
    def clock(self, name: str) -> Iterator[None]:
        """Count the seconds of the block for the phase `name`."""
        if self._running:
            yield
            return
        self._running, started = name, self.now()
        self.take_peak()  # of what came before
        try:
            yield
        finally:
            if torch.cuda.is_initialized():
                # The GPU runs asynchronously: without this synchronisation its work would count for the next
                # phase. Once per phase, never per micro-batch: results are read after a phase anyway.
                with contextlib.suppress(RuntimeError):  # a failed device has already raised
                    torch.cuda.synchronize()
                self.peaks[name] = max(self.peaks[name], self.take_peak())
            spent = self.now() - started
            self.seconds[name] += spent
            self._spent += spent
            self._running = ""

    def take_peak(self) -> int:
        """Largest number of bytes on the GPU since the last call; 0 without a GPU."""
        if not torch.cuda.is_initialized():
            return 0
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.peak = max(self.peak, peak)
        return peak

    def count(self, tokens: int, flops: float) -> None:
        """Add work to the running timer; without one it belongs to no step."""
        if self._running:
            self.tokens[self._running] += tokens
            self.flops += flops

    def move(self, seconds: float, source: str, target: str) -> None:
        """Move seconds of the timer `source`, if it is running, to the phase `target`."""
        if self._running == source:
            self.seconds[source] -= seconds
            self.seconds[target] += seconds

    def begin_step(self) -> None:
        """Start the clock of a step."""
        self._started = self.now()
        self._spent = 0.0
        self.flops = 0.0

    def end_step(self, num_ranks: int = 1) -> dict[str, float]:
        """Metrics of the step under their log names.

        Tokens per second are this rank's times `num_ranks`. mfu (model FLOPs utilisation, arXiv:2204.02311
        appendix B) is this rank's FLOPs divided by the peak of its device in the step's seconds.
        """
        seconds = self.now() - self._started
        metrics = {"perf/step_seconds": seconds, "perf/rest_seconds": seconds - self._spent}
        if self.peak_flops and seconds:
            metrics["perf/mfu"] = self.flops / (seconds * self.peak_flops)
        for name, spent in self.seconds.items():
            metrics[f"perf/{name}_seconds"] = spent
            if self.tokens[name] and spent:
                metrics[f"perf/{name}_tokens_per_second"] = self.tokens[name] * num_ranks / spent
        metrics |= {f"perf/{name}_peak_gib": peak / 2**30 for name, peak in self.peaks.items()}
        self.seconds, self.tokens, self.peaks = Counter(), Counter(), Counter()
        return metrics


COSTS = StepCosts()
