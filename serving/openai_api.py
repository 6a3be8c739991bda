"""OpenAI's protocol: /v1/models, /v1/chat/completions and /v1/completions, streamed too."""

import asyncio
import json
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from common.ranks.failures import first_line
from serving.answering import Answer
from serving.event_stream import Emit, WorkFailed, stream_from_thread
from serving.openai_logprobs import chat_logprobs, completion_logprobs
from serving.openai_requests import Asked, BadRequest, error_body, read_chat_request, read_completion_request
from serving.served_models import Sampling, ServedModel, why_too_long

_FINISH = {"stop": "stop", "length": "length", "cancelled": "stop"}


def add_openai_routes(app: FastAPI, models: Sequence[ServedModel], default: Sampling) -> None:
    """Let an application answer OpenAI's clients; `default` stands in for fields that are left out."""
    by_name, created = {model.name: model for model in models}, int(time.time())

    def describe(model: ServedModel) -> dict[str, Any]:
        return {"id": model.name, "object": "model", "created": created, "owned_by": "triptych"}

    @app.exception_handler(BadRequest)
    def refuse(request: Request, error: BadRequest) -> JSONResponse:
        body = error_body(str(error), error.status, error.param, error.code)
        return JSONResponse(body, status_code=error.status)

    @app.get("/v1/models")
    def list_models() -> dict[str, Any]:
        """List what is served."""
        return {"object": "list", "data": [describe(model) for model in models]}

    @app.get("/v1/models/{name:path}")
    def show_model(name: str) -> dict[str, Any]:
        """Describe one model."""
        return describe(_find(by_name, name))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        asked = read_chat_request(await _read_json(request), default)
        return await _respond(_ChatForm, asked, _find(by_name, asked.model))

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        """Go on from texts or token ids."""
        asked = read_completion_request(await _read_json(request), default)
        return await _respond(_CompletionForm, asked, _find(by_name, asked.model))


def _find(models: dict[str, ServedModel], name: str) -> ServedModel:
    if name not in models:
        known = ", ".join(models)
        raise BadRequest(f"there is no model {name!r} here, only {known}", "model", "model_not_found", 404)
    return models[name]


async def _read_json(request: Request) -> Any:
    try:
        return json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from error


class _ChatForm:
    """What a chat completion looks like."""

    kind, prefix = "chat.completion", "chatcmpl"
    keeps_space = False

    @staticmethod
    def chunk_kind() -> str:
        return "chat.completion.chunk"

    @staticmethod
    def choice(model: ServedModel, asked: Asked, prompt_ids: list[int], answer: Answer) -> dict[str, Any]:
        logprobs = (
            None if asked.logprobs is None else chat_logprobs(model, prompt_ids, answer, asked.logprobs)
        )
        return {
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": logprobs,
        }

    @staticmethod
    def first_piece(text: str) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": text}}

    @staticmethod
    def piece(text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}


class _CompletionForm:
    """What a completion of a text looks like."""

    kind, prefix = "text_completion", "cmpl"
    keeps_space = True

    @staticmethod
    def chunk_kind() -> str:
        return "text_completion"

    @staticmethod
    def choice(model: ServedModel, asked: Asked, prompt_ids: list[int], answer: Answer) -> dict[str, Any]:
        logprobs = (
            None
            if asked.logprobs is None
            else completion_logprobs(model, prompt_ids, answer, asked.logprobs, echo=asked.echo)
        )
        text = model.decode(prompt_ids) + answer.text if asked.echo else answer.text
        return {"text": text, "logprobs": logprobs}

    @staticmethod
    def first_piece(text: str) -> dict[str, Any]:
        return {"text": text, "logprobs": None}

    piece = first_piece


_Form = type[_ChatForm] | type[_CompletionForm]


