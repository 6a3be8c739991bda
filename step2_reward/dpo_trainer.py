"""Training of step 2 under --loss dpo: a policy learns from the pairs themselves, without a reward model.

# N pairs; a pass holds each pair's chosen answer, then its rejected one
"""

from collections.abc import Iterable
from typing import Any

import torch

from common.data.packed_batch import PackedBatch, token_positions
from common.engine.engine_step import LossTerm
from common.models.model_inputs import build_model_inputs
from common.programs.training_loop import gather_columns, train_and_log
from common.ranks import distributed
from common.runs.run_logger import RunLogger
from step2_reward.losses import DPOLoss, dpo_loss
from step2_reward.ranking_metrics import accuracy_figures, expected_calibration_error


def compute_answer_logprobs(model: Any, batch: PackedBatch, *, is_packed: bool = False) -> torch.Tensor:
    """Return (2N,) fp32: the log-probability of each answer given its prompt, end-of-turn token included.

    `model` is a PolicyModel or its engine. A token that nothing stands before has no probability.
    """
    token_ids, pair_lengths = batch.interleave("chosen_ids", "rejected_ids")
    starts = [batch.numbers(f"{side}_response_start") for side in ("chosen", "rejected")]
    first = torch.stack(starts, dim=1).flatten().clamp(min=1)  # (2N,)
    lengths, device = pair_lengths.flatten(), distributed.device()
    is_answer = token_positions(lengths) >= first.repeat_interleave(lengths)  # (total,)
    inputs = build_model_inputs(token_ids, lengths, is_packed=is_packed, device=device)
    logprobs, _ = model(inputs, inputs.token_slots[is_answer], token_ids[is_answer])
    sequence = torch.arange(len(lengths)).repeat_interleave(lengths)[is_answer].to(logprobs.device)
    return torch.zeros(len(lengths), device=logprobs.device).index_add(0, sequence, logprobs)


class DPOTrainer:
    """Moves an engine by the mean DPO loss over the global batch's pairs."""

    def __init__(
        self, engine: Any, *, is_packed: bool, beta: float, label_smoothing: float, logger: RunLogger
    ) -> None:
        self.engine, self.is_packed, self.logger = engine, is_packed, logger
        self.beta, self.label_smoothing = beta, label_smoothing

    def score_reference(self, batch: PackedBatch) -> torch.Tensor:
        """Return `compute_answer_logprobs` of the policy as it is, as evaluation has it."""
        self.engine.eval()
        return compute_answer_logprobs(self.engine, batch, is_packed=self.is_packed)

    def train_step(self, step: int, micro_batches: list[PackedBatch]) -> float:
        """Do optimizer step `step` (from 1), log it, return its loss. Every rank must call this."""
        term = LossTerm("dpo/loss", micro_batches, self._compute_sums, len)
        return train_and_log(step, self.engine, term, self.logger)

    @torch.no_grad()
    def evaluate(self, step: int, batches: Iterable[tuple[PackedBatch, torch.Tensor]]) -> dict[str, float]:
        """Return and log the held-out figures. Every rank must call this."""
        self.engine.eval()
        losses, chosen, rejected = gather_columns(self._compute_losses, batches)
        figures = {
            "loss": float(losses.mean()),
            **accuracy_figures(chosen, rejected),
            "margin": float((chosen - rejected).mean()),
            "calibration_error": float(expected_calibration_error(chosen - rejected)),
            "chosen_reward": float(chosen.mean()),
            "rejected_reward": float(rejected.mean()),
        }
        self.logger.log_event(step, {f"dpo/eval_{name}": value for name, value in figures.items()})
        return figures

    def _compute_losses(self, batch: PackedBatch) -> DPOLoss:
        reference = batch.data["reference_logprobs"].to(distributed.device())  # (2N,)
        policy = compute_answer_logprobs(self.engine, batch, is_packed=self.is_packed)
        return dpo_loss(
            policy[0::2],
            policy[1::2],
            reference[0::2],
            reference[1::2],
            beta=self.beta,
            label_smoothing=self.label_smoothing,
        )

    def _compute_sums(self, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        found = self._compute_losses(batch)
        margins = found.chosen_rewards - found.rejected_rewards
        wins = (margins.sign().double() + 1) / 2  # a tie counts half
        sums = {"accuracy": wins, "margin": margins}
        sums |= {"chosen_reward": found.chosen_rewards, "rejected_reward": found.rejected_rewards}
        return found.loss.sum(), {f"dpo/{name}": values.sum() for name, values in sums.items()}
