"""One optimizer step of a DeepSpeed engine on exact global means: the `update` verb of every trained role."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from common import distributed

GRAD_NORM = "the gradient's norm"


@dataclass(frozen=True)
class LossTerm:
    """One mean in a loss, over all micro-batches of all ranks.

    `compute_sums(micro_batch)` returns (loss_sum, stats): a differentiable sum of per-item losses and named
    sums to report. `count_items(micro_batch)` is the number of items (tokens, pairs) in those sums; it must
    not need a forward pass, because the denominator is known before the first one. `count_stats` is that of
    the named sums, where it is another.
    """

    name: str
    micro_batches: Sequence[Any]
    compute_sums: Callable[[Any], tuple[torch.Tensor, dict[str, torch.Tensor]]]
    count_items: Callable[[Any], float]
    weight: float = 1.0
    count_stats: Callable[[Any], float] | None = None


def update_engine(engine: Any, terms: Sequence[LossTerm]) -> dict[str, float]:
    """Return the global means after one optimizer step on the weighted sum of the terms.

    A loss is a mean over the global batch: the item count is summed over ranks and micro-batches first, each
    backward pass then adds its share. DeepSpeed averages gradients over ranks, hence the factor `world_size`.
    The result holds each term's loss under its name, its stats, `grad_norm` and `learning_rate`.
    Every rank must call this with as many micro-batches. Raises FloatingPointError when a loss or the
    gradient is not finite; the weights are not touched. (fp16 skips such a step and lowers its loss scale.)
    """
    world_size, step = distributed.world_size(), engine.global_steps + 1
    totals = _global_counts(terms)
    passes = [
        (term, *total, m) for term, total in zip(terms, totals, strict=True) for m in term.micro_batches
    ]
    sums: dict[str, torch.Tensor] = {}
    for index, (term, total, stats_total, micro_batch) in enumerate(passes):
        is_last = index == len(passes) - 1
        engine.set_gradient_accumulation_boundary(is_last)
        loss_sum, stats = term.compute_sums(micro_batch)
        shares = {term.name: loss_sum / total} | {name: value / stats_total for name, value in stats.items()}
        for name, share in shares.items():
            share = share.detach().double().cpu()
            sums[name] = sums.get(name, torch.zeros((), dtype=torch.float64)) + share
        engine.backward(loss_sum * (term.weight * world_size / total), scale_wrt_gas=False)
        if is_last:
            means = _reduce_means(sums)
            _refuse_if_not_finite(step, {t.name: means[t.name] for t in terms})
            plain_norm = _plain_grad_norm(engine)
            _refuse_if_not_finite(step, {GRAD_NORM: plain_norm})
        engine.step()
    means["grad_norm"] = plain_norm if plain_norm is not None else float(engine.get_global_grad_norm() or 0.0)
    if not engine.fp16_enabled():  # ZeRO has skipped the step, and would go on skipping without a word
        _refuse_if_not_finite(step, {GRAD_NORM: means["grad_norm"]})
    means["learning_rate"] = float(engine.optimizer.param_groups[0]["lr"])
    return means


def _global_counts(terms: Sequence[LossTerm]) -> list[tuple[float, float]]:
    """Return the denominators of each term's loss and statistics, summed over ranks and micro-batches."""
    counts = [
        sum(float(count(m)) for m in term.micro_batches)
        for term in terms
        for count in (term.count_items, term.count_stats or term.count_items)
    ]
    totals = distributed.reduce_sum(torch.tensor(counts, dtype=torch.float64)).clamp(min=1).tolist()
    return list(zip(totals[0::2], totals[1::2], strict=True))


def _plain_grad_norm(engine: Any) -> float | None:
    """Return the global gradient norm under stage 0 in fp32, where DeepSpeed clips but does not tell it."""
    if engine.zero_optimization() or engine.bfloat16_enabled() or engine.fp16_enabled():
        return None
    return float(
        torch.nn.utils.get_total_norm([p.grad for p in engine.module.parameters() if p.grad is not None])
    )


def _reduce_means(sums: dict[str, torch.Tensor]) -> dict[str, float]:
    reduced = distributed.reduce_sum(torch.stack(list(sums.values())))
    return dict(zip(sums, reduced.tolist(), strict=True))


def _refuse_if_not_finite(step: int, numbers: dict[str, float | None]) -> None:
    bad = [name for name, value in numbers.items() if value is not None and not math.isfinite(value)]
    if bad:
        raise FloatingPointError(
            f"{', '.join(bad)} is not finite at optimizer step {step}; the step "
            "was refused. Lower the learning rate, or use --dtype bf16 or fp32 in place of fp16."
        )
