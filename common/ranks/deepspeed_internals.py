"""All uses of private members of DeepSpeed, with the versions that they were tested with.

Call `install` before an engine is built.
"""

import importlib.metadata
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.utils import combine_grad_norm_groups, is_invalid_grad_norm
from deepspeed.runtime.zero import stage3, stage_1_and_2
from packaging.specifiers import SpecifierSet
from torch import nn

DEEPSPEED = "~=0.19.8"  # as in requirements.txt


def require_version(library: str, tested: str) -> None:
    """Raise ValueError if the installed version of a library is not one of the tested ones."""
    installed = importlib.metadata.version(library)
    if not SpecifierSet(tested).contains(installed, prereleases=True):
        raise ValueError(
            f"{library} {installed} is installed, but its internals were tested only with {tested}: "
            f"pip install '{library}{tested}'"
        )


def install() -> None:
    """Replace DeepSpeed functions that make the host wait in each step. Raises ValueError for an untested
    version.
    """
    require_version("deepspeed", DEEPSPEED)
    # DeepSpeed's version creates the value on the host, which waits once per parameter group.
    stage_1_and_2.mask_nan_or_inf_with_val_inplace = _mask_not_finite
    stage3.mask_nan_or_inf_with_val_inplace = _mask_not_finite


def _mask_not_finite(norm: torch.Tensor, device: Any = None, val: float = -1.0) -> None:
    norm.masked_fill_(~norm.isfinite(), val)


def gradient_norms(engine: Any) -> list[torch.Tensor]:
    """Gradient norms (scalars), as DeepSpeed computes them in a step: one per parameter group under stage 3,
    else one of all gradients. Every rank must call this.
    """
    if not engine.zero_optimization():
        gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
        return [torch.nn.utils.get_total_norm(gradients)]
    zero = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        return zero._get_norm_groups()
    zero._wait_for_offload_copies()
    return [zero.scaled_global_norm()]


def reduced_gradients(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's part of the gradients of an optimizer step, with the names of their parameters; with an
    offloaded optimizer one tensor per group.
    """
    if not engine.zero_optimization():
        yield from ((name, p.grad) for name, p in engine.module.named_parameters() if p.grad is not None)
        return
    names = {id(p): name for name, p in engine.module.named_parameters()}
    zero = engine.optimizer
    is_stage_3 = engine.zero_optimization_stage() == 3
    groups = zero.fp16_groups if is_stage_3 else zero.params_in_partition
    flats = zero.fp32_partitioned_groups_flat if is_stage_3 else zero.single_partition_of_fp32_groups
    for index, (parameters, flat) in enumerate(zip(groups, flats, strict=True)):
        gradients = zero.averaged_gradients.get(index)
        if gradients:
            yield from ((names[id(p)], g) for p, g in zip(parameters, gradients, strict=False))
        elif flat.grad is not None:
            yield f"group {index}", flat.grad


def combined_norm(engine: Any, norms: list[torch.Tensor]) -> float:
    """Global norm of the gradients; infinite if one of them is not finite."""
    if not engine.zero_optimization():
        return float(norms[0])
    norm = combine_grad_norm_groups(norms) if engine.zero_optimization_stage() == 3 else norms[0]
    return math.inf if is_invalid_grad_norm(norm) else float(norm / engine.optimizer.loss_scale)


@contextmanager
def known_norms(engine: Any, norms: Sequence[torch.Tensor]) -> Iterator[None]:
    """Context in which an optimizer step uses these norms, which are on the CPU. DeepSpeed would compute them
    again, check them for finiteness, and wait for the device each time.
    """
    if not engine.zero_optimization():
        yield
        return
    attributes = vars(engine.optimizer)
    replaced = {"scaled_global_norm": lambda: norms[0], "_get_norm_groups": lambda: norms}
    replaced |= {"check_overflow": lambda **_: None, "check_grad_overflow": True}
    before = {name: attributes[name] for name in replaced if name in attributes}
    attributes.update(replaced)
    try:
        yield
    finally:
        for name in replaced:
            del attributes[name]
        attributes.update(before)


def spread_weights(zero: Any, stage: int) -> None:
    """Copy the fp32 weights of a ZeRO optimizer to the model's weights. Every rank must call this."""
    if stage in (1, 2):
        zero.update_lp_params()
    elif stage == 3:
        zero._partition_all_parameters()
        for index in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(index)
        zero._post_step(set())


def fragment_addresses(parameter: nn.Parameter) -> tuple[Any, Any] | None:
    """Location of this rank's part of a parameter under ZeRO 1 and 2: (in the parameter, in the flat fp32
    tensor), each with `start` and `numel`; None if other ranks hold all of it.
    """
    mapping = parameter._hp_mapping
    return None if mapping is None else (mapping.lp_fragment_address, mapping.hp_fragment_address)
