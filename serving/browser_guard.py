"""What keeps other web pages away from a server on this machine, and a page from running what it shows."""

from typing import Any
from urllib.parse import urlsplit

from serving.request_guard import Describe, send_refusal

# A page may load its own files and ask its own server; it runs nothing that stands in a text.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


class BrowserGuard:
    """An ASGI application before another: it refuses other sites' requests, and adds headers to all answers.

    `host_names` are the names by which a browser may have come here; a server on the loopback takes its own
    names alone, for a foreign name that leads here is DNS rebinding. None: any name, where a token guards.
    A request with an Origin must come from this very server's page.
    """

    def __init__(self, app: Any, *, host_names: frozenset[str] | None, describe: Describe) -> None:
        self.app, self.host_names, self.describe = app, host_names, describe

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answer 403 or pass the request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message = message | {"headers": [*message.get("headers", ()), *_HEADERS]}
            await send(message)

        refusal = self._refusal(dict(scope["headers"]))
        if refusal:
            body = self.describe(scope.get("path", ""), 403, refusal)
            await send_refusal(send_with_headers, 403, body)
            return
        await self.app(scope, receive, send_with_headers)

    def _refusal(self, headers: dict[bytes, bytes]) -> str:
        """Return why a request is not answered, empty when it is."""
        host = headers.get(b"host", b"").decode("latin-1")
        if self.host_names is not None and _name(host) not in self.host_names:
            names = ", ".join(sorted(self.host_names))
            return f"the host {host!r} is none of this server's names ({names}); open it by one of them"
        origin = headers.get(b"origin")
        if origin is not None and _authority(origin.decode("latin-1")) != host.lower():
            return f"the origin {origin.decode('latin-1')!r} is another site than this server"
        if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
            return "another site's page sent this request; use this server's own page"
        return ""


def _name(host: str) -> str:
    """Return the name in a Host header, without its port."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _authority(origin: str) -> str:
    """Return name and port of an origin; empty for `null`."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
