"""From training shards (ZeRO stage 3) to tensor-parallel slices: each rank receives only what it lacks.

# N ranks, t tensor-parallel size, M bytes of weights

Ranks [j*N/t, (j+1)*N/t) are the gather group of tp_rank j, and a tensor-parallel group takes one rank of
each. So a weight cut by rows needs no other ranks than the gather group: their flat shards, laid end to end,
*are* slice j. A rank receives, of the bytes of a weight that is cut

    by rows        (N-t)/(N t)     the other shards of its slice
    by columns     (N-1)/(N t)     its columns of everybody's rows
    not at all     (N-1)/N         (shards are padded to equal length: up to N-1 elements more)

where gathering everything would be (N-1)/N of M.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

from common.generation.reshard_plan import (
    Route,
    TPLayout,
    WeightPlan,
    group_by_layers,
    pack_pieces,
    plan_weight,
    unpack_pieces,
    unpack_whole,
)
from common.generation.tp_plans import Cut
from common.ranks import distributed
from common.ranks.zero3 import is_sharded


class TPGroups:
    """The process groups of a layout, None for a group of one. Every rank must make this together."""

    def __init__(self, layout: TPLayout) -> None:
        self.tp_group = _join_group(layout.all_tp_groups, layout)
        self.gather_group = _join_group(layout.all_gather_groups, layout)


def _join_group(groups: list[list[int]], layout: TPLayout) -> dist.ProcessGroup | None:
    if len(groups[0]) == 1:
        return None
    if len(groups) == 1:
        return dist.group.WORLD
    made = {tuple(ranks): dist.new_group(ranks) for ranks in groups}
    return next(group for ranks, group in made.items() if layout.rank in ranks)


@dataclass
class Traffic:
    """One rank's share of one switch. `peak_bytes` is the most that was held on the compute device at once:
    the trainer's shards, finished slices (views of shards count once) and staging buffers.
    """

    received_bytes: int = 0
    peak_bytes: int = 0


class Resharder:
    """Moves the trainer's parameters into tensor-parallel slices. Every rank must make and use it together.

    `parameters` are the trainer's by name, sharded or whole, in the same order on all ranks; `cuts` names
    those that are cut; `gather_partition_size` layers are moved at a time. `traffic` tells of the last load.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        cuts: dict[str, Cut],
        layout: TPLayout,
        groups: TPGroups,
        *,
        gather_partition_size: int,
    ) -> None:
        self.traffic = Traffic()
        self._parameters = parameters
        self._plans = {
            name: plan_weight(tuple(getattr(parameter, "ds_shape", parameter.shape)), cuts.get(name), layout)
            for name, parameter in parameters.items()
        }
        self._layout = layout
        self._groups = groups
        self._name_groups = group_by_layers(list(parameters), gather_partition_size)
        self._staging: dict[str, torch.Tensor] = {}
        self._held_bytes = 0

    def load(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, this rank's slice) for every parameter. Every rank must call and exhaust this.

        A slice that lies in the trainer's own memory is a view of it: read it, and fetch it anew after an
        update. All others are contiguous and the caller's own.
        """
        on_device = [tensor for p in self._parameters.values() for tensor in _trainer_tensors(p)]
        self._held_bytes = 0
        self.traffic = Traffic()
        self._hold(_num_bytes(t for t in on_device if t.device == distributed.device()))
        self._hold(_num_bytes(self._staging.values()))
        for names in self._name_groups:
            slices = self._load_group(names)
            for name in names:
                yield name, slices.pop(name)

    def expected_bytes(self) -> int:
        """Return how many bytes this rank would receive by the formulas above, were `load` called now.

        Weights that are whole on all ranks already (ZeRO 0-2, small ones under ZeRO 3) count nothing.
        """
        return sum(
            self._plans[name].count_received() * parameter.element_size()
            for name, parameter in self._parameters.items()
            if not _is_whole(parameter)
        )

    def release(self) -> None:
        """Free the staging buffers; the next load makes new ones."""
        self._staging.clear()

    @torch.no_grad()
    def _load_group(self, names: list[str]) -> dict[str, torch.Tensor]:
        slices: dict[str, torch.Tensor] = {}
        sent: dict[tuple[Route, torch.dtype], list[str]] = {}
        for name in names:
            parameter, plan = self._parameters[name], self._plans[name]
            if _is_whole(parameter):
                slices[name] = self._cut_whole(parameter.data, plan)
            elif plan.is_view:
                (shard,) = self._fetch_shards([name])  # one that comes from the CPU is a copy, and stays
                slices[name] = shard.view(plan.local_shape)
            else:
                sent.setdefault((plan.route, parameter.dtype), []).append(name)
        moves = {Route.PIECES: self._exchange_pieces, Route.WHOLE: self._gather_packed}
        for (route, _), of_one_kind in sent.items():
            slices |= moves.get(route, self._gather_straight)(of_one_kind)
        return slices

    def _cut_whole(self, whole: torch.Tensor, plan: WeightPlan) -> torch.Tensor:
        if plan.cut is None:
            return whole
        part = plan.cut.take(whole, plan.layout.tp_rank).contiguous()
        if part.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
            self._hold(part.nbytes)
        return part

    def _gather_straight(self, names: list[str]) -> dict[str, torch.Tensor]:
        shards = self._fetch_shards(names)
        slices, under_way = {}, []
        for name, shard in zip(names, shards, strict=True):
            plan = self._plans[name]
            slices[name] = self._new_slice(plan, shard)
            group = self._groups.gather_group if plan.route is Route.ROWS else dist.group.WORLD
            under_way.append(self._start_all_gather(slices[name].view(-1), shard, group))
        for work in under_way:
            work.wait()
        self._drop_shards(names, shards)
        return slices

    def _gather_packed(self, names: list[str]) -> dict[str, torch.Tensor]:
        shards = self._fetch_shards(names)
        send = self._stage("send", sum(shard.numel() for shard in shards), shards[0])
        received = self._stage("receive", send.numel() * self._layout.world_size, send)
        torch.cat(shards, out=send)
        self._drop_shards(names, shards)
        self._start_all_gather(received, send, dist.group.WORLD).wait()
        slices, position = {}, 0
        for name in names:
            plan = self._plans[name]
            of_one = received.view(self._layout.world_size, -1).narrow(1, position, plan.shard_size)
            self._hold(of_one.nbytes)  # the whole weight, for a moment
            slices[name] = unpack_whole(plan, of_one)
            self._hold(slices[name].nbytes)
            self._hold(-of_one.nbytes)
            position += plan.shard_size
        return slices

    def _exchange_pieces(self, names: list[str]) -> dict[str, torch.Tensor]:
        plans, shards = [self._plans[name] for name in names], self._fetch_shards(names)
        rank, ranks = self._layout.rank, range(self._layout.world_size)
        send_sizes = [sum(plan.count_elements(rank, other) for plan in plans) for other in ranks]
        receive_sizes = [sum(plan.count_elements(other, rank) for plan in plans) for other in ranks]
        send = self._stage("send", sum(send_sizes), shards[0])
        received = self._stage("receive", sum(receive_sizes), send)
        pack_pieces(plans, shards, send)
        if self._layout.world_size > 1:
            dist.all_to_all_single(received, send, receive_sizes, send_sizes)
            self.traffic.received_bytes += received.nbytes
        slices = [self._new_slice(plan, send) for plan in plans]
        unpack_pieces(plans, shards, received, slices)
        self._drop_shards(names, shards)
        return dict(zip(names, slices, strict=True))

    def _start_all_gather(
        self, result: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup
    ) -> dist.Work:
        self.traffic.received_bytes += result.nbytes - shard.nbytes
        return dist.all_gather_into_tensor(result, shard, group=group, async_op=True)

    def _fetch_shards(self, names: list[str]) -> list[torch.Tensor]:
        shards = [self._parameters[name].ds_tensor.detach().to(distributed.device()) for name in names]
        self._hold(self._num_copied_bytes(names, shards))
        return shards

    def _drop_shards(self, names: list[str], shards: list[torch.Tensor]) -> None:
        self._hold(-self._num_copied_bytes(names, shards))
        shards.clear()

    def _num_copied_bytes(self, names: list[str], shards: list[torch.Tensor]) -> int:
        pairs = zip(names, shards, strict=True)
        return sum(s.nbytes for name, s in pairs if s.device != self._parameters[name].ds_tensor.device)

    def _new_slice(self, plan: WeightPlan, like: torch.Tensor) -> torch.Tensor:
        result = like.new_empty(plan.local_shape)
        self._hold(result.nbytes)
        return result

    def _stage(self, role: str, numel: int, like: torch.Tensor) -> torch.Tensor:
        """Return a flat buffer, kept for the next group and the next load: memory that stays in place."""
        num_bytes = numel * like.element_size()
        if role in self._staging and self._staging[role].nbytes < num_bytes:
            self._hold(-self._staging.pop(role).nbytes)
        if role not in self._staging:
            self._staging[role] = like.new_empty(num_bytes, dtype=torch.uint8)
            self._hold(num_bytes)
        return self._staging[role][:num_bytes].view(like.dtype)

    def _hold(self, num_bytes: int) -> None:
        self._held_bytes += num_bytes
        self.traffic.peak_bytes = max(self.traffic.peak_bytes, self._held_bytes)


def _is_whole(parameter: nn.Parameter) -> bool:
    return not is_sharded(parameter) or parameter.ds_status is ZeroParamStatus.AVAILABLE


def _trainer_tensors(parameter: nn.Parameter) -> Iterator[torch.Tensor]:
    if is_sharded(parameter):
        yield parameter.ds_tensor
    if _is_whole(parameter):
        yield parameter.data


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
