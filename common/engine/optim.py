"""Optimizer and schedule of a trained model: parameter groups, AdamW, learning-rate schedule."""

import torch
from torch import nn
from transformers import get_scheduler

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
    beta2: float = 0.95,
) -> torch.optim.AdamW:
    """Return torch's fused AdamW over the trained parameters, the same on GPUs, on CPUs and under offload."""
    groups = build_parameter_groups(
        model, learning_rate=learning_rate, weight_decay=weight_decay, lora_learning_rate=lora_learning_rate
    )
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, beta2), fused=True)


def build_schedule(
    optimizer: torch.optim.Optimizer, name: str, *, num_warmup_steps: int, num_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return transformers' schedule of that name over `num_steps` optimizer steps."""
    return get_scheduler(name, optimizer, num_warmup_steps=num_warmup_steps, num_training_steps=num_steps)
