"""Moves weights from training shards (ZeRO stage 3) to tensor-parallel slices, as reshard_plan.py says.

Each rank receives only what it lacks; weights that are whole on every rank are cut where they are.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from common.generation.reshard_plan import (
    Route,
    TPLayout,
    WeightPlan,
    group_by_layers,
    pack_blocks,
    plan_weight,
    unpack_blocks,
    unpack_whole,
)
from common.generation.tp_plans import Cut
from common.models.lora import TrainedWeight
from common.ranks import distributed
from common.ranks.zero3 import is_sharded


class TPGroups:
    """The process groups of a layout. Every rank must make this together.

    `tp_group` is None where every rank has the whole model, `gather_group` where no two have the same slice.
    """

    def __init__(self, layout: TPLayout) -> None:
        self.tp_group = dist.group.WORLD if layout.gather_size == 1 < layout.tp_size else None
        self.gather_group = dist.group.WORLD if layout.tp_size == 1 < layout.gather_size else None
        if 1 < layout.tp_size < layout.world_size:
            mesh = DeviceMesh(distributed.device().type, layout.ranks, mesh_dim_names=("slice", "replica"))
            self.tp_group, self.gather_group = mesh.get_group("slice"), mesh.get_group("replica")


@dataclass
class SwitchCosts:
    """What the last change to generate mode took, on this rank."""

    received_bytes: int = 0

    def metrics(self) -> dict[str, float]:
        """Return it under the name of the log."""
        return {"hybrid/received_gib": self.received_bytes / 2**30}

    def state_dict(self) -> dict[str, int]:
        """Return it for a checkpoint: a resumed step logs the switch that was made before."""
        return {"received_bytes": self.received_bytes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take what `state_dict` gave."""
        self.received_bytes = state["received_bytes"]


# A parameter of the trainer and how it gets to its slices.
Source = tuple[nn.Parameter, WeightPlan]


