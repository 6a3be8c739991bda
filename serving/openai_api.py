"""OpenAI's protocol: /v1/models, /v1/chat/completions and /v1/completions, streamed too.

A field that is not honoured is refused by its name, unless it asks for nothing.
"""

import asyncio
import dataclasses
import json
import threading
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from starlette.concurrency import run_in_threadpool

from common.data.example import Message
from common.ranks.failures import first_line
from serving.answering import Answerer, Sampling, TextCallback
from serving.text_stream import Answer
from serving.web_server import Emit, Refused, Work, stream_from_thread

MAX_ANSWERS, MAX_STOPS, MAX_LOGPROBS = 16, 4, 20
MAX_PROMPTS = 256  # of one request
MAX_STOP_CHARACTERS = 256  # each token of an answer is compared with all beginnings of a stop
MAX_WAITING = 16  # requests that wait for their answers in one of the 40 threads; the others wait without
# They name the asker, or say how tools would be called.
_IGNORED = {"user", "metadata", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
# Values, beside 0 and empty ones, with which fields that we do not have ask for nothing.
_NOTHING = ("none", "auto", "default", {"type": "text"}, ["text"])

# ---- what may be asked


class _Fields(BaseModel):
    """Fields of exactly these types and no others; what asks for nothing is dropped first."""

    model_config = ConfigDict(strict=True, extra="forbid", str_min_length=0)  # and no half characters

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        own = {field.alias or name for name, field in cls.model_fields.items()}
        asks = {name: value for name, value in fields.items() if value is not None and name not in _IGNORED}
        return {n: v for n, v in asks.items() if n in own or (v and v not in _NOTHING)}


class _Part(_Fields):
    type: Literal["text"]
    text: str


class _Message(_Fields):
    role: Annotated[
        Literal["system", "user", "assistant"], BeforeValidator(lambda r: "system" if r == "developer" else r)
    ]
    content: Annotated[
        list[_Part], BeforeValidator(lambda c: [{"type": "text", "text": c}] if isinstance(c, str) else c)
    ]
    name: str = ""


class _StreamOptions(_Fields):
    include_usage: bool = False


class _Request(_Fields):
    """What both kinds of requests may ask for."""

    model: str
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]],
        BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
        Field(max_length=MAX_STOPS),
    ] = []
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: int = Field(1, ge=1, le=MAX_ANSWERS)
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()

    @model_validator(mode="after")
    def _check_what_goes_together(self) -> "_Request":
        if self.num_logprobs is not None and self.stream or self.echo and self.stream:
            raise ValueError("logprobs and echo are not supported together with stream")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 leaves nothing to answer without echo: true")
        return self

    def sampling(self, default: Sampling) -> Sampling:
        """Return how to sample; what is left out is the server's own. Raises Refused."""
        limit, most = self.max_answer_tokens(default.max_new_tokens), default.max_new_tokens
        if limit > most:
            detail = f"{limit} tokens are more than this server's --max_new_tokens {most}"
            raise Refused(400, detail, "max_tokens")
        given = self.model_dump(include={"temperature", "top_p", "seed"}, exclude_none=True)
        given |= {"max_new_tokens": limit, "stop": tuple(self.stop), "num_answers": self.n}
        return dataclasses.replace(default, **given)


