"""What a request must be before a web application sees it: allowed, and small enough. No torch in here."""

import hmac
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Describe = Callable[[str, int, str], dict[str, Any]]  # of path, status and detail: the body of a refusal


def _plain_refusal(path: str, status: int, detail: str) -> dict[str, Any]:
    return {"detail": detail}


@dataclass(frozen=True)
class RequestLimits:
    """The most that one request may hold."""

    max_bytes: int = 16 * 2**20
    max_rows: int = 1024
    max_characters: int = 200_000  # of one prompt or response

    def refusal(self, prompts: list[str], responses: list[str]) -> str:
        """Return why texts are too many or too long, naming the server's flag; empty when they are not."""
        num_rows = max(len(prompts), len(responses))
        if num_rows > self.max_rows:
            return f"{num_rows} rows are more than --max_request_rows {self.max_rows}; send smaller batches"
        for name, texts in (("prompts", prompts), ("responses", responses)):
            for index, text in enumerate(texts):
                if len(text) > self.max_characters:
                    return (
                        f"{name}.{index} has {len(text)} characters, more than --max_text_characters "
                        f"{self.max_characters}"
                    )
        return ""


class RequestGuard:
    """An ASGI application before another: it answers 401 and 413 itself, before a body is held in memory."""

    def __init__(
        self,
        app: Any,
        *,
        max_bytes: int,
        token: str = "",
        open_paths: frozenset[str] = frozenset(),
        describe: Describe = _plain_refusal,
    ) -> None:
        """`token` empty lets everyone in; whoever asks for one of `open_paths` needs none."""
        self.app, self.max_bytes, self._token = app, max_bytes, token.encode()
        self.open_paths, self.describe = open_paths, describe

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answer a request, or pass it on with its whole body."""
        if scope["type"] != "http":  # the server's own start and end
            await self.app(scope, receive, send)
            return
        headers, path = dict(scope["headers"]), scope.get("path", "")
        needs_token = self._token and path not in self.open_paths
        if needs_token and not self._is_allowed(headers.get(b"authorization", b"")):
            detail = "give the server's token: Authorization: Bearer TOKEN"
            await send_refusal(send, 401, self.describe(path, 401, detail))
            return
        body = await self._read(headers.get(b"content-length", b""), receive)
        if body is None:
            detail = f"the body has more than --max_request_bytes {self.max_bytes}; send less at once"
            await send_refusal(send, 413, self.describe(path, 413, detail))
            return
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> dict[str, Any]:
            return messages.pop() if messages else await receive()

        await self.app(scope, replay, send)

    def _is_allowed(self, authorization: bytes) -> bool:
        scheme, _, given = authorization.partition(b" ")
        # In constant time: how long a comparison takes must not tell how much of a guess is right.
        return hmac.compare_digest(given.strip(), self._token) and scheme.lower() == b"bearer"

    async def _read(self, told_length: bytes, receive: Any) -> bytes | None:
        """Return the whole body; None as soon as it is known to be too long."""
        if told_length.isdigit() and int(told_length) > self.max_bytes:
            return None
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] != "http.request":  # the client has gone
                return b"".join(parts)
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self.max_bytes:
                return None
            if not message.get("more_body", False):
                return b"".join(parts)


async def send_refusal(send: Any, status: int, content: dict[str, Any]) -> None:
    """Answer a request with JSON, and end the connection: what is left of the request is not read."""
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
