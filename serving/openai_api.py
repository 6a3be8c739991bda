"""OpenAI-compatible API: /v1/models, /v1/chat/completions and /v1/completions, also streamed.

An unsupported field is rejected by name, unless its value has no effect.
"""

import asyncio
import dataclasses
import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from starlette.concurrency import run_in_threadpool

from common.data.example import Message
from serving.answering import Answerer, Sampling, TextCallback, TokenScore
from serving.text_stream import Answer
from serving.web_server import Emit, RejectedRequest, error_body, server_error, stream_from_thread

MAX_ANSWERS = 16
MAX_STOPS = 4
MAX_LOGPROBS = 20
MAX_PROMPTS = 256  # per request
MAX_STOP_CHARACTERS = 256  # each token is compared with all prefixes of a stop text
MAX_WAITING = 32  # requests that occupy one of the server's 40 threads; others wait without a thread
# Fields that identify the client, or configure tool calls.
_IGNORED = {"user", "metadata", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
# Values, besides 0 and empty ones, that disable an unsupported field.
_NEUTRAL_VALUES = ("none", "auto", "default", {"type": "text"}, ["text"])

# ---- requests


class _Fields(BaseModel):
    """Fields of exactly these types and no others; fields whose value has no effect are dropped first."""

    model_config = ConfigDict(strict=True, extra="forbid", str_min_length=0)  # rejects lone surrogates

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral_fields(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        known = {field.alias or name for name, field in cls.model_fields.items()}
        given = {name: value for name, value in fields.items() if value is not None and name not in _IGNORED}
        return {n: v for n, v in given.items() if n in known or (v and v not in _NEUTRAL_VALUES)}


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
    """Fields of both kinds of requests."""

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
    def _check_combinations(self) -> "_Request":
        if self.num_logprobs is not None and self.stream or self.echo and self.stream:
            raise ValueError("logprobs and echo are not supported together with stream")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 needs echo: true")
        return self

    def sampling(self, default: Sampling) -> Sampling:
        """Sampling options; missing fields get the server's defaults.

        A response ends at the server's token limit, with finish_reason length, where a request allows more.
        """
        limit = min(self.max_answer_tokens(default.max_new_tokens), default.max_new_tokens)
        given = self.model_dump(include={"temperature", "top_p", "seed"}, exclude_none=True)
        return dataclasses.replace(
            default, max_new_tokens=limit, stop=tuple(self.stop), num_answers=self.n, **given
        )


class ChatRequest(_Request):
    """Body of POST /v1/chat/completions."""

    messages: list[_Message]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)
    echo: ClassVar[bool] = False
    kind: ClassVar[str] = "chat.completion"
    chunk_kind: ClassVar[str] = "chat.completion.chunk"
    prompt_field: ClassVar[str] = "messages"

    @field_validator("messages")
    @classmethod
    def _check_roles(cls, messages: list[_Message]) -> list[_Message]:
        if not messages or messages[-1].role == "system":
            raise ValueError("the last message must be from the user, or the start of the assistant's reply")
        return messages

    @property
    def keeps_space(self) -> bool:
        """Whether white space around the response is kept: it continues a text."""
        return self.messages[-1].role == "assistant"

    @property
    def num_logprobs(self) -> int | None:
        """Number of likeliest tokens to return at each position; None: no log-probabilities."""
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self.top_logprobs if self.logprobs else None

    def max_answer_tokens(self, default: int) -> int:
        """Token limit of a response."""
        return self.max_completion_tokens or self.max_tokens or default

    def encode(self, model: Answerer) -> list[list[int]]:
        """Token ids of the only conversation. Raises ValueError if the template rejects it."""
        messages = [
            Message(message.role, "".join(part.text for part in message.content)) for message in self.messages
        ]
        return [model.encode(messages)]

    def logprobs_of(self, tokens: list[TokenScore]) -> dict[str, Any]:
        """Log-probabilities of a response's tokens, including the end of turn."""
        content = [
            _entry(token.text, token.logprob) | {"top_logprobs": [_entry(*pair) for pair in token.top or ()]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def whole(self, text: str) -> dict[str, Any]:
        """A complete response."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def chunk(self, text: str, is_first: bool) -> dict[str, Any]:
        """A chunk of a streamed response."""
        return {"delta": ({"role": "assistant"} if is_first else {}) | {"content": text}}


TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class CompletionRequest(_Request):
    """Body of POST /v1/completions: texts or token ids to continue."""

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
    prompt_field: ClassVar[str] = "prompt"
    keeps_space: ClassVar[bool] = True

    def max_answer_tokens(self, default: int) -> int:
        """Token limit of a response; the protocol's by default, but not above `default`."""
        return self.max_tokens if "max_tokens" in self.model_fields_set else min(self.max_tokens, default)

    def encode(self, model: Answerer) -> list[list[int]]:
        """Token ids of the prompts."""
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        prompts = [self.prompt] if is_one else self.prompt
        return [model.encode_text(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]

    def logprobs_of(self, tokens: list[TokenScore]) -> dict[str, Any]:
        """Log-probabilities of tokens; `text_offset` counts the characters of the tokens' own texts."""
        lengths = [len(token.text) for token in tokens]
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [token.top and dict(token.top) for token in tokens]
            if self.num_logprobs
            else None,
            "text_offset": [*accumulate(lengths, initial=0)][:-1],
        }

    def whole(self, text: str) -> dict[str, Any]:
        """A complete response."""
        return {"text": text}

    def chunk(self, text: str, is_first: bool) -> dict[str, Any]:
        """A chunk of a streamed response."""
        return {"text": text, "logprobs": None}


def _entry(text: str, logprob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


# ---- responses


def add_openai_routes(app: FastAPI, models: Mapping[str, Answerer], default: Sampling) -> None:
    """Add the routes of OpenAI's API to an application; `default` replaces missing fields."""
    created = int(time.time())
    waiting = asyncio.Semaphore(MAX_WAITING)

    @app.get("/v1/models/{name:path}")
    def describe(name: str) -> dict[str, Any]:
        """Describe a served model."""
        if name not in models:
            detail = f"unknown model {name!r}; this server has {', '.join(models)}"
            raise RejectedRequest(404, detail, "model", "model_not_found")
        return {"id": name, "object": "model", "created": created, "owned_by": "triptych"}

    @app.get("/v1/models")
    def list_models() -> dict[str, Any]:
        """List the served models."""
        return {"object": "list", "data": [describe(name) for name in models]}

    async def respond(body: ChatRequest | CompletionRequest, request: Request) -> Response:
        """Respond in a thread, leaving enough threads for other requests."""
        describe(body.model)
        is_gone = threading.Event()
        watching = asyncio.create_task(_wait_for_disconnect(request, is_gone))
        try:
            async with waiting:
                model = models[body.model]
                return await run_in_threadpool(_respond, body, model, body.sampling(default), is_gone.is_set)
        finally:
            watching.cancel()

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Respond to a conversation."""
        return await respond(body, request)

    @app.post("/v1/completions")
    async def complete(body: CompletionRequest, request: Request) -> Response:
        """Continue texts or token ids."""
        return await respond(body, request)


async def _wait_for_disconnect(request: Request, is_gone: threading.Event) -> None:
    """Set the event when the client of a request, whose body has been read, disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    is_gone.set()


def _encode(model: Answerer, request: ChatRequest | CompletionRequest) -> list[list[int]]:
    """Token ids of the prompts. Raises RejectedRequest."""
    param = request.prompt_field
    try:
        prompts = request.encode(model)
    except ValueError as error:
        raise RejectedRequest(400, str(error), param, "invalid_value") from error
    for ids in prompts:
        if ids and max(ids) >= model.num_token_ids:
            detail = f"prompt: {max(ids)} is not one of the model's {len(model.tokenizer)} tokens"
            raise RejectedRequest(400, detail, param)
        if reason := model.why_too_long(ids) if ids else "the prompt has no token":
            raise RejectedRequest(400, reason, param, "context_length_exceeded")
    return prompts


def _respond(
    request: ChatRequest | CompletionRequest,
    model: Answerer,
    sampling: Sampling,
    is_gone: Callable[[], bool],
) -> Response:
    """The HTTP response with all responses of the model, complete or streamed. Raises RejectedRequest."""
    prompts = _encode(model, request)
    kind = request.chunk_kind if request.stream else request.kind
    head = {"id": uuid.uuid4().hex, "object": kind, "created": int(time.time()), "model": request.model}

    def answer(on_text: TextCallback | None, is_gone: Callable[[], bool]) -> list[Answer]:
        """All responses, in the order of the prompts; `on_text` receives a response's index and a chunk."""
        answers: list[Answer] = []
        for prompt_number, ids in enumerate(prompts):
            first = prompt_number * request.n
            answers += model.respond(
                ids,
                sampling,
                keeps_space=request.keeps_space,
                on_text=on_text and (lambda number, text, first=first: on_text(first + number, text)),
                is_gone=is_gone,
            )
        return answers

    def stream(emit: Emit, is_gone: threading.Event) -> None:
        """Emit chunks of all responses, their ends, and the usage if requested."""
        started = set()

        def emit_chunk(index: int, text: str, finish: str | None = None) -> None:
            choice = {"index": index, "finish_reason": finish} | request.chunk(text, index not in started)
            started.add(index)
            emit(_event(head | {"choices": [choice]}))

        answers = answer(emit_chunk, is_gone.is_set)
        for index, one in enumerate(answers):
            emit_chunk(index, "", one.finish_reason)
        if request.stream_options.include_usage:
            emit(_event(head | {"choices": [], "usage": _usage(prompts, answers)}))
        emit("data: [DONE]\n\n")

    if request.stream:
        events = stream_from_thread(stream, lambda error: _event(error_body(server_error(error), "/v1")))
        return StreamingResponse(events, media_type="text/event-stream")
    answers = answer(None, is_gone)
    choices = []
    for index, one in enumerate(answers):
        choice = _whole_choice(model, request, prompts[index // request.n], one)
        choices.append({"index": index, "finish_reason": one.finish_reason} | choice)
    return JSONResponse(head | {"choices": choices, "usage": _usage(prompts, answers)})


def _whole_choice(
    model: Answerer, request: ChatRequest | CompletionRequest, prompt_ids: list[int], answer: Answer
) -> dict[str, Any]:
    """A response, after its prompt if that is echoed, with the log-probabilities of all tokens shown."""
    text = answer.text
    first = len(prompt_ids)
    if request.echo:
        text = model.tokenizer.decode(prompt_ids, skip_special_tokens=True) + text
        first = 0
    logprobs = None
    if request.num_logprobs is not None:
        tokens = model.score(prompt_ids + answer.token_ids, request.num_logprobs)
        logprobs = request.logprobs_of(tokens[first:])
    return request.whole(text) | {"logprobs": logprobs}


def _usage(prompts: list[list[int]], answers: list[Answer]) -> dict[str, int]:
    num_prompt = sum(map(len, prompts))
    num_new = sum(len(answer.token_ids) for answer in answers)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
