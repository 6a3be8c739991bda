"""Exports load with plain transformers and give the same numbers; an interrupted one leaves the old one."""

import json
import shutil

import pytest
import torch
from families import FAMILIES
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from common import checkpoint
from common.checkpoint import read_metadata, save_adapter, save_export
from common.model_inputs import lay_out
from common.models import LoraOptions, ModelOptions, add_lora, compute_logits, load_causal_lm
from common.tokenizer import load_tokenizer
from common.value_model import load_value_model

pytestmark = pytest.mark.usefixtures("process_group")


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


@pytest.mark.parametrize("lora_dim", [0, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_chat_model_loads_with_from_pretrained_and_has_the_same_logits(
    family, lora_dim, tiny_model_folder, tmp_path
):
    folder = tiny_model_folder(family)
    tokenizer = load_tokenizer(folder)
    model = load_causal_lm(ModelOptions(folder, dropout=0.0, pad_vocab_multiple=96), len(tokenizer))
    frozen = {n: p.clone() for n, p in model.named_parameters()}
    model = add_lora(model, LoraOptions(dim=lora_dim, only_optimize_lora=True)).eval()
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


@pytest.mark.parametrize("lora_dim", [0, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_reward_model_is_a_sequence_classifier_with_the_same_scores(
    family, lora_dim, tiny_model_folder, tmp_path
):
    folder = tiny_model_folder(family)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 0, "the hard case: PAD is EOS"
    model = load_value_model(
        ModelOptions(folder, dropout=0.0), len(tokenizer), LoraOptions(dim=lora_dim)
    ).eval()
    shake(model)
    ids, mask, lengths = right_padded(0)
    inputs = lay_out(ids[mask.bool()], lengths, is_flat=False)
    ours = model(inputs, inputs.last_places)
    save_export(tmp_path / "export", model.classifier, tokenizer, needs_own_pad=True)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "export").eval()
    saved_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert saved_tokenizer.pad_token_id not in (None, 0), (
        "EOS as PAD would hide the last token from the pooling"
    )
    padded, mask, _ = right_padded(saved_tokenizer.pad_token_id)
    theirs = loaded(input_ids=padded, attention_mask=mask).logits.squeeze(-1)
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)
    again = load_value_model(ModelOptions(str(tmp_path / "export"), dropout=0.0), len(saved_tokenizer)).eval()
    torch.testing.assert_close(again(inputs, inputs.last_places), ours, atol=1e-5, rtol=1e-5)
    assert ours.std() > 1e-3, "scores that do not differ would prove nothing"


def test_the_adapter_loads_with_peft_over_the_base_model(tiny_model_folder, tmp_path):
    folder = tiny_model_folder("llama")
    model = load_causal_lm(ModelOptions(folder, dropout=0.0), 320)
    model = add_lora(model, LoraOptions(dim=3, only_optimize_lora=True)).eval()
    shake(model)
    ids, mask, _ = right_padded(0)
    logits = compute_logits(model, ids, mask)
    save_adapter(tmp_path / "adapter", model)
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter"
    ).eval()
    torch.testing.assert_close(compute_logits(loaded, ids, mask), logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("published", "kept"),
    [
        ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9, "do_sample": True}),
        ({"length_penalty": 2.0}, {}),
        ({"eos_token_id": [3, 4], "max_length": 99}, {"max_length": 99}),
    ],
)
def test_a_generation_configuration_that_transformers_would_not_save_is_no_obstacle(
    published, kept, tiny_model_folder, tmp_path
):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_folder("llama"), folder)
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | published))
    tokenizer = load_tokenizer(str(folder))
    model = load_causal_lm(ModelOptions(str(folder)), len(tokenizer))
    before = model.generation_config
    save_export(tmp_path / "export", model, tokenizer)
    assert model.generation_config is before
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "export").generation_config.to_dict()
    assert {name: saved.get(name) for name in kept} == kept
    assert (saved["eos_token_id"], saved["pad_token_id"]) == (0, 0)


@pytest.mark.parametrize("what", ["weights", "tokenizer"])
def test_an_export_that_fails_in_the_middle_leaves_the_old_one(
    what, tiny_model_folder, tmp_path, monkeypatch
):
    folder = tiny_model_folder("llama")
    tokenizer = load_tokenizer(folder)
    model = load_causal_lm(ModelOptions(folder), len(tokenizer))
    save_export(tmp_path / "export", model, tokenizer, metadata={"run": 1})
    before = sorted(p.name for p in (tmp_path / "export").iterdir())

    def fail(*args, **kwargs):
        raise OSError("no space left on device")

    if what == "weights":
        monkeypatch.setattr(checkpoint, "_write_model", fail)
    else:
        monkeypatch.setattr(type(tokenizer), "save_pretrained", fail)
    with pytest.raises(OSError, match="no space"):
        save_export(tmp_path / "export", model, tokenizer, metadata={"run": 2})
    assert sorted(p.name for p in (tmp_path / "export").iterdir()) == before
    assert json.loads((tmp_path / "export" / checkpoint.METADATA_FILE).read_text()) == {"run": 1}
    AutoModelForCausalLM.from_pretrained(tmp_path / "export")
