"""The arena's web application: one page, what the page asks for, and the API for programs."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, Response, StreamingResponse
from starlette.requests import HTTPConnection

from serving.blind_pairs import BlindPairs
from serving.judgement_store import Pair, Refused
from serving.openai_api import add_openai_routes
from serving.openai_requests import openai_error
from serving.web_server import guarded_app, refuse_plainly, stream_from_thread

_PAGE = Path(__file__).with_name("page")
_FILES = {"/": "index.html", "/style.css": "style.css", "/page.js": "page.js"}


@dataclass
class NewPair:
    """What POST /api/pairs takes: a prompt, or `draw` for one of the data; `follows` is the pair before."""

    text: str = ""
    draw: bool = False
    follows: str = ""


@dataclass
class Judgement:
    """What POST /api/judgements takes."""

    pair: str
    choice: Literal["a", "b", "tie", "both_bad"]


def create_app(
    arena: BlindPairs, *, max_request_bytes: int, token: str = "", host_names: frozenset[str] | None = None
) -> FastAPI:
    """Return the application; with a token all but the empty page needs it, as Authorization: Bearer TOKEN.

    `host_names`: see Guard.
    """
    limits = {"token": token, "open_paths": frozenset(_FILES), "host_names": host_names}
    app = guarded_app(max_bytes=max_request_bytes, refuse=_refuse, **limits)

    @app.exception_handler(Refused)
    def refuse(request: Request, error: Refused) -> Response:
        return _refuse(request, error.status, str(error))

    @app.get("/api/state")
    def state() -> dict[str, Any]:
        """Return what the page needs to begin."""
        return {"has_prompts": arena.prompts is not None, "num_models": len(arena.models)}

    @app.post("/api/pairs")
    async def ask(body: NewPair) -> StreamingResponse:
        """Answer with lines of JSON, as they come: the pair, pieces of both answers, their ends."""

        def create_pair() -> Pair:
            if body.draw:
                return arena.ask_drawn()
            return arena.follow_up(body.follows, body.text) if body.follows else arena.ask(body.text)

        pair = await asyncio.to_thread(create_pair)
        return StreamingResponse(_lines(arena, pair), media_type="application/x-ndjson")

    @app.get("/api/pairs/{pair_id}")
    def show(pair_id: str) -> dict[str, Any]:
        """Return a pair; its names only when it was judged."""
        return arena.view(arena.store.get(pair_id))

    @app.post("/api/judgements")
    def judge(body: Judgement) -> dict[str, Any]:
        """Keep a judgement, and return the pair with its names."""
        return arena.judge(body.pair, body.choice)

    @app.get("/api/results")
    def results() -> dict[str, Any]:
        """Return what all judgements amount to."""
        return arena.results()

    add_openai_routes(app, arena.models, arena.sampling)
    for path in _FILES:
        app.add_api_route(path, _send_file)
    return app


def _refuse(request: HTTPConnection, status: int, detail: str) -> Response:
    """Return an error as one line of JSON, in OpenAI's form under /v1."""
    is_api = f"{request.url.path}/".startswith("/v1/")
    return openai_error(detail, status) if is_api else refuse_plainly(request, status, detail)


def _send_file(request: Request) -> FileResponse:
    return FileResponse(_PAGE / _FILES[request.url.path])


async def _lines(arena: BlindPairs, pair: Pair) -> AsyncIterator[str]:
    try:
        async for event in stream_from_thread(lambda emit, is_gone: arena.answer(pair, emit, is_gone)):
            yield json.dumps(event, ensure_ascii=False) + "\n"
    except Exception as error:  # what is told of a failure could not be kept either
        yield json.dumps({"event": "failed", "message": str(error) or type(error).__name__}) + "\n"
