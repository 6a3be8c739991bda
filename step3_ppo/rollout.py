"""Prompts -> a step's record: generate, then score with all roles.

# B responses, R response
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from common.data.collators import prompt_texts
from common.data.packed_batch import ROW_IDS, PackedBatch
from common.flags.refusal import StepRefused
from common.generation.hybrid_engine import SwitchCosts
from common.ranks import distributed, watchdog
from step3_ppo.experience import TokenCap, gather_records
from step3_ppo.group_math import constant_groups
from step3_ppo.rewards.score_sum import PromptTexts, ScoreSum
from step3_ppo.roles import Roles

PromptBatches = Sequence[PackedBatch]
SCORED = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "scores", "old_values", "next_values")


@dataclass(frozen=True)
class PromptPlace:
    """Where this rank's prompts stand in the run's sequence of prompts."""

    rows_per_batch: int
    num_batches: int

    def prompt_numbers(self, draw: int, batch: int) -> torch.Tensor:
        """Return (B,) int64: a prompt of a draw has the same number for any number of ranks."""
        world_size, rank = distributed.world_size(), distributed.rank()
        first = (
            draw * self.num_batches + batch
        ) * world_size * self.rows_per_batch + rank * self.rows_per_batch
        return torch.arange(first, first + self.rows_per_batch)


MAX_LOGPROB_GAP = 1e-3  # mean difference a token, in nats, up to which the sampler is trusted


class OldLogprobs:
    """Where the log-probabilities at rollout come from: the sampler, or one more forward pass.

    `auto` recomputes until sampler and trainer have agreed within MAX_LOGPROB_GAP for a step; then it trusts
    the sampler, until a step exceeds it. `is_stale`: the policy moves on before it is updated
    by the rollout, so the first minibatch cannot tell, and `auto` always spends the pass.
    """

    def __init__(self, source: str, *, is_stale: bool = False) -> None:
        self.source, self.is_stale = source, is_stale
        self.recomputes = source != "rollout"

    def judge(self, gap: float) -> str | None:
        """Take the mean gap of a step; return what to tell the user, if anything."""
        was_recomputed, is_small = self.recomputes, gap <= MAX_LOGPROB_GAP
        if self.source == "auto":
            self.recomputes = self.is_stale or not is_small
        if was_recomputed or is_small:
            return None
        cure = ": recomputed from here on" if self.recomputes else "; --old_logprobs recompute avoids it"
        return f"sampler and trainer differ by {gap:.2g} nats a token, more than {MAX_LOGPROB_GAP}{cure}"


@dataclass
class Rollout:
    """Collects the records of PPO steps.

    `replays_support`: probabilities are taken among the tokens that the sampler could draw, in all roles.
    """

    roles: Roles
    place: PromptPlace
    old_logprobs: OldLogprobs
    cap: TokenCap
    scores: ScoreSum
    num_samples_per_prompt: int = 1
    dynamic_sampling_rounds: int = 0
    replays_support: bool = False
    num_draws: int = field(default=0, init=False)  # global batches of prompts that have been used
    refilled_fraction: float = field(default=0.0, init=False)  # of the last record's groups

    def state_dict(self) -> dict[str, Any]:
        """Return what lasts from one rollout to the next."""
        costs = dataclasses.asdict(self.roles.actor.hybrid_engine.costs)
        return {
            "num_draws": self.num_draws,
            "refilled_fraction": self.refilled_fraction,
            "recomputes": self.old_logprobs.recomputes,
            "costs": costs,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what `state_dict` gave."""
        self.num_draws, self.refilled_fraction = state["num_draws"], state["refilled_fraction"]
        self.old_logprobs.recomputes = state["recomputes"]
        self.roles.actor.hybrid_engine.costs = SwitchCosts(**state["costs"])

    def collect(self, prompts: Iterator[PromptBatches], version: int) -> PackedBatch:
        """Return a step's record, whole on every rank; `version` counts the steps the policy has made.

        Groups with one score are replaced by groups of further prompts, as far as these have others. Every
        rank must call this.
        """
        record = self._collect_once(prompts, version)
        num_refilled = 0
        for _ in range(self.dynamic_sampling_rounds):
            is_constant = self._constant_groups(record)
            if not is_constant.any():
                break
            more = self._collect_once(prompts, version)
            useful = more.select((~self._constant_groups(more)).nonzero()[:, 0])
            record, num_replaced = _refill(record, is_constant, useful)
            num_refilled += num_replaced
        self.refilled_fraction = num_refilled / len(record)
        return record

    def _constant_groups(self, record: PackedBatch) -> torch.Tensor:
        scores, group_ids = record.numbers("scores"), record.numbers("group_ids")
        return constant_groups(scores, group_ids, self.scores.counts(record))

    def _collect_once(self, prompts: Iterator[PromptBatches], version: int) -> PackedBatch:
        with watchdog.phase("the drawing of prompts", clock="data"):
            drawn = next(prompts)
        generated = []
        for index, batch in enumerate(drawn):
            numbers = self.place.prompt_numbers(self.num_draws, index)
            generated.append(self.sample(batch, numbers, version, self.num_samples_per_prompt))
        self.num_draws += 1
        with watchdog.phase("the gathering of the responses", clock="gather"):
            record = gather_records(PackedBatch.concat([part for part, _ in generated]))
            texts: PromptTexts = {}
            if self.scores.reads_texts:
                local = {number: text for _, of_part in generated for number, text in of_part.items()}
                for of_rank in distributed.gather_objects(local):
                    texts |= of_rank
            mine = self.cap.cut(record)
        try:
            scored = self._score(mine, texts)
        except StepRefused as error:
            error.batches = mine
            raise
        self.refuse_if_not_finite(scored)
        return scored

    def refuse_if_not_finite(self, record: PackedBatch) -> None:
        """Raise StepRefused, on every rank, for a record that all ranks hold with NaN or infinity in it."""
        names = [n for n in SCORED if n in record.data and not bool(record.data[n].isfinite().all())]
        if names:
            raise StepRefused(
                f"{', '.join(names)} of the rollout are not finite: a model gives NaN or infinity; use "
                "--dtype bf16 or fp32 in place of fp16, or lower the learning rate",
                self.cap.cut(record),
            )
        if not bool(self.scores.has_scores(record).any()):
            raise StepRefused(
                f"no response of the rollout has a score; the first failure: {self.scores.first_failure}",
                self.cap.cut(record),
            )

    def sample(
        self, prompts: PackedBatch, numbers: torch.Tensor, version: int, num_samples: int = 1
    ) -> tuple[PackedBatch, PromptTexts]:
        """Return this rank's responses to its prompts, and these prompts' texts by `numbers` (B,) int64.

        A prompt's number is its group's id and names its random numbers. Every rank must call this.
        """
        prompt_ids, prompt_mask = prompts.pad("prompt_ids", on_left=True)
        group_ids = numbers.repeat_interleave(num_samples)
        sample_ids = group_ids * num_samples + torch.arange(num_samples).repeat(len(numbers))
        found = self.roles.actor.generate(prompt_ids, prompt_mask, sample_ids, num_samples=num_samples)
        with watchdog.phase("the gathering of the responses", clock="gather"):
            found = type(found)(*(x.cpu() for x in found))
            logprobs = found.truncated_logprobs if self.replays_support else found.logprobs
            mask = found.response_mask
            of_prompts = [ids for ids in prompts.sequences("prompt_ids") for _ in range(num_samples)]
            record = PackedBatch.build(sample_ids.tolist(), {"prompt_ids": of_prompts})
            record = record.with_key("response_ids", found.response_ids[mask], lengths=mask.sum(1))
            record = record.with_key("rollout_logprobs", logprobs[mask], like="response_ids")
            versions = torch.full_like(record.data["response_ids"], version)
            record = record.with_key("versions", versions, like="response_ids")
            record = record.with_numbers("group_ids", group_ids)
            record = record.with_numbers("is_finished", found.is_finished)
            names = [name for name in prompts.texts(ROW_IDS) for _ in range(num_samples)]
            record = record.with_texts(ROW_IDS, names)
        return record, dict(zip(numbers.tolist(), prompt_texts(prompts), strict=True))

    def _score(self, records: list[PackedBatch], texts: PromptTexts) -> PackedBatch:
        """Return the records of all ranks with what all roles say of them, end to end."""
        with self.scores.asked(records, texts) as get_scores:
            return self._score_beside(records, get_scores)

    def _score_beside(self, records: list[PackedBatch], get_scores: Callable) -> PackedBatch:
        roles = self.roles
        if self.replays_support:
            supports = roles.actor.find_support(records)
            records = [add_support(r, s) for r, s in zip(records, supports, strict=True)]
        if self.old_logprobs.recomputes:
            old_logprobs = roles.actor.score(records)
        else:
            old_logprobs = [record.data["rollout_logprobs"] for record in records]
        columns = {"old_logprobs": old_logprobs, "ref_logprobs": roles.reference.score(records)}
        numbers = {}
        if roles.critic:
            values = roles.critic.score(records)
            columns["old_values"] = [v.values for v in values]
            numbers["next_values"] = [v.last_values for v in values]
        numbers |= get_scores(roles.rewards)
        with watchdog.phase("the gathering of the scores", clock="gather"):
            return gather_scored(records, columns, numbers)


