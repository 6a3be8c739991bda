"""`--reward classifier:PATH[:LABEL]`: the logit of a label of any sequence classifier, which reads the text.

It has its own tokenizer, so it need not know the actor's vocabulary: a sentiment or toxicity model, a reward
model of another family.

# B texts, T tokens of the longest, L labels
"""

import operator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from common.data.packed_batch import pad_rows
from common.models.loading import DTYPES, load_weights
from common.programs.reward_scorer import score_by_length
from common.ranks.failures import first_line
from step3_ppo.rewards.text_rewards import REFUSE, Answers, Failures, checked_scores

_ENDLESS_TOKENS = 10**9  # tokenizers without a limit say 10^30


class ClassifierReward:
    """A `TextReward` from a frozen classifier: the score is the logit of one label."""

    def __init__(
        self,
        target: str,
        *,
        batch_size: int = 64,
        device: torch.device | str = "cpu",
        dtype: str = "fp32",
        trust_remote_code: bool = False,
        failures: Failures = REFUSE,
    ) -> None:
        """Load model and tokenizer; `dtype` is a key of DTYPES. Raises ValueError, see `load_parts`."""
        self.name, self.device, self.failures = f"classifier:{target}", device, failures
        path, self.tokenizer, self.label_index = load_parts(target, trust_remote_code=trust_remote_code)
        self.tokenizer.truncation_side = "left"  # the end of the answer is what is judged
        model = load_weights(
            AutoModelForSequenceClassification, path, dtype=DTYPES[dtype], trust_remote_code=trust_remote_code
        )
        self.model = model.requires_grad_(False).to(device).eval()
        self.max_tokens = _max_tokens(self.model, self.tokenizer)
        # A decoder is read at the last token that is not PAD; one that has no PAD gets one text at a time.
        own_pad_id = self.model.config.get_text_config().pad_token_id
        has_pad = own_pad_id is not None and own_pad_id >= 0
        self.pad_id, self.batch_size = (own_pad_id, batch_size) if has_pad else (0, 1)

    @torch.no_grad()
    def score(self, answers: Answers) -> list[float]:
        """See `TextReward.score`; the text is the prompt and the response, one behind the other."""
        texts = list(map(operator.add, answers.prompts, answers.responses))
        limit = {"truncation": True, "max_length": self.max_tokens} if self.max_tokens else {}
        rows = self.tokenizer(texts, **limit)["input_ids"] if texts else []
        rows = [row or [self.tokenizer.eos_token_id or 0] for row in rows]  # no model reads nothing
        scores = score_by_length(rows, self.batch_size, self._score_rows)
        return checked_scores(self.name, scores, answers, self.failures)

    def close(self) -> None:
        """Do nothing: the model goes when this object does."""

    def _score_rows(self, rows: list[list[int]]) -> list[float]:
        input_ids, is_token = pad_rows(rows, self.pad_id)  # (B, T), on the right: positions count from 0
        inputs = {"input_ids": input_ids.to(self.device), "attention_mask": is_token.long().to(self.device)}
        return self.model(**inputs).logits[:, self.label_index].float().tolist()  # of (B, L)


def load_parts(target: str, *, trust_remote_code: bool = False) -> tuple[str, Any, int]:
    """Return path, tokenizer and the label's index among the logits, of `PATH[:LABEL]`; no weights are read.

    A path that exists is never cut. Without a label it is the last one.

    Raises:
        ValueError: there is no model, no tokenizer, no such label (those that there are are listed), or no
            trained head: transformers would make a random one.
    """
    flag = f"--reward classifier:{target}"
    path, colon, label = target.rpartition(":")
    if not colon or Path(target).exists():
        path, label = target, ""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # OSError, ValueError, KeyError ... by what is missing
        raise ValueError(
            f"{flag}: {path} is neither a model folder nor a hub model at hand: {first_line(error)}"
        ) from error
    if not any("ForSequenceClassification" in name for name in config.architectures or []):
        kind = ", ".join(config.architectures or ["bare model"])
        raise ValueError(
            f"{flag}: {path} is a {kind}, not a sequence classifier; give a model that was saved from "
            "AutoModelForSequenceClassification"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        reason = "it knows no word"  # what transformers makes of a configuration alone
    except Exception as error:  # transformers raises OSError, KeyError, TypeError ... by what is missing
        tokenizer, reason = None, first_line(error)
    if tokenizer is None or len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise ValueError(
            f"{flag}: no tokenizer could be loaded from {path} ({reason}); save the classifier's tokenizer "
            "beside it"
        )
    names = [config.id2label.get(index, f"LABEL_{index}") for index in range(config.num_labels)]
    numbers = [str(index) for index in range(config.num_labels)]
    for labels in (names, numbers):
        if label in labels:
            return path, tokenizer, labels.index(label)
    if label:
        listed = ", ".join(map(" ".join, zip(numbers, names, strict=True)))
        raise ValueError(f"{flag}: there is no label {label!r}; choose from {listed}")
    return path, tokenizer, config.num_labels - 1


def _max_tokens(model: Any, tokenizer: Any) -> int | None:
    """Return how many tokens the model reads at most, None where nothing limits it (ALiBi)."""
    config = model.config.get_text_config()
    num_positions = getattr(config, "max_position_embeddings", None)
    if num_positions and any(hasattr(m, "create_position_ids_from_input_ids") for m in model.modules()):
        num_positions -= (config.pad_token_id or 0) + 1  # RoBERTa counts positions from PAD + 1 on
    limits = [
        limit
        for limit in (num_positions, tokenizer.model_max_length)
        if limit and 0 < limit < _ENDLESS_TOKENS
    ]
    return min(limits, default=None)
