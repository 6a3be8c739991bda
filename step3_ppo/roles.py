"""The four roles: actor, reference, critic, reward. Each answers `score`; the actor `generate`s, two
`compute_gradients`. They read rollout batches, see `step3_ppo.rollout_batch`.

# S responses of a record, total response tokens of all
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import deepspeed
import torch
from torch import nn

from common.data.packed_batch import PackedBatch
from common.engine.engine_step import Gradients, LossTerm, compute_gradients
from common.generation.decode import SamplingOptions
from common.generation.generate import Generation
from common.generation.hybrid_engine import HybridEngine
from common.models.output_head import SamplingMask, kept_tokens
from common.models.policy_model import language_model
from common.ranks import distributed, watchdog
from common.ranks.step_costs import COSTS
from common.ranks.zero3 import local_shard, swapped_shards
from step3_ppo.response_inputs import build_response_inputs


class ResponseValues(NamedTuple):
    """A value model's answer to prompts with responses."""

    values: torch.Tensor  # (total,) fp32, of the state before each response token
    last_values: torch.Tensor  # (S,) fp32, at the last real token: a reward model's score


class Frozen:
    """A model that is only read; `offload` keeps its weights on the CPU between uses."""

    def __init__(self, model: nn.Module, ds_config: dict[str, Any], *, offload: bool) -> None:
        model.requires_grad_(False)
        self.is_offloaded = offload and ds_config["zero_optimization"]["stage"] != 3
        if (
            ds_config["zero_optimization"]["stage"] == 3
        ):  # sharded: DeepSpeed gathers and offloads as it reads
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


class AdapterOff:
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
    def on_device(self) -> Iterator[nn.Module]:
        """Give the engine while it computes what it computed before training. Every rank must call this."""
        self.engine.eval()
        with (
            language_model(self.engine.module).disable_adapter(),
            swapped_shards(self.others, self.beginnings),
        ):
            yield self.engine


