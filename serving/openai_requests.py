"""Requests of OpenAI's protocol, read and checked field by field. No torch in here.

What is honoured is in `Asked`; a field that is not is refused by its name, unless it asks for nothing.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from common.data.example import Message
from serving.served_models import Sampling

MAX_ANSWERS, MAX_STOPS, MAX_LOGPROBS = 16, 4, 20
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# Values of fields that we do not have with which they ask for nothing.
_NEUTRAL: dict[str, tuple] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "best_of": (1,),
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "suffix": ("",), "store": (False,),
    "parallel_tool_calls": (True, False), "top_logprobs": (0,), "service_tier": ("auto", "default"),
}  # fmt: skip
_IGNORED = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})  # they name the asker


class BadRequest(Exception):  # noqa: N818
    """A request that is not met; `param` is the field, `code` OpenAI's word for it."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


def error_body(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "invalid_request_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def is_api_path(path: str) -> bool:
    """Whether answers to this path have OpenAI's form."""
    return path.startswith("/v1/") or path == "/v1"


@dataclass(frozen=True)
class Asked:
    """A request that can be met."""

    model: str
    prompts: list[tuple[Message, ...] | str | list[int]]  # one; /v1/completions may ask for several
    sampling: Sampling
    is_streamed: bool
    with_usage: bool  # a streamed answer ends with the number of tokens
    logprobs: int | None = None  # likeliest tokens told beside each; None: no log-probabilities
    echo: bool = False


def read_chat_request(body: Any, default: Sampling) -> Asked:
    """Return what POST /v1/chat/completions asks for. Raises BadRequest."""
    fields = _Fields(body)
    wants_logprobs = fields.take("logprobs", _is_bool, "true or false", False)
    most = fields.take("top_logprobs", _is_count(0, MAX_LOGPROBS), f"from 0 to {MAX_LOGPROBS}", 0)
    if most and not wants_logprobs:
        raise BadRequest("top_logprobs needs logprobs: true", "top_logprobs")
    prompt = _read_messages(fields.take("messages", lambda v: isinstance(v, list), "a list"))
    limits = [
        fields.take(name, _is_count(1), "1 or more", None) for name in ("max_tokens", "max_completion_tokens")
    ]
    limit = next((value for value in reversed(limits) if value is not None), None)
    return fields.finish([prompt], default, limit, logprobs=most if wants_logprobs else None)


def read_completion_request(body: Any, default: Sampling) -> Asked:
    """Return what POST /v1/completions asks for: texts or token ids to go on from. Raises BadRequest."""
    fields = _Fields(body)
    prompt = fields.take("prompt", _is_prompt, "a text, token ids, or a list of either")
    is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
    logprobs = fields.take("logprobs", _is_count(0, MAX_LOGPROBS), f"from 0 to {MAX_LOGPROBS}", None)
    echo = fields.take("echo", _is_bool, "true or false", False)
    limit = fields.take("max_tokens", _is_count(0), "0 or more", min(16, default.max_new_tokens))
    if limit == 0 and not echo:
        raise BadRequest("max_tokens: 0 leaves nothing to answer without echo: true", "max_tokens")
    return fields.finish([prompt] if is_one else prompt, default, limit, logprobs=logprobs, echo=echo)


class _Fields:
    """The fields of a request, each taken once; what is left in the end is refused."""

    def __init__(self, body: Any) -> None:
        if not isinstance(body, Mapping):
            raise BadRequest("the body must be a JSON object")
        self._left = {name: value for name, value in body.items() if value is not None}

    def take(self, name: str, is_good: Callable[[Any], bool], expected: str, *default: Any) -> Any:
        """Return a field's value, or the default. Raises BadRequest when it is wrong, or lacking."""
        if name not in self._left:
            if default:
                return default[0]
            raise BadRequest(f"{name} is missing: expected {expected}", name, "missing_required_parameter")
        value = self._left.pop(name)
        if not is_good(value):
            raise BadRequest(f"{name} {_shown(value)}: expected {expected}", name, "invalid_value")
        return value

    def finish(self, prompts: list, default: Sampling, limit: int | None, **more: Any) -> Asked:
        """Return the whole request. Raises BadRequest."""
        model = self.take("model", lambda v: isinstance(v, str), "the name of a model, see /v1/models")
        stop = self.take("stop", _is_stop, f"a text, or a list of at most {MAX_STOPS}", ())
        most = default.max_new_tokens
        if limit is not None and limit > most:
            raise BadRequest(
                f"{limit} tokens are more than this server's --max_new_tokens {most}", "max_tokens"
            )
        sampling = Sampling(
            max_new_tokens=most if limit is None else limit,
            temperature=self.take("temperature", _is_number(0, 100), "from 0 to 100", default.temperature),
            top_p=self.take(
                "top_p", lambda v: _is_number(0, 1)(v) and v > 0, "above 0, at most 1", default.top_p
            ),
            top_k=default.top_k,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            seed=self.take("seed", _is_count(-(2**63), 2**63 - 1), "a whole number", None),
            num_answers=self.take("n", _is_count(1, MAX_ANSWERS), f"from 1 to {MAX_ANSWERS}", 1),
        )
        is_streamed = self.take("stream", _is_bool, "true or false", False)
        options = self.take("stream_options", lambda v: isinstance(v, Mapping), "an object", {})
        with_usage = bool(options.get("include_usage", False))
        self._refuse_what_is_left()
        return Asked(model, prompts, sampling, is_streamed, with_usage, **more)

    def _refuse_what_is_left(self) -> None:
        for name, value in self._left.items():
            if name not in _IGNORED and value not in _NEUTRAL.get(name, ()):
                raise BadRequest(
                    f"{name} is not supported by this server; leave it out", name, "unsupported_parameter"
                )


def _read_messages(items: list) -> tuple[Message, ...]:
    messages = []
    for index, item in enumerate(items):
        where = f"messages.{index}"
        if not isinstance(item, Mapping) or item.get("role") not in _ROLES:
            raise BadRequest(f"{where}.role: expected one of {', '.join(_ROLES)}", f"{where}.role")
        if unknown := sorted({k for k, v in item.items() if v is not None} - {"role", "content", "name"}):
            raise BadRequest(f"{where}.{unknown[0]} is not supported", f"{where}.{unknown[0]}")
        messages.append(Message(_ROLES[item["role"]], _read_content(item.get("content"), f"{where}.content")))
    if not messages or messages[-1].role != "user":
        raise BadRequest("messages must end with one of the user, who is answered", "messages")
    if any(message.role == "system" for message in messages[1:]):
        raise BadRequest("messages: only the first may be of the system", "messages")
    return tuple(messages)


def _read_content(content: Any, where: str) -> str:
    if isinstance(content, list):
        for part in content:
            if not (
                isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
            ):
                raise BadRequest(
                    f"{where}: only parts of the type text are supported", where, "invalid_value"
                )
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) or not _is_text(content):
        raise BadRequest(f"{where}: expected a text", where, "invalid_value")
    return content


def _is_text(value: Any) -> bool:
    """Whether a text can be encoded: JSON can spell half a surrogate pair."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int and i >= 0 for i in value)


def _is_prompt(value: Any) -> bool:
    if _is_text(value) or _is_ids(value):
        return bool(value)
    return (
        isinstance(value, list) and bool(value) and (all(map(_is_text, value)) or all(map(_is_ids, value)))
        and all(map(len, value))
    )  # fmt: skip


def _is_stop(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    return isinstance(texts, list) and len(texts) <= MAX_STOPS and all(_is_text(t) and t for t in texts)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_count(low: int, high: float = math.inf) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value <= high


def _is_number(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and low <= value <= high


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
