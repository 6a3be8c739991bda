"""Code that the web servers share: sockets, validation of requests, error bodies, streams.

Token and origin are checked before a body is read: FastAPI's own dependencies come later.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import os
import re
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException

from common.flags.problems import Problems, shortened
from common.ranks.failures import first_line, say

# The page may load its own files and call its own server; scripts in a text are not run.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_LOOPBACK_NAMES = ("127.0.0.1", "[::1]", "localhost")
_OPENAI_CODES = {"extra_forbidden": "unsupported_parameter", "missing": "missing_required_parameter"}
_OPENAI_KINDS = {401: "authentication_error", 403: "permission_error", 500: "server_error"}

# ---- sockets


def bind(host: str, port: int, problems: Problems) -> socket.socket | None:
    """Listening socket, which queues requests from now on; None after adding the problem."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        problems.add(f"--host {host} --port {port}: {error}; choose another port, 0 for any free one")
        return None


def is_loopback(bound: socket.socket) -> bool:
    """Whether a bound socket is reachable from this machine only, by its address: a name may resolve to
    any.
    """
    return ipaddress.ip_address(bound.getsockname()[0]).is_loopback


def address_of(bound: socket.socket) -> str:
    """URL of the server."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    def handle_exit(self, number: int, frame: Any) -> None:
        """End the process at once: a thread that computes a response cannot be cancelled, and would abort the
        interpreter's own exit. Judgements are on disk.
        """
        say(f"stopped by {signal.Signals(number).name}")
        os._exit(128 + number)


def run_server(app: Callable, bound: socket.socket) -> None:
    """Serve until Ctrl-C or SIGTERM, which end the process with exit code 130 or 143."""
    _Server(uvicorn.Config(app, log_level="warning")).run(sockets=[bound])


# ---- errors


class RejectedRequest(HTTPException):
    """A rejected request: HTTP status, problem and cure.

    `param` names the field and `code` is OpenAI's error code, for clients of its protocol.
    """

    def __init__(self, status: int, detail: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, detail)
        self.param = param
        self.code = code

    def __str__(self) -> str:
        return self.detail


def error_body(error: RejectedRequest, path: str) -> dict[str, Any]:
    """Body of an error: `{"detail": ...}`, or OpenAI's form if the path belongs to its API."""
    detail = error.detail.encode(errors="backslashreplace").decode()  # lone surrogates in a request
    if not f"{path}/".startswith("/v1/"):
        return {"detail": detail}
    kind = _OPENAI_KINDS.get(error.status_code, "invalid_request_error")
    return {"error": {"message": detail, "type": kind, "param": error.param, "code": error.code}}


def error_response(error: RejectedRequest, path: str) -> JSONResponse:
    """Response of an error to a request for `path`."""
    headers = {"www-authenticate": "Bearer"} if error.status_code == 401 else None
    return JSONResponse(error_body(error, path), error.status_code, headers)


def server_error(error: Exception) -> RejectedRequest:
    """Error response for a failure of the device or of a library."""
    return RejectedRequest(500, first_line(error))


