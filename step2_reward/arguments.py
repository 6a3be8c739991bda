"""The flags of step 2. No torch in here."""

from dataclasses import dataclass

from common.flags.args import REQUIRED, SharingArguments, SourceArguments, TokenizerArguments, flag
from common.flags.single_model import SingleModelArguments


@dataclass
class PairArguments:
    """Pairs of answers."""

    max_pairs_per_prompt: int = flag(
        10,
        "maximum pairs of one prompt's answers, in an epoch drawn anew and in an evaluation",
        low=1,
        only_with="loss!=kto",
    )


@dataclass
class RewardArguments(PairArguments, SharingArguments, SingleModelArguments):
    """Reward modelling."""

    model_name_or_path: str = flag(REQUIRED, "base, SFT or reward model: a folder or a hub name")
    loss: str = flag(
        "end_score",
        "end_score: Bradley-Terry on the scores; token_wise: on every token from the first "
        "difference on; dpo, ipo: train a chat model on the pairs, without a reward model; kto: the same on "
        "answers that are labelled good or bad each by itself",
        choices=("end_score", "token_wise", "dpo", "ipo", "kto"),
    )
    reward_pooling: str = flag(
        "last",
        "how values make the score of an answer, wherever the model scores: the one at its last token, or "
        "their mean over its tokens",
        choices=("last", "mean"),
        only_with="loss=end_score loss=token_wise",
    )
    use_margin: bool = flag(
        False,
        "Bradley-Terry with a margin: the row's `margin`, or the difference of its scores",
        only_with="loss=end_score loss=token_wise",
    )
    center_coef: float = flag(
        0.0,
        "weight of (chosen + rejected)^2, which keeps scores around 0",
        low=0,
        only_with="loss=end_score loss=token_wise",
    )
    beta: float = flag(
        0.1,
        "DPO, IPO, KTO: weight of the KL penalty to the reference, the initial model",
        above=0,
        only_with="loss=dpo loss=ipo loss=kto",
    )
    label_smoothing: float = flag(
        0.0, "DPO: assumed share of pairs with swapped labels", low=0, below=0.5, only_with="loss=dpo"
    )
    desirable_weight: float = flag(1.0, "KTO: weight of a good answer's loss", above=0, only_with="loss=kto")
    undesirable_weight: float = flag(1.0, "KTO: weight of a bad answer's loss", above=0, only_with="loss=kto")
    learning_rate: float = flag(5e-5, "peak learning rate", low=0)

    @property
    def kind(self) -> str:
        """What is trained, as numbers and export call it: reward, or by a policy's loss dpo or kto."""
        return {"dpo": "dpo", "ipo": "dpo", "kto": "kto"}.get(self.loss, "reward")

    @property
    def is_scored(self) -> bool:
        """Whether a reward model is trained."""
        return self.kind == "reward"

    @property
    def is_unpaired(self) -> bool:
        """Whether rows are rated answers, each by itself."""
        return self.loss == "kto"


@dataclass
class RewardEvalArguments(SourceArguments, PairArguments, TokenizerArguments):
    """Evaluation of a reward model on any pairs."""

    is_scored = True  # no flag: a reward model it is

    model_name_or_path: str = flag(REQUIRED, "reward model: the export/ folder of step 2, or a hub name")
    max_seq_len: int = flag(
        512, "maximum tokens of prompt and response; longer rows are truncated and counted", low=4
    )
    per_device_eval_batch_size: int = flag(16, "pairs per batch", may_change=True, low=1)
    dtype: str = flag(
        "",
        "dtype of weights and activations; empty: bf16 on a GPU that has it, else fp32",
        choices=("fp32", "bf16", "fp16"),
    )
    plugins: list[str] = flag([], "modules to import first; what they register can be named by flags")
    num_samples: int = flag(5, "pairs printed with their scores", low=0)
    seed: int = flag(1234, "seed of shuffling, dropout, new weights and sampling", low=-(2**32), high=2**32)
