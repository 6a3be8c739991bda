"""The flags that steps 1 and 2 share, which train one model. No torch in here."""

from dataclasses import dataclass

from common.flags.args import (
    CheckpointArguments,
    DataArguments,
    PackingArguments,
    RunArguments,
    ScheduleArguments,
    TokenizerArguments,
    flag,
)
from common.flags.optimizer import OptimizerArguments
from common.flags.value_forms import Interval


@dataclass
class LoraArguments:
    """Low-rank adapters (PEFT) of a single-model program."""

    lora_dim: int = flag(0, "rank of the adapters; 0 trains without LoRA", low=0, high=2**16)
    lora_alpha: float = flag(
        0.0, "LoRA scaling is alpha / dim; 0 means alpha = dim", low=0, only_with="lora_dim"
    )
    lora_module_name: str = flag(
        "auto",
        "adapt linear layers and stacked experts whose name has this, or this regular expression; auto: all "
        "linear layers but the head, and no experts",
        only_with="lora_dim",
    )
    only_optimize_lora: bool = flag(
        True,
        "freeze all but adapters and the score head; false: all but the adapted matrices train",
        only_with="lora_dim",
    )
    load_in_4bit: bool = flag(
        False, "hold the frozen matrices of the base in 4 bits (NF4, by bitsandbytes; needs --lora_dim)"
    )
    lora_learning_rate: float = flag(1e-4, "learning rate of the adapters", low=0, only_with="lora_dim")


@dataclass
class TrainArguments:
    """Batches, optimizer and memory of a single-model program."""

    max_seq_len: int = flag(
        512, "maximum tokens of prompt and response; longer rows are truncated and counted", low=4
    )
    per_device_train_batch_size: int = flag(16, "rows per rank and micro-batch", may_change=True, low=1)
    per_device_eval_batch_size: int = flag(16, "rows per rank and evaluation batch", may_change=True, low=1)
    group_by_length: bool = flag(
        False, "rows of similar length in a batch: less padding, where rows are padded"
    )
    weight_decay: float = flag(0.0, "AdamW weight decay of matrices (biases and norms have none)", low=0)
    num_warmup_steps: int = flag(
        0, "optimizer steps of linear warm-up", low=0, only_with="lr_scheduler_type!=constant"
    )
    gradient_checkpointing: bool = flag(False, "recompute activations in the backward pass", may_change=True)
    zero_stage: int = flag(0, "DeepSpeed ZeRO stage", choices=(0, 1, 2, 3), may_change=True)
    dropout: float | None = flag(
        None,
        "dropout everywhere in the model; empty: the model's own in step 1, none in step 2",
        low=0,
        high=1,
    )
    eval_interval: Interval = flag(
        Interval("0"),
        "evaluate every so many steps, or after a time such as 30m, too; 0: before and after each epoch only",
        may_change=True,
    )
    eval_iters: int = flag(
        100, "maximum evaluation batches per rank; 0: the whole held-out part", may_change=True, low=0
    )


@dataclass
class SingleModelArguments(
    DataArguments,
    TokenizerArguments,
    LoraArguments,
    ScheduleArguments,
    OptimizerArguments,
    TrainArguments,
    PackingArguments,
    CheckpointArguments,
    RunArguments,
):
    """What steps 1 and 2 share."""
