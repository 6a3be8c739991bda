"""Our side of the benchmarks: engines as the programs build them, ranks, and an update of PPO."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from benchmarks.chat_rows import sft_rows
from common.data.packed_batch import PackedBatch
from common.engine.ds_config import EngineOptions, build_train_config
from common.engine.optim import build_engine
from common.generation.decode import SamplingOptions
from common.generation.hybrid_engine import HybridEngine, HybridOptions
from common.models.loading import ModelOptions, load_causal_lm
from common.models.policy_model import PolicyModel
from common.models.value_model import ScoreHead, ValueModel
from common.ranks import distributed
from step1_sft.arguments import SFTArguments
from step3_ppo.algorithms import fill_defaults, find_algorithm
from step3_ppo.arguments import PPOArguments
from step3_ppo.ppo_losses import PPOLosses
from step3_ppo.roles import Actor, Critic, Roles
from step3_ppo.rollout_batch import MinibatchPlan, TokenCap

ROWS_PER_STEP, MAX_SEQ_LEN = 16, 512
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
    return build_engine(
        model, build_train_config(EngineOptions(micro_batch_size=ROWS_PER_STEP)), OPTIMIZER, 1
    )


def zero3_engine(folder: str | Path) -> Any:
    """Return a saved model in an engine of ZeRO 3, all weights sharded. Every rank must call this."""
    threshold = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    options = EngineOptions(zero_stage=3, world_size=distributed.world_size(), overrides=threshold)
    ds_config = build_train_config(options)
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


def build_ppo_update(batch: PackedBatch, config: LlamaConfig, *, is_packed: bool) -> Callable[[], None]:
    """Return one pass over the batch that updates actor and critic; micro-batches by tokens, or by rows."""
    args = fill_defaults(PPOArguments(actor_model_name_or_path="random"), find_algorithm("ppo"))
    sampling = SamplingOptions(max_new_tokens=1, stop_token_id=2, pad_token_id=0)
    actor = Actor(
        HybridEngine(policy_engine(config), HybridOptions(enabled=False)), sampling, is_packed=False
    )
    critic = Critic(value_engine(config), is_packed=False)
    losses = PPOLosses(args, Roles(actor, None, critic, {}))  # type: ignore[arg-type]
    cap = TokenCap(ROWS_PER_STEP * MAX_SEQ_LEN) if is_packed else None
    plan = MinibatchPlan(ROWS_PER_STEP, 1, epochs=1, seed=1, cap=cap)
    steps = iter(range(1, 10**6))

    def run() -> None:
        losses.begin_step(kl_coef=0.1)
        for micro_batches in plan.minibatches(batch, next(steps)):
            gradients = [losses.compute_actor_gradients(micro_batches)]
            losses.take_steps([*gradients, losses.compute_critic_gradients(micro_batches)])

    return run


def build_rollout_batch(num_responses: int) -> PackedBatch:
    """Return responses as long as a chat data set's; its numbers mean nothing."""
    generator = torch.Generator().manual_seed(1)
    rows = sft_rows(num_responses, seed=2)
    starts = [row["loss_mask"].index(1) for row in rows]
    sizes = [len(row["input_ids"]) - start for row, start in zip(rows, starts, strict=True)]
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    logprobs = [torch.full((size,), -9.0) for size in sizes]
    numbers = [torch.randn(size, generator=generator) for size in sizes]
    columns = {
        "prompt_ids": [row[:start] for row, start in zip(ids, starts, strict=True)],
        "response_ids": [row[start:] for row, start in zip(ids, starts, strict=True)],
        "rollout_logprobs": logprobs,
        "old_logprobs": logprobs,
        "ref_logprobs": logprobs,
        "old_values": [torch.zeros(size) for size in sizes],
        "advantages": numbers,
        "returns": numbers,
        "loss_mask": [torch.ones(size, dtype=torch.bool) for size in sizes],
        "loss_weights": [torch.ones(size) for size in sizes],
        "loss_counts": [torch.tensor([float(size)]) for size in sizes],
    }
    return PackedBatch.build(list(range(num_responses)), columns)
