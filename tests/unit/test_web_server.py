"""serving/web_server.py: who may ask a server, and how much; alone and in a real server."""

import asyncio
import http.client
import socket

import pytest
from arena_fakes import real_server
from fastapi.testclient import TestClient

from common.flags.access_token import client_token, server_token
from common.flags.args import Problems
from serving.reward_server import ServeArguments, create_app

TOKEN = "s3cret-token-of-the-test"
BODY = {"prompts": ["a", "bb"], "responses": ["c", "d"]}


class LengthScorer:
    """Scores a response by its length, without a model."""

    facts = {"name": "lengths"}

    def score(self, prompts: list[str], responses: list[str]) -> list[float]:
        return [float(len(response)) for response in responses]


def client(token: str = "", **limits: int) -> TestClient:
    return TestClient(create_app(LengthScorer(), ServeArguments(**limits), token=token))


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


# ---- the token


@pytest.mark.parametrize("path", ["/score", "/health", "/nowhere"])
def test_with_a_token_nobody_may_ask_without(path):
    wrong = (bearer("wrong"), bearer(TOKEN[:-1]), bearer(""))
    guarded = client(token=TOKEN)
    for headers in ({}, *wrong, {"Authorization": TOKEN}, {"Authorization": f"Basic {TOKEN}"}):
        answer = guarded.post(path, json=BODY, headers=headers)
        assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer", headers
        assert TOKEN not in answer.text
    assert guarded.get("/health", headers={"authorization": f"bearer  {TOKEN}"}).json() == {"name": "lengths"}


def test_the_token_is_compared_in_constant_time(monkeypatch):
    compared = []
    monkeypatch.setattr(
        "serving.web_server.hmac.compare_digest", lambda a, b: compared.append((a, b)) or a == b
    )
    assert client(token=TOKEN).get("/health", headers=bearer("other")).status_code == 401
    assert compared == [(b"other", TOKEN.encode())]


def test_a_body_without_the_token_is_not_read():
    reads, sent = [], []

    async def receive() -> dict:
        reads.append(1)
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def send(message: dict) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/score", "headers": [], "query_string": b""}
    app = create_app(LengthScorer(), ServeArguments(), token=TOKEN)
    asyncio.run(app(scope, receive, send))
    assert not reads and sent[0]["status"] == 401


def test_token_of_the_environment_or_a_file(tmp_path, monkeypatch):
    problems = Problems()
    for name in ("TRIPTYCH_TOKEN", "TRIPTYCH_REWARD_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    assert server_token("", problems) == client_token() == ""
    monkeypatch.setenv("TRIPTYCH_TOKEN", "one")
    assert server_token("", problems) == client_token() == "one"
    monkeypatch.setenv("TRIPTYCH_REWARD_TOKEN", "two")
    assert (server_token("", problems), client_token()) == ("one", "two")
    (tmp_path / "token").write_text("three\n")
    assert server_token(str(tmp_path / "token"), problems) == "three" and problems.messages == []


@pytest.mark.parametrize("text", ["  \n", "two words"])
def test_a_bad_token_is_named_and_not_shown(text, tmp_path, monkeypatch):
    problems = Problems()
    (tmp_path / "token").write_text(text)
    server_token(str(tmp_path / "token"), problems)
    [message] = problems.messages
    assert message.startswith(f"--token_file {tmp_path}/token") and (not text.strip() or text not in message)
    monkeypatch.setenv("TRIPTYCH_REWARD_TOKEN", "my secret")
    with pytest.raises(ValueError, match="TRIPTYCH_REWARD_TOKEN holds 9 characters") as error:
        client_token()
    assert "my secret" not in str(error.value)


# ---- the limits


def test_a_long_body_is_refused_before_it_is_read():
    """Its announced length is enough: not a byte of it was sent. An endless one is cut off."""
    app = create_app(LengthScorer(), ServeArguments(max_request_bytes=1000))
    with real_server(app) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.putrequest("POST", "/score")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", "1001")
        connection.endheaders()
        answer = connection.getresponse()
        assert answer.status == 413 and b"--max_request_bytes 1000" in answer.read()
        connection.close()
        with socket.create_connection(("127.0.0.1", port), timeout=10) as endless:
            endless.sendall(b"POST /score HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n")
            for _ in range(3):
                endless.sendall(b"190\r\n" + b"x" * 400 + b"\r\n")
            assert endless.recv(1000).startswith(b"HTTP/1.1 413 ")


def test_a_body_of_the_largest_size_passes():
    content = '{"prompts": ["a"], "responses": ["b"]}'
    limited, headers = client(max_request_bytes=len(content)), {"content-type": "application/json"}
    assert limited.post("/score", content=content, headers=headers).json() == {"scores": [1.0]}
    assert limited.post("/score", content=content + " ", headers=headers).status_code == 413


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("max_request_rows", "2 rows are more than --max_request_rows 1"),
        ("max_text_characters", "a text has 2 characters, more than --max_text_characters 1"),
    ],
)
def test_too_many_or_too_long_texts(flag, words):
    answer = client(**{flag: 1}).post("/score", json=BODY)
    assert answer.status_code == 413 and words in answer.json()["detail"]
    assert client(**{flag: 2}).post("/score", json=BODY).status_code == 200


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"prompts": ["a"], "responses": []}', "1 prompts but 0 responses"),
        ('{"prompts": ["a"], "responses": [3]}', "body.responses.0 3: Input should be a valid string"),
        ("no json", "JSON decode error"),
        ("[" * 100_000, ""),
    ],
)
def test_a_bad_request_is_refused_in_one_line(content, words):
    answer = client().post("/score", content=content, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 422) and words in answer.json()["detail"] and len(answer.text) < 500
