"""Typical bugs of PPO programs, injected into ours by `--plugins benchmarks.evidence.faults`.

The environment variable FAULT names one; nothing else in the run changes.
"""

import os
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.evidence.sampler_error import accept_faults
from common.generation import decode, generate
from common.models import loading, output_head
from step3_ppo import algorithms, ppo_losses

DROPOUT = 0.1


def length_searched_for_pad() -> None:
    """The stop token is mistaken for padding, as if EOS is PAD and a response ends at the first PAD.

    It is in no loss, and the score is at the token before it.
    """
    plain = generate.collect_responses

    def collect(state: Any, options: Any) -> generate.Generation:
        sampled = plain(state, options)
        mask = sampled.response_mask & (sampled.response_ids != options.stop_token_id)
        mask[:, 0] = True  # a response needs at least one token
        kept = {"logprobs": sampled.logprobs, "truncated_logprobs": sampled.truncated_logprobs}
        kept = {name: torch.where(mask, numbers, 0.0) for name, numbers in kept.items()}
        return sampled._replace(response_mask=mask, sampled_mask=mask & sampled.sampled_mask, **kept)

    generate.collect_responses = collect


def score_lost_with_eos() -> None:
    """The score of a finished response is after its last token, outside every loss."""
    plain = algorithms.shaped_scores

    def scores(batch: Any, args: Any) -> torch.Tensor:
        return torch.where(batch.numbers("is_finished"), 0.0, plain(batch, args))

    algorithms.shaped_scores = scores


def bf16_logprobs() -> None:
    """All log-probabilities are rounded to bf16: sampler, trainer, reference."""
    plain_scores = output_head._TokenScores.apply
    plain_sample = decode.sample_tokens

    def rounded(logprobs: torch.Tensor) -> torch.Tensor:
        return logprobs + (logprobs.bfloat16().float() - logprobs).detach()

    def scores(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropies = plain_scores(*args)
        return rounded(logprobs), entropies

    def sample(*args: Any, **options: Any) -> Any:
        sampled = plain_sample(*args, **options)
        return sampled._replace(logprobs=rounded(sampled.logprobs))

    output_head._TokenScores.apply = scores
    decode.sample_tokens = sample


def mean_of_each_micro_batch() -> None:
    """A loss is the mean over the tokens of its micro-batch, and a step the mean of these."""
    plain = ppo_losses.LossTerm

    def term(name: str, batches: Any, compute_sums: Callable, count: Callable, weight: float = 1.0) -> Any:
        def mean(batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
            total, stats = compute_sums(batch)
            share = 1 / count(batch)
            return total * share, {k: x if isinstance(x, tuple) else x * share for k, x in stats.items()}

        return plain(name, batches, mean, lambda batch: 1.0, weight)

    ppo_losses.LossTerm = term


def dropout_in_updates() -> None:
    """The passes of the updates have dropout; those of the rollout do not."""
    plain = loading.set_dropout
    loading.set_dropout = lambda owner, dropout: plain(owner, DROPOUT)


def one_pass_whitening() -> None:
    """The variance of advantages is E[x^2] - E[x]^2 in fp32."""

    def whiten(x: torch.Tensor, mask: torch.Tensor, *, reduce_sum: Callable) -> torch.Tensor:
        kept = torch.where(mask, x.float(), 0.0)
        count = mask.sum()
        mean = kept.sum() / count
        variance = kept.square().sum() / count - mean.square()
        return torch.where(mask, (kept - mean) * torch.rsqrt(variance + 1e-8), 0.0)

    algorithms.whiten = whiten


FAULTS: dict[str, Callable[[], None]] = {
    "length searched for PAD": length_searched_for_pad,
    "score lost with EOS": score_lost_with_eos,
    "log-probabilities in bf16": bf16_logprobs,
    "mean of each micro-batch": mean_of_each_micro_batch,
    "dropout in updates": dropout_in_updates,
    "one-pass whitening": one_pass_whitening,
}
if os.environ.get("FAULT"):
    accept_faults()
    FAULTS[os.environ["FAULT"]]()
