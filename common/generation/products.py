"""Products of the layers of generation: by oneDNN on a CPU, of weights in 4 bits, with adapters beside them.

# r rank, I inputs, O outputs
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from common.models import exact
from common.ranks import distributed


def linear(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As `F.linear`, on a CPU by oneDNN: for the few rows of a token step it reads the same weights up to
    three times as fast as MKL, torch's choice in fp32.
    """
    if exact.is_on():
        return exact.linear(hidden, weight, bias)
    if weight.device.type != "cpu" or not distributed.is_for_onednn(weight.dtype):
        return F.linear(hidden, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(hidden, weight, bias, "none", [], "")


def use_onednn(module: nn.Module) -> None:
    """Make an `nn.Linear` multiply by oneDNN on a CPU."""
    if type(module) is nn.Linear:  # a subclass may compute something else
        module.forward = partial(_forward_by_onednn, module)


def _forward_by_onednn(module: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    return linear(hidden, module.weight, module.bias)


def use_packed_weight(module: nn.Linear) -> None:
    """Make a layer multiply by a weight in 4 bits, whose scales are `module.packing`."""
    module.forward = partial(_forward_of_packed, module)


def _forward_of_packed(module: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    from bitsandbytes import matmul_4bit  # optional dependency

    return matmul_4bit(hidden, module.weight, bias=module.bias, quant_state=module.packing)


def use_adapter(module: nn.Module, groups: "InputGroups") -> None:
    """Make a layer add `module.adapter`, whose factors are attached later."""
    module.adapter = Adapter(groups)
    module.forward = partial(_forward_with_adapter, module, module.forward)


def _forward_with_adapter(
    module: nn.Module, multiply: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor
) -> torch.Tensor:
    return module.adapter.add(multiply(hidden), hidden)


class Adapter(nn.Module):
    """LoRA factors beside a layer's weight, as buffers: `factor_a` (r, I) and `factor_b` (O, r)."""

    def __init__(self, groups: "InputGroups") -> None:
        super().__init__()
        self.register_buffer("factor_a", None, persistent=False)
        self.register_buffer("factor_b", None, persistent=False)
        self.scaling = 0.0
        self.group = AdapterGroup([self])
        self._groups = groups
        self._is_shared = False

    def attach(self, a: torch.Tensor, b: torch.Tensor, scaling: float, *, is_shared: bool) -> None:
        """Use these factors if they are in the trainer's memory (`is_shared`), else copies of them, in memory
        that may have been kept.
        """
        self.scaling = scaling
        self._is_shared = is_shared
        if not self.group.attach(self, a):
            self.factor_a = self._refill(self.factor_a, a)
        self.factor_b = self._refill(self.factor_b, b)

    def _refill(self, kept: torch.Tensor | None, factor: torch.Tensor) -> torch.Tensor:
        if self._is_shared:
            return factor
        return torch.empty_like(factor).copy_(factor) if kept is None else kept.copy_(factor)

    def detach(self, *, keep_slices: bool) -> None:
        """Drop the factors; with `keep_slices` only what is in the trainer's memory."""
        if not keep_slices or self._is_shared:
            self.factor_b = None
        if not keep_slices:
            self.factor_a = self.group.factors = None

    def add(self, output: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """output + s (hidden A^T) B^T (..., O), rounded where PEFT's layer rounds."""
        self._groups.see(self, hidden)
        low = self.group.multiply(self, hidden)
        return (output + linear(low, self.factor_b) * self.scaling).to(output.dtype)


class AdapterGroup:
    """Adapters of layers that read the same input. `join` makes their factors A one matrix: one product."""

    def __init__(self, members: list[Adapter]) -> None:
        self.members = members
        self.factors: torch.Tensor | None = None  # (sum of r, I), whose rows are the members' factors
        self._ranks: list[int] = []  # once joined
        self._hidden: torch.Tensor | None = None  # whose products not all members have used yet
        self._products: dict[Adapter, torch.Tensor] = {}

    def attach(self, member: Adapter, a: torch.Tensor) -> bool:
        """Copy a member's factor A into the matrix of all; return whether there is one."""
        self._products = {}  # a pass may have ended in the middle
        self._hidden = None
        if self._ranks and self.factors is None:
            self._share(a.new_empty(sum(self._ranks), a.shape[1]))
        if self._ranks:
            member.factor_a.copy_(a)
        return bool(self._ranks)

    def join(self) -> None:
        """Put the members' factors side by side."""
        if len(self.members) > 1 and not exact.is_on():  # the trainer multiplies by one after the other
            self._ranks = [len(member.factor_a) for member in self.members]
            with torch.inference_mode(False):  # they are refilled outside of it
                self._share(torch.cat([member.factor_a for member in self.members]))

    def _share(self, factors: torch.Tensor) -> None:
        self.factors = factors
        for member, rows in zip(self.members, factors.split(self._ranks), strict=True):
            member.factor_a = rows

    def multiply(self, member: Adapter, hidden: torch.Tensor) -> torch.Tensor:
        """hidden A^T (..., r) of a member."""
        is_new = hidden is not self._hidden or member not in self._products
        if self._ranks and is_new:
            if self._products:  # a member has not read the last input: they do not always read the same
                self._ranks = []
                self._products = {}
                self._hidden = None
            else:
                products = linear(hidden.to(self.factors.dtype), self.factors).split(self._ranks, dim=-1)
                self._products = dict(zip(self.members, products, strict=True))
                self._hidden = hidden
        if not self._ranks:
            return linear(hidden.to(member.factor_a.dtype), member.factor_a)
        low = self._products.pop(member)
        if not self._products:
            self._hidden = None
        return low


class InputGroups:
    """Finds out, in the first pass, which adapters of a model read the same input, and joins them."""

    def __init__(self, model: nn.Module) -> None:
        self._seen: dict[Adapter, None] | None = {}  # None: the first pass is over
        self._last: tuple[torch.Tensor, AdapterGroup] | None = None
        self._end_of_pass = model.register_forward_hook(self._join)

    def see(self, adapter: Adapter, hidden: torch.Tensor) -> None:
        """Note that `adapter` reads `hidden`."""
        if self._seen is None or adapter in self._seen:
            return
        if self._last and hidden is self._last[0]:
            adapter.group = self._last[1]
            adapter.group.members.append(adapter)
        self._seen[adapter] = None
        self._last = hidden, adapter.group

    def _join(self, *_: object) -> None:
        for group in {adapter.group for adapter in self._seen}:
            group.join()
        self._seen = self._last = None
        self._end_of_pass.remove()
