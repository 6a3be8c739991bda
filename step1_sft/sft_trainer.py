"""Training of step 1: next-token loss on responses, perplexity on held-out rows."""

import math
from collections.abc import Iterable
from typing import Any

import torch

from common.data.packed_batch import PackedBatch
from common.engine.engine_step import LossTerm
from common.models.policy_model import compute_nll_sum, count_targets
from common.programs.training_loop import train_and_log
from common.ranks import distributed
from common.runs.run_logger import RunLogger


class SFTTrainer:
    """Moves an engine by token means over global batches."""

    def __init__(self, engine: Any, *, is_packed: bool, logger: RunLogger) -> None:
        self.engine, self.is_packed, self.logger = engine, is_packed, logger

    def train_step(self, step: int, micro_batches: list[PackedBatch]) -> float:
        """Do optimizer step `step` (from 1), log it, return its loss. Every rank must call this."""
        term = LossTerm("sft/loss", micro_batches, self._compute_sums, count_targets)
        return train_and_log(step, self.engine, term, self.logger)

    @torch.no_grad()
    def evaluate(self, step: int, batches: Iterable[tuple[PackedBatch, torch.Tensor]]) -> float:
        """Return and log the held-out perplexity, over the tokens of all ranks. Every rank must call this."""
        self.engine.eval()
        nll, count = 0.0, 0.0
        for batch, is_real in batches:
            is_counted = is_real.repeat_interleave(batch.lengths["loss_mask"])
            batch = batch.with_key("loss_mask", batch.data["loss_mask"] & is_counted, like="loss_mask")
            nll += float(compute_nll_sum(self.engine, batch, is_packed=self.is_packed))
            count += count_targets(batch)
        nll, count = distributed.sum_float(nll), distributed.sum_float(count)
        loss = nll / max(count, 1.0)
        perplexity = math.exp(min(loss, 700.0))
        self.logger.log_event(step, {"sft/eval_loss": loss, "sft/eval_perplexity": perplexity})
        return perplexity

    def _compute_sums(self, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return compute_nll_sum(self.engine, batch, is_packed=self.is_packed), {}
