"""Training of step 2: a ranking loss on pairs, and what a reward model is judged by.

# N pairs; a pass holds each pair's chosen answer, then its rejected one
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from common.data.packed_batch import PackedBatch, pad_sequences
from common.engine.engine_step import LossTerm
from common.models.model_inputs import build_model_inputs
from common.models.tensor_ops import correlation
from common.programs.training_loop import gather_columns, train_and_log
from common.ranks import distributed
from common.runs.run_logger import RunLogger
from step2_reward.losses import center_penalty, end_score_loss, first_difference, token_wise_loss
from step2_reward.ranking_metrics import (
    accuracy_figures,
    expected_calibration_error,
    longer_share,
)


class PairScores(NamedTuple):
    """One batch of pairs under the model."""

    chosen: torch.Tensor  # (N,) fp32
    rejected: torch.Tensor  # (N,) fp32
    values: torch.Tensor  # (total,) fp32, of all tokens end to end


def compute_pair_scores(model: Any, batch: PackedBatch, *, is_packed: bool = False) -> PairScores:
    """Return the scores of both answers: the value at the last real token, end-of-turn token included.

    `model` is a ValueModel or its engine.
    """
    token_ids, pair_lengths = batch.interleave("chosen_ids", "rejected_ids")
    lengths = pair_lengths.flatten()  # (2N,)
    inputs = build_model_inputs(token_ids, lengths, is_packed=is_packed, device=distributed.device())
    values = model(inputs)
    scores = values[lengths.to(values.device).cumsum(0) - 1]
    return PairScores(scores[0::2], scores[1::2], values)


def compute_pair_losses(
    batch: PackedBatch, scores: PairScores, *, rank_loss: str, use_margin: bool
) -> torch.Tensor:
    """Return the ranking loss (N,) of each pair."""
    device = scores.values.device
    if rank_loss == "end_score":
        margin = batch.numbers("margin").to(device) if use_margin else 0.0
        return end_score_loss(scores.chosen, scores.rejected, margin)
    token_ids, pair_lengths = batch.interleave("chosen_ids", "rejected_ids")
    ids, _ = pad_sequences(token_ids, pair_lengths.flatten())  # (2N, T)
    values, _ = pad_sequences(scores.values, pair_lengths.flatten())
    lengths = pair_lengths.flatten().to(device)
    divergence = first_difference(ids[0::2].to(device), ids[1::2].to(device), lengths[0::2], lengths[1::2])
    return token_wise_loss(values[0::2], values[1::2], lengths[0::2], lengths[1::2], divergence)


def judge_pairs(chosen: torch.Tensor, rejected: torch.Tensor, lengths: torch.Tensor) -> dict[str, float]:
    """Return accuracy with its interval, margin, calibration and what length has to do with it.

    `chosen`, `rejected` (N,); `lengths` (2N,) response tokens of the chosen, then of the rejected answers.
    """
    scores = torch.cat([chosen, rejected])
    longer = lengths[: len(chosen)] - lengths[len(chosen) :]
    return {
        **accuracy_figures(chosen, rejected),
        "margin": float((chosen - rejected).mean()),
        "calibration_error": float(expected_calibration_error(chosen - rejected)),
        "length_correlation": float(correlation(scores, lengths.float())),
        "prefers_longer": float(longer_share(chosen - rejected, longer)),
        "longer_is_chosen": float(longer_share(torch.ones_like(chosen), longer)),
        "chosen_score": float(chosen.mean()),
        "rejected_score": float(rejected.mean()),
        "score_std": float(scores.std(correction=0)),
    }


@torch.no_grad()
def evaluate_pairs(
    model: Any, batches: Iterable[tuple[PackedBatch, torch.Tensor]], *, is_packed: bool = False
) -> dict[str, float]:
    """Return `judge_pairs` over the rows of all ranks. Every rank must call this."""

    def columns_of(batch: PackedBatch) -> list[torch.Tensor]:
        scores = compute_pair_scores(model, batch, is_packed=is_packed)
        sides = ("chosen", "rejected")
        lengths = [batch.lengths[f"{s}_ids"] - batch.numbers(f"{s}_response_start") for s in sides]
        return [scores.chosen, scores.rejected, *lengths]

    chosen, rejected, chosen_lengths, rejected_lengths = gather_columns(columns_of, batches)
    return judge_pairs(chosen, rejected, torch.cat([chosen_lengths, rejected_lengths]))


class RewardTrainer:
    """Moves an engine by the mean ranking loss over the global batch's pairs."""

    def __init__(
        self,
        engine: Any,
        *,
        is_packed: bool,
        rank_loss: str,
        use_margin: bool,
        center_coef: float,
        logger: RunLogger,
    ) -> None:
        self.engine, self.is_packed, self.logger = engine, is_packed, logger
        self.rank_loss, self.use_margin, self.center_coef = rank_loss, use_margin, center_coef

    def train_step(self, step: int, micro_batches: list[PackedBatch]) -> float:
        """Do optimizer step `step` (from 1), log it, return its loss. Every rank must call this."""
        term = LossTerm("reward/loss", micro_batches, self._compute_sums, len)
        return train_and_log(step, self.engine, term, self.logger)

    def evaluate(self, step: int, batches: Iterable[tuple[PackedBatch, torch.Tensor]]) -> dict[str, float]:
        """Return and log the held-out figures. Every rank must call this."""
        self.engine.eval()
        figures = evaluate_pairs(self.engine, batches, is_packed=self.is_packed)
        self.logger.log_event(step, {f"reward/eval_{name}": value for name, value in figures.items()})
        return figures

    def _compute_sums(self, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        scores = compute_pair_scores(self.engine, batch, is_packed=self.is_packed)
        losses = compute_pair_losses(batch, scores, rank_loss=self.rank_loss, use_margin=self.use_margin)
        if self.center_coef:
            losses = losses + self.center_coef * center_penalty(scores.chosen, scores.rejected)
        wins = (scores.chosen > scores.rejected).double() + (scores.chosen == scores.rejected).double() / 2
        margins = scores.chosen - scores.rejected
        return losses.sum(), {"reward/accuracy": wins.sum(), "reward/margin": margins.sum()}
