"""Requests of OpenAI's protocol, what their answers look like, and how its clients read an error.

A field that is not honoured is refused by its name, unless it asks for nothing.
"""

import dataclasses
from typing import Annotated, Any, ClassVar, Literal

from fastapi.responses import JSONResponse
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from common.data.example import Message
from serving.answering import Sampling

MAX_ANSWERS, MAX_STOPS, MAX_LOGPROBS = 16, 4, 20
# Values of fields that we do not have with which they ask for nothing.
_NEUTRAL: dict[str, tuple] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "best_of": (1,),
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "suffix": ("",), "store": (False,),
    "parallel_tool_calls": (True, False), "top_logprobs": (0,), "service_tier": ("auto", "default"),
}  # fmt: skip
_SYSTEM = ("system", "developer")
_IGNORED = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})  # they name the asker


class BadRequest(Exception):  # noqa: N818
    """A request that is not met; `param` is the field, `code` OpenAI's word for it."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


def openai_error(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> JSONResponse:
    """Return an error as OpenAI's clients read it."""
    kinds = {401: "authentication_error", 403: "permission_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    error = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": error}, status_code=status)


def read_request(kind: type["OpenAIRequest"], body: bytes) -> Any:
    """Return a request of this kind. Raises BadRequest, which names the first field that is wrong."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as errors:
        error = errors.errors(include_url=False)[0]
    param = ".".join(map(str, error["loc"]))
    if not param:
        raise BadRequest(f"the body: {error['msg']}")
    if error["type"] == "extra_forbidden":
        message = f"{param} is not supported by this server; leave it out"
        raise BadRequest(message, param, "unsupported_parameter")
    if error["type"] == "missing":
        raise BadRequest(f"{param} is missing", param, "missing_required_parameter")
    shown = repr(error["input"])
    shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
    raise BadRequest(f"{param} {shown}: {error['msg'].removeprefix('Value error, ')}", param, "invalid_value")


class _Fields(BaseModel):
    """Fields of exactly these types and no others; what asks for nothing is dropped first."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        asks = {name: value for name, value in fields.items() if value is not None and name not in _IGNORED}
        return {name: value for name, value in asks.items() if value not in _NEUTRAL.get(name, ())}


def _as_parts(content: Any) -> Any:
    """Return a message's content as its parts. Raises ValueError."""
    if not isinstance(content, str | list):
        raise ValueError("expected a text, or a list of parts of the type text")
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _as_prompts(prompt: Any) -> list[str] | list[list[int]]:
    """Return texts or rows of token ids, of which the prompt may be one. Raises ValueError."""
    is_one = isinstance(prompt, str) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], int))
    prompts = [prompt] if is_one else prompt
    is_list = isinstance(prompts, list) and bool(prompts) and all(prompts)
    if is_list and all(isinstance(text, str) for text in prompts):
        return prompts
    if is_list and all(
        isinstance(row, list) and all(type(i) is int and i >= 0 for i in row) for row in prompts
    ):
        return prompts
    raise ValueError("expected a text, token ids, or a list of either")


class _Part(_Fields):
    type: Literal["text"]
    text: str


class _Message(_Fields):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[_Part], BeforeValidator(_as_parts)]
    name: str = ""


class _StreamOptions(_Fields):
    include_usage: bool = False


class OpenAIRequest(_Fields):
    """What both kinds of requests may ask for."""

    model: str
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
        Field(max_length=MAX_STOPS),
    ] = []
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: int = Field(1, ge=1, le=MAX_ANSWERS)
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()

    def _sampling(self, default: Sampling, limit: int) -> Sampling:
        """Return how to sample; what is left out is the server's own. Raises BadRequest."""
        most, given = default.max_new_tokens, {"temperature": self.temperature, "top_p": self.top_p}
        if limit > most:
            message = f"{limit} tokens are more than this server's --max_new_tokens {most}"
            raise BadRequest(message, "max_tokens")
        if self.stream and (self.num_logprobs is not None or self.echo):
            field = "echo" if self.echo else "logprobs"
            message = f"{field} is not supported together with stream"
            raise BadRequest(message, field, "unsupported_parameter")
        given = {name: value for name, value in given.items() if value is not None}
        given |= {"stop": tuple(self.stop), "seed": self.seed, "num_answers": self.n}
        return dataclasses.replace(default, max_new_tokens=limit, **given)


