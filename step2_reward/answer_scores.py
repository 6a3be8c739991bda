"""Scores, values and log-probabilities of the responses in a step-2 batch.

# N pairs; a pass holds each pair's chosen answer, then its rejected one
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from common.data.packed_batch import PackedBatch, sum_by_sequence, to_device, token_positions
from common.models.model_inputs import ModelInputs, build_model_inputs
from common.models.value_model import compute_scores

SIDES = ("chosen", "rejected")


class PairScores(NamedTuple):
    """Results of the model for one batch of pairs."""

    chosen: torch.Tensor  # (N,) fp32
    rejected: torch.Tensor  # (N,) fp32
    values: torch.Tensor | None = None  # (total,) fp32, for all tokens end to end


def build_pair_inputs(
    batch: PackedBatch,
    sides: Sequence[str] = SIDES,
    *,
    is_packed: bool = False,
    shares_prompts: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, ModelInputs]:
    """Token ids (total,) and lengths (2N,) of both responses of each pair, and the model inputs.

    In packed inputs the common prefix of a pair may occur once. `sides` are the names of the responses.
    """
    token_ids, pair_lengths = batch.interleave(*(f"{side}_ids" for side in sides))
    sizes = torch.full((len(batch),), len(sides)) if shares_prompts else None
    lengths = pair_lengths.flatten()
    return token_ids, lengths, build_model_inputs(token_ids, lengths, is_packed=is_packed, group_sizes=sizes)


def shared_length(row: dict[str, Any]) -> int:
    """Number of tokens in the common prefix of a pair's two responses."""
    pair = zip(row["chosen_ids"], row["rejected_ids"], strict=False)
    return next(
        (i for i, (a, b) in enumerate(pair) if a != b),
        min(map(len, (row["chosen_ids"], row["rejected_ids"]))),
    )


def compute_pair_scores(
    model: Any, batch: PackedBatch, *, with_values: bool = False, **layout: bool
) -> PairScores:
    """Scores of both responses, see `compute_scores`; or, if requested, the values of all tokens, and the
    values at the last tokens as scores.

    `model` is a ValueModel or its engine; `layout` is passed to `build_pair_inputs`.
    """
    _, lengths, inputs = build_pair_inputs(batch, **layout)
    if not with_values:
        is_response = token_positions(lengths) >= response_starts(batch).repeat_interleave(lengths)
        scores = compute_scores(model, inputs, lengths, is_response)
        return PairScores(scores[0::2], scores[1::2])
    values = model(inputs)
    (last,) = to_device([lengths.cumsum(0) - 1], values.device)
    scores = values[last]
    return PairScores(scores[0::2], scores[1::2], values)


def compute_answer_logprobs(
    model: Any, batch: PackedBatch, sides: Sequence[str] = SIDES, **layout: bool
) -> torch.Tensor:
    """Log-probability (2N,) fp32 of each response given its prompt, end-of-turn token included.

    `model` is a PolicyModel or its engine; `sides` and `layout` are passed to `build_pair_inputs`. The first
    token of a sequence has no log-probability.
    """
    token_ids, lengths, inputs = build_pair_inputs(batch, sides, **layout)
    first = first_scored(batch, sides)  # (2N,)
    is_answer = token_positions(lengths) >= first.repeat_interleave(lengths)  # (total,)
    logprobs, _ = model(inputs, inputs.slots_before(is_answer), token_ids[is_answer])
    return sum_by_sequence(logprobs, is_answer, lengths)


def response_starts(batch: PackedBatch, sides: Sequence[str] = SIDES) -> torch.Tensor:
    """Position of the first token of each response after its prompt: (2N,) int64."""
    return torch.stack([batch.numbers(f"{side}_response_start") for side in sides], dim=1).flatten()


def first_scored(batch: PackedBatch, sides: Sequence[str] = SIDES) -> torch.Tensor:
    """Position of the first token of each response that has a log-probability: (2N,) int64."""
    return response_starts(batch, sides).clamp(min=1)
