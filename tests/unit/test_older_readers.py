"""Exports say to transformers 4.57 what their bases say to it; tests/older_readers.json has what it reads."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import AutoPeftModelForSequenceClassification
from safetensors.torch import load_file, save_file
from tiny_configs import tiny_gemma3_config
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from common.data.chat_template import build_template
from common.data.example import Message
from common.data.tokenizer import load_tokenizer
from common.models.loading import ModelOptions, load_causal_lm
from common.models.lora import LoraOptions, add_lora
from common.models.value_model import has_saved_head, load_value_model
from common.runs.export import save_adapter, save_export
from common.runs.older_readers import add_older_names

pytestmark = pytest.mark.usefixtures("process_group")
TABLE = json.loads((Path(__file__).parents[1] / "older_readers.json").read_text())
TEXTS = [
    "\n\nHuman: Hi\n\nAssistant: I am fine.<eot>",
    "\n\nHuman: What?\n\nAssistant: It is a sunny day.<eot>",
]
# What an export may say otherwise than its base: token ids, and how many rows there are.
CHANGED = {"pad_token_id", "eos_token_id", "bos_token_id", "vocab_size", "use_cache", "problem_type"}


def as_older_reads(config: dict[str, Any]) -> dict[str, Any]:
    """Attributes that transformers 4.57 has of a config.json, those of its text part under dotted names."""
    values = {"dtype": config.get("torch_dtype") or config.get("dtype")}
    for name, default in TABLE["reads"][config["model_type"]].items():
        value = config.get(name, default)
        if name == "text_config":
            values |= {f"{name}.{inner}": x for inner, x in as_older_reads(value).items()}
        elif not name.endswith("_config"):
            values[name] = value
    scaling = values.get("rope_scaling")
    if scaling and "rope_type" in scaling:  # `type` is its older name
        values["rope_scaling"] = {key: x for key, x in scaling.items() if key != "type"}
    return values


@pytest.mark.parametrize("name", TABLE["configs"])
def test_a_configuration_is_read_as_that_of_its_base(name, tmp_path):
    """By transformers 4 key by key, and by transformers 5 as a whole."""
    base = TABLE["configs"][name]
    (tmp_path / "config.json").write_text(json.dumps(base))
    config = AutoConfig.from_pretrained(tmp_path)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    add_older_names(saved)
    expected, actual = as_older_reads(base), as_older_reads(saved)
    if name == "mistral":
        assert expected["sliding_window"] == 16, "the table must have what is not the default"
    assert actual == expected
    (tmp_path / "config.json").write_text(json.dumps(saved))
    again = AutoConfig.from_pretrained(tmp_path).to_dict()
    assert again == config.to_dict()


# ---- Exports of models


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE = {"rope_theta": 1e6, "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 32}}


@pytest.fixture
def older_base(tiny_model_folder, tmp_path):
    """A Llama as transformers 4 wrote it, with Llama 3's positions, that stops at two tokens."""
    folder = tmp_path / "base"
    shutil.copytree(tiny_model_folder("llama"), folder)
    edit(folder / "config.json", ROPE, "rope_parameters")
    edit(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"}, "backend")
    edit(folder / "generation_config.json", {"eos_token_id": [5, 9], "do_sample": True, "top_p": 0.9})
    return folder


@pytest.fixture
def older_composite(tiny_tokenizer, tmp_path):
    """A Gemma 3 with an image part."""
    torch.manual_seed(0)
    folder = tmp_path / "base"
    transformers.Gemma3ForConditionalGeneration(tiny_gemma3_config(320)).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    del saved["text_config"]["rope_parameters"]
    saved["text_config"] |= {"rope_theta": 1e6, "rope_local_base_freq": 7777.0}
    (folder / "config.json").write_text(json.dumps(saved))
    return folder


def edit(file: Path, changes: dict[str, Any], *removed: str) -> None:
    content = {name: value for name, value in json.loads(file.read_text()).items() if name not in removed}
    file.write_text(json.dumps(content | changes))


def export(base: Path, kind: str, template: str = "human_assistant") -> tuple[Path, Any, Any]:
    """The export of a kind, with the tokenizer and the model that made it."""
    tokenizer = load_tokenizer(str(base), eot_token="<eot>", add_eot_token=True)
    options, lora = ModelOptions(str(base), dropout=0.0), LoraOptions(4 * ("lora" in kind), 8)
    if "reward" in kind:
        model = load_value_model(options, len(tokenizer), lora, seed=1).classifier.eval()
    else:
        model = add_lora(load_causal_lm(options, len(tokenizer)), lora).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in filter(lambda p: p.requires_grad, model.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    metadata = {"template": template}
    save_export(base.parent / kind, model, tokenizer, metadata=metadata, needs_own_pad="reward" in kind)
    save_adapter(base.parent / f"{kind}_adapter", model, tokenizer, metadata)
    return base.parent / kind, tokenizer, model


@pytest.mark.parametrize("kind", ["sft", "sft_lora", "reward", "reward_lora"])
def test_each_export_says_what_its_base_says(kind, older_base):
    folder, tokenizer, _ = export(older_base, kind)
    base, saved = (json.loads((f / "config.json").read_text()) for f in (older_base, folder))
    expected, actual = as_older_reads(base), as_older_reads(saved)
    assert expected["rope_theta"] == 1e6 and expected["rope_scaling"]["factor"] == 8.0
    for name, value in expected.items():
        assert actual[name] == value or name in CHANGED, name
    assert saved["eos_token_id"] == tokenizer.eos_token_id != base["eos_token_id"]
    assert saved["pad_token_id"] not in (saved["eos_token_id"], None) or "reward" not in kind
    if "reward" not in kind:
        generation = json.loads((folder / "generation_config.json").read_text())
        assert generation["eos_token_id"] == [tokenizer.eos_token_id, 5, 9] and generation["top_p"] == 0.9
        assert {n for n in generation if not n.startswith("_")} <= {*TABLE["generation"]}
    for place in (folder, folder.with_name(f"{kind}_adapter")):
        if place.exists():
            check_tokenizer(place, tokenizer)
            assert all(file.stat().st_mode & 0o444 == 0o444 for file in place.iterdir()), "others may read it"
    assert folder.with_name(f"{kind}_adapter").exists() == ("lora" in kind)


def check_tokenizer(folder: Path, tokenizer: Any) -> None:
    """Its class is one that transformers 4 has; nothing in its file is of another kind there."""
    said = json.loads((folder / "tokenizer_config.json").read_text())
    assert said["tokenizer_class"] in TABLE["tokenizer_classes"]
    assert isinstance(said.get("extra_special_tokens", {}), dict)
    assert (said["add_bos_token"], said["add_eos_token"]) == (False, False)
    form = build_template("human_assistant", tokenizer).chat_template
    assert said["chat_template"] == form
    loaded = AutoTokenizer.from_pretrained(folder)
    assert loaded.chat_template == form
    assert [loaded(text).input_ids for text in TEXTS] == [tokenizer(text).input_ids for text in TEXTS]


def test_special_tokens_of_ones_own_are_read_by_both(older_base):
    more = {"extra_special_tokens": ["you", "fine"], "tokenizer_class": "TokenizersBackend"}
    edit(older_base / "tokenizer_config.json", more)
    folder, tokenizer, _ = export(older_base, "sft")
    check_tokenizer(folder, tokenizer)
    said = json.loads((folder / "tokenizer_config.json").read_text())
    assert said["additional_special_tokens"] == ["you", "fine"] == tokenizer.extra_special_tokens
    assert said["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert AutoTokenizer.from_pretrained(folder).extra_special_tokens == ["you", "fine"]


# ---- Scores and answers by plain transformers


def scores_of(model: Any, tokenizer: Any) -> list[list[float]]:
    """Scores of TEXTS alone, and in batches padded on either side."""
    batches = [[text] for text in TEXTS]
    inputs = [tokenizer(batch, return_tensors="pt") for batch in batches]
    inputs += [tokenizer(TEXTS, return_tensors="pt", padding=True, padding_side=s) for s in ("right", "left")]
    with torch.no_grad():
        alone, *padded = [], *(model(**one).logits[:, 0].tolist() for one in inputs[len(TEXTS) :])
        alone = [model(**one).logits[0, 0].item() for one in inputs[: len(TEXTS)]]
    return [alone, *padded]


@pytest.mark.parametrize("fixture", ["older_base", "older_composite"])
@pytest.mark.parametrize("kind", ["reward", "reward_lora"])
def test_a_reward_model_scores_alone_as_in_a_padded_batch(kind, fixture, request):
    folder, tokenizer, model = export(request.getfixturevalue(fixture), kind)
    ours = [model(torch.tensor([tokenizer(text).input_ids])).logits.item() for text in TEXTS]
    reader = AutoTokenizer.from_pretrained(folder)
    loaded = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert loaded.config.get_text_config().pad_token_id == reader.pad_token_id != reader.eos_token_id
    for scores in scores_of(loaded, reader):
        assert scores == pytest.approx(ours, abs=1e-5)
    by_pipeline = transformers.pipeline("text-classification", model=loaded, tokenizer=reader)(TEXTS)
    assert [row["score"] for row in by_pipeline] == pytest.approx(ours, abs=1e-5)
    assert {row["label"] for row in by_pipeline} == {"reward"} and has_saved_head(str(folder))
    assert abs(ours[0] - ours[1]) > 1e-3, "scores that do not differ would prove nothing"


@pytest.mark.parametrize("base_pad", [None, 0, 7])
def test_an_adapter_of_a_reward_model_scores_under_peft_as_its_export(
    base_pad, older_base, monkeypatch, capfd
):
    """From any folder. PAD comes from the base's configuration, where it may be missing or the EOS."""
    edit(older_base / "config.json", {"pad_token_id": base_pad})
    monkeypatch.chdir(older_base.parent)
    folder, _, model = export(Path("base"), "reward_lora")
    monkeypatch.chdir("/")
    folder = older_base.parent / folder
    adapter = folder.with_name("reward_lora_adapter")
    reader = AutoTokenizer.from_pretrained(adapter)
    loaded = AutoPeftModelForSequenceClassification.from_pretrained(adapter, num_labels=1).eval()
    rows = loaded.get_input_embeddings().weight
    with torch.no_grad():  # PEFT draws the row of the new EOS anew
        rows[reader.eos_token_id] = model.get_input_embeddings().weight[reader.eos_token_id]
    assert ("set its config.pad_token_id to" in capfd.readouterr().err) == (base_pad != reader.pad_token_id)
    if base_pad == 0:
        assert reader.pad_token_id == 0, "the one that PEFT takes, where it is no ordinary token"
    else:
        loaded.config.pad_token_id = reader.pad_token_id
    whole = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    expected = scores_of(whole, AutoTokenizer.from_pretrained(folder))[0]
    for scores in scores_of(loaded, reader):
        assert scores == pytest.approx(expected, abs=1e-5)


def test_a_pad_that_is_there_is_taken_before_one_is_added(make_tokenizer, older_base):
    """The rows of an adapter's base cannot grow."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<fim_pad>", "<pad>"]})
    model = AutoModelForCausalLM.from_pretrained(older_base)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(older_base)
    tokenizer.save_pretrained(older_base)
    for kind in ("sft", "reward_lora"):
        folder, loaded, _ = export(older_base, kind)
        assert AutoTokenizer.from_pretrained(folder).pad_token == "<pad>"
        assert len(AutoTokenizer.from_pretrained(folder)) == len(loaded)


ROLES = [
    ("user",), ("user", "assistant"), ("system", "user"), ("system", "user", "assistant"),
    ("user", "assistant", "user"), ("user", "assistant", "user", "assistant"), ("user", "user"),
    ("assistant", "user"),
]  # fmt: skip
CONTENTS = [
    "Hi", "  wide \n", "a\n\nHuman: b", "end<|endoftext|>", "end <|endoftext|> \n", "", "<|endoftext|>",
    "\u00a0thin\u2003", "{{ x }} {% raw %}", "é \U0001f600",
]  # fmt: skip


@pytest.mark.parametrize("bos", [None, "<bos>"])
@pytest.mark.parametrize("name", ["human_assistant", "one_line", "plain"])
def test_a_form_as_a_chat_template_is_the_same_text_and_tokens(name, bos, make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    if bos:
        tokenizer.add_special_tokens({"bos_token": bos})
        tokenizer.backend_tokenizer.post_processor = (
            transformers.tokenization_utils_tokenizers.processors.TemplateProcessing(
                single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
            )
        )
    template = build_template(name, tokenizer)
    assert (template.bos_id is None) == (bos is None)
    tokenizer.chat_template = template.chat_template
    for roles in ROLES:
        for start in range(len(CONTENTS)):
            contents = [CONTENTS[(start + 3 * turn) % len(CONTENTS)] for turn in range(len(roles))]
            dialogue = [Message(*turn) for turn in zip(roles, contents, strict=True)]
            shown = [{"role": message.role, "content": message.content} for message in dialogue]
            asked = template.segments(dialogue, None, learn_all_turns=True)
            check_text(template, asked, tokenizer, shown, add_generation_prompt=True)
            if roles[-1] == "assistant":
                *prompt, answer = dialogue
                whole = template.segments(prompt, answer.content, learn_all_turns=True)
                check_text(template, whole, tokenizer, shown, add_generation_prompt=False)
    with pytest.raises(Exception, match="system, user and assistant alone"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}])
    with pytest.raises(Exception, match="texts of system, user and assistant alone"):
        tokenizer.apply_chat_template([{"role": "user", "content": [{"type": "text", "text": "x"}]}])


def check_text(template, segments, tokenizer, shown, **options) -> None:
    text = tokenizer.apply_chat_template(shown, tokenize=False, **options)
    assert text.removeprefix(tokenizer.bos_token or "") == "".join(segment.text for segment in segments)
    ids = tokenizer.apply_chat_template(shown, return_dict=True, **options)["input_ids"]
    assert ids == template.encode(segments, 10_000).input_ids


def test_a_pipeline_answers_in_the_form_that_was_trained_and_stops(older_base):
    """Whatever chat template the base has."""
    (older_base / "chat_template.jinja").write_text("{{ messages[0]['content'] }}<|im_start|>")
    tokenizer = load_tokenizer(str(older_base), eot_token="<eot>", add_eot_token=True)
    model = load_causal_lm(ModelOptions(str(older_base), dropout=0.0), len(tokenizer))
    template = build_template("human_assistant", tokenizer)
    rows = template.encode(template.segments([Message("user", "Who?")], "You.", learn_all_turns=True), 64)
    ids = torch.tensor([rows.input_ids])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(40):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    save_export(older_base.parent / "export", model, tokenizer, metadata={"template": template.name})
    answer = transformers.pipeline("text-generation", model=str(older_base.parent / "export"))
    (row,) = answer([{"role": "user", "content": " Who? "}], max_new_tokens=20, do_sample=False)
    assert row["generated_text"][-1] == {"role": "assistant", "content": " You."}


def test_a_composite_keeps_its_bases_names_of_parts_and_what_reads_its_images(older_composite):
    weights = load_file(older_composite / "model.safetensors")
    older = {name.replace("vision_tower", "vision_tower.vision_model"): w for name, w in weights.items()}
    save_file(older, older_composite / "model.safetensors", {"format": "pt"})
    (older_composite / "preprocessor_config.json").write_text('{"image_mean": [0.5]}')
    edit(older_composite / "tokenizer_config.json", {"extra_special_tokens": {"image_token": "a"}})
    folder, *_ = export(older_composite, "sft")
    assert load_file(folder / "model.safetensors").keys() == older.keys() != weights.keys()
    assert (folder / "preprocessor_config.json").read_text() == '{"image_mean": [0.5]}'
    saved = json.loads((folder / "tokenizer_config.json").read_text())
    assert saved["extra_special_tokens"] == {"image_token": "a"} and saved["padding_side"] == "left"
    assert (folder / "chat_template.jinja").read_text() == saved["chat_template"]
