#!/usr/bin/env python
"""From training shards (ZeRO 3) to tensor-parallel slices: bytes, memory and time of a switch.

python benchmarks/bench_reshard.py [--quick]

Starts 2 and then 4 ranks by itself. Three ways of getting weights to generate with take turns:
  ours          each rank receives what its slice lacks (common/generation/resharder.py)
  gather-all    DeepSpeed's GatheredParameters over all weights, as DeepSpeed-Chat does it without
                tensor parallelism; every rank then has the whole model
  gather-layer  GatheredParameters over one layer at a time, of which each rank keeps its slice, as
                DeepSpeed-Chat does it with tensor parallelism
Bytes are read off the collectives as they run, memory off every tensor that is made meanwhile. The last line
is a JSON object; its `ratio` is gather-all's bytes over ours at 4 ranks (2 with --quick), tensor-parallel
size 2.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.peer_process import launch_ranks
from common.engine.ds_config import EngineOptions, build_train_config
from common.engine.optim import build_engine
from common.generation.reshard_plan import TPLayout, group_by_layers
from common.generation.resharder import Resharder, TPGroups
from common.generation.tp_plans import Cut, build_cuts
from common.models.loading import ModelOptions, load_causal_lm
from common.models.lora import TrainedWeight
from common.programs import startup
from common.ranks import distributed
from common.ranks.zero3 import gather_whole
from step1_sft.arguments import SFTArguments

WORLD_SIZES = (2, 4)
VOCABULARY = 8192
MEGABYTE = 1e6


class SwitchMeter(TorchDispatchMode):
    """Counts, inside a `with`, the bytes that collectives bring to this rank and the memory of new tensors.

    What a rank sends itself is no traffic. `peak_bytes` is the most that tensors made inside held at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.received_bytes = 0
        self.peak_bytes = 0
        self._live_bytes = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name == "c10d::_allgather_base_":
            self.received_bytes += args[0].nbytes - args[1].nbytes
        elif name == "c10d::alltoall_base_":
            sizes = list(args[3])
            sizes.pop(distributed.rank())
            self.received_bytes += sum(sizes) * args[0].element_size()
        elif name.startswith("c10d::"):
            raise NotImplementedError(f"bytes of {name} are not counted")
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


def save_model(folder: Path) -> None:
    """Write the Llama that is moved: 7 million weights, embedding and head tied."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def load_parameters(folder: str, world_size: int) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of a ZeRO 3 engine, all of them sharded. Every rank must call this."""
    overrides = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    ds_config = build_train_config(EngineOptions(zero_stage=3, world_size=world_size, overrides=overrides))
    model = load_causal_lm(ModelOptions(folder, ds_config=ds_config), VOCABULARY)
    engine = build_engine(
        model,
        ds_config,
        SFTArguments(learning_rate=1e-4, lora_learning_rate=1e-4, lr_scheduler_type="constant"),
        1,
    )
    return dict(engine.module.named_parameters())


def find_cuts(folder: str, tp_size: int) -> dict[str, Cut]:
    """Return the model's cuts by parameter name."""
    with torch.device("meta"):
        return build_cuts(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)), tp_size)


def gather_all(parameters: dict[str, torch.nn.Parameter]) -> None:
    """Make all weights whole on every rank. Every rank must call this."""
    with gather_whole(list(parameters.values())):
        pass


def gather_layers(
    parameters: dict[str, torch.nn.Parameter], cuts: dict[str, Cut], tp_rank: int
) -> dict[str, torch.Tensor]:
    """Return this rank's slices, by way of one whole layer after the other. Every rank must call this."""
    slices = {}
    for names in group_by_layers(list(parameters), 1):
        with torch.no_grad(), gather_whole([parameters[name] for name in names]):
            for name in names:
                whole = parameters[name].data
                slices[name] = (cuts[name].take(whole, tp_rank) if name in cuts else whole).clone()
    return slices


