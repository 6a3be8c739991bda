"""A fingerprint changes with a model's configuration, with any tensor, and with the base of an adapter."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.models.fingerprint import changed_models, fingerprint


@pytest.fixture
def model(tmp_path, tiny_model_folder) -> Path:
    return Path(shutil.copytree(tiny_model_folder("llama"), tmp_path / "model"))


def change_tensors(model: Path, change) -> None:
    weights = load_file(model / "model.safetensors")
    change(weights)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def set_first(weights):
    weights["model.norm.weight"][0] += 1


def set_last(weights):
    weights["model.embed_tokens.weight"][-1, -1] += 1e-3


def exchange(weights):
    weights["a"], weights["b"] = weights.pop("model.norm.weight"), torch.zeros(2)


@pytest.mark.parametrize("change", [set_first, set_last, exchange])
def test_fingerprint_changes_with_a_tensor(model, change):
    before = fingerprint(str(model))
    change_tensors(model, lambda weights: None)
    assert fingerprint(str(model)) == before
    change_tensors(model, change)
    assert fingerprint(str(model)) != before


def test_fingerprint_changes_with_configuration_and_shards(model):
    seen = {fingerprint(str(model))}
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    seen.add(fingerprint(str(model)))
    os.rename(model / "model.safetensors", model / "model-00001-of-00001.safetensors")
    seen.add(fingerprint(str(model)))
    (model / "README.md").write_text("another text")
    assert len(seen) == 3 and fingerprint(str(model)) in seen


@pytest.mark.parametrize("is_zip", [True, False])
def test_fingerprint_changes_with_a_pickle(model, is_zip):
    (model / "model.safetensors").unlink()
    weights = {"one.weight": torch.zeros(1024, 64)}  # an old pickle sorts several tensors by address
    found = set()
    for number in (0, 1, 1):
        weights["one.weight"][7, 3] = number
        file = model / "pytorch_model.bin"
        torch.save(weights, file, _use_new_zipfile_serialization=is_zip)
        found.add(fingerprint(str(model)))
    assert len(found) == (2 if is_zip else 1), "an old pickle is looked at in places"
    change = file.read_bytes()[:-1]
    file.write_bytes(change)
    assert fingerprint(str(model)) not in found


def test_fingerprint_of_an_adapter_includes_its_base(model, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 1, "base_model_name_or_path": str(model)}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    save_file({"a": torch.zeros(2)}, adapter / "adapter_model.safetensors")
    before = fingerprint(str(adapter))
    change_tensors(model, set_last)
    assert fingerprint(str(adapter)) != before


def test_fingerprint_of_a_missing_model_is_none(tmp_path):
    assert fingerprint(str(tmp_path / "none")) == fingerprint("owner/name-that-is-not-here") == ""
    assert changed_models({"--a": "", "--b": "1", "--c": "1"}, {"--a": "1", "--b": "", "--d": "2"}) == []
    (text,) = changed_models({"--a": "1"}, {"--a": "2"})
    assert text.startswith("the model of --a has changed since then: restore the old one")
