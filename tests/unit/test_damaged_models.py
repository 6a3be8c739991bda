"""Models that are damaged, or not what their config.json says: told by every program that loads one."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_configs import tiny_config

import chat
from common.models import loading
from common.models.loading import ModelOptions, load_causal_lm
from common.models.value_model import load_value_model
from common.runs.export import save_export
from serving import prompt_eval, reward_server
from step2_reward import rw_eval


@pytest.fixture
def save_model(tmp_path, tiny_tokenizer):
    """Save a tiny model, and its tokenizer beside it."""

    def save(kind: str = "AutoModelForCausalLM", family: str = "llama", **config) -> Path:
        folder = tmp_path / f"{kind}-{family}"
        made = tiny_config(family, len(tiny_tokenizer))
        for name, value in config.items():
            setattr(made, name, value)
        getattr(transformers, kind).from_config(made).save_pretrained(folder)
        tiny_tokenizer.save_pretrained(folder)
        return folder

    return save


def remove_weights(folder: Path, name: str) -> None:
    path = folder / "model.safetensors"
    weights = {key: weight for key, weight in load_file(path).items() if name not in key}
    save_file(weights, path, metadata={"format": "pt"})


def load(folder: Path):
    return load_causal_lm(ModelOptions(str(folder)), 320)


def load_value(folder: Path):
    return load_value_model(ModelOptions(str(folder)), 320)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gpt_neox", "bloom"])
@pytest.mark.parametrize("kind", ["AutoModelForCausalLM", "AutoModel"])
def test_a_whole_model_is_no_problem(save_model, kind, family):
    """Tied heads, buffers, and heads that are new lack nothing."""
    folder = save_model(kind, family)
    assert load(folder) is not None and load_value(folder) is not None


def test_a_weight_that_is_missing_is_not_made_up(save_model):
    folder = save_model()
    remove_weights(folder, "layers.1.mlp.up")
    for loads in (load, load_value):
        with pytest.raises(ValueError, match=r"weights lack 1 of \d+ .*model.layers.1.mlp.up_proj.weight"):
            loads(folder)
    folder = save_model("AutoModelForSequenceClassification", num_labels=1)
    assert load_value(folder) is not None
    remove_weights(folder, "score.weight")  # a saved head is no new one
    with pytest.raises(ValueError, match="its weights lack 1 of .*score.weight"):
        load_value(folder)


def test_memory_that_runs_out_is_no_damage(save_model, monkeypatch):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(torch.OutOfMemoryError):
        load(save_model(family="gpt2"))


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (chat, "--path {folder}"),
        (prompt_eval, "--model_name_or_path_baseline {folder} --model_name_or_path_finetune {folder}"),
        (
            rw_eval,
            "--model_name_or_path {folder} --data_path {rows} --max_seq_len 64 --data_output_path {cache}",
        ),
        (reward_server, "--model_name_or_path {folder} --port 0"),
    ],
    ids=["chat", "prompt_eval", "rw_eval", "reward_server"],
)
def test_programs_that_only_read_a_model_say_so_in_one_message(
    save_model, program, words, monkeypatch, capsys, tmp_path, process_group
):
    is_reward = program in (rw_eval, reward_server)
    folder = save_model(f"AutoModelFor{'SequenceClassification' if is_reward else 'CausalLM'}", num_labels=1)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 3)
    words = [word.format(folder=folder, rows=rows, cache=tmp_path / "cache") for word in words.split()]

    def refused() -> str:
        with pytest.raises(SystemExit) as left:
            program.main(words)
        text = capsys.readouterr().err
        assert left.value.code == 2 and "1 problem" in text
        return text

    (folder / "model.safetensors").write_bytes(b"torn")
    assert f"{folder}: the model cannot be loaded" in refused()
    if program is rw_eval:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
        assert f"{folder} has no trained score head; give the export/ folder" in refused()


def test_weights_that_stay_quantised_are_refused(save_model, monkeypatch):
    def load_packed(*args, **more):
        model = load_weights(*args, **more)
        model.hf_quantizer = object()
        return model

    load_weights = loading.load_weights
    monkeypatch.setattr(loading, "load_weights", load_packed)
    for loads in (load, load_value):
        with pytest.raises(ValueError, match="its weights are quantised .* use the unquantised model"):
            loads(save_model())


def test_a_whole_number_stays_one_where_dropout_is_set(tmp_path, tiny_tokenizer):
    """MPT's class reads no other number back."""
    made = transformers.MptConfig(vocab_size=320, d_model=32, n_layers=2, n_heads=4, max_seq_len=64)
    transformers.AutoModelForCausalLM.from_config(made).save_pretrained(tmp_path / "base")
    model = load_causal_lm(ModelOptions(str(tmp_path / "base"), dropout=0.0), 320)
    save_export(tmp_path / "export", model, tiny_tokenizer)
    assert load(tmp_path / "export") is not None


def test_a_language_model_of_a_composite_is_said_to_leave_the_rest_out(tmp_path, tiny_tokenizer, capfd):
    text = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    text |= {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 2}
    text |= {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    made = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    whole = transformers.Qwen3_5ForConditionalGeneration(made)
    whole.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert "only the language model of this qwen3_5 is loaded, trained and exported" in capfd.readouterr().err
    weights = {n: p for n, p in whole.named_parameters() if "visual" not in n}
    assert len(weights) == len(dict(loaded.named_parameters()))

    made.text_config.num_hidden_layers = 1  # a layer's weights are no part for images
    made.text_config.layer_types = ["linear_attention"]
    made.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no counterpart for .* of its weights"):
        load(tmp_path)


def test_tables_that_older_releases_saved_are_no_weights(save_model):
    folder = save_model()
    path = folder / "model.safetensors"
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    old |= {"model.layers.0.self_attn.masked_bias": torch.ones(1)}
    save_file(load_file(path) | old, path, metadata={"format": "pt"})
    assert load(folder) is not None
