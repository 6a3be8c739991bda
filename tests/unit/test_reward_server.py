"""serving/reward_server.py: the scores of training and of step 3, one message at start-up; who may ask any
server, and how much.
"""

import asyncio
import http.client
import json
import shutil
import socket
import sys
from pathlib import Path

import pytest
import torch
import uvicorn
from arena_fakes import real_server
from fastapi.testclient import TestClient
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from common.data.chat_template import build_template
from common.data.collators import collate_pairs
from common.data.example import Message
from common.data.packed_batch import PackedBatch
from common.data.tokenizer import load_tokenizer
from common.flags.access_token import client_token, server_token
from common.flags.args import Problems
from common.models.loading import ModelOptions
from common.models.value_model import load_value_model
from serving import reward_server as serve
from step2_reward.answer_scores import SIDES, compute_pair_scores
from step3_ppo.roles import Reward

PROMPTS = [
    "\n\nHuman: How are you today?\n\nAssistant:",
    "\n\nHuman: Hi\n\nAssistant:",
    "The quick brown fox",
]
RESPONSES = [" I am fine, thank you.", "", " jumps over the lazy dog"]


def load_scorer(export: str, **flags) -> serve.RewardScorer:
    problems = Problems()
    args = serve.ServeArguments(model_name_or_path=export, dtype="fp32", batch_size=2, **flags)
    tokenizer = serve.model_checks.check_tokenizer("--model_name_or_path", export, args, problems)
    template, _ = serve.conversation_form.find_template("", export, args, tokenizer, problems)
    return serve.load_scorer(args, template)


@pytest.fixture
def client(reward_export) -> TestClient:
    return TestClient(serve.create_app(load_scorer(reward_export), serve.ServeArguments()))


def plain_score(export: str, text: str) -> float:
    """Return what transformers alone reads at the text's last token."""
    model = AutoModelForSequenceClassification.from_pretrained(export).eval()
    with torch.no_grad():
        return float(model(**AutoTokenizer.from_pretrained(export)(text, return_tensors="pt")).logits)


def test_a_score_is_read_at_the_end_of_turn_that_is_added(reward_export, client):
    answer = client.post("/score", json={"prompts": PROMPTS, "responses": RESPONSES})
    assert answer.status_code == 200
    eos = AutoTokenizer.from_pretrained(reward_export).eos_token
    texts = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    expected = [plain_score(reward_export, text + eos) for text in texts]
    without_end = [plain_score(reward_export, text) for text in texts]
    assert answer.json()["scores"] == pytest.approx(expected, abs=1e-5)
    assert min(abs(a - b) for a, b in zip(expected, without_end, strict=True)) > 1e-3
    assert torch.tensor(expected).std() > 1e-2


def pooled(export: str, folder: Path, pooling: str) -> str:
    """Return a copy of an export that scores so."""
    shutil.copytree(export, folder)
    config = json.loads((folder / "config.json").read_text()) | {"reward_pooling": pooling}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_score_is_that_of_step_3s_reward_role_for_the_same_token_ids(
    pooling, is_packed, reward_export, tmp_path
):
    """And of step 2's evaluation."""
    export = pooled(reward_export, tmp_path / "export", pooling)
    client = TestClient(serve.create_app(load_scorer(export), serve.ServeArguments()))
    tokenizer = AutoTokenizer.from_pretrained(export)
    prompt_ids = [torch.tensor(tokenizer(text)["input_ids"]) for text in PROMPTS]
    response_ids = [
        torch.tensor([*tokenizer(text)["input_ids"], tokenizer.eos_token_id]) for text in RESPONSES
    ]
    batch = PackedBatch.build(range(3), {"prompt_ids": prompt_ids, "response_ids": response_ids})
    model = load_value_model(ModelOptions(export, dropout=0.0), len(tokenizer))
    role = Reward(model, is_packed=is_packed)
    (expected,) = role.score([batch])
    rows = [
        {f"{side}_ids": [*p, *r] for side in SIDES}
        | {f"{side}_response_start": len(p) for side in SIDES}
        | {"row_id": ""}
        for p, r in zip(prompt_ids, response_ids, strict=True)
    ]
    with torch.no_grad():
        of_step_2 = compute_pair_scores(model.eval(), collate_pairs(rows), is_packed=is_packed)
    torch.testing.assert_close(of_step_2.chosen, expected, atol=1e-5, rtol=1e-5)
    last = role.model(role.build_inputs(batch)[0], role.build_inputs(batch)[0].last_slots)
    assert torch.allclose(expected, last, atol=1e-4) == (pooling == "last")

    body = {
        "prompts": [tokenizer.decode(ids) for ids in prompt_ids],
        "responses": [tokenizer.decode(ids, skip_special_tokens=True) for ids in response_ids],
    }
    scores = client.post("/score", json=body).json()["scores"]
    torch.testing.assert_close(torch.tensor(scores), expected, atol=1e-5, rtol=1e-5)


def test_token_ids_are_those_of_training(reward_export):
    scorer = load_scorer(reward_export)
    template = build_template("human_assistant", load_tokenizer(reward_export))
    messages = [Message("user", "How are you today?")]
    row = template.encode(template.segments(messages, "I am fine."), 100)
    prompt, eos = template.prompt_text(messages), scorer.template.tokenizer.eos_token
    assert scorer.encode(prompt, " I am fine.") == row
    assert scorer.encode(prompt, f" I am fine.{eos}") == row, "no second end of turn"


