"""What the benchmarks of several ranks share: how ranks are run, and an engine of ZeRO 3."""

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from common.engine.ds_config import build_config, build_engine
from common.models.loading import ModelOptions, load_causal_lm
from common.programs import startup
from common.ranks import distributed
from step1_sft.arguments import SFTArguments


def run_ranks(work: Callable[..., Any], model: Any, num_ranks: int, *args: Any) -> Any:
    """Return what `work(engine, *args)` gives on the first of several ranks, one thread each, whose engines
    are ZeRO 3's of the model; on the CPU where GPUs are few.
    """
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    if torch.cuda.device_count() < num_ranks:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nccl wants a device for each rank: all use the CPU
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id="benchmark",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # any free port
        max_restarts=0,
    )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return elastic_launch(config, _be_rank)(folder, work, *args)[0]


def _be_rank(folder: str, work: Callable[..., Any], *args: Any) -> Any:
    startup.quiet_libraries()
    distributed.start()
    threshold = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}  # all weights are sharded
    ds_config = build_config(zero_stage=3, overrides=threshold)
    model = load_causal_lm(ModelOptions(folder, dropout=0.0, ds_config=ds_config), 1)
    found = work(build_engine(model, ds_config, SFTArguments(), 1), *args)
    distributed.stop()
    return found
