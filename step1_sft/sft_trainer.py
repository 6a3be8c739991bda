"""Training of step 1: next-token loss on responses, perplexity on held-out rows."""

import math
from collections.abc import Iterable
from typing import Any

import torch

from common.data.collators import Batch, pack_sft
from common.engine.engine_step import LossTerm
from common.models.model_inputs import build_model_inputs
from common.programs.training_loop import train_and_log
from common.ranks import distributed
from common.runs.run_logger import RunLogger


def count_targets(batch: Batch) -> float:
    """Return how many tokens of the batch are learned; the first of a row has nothing before it."""
    return float(pack_sft(batch).data["loss_mask"].sum())


def compute_nll_sum(engine: Any, batch: Batch, *, is_packed: bool = False) -> torch.Tensor:
    """Return the negative log-likelihood summed over the batch's targets, fp32 scalar.

    `engine` is a PolicyModel or its engine.
    """
    packed = pack_sft(batch).to(distributed.device())
    token_ids, is_target = packed.data["input_ids"], packed.data["loss_mask"]
    inputs = build_model_inputs(
        token_ids, packed.lengths["input_ids"], is_packed=is_packed, device=token_ids.device
    )
    return -engine(inputs, inputs.token_slots[is_target], token_ids[is_target], is_summed=True)


class SFTTrainer:
    """Moves an engine by token means over global batches."""

    def __init__(self, engine: Any, *, is_packed: bool, logger: RunLogger) -> None:
        self.engine, self.is_packed, self.logger = engine, is_packed, logger

    def train_step(self, step: int, micro_batches: list[Batch]) -> float:
        """Do optimizer step `step` (from 1), log it, return its loss. Every rank must call this."""
        packed = [pack_sft(batch) for batch in micro_batches]  # once: loss and counts read them
        term = LossTerm("sft/loss", packed, self._compute_sums, count_targets)
        return train_and_log(step, self.engine, term, self.logger)

    @torch.no_grad()
    def evaluate(self, step: int, batches: Iterable[tuple[dict[str, Any], torch.Tensor]]) -> float:
        """Return and log the held-out perplexity, over the tokens of all ranks. Every rank must call this."""
        self.engine.eval()
        nll, count = 0.0, 0.0
        for batch, is_real in batches:
            batch["loss_mask"] &= is_real[:, None]
            nll += float(compute_nll_sum(self.engine, batch, is_packed=self.is_packed))
            count += count_targets(batch)
        nll, count = distributed.sum_float(nll), distributed.sum_float(count)
        loss = nll / max(count, 1.0)
        perplexity = math.exp(min(loss, 700.0))
        self.logger.log_event(step, {"sft/eval_loss": loss, "sft/eval_perplexity": perplexity})
        return perplexity

    def _compute_sums(self, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return compute_nll_sum(self.engine, batch, is_packed=self.is_packed), {}
