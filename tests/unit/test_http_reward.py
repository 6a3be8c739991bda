"""A reward behind an address: a real server on a loopback port that answers well, badly, late or never."""

import gzip
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from step3_ppo.rewards.http_reward import HttpReward
from step3_ppo.rewards.text_rewards import Answers, RewardError

ANSWERS = Answers(["p0", "p1", "p2"], ["a", "bb", "ccc"], [{"n": 1}, {}, {"n": None}])
LENGTHS = [1.0, 2.0, 3.0]


class Server(ThreadingHTTPServer):
    """Answers the n-th request by the n-th behaviour, then always by the last one."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behaviours, self.requests, self.running, self.most = ["works"], [], 0, 0
        self.headers = []
        self.lock, self.is_over = threading.Lock(), threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}/score"

    def handle_error(self, request, client_address) -> None:
        pass  # a client that gave up is no error here


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            behaviours, turn = self.server.behaviours, len(self.server.requests)
            self.server.requests.append(body)
            self.server.headers.append(dict(self.headers.items()))
            self.server.running += 1
            self.server.most = max(self.server.most, self.server.running)
        behaviour = behaviours[min(turn, len(behaviours) - 1)]
        try:
            self.behave(behaviour, [float(len(response)) for response in body["responses"]])
        finally:
            with self.server.lock:
                self.server.running -= 1

    def behave(self, behaviour, scores) -> None:
        if behaviour == "hangs":
            self.server.is_over.wait(10)
        elif behaviour == "dies":
            self.close_connection = True
        elif behaviour == "slow":
            time.sleep(0.1)
            self.answer(200, json.dumps({"scores": scores}))
        elif behaviour == "drips":
            self.send_response(200)
            self.end_headers()
            while not self.server.is_over.wait(0.05):
                self.wfile.write(b" ")
        elif behaviour == "unfolds":
            self.answer(200, gzip.compress(b" " * 10_000_000), {"content-encoding": "gzip"})
        elif behaviour == "redirects":
            self.answer(302, "", {"location": "http://127.0.0.1:9/elsewhere"})
        elif behaviour == "works":
            self.answer(200, json.dumps({"scores": scores}))
        else:
            self.answer(*behaviour)

    def answer(self, status: int, content: str | bytes, headers: dict[str, str] | None = None) -> None:
        data = content.encode() if isinstance(content, str) else content
        self.send_response(status)
        for name, value in ({"content-length": str(len(data))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def server():
    made = Server()
    thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield made
    made.is_over.set()
    made.shutdown()
    made.server_close()


@pytest.fixture
def reward_of():
    made = []

    def make(url: str, **options) -> HttpReward:
        options = {"timeout_seconds": 5.0, "batch_size": 64, "backoff_seconds": 0.01} | options
        made.append(HttpReward(url, **options))
        return made[-1]

    yield make
    for reward in made:
        reward.close()


def failure_of(reward: HttpReward) -> str:
    with pytest.raises(RewardError) as error:
        reward.score(ANSWERS)
    return str(error.value)


def test_a_request_holds_prompts_responses_and_rows(server, reward_of):
    assert reward_of(server.url).score(ANSWERS) == LENGTHS
    expected = {"prompts": ANSWERS.prompts, "responses": ANSWERS.responses, "rows": ANSWERS.rows}
    assert server.requests == [expected]
    assert reward_of(server.url).score(Answers([], [])) == [] and len(server.requests) == 1


def test_batches_are_sent_at_the_same_time_and_come_back_in_order(server, reward_of):
    server.behaviours = ["slow", "works"]
    assert reward_of(server.url, batch_size=1).score(ANSWERS) == LENGTHS
    assert server.most >= 2 and sorted(len(request["rows"]) for request in server.requests) == [1, 1, 1]


def test_what_passes_by_itself_is_tried_again(server, reward_of):
    server.behaviours = [(500, "oops"), (503, "busy"), "works"]
    assert reward_of(server.url).score(ANSWERS) == LENGTHS
    assert len(server.requests) == 3

    server.requests.clear()
    server.behaviours = ["dies", "hangs", "works"]
    assert reward_of(server.url, timeout_seconds=0.2).score(ANSWERS) == LENGTHS
    assert len(server.requests) == 3


def test_the_pause_doubles(server, reward_of, monkeypatch):
    pauses = []
    monkeypatch.setattr("step3_ppo.rewards.http_reward.time.sleep", pauses.append)
    server.behaviours = [(500, "")]
    failure_of(reward_of(server.url, backoff_seconds=0.5))
    assert pauses == [0.5, 1.0, 2.0] and len(server.requests) == 4


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ((500, "out of order"), ["failed 2 times", "status 500", "out of order", "prompt 'p0'"]),
        ("hangs", ["failed 2 times", "ReadTimeout", "--reward_timeout_seconds 0.2"]),
        ("dies", ["failed 2 times", "RemoteProtocolError"]),
    ],
)
def test_a_server_that_never_answers_is_named(behaviour, words, server, reward_of):
    server.behaviours = [behaviour]
    # A busy machine needs its time to say that a connection was closed.
    seconds = 0.2 if behaviour == "hangs" else 20.0
    text = failure_of(reward_of(server.url, timeout_seconds=seconds, num_retries=1))
    assert [word for word in [server.url, *words] if word not in text] == []
    assert len(server.requests) == 2


def test_nobody_there_is_named(server, reward_of):
    server.shutdown()
    server.server_close()
    text = failure_of(reward_of(server.url, num_retries=1))
    assert server.url in text and "ConnectError" in text and "see that the server runs" in text


@pytest.mark.parametrize(
    ("status", "answer", "words"),
    [
        (422, '{"detail": "no prompts"}', ["status 422", "no prompts", "correct the address"]),
        (200, "<html>hello</html>" * 100, ["no JSON", "<html>hello", 'must answer {"scores": [...]}']),
        (200, '{"score": [1, 2, 3]}', ['no "scores"', '{"score": [1, 2, 3]}']),
        (200, '{"scores": [1, 2]}', ["gave 2 scores for 3 responses", "it answered '{\"scores\": [1, 2]}'"]),
        (200, '{"scores": [1, NaN, 3]}', ["gave 'nan' for response 2 of 3", "response 'bb'", "it answered"]),
    ],
)
def test_garbage_is_told_at_once_with_its_beginning(status, answer, words, server, reward_of):
    server.behaviours = [(status, answer)]
    text = failure_of(reward_of(server.url))
    assert [word for word in [server.url, *words] if word not in text] == []
    assert len(server.requests) == 1 and len(text) < 600


def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(server, reward_of, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert reward_of(server.url).score(ANSWERS) == LENGTHS


# ---- what a server may do to us


def test_the_token_of_the_environment_goes_with_every_request(server, reward_of, monkeypatch):
    monkeypatch.setenv("TRIPTYCH_REWARD_TOKEN", "the-secret")
    server.behaviours = ["works", (500, "oops"), "works", (401, "who are you?")]
    assert reward_of(server.url).score(ANSWERS) == reward_of(server.url).score(ANSWERS) == LENGTHS
    text = failure_of(reward_of(server.url))
    assert "status 401" in text and "set TRIPTYCH_REWARD_TOKEN" in text and "the-secret" not in text
    assert [headers["authorization"] for headers in server.headers] == ["Bearer the-secret"] * 4


def test_without_a_token_none_is_sent(server, reward_of, monkeypatch):
    for name in ("TRIPTYCH_REWARD_TOKEN", "TRIPTYCH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    reward_of(server.url).score(ANSWERS)
    assert "authorization" not in server.headers[0]


def test_a_redirect_is_not_followed(server, reward_of):
    server.behaviours = ["redirects"]
    text = failure_of(reward_of(server.url))
    assert "status 302" in text and "sends us on to 'http://127.0.0.1:9/elsewhere'" in text
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b'{"scores": [1, 2, 3], "more": "' + b"x" * 2_000_000 + b'"}', "has more than 1049344 bytes"),
        (b"[" * 500_000, "no JSON"),
        (b"\xff\xfe\x00", "no JSON"),
    ],
)
def test_an_answer_that_is_too_much(answer, words, server, reward_of):
    server.behaviours = [(200, answer)]
    text = failure_of(reward_of(server.url))
    assert words in text and len(text) < 600 and len(server.requests) == 1


def test_an_endless_answer_ends_with_the_time_limit(server, reward_of):
    server.behaviours = ["drips"]
    started = time.monotonic()
    text = failure_of(reward_of(server.url, timeout_seconds=0.3, num_retries=0))
    assert "the answer came too slowly" in text and time.monotonic() - started < 5


def test_a_compressed_answer_is_not_unfolded(server, reward_of):
    server.behaviours = ["unfolds"]
    assert "its answer is compressed ('gzip')" in failure_of(reward_of(server.url))
    assert server.headers[0]["accept-encoding"] == "identity"
