"""The DeepSpeed engine of a trained model: parameter groups, AdamW, learning-rate schedule."""

from typing import Any

import deepspeed
import torch
from torch import nn
from transformers import get_scheduler

from common.ranks import distributed

NO_DECAY_NAMES = ("bias", "norm", "ln_", "layernorm")


def build_optimizer(
    model: nn.Module, *, learning_rate: float, weight_decay: float = 0.0, lora_learning_rate: float = 1e-4
) -> torch.optim.AdamW:
    """Return torch's fused AdamW over the trained parameters, the same on GPUs, on CPUs and under offload.

    Its groups are matrices, vectors without weight decay, and LoRA factors with their own rate; `rate_name`
    is what a group's rate is logged as.
    """
    rates = {"decay": learning_rate, "no_decay": learning_rate, "lora": lora_learning_rate}
    groups: dict[str, dict[str, Any]] = {
        name: {
            "params": [],
            "weight_decay": 0.0 if name == "no_decay" else weight_decay,
            "lr": rate,
            "rate_name": "lora_learning_rate" if name == "lora" else "learning_rate",
        }
        for name, rate in rates.items()
    }
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_vector = any(word in name.lower() for word in NO_DECAY_NAMES)
        group = "lora" if "lora_" in name else "no_decay" if is_vector else "decay"
        groups[group]["params"].append(parameter)
    used = [group for group in groups.values() if group["params"]]
    return torch.optim.AdamW(used, lr=learning_rate, betas=(0.9, 0.95), fused=True)


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