class ChatRequest(OpenAIRequest):
    """What POST /v1/chat/completions takes."""

    messages: list[_Message]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)
    echo: ClassVar[bool] = False
    kind: ClassVar[str] = "chat.completion"
    chunk_kind: ClassVar[str] = "chat.completion.chunk"
    prefix: ClassVar[str] = "chatcmpl"
    param: ClassVar[str] = "messages"

    @field_validator("messages")
    @classmethod
    def _check_roles(cls, messages: list[_Message]) -> list[_Message]:
        if not messages or messages[-1].role != "user":
            raise ValueError("they must end with one of the user, who is answered")
        if any(message.role in _SYSTEM for message in messages[1:]):
            raise ValueError("only the first may be of the system")
        return messages

    @property
    def num_logprobs(self) -> int | None:
        """Return how many likely tokens are told beside each; None: no log-probabilities."""
        return self.top_logprobs if self.logprobs else None

    def sampling(self, default: Sampling) -> Sampling:
        """Return how to sample; what is left out is the server's own. Raises BadRequest."""
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs: true", "top_logprobs")
        limit = self.max_completion_tokens or self.max_tokens or default.max_new_tokens
        return self._sampling(default, limit)

    def prompts_of(self, model: Any) -> list[list[int]]:
        """Return the token ids of the one conversation. Raises ValueError when its template refuses it."""
        roles = ["system" if message.role in _SYSTEM else message.role for message in self.messages]
        texts = ["".join(part.text for part in message.content) for message in self.messages]
        return [model.encode([Message(role, text) for role, text in zip(roles, texts, strict=True)])]

    def choice(self, model: Any, prompt_ids: list[int], answer: Any) -> dict[str, Any]:
        """Return a whole answer, with the log-probabilities of its tokens, the end of turn included."""
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        if self.num_logprobs is None:
            return {"message": message, "logprobs": None}

        def entry(token_id: int, logprob: float) -> dict[str, Any]:
            text = model.tokenizer.decode([token_id])
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        scores = model.score([*prompt_ids, *answer.token_ids], self.num_logprobs)[len(prompt_ids) - 1 :]
        content = [
            entry(token_id, score.logprob) | {"top_logprobs": [entry(*one) for one in score.top]}
            for token_id, score in zip(answer.token_ids, scores, strict=True)
        ]
        return {"message": message, "logprobs": {"content": content, "refusal": None}}

    def piece(self, text: str, *, is_first: bool) -> dict[str, Any]:
        """Return a piece of a streamed answer."""
        role = {"role": "assistant"} if is_first else {}
        return {"delta": role | ({"content": text} if text or is_first else {})}


class CompletionRequest(OpenAIRequest):
    """What POST /v1/completions takes: texts or token ids to go on from."""

    prompts: Annotated[list[str] | list[list[int]], BeforeValidator(_as_prompts)] = Field(alias="prompt")
    max_tokens: int | None = Field(None, ge=0)
    num_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, alias="logprobs")
    echo: bool = False
    kind: ClassVar[str] = "text_completion"
    chunk_kind: ClassVar[str] = "text_completion"
    prefix: ClassVar[str] = "cmpl"
    param: ClassVar[str] = "prompt"

    def sampling(self, default: Sampling) -> Sampling:
        """Return how to sample; what is left out is the protocol's or the server's own. Raises BadRequest."""
        if self.max_tokens == 0 and not self.echo:
            raise BadRequest("max_tokens: 0 leaves nothing to answer without echo: true", "max_tokens")
        limit = min(16, default.max_new_tokens) if self.max_tokens is None else self.max_tokens
        return self._sampling(default, limit)

    def prompts_of(self, model: Any) -> list[list[int]]:
        """Return the token ids of the prompts."""
        return [model.encode_text(text) if isinstance(text, str) else text for text in self.prompts]

    def choice(self, model: Any, prompt_ids: list[int], answer: Any) -> dict[str, Any]:
        """Return a whole answer, behind its prompt if that is echoed, with its log-probabilities.

        With `echo` they are those of the prompt, too; the very first token of all has none. `text_offset`
        counts characters of the tokens' own texts.
        """
        decode, num_top, first = model.tokenizer.decode, self.num_logprobs, len(prompt_ids)
        text = answer.text
        if self.echo:
            text, first = decode(prompt_ids, skip_special_tokens=True) + text, 0
        if num_top is None:
            return {"text": text, "logprobs": None}
        whole = [*prompt_ids, *answer.token_ids]
        scores = [None, *model.score(whole, num_top)] if len(whole) > 1 else [None]
        texts, scores = [decode([token_id]) for token_id in whole[first:]], scores[first:]
        top = [s and {decode([token_id]): logprob for token_id, logprob in s.top} for s in scores]
        logprobs = {
            "tokens": texts,
            "token_logprobs": [score and score.logprob for score in scores],
            "top_logprobs": top if num_top else None,
            "text_offset": [sum(map(len, texts[:index])) for index in range(len(texts))],
        }
        return {"text": text, "logprobs": logprobs}

    def piece(self, text: str, *, is_first: bool) -> dict[str, Any]:
        """Return a piece of a streamed answer."""
        return {"text": text, "logprobs": None}
