"""What the web servers share: where they listen, whom they answer, how an error looks, how a stream is sent.

Token, origin and size are looked at before a body is held in memory: FastAPI's own dependencies come later.
"""

import asyncio
import hmac
import ipaddress
import socket
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection

from common.flags.problems import Problems

# A page may load its own files and ask its own server; it runs nothing that stands in a text.
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
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})

Refuse = Callable[[HTTPConnection, int, str], Response]  # of a request, status and detail: the error's form

# ---- where it listens


def bind(host: str, port: int, problems: Problems) -> socket.socket | None:
    """Return a socket that is bound but does not listen yet, or None after adding why there is none."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server that just ended leaves traces
        bound.bind(address)
    except (OSError, OverflowError) as error:
        problems.add(f"--host {host} --port {port}: {error}; choose another port, 0 for any free one")
        return None
    return bound


def is_loopback(bound: socket.socket) -> bool:
    """Whether no other machine reaches a bound socket: by its address, for a name may lead anywhere."""
    return ipaddress.ip_address(bound.getsockname()[0]).is_loopback


def listen(bound: socket.socket) -> str:
    """Let requests wait from here on, and return the server's address."""
    bound.listen()
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run_server(app: FastAPI, bound: socket.socket) -> None:
    """Answer until Ctrl-C; a page that still waits for an answer does not keep the server from ending."""
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[bound])


# ---- whom it answers, and how an error looks


def refuse_plainly(request: HTTPConnection, status: int, detail: str) -> Response:
    """Return an error as `{"detail": ...}`."""
    return JSONResponse({"detail": detail}, status_code=status)


def guarded_app(*, max_bytes: int, refuse: Refuse = refuse_plainly, hint: str = "", **limits: Any) -> FastAPI:
    """Return an application without routes behind a `Guard`, which gets the `limits`.

    Every error is one line of JSON in the form of `refuse`; `hint` ends those of a malformed body.
    """
    # No page of documentation: it would load scripts from elsewhere.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, max_bytes=max_bytes, refuse=refuse, **limits)

    @app.exception_handler(RequestValidationError)
    def refuse_body(request: Request, error: RequestValidationError) -> Response:
        """Say what is wrong; the library's own answer repeats the whole request."""
        causes = (f"{'.'.join(map(str, e['loc'][1:])) or 'body'}: {e['msg']}" for e in error.errors())
        return refuse(request, 422, "; ".join(causes) + hint)

    @app.exception_handler(HTTPException)
    def refuse_request(request: Request, error: HTTPException) -> Response:
        details = {
            404: f"there is nothing at {request.url.path}",
            405: f"{request.method} is not answered at {request.url.path}",
        }
        response = refuse(request, error.status_code, details.get(error.status_code, error.detail))
        response.headers.update(error.headers or {})
        return response

    return app


class Guard:
    """An ASGI application before another: it looks at a request before its body is read, and adds headers to
    all answers.

    `host_names` are the names by which a browser may have come here; a server on the loopback takes its own
    names alone, for a foreign name that leads here is DNS rebinding. None: any name. A request with an Origin
    must come from this very server's page. With a `token` it must bear that, but for `open_paths`. Its body
    has at most `max_bytes`: one that announces more is not read at all, of another no more is read.
    """

    def __init__(
        self,
        app: Any,
        *,
        max_bytes: int,
        refuse: Refuse,
        token: str = "",
        open_paths: frozenset[str] = frozenset(),
        host_names: frozenset[str] | None = None,
    ) -> None:
        self.app, self.max_bytes, self.refuse = app, max_bytes, refuse
        self.token, self.open_paths, self.host_names = token, open_paths, host_names

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Refuse the request or pass it on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        num_read = 0

        async def receive_counted() -> dict[str, Any]:
            nonlocal num_read
            message = await receive()
            num_read += len(message.get("body", b""))
            if num_read > self.max_bytes:
                raise self._too_long()
            return message

        async def send_with_headers(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        app = self.app
        try:
            self._check(scope["path"], Headers(scope=scope))
        except HTTPException as error:
            app = self.refuse(HTTPConnection(scope), error.status_code, error.detail)
            app.headers.update(error.headers or {})
        await app(scope, receive_counted, send_with_headers)

    def _check(self, path: str, headers: Headers) -> None:
        """Raise HTTPException for a request that is not answered."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.host_names is not None and _name_and_authority(f"//{host}")[0] not in self.host_names:
            names = ", ".join(sorted(self.host_names))
            detail = f"the host {host!r} is none of this server's names ({names}); open it by one of them"
            raise HTTPException(403, detail)
        if origin is not None and _name_and_authority(origin)[1] != host.lower():
            raise HTTPException(403, f"the origin {origin!r} is another site than this server")
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise HTTPException(403, "another site's page sent this request; use this server's own page")
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # In constant time: how long a comparison takes must not tell how much of a guess is right.
        is_right = hmac.compare_digest(given.strip().encode("latin-1"), self.token.encode())
        if self.token and path not in self.open_paths and not (is_right and scheme.lower() == "bearer"):
            detail = "give the server's token: Authorization: Bearer TOKEN"
            raise HTTPException(401, detail, {"www-authenticate": "Bearer"})
        told = headers.get("content-length", "")
        if told.isdecimal() and int(told) > self.max_bytes:
            raise self._too_long()

    def _too_long(self) -> HTTPException:
        detail = f"the body has more than --max_request_bytes {self.max_bytes}; send less at once"
        return HTTPException(413, detail, {"connection": "close"})  # the rest of it is not read


def _name_and_authority(address: str) -> tuple[str, str]:
    """Return a host's name, and the name with its port; empty where the address is none."""
    try:
        parts = urlsplit(address.lower())
        return parts.hostname or "", parts.netloc
    except ValueError:
        return "", ""


# ---- streams

Emit = Callable[[Any], None]
Work = Callable[[Emit, threading.Event], None]  # the event is set when nobody listens any more
_END = object()


async def stream_from_thread(work: Work) -> AsyncIterator[Any]:
    """Yield what `work` emits in a thread, in order, until it returns; raise what it raises."""
    loop, items = asyncio.get_running_loop(), asyncio.Queue[Any]()
    is_gone = threading.Event()

    def put(item: Any) -> None:
        if not is_gone.is_set():
            try:
                loop.call_soon_threadsafe(items.put_nowait, item)
            except RuntimeError:  # the server has ended, and its loop with it
                is_gone.set()

    def run() -> None:
        try:
            work(put, is_gone)
        except Exception as error:  # raised where the stream is read
            put(error)
        put(_END)

    threading.Thread(target=run, daemon=True, name="answers").start()
    try:
        while (item := await items.get()) is not _END:
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        is_gone.set()
