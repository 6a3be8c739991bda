"""The frozen base of LoRA in 4 bits (bitsandbytes, QLoRA, arXiv:2305.14314): NF4 with quantised scales."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig
from transformers.pytorch_utils import Conv1D

PACKS_NO_CONV1D = "--load_in_4bit does not support Conv1D layers (GPT-2); leave it out"
# 4 bits per weight, an 8-bit scale per 64 weights, an fp32 scale per 256 of those.
BYTES_PER_WEIGHT = 0.5 + 1 / 64 + 4 / (64 * 256)


def incompatible_flags(args: Any, *, is_planned: bool = False) -> Iterator[str]:
    """Yield the reasons why a program's flags, those of all its roles, cannot be used with --load_in_4bit.

    A run that `is_planned` does not need bitsandbytes yet.
    """
    if not args.load_in_4bit:
        return
    if not is_planned and not find_spec("bitsandbytes"):
        yield "--load_in_4bit needs bitsandbytes, which is not installed; pip install bitsandbytes"
    roles = args.roles()
    if not any(role.lora_dim for role in roles.values()):
        flags = " or ".join(f"--{prefix}lora_dim" for prefix in roles)
        yield f"--load_in_4bit is for the base of adapters; without {flags} all weights are trained: give one"
    elif not args.only_optimize_lora:
        yield "--load_in_4bit needs a frozen base; remove --only_optimize_lora false"
    for prefix, role in roles.items():
        if role.zero_stage == 3:
            yield (
                f"--load_in_4bit and --{prefix}zero_stage 3 exclude each other: packed weights are not "
                "sharded; use 2"
            )
    tp_size = getattr(args, "inference_tp_size", 1)
    if tp_size > 1:
        yield f"--load_in_4bit packs weights, and --inference_tp_size {tp_size} cannot split them; give one"


def quantisation(dtype: torch.dtype) -> BitsAndBytesConfig:
    """bitsandbytes' configuration of linear layers that compute in `dtype`; heads and embeddings are
    excluded.
    """
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def keep_packed(model: nn.Module) -> None:
    """Keep packed weights unchanged, so that they are the same in every pass.

    On CPUs with AVX512-BF16 bitsandbytes would repack them for passes in eval mode, and round differently
    there. Raises ValueError for GPT-2's Conv1D, which is packed transposed.
    """
    for module in model.modules():
        if getattr(module, "source_cls", None) is Conv1D:
            raise ValueError(PACKS_NO_CONV1D)
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def release_file(model: nn.Module) -> None:
    """Copy the weights that are not packed: on a CPU they are views of the model's file, which would stay in
    memory as a whole.
    """
    for parameter in model.parameters():
        if packing_of(parameter) is None and parameter.device.type == "cpu":
            parameter.data = parameter.data.clone()


def packing_of(parameter: torch.Tensor) -> Any:
    """Scales and shape of a packed weight; None for one that is not packed."""
    return getattr(parameter, "quant_state", None)


def whole_shape(parameter: torch.Tensor) -> torch.Size:
    """Shape of a weight, of the whole one if it is sharded or packed."""
    packing = packing_of(parameter)
    return torch.Size(packing.shape) if packing else getattr(parameter, "ds_shape", parameter.shape)


def unpacked(weight: torch.Tensor, packing: Any) -> torch.Tensor:
    """The weight (O, I) in the dtype that it was loaded in."""
    from bitsandbytes.functional import dequantize_4bit  # optional dependency

    return dequantize_4bit(weight.data, packing)
