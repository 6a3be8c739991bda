"""digests.jsonl.gz: the digests of every step on all ranks, one line and gzip member a step.

    {"step": 5, "ranks": [[{"0.2": ["response_ids", ...]}, {"rollout": ["0.2", "9f86d081...", [71]]}], ...]}

A rank has names by key, which it has not written before, and phases. A phase has the key of its names, their
bits as 8 hexadecimal digits each ("-" x 8 for a number that is not a tensor), and their totals: of a tensor
with 6 digits.
"""

from collections.abc import Mapping
from typing import Any

from common.ranks import distributed
from common.ranks.digests import DIGESTS, Entry
from common.ranks.step_costs import COSTS
from common.ranks.zero3 import local_shard
from common.runs.run_logger import RunLogger
from common.runs.saved_state import Stateful

NO_BITS = "-" * 8
MIX = 0x9E3779B97F4A7C15  # odd: the upper half of a product changes with any bit of the other factor


class DigestLog:
    """Records the steps that --digest_interval selects. Every rank must call all methods."""

    def __init__(self, interval: int, logger: RunLogger, parts: Mapping[str, Stateful]) -> None:
        self.interval = interval
        self.logger = logger
        self.parts = parts
        self.names: dict[tuple[str, ...], str] = {}  # names of a phase's entries -> their key in the file
        DIGESTS.phases = {}

    def begin(self, step: int) -> None:
        """Record the step, or not."""
        DIGESTS.is_on = self.interval > 0 and step % self.interval == 0

    def write(self, step: int) -> None:
        """Add the state after the step, and write its line."""
        if not DIGESTS.is_on:
            return
        with COSTS.clock("digests"):
            for name, part in self.parts.items():
                slices = ((f"{one.key}@{one.start}", one.tensor) for one in part.tensor_slices())
                DIGESTS.add_tensors(f"state of {name}", slices, without_total=":exp_avg")
                if hasattr(part, "engine"):
                    half = (
                        (parameter_name, local_shard(parameter))
                        for parameter_name, parameter in part.engine.module.named_parameters()
                        if parameter.requires_grad and parameter.element_size() == 2
                    )
                    DIGESTS.add_tensors(f"16-bit weights of {name}", half)
            known = set(self.names.values())
            phases = {phase: self._pack(entries) for phase, entries in DIGESTS.read().items()}
            names = {key: names for names, key in self.names.items() if key not in known}
            self.logger.digests(step, ranks=distributed.gather_objects([names, phases]))
        DIGESTS.phases = {}
        DIGESTS.is_on = False

    def _pack(self, entries: Mapping[str, Entry]) -> list[Any]:
        key = self.names.setdefault(tuple(entries), f"{distributed.rank()}.{len(self.names)}")
        packed = [_shorten(*entry) for entry in entries.values()]
        return [key, "".join(bits for bits, _ in packed), [total for _, total in packed]]

    def pending(self) -> list[dict[str, Any]]:
        """The phases of an unfinished step, by rank, for a checkpoint."""
        return distributed.gather_objects(DIGESTS.read())

    def restore(self, pending: list[dict[str, Any]]) -> None:
        """Continue with the phases of a checkpoint; those of other ranks are dropped."""
        if len(pending) == distributed.world_size():
            DIGESTS.phases = pending[distributed.rank()]


def _shorten(bits: int | None, total: float | None) -> tuple[str, float | None]:
    """Bits as text, and the total with 6 digits; a number without bits must be equal to the last digit."""
    if bits is None:
        return NO_BITS, total
    return f"{bits * MIX % 2**64 >> 32:08x}", float(f"{total:.6g}") if isinstance(total, float) else total