class ChatRequest(_Request):
    """What POST /v1/chat/completions takes."""

    messages: list[_Message]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)
    echo: ClassVar[bool] = False
    kind: ClassVar[str] = "chat.completion"
    chunk_kind: ClassVar[str] = "chat.completion.chunk"
    param: ClassVar[str] = "messages"

    @field_validator("messages")
    @classmethod
    def _check_roles(cls, messages: list[_Message]) -> list[_Message]:
        if not messages or messages[-1].role != "user":
            raise ValueError("they must end with one of the user, who is answered")
        if any(message.role == "system" for message in messages[1:]):
            raise ValueError("only the first may be of the system")
        return messages

    @property
    def num_logprobs(self) -> int | None:
        """Return how many likely tokens are told beside each; None: no log-probabilities."""
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self.top_logprobs if self.logprobs else None

    def max_answer_tokens(self, most: int) -> int:
        """Return the limit of an answer; `most` is the server's."""
        return self.max_completion_tokens or self.max_tokens or most

    def prompts_of(self, model: Answerer) -> list[list[int]]:
        """Return the token ids of the one conversation. Raises ValueError when its template refuses it."""
        texts = ["".join(part.text for part in message.content) for message in self.messages]
        roles = [message.role for message in self.messages]
        return [model.encode(list(map(Message, roles, texts)))]

    def choice(self, model: Answerer, prompt_ids: list[int], answer: Answer) -> dict[str, Any]:
        """Return a whole answer, with the log-probabilities of its tokens, the end of turn included."""
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        if self.num_logprobs is None:
            return {"message": message, "logprobs": None}

        def entry(text: str, logprob: float) -> dict[str, Any]:
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        scored = _score(model, [*prompt_ids, *answer.token_ids], self.num_logprobs)[len(prompt_ids) :]
        content = [
            entry(text, logprob) | {"top_logprobs": [entry(*one) for one in top]}
            for text, logprob, top in scored
        ]
        return {"message": message, "logprobs": {"content": content, "refusal": None}}

    def piece(self, text: str, is_first: bool) -> dict[str, Any]:
        """Return a piece of a streamed answer."""
        return {"delta": ({"role": "assistant"} if is_first else {}) | {"content": text}}


TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class CompletionRequest(_Request):
    """What POST /v1/completions takes: texts or token ids to go on from."""

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    max_tokens: int = Field(16, ge=0)
    num_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, alias="logprobs")
    echo: bool = False
    kind: ClassVar[str] = "text_completion"
    chunk_kind: ClassVar[str] = "text_completion"
    param: ClassVar[str] = "prompt"

    def max_answer_tokens(self, most: int) -> int:
        """Return the limit of an answer, the protocol's own where none is given; `most` is the server's."""
        return self.max_tokens if "max_tokens" in self.model_fields_set else min(self.max_tokens, most)

    def prompts_of(self, model: Answerer) -> list[list[int]]:
        """Return the token ids of the prompts."""
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        prompts = [self.prompt] if is_one else self.prompt
        return [model.encode_text(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]

    def choice(self, model: Answerer, prompt_ids: list[int], answer: Answer) -> dict[str, Any]:
        """Return a whole answer, behind its prompt if that is echoed, with its log-probabilities.

        With `echo` they are those of the prompt, too; the very first token of all has none. `text_offset`
        counts characters of the tokens' own texts.
        """
        text, first = answer.text, len(prompt_ids)
        if self.echo:
            text, first = model.tokenizer.decode(prompt_ids, skip_special_tokens=True) + text, 0
        if self.num_logprobs is None:
            return {"text": text, "logprobs": None}
        scored = _score(model, [*prompt_ids, *answer.token_ids], self.num_logprobs)[first:]
        texts = [token for token, _, _ in scored]
        logprobs = {
            "tokens": texts,
            "token_logprobs": [logprob for _, logprob, _ in scored],
            "top_logprobs": [top and dict(top) for _, _, top in scored] if self.num_logprobs else None,
            "text_offset": [sum(map(len, texts[:index])) for index in range(len(texts))],
        }
        return {"text": text, "logprobs": logprobs}

    def piece(self, text: str, is_first: bool) -> dict[str, Any]:
        """Return a piece of a streamed answer."""
        return {"text": text, "logprobs": None}


TokenTexts = list[tuple[str, float | None, list[tuple[str, float]] | None]]


def _score(model: Answerer, token_ids: list[int], num_top: int) -> TokenTexts:
    """Return each token's text, log-probability and likeliest texts with theirs; of the very first None."""
    decode = model.tokenizer.decode
    scored = [
        (decode([token_id]), score.logprob, [(decode([i]), logprob) for i, logprob in score.top])
        for token_id, score in zip(token_ids[1:], model.score(token_ids, num_top), strict=True)
    ]
    return [(decode(token_ids[:1]), None, None), *scored]


# ---- how it is answered


def add_openai_routes(app: FastAPI, models: Mapping[str, Answerer], default: Sampling) -> None:
    """Let an application answer OpenAI's clients; `default` stands in for fields that are left out."""
    created = int(time.time())
    waiting = asyncio.Semaphore(MAX_WAITING)

    @app.get("/v1/models/{name:path}")
    def describe(name: str) -> dict[str, Any]:
        """Return what is served under a name."""
        if name not in models:
            detail = f"there is no model {name!r} here, only {', '.join(models)}"
            raise Refused(404, detail, "model", "model_not_found")
        return {"id": name, "object": "model", "created": created, "owned_by": "triptych"}

    @app.get("/v1/models")
    def list_models() -> dict[str, Any]:
        """List what is served."""
        return {"object": "list", "data": [describe(name) for name in models]}

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest) -> Response:
        """Answer a conversation."""
        return await respond(body)

    @app.post("/v1/completions")
    async def complete(body: CompletionRequest) -> Response:
        """Continue texts or token ids."""
        return await respond(body)

    async def respond(body: ChatRequest | CompletionRequest) -> Response:
        """Answer in a thread, of which enough are left for all other requests."""
        describe(body.model)
        sampling = body.sampling(default)
        async with waiting:
            return await run_in_threadpool(_respond, body, models[body.model], sampling)