def build_app(max_request_bytes: int) -> FastAPI:
    """Application without routes; a body that is too long is not read, and every error is one line of
    JSON.
    """
    # No documentation page: it would load scripts from other sites.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, max_body_size=max_request_bytes)

    @app.exception_handler(RequestValidationError)
    def reject_body(request: Request, error: RequestValidationError) -> Response:
        """Name the first wrong field; the library's own response repeats the whole request."""
        wrong = error.errors()[0]
        # Fields and indices only; pydantic's type names among them are not part of the request.
        location = [part for part in map(str, wrong["loc"]) if part.isalnum() or part.isidentifier()]
        value = "" if wrong["type"] == "missing" else f" {shortened(repr(wrong['input']))}"
        detail = f"{'.'.join(location)}{value}: {wrong['msg'].removeprefix('Value error, ')}"
        if wrong["loc"] == ("body",) and wrong["type"] != "value_error":
            detail = "body: it is not a JSON object; send one, with Content-Type: application/json"
        path = request.url.path
        status = 400 if path.startswith("/v1/") else 422
        code = _OPENAI_CODES.get(wrong["type"], "invalid_value")
        return error_response(RejectedRequest(status, detail, ".".join(location[1:]) or None, code), path)

    @app.exception_handler(HTTPException)
    def reject(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        if error.status_code == 413 and not isinstance(error, RejectedRequest):
            error = _too_large(max_request_bytes)
        elif not isinstance(error, RejectedRequest):
            error = RejectedRequest(error.status_code, f"{request.method} {path}: {error.detail}")
        return error_response(error, path)

    @app.exception_handler(Exception)
    def report(request: Request, error: Exception) -> Response:
        """Respond with the first line of a device or library error; the server's log has the traceback."""
        return error_response(server_error(error), request.url.path)

    return app


def _too_large(limit: int) -> RejectedRequest:
    return RejectedRequest(413, f"the body has more than --max_request_bytes {limit}; send smaller requests")


# ---- access control


@dataclass
class Guard:
    """An ASGI application around another: it checks a request before its body is read, and adds headers to
    all responses.

    A server that `is_local` accepts the loopback's host names only: any other name that resolves here is DNS
    rebinding. A request with an Origin must come from this server's page. With a `token`, a request must
    carry it, except for `open_paths`. A body whose declared length is above the limit is not read at all.
    """

    app: FastAPI
    token: str
    is_local: bool = False
    open_paths: Collection[str] = ()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Reject the request or pass it on."""

        async def send_with_headers(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        app = self.app
        if scope["type"] == "http":
            try:
                self._check(scope["path"], Headers(scope=scope))
            except RejectedRequest as rejection:
                app = error_response(rejection, scope["path"])
        await app(scope, receive, send_with_headers)

    def _check(self, path: str, headers: Headers) -> None:
        """Raise RejectedRequest for a request that must be rejected."""
        host = headers.get("host", "").lower()
        if self.is_local and re.sub(r":\d*$", "", host) not in _LOOPBACK_NAMES:
            names = ", ".join(_LOOPBACK_NAMES)
            detail = f"the host {host!r} is not a name of this server ({names}); use one of them"
            raise RejectedRequest(403, detail)
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in (f"http://{host}", f"https://{host}"):
            raise RejectedRequest(403, f"the origin {origin!r} is another site")
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise RejectedRequest(403, "another site's page sent this request; use this server's own page")
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # In constant time: the duration of a comparison must not reveal how much of a guess is right.
        is_right = hmac.compare_digest(given.strip().encode("latin-1"), self.token.encode())
        if self.token and path not in self.open_paths and not (is_right and scheme.lower() == "bearer"):
            raise RejectedRequest(401, "give the server's token: Authorization: Bearer TOKEN")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self.app.max_body_size:
            raise _too_large(self.app.max_body_size)


# ---- streams

Emit = Callable[[Any], None]
Work = Callable[[Emit, threading.Event], None]  # the event is set when the client disconnects
_END = object()


async def stream_from_thread(work: Work, failed: Callable[[Exception], Any]) -> AsyncIterator[Any]:
    """Yield items that `work` emits in a thread, in order; `failed` turns an exception into the last item."""
    loop = asyncio.get_running_loop()
    items = asyncio.Queue[Any]()
    is_gone = threading.Event()

    def put(item: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the server and its loop have ended
            loop.call_soon_threadsafe(items.put_nowait, item)

    def run() -> None:
        try:
            work(put, is_gone)
        except Exception as error:  # of device, library or disk: sent to the client
            put(failed(error))
        finally:
            put(_END)

    threading.Thread(target=run, daemon=True, name="answers").start()
    try:
        while (item := await items.get()) is not _END:
            yield item
    finally:
        is_gone.set()
