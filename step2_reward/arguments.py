"""Flags of step 2. Does not import torch."""

from dataclasses import dataclass

from common.flags.args import REQUIRED, flag, same_flag
from common.flags.groups import RunArguments, SharingArguments, SourceArguments, TokenizerArguments
from common.flags.single_model import SingleModelArguments, TrainArguments


@dataclass
class PairArguments:
    """Preference pairs."""

    max_pairs_per_prompt: int = flag(
        10,
        "maximum pairs per prompt; they are sampled anew in each epoch and evaluation",
        low=1,
        only_with="loss!=kto",
    )


@dataclass
class RewardArguments(PairArguments, SharingArguments, SingleModelArguments):
    """Reward modelling."""

    model_name_or_path: str = flag(
        REQUIRED, "base, SFT or reward model: a folder or a hub name", is_usual=True
    )
    loss: str = flag(
        "end_score",
        "end_score: Bradley-Terry loss on the scores; token_wise: on every token from the first difference "
        "on; dpo, ipo: train a chat model on pairs, without a reward model; kto: train a chat model on "
        "single responses labelled good or bad",
        choices=("end_score", "token_wise", "dpo", "ipo", "kto"),
        is_usual=True,
    )
    reward_pooling: str = flag(
        "last",
        "score of a response: the value at its last token, or the mean value of its tokens",
        choices=("last", "mean"),
        only_with="loss=end_score loss=token_wise",
    )
    use_margin: bool = flag(
        False,
        "Bradley-Terry loss with a margin: the row's `margin`, or the difference of its scores",
        only_with="loss=end_score loss=token_wise",
    )
    center_coef: float = flag(
        0.0,
        "weight of (chosen + rejected)^2, which keeps scores near 0",
        low=0,
        only_with="loss=end_score loss=token_wise",
    )
    beta: float = flag(
        0.1,
        "DPO, IPO, KTO: weight of the KL penalty to the reference model, which is the initial model",
        above=0,
        only_with="loss=dpo loss=ipo loss=kto",
    )
    label_smoothing: float = flag(
        0.0, "DPO: assumed fraction of pairs with swapped labels", low=0, below=0.5, only_with="loss=dpo"
    )
    desirable_weight: float = flag(
        1.0, "KTO: weight of the loss of good responses", above=0, only_with="loss=kto"
    )
    undesirable_weight: float = flag(
        1.0, "KTO: weight of the loss of bad responses", above=0, only_with="loss=kto"
    )
    learning_rate: float = flag(5e-5, "peak learning rate", low=0, is_usual=True)

    @property
    def kind(self) -> str:
        """Name of the trained model in metrics and exports: reward, dpo or kto."""
        return {"dpo": "dpo", "ipo": "dpo", "kto": "kto"}.get(self.loss, "reward")

    @property
    def is_scored(self) -> bool:
        """Whether a reward model is trained."""
        return self.kind == "reward"

    @property
    def is_unpaired(self) -> bool:
        """Whether rows are single labelled responses."""
        return self.loss == "kto"


@dataclass
class RewardEvalArguments(SourceArguments, PairArguments, TokenizerArguments):
    """Evaluation of a reward model on any pairs."""

    is_scored = True  # not a flag: the model is always a reward model

    model_name_or_path: str = flag(
        REQUIRED, "reward model: the export/ folder of step 2, or a hub name", is_usual=True
    )
    max_seq_len: int = same_flag(TrainArguments, "max_seq_len")
    per_device_eval_batch_size: int = flag(16, "pairs per batch", may_change=True, low=1)
    dtype: str = flag(
        "",
        "dtype of weights and activations; empty: bf16 on a GPU that supports it, else fp32; auto: on a CPU, "
        "the faster of the two",
        choices=("fp32", "bf16", "fp16", "auto"),
        is_usual=True,
    )
    plugins: list[str] = same_flag(RunArguments, "plugins")
    num_samples: int = flag(5, "number of pairs to print with their scores", low=0)
    seed: int = same_flag(RunArguments, "seed")
