"""`--reward classifier:PATH[:LABEL]`: the logit of one label of a sequence classifier, which reads the text.

It has its own tokenizer and need not share the actor's vocabulary: a sentiment or toxicity model, a reward
model of another family.

# B texts, T tokens of the longest, L labels
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from common.data.packed_batch import pad_rows, score_by_length
from common.models.loading import DTYPES, load_weights
from common.models.saved_adapters import POOLING
from common.ranks import distributed
from common.ranks.failures import first_line
from step3_ppo.rewards.text_rewards import Answers, Checked, TextReward, checked_scores

_ENDLESS_TOKENS = 10**9  # tokenizers without a limit report 10^30


class ClassifierReward(TextReward):
    """A reward from a frozen classifier: the score is the logit of one label."""

    is_on_device = True

    def __init__(self, target: str, args: Any) -> None:
        """Load model and tokenizer. Raises ValueError, see `load_parts`."""
        super().__init__(f"classifier:{target}", args)
        trust = args.trust_remote_code
        path, self.tokenizer, self.label_index = load_parts(target, trust_remote_code=trust)
        self.tokenizer.truncation_side = "left"  # keep the end of the response
        dtype = DTYPES[distributed.dtype_name(args.dtype)]
        model = load_weights(AutoModelForSequenceClassification, path, dtype=dtype, trust_remote_code=trust)
        self.model = model.requires_grad_(False).to(distributed.device()).eval()
        self.max_tokens = _max_tokens(self.model, self.tokenizer)
        # A decoder is scored at the last token that is not PAD; without a PAD token, one text per pass.
        own_pad_id = self.model.config.get_text_config().pad_token_id
        has_pad = own_pad_id is not None and own_pad_id >= 0
        self.pad_id, self.rows_per_pass = (own_pad_id, args.reward_batch_size) if has_pad else (0, 1)

    def score(self, answers: Answers) -> list[float]:
        """See `TextReward.score`; all responses form one batch, which is split by length."""
        return self._score(answers)

    @torch.no_grad()
    def ask(self, batch: Answers) -> Checked:
        """See `TextReward.ask`; the text is the prompt followed by the response."""
        texts = [prompt + response for prompt, response in zip(batch.prompts, batch.responses, strict=True)]
        limit = {"truncation": True, "max_length": self.max_tokens} if self.max_tokens else {}
        rows = self.tokenizer(texts, **limit)["input_ids"]
        rows = [row or [self.tokenizer.eos_token_id or 0] for row in rows]  # at least one token
        return checked_scores(score_by_length(rows, self.rows_per_pass, self._score_rows), batch)

    def _score_rows(self, rows: list[list[int]]) -> list[float]:
        input_ids, is_token = pad_rows(rows, self.pad_id)  # (B, T), right-padded: positions start at 0
        device = self.model.device
        inputs = {"input_ids": input_ids.to(device), "attention_mask": is_token.long().to(device)}
        return self.model(**inputs).logits[:, self.label_index].float().tolist()  # logits (B, L)


def load_parts(target: str, *, trust_remote_code: bool = False) -> tuple[str, Any, int]:
    """Path, tokenizer and index of the label among the logits, from `PATH[:LABEL]`; reads no weights.

    An existing path is never split. The default label is the last one.

    Raises ValueError if there is no model, no tokenizer, no such label (the message lists the labels), or no
    trained head (transformers would initialise a random one).
    """
    flag = f"--reward classifier:{target}"
    path, colon, label = target.rpartition(":")
    if not colon or Path(target).exists():
        path = target
        label = ""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # OSError, ValueError, KeyError, depending on what is missing
        raise ValueError(
            f"{flag}: {path} is neither a model folder nor an available hub model: {first_line(error)}"
        ) from error
    kind = ", ".join(config.architectures or ["bare model"])
    if "ForSequenceClassification" not in kind:
        raise ValueError(
            f"{flag}: {path} is a {kind}, not a sequence classifier; give a model that was saved from "
            "AutoModelForSequenceClassification"
        )
    if getattr(config, POOLING, "last") != "last":  # transformers has no other pooling
        raise ValueError(
            f"{flag}: {path} is a reward model of --reward_pooling {getattr(config, POOLING)}, which a "
            f"classifier's logit at the last token is not; give --reward model:{path}"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        if len(tokenizer) <= len(tokenizer.all_special_tokens):  # created from a configuration only
            raise ValueError("its vocabulary is empty")
    except Exception as error:  # OSError, KeyError, TypeError, depending on what is missing
        raise ValueError(
            f"{flag}: no tokenizer could be loaded from {path} ({first_line(error)}); save the classifier's "
            "tokenizer beside it"
        ) from error
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
    """Maximum number of tokens that the model reads; None without a limit (ALiBi)."""
    config = model.config.get_text_config()
    num_positions = getattr(config, "max_position_embeddings", None)
    if num_positions and any(hasattr(m, "create_position_ids_from_input_ids") for m in model.modules()):
        num_positions -= (config.pad_token_id or 0) + 1  # RoBERTa's positions start at PAD + 1
    limits = (num_positions, tokenizer.model_max_length)
    return min((limit for limit in limits if limit and 0 < limit < _ENDLESS_TOKENS), default=None)