async def _respond(form: _Form, asked: Asked, model: ServedModel) -> Response:
    if asked.is_streamed and (asked.logprobs is not None or asked.echo):
        field = "echo" if asked.echo else "logprobs"
        raise BadRequest(f"{field} is not supported together with stream", field, "unsupported_parameter")
    rows = await asyncio.to_thread(lambda: [_encode(model, prompt) for prompt in asked.prompts])
    head = {"id": f"{form.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model.name}
    if asked.is_streamed:
        lines = _stream(form, asked, model, rows, head | {"object": form.chunk_kind()})
        return StreamingResponse(lines, media_type="text/event-stream")
    try:
        choices, answers = await asyncio.to_thread(_answer_all, form, asked, model, rows)
    except Exception as error:  # a device's or a library's: a client must be told in its own form
        return JSONResponse(error_body(first_line(error), 500), status_code=500)
    return JSONResponse(head | {"object": form.kind, "choices": choices, "usage": _usage(rows, answers)})


def _encode(model: ServedModel, prompt: Any) -> list[int]:
    """Return a prompt's token ids. Raises BadRequest."""
    try:
        if isinstance(prompt, tuple):
            ids = model.encode(prompt)
        elif isinstance(prompt, str):
            ids = model.encode_text(prompt)
        else:
            ids = prompt
    except ValueError as error:
        raise BadRequest(str(error), "messages", "invalid_value") from error
    if ids and max(ids) >= model.num_tokens:
        raise BadRequest(f"prompt: the model has {model.num_tokens} tokens, none is {max(ids)}", "prompt")
    reason = why_too_long(model, len(ids)) if ids else "the prompt has no token"
    if reason:
        raise BadRequest(
            reason, "messages" if isinstance(prompt, tuple) else "prompt", "context_length_exceeded"
        )
    return ids


def _answer_all(
    form: _Form, asked: Asked, model: ServedModel, rows: list[list[int]]
) -> tuple[list[dict[str, Any]], list[Answer]]:
    """Return the choices of a request, and the answers they were made of."""
    choices, found = [], []
    for ids in rows:
        for answer in _ask(form, asked, model, ids, lambda number, text: False):
            finish = _FINISH[answer.finish_reason]
            choice = form.choice(model, asked, ids, answer)
            choices.append({"index": len(choices), "finish_reason": finish} | choice)
            found.append(answer)
    return choices, found


def _ask(
    form: _Form, asked: Asked, model: ServedModel, ids: list[int], listener: Callable[[int, str], bool]
) -> list[Answer]:
    if not asked.sampling.max_new_tokens:  # the prompt alone is wanted, with its log-probabilities
        return [Answer("", [], "length", len(ids))] * asked.sampling.num_answers
    return model.respond(ids, asked.sampling, listener, keeps_space=form.keeps_space)


async def _stream(
    form: _Form, asked: Asked, model: ServedModel, rows: list[list[int]], head: dict[str, Any]
) -> AsyncIterator[str]:
    """Yield server-sent events: pieces of all answers, their ends, the usage if asked for, [DONE]."""

    def line(content: dict[str, Any]) -> str:
        return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"

    def work(emit: Emit, is_gone: threading.Event) -> None:
        answers = []
        for first, ids in enumerate(rows):
            start = first * asked.sampling.num_answers
            begun: set[int] = set()

            def tell(number: int, text: str, start: int = start, begun: set[int] = begun) -> bool:
                make = form.piece if number in begun else form.first_piece
                begun.add(number)
                emit({"index": start + number, "finish_reason": None} | make(text))
                return is_gone.is_set()

            for number, answer in enumerate(_ask(form, asked, model, ids, tell)):
                make = form.piece if number in begun else form.first_piece
                finish = _FINISH[answer.finish_reason]
                emit({"index": start + number, "finish_reason": finish} | make(""))
                answers.append(answer)
            if is_gone.is_set():
                return
        emit(_usage(rows, answers))

    try:
        async for item in stream_from_thread(work):
            if "index" in item:
                yield line(head | {"choices": [item]} | ({"usage": None} if asked.with_usage else {}))
            elif asked.with_usage:
                yield line(head | {"choices": [], "usage": item})
    except WorkFailed as error:
        yield line(error_body(first_line(error), 500))
        return
    yield "data: [DONE]\n\n"


def _usage(rows: list[list[int]], answers: list[Answer]) -> dict[str, int]:
    num_prompt, num_new = sum(map(len, rows)), sum(len(answer.token_ids) for answer in answers)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}
