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
from starlette.authentication import AuthCredentials, AuthenticationBackend, AuthenticationError, SimpleUser
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.requests import HTTPConnection

from common.flags.access_token import server_token
from common.flags.args import Problems

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


def find_token(token_file: str, problems: Problems) -> str:
    """Return the token that requests must bear, empty for none, after adding what is wrong with it."""
    try:
        return server_token(token_file)
    except ValueError as error:
        problems.add(str(error))
        return ""


def listen(bound: socket.socket) -> str:
    """Let requests wait from here on, and return the server's address."""
    bound.listen()
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run_server(app: FastAPI, bound: socket.socket) -> None:
    """Answer until Ctrl-C; a page that still waits for an answer does not keep the server from ending."""
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[bound])


# ---- how an error looks


def refuse_plainly(request: HTTPConnection, status: int, detail: str) -> Response:
    """Return an error as `{"detail": ...}`."""
    return JSONResponse({"detail": detail}, status_code=status)


def add_error_forms(app: FastAPI, refuse: Refuse, hint: str = "") -> None:
    """Let every error be one line of JSON in the form of `refuse`; `hint` ends those of a malformed body."""

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


# ---- whom it answers


class BearerToken(AuthenticationBackend):
    """Lets in who bears the token, and everyone who asks for one of `open_paths`."""

    def __init__(self, token: str, open_paths: frozenset[str]) -> None:
        self._token, self.open_paths = token.encode(), open_paths

    async def authenticate(self, conn: HTTPConnection) -> tuple[AuthCredentials, SimpleUser] | None:
        """Return whose request it is, None where nobody needs to be. Raises AuthenticationError."""
        if conn.scope["path"] in self.open_paths:
            return None
        scheme, _, given = conn.headers.get("authorization", "").partition(" ")
        # In constant time: how long a comparison takes must not tell how much of a guess is right.
        is_right = hmac.compare_digest(given.strip().encode("latin-1"), self._token)
        if not (is_right and scheme.lower() == "bearer"):
            raise AuthenticationError("give the server's token: Authorization: Bearer TOKEN")
        return AuthCredentials(), SimpleUser("bearer")


def require_token(app: FastAPI, token: str, refuse: Refuse, open_paths: frozenset[str] = frozenset()) -> None:
    """Answer 401 to requests without the token, whatever they ask for; an empty one lets everyone in."""

    def deny(request: HTTPConnection, error: AuthenticationError) -> Response:
        response = refuse(request, 401, str(error))
        response.headers["www-authenticate"] = "Bearer"
        return response

    if token:
        backend = BearerToken(token, open_paths)
        app.add_middleware(AuthenticationMiddleware, backend=backend, on_error=deny)


class BodyLimit:
    """An ASGI application before another: who reads a body that is too long gets status 413 as an exception.

    Unlike starlette's own limit it names the flag. A body that announces its length is not read at all.
    """

    def __init__(self, app: Any, *, max_bytes: int) -> None:
        self.app, self.max_bytes = app, max_bytes

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Pass the request on with a body that is counted."""
        told = Headers(scope=scope).get("content-length", "") if scope["type"] == "http" else ""
        size = int(told) if told.isdecimal() else 0
        num_read = 0

        async def receive_counted() -> dict[str, Any]:
            nonlocal num_read
            message = await receive() if size <= self.max_bytes else {}
            num_read += len(message.get("body", b""))
            if max(size, num_read) > self.max_bytes:
                detail = f"the body has more than --max_request_bytes {self.max_bytes}; send less at once"
                raise HTTPException(413, detail, {"connection": "close"})  # the rest of it is not read
            return message

        await self.app(scope, receive_counted, send)


class BrowserGuard:
    """An ASGI application before another: it refuses other sites' requests, and adds headers to all answers.

    `host_names` are the names by which a browser may have come here; a server on the loopback takes its own
    names alone, for a foreign name that leads here is DNS rebinding. None: any name, where a token guards.
    A request with an Origin must come from this very server's page.
    """

    def __init__(self, app: Any, *, host_names: frozenset[str] | None, refuse: Refuse) -> None:
        self.app, self.host_names, self.refuse = app, host_names, refuse

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answer 403 or pass the request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        refusal = self._refusal(Headers(scope=scope))
        app = self.refuse(HTTPConnection(scope), 403, refusal) if refusal else self.app
        await app(scope, receive, send_with_headers)

    def _refusal(self, headers: Headers) -> str:
        """Return why a request is not answered, empty when it is."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.host_names is not None and _name_and_authority(f"//{host}")[0] not in self.host_names:
            names = ", ".join(sorted(self.host_names))
            return f"the host {host!r} is none of this server's names ({names}); open it by one of them"
        if origin is not None and _name_and_authority(origin)[1] != host.lower():
            return f"the origin {origin!r} is another site than this server"
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return "another site's page sent this request; use this server's own page"
        return ""


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
