"""What bench_generate.py compares: the same prompts and lengths through transformers, DeepSpeed and Triptych.

Response lengths are given, as an EOS at that place would set them: weights are random, so no real EOS could.

# B prompts, P prompt, R response
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import StoppingCriteria, StoppingCriteriaList

from common.generation.decode import SamplingOptions
from common.generation.generate import Generator

PAD = 0


@dataclass(frozen=True)
class Workload:
    """Left-padded prompts and how long each response gets."""

    prompt_ids: torch.Tensor  # (B, P) int64
    prompt_mask: torch.Tensor  # (B, P) int64
    lengths: torch.Tensor  # (B,) int64, response tokens

    @property
    def num_tokens(self) -> int:
        """Response tokens that somebody wants."""
        return int(self.lengths.sum())

    @property
    def max_new_tokens(self) -> int:
        """The longest response."""
        return int(self.lengths.max())

    def to(self, device: torch.device) -> "Workload":
        """Return the same on a device."""
        return Workload(*(x.to(device) for x in (self.prompt_ids, self.prompt_mask, self.lengths)))

    def part(self, rows: slice) -> "Workload":
        """Return some of its prompts, cut to the width that they need."""
        width = int(self.prompt_mask[rows].sum(1).max())
        return Workload(self.prompt_ids[rows, -width:], self.prompt_mask[rows, -width:], self.lengths[rows])


def chat_lengths(count: int, generator: torch.Generator) -> torch.Tensor:
    """Return response lengths as a chat model gives them: many short, few long, 4 to 128, mean about 33."""
    draw = 4 - 26 * (1 - torch.rand(count, generator=generator)).log()
    lengths = draw.long().clamp(4, 128)
    lengths[0] = 128
    return lengths


def build_workload(
    lengths: torch.Tensor, *, vocabulary: int, prompt_tokens: tuple[int, int], seed: int
) -> Workload:
    """Return random prompts whose lengths lie between the two numbers of `prompt_tokens`."""
    generator = torch.Generator().manual_seed(seed)
    low, high = prompt_tokens
    prompt_lengths = torch.randint(low, high + 1, (len(lengths),), generator=generator)
    width = int(prompt_lengths.max())
    mask = (torch.arange(width) >= width - prompt_lengths.unsqueeze(1)).long()
    ids = torch.randint(1, vocabulary, mask.shape, generator=generator) * mask
    return Workload(ids, mask, lengths)


class _GivenLengths(StoppingCriteria):
    def __init__(self, lengths: torch.Tensor, start: int) -> None:
        self.lengths, self.start = lengths, start

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return input_ids.shape[1] - self.start >= self.lengths


def run_transformers(model: nn.Module, work: Workload, batch_size: int, **options: Any) -> None:
    """Sample all responses by transformers' `generate`, `batch_size` prompts at a time."""
    for start in range(0, len(work.lengths), batch_size):
        part = work.part(slice(start, start + batch_size))
        stop = _GivenLengths(part.lengths, part.prompt_ids.shape[1])
        model.generate(
            part.prompt_ids,
            attention_mask=part.prompt_mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=part.max_new_tokens,
            pad_token_id=PAD,
            eos_token_id=None,
            stopping_criteria=StoppingCriteriaList([stop]),
            **options,
        )


def run_ours(generator: Generator, work: Workload) -> None:
    """Sample all responses by our decoder, log-probabilities included."""
    options = SamplingOptions(work.max_new_tokens, stop_token_id=-1, pad_token_id=PAD)
    sample_ids = torch.arange(len(work.lengths), device=work.lengths.device)
    found = generator.generate(work.prompt_ids, work.prompt_mask, sample_ids, options, limits=work.lengths)
    if not found.response_mask.sum(1).equal(work.lengths):
        raise AssertionError("responses of other lengths than were asked for")


def build_deepspeed_rollout(engine: Any) -> Callable[[Workload], None]:
    """Return DeepSpeed's own rollout engine as a function; it always decodes to the longest response."""
    from deepspeed.runtime.rollout import HybridEngineRollout, RolloutRequest, SamplingConfig

    class Tokenizer:
        pad_token_id, eos_token_id = PAD, None

    rollout = HybridEngineRollout(engine, Tokenizer())

    def run(work: Workload) -> None:
        request = RolloutRequest(work.prompt_ids, work.prompt_mask)
        rollout.generate(request, SamplingConfig(max_new_tokens=work.max_new_tokens))

    return run
