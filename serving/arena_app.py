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

from serving.blind_pairs import BlindPairs, Refused
from serving.judgement_store import Pair, StoreError
from serving.openai_api import add_openai_routes
from serving.openai_requests import openai_error
from serving.web_server import (
    BodyLimit,
    BrowserGuard,
    add_error_forms,
    refuse_plainly,
    require_token,
    stream_from_thread,
)

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

    `host_names`: see BrowserGuard.
    """
    # No page of documentation: it would load scripts from elsewhere.
    app = FastAPI(title="Triptych arena", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(BodyLimit, max_bytes=max_request_bytes)
    require_token(app, token, _refuse, open_paths=frozenset(_FILES))
    app.add_middleware(BrowserGuard, host_names=host_names, refuse=_refuse)  # the last added is the first
    add_error_forms(app, _refuse)

    @app.exception_handler(Refused)
    def refuse_prompt(request: Request, error: Refused) -> Response:
        return _refuse(request, 422, str(error))

    @app.exception_handler(StoreError)
    def refuse_judgement(request: Request, error: StoreError) -> Response:
        return _refuse(request, error.status, str(error))

    _add_page(app, needs_token=bool(token))
    _add_pairs(app, arena)
    add_openai_routes(app, list(arena.models.values()), arena.sampling)
    return app


def _refuse(request: HTTPConnection, status: int, detail: str) -> Response:
    """Return an error as one line of JSON, in OpenAI's form under /v1."""
    is_api = f"{request.url.path}/".startswith("/v1/")
    return openai_error(detail, status) if is_api else refuse_plainly(request, status, detail)


def _add_page(app: FastAPI, *, needs_token: bool) -> None:
    def route(path: str, name: str) -> None:
        @app.get(path, include_in_schema=False)
        def send_file() -> FileResponse:
            return FileResponse(_PAGE / name)

    for path, name in _FILES.items():
        route(path, name)

    @app.get("/api/health")
    def health() -> dict[str, bool]:
        """Say that the server is there, and the token right."""
        return {"needs_token": needs_token}


def _add_pairs(app: FastAPI, arena: BlindPairs) -> None:
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


async def _lines(arena: BlindPairs, pair: Pair) -> AsyncIterator[str]:
    try:
        async for event in stream_from_thread(lambda emit, is_gone: arena.answer(pair, emit, is_gone)):
            yield json.dumps(event, ensure_ascii=False) + "\n"
    except Exception as error:  # what is told of a failure could not be kept either
        yield json.dumps({"event": "failed", "message": str(error) or type(error).__name__}) + "\n"