def test_a_score_that_is_not_finite_is_an_error_with_its_cure(reward_export):
    scorer = load_scorer(reward_export)
    scorer.model.classifier.score.weight.data.fill_(float("nan"))
    answer = TestClient(serve.create_app(scorer, serve.ServeArguments())).post(
        "/score", json={"prompts": ["a"], "responses": ["b"]}
    )
    assert answer.status_code == 500 and "--dtype fp32" in answer.json()["detail"]


# ---- the program


@pytest.fixture
def started(monkeypatch):
    """Return what main serves, and where; nothing is listened to."""
    runs = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: runs.append((self.config.app, sockets)))

    def start(*words: str):
        monkeypatch.setattr(sys, "argv", ["serve.py", *words])
        serve.main()
        return runs[-1]

    return start


def test_a_port_in_use_and_all_else_are_told_before_a_model_is_loaded(
    started, monkeypatch, capsys, tiny_model_folder
):
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", None)
    base = tiny_model_folder("llama")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        with pytest.raises(SystemExit) as left:
            started("--model_name_or_path", base, "--port", port, "--batch_size", "0", "--max_seq_len", "999")
    assert left.value.code == 2
    text = capsys.readouterr().err
    for words in (
        "error: 4 problems",
        f"--port {port}: ",
        "already in use",
        "--batch_size 0",
        "no trained score head; give the export/ folder of step 2",
        "--max_seq_len: 999 tokens are more than the model's 128",
    ):
        assert words in text
    assert "Traceback" not in text


def test_the_program_asks_for_the_token_of_a_file_and_never_tells_it(
    reward_export, started, capsys, tmp_path
):
    (tmp_path / "token").write_text("s3cret-of-a-file\n")
    words = ("--model_name_or_path", reward_export, "--port", "0", "--dtype", "fp32")
    app, (bound,) = started(*words, "--token_file", str(tmp_path / "token"))
    shown = capsys.readouterr()
    assert f"http://127.0.0.1:{bound.getsockname()[1]}/score" in shown.out
    assert "s3cret" not in shown.out + shown.err
    bound.close()
    client, body = TestClient(app), {"prompts": PROMPTS, "responses": RESPONSES}
    for token, status in (("", 401), ("wrong", 401), ("s3cret-of-a-file", 200)):
        answer = client.post("/score", json=body, headers={"Authorization": f"Bearer {token}"})
        assert answer.status_code == status


def test_a_server_for_other_machines_without_a_token_says_so(reward_export, started, capsys, monkeypatch):
    monkeypatch.delenv("TRIPTYCH_TOKEN", raising=False)
    for host, is_said in (("0.0.0.0", True), (serve.ServeArguments.host, False)):
        _, (bound,) = started("--model_name_or_path", reward_export, "--port", "0", "--host", host)
        bound.close()
        assert (f"--host {host} without a token" in capsys.readouterr().err) == is_said


# ---- any server

TOKEN = "s3cret-token-of-the-test"
BODY = {"prompts": ["a", "bb"], "responses": ["c", "d"]}


class LengthScorer:
    """Scores a response by its length, without a model."""

    facts = {"name": "lengths"}

    def score(self, prompts: list[str], responses: list[str]) -> list[float]:
        return [float(len(response)) for response in responses]


def lengths(token: str = "", **limits: int) -> TestClient:
    return TestClient(serve.create_app(LengthScorer(), serve.ServeArguments(**limits), token=token))


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


# ---- the token


@pytest.mark.parametrize("path", ["/score", "/health", "/nowhere"])
def test_with_a_token_nobody_may_ask_without(path):
    wrong = (bearer("wrong"), bearer(TOKEN[:-1]), bearer(""))
    guarded = lengths(token=TOKEN)
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
    assert lengths(token=TOKEN).get("/health", headers=bearer("other")).status_code == 401
    assert compared == [(b"other", TOKEN.encode())]


def test_a_body_without_the_token_is_not_read():
    reads, sent = [], []

    async def receive() -> dict:
        reads.append(1)
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def send(message: dict) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/score", "headers": [], "query_string": b""}
    app = serve.create_app(LengthScorer(), serve.ServeArguments(), token=TOKEN)
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
    app = serve.create_app(LengthScorer(), serve.ServeArguments(max_request_bytes=1000))
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


@pytest.mark.parametrize(
    ("flag", "limit", "words"),
    [
        ("max_request_bytes", 44, "the body has more than --max_request_bytes 43"),
        ("max_request_rows", 2, "2 rows are more than --max_request_rows 1"),
        ("max_text_characters", 2, "a text has 2 characters, more than --max_text_characters 1"),
    ],
)
def test_too_much_is_refused_and_the_largest_request_passes(flag, limit, words):
    answer = lengths(**{flag: limit - 1}).post("/score", json=BODY)
    assert answer.status_code == 413 and words in answer.json()["detail"]
    assert lengths(**{flag: limit}).post("/score", json=BODY).status_code == 200


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
    answer = lengths().post("/score", content=content, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 422) and words in answer.json()["detail"] and len(answer.text) < 500
