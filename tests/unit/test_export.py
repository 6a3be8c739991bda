"""Exports load with plain transformers and give the same numbers; an interrupted one leaves the old one."""

import json
import shutil
from unittest.mock import Mock

import pytest
import torch
from disk_limit import files_up_to
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification, LoraConfig, get_peft_model
from plain_logits import compute_logits
from safetensors.torch import load_file, save_file
from tiny_configs import FAMILIES
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig

from common.data.tokenizer import load_tokenizer
from common.flags.args import Problems
from common.models.loading import ModelOptions, load_causal_lm
from common.models.lora import LoraOptions, add_lora
from common.models.model_inputs import build_model_inputs
from common.models.value_model import load_value_model
from common.programs.training_loop import facts_at
from common.runs import durable_files
from common.runs.durable_files import SaveFailed
from common.runs.export import read_metadata, save_adapter, save_export
from serving.answering import Sampling, load_answerer, load_template, merge_adapter
from serving.arguments import AnsweringArguments
from step3_ppo.arguments import PPOArguments
from step3_ppo.main import build_metadata

pytestmark = pytest.mark.usefixtures("process_group")


# Each family once, every other one with LoRA.
CASES = [(family, 3 * (i % 2)) for i, family in enumerate(FAMILIES)]


def right_padded(pad_id: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three rows that end with EOS (id 0), padded on the right: ids, mask, lengths."""
    generator = torch.Generator().manual_seed(2)
    lengths = torch.tensor([4, 9, 6])
    mask = torch.arange(9) < lengths[:, None]
    ids = torch.where(mask, torch.randint(1, 300, (3, 9), generator=generator), pad_id)
    ids[torch.arange(3), lengths - 1] = 0
    return ids, mask.long(), lengths


def shake(model: torch.nn.Module) -> None:
    """Give every trained weight another value: LoRA's B begins at zero."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


@pytest.mark.parametrize(("family", "lora_dim"), CASES)
def test_a_chat_model_loads_with_from_pretrained_and_has_the_same_logits(
    family, lora_dim, tiny_model_folder, tmp_path
):
    folder = tiny_model_folder(family)
    tokenizer = load_tokenizer(folder)
    model = load_causal_lm(ModelOptions(folder, dropout=0.0, pad_vocab_multiple=96), len(tokenizer))
    frozen = {n: p.clone() for n, p in model.named_parameters()}
    model = add_lora(model, LoraOptions(dim=lora_dim, alpha=2 * lora_dim)).eval()
    shake(model)
    ids, mask, _ = right_padded(0)
    logits = compute_logits(model, ids, mask)
    save_export(tmp_path / "export", model, tokenizer, metadata={"template": "human_assistant"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    num_rows = loaded.get_input_embeddings().weight.shape[0]
    assert num_rows == loaded.config.vocab_size == len(tokenizer), "the vocabulary padding must be cut off"
    found = compute_logits(loaded, ids, mask)
    torch.testing.assert_close(found, logits[..., :num_rows], atol=1e-5, rtol=1e-5)
    assert loaded.config.use_cache and not model.config.use_cache
    if lora_dim:  # merging must not touch the trained model
        for name, weight in model.get_base_model().named_parameters():
            plain = name.replace(".base_layer.", ".")
            if "lora_" not in name:
                assert weight.equal(frozen[plain]), name
    assert AutoTokenizer.from_pretrained(tmp_path / "export").eos_token == tokenizer.eos_token
    assert read_metadata(str(tmp_path / "export")) == {"template": "human_assistant"}


@pytest.mark.parametrize("multiple", [1, 100])
def test_rows_that_no_token_has_are_exported_too(multiple, tiny_model_folder, tmp_path):
    """Published models have more rows than their tokenizer has tokens; what is padded here is cut off."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder("llama"))
    model.resize_token_embeddings(384, mean_resizing=False)
    model.save_pretrained(tmp_path / "base")
    tokenizer, expected = load_tokenizer(tiny_model_folder("llama")), model.state_dict()
    for _ in range(2):  # what it gives is taken as it was
        options = ModelOptions(str(tmp_path / "base"), dropout=0.0, pad_vocab_multiple=multiple)
        loaded = load_causal_lm(options, len(tokenizer))
        assert loaded.config.vocab_size == max(384, 4 * multiple)
        save_export(tmp_path / "base", loaded, tokenizer)
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        assert found.config.vocab_size == 384 > len(tokenizer)
        for name, weight in found.state_dict().items():
            assert weight.equal(expected[name]), name


@pytest.mark.parametrize(("family", "lora_dim"), CASES)
def test_a_reward_model_is_a_sequence_classifier_with_the_same_scores(
    family, lora_dim, tiny_model_folder, tmp_path
):
    folder = tiny_model_folder(family)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 0, "the hard case: PAD is EOS"
    model = load_value_model(
        ModelOptions(folder, dropout=0.0), len(tokenizer), LoraOptions(dim=lora_dim, alpha=2 * lora_dim)
    ).eval()
    shake(model)
    ids, mask, lengths = right_padded(0)
    inputs = build_model_inputs(ids[mask.bool()], lengths, is_packed=False)
    ours = model(inputs, inputs.last_slots)
    save_export(tmp_path / "export", model.classifier, tokenizer, needs_own_pad=True)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "export").eval()
    saved_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert saved_tokenizer.pad_token_id not in (None, 0), "EOS as PAD would hide the last token"
    padded, mask, _ = right_padded(saved_tokenizer.pad_token_id)
    theirs = loaded(input_ids=padded, attention_mask=mask).logits.squeeze(-1)
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)
    again = load_value_model(ModelOptions(str(tmp_path / "export"), dropout=0.0), len(saved_tokenizer)).eval()
    torch.testing.assert_close(again(inputs, inputs.last_slots), ours, atol=1e-5, rtol=1e-5)
    assert ours.std() > 1e-3, "scores that do not differ would prove nothing"


@pytest.mark.parametrize("has_head", [False, True], ids=["chat", "score"])
def test_an_adapter_is_the_exported_model_for_peft_and_for_us(
    has_head, tiny_model_folder, make_tokenizer, tmp_path
):
    """To the bit with the embedding of a token that the base model lacks."""
    folder, lora = tiny_model_folder("llama"), LoraOptions(dim=3, alpha=6)
    tokenizer = load_tokenizer(folder, eot_token="<eot>", add_eot_token=True)
    options = ModelOptions(folder, dropout=0.0)
    if has_head:
        model = load_value_model(options, len(tokenizer), lora, seed=1).classifier
    else:
        model = add_lora(load_causal_lm(options, len(tokenizer)), lora)
    shake(model)
    save_export(tmp_path / "export", model, tokenizer)
    adapter = str(tmp_path / "adapter")
    save_adapter(adapter, model, tokenizer, metadata={"template": "plain"})
    export = (AutoModelForSequenceClassification if has_head else AutoModelForCausalLM).from_pretrained(
        tmp_path / "export"
    )
    if has_head:
        ours = merge_adapter(load_value_model(options, len(tokenizer), seed=2).classifier, adapter)
    else:
        problems, args = Problems(), AnsweringArguments(dtype="fp32")
        template = load_template("--path", adapter, args, problems)
        assert template.name == "plain" and len(template.tokenizer) == len(tokenizer) == 321
        ours = load_answerer(adapter, template, args, Sampling(4)).model
    weights = ours.state_dict()
    assert all(weights[name].equal(weight) for name, weight in export.state_dict().items())

    auto_class = AutoPeftModelForSequenceClassification if has_head else AutoPeftModelForCausalLM
    by_peft = auto_class.from_pretrained(adapter, **({"num_labels": 1} if has_head else {})).eval()
    ids = torch.arange(1, 9).view(1, 8)
    theirs = by_peft(input_ids=ids).logits[..., :320]  # PEFT draws the new token's row anew
    torch.testing.assert_close(theirs, export.eval()(input_ids=ids).logits[..., :320], atol=1e-5, rtol=1e-5)


def test_what_peft_alone_can_train_is_merged_too(tiny_model_folder, tmp_path):
    folder, ids = tiny_model_folder("llama"), torch.arange(1, 9).view(1, 8)
    model = load_causal_lm(ModelOptions(folder, dropout=0.0), 320)
    config = LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"], use_dora=True)
    adapted = get_peft_model(model, config, autocast_adapter_dtype=False).eval()
    shake(adapted)
    adapted.save_pretrained(tmp_path, save_embedding_layers=False)
    merged = merge_adapter(load_causal_lm(ModelOptions(folder, dropout=0.0), 320), str(tmp_path)).eval()
    torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, atol=1e-5, rtol=1e-5)


def test_no_adapter_is_written_when_more_was_trained(tiny_model_folder, tmp_path, tiny_tokenizer):
    model = load_causal_lm(ModelOptions(tiny_model_folder("llama")), 320)
    model = add_lora(model, LoraOptions(2, only_optimize_lora=False))
    save_adapter(tmp_path / "a", model, tiny_tokenizer, {})
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_weights_that_were_unpacked_are_exported_as_they_are(method, tiny_tokenizer, tmp_path):
    config = LlamaConfig(vocab_size=320, hidden_size=128, intermediate_size=128, num_hidden_layers=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    for name in [name for name in weights if "proj" in name and method == "fp8"]:
        scale = weights[name].abs().max() / 448
        weights[f"{name}_scale_inv"] = scale.view(1, 1)
        weights[name] = (weights[name] / scale).to(torch.float8_e4m3fn)
    save_file(weights, path, {"format": "pt"})
    scheme = {"quant_method": method} | ({"weight_block_size": [128, 128]} if method == "fp8" else {})
    said = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": scheme}
    (tmp_path / "config.json").write_text(json.dumps(said))
    model = load_causal_lm(ModelOptions(str(tmp_path)), 320).eval()
    save_export(tmp_path / "export", model, tiny_tokenizer)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    ids = torch.arange(3, 12)[None]
    torch.testing.assert_close(read(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("published", "stops", "dropped"),
    [
        ({"temperature": 0.6, "do_sample": True, "eos_token_id": [3, 4]}, [0, 3, 4], []),
        ({"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}, 0, ["temperature", "top_p"]),
        ({"do_sample": True, "top_p": 0.8, "length_penalty": 2.0}, 0, ["length_penalty"]),
        ({"num_beams": 3, "length_penalty": 2.0, "eos_token_id": [7, 0]}, [0, 7], []),
        ({"eos_token_id": 5}, [0, 5], []),
        ({"eos_token_id": None}, 0, []),
    ],
)
def test_a_generation_configuration_keeps_all_that_transformers_would_save(
    published, stops, dropped, tiny_model_folder, tmp_path, capfd
):
    """With the tokenizer's EOS first among the tokens that stop."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_folder("llama"), folder)
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | published))
    tokenizer = load_tokenizer(str(folder))
    model = load_causal_lm(ModelOptions(str(folder)), len(tokenizer))
    before = model.generation_config
    save_export(tmp_path / "export", model, tokenizer)
    assert model.generation_config is before
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "export").generation_config
    saved.do_sample = bool(saved.do_sample)
    saved.save_pretrained(tmp_path)  # changed, it can still be saved
    kept = {name: value for name, value in published.items() if name not in dropped}
    kept |= {"eos_token_id": stops, "pad_token_id": 0} | dict.fromkeys(dropped)
    assert {name: getattr(saved, name) for name in kept} == kept
    said = capfd.readouterr().err
    assert (", ".join(dropped) in said) if dropped else ("without the base's" not in said)


