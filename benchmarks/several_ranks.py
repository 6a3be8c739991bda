"""Shared parts of the benchmarks with several ranks: starting ranks, an engine of ZeRO 3, bytes received."""

import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.utils._pytree import tree_leaves

from common.engine.ds_config import build_config, build_engine
from common.models.loading import ModelOptions, load_causal_lm
from common.programs import startup
from common.ranks import distributed
from step1_sft.arguments import SFTArguments


def run_ranks(work: Callable[..., Any], model: Any, num_ranks: int, *args: Any) -> Any:
    """Result of `work(engine, *args)` on the first of several ranks whose engines hold the model under ZeRO
    3.
    """
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return start_ranks(_with_engine, num_ranks, folder, work, *args)


def start_ranks(work: Callable[..., Any], num_ranks: int, *args: Any) -> Any:
    """Result of `work(*args)` on the first of several ranks, one thread each; on the CPU without enough
    GPUs.
    """
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    if torch.cuda.device_count() < num_ranks:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # NCCL needs one device per rank: all use the CPU
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id="benchmark",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # any free port
        max_restarts=0,
        start_method="spawn" if torch.cuda.device_count() else "fork",  # a fork imports nothing again
    )
    return elastic_launch(config, _as_rank)(work, *args)[0]


def _as_rank(work: Callable[..., Any], *args: Any) -> Any:
    startup.quiet_libraries()
    torch.set_num_threads(1)  # a fork lacks the parent's other threads and would wait for them
    distributed.start()
    result = work(*args)
    distributed.stop()
    return result


def _with_engine(folder: str, work: Callable[..., Any], *args: Any) -> Any:
    threshold = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}  # all weights are sharded
    ds_config = build_config(zero_stage=3, overrides=threshold)
    model = load_causal_lm(ModelOptions(folder, dropout=0.0, ds_config=ds_config), 1)
    return work(build_engine(model, ds_config, SFTArguments(), 1), *args)


def received_bytes(operation: Any, args: Sequence[Any]) -> float:
    """Minimum bytes that a rank receives by a collective, an operation of torch's dispatcher: for an
    all-reduce of M bytes 2 (n - 1) / n M, as in a ring. Bytes that a rank sends to itself do not count.

    Raises NotImplementedError for collectives that no benchmark uses.
    """
    name = operation._schema.name.removeprefix("c10d::")
    group = dist.ProcessGroup.unbox(next(arg for arg in args if isinstance(arg, torch.ScriptObject)))
    here, there = (sum(t.nbytes for t in tree_leaves(arg) if torch.is_tensor(t)) for arg in args[:2])
    if name in ("_allgather_base_", "allgather_"):
        return here - there
    if name == "_reduce_scatter_base_":
        return there - here
    if name == "allreduce_":
        return 2 * here * (group.size() - 1) / group.size()
    if name == "alltoall_base_":
        sizes = list(args[3]) or [len(args[0]) // group.size()] * group.size()
        return (sum(sizes) - sizes[group.rank()]) * args[0].element_size()
    if name == "broadcast_":
        return 0 if args[3] == group.rank() else here
    if name == "barrier":
        return 0
    raise NotImplementedError(f"bytes of {operation} are not counted")
