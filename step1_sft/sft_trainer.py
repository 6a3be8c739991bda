"""Trainer of step 1: next-token loss on responses, perplexity on held-out rows."""

import math
from collections.abc import Iterable

import torch

from common.data.packed_batch import PackedBatch
from common.models.policy_model import compute_nll_sum, count_targets
from common.models.router_loss import add_router_loss
from common.programs.single_model import Trainer
from common.ranks import distributed


class SFTTrainer(Trainer):
    """Trains a model by the token mean over global batches."""

    kind = "sft"
    columns = ("loss", "learning_rate", "grad_norm")
    metadata_key = "eval_perplexity"

    def compute_sums(self, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Negative log-likelihood summed over the targets, and a mixture's router loss."""
        nll = compute_nll_sum(self.engine, batch, is_packed=self.is_packed)
        return add_router_loss(self.engine, nll, batch, self.count)

    def count(self, batch: PackedBatch) -> float:
        """Number of targets."""
        return count_targets(batch)

    def evaluate_batches(self, batches: Iterable[tuple[PackedBatch, torch.Tensor]]) -> dict[str, float]:
        """Loss and perplexity over the tokens of all ranks. Every rank must call this."""
        nll, count = 0.0, 0.0
        for batch, is_real in batches:
            is_counted = is_real.repeat_interleave(batch.lengths["loss_mask"])
            batch = batch.with_key("loss_mask", batch.data["loss_mask"] & is_counted, like="loss_mask")
            nll = nll + compute_nll_sum(self.engine, batch, is_packed=self.is_packed).double()
            count += count_targets(batch)
        loss = distributed.sum_float(float(nll)) / (distributed.sum_float(count) or math.nan)
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}

    def evaluate(self, step: int, batches: Iterable[tuple[PackedBatch, torch.Tensor]]) -> float:
        """Log the held-out loss and perplexity; return the perplexity. Every rank must call this."""
        return super().evaluate(step, batches)["perplexity"]
