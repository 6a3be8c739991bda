"""Prompts -> Experience: generate, then score with all four roles.

# B sequences, P prompt, R response
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from common import distributed
from step3_ppo.experience import Experience, gather_experience
from step3_ppo.roles import Roles


@dataclass(frozen=True)
class PromptPlace:
    """Where this rank's prompts stand in the run's sequence of prompts."""

    rows_per_batch: int
    num_batches: int

    def sample_ids(self, step: int, batch: int) -> torch.Tensor:
        """Return (B,) int64: the same id for the same prompt of the same step, for any number of ranks."""
        world_size, rank = distributed.world_size(), distributed.rank()
        first = (
            step * self.num_batches + batch
        ) * world_size * self.rows_per_batch + rank * self.rows_per_batch
        return torch.arange(first, first + self.rows_per_batch)


class OldLogprobs:
    """Where the log-probabilities at rollout come from: the sampler, or one more forward pass.

    `auto` spends the pass until it has seen that both agree within `max_gap` nats a token on average, and
    again from the step after one in which they do not.
    """

    def __init__(self, source: str, max_gap: float) -> None:
        self.source, self.max_gap = source, max_gap
        self.recomputes = source != "rollout"

    def judge(self, gap: float) -> str | None:
        """Take the mean gap of a step; return what to tell the user, if anything."""
        was_recomputed, is_small = self.recomputes, gap <= self.max_gap
        if self.source == "auto":
            self.recomputes = not is_small
        if was_recomputed or is_small:
            return None
        cure = ": recomputed from here on" if self.recomputes else "; --old_logprobs recompute avoids it"
        return (
            f"sampler and trainer differ by {gap:.2g} nats a token, more than --max_logprob_gap "
            f"{self.max_gap}{cure}"
        )


class Rollout:
    """Collects the experience of a PPO step."""

    def __init__(self, roles: Roles, *, place: PromptPlace, old_logprobs: OldLogprobs) -> None:
        self.roles, self.place, self.old_logprobs = roles, place, old_logprobs

    def collect(self, step: int, prompt_batches: Sequence[dict[str, Any]]) -> Experience:
        """Return the step's experience of all ranks, on the CPU. Every rank must call this."""
        parts = [self._generate(step, index, prompts) for index, prompts in enumerate(prompt_batches)]
        return gather_experience([self._score(part) for part in parts])

    def _generate(self, step: int, index: int, prompts: dict[str, Any]) -> Experience:
        sample_ids = self.place.sample_ids(step, index)
        prompt_ids, prompt_mask = prompts["prompt_ids"], prompts["prompt_mask"].bool()
        generation = self.roles.actor.generate(prompt_ids, prompt_mask, sample_ids)
        nothing_yet = torch.zeros_like(generation.logprobs)
        return Experience(
            sample_ids=sample_ids,
            prompt_ids=prompt_ids,
            prompt_mask=prompt_mask,
            response_ids=generation.response_ids,
            response_mask=generation.response_mask,
            is_finished=generation.is_finished,
            rollout_logprobs=generation.logprobs,
            old_logprobs=generation.logprobs,
            ref_logprobs=nothing_yet,
            old_values=nothing_yet,
            next_values=nothing_yet[:, 0],
            scores=nothing_yet[:, 0],
        ).to(distributed.device())

    def _score(self, part: Experience) -> Experience:
        critic = self.roles.critic.score(part)
        found = {
            "ref_logprobs": self.roles.reference.score(part),
            "old_values": critic.values,
            "next_values": critic.last_values,
            "scores": self.roles.reward.score(part),
        }
        if self.old_logprobs.recomputes:
            found["old_logprobs"] = self.roles.actor.score(part)
        mask = part.response_mask
        cleared = {n: torch.where(mask, v, 0.0) if v.dim() == 2 else v for n, v in found.items()}
        return dataclasses.replace(part, **cleared)
