"""One optimizer step of a DeepSpeed engine on exact global means, for every trained role."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from common.ranks import distributed
from common.ranks.deepspeed_internals import combined_norm, gradient_norms, known_norms, reduced_gradients
from common.ranks.digests import DIGESTS
from common.ranks.failures import StepSkipped
from common.ranks.step_costs import COSTS

GRAD_NORM = "the gradient's norm"
# Sum over the items of the term, or (sum, number of items) if only some of them count.
Stat = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class LossTerm:
    """One mean in a loss, over all micro-batches of all ranks.

    `compute_sums(micro_batch)` returns (loss_sum, stats): a differentiable sum of per-item losses and named
    statistics to report. `count_items(micro_batch)` is the number of items (tokens, pairs) in those sums; it
    must not need a forward pass, because the denominator is known before the first one.
    """

    name: str
    micro_batches: Sequence[Any]
    compute_sums: Callable[[Any], tuple[torch.Tensor, dict[str, Stat]]]
    count_items: Callable[[Any], float]
    weight: float = 1.0


@dataclass(frozen=True)
class Gradients:
    """Gradients of an engine for an optimizer step that has not been taken yet."""

    engine: Any
    terms: Sequence[LossTerm]
    means: dict[str, float]  # global means of losses and statistics
    grad_norm: float  # before clipping; infinite if a gradient is not finite
    norms: Sequence[torch.Tensor]  # on the CPU; DeepSpeed's step computes the norm from them

    def find_bad(self) -> list[str]:
        """Names of the losses and norms that are not finite and require the step to be skipped.

        Under fp16 an infinite gradient is tolerated while the loss scale can be lowered: DeepSpeed then skips
        the step itself.
        """
        bad = [term.name for term in self.terms if not math.isfinite(self.means[term.name])]
        is_tolerated = False
        if self.engine.fp16_enabled():
            scaler = self.engine.optimizer.loss_scaler
            is_tolerated = scaler.cur_scale > getattr(scaler, "min_scale", 0)
        if not math.isfinite(self.grad_norm) and not is_tolerated:
            bad.append(f"{GRAD_NORM} of {self.terms[0].name}")
        return bad


def compute_gradients(engine: Any, terms: Sequence[LossTerm]) -> Gradients:
    """Gradients of the weighted sum of the terms in training mode, and the global means.

    A loss is a mean over the global batch: the item count is summed over ranks and micro-batches first, then
    each backward pass adds its share. DeepSpeed averages gradients over ranks, hence the factor `world_size`.
    Every rank must call this with the same number of micro-batches, and then `take_steps` or `skip_step`
    before the engine's next pass with gradients. The host waits for the device once, after the last pass.
    Raises StepSkipped, on every rank and before any pass, if a term has no item.
    """
    engine.train()
    world_size = distributed.world_size()
    counts = [sum(float(term.count_items(m)) for m in term.micro_batches) for term in terms]
    totals = distributed.reduce_sum(torch.tensor(counts, dtype=torch.float64)).tolist()
    if not all(totals):
        raise StepSkipped(
            "no token of this step's rows is trained on; inspect them with tools.check_data",
            [micro_batch for term in terms for micro_batch in term.micro_batches],
        )
    passes = [(term, total, m) for term, total in zip(terms, totals, strict=True) for m in term.micro_batches]
    sums: dict[str, torch.Tensor] = {}  # float64, on the device of the losses

    def add(name: str, share: torch.Tensor) -> None:
        share = share.detach().double()
        sums[name] = sums[name] + share if name in sums else share

    counted: dict[str, str] = {}
    with COSTS.clock("forward_backward"):
        for index, (term, total, micro_batch) in enumerate(passes):
            is_last = index == len(passes) - 1
            engine.set_gradient_accumulation_boundary(is_last)
            loss_sum, stats = term.compute_sums(micro_batch)
            add(term.name, loss_sum / total)
            for name, stat in stats.items():
                if isinstance(stat, tuple):
                    counted[name] = f"number of {name}"
                    add(name, stat[0])
                    add(counted[name], stat[1])
                else:
                    add(name, stat / total)
            engine.backward(loss_sum * (term.weight * world_size / total), scale_wrt_gas=False)
            if not is_last:
                engine.step()  # only counts the micro-batch
        reduced = distributed.reduce_sum(torch.stack(list(sums.values())))
        norms = gradient_norms(engine)
        summed = torch.cat([reduced, *(norm.to(reduced).reshape(1) for norm in norms)]).tolist()
        means = dict(zip(sums, summed, strict=False))
        for name, number in counted.items():
            total, count = means.pop(name), means.pop(number)
            if count:  # no mean without items
                means[name] = total / count
        summed_norms = zip(summed[len(sums) :], norms, strict=True)
        norms = [torch.tensor(n, dtype=norm.dtype) for n, norm in summed_norms]
        gradients = Gradients(engine, terms, means, combined_norm(engine, norms), norms)
        phase = DIGESTS.number_phase(terms[0].name)
        for term in terms:
            DIGESTS.add_batches(f"{phase}: rows of {term.name}", term.micro_batches)
        DIGESTS.add_numbers(f"{phase}: losses", means)
        DIGESTS.add_tensors(f"{phase}: gradients", reduced_gradients(engine))
        DIGESTS.add_numbers(f"{phase}: gradients", {GRAD_NORM: gradients.grad_norm})
        return gradients


def take_steps(gradients: Sequence[Gradients], reason_to_skip: str = "") -> list[dict[str, float]]:
    """Take the optimizer steps of all engines, or none; return the metrics of each.

    A nonempty `reason_to_skip`, the same on every rank, skips them all. Metrics are the losses by name, the
    statistics, `grad_norm`, and the `learning_rate` and `lora_learning_rate` of the step if there are such
    parameters. Every rank must call this. Raises StepSkipped, on every rank, for that reason or for a
    loss or gradient that is not finite: weights, optimizers and schedules are then unchanged, and training
    can continue.
    """
    bad = {id(g): g.find_bad() for g in gradients}
    if reason_to_skip or any(bad.values()):
        for g in gradients:
            skip_step(g.engine)
        skipped = [g for g in gradients if reason_to_skip or bad[id(g)]]
        names = ", ".join(name for g in skipped for name in bad[id(g)])
        raise StepSkipped(
            reason_to_skip
            or f"not finite: {names}. If this repeats, lower the learning rate, or use --dtype bf16 or "
            "fp32 in place of fp16",
            list({id(m): m for g in skipped for term in g.terms for m in term.micro_batches}.values()),
        )
    results = []
    with COSTS.clock("optimizer"):
        for g in gradients:
            rates = {group["rate_name"]: float(group["lr"]) for group in g.engine.optimizer.param_groups}
            with known_norms(g.engine, g.norms):
                g.engine.step()
            results.append(g.means | {"grad_norm": g.grad_norm} | rates)
    return results


def skip_step(engine: Any) -> None:
    """Skip an optimizer step: drop the gradients as DeepSpeed does on an overflow.

    Every rank must call this.
    """
    if not engine.zero_optimization():
        engine.zero_grad()
        return
    zero = engine.optimizer
    scaler = vars(zero.loss_scaler) if engine.fp16_enabled() else {}
    scaler_before = dict(scaler)
    scaler["raise_error_at_min_scale"] = False
    try:
        with known_norms(engine, [torch.tensor(math.inf)]):
            engine.step()
    finally:
        # A non-finite loss says nothing about the scale of gradients, so the loss scale is kept.
        scaler.clear()
        scaler.update(scaler_before)
    assert zero.overflow, "DeepSpeed made a step that had to be skipped"
