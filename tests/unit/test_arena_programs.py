"""arena.py's command lines: what is served, what is exported, and what is wrong, in one message."""

import socket
import threading

import pytest
import uvicorn
from test_judgement_store import answered

import arena
from serving.arena_app import NewPair
from serving.judgement_store import JudgementStore


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Run arena.py in an empty folder; a server that would start ends at once. Return what was printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: [s.close() for s in sockets])
    monkeypatch.delenv("TRIPTYCH_TOKEN", raising=False)

    def start(*words: object) -> str:
        monkeypatch.setattr("sys.argv", ["arena.py", *map(str, words)])
        arena.main()
        return capsys.readouterr().out

    return start


@pytest.fixture
def refused(run, capsys):
    """Run arena.py, which leaves with one message; return it."""

    def start(*words: object) -> str:
        with pytest.raises(SystemExit, match="2"):
            run(*words)
        return capsys.readouterr().err

    return start


@pytest.fixture
def folder(tiny_model_folder) -> str:
    return tiny_model_folder("llama")


def test_models_are_named_by_their_paths_or_by_names(run, folder, tiny_model_folder, monkeypatch, tmp_path):
    made, create_app = [], arena.create_app
    monkeypatch.setattr(
        arena, "create_app", lambda *a, **more: made.append((*a, more)) or create_app(*a, **more)
    )
    other = tiny_model_folder("gpt2")
    limits = ["--max_new_tokens", 9, "--generation_slots", 3, "--max_seq_len", 100]
    out = run(folder, f"ppo={other}", "--port", 0, "--temperature", 0.5, *limits)
    [(rules, more)] = made
    assert list(rules.models) == [folder, "ppo"] and rules.prompts is None
    assert (rules.sampling.temperature, rules.sampling.max_new_tokens) == (0.5, 9)
    model = rules.models["ppo"]
    assert model._shared.max_slots == 3 and "prompt and answer together may have 100" in model.why_too_long(
        [5] * 100
    )
    assert more["is_local"] and not more["token"]
    assert f"the arena of {folder}, ppo is at http://127.0.0.1:" in out
    assert (tmp_path / "output/arena.sqlite3").is_file()
    pair = rules.ask(NewPair("Hi"))
    rules.answer(pair, [].append, threading.Event())
    assert rules.store.get(pair.id).answer_a is not None, "real models answer"


def test_everything_wrong_is_told_at_once(refused, folder, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "no prompt"}\n')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = refused(folder, folder, "x=nowhere", "--port", port, "--data_path", tmp_path / "rows.jsonl",
                        "--top_p", 2, "--token_file", tmp_path / "none", "--tempature", 1)  # fmt: skip
    for words in (
        f"--models names {folder} twice", "--models nowhere is neither a model folder",
        f"--port {port}: ", "choose another port", "has no prompts", "did you mean --temperature?",
        "--top_p 2 must be", "--token_file", "nothing was started",
    ):  # fmt: skip
        assert words in error, words
    assert not (tmp_path / "output").exists()
    assert "no model is given: arena.py SFT PPO" in refused("--port", 0)


def test_other_machines_need_a_token(run, refused, folder, monkeypatch):
    assert "--host 0.0.0.0 accepts connections from other machines; give --token_file" in refused(
        folder, "--host", "0.0.0.0", "--port", 0
    )
    monkeypatch.setenv("TRIPTYCH_TOKEN", "s3cret")
    out = run(folder, "--host", "0.0.0.0", "--port", 0)
    assert "is at http://0.0.0.0:" in out and "s3cret" not in out
    monkeypatch.delenv("TRIPTYCH_TOKEN")
    create = socket.create_server  # 127.example.org may lead anywhere
    monkeypatch.setattr(socket, "create_server", lambda address, **more: create(("0.0.0.0", 0), **more))
    words = "--host 127.example.org accepts connections from other machines"
    assert words in refused(folder, "--host", "127.example.org", "--port", 0)


def test_export_overwrites_nothing_unless_told(run, refused, tmp_path):
    store = JudgementStore(tmp_path / "db")
    for choice in ("a", "b", "tie"):
        store.judge(answered(store), choice)
    out = run("export", "pairs.jsonl", "--db", "db")
    assert out == "2 pairs written to pairs.jsonl; left out: 1 ties\n"
    (tmp_path / "pairs.jsonl").write_text("mine")
    error = refused("export", "pairs.jsonl", "--db", "nowhere")
    assert "pairs.jsonl exists already; give another name, or --overwrite" in error
    assert "--db nowhere is not a file" in error and (tmp_path / "pairs.jsonl").read_text() == "mine"
    assert "2 pairs" in run("export", "pairs.jsonl", "--db", "db", "--overwrite")
    assert len((tmp_path / "pairs.jsonl").read_text().splitlines()) == 2
