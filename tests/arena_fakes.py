"""An arena without a model: answerers that say what they are told to, token by token, a token a character.

And a server in a thread, for an application of any kind.
"""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import uvicorn
from fastapi.testclient import TestClient

from common.data.example import Message
from common.flags.problems import Problems
from serving.answering import Answerer, Sampling, TextCallback, TokenScore
from serving.arena_app import BlindPairs, create_app
from serving.judgement_store import JudgementStore
from serving.text_stream import Answer
from serving.web_server import bind

MAX_BYTES = 4000
END = 3  # the token that ends an answer


class Characters:
    """A tokenizer whose tokens are characters' codes."""

    def __len__(self) -> int:
        return 0x110000

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, token_ids))


class FakeModel(Answerer):
    """Says `say(prompt text)` character by character."""

    def __init__(self, name: str, say: Callable[[str], str] | None = None) -> None:
        self.say = say or (lambda text: f"{name} heard {text}")
        self.tokenizer, self.max_length = Characters(), 200
        self.template = SimpleNamespace(description="plain text")
        self.num_token_ids = len(self.tokenizer)
        self.asked: list[Sampling] = []

    def encode(self, messages: Sequence[Message]) -> list[int]:
        if messages[0].content == "refuse me":
            raise ValueError("the chat template rejects this dialogue")
        return self.encode_text("|".join(message.content for message in messages))

    def encode_text(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def respond(
        self,
        prompt_ids: list[int],
        sampling: Sampling | None = None,
        *,
        keeps_space: bool = False,
        on_text: TextCallback | None = None,
        is_gone: Callable[[], bool] = bool,
    ) -> list[Answer]:
        self.asked.append(sampling)
        self.keeps_space = keeps_space
        answers = []
        for number in range(sampling.num_answers):
            text = self.say(self.tokenizer.decode(prompt_ids).split("|")[-1])
            cut = min((text.find(s) for s in sampling.stop if s in text), default=len(text))
            text, reason = text[:cut], "stop"
            if len(text) > sampling.max_new_tokens:
                text, reason = text[: sampling.max_new_tokens], "length"
            told = ""
            for character in text:
                told += character
                if on_text:
                    on_text(number, character)
                if is_gone():
                    reason = "cancelled"
                    break
            end = [END] if reason == "stop" else []
            answers.append(Answer(told, [*map(ord, told), *end], reason))
        return answers

    def score(self, token_ids: list[int], num_top: int) -> list[TokenScore]:
        first, *others = map(chr, token_ids)
        scores = [TokenScore(text, -ord(text) / 100, [(text, -0.5)] * num_top) for text in others]
        return [TokenScore(first, None, None), *scores]


def make_arena(path: Path, prompts: Iterator | None = None, **models: FakeModel) -> BlindPairs:
    """Return the rules over a database at `path`, for "left" and "right" unless models are given."""
    models = models or {name: FakeModel(name) for name in ("left", "right")}
    sampling = Sampling(max_new_tokens=60, temperature=0.7)
    return BlindPairs(models, JudgementStore(path), sampling, prompts=prompts, generator=random.Random(0))


def make_client(
    arena: BlindPairs, *, token: str = "", max_request_bytes: int = MAX_BYTES, **more
) -> TestClient:
    """Return a client of the application on the loopback."""
    app = create_app(arena, max_request_bytes=max_request_bytes, token=token, is_local=True)
    return TestClient(app, base_url="http://localhost:8080", **more)


@contextmanager
def real_server(app: Callable, port: int = 0) -> Iterator[int]:
    """Serve an application in a thread; give its port."""
    bound = bind("127.0.0.1", port, Problems())
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    try:
        yield bound.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(10)
        bound.close()
