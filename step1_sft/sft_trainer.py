"""Training of step 1: next-token loss on responses, perplexity on held-out rows."""

import math
import time
from collections.abc import Iterable
from typing import Any

import torch

from common import distributed
from common.data.collators import Batch, pack_sft
from common.engine_step import LossTerm, update_engine
from common.model_inputs import lay_out
from common.run_logger import RunLogger


def count_targets(batch: Batch) -> float:
    """Return how many tokens of the batch are learned; the first of a row has nothing before it."""
    return float(pack_sft(batch).data["loss_mask"].sum())


def count_tokens(batch: Batch) -> float:
    """Return the tokens of the batch, padding left out."""
    return float(len(pack_sft(batch).data["input_ids"]))


def compute_nll_sum(engine: Any, batch: Batch, *, is_flat: bool = False) -> torch.Tensor:
    """Return the negative log-likelihood summed over the batch's targets, fp32 scalar.

    `engine` is a PolicyModel or its engine.
    """
    packed = pack_sft(batch).to(distributed.device())
    token_ids, is_target = packed.data["input_ids"], packed.data["loss_mask"]
    inputs = lay_out(token_ids, packed.lengths["input_ids"], is_flat=is_flat, device=token_ids.device)
    return -engine(inputs, inputs.token_places[is_target], token_ids[is_target], is_summed=True)


class SFTTrainer:
    """Moves an engine by token means over global batches."""

    def __init__(self, engine: Any, *, is_flat: bool, logger: RunLogger) -> None:
        self.engine, self.is_flat, self.logger = engine, is_flat, logger

    def train_step(self, step: int, micro_batches: list[Batch]) -> float:
        """Do optimizer step `step` (from 1), log it, return its loss. Every rank must call this."""
        started = time.monotonic()
        self.engine.train()
        micro_batches = [pack_sft(batch) for batch in micro_batches]  # once: loss and counts read them
        term = LossTerm(
            "sft/loss",
            micro_batches,
            lambda batch: (compute_nll_sum(self.engine, batch, is_flat=self.is_flat), {}),
            count_targets,
        )
        means = update_engine(self.engine, [term])
        seconds = time.monotonic() - started
        num_tokens = distributed.sum_float(sum(count_tokens(batch) for batch in micro_batches))
        self.logger.log(
            step,
            {
                "sft/loss": means["sft/loss"],
                "sft/grad_norm": means["grad_norm"],
                "sft/learning_rate": means["learning_rate"],
                "perf/step_seconds": seconds,
                "perf/tokens_per_second": num_tokens / seconds,
            },
        )
        return means["sft/loss"]

    @torch.no_grad()
    def evaluate(self, step: int, batches: Iterable[tuple[dict[str, Any], torch.Tensor]]) -> float:
        """Return and log the held-out perplexity, over the tokens of all ranks. Every rank must call this."""
        self.engine.eval()
        nll, count = 0.0, 0.0
        for batch, is_real in batches:
            batch["loss_mask"] &= is_real[:, None]
            nll += float(compute_nll_sum(self.engine, batch, is_flat=self.is_flat))
            count += count_targets(batch)
        nll, count = distributed.sum_float(nll), distributed.sum_float(count)
        loss = nll / max(count, 1.0)
        perplexity = math.exp(min(loss, 700.0))
        self.logger.log_event(step, {"sft/eval_loss": loss, "sft/eval_perplexity": perplexity})
        return perplexity
