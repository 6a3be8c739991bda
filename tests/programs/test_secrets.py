"""A token of the environment reaches the reward server, and nothing else that a run says or writes."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tiny_inputs import from_words, step_flags

pytestmark = pytest.mark.slow

TOKEN = "t0ken-that-nobody-may-see"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.tokens.append(self.headers["authorization"])
        is_ill = len(self.server.tokens) == self.server.fails_at
        text = "out of order" if is_ill else json.dumps({"scores": [1.0] * len(body["responses"])})
        self.send_response(403 if is_ill else 200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def server():
    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.tokens, made.fails_at = [], 0
    thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()


@pytest.mark.parametrize("fails_at", [0, 2])
def test_nothing_but_the_server_sees_the_token(tiny, forks, server, output, fails_at):
    """Not args.json, metrics, checkpoints, exports, refused batches, nor what is printed of a failure."""
    server.fails_at = fails_at
    words = "--max_train_steps 3 --save_interval 1 --max_bad_steps 0 --print_answers true"
    reward = f"http://127.0.0.1:{server.server_port}/score"
    flags = step_flags(tiny, 3, reward=reward, output_dir=output, **from_words(words))
    done = forks.run(3, flags, env={"TRIPTYCH_REWARD_TOKEN": TOKEN})
    assert done.code == (3 if fails_at else 0), done.text()
    assert server.tokens == [f"Bearer {TOKEN}"] * (fails_at or 3)
    assert not fails_at or "set TRIPTYCH_REWARD_TOKEN" in done.text()
    assert TOKEN not in done.text()
    written = [path for path in output.rglob("*") if path.is_file()]
    assert len(written) > 5 and [path for path in written if TOKEN.encode() in path.read_bytes()] == []
