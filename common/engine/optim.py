"""The DeepSpeed engine of a trained model: parameter groups, AdamW, learning-rate schedule."""

from typing import Any

import deepspeed
import torch
from torch import nn
from transformers import get_scheduler

from common.ranks import distributed

NO_DECAY_NAMES = ("bias", "norm", "ln_", "layernorm")


def build_parameter_groups(
    model: nn.Module, *, learning_rate: float, weight_decay: float, lora_learning_rate: float
) -> list[dict]:
    """Return AdamW groups: matrices, vectors without weight decay, LoRA factors with their own rate.

    `rate_name` is what a group's rate is logged as.
    """
    groups: dict[str, dict] = {
        "decay": {"params": [], "weight_decay": weight_decay, "lr": learning_rate},
        "no_decay": {"params": [], "weight_decay": 0.0, "lr": learning_rate},
        "lora": {"params": [], "weight_decay": weight_decay, "lr": lora_learning_rate},
    }
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if "lora_" in name:
            groups["lora"]["params"].append(parameter)
        elif any(word in name.lower() for word in NO_DECAY_NAMES):
            groups["no_decay"]["params"].append(parameter)
        else:
            groups["decay"]["params"].append(parameter)
    for name, group in groups.items():
        group["rate_name"] = "lora_learning_rate" if name == "lora" else "learning_rate"
    return [group for group in groups.values() if group["params"]]


def build_optimizer(
    model: nn.Module,
    *,
    learning_rate: float,
    weight_decay: float = 0.0,
    lora_learning_rate: float = 1e-4,
) -> torch.optim.AdamW:
    """Return torch's fused AdamW over the trained parameters, the same on GPUs, on CPUs and under offload."""
    groups = build_parameter_groups(
        model, learning_rate=learning_rate, weight_decay=weight_decay, lora_learning_rate=lora_learning_rate
    )
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=True)


def build_engine(
    model: nn.Module, ds_config: dict[str, Any], args: Any, num_steps: int, *, role: Any = None
) -> Any:
    """Return a DeepSpeed engine with AdamW and its schedule over `num_steps`. Every rank must call this.

    `args` are the flags. `role` has the rates: `args.actor` or `args.critic` in step 3, else `args`.
    """
    role = role or args
    optimizer = build_optimizer(
        model,
        learning_rate=role.learning_rate,
        weight_decay=role.weight_decay,
        lora_learning_rate=role.lora_learning_rate,
    )
    schedule = get_scheduler(
        args.lr_scheduler_type,
        optimizer,
        num_warmup_steps=args.num_warmup_steps,
        num_training_steps=num_steps,
    )
    model.to(distributed.device())
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=ds_config
    )
    return engine
