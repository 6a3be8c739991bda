"""Flags of the programs that answer: chat.py, prompt_eval.py and the arena. Does not import torch."""

from dataclasses import dataclass

from common.flags.args import flag
from common.flags.groups import DecodeArguments, TokenizerArguments


@dataclass
class AnsweringArguments(TokenizerArguments, DecodeArguments):
    """Template and precision of a model that responds."""

    template: str = flag(
        "",
        "conversation template; empty: that of the model's training",
        choices=("human_assistant", "one_line", "chat", "plain"),
    )
    dtype: str = flag(
        "",
        "weights and activations; empty: bf16 on a GPU that supports it, else fp32; auto: on a CPU, "
        "the faster of the two",
        choices=("fp32", "bf16", "fp16", "auto"),
    )


@dataclass
class SamplingArguments(AnsweringArguments):
    """Sampling flags."""

    temperature: float = flag(0.7, "sampling temperature; 0: greedy", low=0)
    top_k: int = flag(0, "sample from the k likeliest tokens only; 0: all", low=0)
    top_p: float = flag(0.95, "sample from the smallest set of tokens with this probability", above=0, high=1)
