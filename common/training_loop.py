"""What the single-model programs (steps 1 and 2) share: engine, batches, and the loop over epochs."""

from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
from torch import nn

from common import distributed
from common.ds_config import EngineOptions, build_train_config
from common.optim import build_optimizer, build_schedule
from common.run_logger import RunLogger


def build_engine(
    model: nn.Module,
    ds_config: dict[str, Any],
    *,
    learning_rate: float,
    weight_decay: float,
    lora_learning_rate: float,
    beta2: float,
    schedule: str,
    num_warmup_steps: int,
    num_steps: int,
) -> Any:
    """Return a DeepSpeed engine with AdamW and its schedule. Every rank must call this."""
    optimizer = build_optimizer(
        model,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        lora_learning_rate=lora_learning_rate,
        beta2=beta2,
    )
    scheduler = build_schedule(optimizer, schedule, num_warmup_steps=num_warmup_steps, num_steps=num_steps)
    model.to(distributed.device())
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=ds_config
    )
    return engine


def build_single_model_config(args: Any, dtype: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the DeepSpeed configuration that a single-model program's flags ask for."""
    options = EngineOptions(
        zero_stage=args.zero_stage,
        dtype=dtype,
        offload=args.offload,
        micro_batch_size=args.per_device_train_batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        world_size=distributed.world_size(),
        gradient_clipping=args.gradient_clipping,
        overrides=overrides,
    )
    return build_train_config(options)


def count_steps(args: Any, steps_per_epoch: int) -> int:
    """Return the steps of the whole run: epochs, or fewer by --max_train_steps."""
    num_steps = args.num_train_epochs * steps_per_epoch
    return min(num_steps, args.max_train_steps) if args.max_train_steps else num_steps


def run_steps(
    batches: Any,
    num_steps: int,
    *,
    train_step: Callable[[int, list[Any]], Any],
    evaluate: Callable[[int], Any],
    eval_interval: int,
) -> None:
    """Train for `num_steps`; evaluate before, every `eval_interval` steps, after each epoch and at the end."""
    evaluate(0)
    steps: Iterator[tuple[int, list[Any]]] = enumerate(batches.forever(), start=1)
    for step, micro_batches in steps:
        train_step(step, micro_batches)
        is_due = eval_interval and step % eval_interval == 0
        if is_due or step % len(batches) == 0 or step == num_steps:
            evaluate(step)
        if step == num_steps:
            return


def build_logger(args: Any, columns: tuple[str, ...], num_steps: int) -> RunLogger:
    """Return the run's logger; TensorBoard's folder is --tensorboard_path or OUTPUT_DIR/tensorboard."""
    folder = args.tensorboard_path or f"{args.output_dir or '.'}/tensorboard"
    return RunLogger(
        args.output_dir,
        columns=columns,
        num_steps=num_steps,
        log_interval=args.log_interval,
        tensorboard_dir=folder if args.enable_tensorboard else None,
    )
