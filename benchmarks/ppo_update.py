"""A PPO update of actor and critic on a made-up rollout batch, as step 3 does it, for bench_train.py."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from benchmarks.chat_rows import sft_rows
from common.data.packed_batch import PackedBatch
from common.engine.ds_config import EngineOptions, build_train_config
from common.engine.optim import build_engine
from common.generation.decode import SamplingOptions
from common.generation.hybrid_engine import HybridEngine, HybridOptions
from common.models.policy_model import PolicyModel
from common.models.value_model import ScoreHead, ValueModel
from step1_sft.arguments import SFTArguments
from step3_ppo.algorithms import fill_defaults, find_algorithm
from step3_ppo.arguments import PPOArguments
from step3_ppo.ppo_losses import PPOLosses
from step3_ppo.roles import Actor, Critic, Roles
from step3_ppo.rollout_batch import MinibatchPlan, TokenCap

NUM_RESPONSES, ROWS_PER_STEP = 64, 16


@dataclass(frozen=True)
class Update:
    """One pass over the batch, in four optimizer steps."""

    run: Callable[[], None]
    num_tokens: int  # of prompts and responses


def build_ppo_update(is_packed: bool, config: LlamaConfig) -> Update:
    """Return an update that cuts its micro-batches by tokens, or by rows."""
    torch.manual_seed(0)
    args = fill_defaults(PPOArguments(actor_model_name_or_path="random"), find_algorithm("ppo"))
    classifier = LlamaForSequenceClassification(config)
    classifier.score.__class__ = ScoreHead
    policy = PolicyModel(LlamaForCausalLM(config), num_valid_tokens=config.vocab_size)
    sampling = SamplingOptions(max_new_tokens=1, stop_token_id=2, pad_token_id=0)
    actor = Actor(HybridEngine(_engine(policy), HybridOptions(enabled=False)), sampling, is_packed=False)
    critic = Critic(_engine(ValueModel(classifier)), is_packed=False)
    losses = PPOLosses(args, Roles(actor, None, critic, {}))  # type: ignore[arg-type]
    cap = TokenCap(ROWS_PER_STEP * 512) if is_packed else None
    plan = MinibatchPlan(ROWS_PER_STEP, 1, epochs=1, seed=1, cap=cap)
    batch = build_batch()
    steps = iter(range(1, 10**6))

    def run() -> None:
        losses.begin_step(kl_coef=0.1)
        for micro_batches in plan.minibatches(batch, next(steps)):
            gradients = [losses.compute_actor_gradients(micro_batches)]
            losses.take_steps([*gradients, losses.compute_critic_gradients(micro_batches)])

    return Update(run, len(batch.data["prompt_ids"]) + len(batch.data["response_ids"]))


def build_batch() -> PackedBatch:
    """Return responses as long as a chat data set's; its numbers mean nothing."""
    generator = torch.Generator().manual_seed(1)
    parts = []
    for number, row in enumerate(sft_rows(NUM_RESPONSES, seed=2)):
        start = row["loss_mask"].index(1)
        ids = torch.tensor(row["input_ids"])
        num_response = len(ids) - start
        numbers = torch.randn(num_response, generator=generator)
        logprobs = torch.full((num_response,), -9.0)
        parts.append(
            PackedBatch.build(
                [number],
                {
                    "prompt_ids": [ids[:start]],
                    "response_ids": [ids[start:]],
                    "rollout_logprobs": [logprobs],
                    "old_logprobs": [logprobs],
                    "ref_logprobs": [logprobs],
                    "old_values": [torch.zeros(num_response)],
                    "advantages": [numbers],
                    "returns": [numbers],
                    "loss_mask": [torch.ones(num_response, dtype=torch.bool)],
                    "loss_weights": [torch.ones(num_response)],
                    "loss_counts": [torch.tensor([float(num_response)])],
                },
            )
        )
    return PackedBatch.concat(parts)


def _engine(model: torch.nn.Module) -> Any:
    ds_config = build_train_config(EngineOptions(micro_batch_size=ROWS_PER_STEP))
    return build_engine(
        model,
        ds_config,
        SFTArguments(learning_rate=1e-5, lora_learning_rate=1e-5, lr_scheduler_type="constant"),
        1,
    )
