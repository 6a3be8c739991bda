"""From prompts to a rollout batch: generate, then score with all roles.

# b responses of this rank, total their tokens
"""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from common.data.collators import prompt_texts
from common.data.global_batches import GlobalBatches
from common.data.packed_batch import ROW_IDS, PackedBatch
from common.generation.generate import Generation, PromptBatch
from common.models.output_head import SamplingMask
from common.ranks import distributed, watchdog
from common.ranks.failures import StepSkipped
from common.ranks.passes import watched
from step3_ppo.algorithms import divergence_beta
from step3_ppo.arguments import PPOArguments
from step3_ppo.environments import KIND, NUM_TURNS, Conversation, scores_of
from step3_ppo.loss_arguments import TRUSTED_GAP
from step3_ppo.ppo_math import constant_groups
from step3_ppo.rewards.scorer import PREFIX, PromptTexts, Scorer
from step3_ppo.roles import Roles
from step3_ppo.rollout_batch import TokenCap, gather_ids, reorder, replace_rows

SCORED = (
    *("rollout_logprobs", "old_logprobs", "ref_logprobs", "scores"),
    *("greedy_scores", "old_values", "next_values"),
)


class Rollout:
    """Collects rollout batches; `scores` are the rewards of the run.

    The log-probabilities at rollout, the denominator of the ratio, come from the sampler or, while
    `recomputes`, from an additional forward pass.
    """

    def __init__(
        self, args: PPOArguments, roles: Roles, scores: Scorer, *, needs_greedy: bool = False
    ) -> None:
        """`needs_greedy`: also score a greedy response to each prompt, which is not a row of a batch."""
        self.args = args
        self.roles = roles
        self.scores = scores
        self.environments = scores.environments
        default = args.per_device_training_batch_size * (args.max_prompt_seq_len + args.max_answer_seq_len)
        actor = roles.actor
        layout = (actor.is_packed, actor.shares_prompts)
        max_tokens = args.max_tokens_per_micro_batch or default
        self.cap = TokenCap(max_tokens, *layout)
        self.score_cap = TokenCap(args.max_tokens_per_scoring_pass or max_tokens, *layout)
        self.needs_greedy = needs_greedy
        self.refilled_fraction = 0.0  # of the last batch's groups
        self.source = "recompute" if args.replay_sampling_support else args.old_logprobs
        self.recomputes = self.source in ("auto", "recompute")
        self.trusted_gap = args.trusted_logprob_gap or TRUSTED_GAP[distributed.dtype_name(args.dtype)]
        if args.exact:
            self.trusted_gap = 0.0
        self.max_gap = self.trusted_gap if self.source == "strict" else math.inf  # else skip the update

    def state_dict(self) -> dict[str, Any]:
        """State for a resumed run."""
        return {"refilled_fraction": self.refilled_fraction, "recomputes": self.recomputes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        self.refilled_fraction = state["refilled_fraction"]
        self.recomputes = state["recomputes"]

    def check_logprob_gap(self, gap: float) -> str | None:
        """Update `recomputes` from a step's mean gap between sampler and trainer; return a warning or None.

        Under --old_logprobs auto, log-probabilities are recomputed until the gap is within the trusted one
        for a step; then the sampler is trusted until a step exceeds it. Log-probabilities of stale rollouts
        are always recomputed: the policy has changed since, so the first minibatch cannot measure the gap.
        """
        was_recomputed = self.recomputes
        is_small = gap <= self.trusted_gap
        if self.source == "auto":
            self.recomputes = self.args.rollout_staleness > 0 or not is_small
        if was_recomputed or is_small:
            return None
        cure = ": recomputed from here on" if self.recomputes else "; --old_logprobs recompute avoids it"
        return f"sampler and trainer differ by {gap:.2g} nats per token, more than {self.trusted_gap}{cure}"

    def collect(self, prompts: GlobalBatches, version: int) -> PackedBatch:
        """This rank's rollout batch of a step; `version` is the number of steps that the policy has taken.

        Groups whose responses all have the same score are replaced by groups of further prompts whose
        responses have different scores, if there are any. Every rank must call this.
        """
        batch = self._collect_once(prompts, version)
        num_refilled = 0
        for _ in range(self.args.dynamic_sampling_rounds):
            dropped = gather_ids(batch, self._is_constant(batch))
            if not dropped:
                break
            fresh = self._collect_once(prompts, version)
            useful = gather_ids(fresh, ~self._is_constant(fresh))
            num_replaced = min(len(dropped), len(useful))
            batch = replace_rows(batch, dropped[:num_replaced], fresh, useful[:num_replaced])
            num_refilled += num_replaced
        self.refilled_fraction = num_refilled / (len(batch) * distributed.world_size())
        return batch

    def _is_constant(self, batch: PackedBatch) -> torch.Tensor:
        scores = batch.numbers("scores")
        group_ids = batch.numbers("group_ids")
        return constant_groups(scores, group_ids, self.scores.counts(batch))

    def _collect_once(self, prompts: GlobalBatches, version: int) -> PackedBatch:
        # Prompts are numbered across the whole run, the same for any number of ranks.
        first = prompts.num_steps * prompts.order.global_rows
        with watchdog.phase("the reading of prompts", clock="data"):
            prompt_batches = list(next(prompts))
        batch, texts = self.sample(prompt_batches, version, self.args.num_samples_per_prompt, first)
        if self.needs_greedy:
            batch = self._add_greedy(batch, *self.sample(prompt_batches, version, 1, first, is_greedy=True))
        return self.score(batch, texts)

    def _add_greedy(self, batch: PackedBatch, greedy: PackedBatch, texts: PromptTexts) -> PackedBatch:
        """The batch with scores, lengths and is_finished of the greedy responses to the same prompts."""
        micro_batches = self.score_cap.cut(greedy)
        scores = self.scores.start(micro_batches, texts).wait(self.roles.rewards)
        greedy = join_scores(greedy.ids, micro_batches, {}, {"scores": scores["scores"]})
        row_of = {group: row for row, group in enumerate(greedy.numbers("group_ids").tolist())}
        rows = [row_of[group] for group in batch.numbers("group_ids").tolist()]
        columns = {key: greedy.numbers(key) for key in ("scores", "is_finished")}
        columns["lengths"] = greedy.lengths["response_ids"]
        for key, column in columns.items():
            batch = batch.with_numbers(f"greedy_{key}", column[rows])
        return batch

    def sample(
        self,
        prompt_batches: Sequence[PackedBatch],
        version: int,
        num_samples: int,
        first: int,
        *,
        is_greedy: bool = False,
    ) -> tuple[PackedBatch, PromptTexts]:
        """`num_samples` responses to each of this rank's prompts, and the texts of the prompts by number.

        Prompts are numbered from `first`: a batch of rank 0, then one of rank 1, and so on. A prompt's number
        is the id of its group and determines its random numbers. Every rank must call this.
        """
        parts, texts = [], {}
        if self.environments:
            self.environments.first_failure = ""
        with self.roles.actor.generation_mode():  # once for all batches, since it may move weights
            for index, prompts in enumerate(watched(prompt_batches, len(prompt_batches), "batches")):
                position = index * distributed.world_size() + distributed.rank()
                numbers = first + position * len(prompts) + torch.arange(len(prompts))
                conversations: list[Conversation] = []
                if self.environments:
                    with watchdog.phase("the reset of the environments", clock=KIND):
                        prompts, conversations = self.environments.begin(prompts, num_samples)
                parts.append(
                    self._sample_batch(prompts, numbers, num_samples, conversations, is_greedy=is_greedy)
                )
                texts |= zip(numbers.tolist(), prompt_texts(prompts), strict=True)
        batch = PackedBatch.concat(parts)
        versions = torch.full_like(batch.data["response_ids"], version)
        return batch.with_key("versions", versions, like="response_ids"), texts

    def _sample_batch(
        self,
        prompts: PackedBatch,
        numbers: torch.Tensor,
        num_samples: int,
        conversations: Sequence[Conversation],
        *,
        is_greedy: bool,
    ) -> PackedBatch:
        """Responses to prompts with these numbers (rows,) int64, or conversations with an environment."""
        with watchdog.phase("the padding of the prompts", clock="gather"):
            group_ids = numbers.repeat_interleave(num_samples)
            sample_ids = group_ids * num_samples + torch.arange(num_samples).repeat(len(numbers))
            inputs = PromptBatch(*prompts.pad("prompt_ids", on_left=True), sample_ids)
        on_turns = partial(self.environments.answer, conversations) if self.environments else None
        generation = self.roles.actor.generate(inputs, on_turns=on_turns, is_greedy=is_greedy)
        with watchdog.phase("the unpadding of the responses", clock="gather"):
            generation = Generation(*(x.cpu() for x in generation))
            batch = PackedBatch.build(
                sample_ids.tolist(), {"prompt_ids": repeat_each(prompts.sequences("prompt_ids"), num_samples)}
            )
            mask = generation.response_mask
            replays = self.args.replay_sampling_support
            columns = {
                "response_ids": generation.response_ids,
                "rollout_logprobs": generation.truncated_logprobs if replays else generation.logprobs,
                "loss_mask": generation.sampled_mask,
            }
            for key, padded in columns.items():
                batch = batch.with_key(key, padded[mask], lengths=mask.sum(1))
            batch = batch.with_numbers("group_ids", group_ids)
            batch = batch.with_numbers("is_finished", generation.is_finished)
            if self.environments:
                batch = batch.with_key("sampled_mask", batch.data["loss_mask"], like="response_ids")
                batch = batch.with_numbers(PREFIX + KIND, scores_of(conversations))
                batch = batch.with_numbers(NUM_TURNS, torch.tensor([c.num_turns for c in conversations]))
            return batch.with_texts(ROW_IDS, repeat_each(prompts.texts(ROW_IDS), num_samples))

    def score(self, batch: PackedBatch, texts: PromptTexts, *, is_trained_on: bool = True) -> PackedBatch:
        """The responses with the outputs of all roles; `texts` are the prompts' texts by number.

        With `is_trained_on=False` they have no values, and the trainer's log-probabilities over the whole
        vocabulary. Every rank must call this. Raises StepSkipped on all ranks for NaN or infinity, or if no
        response has a score.
        """
        roles = self.roles
        with watchdog.phase("the split into micro-batches", clock="gather"):
            micro_batches = self.score_cap.cut(batch)
        pending = self.scores.start(micro_batches, texts)
        if is_trained_on and self.args.replay_sampling_support:
            masks = roles.actor.find_sampling_masks(micro_batches)
            micro_batches = [add_sampling_mask(*pair) for pair in zip(micro_batches, masks, strict=True)]
        if self.recomputes or not is_trained_on:
            old_logprobs = roles.actor.score(micro_batches)
        else:
            old_logprobs = [m.data["rollout_logprobs"] for m in micro_batches]
        columns = {"old_logprobs": old_logprobs, "ref_logprobs": roles.reference.score(micro_batches)}
        numbers = {}
        if self.args.teacher_model_name_or_path and not is_trained_on:
            columns["divergences"] = self._find_divergences(micro_batches, **columns)
        if is_trained_on and roles.critic:
            values, last_values = zip(*roles.critic.score(micro_batches), strict=True)
            columns["old_values"], numbers["next_values"] = values, last_values
        try:
            numbers |= pending.wait(roles.rewards)
        except StepSkipped as error:
            error.batches = micro_batches
            raise
        with watchdog.phase("the gathering of the scores", clock="gather"):
            scored = join_scores(batch.ids, micro_batches, columns, numbers)
            self._check_finite(scored)
            return scored

    def _find_divergences(
        self,
        micro_batches: list[PackedBatch],
        old_logprobs: Sequence[torch.Tensor],
        ref_logprobs: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Divergence of each token's distribution from the teacher's, as defined by --distill_loss."""
        beta = divergence_beta(self.args)
        if beta is None:
            return [old - ref for old, ref in zip(old_logprobs, ref_logprobs, strict=True)]
        return self.roles.actor.find_divergences(micro_batches, self.roles.reference, beta)

    def _check_finite(self, batch: PackedBatch) -> None:
        own = [n for n in SCORED if n in batch.data and not bool(batch.data[n].isfinite().all())]
        gathered = distributed.gather_objects((own, bool(self.scores.has_scores(batch).any())))
        names = [name for name in SCORED if any(name in rank_names for rank_names, _ in gathered)]
        if names:
            raise StepSkipped(
                f"{', '.join(names)} of the rollout are not finite: a model returns NaN or infinity; use "
                "--dtype bf16 or fp32 in place of fp16, or lower the learning rate",
                [batch],
            )
        if not any(has_score for _, has_score in gathered):
            failure = f"the first failure: {self.scores.first_failure}"
            raise StepSkipped(f"no response of the rollout has a score; {failure}", [batch])


def repeat_each(items: Iterable[Any], times: int) -> list[Any]:
    """Each item several times, its copies next to each other."""
    return [item for item in items for _ in range(times)]


def join_scores(
    ids: Sequence[int],
    micro_batches: list[PackedBatch],
    columns: dict[str, Sequence[torch.Tensor]],
    numbers: dict[str, Sequence[torch.Tensor]],
) -> PackedBatch:
    """Rows of the micro-batches in the order of the sample ids, with the outputs of roles for each
    micro-batch: one number per token (columns) or per response (numbers).
    """
    batch = PackedBatch.concat(micro_batches)
    for name, parts in columns.items():
        batch = batch.with_key(name, torch.cat(list(parts)).cpu(), like="response_ids")
    for name, parts in numbers.items():
        batch = batch.with_numbers(name, torch.cat(list(parts)).cpu())
    return reorder(batch, ids)


def add_sampling_mask(batch: PackedBatch, mask: SamplingMask) -> PackedBatch:
    """The batch with the tokens that could be sampled in place of each response token."""
    batch = batch.with_key("support_counts", mask.counts, like="response_ids")
    num_ids = torch.stack([part.sum() for part in batch.sequences("support_counts")])
    return batch.with_key("support_ids", mask.token_ids.cpu().int(), lengths=num_ids)
