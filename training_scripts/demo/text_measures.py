"""PURE: the demo's measures of texts and samples, on plain lists and tensors."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

# Dimensions: B sequences, R response tokens.


def words(text: str) -> list[str]:
    """The whitespace-separated words of a text, lower case."""
    return text.lower().split()


def distinct_n(texts: Iterable[str], n: int = 2) -> float:
    """Share of different n-grams of words among all n-grams of all texts together; 0.0 where there is none.

    It falls with the number of texts: compare equal numbers only. Source: Li et al. 2016, arXiv:1510.03055.
    """
    counts: Counter[tuple[str, ...]] = Counter()
    for text in texts:
        text_words = words(text)
        counts.update(zip(*(text_words[offset:] for offset in range(n)), strict=False))
    return len(counts) / counts.total() if counts else 0.0


def mean_words(texts: Sequence[str]) -> float:
    """Mean number of whitespace-separated words of a text; an empty text counts as none."""
    return sum(len(words(text)) for text in texts) / len(texts)


def unigram_perplexity(
    train_rows: Iterable[Sequence[int]], eval_rows: Iterable[Sequence[int]], vocab_size: int
) -> float:
    """Perplexity per token of eval rows under the train rows' token frequencies, each count raised by one.

    Rows are token ids, end token included: what is scored in the model's perplexity is scored here. Add-one
    smoothing keeps a token that no train row has from costing infinitely much.

    Raises ValueError without eval tokens.
    """
    counts: Counter[int] = Counter()
    for row in train_rows:
        counts.update(row)
    total = counts.total() + vocab_size
    eval_counts: Counter[int] = Counter()
    for row in eval_rows:
        eval_counts.update(row)
    if not eval_counts:
        raise ValueError("no held-out token to score: the eval file is empty")
    log_likelihood = sum(
        number * math.log((counts[token] + 1) / total) for token, number in eval_counts.items()
    )
    return math.exp(-log_likelihood / eval_counts.total())


def response_mask_until_end(response_ids: Tensor, end_id: int) -> Tensor:
    """(B, R) bool, True for each sampled token up to the first end token, that token included.

    response_ids: (B, R) int64; what stands after the first end token is never read.
    """
    is_end = response_ids == end_id
    ends_before = is_end.long().cumsum(dim=-1) - is_end.long()  # (B, R) end tokens strictly before this one
    return ends_before == 0


def kl_per_reply(logprobs: Tensor, ref_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """(B,) fp32 nats a reply: the sum of log p - log p_ref over the reply's own tokens.

    An unbiased estimate of the KL divergence of p from p_ref when the replies were sampled from p; one
    may be negative. All (B, R), the mask bool, True = counts; values outside it are never read.
    """
    difference = logprobs.float() - ref_logprobs.float()
    return torch.where(response_mask, difference, 0.0).sum(dim=-1)
