#!/usr/bin/env python
"""From training shards (ZeRO 3) to tensor-parallel slices: bytes, memory and time of a switch.

python benchmarks/bench_reshard.py [--quick]

Starts 2 and then 4 ranks by itself. Three ways to get the weights for generation take turns:
  ours          each rank receives the missing parts of its slice (common/generation/resharding.py)
  gather-all    DeepSpeed's GatheredParameters over all weights, as DeepSpeed-Chat does it without
                tensor parallelism; every rank then has the whole model
  gather-layer  GatheredParameters over one layer at a time, of which each rank keeps its slice, as
                DeepSpeed-Chat does it with tensor parallelism
Bytes are counted at the collectives, memory over all tensors created during the switch. The last line is a
JSON object; its `ratio` is gather-all's bytes over ours at 4 ranks (2 with --quick), tensor-parallel size 2.
"""

import sys
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]  # repository root, when run as a script

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaForCausalLM

from benchmarks.measuring import print_result, print_table, read_args, take_turns, timed
from benchmarks.several_ranks import received_bytes, run_ranks
from benchmarks.workload import small_llama_config
from common.generation.resharding import Resharder, TPGroups, TPLayout, group_by_layers
from common.generation.tp_plans import Cut, build_cuts
from common.models.lora import TrainedWeight
from common.ranks import distributed
from common.ranks.zero3 import gather_whole

WORLD_SIZES = (2, 4)


class SwitchMeter(TorchDispatchMode):
    """Context that counts the bytes that this rank receives by collectives, and the memory of new tensors.

    Bytes that a rank sends to itself do not count. `peak_bytes` is the peak of the tensors created inside.
    """

    def __init__(self) -> None:
        super().__init__()
        self.received_bytes = 0
        self.peak_bytes = 0
        self._live_bytes = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.received_bytes += received_bytes(func, args)
        self._note((args, kwargs), is_new=False)
        result = func(*args, **(kwargs or {}))
        self._note(result, is_new=True)
        return result

    def _note(self, tree: Any, *, is_new: bool) -> None:
        for tensor in tree_leaves(tree):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata in self._known:
                continue
            num_bytes = storage.nbytes() if is_new else 0
            self._known[storage._cdata] = weakref.finalize(storage, self._forget, storage._cdata, num_bytes)
            self._live_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)

    def _forget(self, key: int, num_bytes: int) -> None:
        del self._known[key]
        self._live_bytes -= num_bytes


def gather_all(parameters: dict[str, torch.nn.Parameter]) -> None:
    """Gather all weights on every rank. Every rank must call this."""
    with gather_whole(list(parameters.values())):
        pass


def gather_layers(
    parameters: dict[str, torch.nn.Parameter], cuts: dict[str, Cut], tp_rank: int
) -> dict[str, torch.Tensor]:
    """This rank's slices, taken from the whole weights layer by layer. Every rank must call this."""
    slices = {}
    for names in group_by_layers(list(parameters), 1):
        with torch.no_grad(), gather_whole([parameters[name] for name in names]):
            for name in names:
                whole = parameters[name].data
                slices[name] = (cuts[name].take(whole, tp_rank) if name in cuts else whole).clone()
    return slices


def slowest_seconds(switch: Callable[[], Any]) -> float:
    """The slowest rank's seconds of a switch. Every rank must call this."""
    distributed.barrier()
    return max(distributed.gather_objects(timed(switch)))


def measure_size(
    parameters: dict[str, torch.nn.Parameter], cuts: dict[str, Cut], tp_size: int, num_runs: int
) -> list[dict[str, Any]]:
    """The table's rows for one tensor-parallel size. Every rank must call this."""
    layout = TPLayout(distributed.world_size(), tp_size, distributed.rank())
    weights = {name: TrainedWeight(parameter) for name, parameter in parameters.items()}
    resharder = Resharder(weights, cuts, layout, TPGroups(layout), gather_partition_size=1)
    ways: dict[str, Callable[[], Any]] = {
        "ours": lambda: dict(resharder.load()),
        "gather-all": lambda: gather_all(parameters),
        "gather-layer": lambda: gather_layers(parameters, cuts, layout.tp_rank),
    }
    shard_bytes = sum(parameter.ds_tensor.nbytes for parameter in parameters.values())
    meters = {}
    for way, switch in ways.items():
        with SwitchMeter() as meters[way]:
            kept = switch()
        del kept
    check_slices(resharder.load(), gather_layers(parameters, cuts, layout.tp_rank))
    turns = {way: lambda switch=switch: slowest_seconds(switch) for way, switch in ways.items()}
    seconds = take_turns(turns, num_runs)
    return [
        {
            "ranks": layout.world_size,
            "tp_size": tp_size,
            "way": way,
            "received_bytes": max(distributed.gather_objects(meter.received_bytes)),
            "peak_bytes": max(distributed.gather_objects(shard_bytes + meter.peak_bytes)),
            "seconds": round(seconds[way]["median"], 5),
            "seconds_range": [round(seconds[way]["low"], 5), round(seconds[way]["high"], 5)],
        }
        for way, meter in meters.items()
    ]


def check_slices(received: Iterable[tuple[str, TrainedWeight]], expected: dict[str, torch.Tensor]) -> None:
    """Raise RuntimeError unless both ways give the same slices."""
    for name, weight in received:
        if not torch.equal(weight.parameter, expected[name]):
            raise RuntimeError(f"{name}: the slice differs from that of the whole weight")


def run_rank(engine: Any, num_runs: int) -> list[dict[str, Any]]:
    """The table's rows for all sizes, as one of several ranks."""
    parameters = dict(engine.module.named_parameters())
    with torch.device("meta"):
        whole = LlamaForCausalLM(engine.module.config)
    rows = []
    for tp_size in range(1, distributed.world_size() + 1):
        if distributed.world_size() % tp_size == 0:
            rows += measure_size(parameters, build_cuts(whole, tp_size), tp_size, num_runs)
    return rows


def main() -> None:
    """Run the ranks, and print their table."""
    args = read_args(__doc__, 15)
    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    model = LlamaForCausalLM(small_llama_config(num_hidden_layers=6, tie_word_embeddings=True, **heads))
    sizes = WORLD_SIZES[:1] if args.quick else WORLD_SIZES
    rows = [row for size in sizes for row in run_ranks(run_rank, model, size, args.runs)]
    table = [row | {"seconds_range": " - ".join(map(str, row["seconds_range"]))} for row in rows]
    print_table(table)
    received = {
        row["way"]: row["received_bytes"] for row in rows if (row["ranks"], row["tp_size"]) == (sizes[-1], 2)
    }
    ours, peer = received["ours"], received["gather-all"]
    print_result("reshard", ours, peer, is_lower_better=True, runs=args.runs, rows=rows)


if __name__ == "__main__":
    main()