def gather_scored(
    records: list[PackedBatch], columns: dict[str, list[torch.Tensor]], numbers: dict[str, list[torch.Tensor]]
) -> PackedBatch:
    """Return the records of all ranks with what roles say of each: a number a response token, or a response.

    Every rank must call this.
    """
    for name, found in columns.items():
        pairs = zip(records, found, strict=True)
        records = [record.with_key(name, x.cpu(), like="response_ids") for record, x in pairs]
    for name, found in numbers.items():
        pairs = zip(records, found, strict=True)
        records = [record.with_numbers(name, x.cpu()) for record, x in pairs]
    return gather_records(PackedBatch.concat(records))


def add_support(record: PackedBatch, support: Any) -> PackedBatch:
    """Return the record with the tokens that the sampler could draw at each response token."""
    counts = support.offsets.cpu().diff()
    record = record.with_key("support_counts", counts, like="response_ids")
    of_responses = torch.stack([part.sum() for part in record.sequences("support_counts")])
    return record.with_key("support_ids", support.token_ids.cpu().int(), lengths=of_responses)


def _refill(record: PackedBatch, is_constant: torch.Tensor, fresh: PackedBatch) -> tuple[PackedBatch, int]:
    """Return the record with responses of constant groups replaced by fresh ones, group by group, and how
    many were.
    """
    num_replaced = min(int(is_constant.sum()), len(fresh))
    if not num_replaced:
        return record, 0
    dropped = is_constant.nonzero()[:num_replaced, 0].tolist()
    kept = sorted(set(range(len(record))) - set(dropped))
    parts = [record.select(kept)] if kept else []
    return PackedBatch.concat([*parts, fresh.select(range(num_replaced))]), num_replaced
