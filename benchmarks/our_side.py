"""Our side of the benchmarks: engines as the programs build them, and ranks."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from common.engine.ds_config import build_config, build_engine
from common.models.loading import ModelOptions, load_causal_lm
from common.models.policy_model import PolicyModel
from common.models.value_model import ScoreHead, ValueModel
from common.ranks import distributed
from step1_sft.arguments import SFTArguments

ROWS_PER_STEP = 16
OPTIMIZER = SFTArguments(learning_rate=1e-5, lora_learning_rate=1e-5, lr_scheduler_type="constant")


class SilentLogger:
    """Takes a trainer's numbers and drops them."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Drop the numbers."""


def policy_engine(config: LlamaConfig) -> Any:
    """Return a random policy in an engine of ZeRO 0."""
    torch.manual_seed(0)
    return _engine_of(PolicyModel(LlamaForCausalLM(config), num_valid_tokens=config.vocab_size))


def value_engine(config: LlamaConfig) -> Any:
    """Return a random reward model or critic in an engine of ZeRO 0."""
    torch.manual_seed(0)
    classifier = LlamaForSequenceClassification(config)
    classifier.score.__class__ = ScoreHead
    return _engine_of(ValueModel(classifier))


def _engine_of(model: torch.nn.Module) -> Any:
    return build_engine(model, build_config(micro_batch_size=ROWS_PER_STEP), OPTIMIZER, 1)


def zero3_engine(folder: str | Path) -> Any:
    """Return a saved model in an engine of ZeRO 3, all weights sharded. Every rank must call this."""
    threshold = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    ds_config = build_config(zero_stage=3, overrides=threshold)
    model = load_causal_lm(ModelOptions(str(folder), dropout=0.0, ds_config=ds_config), 1)
    return build_engine(model, ds_config, OPTIMIZER, 1)


def run_ranks(script: str, model: Any, num_ranks: int, *words: str) -> Any:
    """Run `script --rank_folder FOLDER words` by torchrun, one thread a rank, on the CPU where GPUs are few.

    FOLDER holds the model; return what the first rank leaves there by `leave`.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if torch.cuda.device_count() < num_ranks:
        environment["CUDA_VISIBLE_DEVICES"] = ""  # nccl wants a device for each rank: all use the CPU
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        command = [sys.executable, *launcher, script, "--rank_folder", folder, *words]
        subprocess.run(command, env=environment, check=True)
        return json.loads(Path(folder, "found.json").read_text())


def leave(folder: str, found: Any) -> None:
    """Leave what the ranks have found for `run_ranks`."""
    if distributed.is_main():
        Path(folder, "found.json").write_text(json.dumps(found))
