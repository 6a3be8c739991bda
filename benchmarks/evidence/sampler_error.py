"""A sampler that differs from the trainer, by `--plugins benchmarks.evidence.sampler_error`.

SAMPLER_ERROR, an environment variable, is KIND:NATS. The sampler's logits get Gaussian noise, whose scale is
adapted to keep the mean |log-probability of the sampler - of the trainer| of sampled tokens at NATS. Tokens
and log-probabilities are those of the noisy logits.

biased      constant noise for each token of the vocabulary, as from rounded weights
unbiased    new noise for every logit, as from another summation order
"""

import os
from typing import Any

import torch

from common.generation import decode, decode_probe
from common.models import family_probe

TOKENS = 300  # between adjustments of the noise scale


def accept_faults() -> None:
    """Disable the probes that reject a family whose results differ from transformers'."""
    family_probe._measure = lambda *_: family_probe.FamilyProbe()
    decode_probe._measure = lambda *_: ""


class SamplerError:
    """Replaces `sample_tokens`; `size` is the noise's standard deviation."""

    def __init__(self, kind: str, nats: float, seed: int = 0) -> None:
        self.is_biased = {"biased": True, "unbiased": False}[kind]
        self.nats, self.size = nats, nats
        self.draw = torch.Generator().manual_seed(seed)
        self.fixed = torch.empty(0)
        self.total, self.count = 0.0, 0
        self.plain = decode.sample_tokens

    def sample_tokens(self, logits: torch.Tensor, *args: Any, **options: Any) -> Any:
        """Tokens sampled from the logits with noise."""
        if self.is_biased and self.fixed.numel() != logits.shape[-1]:
            self.fixed = torch.randn(logits.shape[-1], generator=self.draw)
        noise = self.fixed if self.is_biased else torch.randn(logits.shape, generator=self.draw)
        sampled = self.plain(logits.float() + self.size * noise, *args, **options)
        logprobs = (
            logits.float().div(options["temperature"])[:, : options["num_valid_tokens"]].log_softmax(-1)
        )
        own = logprobs.gather(-1, sampled.token_ids[:, None]).squeeze(-1)
        self.total += float((sampled.logprobs - own).abs().sum())
        self.count += len(own)
        if self.count >= TOKENS:
            factor = self.nats / max(self.total / self.count, 1e-9)
            self.size *= min(max(factor, 0.5), 2.0)
            self.total, self.count = 0.0, 0
        return sampled


if os.environ.get("SAMPLER_ERROR"):
    KIND, _, NATS = os.environ["SAMPLER_ERROR"].partition(":")
    accept_faults()
    decode.sample_tokens = SamplerError(KIND, float(NATS)).sample_tokens
