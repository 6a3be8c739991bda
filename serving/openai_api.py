"""OpenAI's protocol: /v1/models, /v1/chat/completions and /v1/completions, streamed too."""

import asyncio
import json
import threading
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from common.ranks.failures import first_line
from serving.answering import Answer, TextCallback
from serving.openai_requests import BadRequest, ChatRequest, CompletionRequest, openai_error, read_request
from serving.served_models import Sampling, ServedModel
from serving.web_server import Emit, stream_from_thread

_FINISH = {"stop": "stop", "length": "length", "cancelled": "stop"}


def add_openai_routes(app: FastAPI, models: Sequence[ServedModel], default: Sampling) -> None:
    """Let an application answer OpenAI's clients; `default` stands in for fields that are left out."""
    by_name, created = {model.name: model for model in models}, int(time.time())

    def describe(model: ServedModel) -> dict[str, Any]:
        return {"id": model.name, "object": "model", "created": created, "owned_by": "triptych"}

    def find(name: str) -> ServedModel:
        if name not in by_name:
            known = ", ".join(by_name)
            raise BadRequest(
                f"there is no model {name!r} here, only {known}", "model", "model_not_found", 404
            )
        return by_name[name]

    @app.exception_handler(BadRequest)
    def refuse(request: Request, error: BadRequest) -> Response:
        return openai_error(str(error), error.status, error.param, error.code)

    @app.get("/v1/models")
    def list_models() -> dict[str, Any]:
        """List what is served."""
        return {"object": "list", "data": [describe(model) for model in models]}

    @app.get("/v1/models/{name:path}")
    def show_model(name: str) -> dict[str, Any]:
        """Describe one model."""
        return describe(find(name))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        asked = read_request(ChatRequest, await request.body())
        return await _respond(ChatForm(find(asked.model), asked, asked.sampling(default)))

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        """Continue texts or token ids."""
        asked = read_request(CompletionRequest, await request.body())
        return await _respond(CompletionForm(find(asked.model), asked, asked.sampling(default)))


@dataclass
class ChatForm:
    """A request for a chat completion, and what its answers look like."""

    model: ServedModel
    asked: ChatRequest | CompletionRequest
    sampling: Sampling
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"
    param, keeps_space = "messages", False

    def encode(self, prompt: Any) -> list[int]:
        """Return a prompt's token ids. Raises BadRequest."""
        try:
            ids = self._encode(prompt)
        except ValueError as error:
            raise BadRequest(str(error), self.param, "invalid_value") from error
        if ids and max(ids) >= self.model.num_tokens:
            known = f"the model has {self.model.num_tokens} tokens"
            raise BadRequest(f"prompt: {known}, none is {max(ids)}", self.param)
        if reason := self.model.why_too_long(ids) if ids else "the prompt has no token":
            raise BadRequest(reason, self.param, "context_length_exceeded")
        return ids

    def _encode(self, prompt: Any) -> list[int]:
        return self.model.encode(prompt)

    def answer(self, ids: list[int], on_text: TextCallback) -> list[Answer]:
        """Return the answers to one prompt."""
        if not self.sampling.max_new_tokens:  # the prompt alone is wanted, with its log-probabilities
            return [Answer("", [], "length", len(ids))] * self.sampling.num_answers
        return self.model.respond(ids, self.sampling, on_text, keeps_space=self.keeps_space)

    def choice(self, ids: list[int], answer: Answer) -> dict[str, Any]:
        """Return a whole answer."""
        return {
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": self._logprobs(ids, answer),
        }

    def piece(self, text: str, is_first: bool) -> dict[str, Any]:
        """Return a piece of a streamed answer."""
        role = {"role": "assistant"} if is_first else {}
        return {"delta": role | ({"content": text} if text or is_first else {})}

    def _logprobs(self, ids: list[int], answer: Answer) -> dict[str, Any] | None:
        """Return the log-probabilities of an answer's tokens, the end of turn included."""
        num_top = self.asked.num_logprobs
        if num_top is None:
            return None

        def entry(token_id: int, logprob: float) -> dict[str, Any]:
            text = self.model.token_text(token_id)
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        scores = self.model.score([*ids, *answer.token_ids], num_top)[len(ids) - 1 :]
        content = [
            entry(token_id, score.logprob) | {"top_logprobs": [entry(*one) for one in score.top]}
            for token_id, score in zip(answer.token_ids, scores, strict=True)
        ]
        return {"content": content, "refusal": None}


