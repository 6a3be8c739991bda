"""A stand-in for the Hugging Face hub: what huggingface_hub needs of its protocol to upload a folder."""

import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest import mock

from huggingface_hub import constants


class Hub(ThreadingHTTPServer):
    """Repositories by name: `private` and the files' contents. `token` is the accepted one."""

    def __init__(self, token: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.token = token
        self.repositories: dict[str, dict] = {}
        self.rejects_commits = False


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Hub

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def reply(self, status: int, content: dict, **headers: str) -> None:
        """Send a JSON answer."""
        body = json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def is_known(self) -> bool:
        """Whether the token is right; replies if it is not."""
        if self.headers.get("Authorization") == f"Bearer {self.server.token}":
            return True
        self.reply(401, {"error": "Invalid username or password."})
        return False

    def do_GET(self) -> None:
        """Who the caller is, or whether a repository exists."""
        if not self.is_known():
            return
        name = self.path.partition("/api/models/")[2].partition("/revision/")[0]
        if self.path.startswith("/api/whoami"):
            self.reply(200, {"type": "user", "name": "me", "orgs": []})
        elif name in self.server.repositories:
            self.reply(200, {"id": name, "_id": "1", "sha": "0" * 40, "siblings": []})
        else:
            self.reply(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")

    def do_POST(self) -> None:
        """Create a repository, choose how files are sent, or commit."""
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if not self.is_known():
            return
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization', 'me')}/{asked['name']}"
            is_private = asked.get("private", asked.get("visibility") == "private")
            self.server.repositories[name] = {"private": is_private, "files": {}}
            self.reply(200, {"url": f"{constants.ENDPOINT}/{name}", "name": name, "id": "1"})
            return
        if self.path == "/api/validate-yaml":  # of the model card
            self.reply(200, {"errors": [], "warnings": []})
            return
        name, _, action = self.path.removeprefix("/api/models/").removesuffix("/main").rpartition("/")
        if action == "preupload":
            files = [{"path": file["path"]} for file in json.loads(body)["files"]]
            ways = [file | {"uploadMode": "regular", "shouldIgnore": False} for file in files]
            self.reply(200, {"files": ways})
        elif self.server.rejects_commits:
            self.reply(403, {}, X_Error_Message="storage limit reached")
        else:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.server.repositories[name]["files"][line["value"]["path"]] = content
            self.reply(
                200,
                {
                    "success": True,
                    "commitOid": "1" * 40,
                    "commitUrl": f"{constants.ENDPOINT}/{name}/commit/1",
                },
            )


@contextlib.contextmanager
def hub_server(token: str = "hf_right") -> Iterator[Hub]:
    """The hub of this process in the block."""
    hub = Hub(token)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{hub.server_port}"
    with mock.patch.multiple(constants, ENDPOINT=address, HF_HUB_OFFLINE=False):
        yield hub
    hub.shutdown()