def time_in_turns(ways: dict[str, Callable[[], Any]], num_runs: int) -> dict[str, list[float]]:
    """Return the slowest rank's seconds of each run. Every rank must call this."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for run in range(num_runs + 1):
        for way, switch in ways.items():
            distributed.barrier()
            started = time.perf_counter()
            kept = switch()
            if distributed.has_gpu():
                torch.cuda.synchronize()
            own = time.perf_counter() - started
            del kept
            slowest = max(distributed.gather_objects(own))
            if run:  # the first run warms up
                seconds[way].append(slowest)
    return seconds


def measure_size(
    parameters: dict[str, torch.nn.Parameter], cuts: dict[str, Cut], tp_size: int, num_runs: int
) -> list[dict[str, Any]]:
    """Return the table's rows for one tensor-parallel size. Every rank must call this."""
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
    seconds = time_in_turns(ways, num_runs)
    return [
        {
            "ranks": layout.world_size,
            "tp_size": tp_size,
            "way": way,
            "received_bytes": max(distributed.gather_objects(meter.received_bytes)),
            "peak_bytes": max(distributed.gather_objects(shard_bytes + meter.peak_bytes)),
            "seconds": round(statistics.median(seconds[way]), 5),
            "seconds_range": [round(min(seconds[way]), 5), round(max(seconds[way]), 5)],
        }
        for way, meter in meters.items()
    ]


def check_slices(found: Iterable[tuple[str, TrainedWeight]], expected: dict[str, torch.Tensor]) -> None:
    """Raise RuntimeError unless both ways gave the same: a benchmark of wrong results says nothing."""
    for name, weight in found:
        if not torch.equal(weight.parameter, expected[name]):
            raise RuntimeError(f"{name}: the slice is not that of the whole weight")


def run_rank(folder: str, num_runs: int) -> None:
    """Measure all sizes as one of several ranks; the first rank writes the rows into `folder`."""
    startup.quiet_libraries()
    distributed.start()
    parameters = load_parameters(folder, distributed.world_size())
    rows = []
    for tp_size in range(1, distributed.world_size() + 1):
        if distributed.world_size() % tp_size == 0:
            rows += measure_size(parameters, find_cuts(folder, tp_size), tp_size, num_runs)
    if distributed.is_main():
        report = {"rows": rows, "device": distributed.device().type, "threads": torch.get_num_threads()}
        Path(folder, "report.json").write_text(json.dumps(report))
    distributed.stop()


def start_ranks(world_size: int, folder: str, num_runs: int) -> dict[str, Any]:
    """Return the report of so many ranks on this machine."""
    launch_ranks(__file__, world_size, ["--runs", str(num_runs), "--rank_folder", folder], limit_seconds=900)
    return json.loads(Path(folder, "report.json").read_text())


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print what a rank receives and holds (the worst rank) and how long a switch takes (the slowest)."""
    head = f"{'ranks':>5} {'tp':>3}  {'way':<13}{'received MB':>12}{'peak MB':>9}{'ms':>8}   {'range':<16}"
    print(f"{head}\n{'-' * len(head)}")
    for row in rows:
        low, high = (1e3 * seconds for seconds in row["seconds_range"])
        print(
            f"{row['ranks']:>5} {row['tp_size']:>3}  {row['way']:<13}"
            f"{row['received_bytes'] / MEGABYTE:>12.2f}{row['peak_bytes'] / MEGABYTE:>9.2f}"
            f"{1e3 * row['seconds']:>8.1f}   {low:.1f} - {high:.1f}"
        )


def main() -> None:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two ranks, one run of each way")
    parser.add_argument("--runs", type=int, default=0, help="timed runs of each way (15; 1 with --quick)")
    parser.add_argument("--rank_folder", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    num_runs = args.runs or (1 if args.quick else 15)
    if args.rank_folder:
        run_rank(args.rank_folder, num_runs)
        return
    startup.quiet_libraries()
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        sizes = WORLD_SIZES[:1] if args.quick else WORLD_SIZES
        reports = [start_ranks(world_size, folder, num_runs) for world_size in sizes]
    rows = [row for report in reports for row in report["rows"]]
    print_table(rows)
    ours, peer = (
        next(r for r in rows if (r["ranks"], r["tp_size"], r["way"]) == (sizes[-1], 2, way))["received_bytes"]
        for way in ("ours", "gather-all")
    )
    result = {
        "name": "reshard",
        "device": reports[-1]["device"],
        "threads": reports[-1]["threads"],
        "ours": ours,
        "peer": peer,
        "ratio": round(peer / ours, 4),
        "runs": num_runs,
        "rows": rows,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
