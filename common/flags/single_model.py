"""Flags that steps 1 and 2 share, which train a single model. Does not import torch."""

from dataclasses import dataclass
from typing import Self

from common.flags.args import flag
from common.flags.groups import (
    CheckpointArguments,
    DataArguments,
    PackingArguments,
    RunArguments,
    ScheduleArguments,
    TokenizerArguments,
)
from common.flags.optimizer import OptimizerArguments
from common.flags.value_forms import Interval


@dataclass
class LoraArguments:
    """LoRA adapters."""

    lora_dim: int = flag(0, "rank of the LoRA adapters; 0: no LoRA", low=0, high=2**16, is_usual=True)
    lora_alpha: float = flag(
        0.0,
        "LoRA alpha, where the adapter is scaled by alpha / rank; 0: alpha = rank",
        low=0,
        only_with="lora_dim",
    )
    lora_module_name: str = flag(
        "auto",
        "adapt the linear layers and stacked experts whose names contain this text or match this regular "
        "expression; auto: all linear layers except the head, and no experts",
        only_with="lora_dim",
    )
    only_optimize_lora: bool = flag(
        True,
        "train only the adapters and the score head; false: train every parameter except the adapted "
        "matrices",
        only_with="lora_dim",
    )
    load_in_4bit: bool = flag(
        False, "load the frozen matrices of the base in 4 bits (NF4, bitsandbytes); needs --lora_dim"
    )
    lora_learning_rate: float = flag(1e-4, "learning rate of the adapters", low=0, only_with="lora_dim")


@dataclass
class TrainArguments:
    """Batches, optimizer and memory."""

    max_seq_len: int = flag(
        512,
        "maximum tokens of prompt and response; longer rows are truncated and counted",
        low=4,
        is_usual=True,
    )
    per_device_train_batch_size: int = flag(
        16, "rows per rank and micro-batch", may_change=True, low=1, is_usual=True
    )
    per_device_eval_batch_size: int = flag(
        0, "rows per rank and evaluation batch; 0: as --per_device_train_batch_size", may_change=True, low=0
    )
    group_by_length: bool = flag(
        False, "put rows of similar length into a batch; reduces padding where rows are padded"
    )
    weight_decay: float = flag(0.0, "AdamW weight decay of matrices; biases and norms are not decayed", low=0)
    gradient_checkpointing: bool = flag(
        False, "recompute activations in the backward pass", may_change=True, is_usual=True
    )
    zero_stage: int = flag(0, "DeepSpeed ZeRO stage", choices=(0, 1, 2, 3), may_change=True, is_usual=True)
    dropout: float | None = flag(
        None,
        "dropout rate of the whole model; empty: the model's own in step 1, 0 in step 2",
        low=0,
        high=1,
    )
    eval_interval: Interval = flag(
        Interval("0"),
        "evaluate every N steps or at a time interval such as 30m; 0: only before training and after each "
        "epoch",
        may_change=True,
        is_usual=True,
    )
    eval_iters: int = flag(
        100,
        "maximum evaluation batches per rank, of 16 rows if --per_device_eval_batch_size is 0; 0: the whole "
        "held-out data",
        may_change=True,
        low=0,
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
    """Flags that steps 1 and 2 share."""

    def roles(self) -> dict[str, Self]:
        """Flags of each trained model, by the prefix of their names: step 3 has several."""
        return {"": self}
