"""serving/reward_server.py: the scores of training and of step 3, clear refusals, one message at start-up."""

import socket
import sys

import pytest
import torch
import uvicorn
from fastapi.testclient import TestClient
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from common.data.dialogue import build_template
from common.data.example import Message
from common.data.packed_batch import PackedBatch
from common.data.tokenizer import load_tokenizer
from common.flags.args import Problems
from common.models.loading import ModelOptions
from common.models.value_model import load_value_model
from common.runs.export import save_export
from serving import reward_server as serve
from step3_ppo.roles import Reward

PROMPTS = [
    "\n\nHuman: How are you today?\n\nAssistant:",
    "\n\nHuman: Hi\n\nAssistant:",
    "The quick brown fox",
]
RESPONSES = [" I am fine, thank you.", "", " jumps over the lazy dog"]


@pytest.fixture(scope="module")
def export(tiny_model_folder, tmp_path_factory) -> str:
    """An export of step 2, whose PAD is not its EOS."""
    name = tiny_model_folder("llama")
    model = load_value_model(ModelOptions(name, dropout=0.0), 320, seed=3)
    torch.nn.init.normal_(model.classifier.score.weight)
    folder = tmp_path_factory.mktemp("reward") / "export"
    metadata = {"step": "reward", "template": "human_assistant"}
    save_export(folder, model.classifier, load_tokenizer(name), metadata=metadata, needs_own_pad=True)
    return str(folder)


def load_scorer(export: str) -> serve.RewardScorer:
    problems = Problems()
    args = serve.ServeArguments(model_name_or_path=export, dtype="fp32", batch_size=2)
    config = serve.startup.check_model("--model_name_or_path", export, args, problems)
    tokenizer = serve.startup.check_tokenizer("--model_name_or_path", export, args, problems)
    return serve.load_scorer(args, config, tokenizer)


@pytest.fixture
def client(export) -> TestClient:
    return TestClient(serve.create_app(load_scorer(export), serve.ServeArguments()))


def plain_score(export: str, text: str) -> float:
    """Return what transformers alone reads at the text's last token."""
    model = AutoModelForSequenceClassification.from_pretrained(export).eval()
    with torch.no_grad():
        return float(model(**AutoTokenizer.from_pretrained(export)(text, return_tensors="pt")).logits)


def test_a_score_is_read_at_the_end_of_turn_that_is_added(export, client):
    answer = client.post("/score", json={"prompts": PROMPTS, "responses": RESPONSES})
    assert answer.status_code == 200
    eos = AutoTokenizer.from_pretrained(export).eos_token
    texts = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    expected = [plain_score(export, text + eos) for text in texts]
    without_end = [plain_score(export, text) for text in texts]
    assert answer.json()["scores"] == pytest.approx(expected, abs=1e-5)
    assert min(abs(a - b) for a, b in zip(expected, without_end, strict=True)) > 1e-3
    assert torch.tensor(expected).std() > 1e-2


def test_a_score_is_that_of_step_3s_reward_role_for_the_same_token_ids(export, client):
    tokenizer = AutoTokenizer.from_pretrained(export)
    prompt_ids = [torch.tensor(tokenizer(text)["input_ids"]) for text in PROMPTS]
    response_ids = [
        torch.tensor([*tokenizer(text)["input_ids"], tokenizer.eos_token_id]) for text in RESPONSES
    ]
    record = PackedBatch.build(range(3), {"prompt_ids": prompt_ids, "response_ids": response_ids})
    model = load_value_model(ModelOptions(export, dropout=0.0), len(tokenizer))
    role = Reward(model, is_packed=False)
    (expected,) = role.score([record])

    body = {
        "prompts": [tokenizer.decode(ids) for ids in prompt_ids],
        "responses": [tokenizer.decode(ids, skip_special_tokens=True) for ids in response_ids],
    }
    scores = client.post("/score", json=body).json()["scores"]
    torch.testing.assert_close(torch.tensor(scores), expected, atol=1e-5, rtol=1e-5)


def test_token_ids_are_those_of_training(export):
    scorer = load_scorer(export)
    template = build_template("human_assistant", load_tokenizer(export))
    messages = [Message("user", "How are you today?")]
    row = template.encode(template.segments(messages, "I am fine."), 100)
    prompt, eos = template.prompt_text(messages), scorer.template.tokenizer.eos_token
    assert scorer.encode(prompt, " I am fine.") == row.input_ids
    assert scorer.encode(prompt, f" I am fine.{eos}") == row.input_ids, "no second end of turn"


def test_a_score_that_is_not_finite_is_an_error_with_its_cure(export):
    scorer = load_scorer(export)
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


def test_the_program_asks_for_the_token_of_a_file_and_never_tells_it(export, started, capsys, tmp_path):
    (tmp_path / "token").write_text("s3cret-of-a-file\n")
    words = ("--model_name_or_path", export, "--port", "0", "--dtype", "fp32")
    app, (bound,) = started(*words, "--token_file", str(tmp_path / "token"))
    shown = capsys.readouterr()
    assert f"http://127.0.0.1:{bound.getsockname()[1]}/score" in shown.out
    assert "s3cret" not in shown.out + shown.err
    bound.close()
    client, body = TestClient(app), {"prompts": PROMPTS, "responses": RESPONSES}
    for token, status in (("", 401), ("wrong", 401), ("s3cret-of-a-file", 200)):
        answer = client.post("/score", json=body, headers={"Authorization": f"Bearer {token}"})
        assert answer.status_code == status


def test_a_server_for_other_machines_without_a_token_says_so(export, started, capsys, monkeypatch):
    monkeypatch.delenv("TRIPTYCH_TOKEN", raising=False)
    for host, is_said in (("0.0.0.0", True), (serve.ServeArguments.host, False)):
        _, (bound,) = started("--model_name_or_path", export, "--port", "0", "--host", host)
        bound.close()
        assert (f"--host {host} without a token" in capsys.readouterr().err) == is_said
