"""The arena: blind pairs of responses, judged before the models' names are shown; page and API."""

import itertools
import random
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi.responses import FileResponse, StreamingResponse
from pydantic import StringConstraints

from common.data.example import Message
from common.ranks.failures import first_line, kind_and_line
from common.runs.durable_files import json_line
from serving.answering import Answerer, Sampling
from serving.judgement_store import JudgementStore, Pair, win_rates
from serving.openai_api import add_openai_routes
from serving.web_server import Emit, Guard, RejectedRequest, build_app, stream_from_thread

_PAGE = Path(__file__).with_name("page")
_OPEN_PATHS = ("/", "/health", *(f"/{path.name}" for path in _PAGE.iterdir()))
_Text = Annotated[str, StringConstraints(min_length=0)]  # pydantic's length check rejects lone surrogates


@dataclass
class NewPair:
    """Body of POST /api/pairs: a prompt, or `draw` for one from the data; `follows` is the previous pair."""

    text: Annotated[_Text, StringConstraints(strip_whitespace=True)] = ""
    draw: bool = False
    follows: _Text = ""


@dataclass
class Judgement:
    """Body of POST /api/judgements."""

    pair: _Text
    choice: Literal["a", "b", "tie", "both_bad"]


@dataclass
class BlindPairs:
    """Prompts models in pairs; stores responses and judgements. Methods raise RejectedRequest."""

    models: Mapping[str, Answerer]  # by name
    store: JudgementStore
    sampling: Sampling
    prompts: Iterator[tuple[Sequence[Message], str]] | None = None  # from --data_path
    generator: random.Random = field(default_factory=random.SystemRandom)  # selects and orders the models
    _prompts_lock: threading.Lock = field(default_factory=threading.Lock)

    # ---- new pairs

    def ask(self, asked: NewPair) -> Pair:
        """A new pair, without responses yet."""
        if asked.draw:
            if self.prompts is None:
                raise RejectedRequest(
                    422, "the server was started without --data_path, so there are no prompts to sample"
                )
            with self._prompts_lock:
                prompt, source = next(self.prompts)
            return self._create(prompt, source, self._choose_models())
        if not asked.text:
            raise RejectedRequest(422, "the prompt is empty; write something")
        said = Message("user", asked.text)
        if not asked.follows:
            return self._create([said], "typed", self._choose_models())
        before = self.store.get(asked.follows)
        if before.choice not in ("a", "b", "tie"):
            raise RejectedRequest(422, "only a preferred answer can be continued; start a new conversation")
        answer = before.answer_b if before.choice == "b" else before.answer_a  # A's response after a tie
        prompt = [*before.prompt, Message("assistant", answer or ""), said]
        return self._create(prompt, "follow-up", [before.model_a, before.model_b])

    def _choose_models(self) -> list[str]:
        """Two of the models that have met least often."""
        if len(self.models) < 2:
            raise RejectedRequest(
                422, "the server has one model only, which cannot be compared; start it with two"
            )
        met = self.store.num_answered_by_models()
        pairs = list(itertools.combinations(self.models, 2))
        least = min(met[frozenset(pair)] for pair in pairs)
        return list(self.generator.choice([pair for pair in pairs if met[frozenset(pair)] == least]))

    def _create(self, prompt: Sequence[Message], source: str, names: list[str]) -> Pair:
        self.generator.shuffle(names)
        for name in names:
            if name not in self.models:
                raise RejectedRequest(422, f"{name} is no longer served; begin a new conversation")
            try:
                reason = self.models[name].why_too_long(self.models[name].encode(prompt))
            except ValueError as error:
                reason = str(error)
            if reason:  # without the name: another prompt for the same two may follow
                raise RejectedRequest(422, f"one of the models cannot answer: {reason}")
        return self.store.add_pair(prompt, source, *names, asdict(self.sampling))

    # ---- responses

    def answer(self, pair: Pair, emit: Emit, is_gone: threading.Event) -> None:
        """Generate both responses, one after the other, and emit them; stop if the client disconnects.

        Each response is stored as soon as it is complete. A model's errors are shown and stored too.
        """
        emit({"event": "pair"} | self.view(pair))
        for side, name in (("a", pair.model_a), ("b", pair.model_b)):
            model = self.models[name]

            def tell(_: int, text: str, side: str = side) -> None:
                emit({"event": "text", "side": side, "text": text})

            try:
                prompt_ids = model.encode(pair.prompt)
                [answer] = model.respond(prompt_ids, self.sampling, on_text=tell, is_gone=is_gone.is_set)
                if is_gone.is_set():
                    return
                self.store.set_answer(pair.id, side, answer.text)
                emit({"event": "end", "side": side, "text": answer.text, "finish": answer.finish_reason})
            except Exception as error:  # of device, library or disk: all are shown to the user
                message = kind_and_line(error)
                print(f"error: {name} gave no answer: {message}", file=sys.stderr, flush=True)
                self.store.set_answer(pair.id, side, None, message)
                for hidden in sorted(self.models, key=len, reverse=True):
                    message = message.replace(hidden, "the model")
                emit({"event": "error", "side": side, "message": message})
        emit({"event": "done", "is_answered": self.store.get(pair.id).is_answered})

    # ---- judging

    def view(self, pair: Pair) -> dict[str, Any]:
        """A pair as the page shows it: with names only after it was judged."""
        shown = {
            "id": pair.id,
            "prompt": [message.as_dict() for message in pair.prompt],
            "answers": {"a": pair.answer_a, "b": pair.answer_b},
            "choice": pair.choice,
        }
        if pair.choice:
            shown["models"] = {"a": pair.model_a, "b": pair.model_b}
        return shown


