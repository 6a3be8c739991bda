"""Models in DeepSpeed-Chat's form: reads what its save_hf_format writes, writes what its loaders read."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hub_server import hub_server
from tiny_configs import tiny_config
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from common.flags.args import Problems
from common.models.deepspeed_chat import BACKBONE, HEAD, WEIGHTS, write_weights
from common.models.value_model import has_saved_head
from common.programs.model_checks import check_model, check_tokenizer
from common.runs.export import save_export
from export import main as run_export

pytestmark = pytest.mark.usefixtures("process_group")
NEW_MODELS = ("llama", "opt")
ARGS = SimpleNamespace(eot_token="", add_eot_token=False, trust_remote_code=False)


def save_as_it_does(folder: Path, family: str, tokenizer, *, is_critic: bool) -> torch.nn.Module:
    """Save a model of its create_hf_model by the lines of its save_hf_format; return the backbone."""
    torch.manual_seed(0)
    base = folder.with_name("base")
    tokenizer.save_pretrained(base)
    config = tiny_config(family, len(tokenizer))
    model = (AutoModel if is_critic else AutoModelForCausalLM).from_config(config)
    model.config.end_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    model.config.pad_token_id = model.config.eos_token_id
    model.resize_token_embeddings(8 * -(-len(tokenizer) // 8))
    weights = model.state_dict()
    if is_critic:
        weights = {f"rwtransformer.{name}": weight for name, weight in weights.items()}
        weights["v_head.weight"] = torch.randn(1, 32)
    folder.mkdir()
    torch.save(weights, folder / "pytorch_model.bin")
    model.config.to_json_file(folder / "config.json")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"_name_or_path": str(base)}))
    (folder / "vocab.json").write_text(json.dumps(tokenizer.get_vocab()))
    (folder / "merges.txt").write_text("")
    return model.eval()


@pytest.mark.parametrize("family", NEW_MODELS)
def test_read_its_critic(family, tmp_path, tiny_tokenizer):
    backbone = save_as_it_does(tmp_path / "old", family, tiny_tokenizer, is_critic=True)
    head = torch.load(tmp_path / "old" / WEIGHTS)[HEAD]
    run_export([str(tmp_path / "old"), "--output", str(tmp_path / "new")])
    assert has_saved_head(str(tmp_path / "new"))
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "new").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "new")
    assert model.config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
    ids = torch.tensor([[5, 9, 7, tokenizer.eos_token_id, tokenizer.pad_token_id]])
    with torch.no_grad():
        expected = backbone(input_ids=ids[:, :4]).last_hidden_state[:, -1] @ head.T
        score = model(input_ids=ids, attention_mask=(ids != tokenizer.pad_token_id).long()).logits
    torch.testing.assert_close(score, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", NEW_MODELS)
def test_read_its_actor(family, tmp_path, tiny_tokenizer):
    theirs = save_as_it_does(tmp_path / "old", family, tiny_tokenizer, is_critic=False)
    run_export([str(tmp_path / "old"), "--output", str(tmp_path / "new")])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "new").eval()
    ids = torch.arange(4, 12)[None]
    with torch.no_grad():
        expected = theirs(input_ids=ids).logits[..., : model.config.vocab_size]
        torch.testing.assert_close(model(input_ids=ids).logits, expected)
    assert model.config.vocab_size == len(tiny_tokenizer)


def test_its_tokenizer_is_that_of_its_base(tmp_path, tiny_tokenizer):
    folder = tmp_path / "old"
    save_as_it_does(folder, "opt", tiny_tokenizer, is_critic=False)

    def read() -> tuple:
        problems = Problems()
        return check_tokenizer("--model_name_or_path", str(folder), ARGS, problems), problems.messages

    tokenizer, messages = read()
    assert messages == [] and tokenizer.get_vocab() == tiny_tokenizer.get_vocab()
    assert tokenizer.eos_token_id == tiny_tokenizer.eos_token_id
    config = json.loads((folder / "config.json").read_text())
    for change, why in (
        ({"eos_token_id": 7}, f"EOS is 7 in it, {tiny_tokenizer.eos_token_id} in"),
        ({"_name_or_path": str(tmp_path / "absent")}, "absent: no tokenizer could be loaded"),
        ({"_name_or_path": None}, "its config.json names no base"),
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        tokenizer, (message,) = read()
        assert tokenizer is None and why in message
        assert str(folder) in message and "copy tokenizer.json and tokenizer_config.json" in message
    tiny_tokenizer.save_pretrained(folder)  # the cure
    assert read()[1] == []


def test_its_reward_model_is_rejected_with_the_cure(tmp_path, tiny_tokenizer):
    folder = tmp_path / "old"
    save_as_it_does(folder, "opt", tiny_tokenizer, is_critic=True)
    problems = Problems()
    assert check_model("--critic_model_name_or_path", str(folder), ARGS, problems) is None
    assert f"run python export.py {folder} --output NEW" in problems.messages[0]


@pytest.mark.parametrize("family", NEW_MODELS)
def test_write_a_critic(family, tmp_path, tiny_tokenizer):
    config = tiny_config(family, len(tiny_tokenizer))
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config)
    model.num_exported_rows = len(tiny_tokenizer)
    save_export(tmp_path / "new", model, tiny_tokenizer, needs_own_pad=True, finish=write_weights)
    assert not list((tmp_path / "new").glob("*.safetensors"))
    saved = torch.load(tmp_path / "new" / WEIGHTS, weights_only=True)
    torch.testing.assert_close(saved.pop(HEAD), model.score.weight.detach())
    config = AutoConfig.from_pretrained(tmp_path / "new")
    assert config.vocab_size == 8 * -(-(len(tiny_tokenizer) + 1) // 8)  # with a PAD; as its loader pads it
    backbone = AutoModel.from_config(config)  # as its create_critic_model makes it
    backbone.load_state_dict({name.removeprefix(BACKBONE): weight for name, weight in saved.items()})


def test_flags_that_a_saved_model_cannot_follow(tmp_path, tiny_tokenizer, capsys):
    old, new = tmp_path / "old", tmp_path / "new"
    save_as_it_does(old, "opt", tiny_tokenizer, is_critic=False)
    for flags, words in (
        (["--what", "critic"], "--what critic: "),
        (["--license", "mit"], "--license goes into"),
    ):
        with pytest.raises(SystemExit, match="2"):
            run_export([str(old), "--output", str(new), *flags])
        assert words in capsys.readouterr().err and not new.exists()


def test_a_saved_model_is_uploaded_and_is_none_of_a_run_around_it(tmp_path, tiny_tokenizer, monkeypatch):
    save_as_it_does(tmp_path / "old", "opt", tiny_tokenizer, is_critic=False)
    (tmp_path / "args.json").write_text('{"model_name_or_path": "m", "data_path": []}')
    (tmp_path / "run.json").write_text('{"starts": [{"code": "abc"}], "defaults": {}}')  # of another model
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    with hub_server() as hub:
        run_export([str(tmp_path / "old"), "--output", str(tmp_path / "new"), "--push_to_hub", "me/old"])
    files = {path.name for path in (tmp_path / "new").iterdir()}
    assert hub.repositories["me/old"]["files"].keys() - {".gitattributes"} == files
    assert "README.md" not in files