class CompletionForm(ChatForm):
    """A request for completions of texts, and what they look like."""

    kind = chunk_kind = "text_completion"
    prefix, param, keeps_space = "cmpl", "prompt", True

    def _encode(self, prompt: Any) -> list[int]:
        return self.model.encode_text(prompt) if isinstance(prompt, str) else prompt

    def choice(self, ids: list[int], answer: Answer) -> dict[str, Any]:
        """Return a whole answer, behind its prompt if that is echoed."""
        text = self.model.decode(ids) + answer.text if self.asked.echo else answer.text
        return {"text": text, "logprobs": self._logprobs(ids, answer)}

    def piece(self, text: str, is_first: bool) -> dict[str, Any]:
        """Return a piece of a streamed answer."""
        return {"text": text, "logprobs": None}

    def _logprobs(self, ids: list[int], answer: Answer) -> dict[str, Any] | None:
        """Return the log-probabilities of an answer's tokens, after those of its prompt with `echo`.

        The very first token of all has none. `text_offset` counts characters of the tokens' own texts.
        """
        num_top = self.asked.num_logprobs
        if num_top is None:
            return None
        whole = [*ids, *answer.token_ids]
        scores = [None, *self.model.score(whole, num_top)] if len(whole) > 1 else [None]
        first = 0 if self.asked.echo else len(ids)
        shown, scores = whole[first:], scores[first:]
        texts = [self.model.token_text(token_id) for token_id in shown]
        top = [
            s and {self.model.token_text(token_id): logprob for token_id, logprob in s.top} for s in scores
        ]
        return {
            "tokens": texts,
            "token_logprobs": [score and score.logprob for score in scores],
            "top_logprobs": top if num_top else None,
            "text_offset": [sum(map(len, texts[:index])) for index in range(len(texts))],
        }


async def _respond(form: ChatForm) -> Response:
    asked = form.asked
    if asked.stream and (asked.num_logprobs is not None or asked.echo):
        field = "echo" if asked.echo else "logprobs"
        raise BadRequest(f"{field} is not supported together with stream", field, "unsupported_parameter")
    rows = await asyncio.to_thread(lambda: [form.encode(prompt) for prompt in asked.prompts])
    head = {
        "id": f"{form.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": form.model.name
    }  # fmt: skip
    if asked.stream:
        lines = _stream(form, rows, head | {"object": form.chunk_kind})
        return StreamingResponse(lines, media_type="text/event-stream")
    try:
        choices, usage = await asyncio.to_thread(_answer_all, form, rows)
    except Exception as error:  # a device's or a library's: a client must be told in its own form
        return openai_error(first_line(error), 500)
    return JSONResponse(head | {"object": form.kind, "choices": choices, "usage": usage})


def _answer_all(form: ChatForm, rows: list[list[int]]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return the choices of a request, and what they cost."""
    answers = [(ids, answer) for ids in rows for answer in form.answer(ids, lambda number, text: False)]
    choices = [
        {"index": index, "finish_reason": _FINISH[answer.finish_reason]} | form.choice(ids, answer)
        for index, (ids, answer) in enumerate(answers)
    ]
    return choices, _usage(rows, [answer for _, answer in answers])


async def _stream(form: ChatForm, rows: list[list[int]], head: dict[str, Any]) -> AsyncIterator[str]:
    """Yield server-sent events: pieces of all answers, their ends, the usage if asked for, [DONE]."""
    with_usage = form.asked.stream_options.include_usage

    def work(emit: Emit, is_gone: threading.Event) -> None:
        answers, begun = [], set()

        def tell(index: int, text: str, finish: str | None) -> bool:
            piece = form.piece(text, index not in begun)
            begun.add(index)
            choice = {"index": index, "finish_reason": finish} | piece
            emit({"choices": [choice]} | ({"usage": None} if with_usage else {}))
            return is_gone.is_set()

        for ids in rows:
            first = len(answers)
            of_one = form.answer(ids, lambda number, text, first=first: tell(first + number, text, None))
            for number, answer in enumerate(of_one):
                tell(first + number, "", _FINISH[answer.finish_reason])
            answers += of_one
            if is_gone.is_set():
                return
        if with_usage:
            emit({"choices": [], "usage": _usage(rows, answers)})

    try:
        async for event in stream_from_thread(work):
            yield f"data: {json.dumps(head | event, ensure_ascii=False)}\n\n"
    except Exception as error:
        yield f"data: {openai_error(first_line(error), 500).body.decode()}\n\n"
        return
    yield "data: [DONE]\n\n"


def _usage(rows: list[list[int]], answers: list[Answer]) -> dict[str, int]:
    num_prompt, num_new = sum(map(len, rows)), sum(len(answer.token_ids) for answer in answers)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}
