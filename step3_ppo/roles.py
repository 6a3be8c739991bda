"""The four roles: actor, reference, critic, reward. Each answers `score`; the actor can `generate` too. They
read rollout batches, see `step3_ppo.rollout_batch`.

# b responses of a batch, total response tokens of all
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from torch import nn

from common.data.packed_batch import PackedBatch
from common.generation.decode import SamplingOptions
from common.generation.generate import Generation
from common.generation.hybrid_engine import HybridEngine
from common.models.model_inputs import ModelInputs, build_model_inputs
from common.models.output_head import SamplingMask, kept_tokens
from common.models.policy_model import language_model
from common.ranks import distributed, watchdog
from common.ranks.step_costs import COSTS
from common.ranks.zero3 import local_shard, swapped_shards


class Frozen:
    """A model that is only read; `offload` keeps its weights on the CPU between uses."""

    def __init__(self, model: nn.Module, ds_config: dict[str, Any], *, offload: bool) -> None:
        model.requires_grad_(False)
        is_sharded = ds_config["zero_optimization"]["stage"] == 3
        self.is_offloaded = offload and not is_sharded
        if is_sharded:  # DeepSpeed gathers and offloads as it reads
            model, *_ = deepspeed.initialize(model=model, config=ds_config)
        elif not self.is_offloaded:
            model.to(distributed.device())
        model.eval()  # a DeepSpeed engine's eval returns nothing
        self.model = model

    @contextmanager
    def on_device(self) -> Iterator[nn.Module]:
        """Give the model with its weights where they can be computed with."""
        try:
            yield self.model.to(distributed.device()) if self.is_offloaded else self.model
        finally:
            if self.is_offloaded:
                self.model.to("cpu")


class Trained:
    """A model in a DeepSpeed engine, read as its weights are now."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    @contextmanager
    def on_device(self) -> Iterator[Any]:
        """Give the engine, without dropout."""
        self.engine.eval()
        yield self.engine


class LoraReference:
    """The actor as it began: its adapters off, and the few other weights that train put back meanwhile.

    Those are all but the adapted matrices, unless --only_optimize_lora; each rank keeps its own part of them.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.others = {
            name: parameter
            for name, parameter in engine.module.named_parameters()
            if parameter.requires_grad and ".lora_" not in name
        }
        self.beginnings = {name: local_shard(p).detach().clone() for name, p in self.others.items()}

    @contextmanager
    def on_device(self) -> Iterator[Any]:
        """Give the engine while it computes what it computed before training. Every rank must call this."""
        self.engine.eval()
        with (
            language_model(self.engine.module).disable_adapter(),
            swapped_shards(self.others, self.beginnings),
        ):
            yield self.engine


@dataclass
class Role:
    """A model that says something of each response; `is_packed`: sequences stand end to end in its passes."""

    weights: Frozen | Trained | LoraReference
    is_packed: bool

    name, clock = "", ""  # as the watchdog and the step's costs call its scoring

    @torch.no_grad()
    def score(self, batches: Sequence[PackedBatch]) -> list[Any]:
        """Return what the role says of each batch. Every rank must call this with as many."""
        phase = watchdog.phase(f"the scores of the {self.name}", clock=self.clock)
        with phase, self.weights.on_device() as model:
            return [self.answer(model, batch) for batch in batches]

    def answer(self, model: Any, batch: PackedBatch) -> Any:
        """Return what the role says of a batch."""
        raise NotImplementedError


class Policy(Role):
    """Scores are logprobs (total,) fp32 of the response tokens.

    With `support_ids` in a batch they are taken among the tokens that the sampler could draw.
    """

    def answer(self, model: Any, batch: PackedBatch) -> torch.Tensor:
        """Return logprobs (total,) fp32."""
        return self.compute_logprobs(model, batch)[0]

    def compute_logprobs(
        self, model: Any, batch: PackedBatch, *, with_entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logprobs (total,) fp32 of the response tokens and, if asked for, their entropies."""
        inputs, slots = build_response_inputs(batch, is_packed=self.is_packed)
        mask = None
        if "support_ids" in batch.data:
            token_ids = batch.data["support_ids"].to(distributed.device())
            mask = SamplingMask(token_ids, batch.data["support_counts"])
        return model(inputs, slots, batch.data["response_ids"], with_entropy=with_entropy, mask=mask)


