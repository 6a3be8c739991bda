"""Training of step 1: next-token loss on responses, perplexity on held-out rows.

# B sequences, T positions
"""

import math
import time
from collections.abc import Iterable
from typing import Any

import torch

from common import distributed
from common.engine_step import LossTerm, update_engine
from common.models import compute_logits
from common.run_logger import RunLogger
from common.tensor_ops import masked_sum, token_logprobs

Batch = dict[str, torch.Tensor]


def count_targets(batch: Batch) -> float:
    """Return how many tokens of the batch are learned; the first of a row has nothing before it."""
    return float(batch["loss_mask"][:, 1:].sum())


def compute_nll_sum(engine: Any, batch: Batch, num_valid_tokens: int) -> torch.Tensor:
    """Return the negative log-likelihood summed over the batch's targets, fp32 scalar."""
    input_ids = batch["input_ids"].to(distributed.device())
    logits = compute_logits(engine, input_ids, batch["attention_mask"].to(input_ids.device))[:, :-1]
    logprobs = token_logprobs(logits, input_ids[:, 1:], num_valid_tokens=num_valid_tokens)  # (B, T - 1)
    return -masked_sum(logprobs, batch["loss_mask"][:, 1:].to(input_ids.device))


class SFTTrainer:
    """Moves an engine by token means over global batches."""

    def __init__(self, engine: Any, *, num_valid_tokens: int, logger: RunLogger) -> None:
        self.engine, self.num_valid_tokens, self.logger = engine, num_valid_tokens, logger

    def train_step(self, step: int, micro_batches: list[Batch]) -> float:
        """Do optimizer step `step` (from 1), log it, return its loss. Every rank must call this."""
        started = time.monotonic()
        self.engine.train()
        term = LossTerm(
            "sft/loss",
            micro_batches,
            lambda batch: (compute_nll_sum(self.engine, batch, self.num_valid_tokens), {}),
            count_targets,
        )
        means = update_engine(self.engine, [term])
        seconds = time.monotonic() - started
        num_tokens = distributed.sum_float(sum(float(b["attention_mask"].sum()) for b in micro_batches))
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
    def evaluate(self, step: int, batches: Iterable[tuple[Batch, torch.Tensor]]) -> float:
        """Return and log the held-out perplexity, over the tokens of all ranks. Every rank must call this."""
        self.engine.eval()
        nll, count = 0.0, 0.0
        for batch, is_real in batches:
            batch["loss_mask"] &= is_real[:, None]
            nll += float(compute_nll_sum(self.engine, batch, self.num_valid_tokens))
            count += count_targets(batch)
        nll, count = distributed.sum_float(nll), distributed.sum_float(count)
        loss = nll / max(count, 1.0)
        perplexity = math.exp(min(loss, 700.0))
        self.logger.log_event(step, {"sft/eval_loss": loss, "sft/eval_perplexity": perplexity})
        return perplexity
