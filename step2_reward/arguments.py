"""The flags of step 2. No torch in here."""

from dataclasses import dataclass

from common.flags.args import (
    REQUIRED,
    CheckpointArguments,
    DataArguments,
    LoraArguments,
    PackingArguments,
    PairArguments,
    RunArguments,
    ScheduleArguments,
    SourceArguments,
    TokenizerArguments,
    TrainArguments,
    flag,
)


@dataclass
class RewardArguments(
    DataArguments,
    PairArguments,
    TokenizerArguments,
    LoraArguments,
    ScheduleArguments,
    TrainArguments,
    PackingArguments,
    CheckpointArguments,
    RunArguments,
):
    """Reward modelling."""

    model_name_or_path: str = flag(REQUIRED, "base, SFT or reward model: a folder or a hub name")
    loss: str = flag(
        "end_score",
        "a reward model by Bradley-Terry on the score at the last token, or on every token from the first "
        "difference on; dpo: a chat model from the pairs alone",
        choices=("end_score", "token_wise", "dpo"),
    )
    use_margin: bool = flag(False, "require a pair's margin: the row's `margin`, or its scores' difference")
    center_coef: float = flag(0.0, "weight of (chosen + rejected)^2, which keeps scores around 0", low=0)
    beta: float = flag(
        0.1, "--loss dpo: how dear it is to leave the reference, the model of the beginning", above=0
    )
    label_smoothing: float = flag(
        0.0, "--loss dpo: share of pairs taken to be labelled the wrong way round", low=0, below=0.5
    )
    learning_rate: float = flag(5e-5, "peak learning rate", low=0)


@dataclass
class RewardEvalArguments(SourceArguments, PairArguments, TokenizerArguments):
    """Evaluation of a reward model on any pairs."""

    model_name_or_path: str = flag(REQUIRED, "reward model: the export/ folder of step 2, or a hub name")
    max_seq_len: int = flag(
        512, "tokens of prompt and response at most; longer rows are truncated and counted", low=4
    )
    per_device_eval_batch_size: int = flag(16, "pairs per batch", may_change=True, low=1)
    dtype: str = flag(
        "",
        "weights and activations; empty: bf16 on a GPU that has it, else fp32",
        choices=("fp32", "bf16", "fp16"),
    )
    plugins: list[str] = flag([], "modules to import first: the data sets that they register can be named")
    num_samples: int = flag(5, "pairs printed with their scores", low=0)
    seed: int = flag(1234, "seed of the choice of printed pairs", low=-(2**32), high=2**32)