def create_app(
    arena: BlindPairs, *, max_request_bytes: int, token: str = "", is_local: bool = False
) -> Guard:
    """The application. With a token, every request except those for the static page must carry it, as
    Authorization: Bearer TOKEN. `is_local`: see Guard.
    """
    app = build_app(max_request_bytes)

    @app.get("/api/state")
    def state() -> dict[str, Any]:
        """State that the page loads at the start."""
        forms = {name: model.template.description for name, model in arena.models.items()}
        return {"has_prompts": arena.prompts is not None, "forms": forms}

    @app.post("/api/pairs")
    def ask(body: NewPair) -> StreamingResponse:
        """Stream lines of JSON: the pair, chunks of both responses, their ends."""
        pair = arena.ask(body)

        def answer(emit: Emit, is_gone: threading.Event) -> None:
            arena.answer(pair, lambda event: emit(json_line(event)), is_gone)

        # `failed` handles only errors that could not be stored either.
        lines = stream_from_thread(
            answer, lambda error: json_line({"event": "failed", "message": first_line(error)})
        )
        return StreamingResponse(lines, media_type="application/x-ndjson")

    @app.get("/api/pairs/{pair_id}")
    def show(pair_id: str) -> dict[str, Any]:
        """A pair; with names only after it was judged."""
        return arena.view(arena.store.get(pair_id))

    @app.post("/api/judgements")
    def judge(body: Judgement) -> dict[str, Any]:
        """Store a judgement; return the pair with its names."""
        return arena.view(arena.store.judge(body.pair, body.choice))

    @app.get("/api/results")
    def results() -> dict[str, Any]:
        """Counts and win rates of all judgements in the database."""
        pairs = arena.store.judged()
        return {"choices": Counter(pair.choice for pair in pairs)} | win_rates(pairs)

    @app.get("/health")
    def health() -> dict[str, Any]:
        """The server's models."""
        return {"models": list(arena.models)}

    add_openai_routes(app, arena.models, arena.sampling)
    files = {f"/{path.name}": path for path in _PAGE.iterdir()} | {"/": _PAGE / "index.html"}
    for path, file in files.items():  # a mount at / would respond to every other path, by any method
        app.add_route(path, lambda _, file=file: FileResponse(file), methods=["GET"])
    return Guard(app, token, is_local=is_local, open_paths=_OPEN_PATHS)
