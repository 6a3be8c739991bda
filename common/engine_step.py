"""One optimizer step of a DeepSpeed engine on exact global means: the `update` verb of every trained role."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from common import distributed
from common.refusal import StepRefused
from common.step_costs import COSTS

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
    Every rank must call this with as many micro-batches. Raises StepRefused, on every rank, when a loss or
    the gradient is not finite: weights, optimizer and schedule are as before, and the next step can be made.
    (fp16 skips a step whose gradient is not and lowers its loss scale; that it cannot lower it any more is
    refused.)
    """
    try:
        return _update(engine, terms)
    except StepRefused as error:
        error.batches = [m for term in terms for m in term.micro_batches]
        raise


def _update(engine: Any, terms: Sequence[LossTerm]) -> dict[str, float]:
    world_size = distributed.world_size()
    totals = _global_counts(terms)
    passes = [
        (term, *total, m) for term, total in zip(terms, totals, strict=True) for m in term.micro_batches
    ]
    sums: dict[str, torch.Tensor] = {}
    with COSTS.clock("forward_backward"):
        for index, (term, total, stats_total, micro_batch) in enumerate(passes):
            is_last = index == len(passes) - 1
            engine.set_gradient_accumulation_boundary(is_last)
            loss_sum, stats = term.compute_sums(micro_batch)
            shares = {term.name: loss_sum / total} | {n: value / stats_total for n, value in stats.items()}
            for name, share in shares.items():
                share = share.detach().double().cpu()
                sums[name] = sums.get(name, torch.zeros((), dtype=torch.float64)) + share
            engine.backward(loss_sum * (term.weight * world_size / total), scale_wrt_gas=False)
            if not is_last:
                _step(engine)  # only counts the micro-batch
        means = _reduce_means(sums)
    with COSTS.clock("optimizer"):
        plain_norm = _plain_grad_norm(engine)
        numbers = {t.name: means[t.name] for t in terms} | {GRAD_NORM: plain_norm}
        if not _all_finite(numbers):
            _skip_step(engine)
            _refuse_if_not_finite(numbers)
        _step(engine)
        grad_norm = plain_norm if plain_norm is not None else engine.get_global_grad_norm()
        means["grad_norm"] = float(grad_norm or 0.0)
    if not engine.fp16_enabled():  # ZeRO has skipped the step, and would go on skipping without a word
        _refuse_if_not_finite({GRAD_NORM: means["grad_norm"]})
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


def _all_finite(numbers: dict[str, float | None]) -> bool:
    return all(value is None or math.isfinite(value) for value in numbers.values())


def _refuse_if_not_finite(numbers: dict[str, float | None]) -> None:
    bad = [name for name in numbers if not _all_finite({name: numbers[name]})]
    if bad:
        raise StepRefused(
            f"not finite: {', '.join(bad)}. Where that comes back, lower the learning rate, or use --dtype "
            "bf16 or fp32 in place of fp16"
        )


def _step(engine: Any) -> None:
    """Let DeepSpeed make its optimizer step; StepRefused when fp16 overflows at its lowest loss scale."""
    scaler = engine.optimizer.loss_scaler if engine.fp16_enabled() else None
    is_at_floor = scaler is not None and scaler.cur_scale <= getattr(scaler, "min_scale", 0)
    if is_at_floor:
        scaler.raise_error_at_min_scale = False  # it would leave its gradients behind
    engine.step()
    if is_at_floor and engine.optimizer.overflow:
        raise StepRefused(
            f"the gradient overflows fp16 at the lowest loss scale, {scaler.min_scale}; use --dtype bf16 or "
            "fp32"
        )


def _skip_step(engine: Any) -> None:
    """Leave out an optimizer step: DeepSpeed's own way out for an overflow drops the gradients."""
    if not engine.zero_optimization():
        engine.zero_grad()
        return
    zero = engine.optimizer
    # What stages 1 and 2, and stage 3, compute the norm by; found infinite, the step is left out.
    infinite = {"scaled_global_norm": lambda: math.inf, "_get_norm_groups": lambda: [torch.tensor(math.inf)]}
    infinite["check_grad_overflow"] = True
    before = {name: vars(zero)[name] for name in infinite if name in vars(zero)}
    scaler = vars(zero.loss_scaler) if engine.fp16_enabled() else {}
    scaler_before = dict(scaler)
    vars(zero).update(infinite)
    scaler["raise_error_at_min_scale"] = False
    try:
        engine.step()
    finally:
        for name in infinite:
            del vars(zero)[name]
        vars(zero).update(before)
        # A loss that is not finite says nothing about the scale of gradients: it stays.
        scaler.clear()
        scaler.update(scaler_before)
    assert zero.overflow, "DeepSpeed has made a step that was refused"