class Resharder:
    """Moves the trainer's weights into tensor-parallel slices. Every rank must make and use it together.

    `weights` are the trainer's by name, sharded or whole, in the same order on all ranks; `cuts` names those
    that are cut; `gather_partition_size` layers are moved at a time. `costs` are those of the last load.
    """

    def __init__(
        self,
        weights: dict[str, TrainedWeight],
        cuts: dict[str, Cut],
        layout: TPLayout,
        groups: TPGroups,
        *,
        gather_partition_size: int,
    ) -> None:
        self.costs = SwitchCosts()
        self._weights, self._layout, self._groups = weights, layout, groups
        self._sources: dict[str, list[Source]] = {}
        for name, weight in weights.items():
            of_tensor = [cuts.get(name), None, None]  # the factors of an adapter are never cut
            self._sources[name] = [
                (p, plan_weight(tuple(getattr(p, "ds_shape", p.shape)), cut, layout))
                for p, cut in zip(weight.tensors(), of_tensor, strict=False)
            ]
        self._name_groups = group_by_layers(list(weights), gather_partition_size)
        self._staging: dict[str, torch.Tensor] = {}

    def load(self) -> Iterator[tuple[str, TrainedWeight]]:
        """Yield (name, this rank's slice of the weight, with its whole adapter) for every weight.

        A tensor that lies in the trainer's own memory is a view of it: read it, and fetch it anew after an
        update. All others are contiguous and the caller's own. Every rank must call and exhaust this.
        """
        self.costs = SwitchCosts()
        for names in self._name_groups:
            tensors = deque(self._load_group([source for name in names for source in self._sources[name]]))
            for name in names:
                loaded = [tensors.popleft() for _ in self._sources[name]]
                yield name, self._weights[name].replace_tensors(loaded)

    def release(self) -> None:
        """Free the staging buffers; the next load makes new ones."""
        self._staging.clear()

    @torch.no_grad()
    def _load_group(self, sources: list[Source]) -> list[torch.Tensor]:
        """Return the slices of sources that are moved together, in their order."""
        slices: dict[int, torch.Tensor] = {}
        sent: dict[tuple[Route, torch.dtype], list[int]] = {}
        for index, (parameter, plan) in enumerate(sources):
            is_here = getattr(parameter, "ds_status", None) is ZeroParamStatus.AVAILABLE
            if is_here or not is_sharded(parameter):  # every rank has all of it at this moment
                whole, tp_rank = parameter.data, plan.layout.tp_rank
                slices[index] = whole if plan.cut is None else plan.cut.take(whole, tp_rank).contiguous()
            elif plan.is_view:
                slices[index] = _fetch_shard(parameter).view(plan.local_shape)
            else:
                sent.setdefault((plan.route, parameter.dtype), []).append(index)
        ways = {Route.BLOCKS: self._exchange_blocks, Route.WHOLE: self._gather_packed}
        for (route, dtype), indices in sent.items():
            plans = [sources[index][1] for index in indices]
            shards = [_fetch_shard(sources[index][0]) for index in indices]
            slices |= zip(indices, ways.get(route, self._gather_straight)(plans, shards), strict=True)
            self.costs.received_bytes += sum(plan.count_received() for plan in plans) * dtype.itemsize
        return [slices[index] for index in range(len(sources))]

    def _gather_straight(self, plans: list[WeightPlan], shards: list[torch.Tensor]) -> list[torch.Tensor]:
        slices, under_way = [], []
        for plan, shard in zip(plans, shards, strict=True):
            slices.append(shard.new_empty(plan.local_shape))
            group = self._groups.gather_group if plan.route is Route.ROWS else dist.group.WORLD
            work = dist.all_gather_into_tensor(slices[-1].view(-1), shard, group=group, async_op=True)
            under_way.append(work)
        for work in under_way:
            work.wait()
        return slices

    def _gather_packed(self, plans: list[WeightPlan], shards: list[torch.Tensor]) -> list[torch.Tensor]:
        send = self._stage("send", sum(shard.numel() for shard in shards), shards[0])
        received = self._stage("receive", send.numel() * self._layout.world_size, send)
        torch.cat(shards, out=send)
        dist.all_gather_into_tensor(received, send)
        columns = received.view(self._layout.world_size, -1).split([plan.shard_size for plan in plans], dim=1)
        return [unpack_whole(plan, column) for plan, column in zip(plans, columns, strict=True)]

    def _exchange_blocks(self, plans: list[WeightPlan], shards: list[torch.Tensor]) -> list[torch.Tensor]:
        rank, ranks = self._layout.rank, range(self._layout.world_size)
        send_sizes = [sum(plan.count_elements(rank, other) for plan in plans) for other in ranks]
        receive_sizes = [sum(plan.count_elements(other, rank) for plan in plans) for other in ranks]
        send = self._stage("send", sum(send_sizes), shards[0])
        received = self._stage("receive", sum(receive_sizes), send)
        pack_blocks(plans, shards, send)
        if self._layout.world_size > 1:
            dist.all_to_all_single(received, send, receive_sizes, send_sizes)
        slices = [send.new_empty(plan.local_shape) for plan in plans]
        unpack_blocks(plans, shards, received, slices)
        return slices

    def _stage(self, role: str, numel: int, like: torch.Tensor) -> torch.Tensor:
        """Return a flat buffer, kept for the next group and the next load: memory that is not moved."""
        num_bytes = numel * like.element_size()
        if role in self._staging and self._staging[role].nbytes < num_bytes:
            del self._staging[role]
        if role not in self._staging:
            self._staging[role] = like.new_empty(num_bytes, dtype=torch.uint8)
        return self._staging[role][:num_bytes].view(like.dtype)


def _fetch_shard(parameter: nn.Parameter) -> torch.Tensor:
    """Return the shard on the compute device: one that lives on the CPU is copied."""
    return parameter.ds_tensor.detach().to(distributed.device())
