"""Models that answer requests of a web server, one answer at a time.

# T tokens, K likeliest ones, V vocabulary
"""

import dataclasses
import secrets
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from common.data.dialogue import Segment, build_template
from common.data.example import Message
from common.models.loading import compute_hidden
from common.models.model_inputs import build_model_inputs
from common.models.output_head import read_logit_transform
from serving.answering import Answer, Answerer, TextCallback

_SAMPLE_ID_BITS = 48  # of the random numbers of an answer that no seed was given for
_POSITIONS_AT_A_TIME = 128  # whose logits are held together


@dataclass(frozen=True)
class Sampling:
    """How an answer is sampled."""

    max_new_tokens: int
    temperature: float = 1.0  # 0 takes the likeliest token
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None  # None: other random numbers every time
    num_answers: int = 1


class TokenScore(NamedTuple):
    """A token's log-probability after those before it, and the likeliest tokens there, with theirs."""

    logprob: float
    top: list[tuple[int, float]]


class ServedModel:
    """A named model; all of one process share a lock, for the device computes for one answer.

    `max_length` counts the tokens of prompt and answer together, `num_tokens` those of the vocabulary.
    """

    def __init__(self, name: str, answerer: Answerer, lock: threading.Lock) -> None:
        self.name, self.answerer, self._lock = name, answerer, lock
        self.tokenizer = answerer.template.tokenizer
        self.max_length, self.num_tokens = answerer.max_length, len(self.tokenizer)

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a conversation. Raises ValueError when its template refuses it."""
        return self.answerer.prompt_ids(messages)

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of a bare text, as a row of the plain template begins."""
        plain = build_template("plain", self.tokenizer)
        return plain.encode([Segment(text, False)], sys.maxsize).input_ids

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of token ids, special tokens left out."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token alone, of a special one too."""
        return self.tokenizer.decode([token_id])

    def why_too_long(self, prompt_ids: list[int]) -> str:
        """Return why a prompt leaves no room for an answer, empty when it does."""
        if len(prompt_ids) < self.max_length:
            return ""
        return (
            f"the prompt has {len(prompt_ids)} tokens, but prompt and answer together may have "
            f"{self.max_length}; shorten it"
        )

    def respond(
        self, prompt_ids: list[int], sampling: Sampling, on_text: TextCallback, *, keeps_space: bool = False
    ) -> list[Answer]:
        """Return answers to a prompt, told piece by piece; waits until other answers are done."""
        options = dataclasses.replace(
            self.answerer.options,
            temperature=sampling.temperature or 1.0,
            do_sample=sampling.temperature > 0,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=self.answerer.options.seed if sampling.seed is None else sampling.seed,
        )
        sample_id = secrets.randbits(_SAMPLE_ID_BITS) if sampling.seed is None else 0
        with self._lock:
            [answers] = self.answerer.respond(
                [prompt_ids],
                num_samples=sampling.num_answers,
                options=options,
                max_new_tokens=sampling.max_new_tokens,
                stop=sampling.stop,
                keeps_space=keeps_space,
                first_sample_id=sample_id,
                on_text=on_text,
            )
        return answers

    def score(self, token_ids: list[int], num_top: int) -> list[TokenScore]:
        """Return the log-probabilities of all tokens but the first; waits until other answers are done."""
        with self._lock:
            return score_tokens(
                self.answerer.model, token_ids, num_top=num_top, num_valid_tokens=self.num_tokens
            )


@torch.inference_mode()
def score_tokens(
    model: PreTrainedModel, token_ids: list[int], *, num_top: int, num_valid_tokens: int
) -> list[TokenScore]:
    """Return T - 1 scores, of all tokens but the first, in fp32 at temperature 1; `num_top` below V."""
    ids = torch.tensor(token_ids)
    inputs = build_model_inputs(ids, torch.tensor([len(token_ids)]), is_packed=False, device=model.device)
    hidden = compute_hidden(model, inputs)[0, :-1]  # (T - 1, H)
    form, head = read_logit_transform(model.config), model.get_output_embeddings()
    scores: list[TokenScore] = []
    for states, targets in zip(
        hidden.split(_POSITIONS_AT_A_TIME), ids[1:].to(model.device).split(_POSITIONS_AT_A_TIME), strict=True
    ):
        logprobs = form.transform(head(states).float())[:, :num_valid_tokens].log_softmax(-1)
        own = logprobs.gather(1, targets.unsqueeze(1)).squeeze(1).tolist()
        values, tokens = (part.tolist() for part in logprobs.topk(num_top, dim=-1))
        scores += [
            TokenScore(logprob, list(zip(likely, tops, strict=True)))
            for logprob, likely, tops in zip(own, tokens, values, strict=True)
        ]
    return scores
