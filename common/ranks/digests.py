"""Digests of what a step computes, by phase: tools/replay.py checks a run with them.

A tensor has two numbers. Its bits: the sum of its 64-bit words modulo 2^64, at the speed of memory; any
changed bit changes it. In a batch each word is multiplied by its odd position, so that an exchange changes it
too. Its total, the norm of floats or the sum of integers, also compares runs on different numbers of ranks.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

Entry = list[Any]  # [bits or None for a number that is not a tensor, total or None]


def word_sum(tensor: torch.Tensor, *, weighs_positions: bool = False) -> torch.Tensor:
    """Sum (int64 scalar, on the tensor's device) of a tensor's 64-bit words, modulo 2^64."""
    flat = tensor.detach().contiguous().view(-1)
    rest = flat.numel() * flat.element_size() % 8
    if rest or flat.storage_offset() * flat.element_size() % 8:
        flat = torch.nn.functional.pad(flat.view(torch.uint8), (0, -rest % 8))
    words = flat.view(torch.int64)
    if weighs_positions:
        words = words * (2 * torch.arange(len(words), device=words.device) + 1)
    return words.sum()


def total_of(tensor: torch.Tensor) -> torch.Tensor:
    """Norm (fp32 or better) of floats or sum (int64) of integers, a scalar on the tensor's device."""
    tensor = tensor.detach()
    if tensor.is_floating_point():  # without a copy of 16-bit ones
        return torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
    return tensor.sum(dtype=torch.int64)


class StepDigests:
    """Digests of this rank in the running step; nothing is recorded unless `is_on`."""

    def __init__(self) -> None:
        self.is_on = False
        self.phases: dict[str, dict[str, Entry]] = {}  # in the order of the step

    def number_phase(self, label: str) -> str:
        """Name of a phase that may occur again in the step: the label and its number, from 1."""
        begin = f"{label} "
        return begin + str(1 + sum(n.startswith(begin) and n.endswith(": gradients") for n in self.phases))

    def add_batches(self, phase: str, batches: Sequence[Any]) -> None:
        """Record the data of PackedBatches, as if they were one."""
        for key in batches[0].data if self.is_on else ():
            data = torch.cat([batch.data[key] for batch in batches])
            lengths = torch.cat([batch.lengths[key] for batch in batches])
            borders = word_sum(lengths, weighs_positions=True).to(data.device)
            bits = 3 * word_sum(data, weighs_positions=True) + borders
            self.phases.setdefault(phase, {})[key] = [bits, total_of(data)]

    def add_tensors(
        self, phase: str, tensors: Iterable[tuple[str, torch.Tensor]], *, without_total: str = ""
    ) -> None:
        """Record tensors by name; the bits alone of those whose names contain `without_total`."""
        for name, tensor in tensors if self.is_on else ():
            total = None if without_total in name else total_of(tensor)
            self.phases.setdefault(phase, {})[name] = [word_sum(tensor), total]

    def add_numbers(self, phase: str, numbers: Mapping[str, float]) -> None:
        """Record numbers that are the same on every rank."""
        for name, number in numbers.items() if self.is_on else ():
            self.phases.setdefault(phase, {})[name] = [None, number]

    def read(self) -> dict[str, dict[str, Entry]]:
        """The phases so far, with numbers in place of tensors; the host waits for a device once per dtype."""
        alike: dict[tuple[Any, ...], list[tuple[Entry, int]]] = defaultdict(list)
        for entry in (entry for phase in self.phases.values() for entry in phase.values()):
            for index, value in enumerate(entry):
                if isinstance(value, torch.Tensor):
                    alike[value.dtype, value.device].append((entry, index))
        for places in alike.values():
            values = torch.stack([entry[index] for entry, index in places]).tolist()
            for (entry, index), value in zip(places, values, strict=True):
                entry[index] = value
        return self.phases


DIGESTS = StepDigests()
