"""What one PPO step has seen: prompts, responses, and their numbers, as one record of tensors.

# B sequences, P prompt, R response, T = P + R
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from common import distributed


@dataclass(frozen=True)
class Experience:
    """Left-padded prompts with their responses to the right; every rank holds the whole step's.

    `old_` was computed at the rollout, `ref_` by the frozen reference. Nothing behind a response counts.
    """

    sample_ids: (
        torch.Tensor
    )  # (B,) int64, the place in the run's sequence of prompts: the same for any rank count
    prompt_ids: torch.Tensor  # (B, P) int64
    prompt_mask: torch.Tensor  # (B, P) bool
    response_ids: torch.Tensor  # (B, R) int64
    response_mask: torch.Tensor  # (B, R) bool, stop token included
    is_finished: torch.Tensor  # (B,) bool, False where the length limit cut the response
    rollout_logprobs: torch.Tensor  # (B, R) fp32, the sampler's own
    old_logprobs: torch.Tensor  # (B, R) fp32, what the ratio is taken to
    ref_logprobs: torch.Tensor  # (B, R) fp32
    old_values: torch.Tensor  # (B, R) fp32, of the state before each token
    next_values: torch.Tensor  # (B,) fp32, of the state after the last token; counts only for a cut response
    scores: torch.Tensor  # (B,) fp32, as the reward model gave them
    rewards: torch.Tensor | None = None  # (B, R) fp32
    advantages: torch.Tensor | None = None  # (B, R) fp32
    returns: torch.Tensor | None = None  # (B, R) fp32

    @property
    def response_lengths(self) -> torch.Tensor:
        """Return the response tokens (B,) int64, stop token included."""
        return self.response_mask.sum(1)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the fields that are there, by name."""
        return {f.name: v for f in dataclasses.fields(self) if (v := getattr(self, f.name)) is not None}

    def select(self, indexes: torch.Tensor) -> "Experience":
        """Return the rows of `indexes`, with the columns that none of them uses cut off."""
        rows = {name: value[indexes] for name, value in self.tensors().items()}
        num_prompt = int(rows["prompt_mask"].sum(1).max())
        num_response = max(int(rows["response_mask"].sum(1).max()), 1)
        for name, value in rows.items():
            if name.startswith("prompt_"):
                rows[name] = value[:, value.shape[1] - num_prompt :]
            elif value.dim() == 2:
                rows[name] = value[:, :num_response]
        return Experience(**rows)

    def to(self, device: torch.device | str) -> "Experience":
        """Return the record on another device."""
        return Experience(**{name: value.to(device) for name, value in self.tensors().items()})


def concatenate(parts: Sequence[Experience]) -> Experience:
    """Return all rows by sample id, prompts padded on the left and responses on the right."""
    num_prompt = max(p.prompt_ids.shape[1] for p in parts)
    num_response = max(p.response_ids.shape[1] for p in parts)
    columns: dict[str, list[torch.Tensor]] = {}
    for part in parts:
        for name, value in part.tensors().items():
            if name.startswith("prompt_"):
                value = F.pad(value, (num_prompt - value.shape[1], 0))
            elif value.dim() == 2:
                value = F.pad(value, (0, num_response - value.shape[1]))
            columns.setdefault(name, []).append(value)
    whole = {name: torch.cat(values) for name, values in columns.items()}
    order = whole["sample_ids"].argsort()
    return Experience(**{name: value[order] for name, value in whole.items()})


def gather_experience(parts: Sequence[Experience]) -> Experience:
    """Return the step's experience of all ranks, on the CPU. Every rank must call this.

    It is small (a few numbers a token), and once every rank holds it, advantages and minibatches are the
    same for any number of ranks.
    """
    local = concatenate([part.to("cpu") for part in parts])
    return concatenate(distributed.gather_objects(local))


@dataclass(frozen=True)
class MinibatchPlan:
    """How a step's samples are cut: `rows` a rank and micro-batch, `accumulation` of those an update."""

    rows: int
    accumulation: int
    epochs: int
    seed: int

    def minibatches(self, experience: Experience, step: int) -> Iterator[list[Experience]]:
        """Yield this rank's micro-batches of every optimizer step, reshuffled by (seed, step, epoch).

        The samples of an optimizer step do not depend on the number of ranks or on the accumulation.
        """
        rank, world_size = distributed.rank(), distributed.world_size()
        num_samples = len(experience.sample_ids)
        size = self.rows * self.accumulation * world_size
        for epoch in range(self.epochs):
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + step) * 101 + epoch)
            order = torch.randperm(num_samples, generator=generator)
            for first in range(0, num_samples - size + 1, size):
                chosen = order[first : first + size]
                starts = [(a * world_size + rank) * self.rows for a in range(self.accumulation)]
                yield [experience.select(chosen[s : s + self.rows]) for s in starts]
