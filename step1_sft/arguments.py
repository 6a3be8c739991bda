"""Flags of step 1. Does not import torch."""

from dataclasses import dataclass

from common.flags.args import REQUIRED, flag
from common.flags.single_model import SingleModelArguments


@dataclass
class SFTArguments(SingleModelArguments):
    """Supervised fine-tuning."""

    model_name_or_path: str = flag(REQUIRED, "base model: a folder or a hub name", is_usual=True)
    sft_only_data_path: list[str] = flag([], "data sets that only step 1 uses, without a split")
    loss_on: str = flag(
        "response",
        "tokens in the loss: the response, or all (as in DeepSpeed-Chat)",
        choices=("response", "all"),
    )
    learning_rate: float = flag(1e-5, "peak learning rate", low=0, is_usual=True)