def test_an_evaluation_before_training_is_none_of_a_trained_model():
    """As where an export is made of a checkpoint before the first evaluation that followed."""
    before, after = ({"eval_perplexity": 9.5, "eval_step": step} for step in (0, 4))
    assert facts_at(0, before) == before and facts_at(6, after) == after
    assert facts_at(6, before | {"objective/score": 1.0}) == {"objective/score": 1.0}
    assert facts_at(6, {"eval_perplexity": 9.5}) == {"eval_perplexity": 9.5}, "of an earlier version"
    flags = PPOArguments(template="plain")
    held_out = {"metrics": {"eval/score": 2.0}, "step": 0}
    assert "eval" not in build_metadata(flags, 6, {}, held_out)
    metadata = build_metadata(flags, 6, {"objective/kl": 0.5}, held_out | {"step": 3})
    assert metadata == {
        "step": "ppo", "num_steps": 6, "template": "plain", "last_step": {"objective/kl": 0.5},
        "eval": {"eval/score": 2.0}, "eval_step": 3,
    }  # fmt: skip
    assert "eval" not in build_metadata(flags, 6, {}, {})


# ---- The place of an earlier one


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_export_that_fails_in_the_middle_leaves_the_old_one(tiny_model_folder, tmp_path, monkeypatch):
    """A limit on the size of files fails the weights as a full disk does, in the library that writes them."""
    folder, tokenizer = tmp_path / "export", load_tokenizer(tiny_model_folder("llama"))
    model = load_causal_lm(ModelOptions(tiny_model_folder("llama")), len(tokenizer))
    save_export(folder, model, tokenizer, metadata={"run": 1})
    before = contents(folder)
    with files_up_to(10_000), pytest.raises(SaveFailed, match="SafetensorError.*File too large"):
        save_export(folder, model, tokenizer, metadata={"run": 2})
    monkeypatch.setattr(durable_files, "sync", Mock(side_effect=OSError(5, "Input/output error")))
    told = f"{folder}.*Input/output error.*its earlier content is unchanged"
    with pytest.raises(SaveFailed, match=told):
        save_export(folder, model, tokenizer, metadata={"run": 2})
    assert contents(folder) == before and [path.name for path in tmp_path.iterdir()] == ["export"]
