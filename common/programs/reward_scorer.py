"""A saved reward model that scores texts, for the reward server and chat.py."""

import threading
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from common.data.chat_template import build_template
from common.data.dialogue import Tokenised
from common.data.example import Message
from common.data.packed_batch import pack_rows, score_by_length
from common.data.tokenizer import num_token_ids
from common.flags.groups import TokenizerArguments
from common.models.loading import ModelOptions, length_limit
from common.models.lora import LoraOptions
from common.models.model_inputs import build_model_inputs
from common.models.saved_adapters import base_of, is_adapter
from common.models.value_model import ValueModel, compute_scores, load_value_model
from common.ranks import distributed


class RewardScorer:
    """Scores texts as step 3 scores finished responses, which end with the end of turn."""

    def __init__(
        self,
        model: ValueModel,
        tokenizer: PreTrainedTokenizerFast,
        *,
        batch_size: int,
        max_tokens: int = 0,
        closing_ids: Sequence[int] = (),
        facts: dict[str, Any] | None = None,
    ) -> None:
        """`max_tokens` 0 means the model's own limit; `closing_ids` are those of `closing_of`; `facts` is the
        response to GET /health.
        """
        self.model, self.batch_size = model, batch_size
        self.max_tokens = max_tokens or length_limit(model.classifier.config)[0]
        # Prompt and continuation verbatim: the prompt's format is already in its text.
        self.template = build_template("plain", tokenizer)
        self.closing_ids = closing_ids
        self.facts = facts or {}
        self._lock = threading.Lock()  # the server is threaded; the device has memory for one batch

    def score(self, prompts: list[str], responses: list[str]) -> list[float]:
        """One fp32 score per response, batched by length."""
        return self.score_rows([self.encode(p, r) for p, r in zip(prompts, responses, strict=True)])

    def score_rows(self, rows: list[Tokenised]) -> list[float]:
        """One fp32 score per row, whose response ends with the end of turn."""
        closing = [(token_id, True) for token_id in self.closing_ids]
        tokens = []
        for row in rows:
            is_whole = row.input_ids[-1:] == [self.template.eot_id]
            pairs = list(zip(row.input_ids, row.response_mask, strict=True))
            tokens.append(pairs + closing if is_whole else pairs)
        with self._lock:
            return score_by_length(tokens, self.batch_size, self._score_batch)

    def encode(self, prompt: str, response: str) -> Tokenised:
        """Tokens of prompt, response and end of turn, as in a training row."""
        segments = self.template.segments([Message("user", prompt)], response)
        return self.template.encode(segments, self.max_tokens - len(self.closing_ids))

    @torch.no_grad()
    def _score_batch(self, rows: list[list[tuple[int, bool]]]) -> list[float]:
        token_ids, lengths = pack_rows([[token_id for token_id, _ in row] for row in rows])
        is_response = torch.tensor([is_response for row in rows for _, is_response in row])
        inputs = build_model_inputs(token_ids, lengths, is_packed=False)
        return compute_scores(self.model, inputs, lengths, is_response).tolist()


def load_frozen_value_model(
    name: str, tokenizer: PreTrainedTokenizerFast, args: TokenizerArguments
) -> ValueModel:
    """Reward model in a folder, on this process's device; `args` also has --dtype.

    Raises ValueError: see `load_value_model`.
    """
    options = ModelOptions(
        base_of(name),
        dtype=distributed.dtype_name(getattr(args, "dtype", "")),
        dropout=0.0,
        trust_remote_code=args.trust_remote_code,
    )
    lora = LoraOptions(folder=name) if is_adapter(name) else None
    return load_value_model(options, num_token_ids(tokenizer), lora).to(distributed.device()).eval()