def _encode(model: Answerer, asked: ChatRequest | CompletionRequest) -> list[list[int]]:
    """Return the prompts' token ids. Raises Refused."""
    try:
        rows = asked.prompts_of(model)
    except ValueError as error:
        raise Refused(400, str(error), asked.param, "invalid_value") from error
    for ids in rows:
        if ids and max(ids) >= model.num_token_ids:
            known = f"the model has {len(model.tokenizer)} tokens"
            raise Refused(400, f"prompt: {known}, none is {max(ids)}", asked.param)
        if reason := model.why_too_long(ids) if ids else "the prompt has no token":
            raise Refused(400, reason, asked.param, "context_length_exceeded")
    return rows


def _respond(asked: ChatRequest | CompletionRequest, model: Answerer, sampling: Sampling) -> Response:
    """Return the answer to a request, whole or as a stream. Raises Refused."""
    rows = _encode(model, asked)
    head = {"id": uuid.uuid4().hex, "created": int(time.time()), "model": asked.model}
    keeps_space = isinstance(asked, CompletionRequest)

    def answer(tell: TextCallback | None = None) -> list[Answer]:
        """Return all answers, those to the first prompt first; `tell` gets an answer's index and its text."""
        answers: list[Answer] = []
        for ids in rows:
            first = len(answers)
            on_text = tell and (lambda number, text, first=first: tell(first + number, text))
            answers += model.respond(ids, sampling, keeps_space=keeps_space, on_text=on_text)
        return answers

    def usage(answers: list[Answer]) -> dict[str, int]:
        num_prompt = sum(map(len, rows))
        num_new = sum(len(answer.token_ids) for answer in answers)
        total = num_prompt + num_new
        return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": total}

    def stream(emit: Emit, is_gone: threading.Event) -> None:
        """Emit pieces of all answers, their ends, and the usage if asked for."""
        begun = set()

        def tell(index: int, text: str, finish: str | None = None) -> bool:
            choice = {"index": index, "finish_reason": finish} | asked.piece(text, index not in begun)
            begun.add(index)
            emit({"choices": [choice]})
            return is_gone.is_set()

        answers = answer(tell)
        for index, one in enumerate(answers):
            tell(index, "", one.finish_reason)
        if asked.stream_options.include_usage:
            emit({"choices": [], "usage": usage(answers)})

    if asked.stream:
        lines = _events(stream, head | {"object": asked.chunk_kind})
        return StreamingResponse(lines, media_type="text/event-stream")
    answers = answer()
    choices = [
        {"index": index, "finish_reason": one.finish_reason}
        | asked.choice(model, rows[index // asked.n], one)
        for index, one in enumerate(answers)
    ]
    return JSONResponse(head | {"object": asked.kind, "choices": choices, "usage": usage(answers)})


async def _events(work: Work, head: dict[str, Any]) -> AsyncIterator[str]:
    """Yield server-sent events, and [DONE] behind them."""
    try:
        async for event in stream_from_thread(work):
            yield f"data: {json.dumps(head | event, ensure_ascii=False)}\n\n"
    except Exception as error:  # a device's or a library's: a client must be told in its own form
        yield f"data: {Refused(500, first_line(error)).answer('/v1').body.decode()}\n\n"
        return
    yield "data: [DONE]\n\n"