class Reference(Policy):
    """The frozen policy that the KL penalty is measured against."""

    name, clock = "reference", "reference"


class Actor(Policy):
    """The policy that is trained."""

    name, clock = "actor", "actor_score"

    def __init__(self, hybrid_engine: HybridEngine, sampling: SamplingOptions, *, is_packed: bool) -> None:
        super().__init__(Trained(hybrid_engine.engine), is_packed)
        self.hybrid_engine, self.sampling = hybrid_engine, sampling
        self.engine = hybrid_engine.engine

    def generate(
        self,
        prompt_ids: torch.Tensor,
        prompt_mask: torch.Tensor,
        sample_ids: torch.Tensor,
        *,
        num_samples: int,
    ) -> Generation:
        """Return `num_samples` responses for each left-padded prompt. Every rank must call this."""
        inputs = [x.to(distributed.device()) for x in (prompt_ids, prompt_mask, sample_ids)]
        with self.hybrid_engine.generation_mode(), watchdog.phase("the generation", clock="generate"):
            generation = self.hybrid_engine.generate(*inputs, self.sampling, num_samples=num_samples)
            lengths = prompt_mask.sum(1).cpu(), generation.response_mask.sum(1).cpu()
            flops = self.engine.module.flops.of_generation(*lengths, num_samples)
            COSTS.count(int(lengths[1].sum()), flops)
            return generation

    @torch.no_grad()
    def find_sampling_masks(self, batches: Sequence[PackedBatch]) -> list[SamplingMask]:
        """Return the tokens that the sampler could draw, for each batch. Every rank must call this."""
        how = {"score": kept_tokens, "top_k": self.sampling.top_k, "top_p": self.sampling.top_p}
        masks = []
        phase = watchdog.phase("the sampling masks of the actor", clock=self.clock)
        with phase, self.weights.on_device() as model:
            for batch in batches:
                inputs, slots = build_response_inputs(batch, is_packed=self.is_packed)
                masks.append(SamplingMask(*model(inputs, slots, batch.data["response_ids"], **how)))
        return masks


class ValueRole(Role):
    """Values of responses: the critic and the reward model."""

    def compute_values(self, model: Any, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (values (total,) of the state before each response token, last_values (b,) at the last real
        token: a reward model's score), both fp32.
        """
        inputs, slots = build_response_inputs(batch, is_packed=self.is_packed)
        values = model(inputs, torch.cat([slots - 1, inputs.last_slots]))
        return values.split([len(slots), len(batch)])


class Reward(ValueRole):
    """A frozen reward model; scores (b,) fp32 are read at the last real token."""

    name, clock = "reward model", "reward"

    def answer(self, model: Any, batch: PackedBatch) -> torch.Tensor:
        """Return scores (b,) fp32."""
        return self.compute_values(model, batch)[1]


class Critic(ValueRole):
    """The value function that is trained; its scores are `compute_values`."""

    name, clock = "critic", "critic"

    def __init__(self, engine: Any, *, is_packed: bool) -> None:
        super().__init__(Trained(engine), is_packed)
        self.engine = engine

    answer = ValueRole.compute_values


@dataclass
class Roles:
    """The models of a run: `critic` is None for algorithms without one; rewards go by their logged names."""

    actor: Actor
    reference: Reference
    critic: Critic | None
    rewards: dict[str, Reward]


def build_response_inputs(batch: PackedBatch, *, is_packed: bool) -> tuple[ModelInputs, torch.Tensor]:
    """Return each prompt followed by its response, as padded rows or end to end, on this rank's device; and
    the slots (total,) int64 of the response tokens, rows end to end, on the CPU.
    """
    token_ids, lengths = batch.interleave("prompt_ids", "response_ids")
    is_response = torch.tensor([False, True]).repeat(len(batch)).repeat_interleave(lengths.flatten())
    inputs = build_model_inputs(token_ids, lengths.sum(1), is_packed=is_packed, device=distributed.device())
    return inputs, inputs.token_slots[is_response]
