"""A server of rewards on a loopback port that answers well, badly, late or never; it is a judge too."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# What is sent first, and then again and again.
ENDLESS = {
    "drips its status line": (b"HTTP/1.1 2", b"0"),
    "has headers without end": (b"HTTP/1.1 200 OK\r\n", b"x: y\r\n"),
    "continues": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "drips its text": (b"HTTP/1.1 200 OK\r\n\r\n", b" "),
    "has a chunk extension": (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5;", b"x"),
    "has empty trailers": (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n", b"x: y\r\n"),
}


class Server(ThreadingHTTPServer):
    """Answers the n-th request by the n-th behaviour, then always by the last one."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behaviours, self.requests, self.headers = ["works"], [], []
        self.is_over = threading.Event()
        self.all_here = threading.Barrier(2)
        self.url = f"http://127.0.0.1:{self.server_port}/score"
        self.judge_url = f"http://127.0.0.1:{self.server_port}/v1"
        self.models = ["tiny"]

    def handle_error(self, request, client_address) -> None:
        pass  # a client that gave up is no error here


class Handler(BaseHTTPRequestHandler):
    """A behaviour is "works", another of these words, or (status, content, more headers)."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server, turn = self.server, len(self.server.requests)
        server.requests.append(body)
        server.headers.append(dict(self.headers.items()))
        behaviour = server.behaviours[min(turn, len(server.behaviours) - 1)]
        if behaviour == "hangs":
            server.is_over.wait(10)
        elif behaviour == "dies":
            self.close_connection = True
        elif behaviour in ENDLESS:
            beginning, again = ENDLESS[behaviour]
            self.wfile.write(beginning)
            while not server.is_over.wait(0.05):
                self.wfile.write(again)
        elif behaviour in ("works", "waits for another"):
            if behaviour != "works":
                server.all_here.wait(10)
            if "messages" in body:
                self.answer(200, json.dumps(chat_completion(judgement(body["messages"][0]["content"]))))
            else:
                self.answer(200, json.dumps({"scores": [float(len(text)) for text in body["responses"]]}))
        else:
            self.answer(*behaviour)

    def do_GET(self) -> None:
        self.answer(200, json.dumps({"data": [{"id": name} for name in self.server.models]}))

    def answer(self, status: int, content: str | bytes, more: tuple = ()) -> None:
        data = content.encode() if isinstance(content, str) else content
        self.send_response(status)
        for name, value in (("content-length", str(len(data))), *more):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_) -> None:
        pass


def chat_completion(reply: str | None) -> dict:
    """What OpenAI's protocol answers, with 7 and 3 tokens."""
    message = {"role": "assistant", "content": reply}
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    return {"choices": [{"index": 0, "message": message}], "usage": usage}


def judgement(question: str) -> str:
    """A judge's reply to the project's own template: a point a character; the longer answer is better."""
    answers = re.findall(
        r"^\[(?:Answer|Answer of assistant .)\]\n(.*?)\n\[End", question, re.MULTILINE | re.DOTALL
    )
    if len(answers) == 1:
        return f"Fine, 100 of 100.\nScore: {len(answers[0])}"
    first, second = map(len, answers)
    return f"It is {'[[A]]' if first > second else '[[B]]' if first < second else '[[C]]'}"


@contextmanager
def running_server() -> Iterator[Server]:
    """Serve in a thread until the end of the block."""
    server = Server()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server
    finally:
        server.is_over.set()
        server.shutdown()
        server.server_close()
