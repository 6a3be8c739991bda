"""The roles: actor, reference or teacher, critic, reward. Each can `score` a rollout batch (see
`step3_ppo.rollout_batch`), and the actor can also `generate`. `step3_ppo.build_roles` builds them.

# b responses of a batch, total response tokens of all
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from common.data.packed_batch import PackedBatch, to_device
from common.generation.decode import SamplingOptions
from common.generation.generate import Generation, PromptBatch, TurnCallback
from common.generation.hybrid_engine import HybridEngine
from common.models.divergence import scores_and_divergence
from common.models.loading import plain_model
from common.models.model_inputs import ModelInputs, build_model_inputs
from common.models.offloaded_weights import OffloadedWeights
from common.models.output_head import OutputHead, SamplingMask, hidden_states
from common.models.policy_model import PolicyModel, language_model
from common.models.value_model import compute_scores
from common.ranks import distributed, watchdog
from common.ranks.passes import watched
from common.ranks.step_costs import COSTS
from common.ranks.zero3 import gather_whole, local_shard, swapped_shards
from step3_ppo.arguments import PPOArguments
from step3_ppo.rollout_batch import sampled_positions, with_closing
from step3_ppo.trainer_state import ExponentialMovingAverage


@dataclass
class Role:
    """A model that computes something for each response: a module, or a DeepSpeed engine around one.

    `is_packed`: its passes take packed sequences. `shares_prompts`: a prompt is computed once for adjacent
    responses. `is_offloaded`: its weights are on the CPU between uses.
    """

    model: Any
    is_packed: bool
    is_offloaded: bool = False
    shares_prompts: bool = False

    name, clock = "", ""  # of its scoring, for the watchdog and the step's costs

    def __post_init__(self) -> None:
        moves_weights = self.is_offloaded and distributed.has_gpu()
        self._offloaded = OffloadedWeights(self.model) if moves_weights else None

    def score(self, batches: Sequence[PackedBatch]) -> list[Any]:
        """Outputs of the role for each batch. Every rank must call this with the same number of batches."""
        with self.scoring():
            return [self.score_batch(batch) for batch in watched(batches, len(batches), "micro-batches")]

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Context with eval mode, no gradients, and offloaded weights on the device."""
        self.model.eval()
        weights = self._offloaded.on_device() if self._offloaded else nullcontext()
        with watchdog.phase(f"the scores of the {self.name}", clock=self.clock), torch.no_grad(), weights:
            yield

    def score_batch(self, batch: PackedBatch) -> Any:
        """Outputs of the role for a batch."""
        raise NotImplementedError

    def build_inputs(self, batch: PackedBatch) -> tuple[ModelInputs, torch.Tensor]:
        """`build_response_inputs` in the layout of the role's passes."""
        return build_response_inputs(batch, is_packed=self.is_packed, shares_prompts=self.shares_prompts)


class Policy(Role):
    """A role that computes log-probabilities (total,) fp32 of the response tokens.

    With `support_ids` in a batch they are normalised over the tokens that could be sampled.
    """

    def score_batch(self, batch: PackedBatch) -> torch.Tensor:
        """Log-probabilities (total,) fp32."""
        return self.compute_logprobs(batch)[0]

    def compute_logprobs(self, batch: PackedBatch, *, with_entropy: bool = False) -> tuple[torch.Tensor, ...]:
        """Log-probabilities (total,) fp32 of the response tokens and their entropies, zeros unless
        `with_entropy`.
        """
        mask = None
        if "support_ids" in batch.data:
            (token_ids,) = to_device([batch.data["support_ids"]], distributed.device())
            mask = SamplingMask(token_ids, batch.data["support_counts"])
        return self.score_tokens(batch, partial(OutputHead.logprobs, with_entropy=with_entropy, mask=mask))

    def score_tokens(self, batch: PackedBatch, compute: Callable[[OutputHead, torch.Tensor], Any]) -> Any:
        """Result of `compute` for the logits of the response tokens; see PolicyModel."""
        inputs, slots = self.build_inputs(batch)
        return self.model(inputs, slots, batch.data["response_ids"], compute)


class Reference(Policy):
    """The frozen policy that the KL penalty is measured against."""

    name, clock = "reference", "reference"


class Teacher(Reference):
    """The frozen policy that the actor learns from; it replaces the reference."""

    name = "teacher"

    @contextmanager
    def output_head(self, batch: PackedBatch) -> Iterator[OutputHead]:
        """Context that yields the teacher's output head over its hidden states of the response tokens. Every
        rank must call this.

        The hidden states are computed when a micro-batch is trained on. Keeping them from the rollout would
        store and send a vector per token of the whole step; one more pass of the teacher needs no memory. Of
        an offloaded teacher only the output head stays on the device inside the context.
        """
        with self.scoring():
            hidden = self.score_tokens(batch, hidden_states)
        policy: PolicyModel = getattr(self.model, "module", self.model)
        head = plain_model(policy.causal_lm).get_output_embeddings()
        with gather_whole(list(head.parameters())):
            weight, bias = (x if x is None else x.data.to(hidden.device) for x in (head.weight, head.bias))
            yield OutputHead(hidden, weight, bias, policy.options)


