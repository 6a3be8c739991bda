"""The model card of an export, read by huggingface_hub, and its upload to a stand-in of the hub."""

import json
from pathlib import Path

import pytest
from hub_server import hub_server
from huggingface_hub import ModelCard
from program_runs import files_in
from safetensors import safe_open

from common.runs.model_card import shorten
from export import main as run_export


@pytest.fixture(scope="module")
def run_folder(forks, tiny, tmp_path_factory) -> Path:
    """A short SFT run with LoRA on data with an absolute path."""
    folder = tmp_path_factory.mktemp("card") / "run"
    values = {"model_name_or_path": tiny.base, "data_path": tiny.rows, "data_split": "1,0,0"}
    values |= {"output_dir": folder, "lora_dim": 4, "max_train_steps": 2, "max_seq_len": 48, "dtype": "fp32"}
    values |= {"per_device_train_batch_size": 2, "data_output_path": tiny.cache, "eval_fraction": 0.3}
    done = forks.run(1, values)
    assert done.codes == [0], done.text()
    return folder


def test_model_card_of_a_run(run_folder, tiny):
    card = ModelCard.load(run_folder / "export/README.md")
    assert card.data.library_name == "transformers" and card.data.pipeline_tag == "text-generation"
    assert card.data.tags == ["triptych", "sft"] and card.data.base_model is None  # a folder without a card
    assert ModelCard.load(run_folder / "adapter/README.md").data.library_name == "peft"
    record = json.loads((run_folder / "run.json").read_text())["starts"][-1]
    metadata = json.loads((run_folder / "export/triptych.json").read_text())
    assert (
        f"| trained by | Triptych, {metadata['num_steps']} steps |" in card.text
        and metadata["num_steps"] == 2
    )
    assert f", {record['data']['num_train']} rows |" in card.text
    assert f"## Held-out data, {record['data']['num_eval']} rows" in card.text
    assert f"| perplexity | {metadata['eval_perplexity']:.4g} |" in card.text
    assert "--lora_dim 4\n" in card.text and "--seed" not in card.text
    assert f"torch {record['versions']['torch']}" in card.text
    assert "Human: A question\n\nAssistant: A response" in card.text
    assert str(Path(tiny.rows).parent.parent) not in card.content and Path(tiny.rows).name in card.text


def test_headers_of_weights(run_folder):
    record = json.loads((run_folder / "run.json").read_text())["starts"][-1]
    for file in ("export/model.safetensors", "adapter/adapter_model.safetensors"):
        with safe_open(run_folder / file, "pt") as weights:
            facts = weights.metadata()
        expected = {"format": "pt", "stage": "sft", "step": "2"}
        assert facts == expected | ({"revision": record["code"]} if record["code"] else {})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("/x/data/rows.jsonl", "data/rows.jsonl"),
        (["Dahoas/rm-static", "/a/b/c"], "Dahoas/rm-static b/c"),
        ("0.5*model:/x/run/export", "0.5*model:run/export"),
        ("http://host:8000/score", "http://..."),
        ("judge:https://host/v1:m", "judge:https://..."),
        ("output/demo/x", "output/demo/x"),
        (True, "True"),
    ],
)
def test_shorten(value, expected):
    assert shorten(value) == expected


def test_push_to_hub(run_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    more = ["--push_to_hub", "me/chat", "--private", "--license", "apache-2.0"]
    with hub_server() as hub:
        run_export([str(run_folder), "--output", str(tmp_path / "new"), *more])
        repository = hub.repositories["me/chat"]
        assert f"uploaded http://127.0.0.1:{hub.server_port}/me/chat" in capsys.readouterr().out
        assert repository["private"] is True
        assert {name for name in repository["files"] if name != ".gitattributes"} == files_in(
            tmp_path / "new"
        )
        for name in files_in(tmp_path / "new"):
            assert repository["files"][name] == (tmp_path / "new" / name).read_bytes()
        assert ModelCard(repository["files"]["README.md"].decode()).data.license == "apache-2.0"
        with pytest.raises(SystemExit):
            run_export([str(run_folder), "--output", str(tmp_path / "again"), *more])
        assert "--push_to_hub me/chat exists already; give a new name" in capsys.readouterr().err
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
        with pytest.raises(SystemExit):
            run_export([str(run_folder), "--output", str(tmp_path / "again"), "--push_to_hub", "me/b"])
        assert "HF_TOKEN" in capsys.readouterr().err
        with pytest.raises(SystemExit):
            run_export([str(run_folder), "--output", str(tmp_path / "again"), "--push_to_hub", "a/b/c"])
        assert "a/b/c" in capsys.readouterr().err
        assert not (tmp_path / "again").exists() and list(hub.repositories) == ["me/chat"]
        monkeypatch.setenv("HF_TOKEN", "hf_right")
        hub.rejects_commits = True
        with pytest.raises(SystemExit) as left:
            run_export([str(run_folder), "--output", str(tmp_path / "kept"), "--push_to_hub", "me/c"])
        message = str(left.value)
        assert "storage limit" in message and f"`hf upload me/c {tmp_path / 'kept'}`" in message
    assert (tmp_path / "kept/README.md").exists()
