"""OpenAI's protocol: /v1/models, /v1/chat/completions and /v1/completions, streamed too."""

import asyncio
import json
import threading
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from common.ranks.failures import first_line
from serving.answering import Answer, Answerer, Sampling, TextCallback
from serving.openai_requests import BadRequest, ChatRequest, CompletionRequest, openai_error, read_request
from serving.web_server import Emit, stream_from_thread

_FINISH = {"stop": "stop", "length": "length", "cancelled": "stop"}


def add_openai_routes(app: FastAPI, models: Mapping[str, Answerer], default: Sampling) -> None:
    """Let an application answer OpenAI's clients; `default` stands in for fields that are left out."""
    created = int(time.time())

    def describe(name: str) -> dict[str, Any]:
        if name not in models:
            known = ", ".join(models)
            raise BadRequest(
                f"there is no model {name!r} here, only {known}", "model", "model_not_found", 404
            )
        return {"id": name, "object": "model", "created": created, "owned_by": "triptych"}

    @app.exception_handler(BadRequest)
    def refuse(request: Request, error: BadRequest) -> Response:
        return openai_error(str(error), error.status, error.param, error.code)

    @app.get("/v1/models")
    def list_models() -> dict[str, Any]:
        """List what is served."""
        return {"object": "list", "data": [describe(name) for name in models]}

    app.get("/v1/models/{name:path}")(describe)

    async def respond(kind: type[ChatRequest] | type[CompletionRequest], request: Request) -> Response:
        asked = read_request(kind, await request.body())
        describe(asked.model)
        sampling = asked.sampling(default)
        model = models[asked.model]
        rows = await asyncio.to_thread(_encode, model, asked)
        return await _respond(Task(model, asked, sampling, rows))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        return await respond(ChatRequest, request)

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        """Continue texts or token ids."""
        return await respond(CompletionRequest, request)


def _encode(model: Answerer, asked: ChatRequest | CompletionRequest) -> list[list[int]]:
    """Return the prompts' token ids. Raises BadRequest."""
    try:
        rows = asked.prompts_of(model)
    except ValueError as error:
        raise BadRequest(str(error), asked.param, "invalid_value") from error
    for ids in rows:
        if ids and max(ids) >= len(model.tokenizer):
            known = f"the model has {len(model.tokenizer)} tokens"
            raise BadRequest(f"prompt: {known}, none is {max(ids)}", asked.param)
        if reason := model.why_too_long(ids) if ids else "the prompt has no token":
            raise BadRequest(reason, asked.param, "context_length_exceeded")
    return rows


@dataclass
class Task:
    """A request, the model that answers it and how, and the prompts' token ids."""

    model: Answerer
    asked: ChatRequest | CompletionRequest
    sampling: Sampling
    rows: list[list[int]]

    def answer(self, ids: list[int], on_text: TextCallback) -> list[Answer]:
        """Return the answers to one prompt."""
        if not self.sampling.max_new_tokens:  # the prompt alone is wanted, with its log-probabilities
            return [Answer("", [], "length", len(ids))] * self.sampling.num_answers
        keeps_space = isinstance(self.asked, CompletionRequest)
        return self.model.respond([ids], self.sampling, on_text=on_text, keeps_space=keeps_space)[0]

    def usage(self, answers: list[Answer]) -> dict[str, int]:
        """Return what the request cost."""
        num_prompt = sum(map(len, self.rows))
        num_new = sum(len(answer.token_ids) for answer in answers)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
        }


async def _respond(task: Task) -> Response:
    asked = task.asked
    head = {"id": f"{asked.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": asked.model}
    if asked.stream:
        lines = _stream(task, head | {"object": asked.chunk_kind})
        return StreamingResponse(lines, media_type="text/event-stream")
    try:
        choices, usage = await asyncio.to_thread(_answer_all, task)
    except Exception as error:  # a device's or a library's: a client must be told in its own form
        return openai_error(first_line(error), 500)
    return JSONResponse(head | {"object": asked.kind, "choices": choices, "usage": usage})


def _answer_all(task: Task) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return the choices of a request, and what they cost."""
    answers, choices = [], []
    for ids in task.rows:
        for answer in task.answer(ids, lambda number, text: False):
            choice = {"index": len(choices), "finish_reason": _FINISH[answer.finish_reason]}
            choices.append(choice | task.asked.choice(task.model, ids, answer))
            answers.append(answer)
    return choices, task.usage(answers)


async def _stream(task: Task, head: dict[str, Any]) -> AsyncIterator[str]:
    """Yield server-sent events: pieces of all answers, their ends, the usage if asked for, [DONE]."""
    with_usage = task.asked.stream_options.include_usage

    def work(emit: Emit, is_gone: threading.Event) -> None:
        answers, begun = [], set()

        def tell(index: int, text: str, finish: str | None) -> bool:
            piece = task.asked.piece(text, is_first=index not in begun)
            begun.add(index)
            choice = {"index": index, "finish_reason": finish} | piece
            emit({"choices": [choice]} | ({"usage": None} if with_usage else {}))
            return is_gone.is_set()

        for ids in task.rows:
            first = len(answers)
            of_one = task.answer(ids, lambda number, text, first=first: tell(first + number, text, None))
            for number, answer in enumerate(of_one):
                tell(first + number, "", _FINISH[answer.finish_reason])
            answers += of_one
            if is_gone.is_set():
                return
        if with_usage:
            emit({"choices": [], "usage": task.usage(answers)})

    try:
        async for event in stream_from_thread(work):
            yield f"data: {json.dumps(head | event, ensure_ascii=False)}\n\n"
    except Exception as error:
        yield f"data: {openai_error(first_line(error), 500).body.decode()}\n\n"
        return
    yield "data: [DONE]\n\n"