class LoraReference(Reference):
    """The reference under LoRA: new adapters disabled, other trained weights as they were at the start.

    The other trained weights are the adapters that the actor started with and, without --only_optimize_lora,
    all but the adapted matrices; each rank keeps its shard of their initial values.
    """

    def __init__(self, engine: Any, *, has_new_adapters: bool, **layout: bool) -> None:
        super().__init__(engine, **layout)
        self.has_new_adapters = has_new_adapters
        self.others = {
            name: parameter
            for name, parameter in engine.module.named_parameters()
            if parameter.requires_grad and not (has_new_adapters and ".lora_" in name)
        }
        self.initial_weights = {name: local_shard(p).detach().clone() for name, p in self.others.items()}

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Context in which the engine computes as before training. Every rank must call this."""
        model = language_model(self.model.module)
        adapters = model.disable_adapter() if self.has_new_adapters else nullcontext()
        with super().scoring(), adapters, swapped_shards(self.others, self.initial_weights):
            yield


class MovingReference(Reference):
    """The reference under --ref_ema_decay: the actor's engine with averaged weights."""

    def __init__(self, engine: Any, decay: float, **layout: bool) -> None:
        super().__init__(engine, **layout)
        self.average = ExponentialMovingAverage(engine.module, decay)

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Context in which the engine computes with the averages. Every rank must call this."""
        with super().scoring(), self.average.averaged_weights():
            yield


class Actor(Policy):
    """The policy that is trained."""

    name, clock = "actor", "actor_score"

    def __init__(self, hybrid_engine: HybridEngine, sampling: SamplingOptions, **layout: bool) -> None:
        super().__init__(hybrid_engine.engine, **layout)
        self.hybrid_engine, self.sampling = hybrid_engine, sampling
        self.generation_mode = hybrid_engine.generation_mode

    def generate(
        self, batch: PromptBatch, *, on_turns: TurnCallback | None = None, is_greedy: bool = False
    ) -> Generation:
        """Responses of all samples; call it inside `generation_mode` only. Every rank must call this."""
        with watchdog.phase("the generation", clock="generate"):
            sampling = replace(self.sampling, top_k=1) if is_greedy else self.sampling
            generation = self.hybrid_engine.generate(batch, sampling, on_turns=on_turns)
            lengths = batch.prompt_mask.sum(1), generation.response_mask.sum(1).cpu()
            flops = self.model.module.flops.of_generation(*lengths, batch.num_samples)
            COSTS.count(int(lengths[1].sum()), flops)
            return generation

    def compute_divergence(
        self, batch: PackedBatch, teacher: Teacher, beta: float, token_weights: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Log-probabilities and entropies of the response tokens, and their `summed_divergence`;
        token_weights (total,). Every rank must call this.
        """
        with teacher.output_head(batch) as other:
            compared = {"teacher": other, "beta": beta, "token_weights": token_weights}
            return self.score_tokens(batch, partial(scores_and_divergence, **compared))

    def find_divergences(
        self, batches: Sequence[PackedBatch], teacher: Teacher, beta: float
    ) -> list[torch.Tensor]:
        """Divergence of each response token, (total,) fp32 per batch. Every rank must call this."""
        with self.scoring():
            return [self.compute_divergence(batch, teacher, beta)[3] for batch in batches]

    def find_sampling_masks(self, batches: Sequence[PackedBatch]) -> list[SamplingMask]:
        """The tokens that could be sampled, for each batch. Every rank must call this."""
        kept_tokens = partial(OutputHead.kept_tokens, top_k=self.sampling.top_k, top_p=self.sampling.top_p)
        with self.scoring():
            return [SamplingMask(*self.score_tokens(batch, kept_tokens)) for batch in batches]


class Reward(Role):
    """A frozen reward model; scores (b,) fp32 of `compute_scores` over the sampled tokens of the response.

    `closing_ids` follow a finished response: see `closing_of`.
    """

    name, clock = "reward model", "reward"
    closing_ids: Sequence[int] = ()

    def score_batch(self, batch: PackedBatch) -> torch.Tensor:
        """Scores (b,) fp32."""
        batch = with_closing(batch, self.closing_ids)
        inputs, _ = self.build_inputs(batch)
        return compute_scores(self.model, inputs, *sampled_positions(batch))


class Critic(Role):
    """The trained value function; its scores are `compute_values`."""

    name, clock = "critic", "critic"

    def compute_values(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """values (total,) of the state before each response token, and last_values (b,) at the last real
        token; both fp32.
        """
        inputs, slots = self.build_inputs(batch)
        values = self.model(inputs, torch.cat([slots, inputs.last_slots]))
        return values.split([len(slots), len(batch)])

    score_batch = compute_values


@dataclass
class Roles:
    """The models of a run. `reference` may be a Teacher; `critic` is None for algorithms without one;
    `rewards` are by log name.
    """

    actor: Actor
    reference: Reference
    critic: Critic | None
    rewards: dict[str, Reward]


def build_response_inputs(
    batch: PackedBatch, *, is_packed: bool, shares_prompts: bool = False
) -> tuple[ModelInputs, torch.Tensor]:
    """Each prompt followed by its response, as padded rows or packed, and the slots (total,) int64 of the
    state before each response token; all on the CPU.
    """
    token_ids, lengths = batch.interleave("prompt_ids", "response_ids")
    is_response = torch.tensor([False, True]).repeat(len(batch)).repeat_interleave(lengths.flatten())
    sizes = None
    if shares_prompts:
        sizes = torch.unique_consecutive(batch.numbers("group_ids"), return_counts=True)[1]
    inputs = build_model_inputs(token_ids, lengths.sum(1), is_packed=is_packed, group_sizes=sizes)
    return inputs, inputs.slots_before(is_response)


def has_text_steps(args: PPOArguments) -> bool:
    """Whether the actor takes a separate optimizer step on pretraining text after each update."""
    return bool(args.unsupervised_dataset_name) and args.unsup_step == "own"
