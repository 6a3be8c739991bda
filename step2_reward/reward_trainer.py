"""Training of step 2: a ranking loss on pairs, and what a reward model is judged by.

# N pairs, T positions; rows 0..N-1 of a batch are the chosen answers, N..2N-1 the rejected ones
"""

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from common import distributed
from common.engine_step import LossTerm, update_engine
from common.run_logger import RunLogger
from common.value_model import gather_scores
from step2_reward.ranking_loss import center_penalty, end_score_loss, first_difference, token_wise_loss
from step2_reward.ranking_metrics import expected_calibration_error, pair_accuracy, score_length_correlation

Batch = dict[str, Any]


class PairScores(NamedTuple):
    """One batch of pairs under the model."""

    chosen: torch.Tensor  # (N,) fp32
    rejected: torch.Tensor  # (N,) fp32
    values: torch.Tensor  # (2N, T) fp32


def compute_pair_scores(model: Any, batch: Batch) -> PairScores:
    """Return the scores of both answers: the value at the last real token, end-of-turn token included."""
    device = distributed.device()
    values = model(batch["input_ids"].to(device), batch["attention_mask"].to(device))
    scores = gather_scores(values, batch["lengths"].to(device) - 1)
    return PairScores(*scores.chunk(2), values)


def compute_pair_losses(
    batch: Batch, scores: PairScores, *, rank_loss: str, use_margin: bool
) -> torch.Tensor:
    """Return the ranking loss (N,) of each pair."""
    device = scores.values.device
    if rank_loss == "end_score":
        margin = batch["margins"].to(device) if use_margin else 0.0
        return end_score_loss(scores.chosen, scores.rejected, margin)
    chosen_ids, rejected_ids = batch["input_ids"].to(device).chunk(2)
    chosen_lengths, rejected_lengths = batch["lengths"].to(device).chunk(2)
    divergence = first_difference(chosen_ids, rejected_ids, chosen_lengths, rejected_lengths)
    chosen_values, rejected_values = scores.values.chunk(2)
    return token_wise_loss(chosen_values, rejected_values, chosen_lengths, rejected_lengths, divergence).loss


def judge_pairs(chosen: torch.Tensor, rejected: torch.Tensor, lengths: torch.Tensor) -> dict[str, float]:
    """Return accuracy, margin, calibration and length correlation of scored pairs.

    `chosen`, `rejected` (N,); `lengths` (2N,) response tokens of the chosen, then of the rejected answers.
    """
    scores = torch.cat([chosen, rejected])
    return {
        "accuracy": float(pair_accuracy(chosen, rejected)),
        "margin": float((chosen - rejected).mean()),
        "calibration_error": float(expected_calibration_error(chosen - rejected)),
        "length_correlation": float(score_length_correlation(scores, lengths.float())),
        "chosen_score": float(chosen.mean()),
        "rejected_score": float(rejected.mean()),
        "score_std": float(scores.std(correction=0)),
    }


@torch.no_grad()
def evaluate_pairs(model: Any, batches: Iterable[tuple[Batch, torch.Tensor]]) -> dict[str, float]:
    """Return `judge_pairs` over the rows of all ranks, and their number. Every rank must call this."""
    columns: list[tuple[torch.Tensor, ...]] = []
    for batch, is_real in batches:
        scores = compute_pair_scores(model, batch)
        lengths = (batch["lengths"] - batch["response_starts"]).chunk(2)
        columns.append(tuple(x.cpu()[is_real] for x in (scores.chosen, scores.rejected, *lengths)))
    gathered = [row for rank_rows in distributed.gather_objects(columns) for row in rank_rows]
    chosen, rejected, chosen_lengths, rejected_lengths = (torch.cat(c) for c in zip(*gathered, strict=True))
    return judge_pairs(chosen, rejected, torch.cat([chosen_lengths, rejected_lengths])) | {
        "pairs": len(chosen)
    }


class RewardTrainer:
    """Moves an engine by the mean ranking loss over the global batch's pairs."""

    def __init__(
        self, engine: Any, *, rank_loss: str, use_margin: bool, center_coef: float, logger: RunLogger
    ) -> None:
        self.engine, self.logger = engine, logger
        self.rank_loss, self.use_margin, self.center_coef = rank_loss, use_margin, center_coef

    def train_step(self, step: int, micro_batches: list[Batch]) -> float:
        """Do optimizer step `step` (from 1), log it, return its loss. Every rank must call this."""
        started = time.monotonic()
        self.engine.train()
        term = LossTerm("reward/loss", micro_batches, self._compute_sums, lambda b: len(b["margins"]))
        means = update_engine(self.engine, [term])
        seconds = time.monotonic() - started
        num_tokens = distributed.sum_float(sum(float(b["attention_mask"].sum()) for b in micro_batches))
        self.logger.log(
            step,
            {
                **{name: value for name, value in means.items() if name.startswith("reward/")},
                "reward/grad_norm": means["grad_norm"],
                "reward/learning_rate": means["learning_rate"],
                "perf/step_seconds": seconds,
                "perf/tokens_per_second": num_tokens / seconds,
            },
        )
        return means["reward/loss"]

    def evaluate(self, step: int, batches: Iterable[tuple[Batch, torch.Tensor]]) -> dict[str, float]:
        """Return and log the held-out figures. Every rank must call this."""
        self.engine.eval()
        figures = evaluate_pairs(self.engine, batches)
        self.logger.log_event(step, {f"reward/eval_{name}": value for name, value in figures.items()})
        return figures

    def _compute_sums(self, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        scores = compute_pair_scores(self.engine, batch)
        losses = compute_pair_losses(batch, scores, rank_loss=self.rank_loss, use_margin=self.use_margin)
        if self.center_coef:
            losses = losses + self.center_coef * center_penalty(scores.chosen, scores.rejected)
        wins = (scores.chosen > scores.rejected).double() + (scores.chosen == scores.rejected).double() / 2
        margins = scores.chosen - scores.rejected
        return losses.sum(), {"reward/accuracy": wins.sum(), "reward/margin": margins.sum()}
