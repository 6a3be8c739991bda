"""digests.jsonl: the digests of every step on all ranks, one line a step.

    {"step": 5, "names": {"0.2": ["response_ids", ...]}, "ranks": [{"rollout": ["0.2", "9f86...", [71]]}]}

A phase has the key of its names, which the line that first needs them defines, their bits as 16 hexadecimal
digits each ("-" x 16 for a number that is not a tensor), and their totals.
"""

from collections.abc import Mapping
from typing import Any

from common.ranks import distributed
from common.ranks.digests import DIGESTS, Entry
from common.ranks.step_costs import COSTS
from common.ranks.zero3 import local_shard
from common.runs.run_logger import RunLogger
from common.runs.saved_state import Stateful

NO_BITS = "-" * 16


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
                    parameters = part.engine.module.named_parameters()
                    half = (
                        (parameter_name, local_shard(parameter))
                        for parameter_name, parameter in parameters
                        if parameter.requires_grad and parameter.element_size() == 2
                    )
                    DIGESTS.add_tensors(f"16-bit weights of {name}", half)
            known = set(self.names.values())
            phases = {phase: self._pack(entries) for phase, entries in DIGESTS.read().items()}
            names = {key: names for names, key in self.names.items() if key not in known}
            gathered = distributed.gather_objects((names, phases))
            names = {key: names for rank_names, _ in gathered for key, names in rank_names.items()}
            ranks = [rank_phases for _, rank_phases in gathered]
            self.logger.digests(step, names=names, ranks=ranks)
        DIGESTS.phases = {}
        DIGESTS.is_on = False

    def _pack(self, entries: Mapping[str, Entry]) -> list[Any]:
        key = self.names.setdefault(tuple(entries), f"{distributed.rank()}.{len(self.names)}")
        bits = (NO_BITS if bits is None else f"{bits % 2**64:016x}" for bits, _ in entries.values())
        return [key, "".join(bits), [total for _, total in entries.values()]]

    def pending(self) -> list[dict[str, Any]]:
        """The phases of an unfinished step, by rank, for a checkpoint."""
        return distributed.gather_objects(DIGESTS.read())

    def restore(self, pending: list[dict[str, Any]]) -> None:
        """Continue with the phases of a checkpoint; those of other ranks are dropped."""
        if len(pending) == distributed.world_size():
            DIGESTS.phases = pending[distributed.rank()]
