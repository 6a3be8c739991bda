"""Damaged models and tokenizers, a line a case: what is wrong, the exit code, a word of what is said.

Each is opened by chat.py, as `--reward` where it is a reward model; code 0: it answers, with a note.
"""

import io
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_configs import tiny_config

import chat

WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"
UP, HEAD = "model.layers.1.mlp.up_proj.weight", "lm_head.weight"
Damage = Callable[[Path], None]


def write(name: str, text: str | bytes) -> Damage:
    held = text if isinstance(text, bytes) else text.encode()
    return lambda folder: (folder / name).write_bytes(held) and None


def remove(*names: str) -> Damage:
    def damage(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return damage


def edit(name: str, **changes) -> Damage:
    """Change entries of a JSON file; None takes one away."""

    def damage(folder: Path) -> None:
        held = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps({key: x for key, x in held.items() if x is not None}))

    return damage


def config(**changes) -> Damage:
    return edit(CONFIG, **changes)


def weights(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Damage:
    def damage(folder: Path) -> None:
        held = change(load_file(folder / WEIGHTS))
        save_file({name: x.contiguous() for name, x in held.items()}, folder / WEIGHTS, {"format": "pt"})

    return damage


def weight(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return weights(lambda held: held | {name: change(held[name])})


def renamed(change: Callable[[str], str]) -> Damage:
    return weights(lambda held: {change(name): x for name, x in held.items()})


def spoilt(number: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x.clone().index_fill_(0, torch.tensor([1]), number)


def other_model(kind: str, made) -> Damage:
    """Another model in the folder, the tokenizer as it was."""

    def damage(folder: Path) -> None:
        remove(CONFIG, WEIGHTS)(folder)
        getattr(transformers, kind).from_config(made).save_pretrained(folder)

    return damage


def pickled(value) -> Damage:
    def damage(folder: Path) -> None:
        remove(WEIGHTS)(folder)
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(value))

    return damage


def sharded(index: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
        (folder / f"{WEIGHTS}.index.json").write_text(index)

    return damage


def tokens(change: Callable[[transformers.PreTrainedTokenizerFast], object]) -> Damage:
    def damage(folder: Path) -> None:
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        change(tokenizer)
        tokenizer.save_pretrained(folder)

    return damage


def adapter(*damages: Damage) -> Damage:
    """An adapter in the model's place; what it was trained on stands beside it."""

    def damage(folder: Path) -> None:
        base = folder.with_name("base")
        shutil.copytree(folder, base)
        model = transformers.AutoModelForCausalLM.from_pretrained(base)
        adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
        remove(CONFIG, WEIGHTS, "generation_config.json")(folder)
        adapted.save_pretrained(folder)
        for change in damages:
            change(folder)

    return damage


BERT = transformers.BertConfig(
    vocab_size=320, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
)
T5 = transformers.T5Config(vocab_size=320, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
BART = transformers.BartConfig(
    vocab_size=320, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16
)
INDEX = {"metadata": {}, "weight_map": {UP: "model-00002-of-00002.safetensors"}}
ADAPTER, FACTORS = "adapter_config.json", "adapter_model.safetensors"
CASES: dict[str, tuple[Damage, int, str]] = {
    # ---- config.json
    "no configuration": (remove(CONFIG), 2, "has no config.json"),
    "configuration is empty": (write(CONFIG, ""), 2, "neither a model folder"),
    "configuration is torn": (write(CONFIG, '{"model_type": "lla'), 2, "neither a model folder nor"),
    "configuration is a list": (write(CONFIG, "[]"), 2, "neither a model folder"),
    "configuration is null": (write(CONFIG, "null"), 2, "neither a model folder"),
    "configuration of no family": (config(model_type=None), 2, "neither a model folder nor"),
    "family that nobody knows": (config(model_type="lllama"), 2, "lllama"),
    "layers as a word": (config(num_hidden_layers="two"), 2, "num_hidden_layers"),
    "a layer too few": (config(num_hidden_layers=1), 2, "has no counterpart for 9 of its weights"),
    "a layer too many": (config(num_hidden_layers=3), 2, "its weights lack 9 of"),
    "other width of the MLP": (config(intermediate_size=48), 2, "the wrong sizes for"),
    "other number of tokens": (config(vocab_size=300), 2, "the wrong sizes for"),
    "heads that do not divide": (config(num_attention_heads=5), 2, "not a multiple of the number"),
    "unknown attention function": (config(hidden_act="gelou"), 2, "gelou"),
    "biases left out": (config(attention_bias=True), 2, "its weights lack 8 of"),
    "an encoder and a decoder": (other_model("AutoModel", T5), 2, "Unrecognized configuration class"),
    "an encoder that a decoder hides": (
        other_model("AutoModelForSeq2SeqLM", BART), 2, "has an encoder and a decoder; give a decoder"),
    "a classifier": (
        other_model("AutoModelForSequenceClassification", tiny_config("llama", 320)), 2, "is a classifier"),
    "a model without its head": (
        other_model("AutoModel", tiny_config("llama", 320)), 0, "no output head: lm_head.weight is new"),
    "a head apart that is said to be tied": (config(tie_word_embeddings=True), 0, "they differ in"),
    "a bidirectional encoder": (
        other_model("AutoModelForMaskedLM", BERT), 2, "the family bert is not supported"),
    # ---- weights
    "no weights": (remove(WEIGHTS), 2, "the model cannot be loaded"),
    "weights are empty": (write(WEIGHTS, b""), 2, "the model cannot be loaded"),
    "weights are torn": (write(WEIGHTS, b"torn"), 2, "the model cannot be loaded"),
    "weights with an endless header": (write(WEIGHTS, b"\xff" * 64), 2, "the model cannot be loaded"),
    "a weight is missing": (weights(lambda w: {n: x for n, x in w.items() if n != UP}), 2, UP),
    "a weight with a typo": (renamed(lambda n: n.replace("1.mlp.up_", "1.mlp.upp_")), 2, UP),
    "all names with a prefix": (renamed(lambda n: f"module.{n}"), 2, "its weights lack"),
    "a weight too many": (weights(lambda w: w | {"model.extra.weight": w[UP] + 0}), 2, "model.extra.weight"),
    "a bias without a counterpart": (weights(lambda w: w | {
        "model.layers.0.self_attn.q_proj.bias": torch.ones(32)}), 2, "q_proj.bias"),
    "a weight that is turned": (weight(UP, lambda x: x.T), 2, "the wrong sizes for"),
    "NaN in a weight": (weight(UP, spoilt(torch.nan)), 2, f"{UP} has NaN or infinite"),
    "infinity in a weight": (weight(HEAD, spoilt(torch.inf)), 2, f"{HEAD} has NaN"),
    "NaN in a norm": (weight("model.norm.weight", spoilt(torch.nan)), 2, "model.norm.weight has NaN"),
    "8-bit integers": (weight(UP, lambda x: (x * 1000).to(torch.int8)), 2, f"{UP} holds integers"),
    "8-bit numbers that nothing scales": (
        weights(lambda w: {n: x.to(torch.float8_e4m3fn) for n, x in w.items()} | {f"{UP}_scale_inv": w[UP]}),
        2, "up_proj.weight_scale_inv"),
    "packed 4-bit integers": (weight(UP, lambda x: (x * 1000).to(torch.uint8)), 2, "quantization_config"),
    "integers as numbers": (weight(UP, lambda x: (x * 1000).round()), 2, f"{UP} holds integers"),
    "a pickle that holds a program": (pickled(print), 2, "its weights are a pickle with more than"),
    "a pickle of a number": (pickled(3), 2, "cannot be loaded"),
    "an index without its shard": (sharded(json.dumps(INDEX)), 2, "cannot be loaded"),
    "an index that is torn": (sharded('{"weight'), 2, "cannot be loaded"),
    # ---- tokenizer
    "no tokenizer": (remove(TOKENIZER, "tokenizer_config.json"), 2, "no tokenizer could be loaded"),
    "tokenizer is empty": (write(TOKENIZER, ""), 2, "no tokenizer could be loaded"),
    "tokenizer is torn": (write(TOKENIZER, '{"version": "1.0", "mod'), 2, "no tokenizer could be loaded"),
    "tokenizer's settings are torn": (write("tokenizer_config.json", "{"), 2, "no tokenizer could be"),
    "no end of turn": (edit("tokenizer_config.json", eos_token=None), 2, "has no EOS token"),
    "an end of turn that is new": (
        edit("tokenizer_config.json", eos_token="<|new|>"), 0, "its tokenizer has 1 more tokens (<|new|>)"),
    "tokens that the model lacks": (
        tokens(lambda t: t.add_tokens([f"<{i}>" for i in range(42)])), 0, "has 42 more tokens (<0>,"),
    # ---- adapters
    "adapter without its base": (adapter(edit(ADAPTER, base_model_name_or_path=None)), 2, "names no base"),
    "adapter of a base that has gone": (
        adapter(edit(ADAPTER, base_model_name_or_path="gone")), 2, "neither a model folder"),
    "adapter of another kind": (adapter(edit(ADAPTER, peft_type="IA3")), 2, "only LORA is supported"),
    "adapter's settings are torn": (adapter(write(ADAPTER, "{")), 2, "cannot be read"),
    "adapter without its weights": (adapter(remove(FACTORS)), 2, "the adapter cannot be loaded"),
    "adapter's weights are torn": (adapter(write(FACTORS, b"torn")), 2, "the adapter cannot be loaded"),
    "adapter of another width": (adapter(edit(ADAPTER, r=4)), 2, "the adapter cannot be loaded"),
}  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory, tiny_tokenizer):
    folder = tmp_path_factory.mktemp("sound")
    made = tiny_config("llama", len(tiny_tokenizer))
    transformers.AutoModelForCausalLM.from_config(made).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


def opened(words, monkeypatch, capfd) -> tuple[int, str]:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    code = 0
    try:
        chat.main([str(word) for word in words])
    except SystemExit as left:
        code = left.code
    return code, capfd.readouterr().err


@pytest.mark.parametrize("name", CASES)
def test_what_is_damaged_is_named(name, sound, tmp_path, monkeypatch, capfd):
    damage, code, word = CASES[name]
    folder = tmp_path / "model"
    shutil.copytree(sound, folder)
    damage(folder)
    capfd.readouterr()
    left, said = opened([folder], monkeypatch, capfd)
    assert (left, word in said) == (code, True), said[-800:]


def test_the_table_is_of_forty_and_a_sound_model_is_none_of_them(sound, monkeypatch, capfd):
    assert len(CASES) >= 40
    code, said = opened([sound], monkeypatch, capfd)
    assert code == 0 and "behind them" not in said and "error" not in said


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (weights(lambda w: {n: x for n, x in w.items() if n != "score.weight"}), "lack 1 of"),
        (weight("score.weight", lambda x: x * torch.nan), "score.weight has NaN"),
        (config(architectures=["LlamaForCausalLM"]), "has no trained score head"),
        (config(num_hidden_layers=1), "has no counterpart for 9 of its weights"),
    ],
    ids=["no head", "NaN head", "head of another class", "a layer too few"],
)
def test_reward_models(change, word, sound, tiny_tokenizer, tmp_path, monkeypatch, capfd):
    folder = tmp_path / "reward"
    made = tiny_config("llama", len(tiny_tokenizer))
    made.num_labels = 1
    transformers.AutoModelForSequenceClassification.from_config(made).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    change(folder)
    capfd.readouterr()
    code, said = opened([sound, "--reward", folder], monkeypatch, capfd)
    assert code == 2 and word in said, said[-800:]
