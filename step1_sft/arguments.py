"""The flags of step 1. No torch in here."""

from dataclasses import dataclass

from common.flags.args import (
    REQUIRED,
    CheckpointArguments,
    DataArguments,
    LoraArguments,
    PackingArguments,
    RunArguments,
    ScheduleArguments,
    TokenizerArguments,
    TrainArguments,
    flag,
)


@dataclass
class SFTArguments(
    DataArguments,
    TokenizerArguments,
    LoraArguments,
    ScheduleArguments,
    TrainArguments,
    PackingArguments,
    CheckpointArguments,
    RunArguments,
):
    """Supervised fine-tuning."""

    model_name_or_path: str = flag(REQUIRED, "base model: a folder or a hub name")
    sft_only_data_path: list[str] = flag([], "data sets that only step 1 uses, whole")
    loss_on: str = flag(
        "response",
        "which tokens are learned: the response, or all (DeepSpeed-Chat's)",
        choices=("response", "all"),
    )
    learning_rate: float = flag(1e-5, "peak learning rate", low=0)
