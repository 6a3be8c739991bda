"""Models that answer requests of a web server, one answer at a time."""

import dataclasses
import secrets
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.data.dialogue import Segment, build_template
from common.data.example import Message
from serving.answering import Answer, Answerer
from serving.token_scores import TokenScore, score_tokens

_SAMPLE_ID_BITS = 48  # of the random numbers of an answer that no seed was given for


@dataclass(frozen=True)
class Sampling:
    """How an answer is drawn."""

    max_new_tokens: int
    temperature: float = 1.0  # 0 takes the likeliest token
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None  # None: other random numbers every time
    num_answers: int = 1


Listener = Callable[[int, str], bool]  # gets (number of the answer, its next text); True: no more of it


class ServedModel(Protocol):
    """What the arena and the API need of a model."""

    name: str
    max_length: int  # tokens of prompt and answer together
    num_tokens: int  # of the vocabulary

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a conversation. Raises ValueError when its template refuses it."""
        ...

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of a bare text, as a row of the plain template begins."""
        ...

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of token ids, special tokens left out."""
        ...

    def token_text(self, token_id: int) -> str:
        """Return the text of one token alone, of a special one too."""
        ...

    def respond(
        self, prompt_ids: list[int], sampling: Sampling, listener: Listener, *, keeps_space: bool = False
    ) -> list[Answer]:
        """Return answers to a prompt, which the listener hears piece by piece."""
        ...

    def score(self, token_ids: list[int], num_top: int) -> list[TokenScore]:
        """Return the log-probabilities of all tokens but the first."""
        ...


class LocalModel:
    """A model of this process. Models of one process share a lock: the device computes for one answer."""

    def __init__(self, name: str, answerer: Answerer, lock: threading.Lock) -> None:
        self.name, self.answerer, self._lock = name, answerer, lock
        self.max_length, self.num_tokens = answerer.max_length, len(answerer.template.tokenizer)
        self._plain = build_template("plain", answerer.template.tokenizer)

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """See ServedModel."""
        return self.answerer.prompt_ids(messages)

    def encode_text(self, text: str) -> list[int]:
        """See ServedModel."""
        return self._plain.encode([Segment(text, False)], sys.maxsize).input_ids

    def decode(self, token_ids: list[int]) -> str:
        """See ServedModel."""
        return self.answerer.template.tokenizer.decode(token_ids, skip_special_tokens=True)

    def token_text(self, token_id: int) -> str:
        """See ServedModel."""
        return self.answerer.template.tokenizer.decode([token_id])

    def respond(
        self, prompt_ids: list[int], sampling: Sampling, listener: Listener, *, keeps_space: bool = False
    ) -> list[Answer]:
        """See ServedModel; waits until other answers are done."""
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
                listener=listener,
            )
        return answers

    def score(self, token_ids: list[int], num_top: int) -> list[TokenScore]:
        """See ServedModel; waits until other answers are done."""
        with self._lock:
            return score_tokens(
                self.answerer.model, token_ids, num_top=num_top, num_valid_tokens=self.num_tokens
            )


def why_too_long(model: ServedModel, num_prompt_tokens: int) -> str:
    """Return why a prompt leaves no room for an answer, empty when it does."""
    if num_prompt_tokens < model.max_length:
        return ""
    return (
        f"the prompt has {num_prompt_tokens} tokens, but prompt and answer together may have "
        f"{model.max_length}; shorten it"
    )