class Policy:
    """Log-probabilities of responses: the actor and the reference.

    With `support_ids` in a record they are taken among the tokens that the sampler could draw.
    """

    def __init__(self, *, is_packed: bool) -> None:
        self.is_packed = is_packed

    def compute_logprobs(
        self, model: Any, record: PackedBatch, *, with_entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logprobs (total,) fp32 of the response tokens and, if asked for, their entropies."""
        batch = build_response_inputs(record, is_packed=self.is_packed)
        mask = None
        if "support_ids" in record.data:
            token_ids = record.data["support_ids"].to(distributed.device())
            mask = SamplingMask(token_ids, record.data["support_counts"])
        return model(batch.inputs, batch.slots, batch.token_ids, with_entropy=with_entropy, mask=mask)


class Reference(Policy):
    """The frozen policy that the KL penalty is measured against."""

    def __init__(self, frozen: Frozen | AdapterOff, *, is_packed: bool) -> None:
        super().__init__(is_packed=is_packed)
        self.frozen = frozen

    @torch.no_grad()
    def score(self, records: Sequence[PackedBatch]) -> list[torch.Tensor]:
        """Return logprobs (total,) fp32 of each record. Every rank must call this with as many."""
        with (
            watchdog.phase("the scores of the reference", clock="reference"),
            self.frozen.on_device() as model,
        ):
            return [self.compute_logprobs(model, record)[0] for record in records]


class Actor(Policy):
    """The policy that is trained."""

    def __init__(self, hybrid_engine: HybridEngine, sampling: SamplingOptions, *, is_packed: bool) -> None:
        super().__init__(is_packed=is_packed)
        self.hybrid_engine, self.sampling = hybrid_engine, sampling
        self.engine = hybrid_engine.engine

    def generation_mode(self) -> Any:
        """Give the inference module, see `HybridEngine.generation_mode`."""
        return self.hybrid_engine.generation_mode()

    def generate(
        self,
        prompt_ids: torch.Tensor,
        prompt_mask: torch.Tensor,
        sample_ids: torch.Tensor,
        *,
        num_samples: int = 1,
    ) -> Generation:
        """Return `num_samples` responses for each left-padded prompt. Every rank must call this."""
        inputs = [x.to(distributed.device()) for x in (prompt_ids, prompt_mask, sample_ids)]
        with self.generation_mode(), watchdog.phase("the generation", clock="generate"):
            found = self.hybrid_engine.generate(*inputs, self.sampling, num_samples=num_samples)
            lengths = prompt_mask.sum(1).cpu(), found.response_mask.sum(1).cpu()
            flops = self.engine.module.flops.of_generation(*lengths, num_samples)
            COSTS.count(int(lengths[1].sum()), flops)
            return found

    @torch.no_grad()
    def score(self, records: Sequence[PackedBatch]) -> list[torch.Tensor]:
        """Return logprobs (total,) fp32 of each record under the present weights. Every rank must call this
        with as many.
        """
        self.engine.eval()
        with watchdog.phase("the scores of the actor", clock="actor_score"):
            return [self.compute_logprobs(self.engine, record)[0] for record in records]

    @torch.no_grad()
    def find_sampling_masks(self, records: Sequence[PackedBatch]) -> list[SamplingMask]:
        """Return the tokens that the sampler could draw, for each record. Every rank must call this."""
        self.engine.eval()
        how = {"score": kept_tokens, "top_k": self.sampling.top_k, "top_p": self.sampling.top_p}
        masks = []
        with watchdog.phase("the scores of the actor", clock="actor_score"):
            for record in records:
                batch = build_response_inputs(record, is_packed=self.is_packed)
                mask = self.engine(batch.inputs, batch.slots, batch.token_ids, **how)
                masks.append(SamplingMask(*mask))
        return masks

    def compute_gradients(self, terms: Sequence[LossTerm]) -> Gradients:
        """Return the gradients of an optimizer step. Every rank must call this."""
        with watchdog.phase("the update of the actor", clock="actor_update"):
            self.engine.train()
            return compute_gradients(self.engine, terms)


class ValueRole:
    """Values of responses: the critic and the reward model."""

    def __init__(self, *, is_packed: bool) -> None:
        self.is_packed = is_packed

    def compute_values(self, model: Any, record: PackedBatch) -> ResponseValues:
        """Return the values of every state of a response, and of the one after it."""
        batch = build_response_inputs(record, is_packed=self.is_packed)
        slots = torch.cat([batch.slots - 1, batch.inputs.last_slots])
        return ResponseValues(*model(batch.inputs, slots).split([len(batch.slots), len(record)]))


class Reward(ValueRole):
    """A frozen reward model."""

    def __init__(self, frozen: Frozen, *, is_packed: bool) -> None:
        super().__init__(is_packed=is_packed)
        self.frozen = frozen

    @torch.no_grad()
    def score(self, records: Sequence[PackedBatch]) -> list[torch.Tensor]:
        """Return scores (S,) fp32 of each record, each read at the last real token. Every rank must call this
        with as many.
        """
        with (
            watchdog.phase("the scores of the reward model", clock="reward"),
            self.frozen.on_device() as model,
        ):
            return [self.compute_values(model, record).last_values for record in records]


class Critic(ValueRole):
    """The value function that is trained."""

    def __init__(self, engine: Any, *, is_packed: bool) -> None:
        super().__init__(is_packed=is_packed)
        self.engine = engine

    @torch.no_grad()
    def score(self, records: Sequence[PackedBatch]) -> list[ResponseValues]:
        """Return values of each record under the present weights. Every rank must call this with as many."""
        self.engine.eval()
        with watchdog.phase("the values of the critic", clock="critic"):
            return [self.compute_values(self.engine, record) for record in records]

    def compute_gradients(self, terms: Sequence[LossTerm]) -> Gradients:
        """Return the gradients of an optimizer step. Every rank must call this."""
        with watchdog.phase("the update of the critic", clock="critic_update"):
            self.engine.train()
            return compute_gradients(self.engine, terms)


@dataclass
class Roles:
    """The models of a run: `critic` is None for algorithms without one; rewards go by their logged names."""

    actor: Actor
    reference: Reference
    critic: Critic | None
    rewards: dict[str, Reward]
