"""--load_in_4bit: what is asked for, what is refused, and, where bitsandbytes is, what packed weights are."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from planned_runs import OPT_1B, OPT_350M, ppo
from tiny_configs import tiny_config
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from common.flags.args import Problems
from common.models import four_bit
from common.models.four_bit import BYTES_PER_WEIGHT, incompatible_flags, whole_shape
from common.models.loading import ModelOptions, load_causal_lm, load_pretrained
from common.models.lora import LoraOptions, add_lora, trained_weights
from common.models.model_flops import ModelFlops
from common.programs.model_checks import check_lora
from common.runs.export import save_adapter, save_export
from step1_sft.arguments import SFTArguments
from step3_ppo.arguments import PPOArguments
from tools.memory_plan import MemoryPlan


@pytest.fixture
def library():
    return pytest.importorskip("bitsandbytes")


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (SFTArguments(load_in_4bit=True), ["without --lora_dim"]),
        (SFTArguments(load_in_4bit=True, lora_dim=4, zero_stage=3), ["--zero_stage 3"]),
        (
            SFTArguments(load_in_4bit=True, lora_dim=4, only_optimize_lora=False),
            ["--only_optimize_lora false"],
        ),
        (PPOArguments(load_in_4bit=True), ["without --actor_lora_dim or --critic_lora_dim"]),
        (
            PPOArguments(load_in_4bit=True, critic_lora_dim=4, critic_zero_stage=3, inference_tp_size=2),
            ["--critic_zero_stage 3", "--inference_tp_size 2"],
        ),
        (PPOArguments(load_in_4bit=True, critic_lora_dim=4, actor_zero_stage=2), []),
        (SFTArguments(zero_stage=3), []),
    ],
)
def test_four_bit_flags_are_rejected_with_reasons(args, told, monkeypatch):
    monkeypatch.setattr(four_bit, "find_spec", lambda name: name)
    found = list(incompatible_flags(args))
    assert len(found) == len(told) and all(words in line for words, line in zip(told, found, strict=True))
    monkeypatch.setattr(four_bit, "find_spec", lambda name: None)
    lacking = [line for line in incompatible_flags(args) if "pip install bitsandbytes" in line]
    assert len(lacking) == args.load_in_4bit and len(list(incompatible_flags(args, is_planned=True))) == len(
        told
    )


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_the_base_of_adapters_is_loaded_in_4_bits_and_no_other(role, tiny_model_folder, monkeypatch):
    """The loader stands in for bitsandbytes: what it is asked for."""
    asked = []

    def load(auto_class, path, **more):
        asked.append(more.get("quantization_config"))
        return AutoModelForCausalLM.from_pretrained(path, dtype=more["dtype"])

    monkeypatch.setattr("common.models.loading.load_weights", load)
    path = tiny_model_folder("llama")
    args = PPOArguments(
        actor_model_name_or_path=path, critic_model_name_or_path=path, critic_lora_dim=4, load_in_4bit=True,
        dtype="bf16",
    )  # fmt: skip
    options = ModelOptions.of(args, getattr(args, role), {}, dropout=0.0)
    load_pretrained(AutoModelForCausalLM, options, 320)
    [config] = asked
    if role == "actor":
        assert config is None
    else:
        assert isinstance(config, BitsAndBytesConfig) and config.load_in_4bit
        assert config.bnb_4bit_quant_type == "nf4" and config.bnb_4bit_use_double_quant
        assert config.bnb_4bit_compute_dtype == torch.bfloat16 and config.llm_int8_skip_modules is None


@pytest.fixture
def packed(library, tiny_model_folder):
    """A tiny Llama in 4 bits with adapters that move it, and its whole base."""
    path = tiny_model_folder("llama")
    model = add_lora(load_causal_lm(ModelOptions(path, load_in_4bit=True), 320), LoraOptions(4, alpha=2.0))
    for weight in trained_weights(model).values():
        if weight.lora_b is not None:
            nn.init.normal_(weight.lora_b, std=0.1)
    return model.eval(), AutoModelForCausalLM.from_pretrained(path).eval()


def test_linear_layers_alone_are_packed_and_count_as_what_they_are(packed):
    model, whole = packed
    shapes = {name: weight.shape for name, weight in whole.named_parameters()}
    weights = trained_weights(model)
    in_4bit = {name for name, weight in weights.items() if weight.packing is not None}
    assert in_4bit == {name for name in shapes if "_proj." in name} and weights.keys() == shapes.keys()
    assert all(whole_shape(weights[name].parameter) == shape for name, shape in shapes.items())
    num_bytes = sum(weights[name].parameter.nbytes for name in in_4bit)
    num_weights = sum(shapes[name].numel() for name in in_4bit)
    assert num_bytes == num_weights / 2 and BYTES_PER_WEIGHT == pytest.approx(0.5159, abs=1e-4)
    head = model.get_base_model().lm_head
    plain = ModelFlops(add_lora(whole, LoraOptions(4)), whole.lm_head)
    assert ModelFlops(model, head).body == plain.body


def test_the_file_of_a_packed_base_does_not_stay_in_memory(library, tiny_model_folder, tmp_path):
    folder = shutil.copytree(tiny_model_folder("llama"), tmp_path / "base")
    model = load_causal_lm(ModelOptions(str(folder), load_in_4bit=True), 320)
    maps = Path("/proc/self/maps").read_text()
    assert str(folder) not in maps and len(trained_weights(model)) > 10


def test_a_merged_weight_is_what_its_layer_computes(packed):
    """Each output by the layer's own pass of unit vectors, and near to the weight that was packed."""
    model, whole = packed
    layers = dict(model.get_base_model().named_modules())
    for name, weight in trained_weights(model).items():
        if weight.packing is None:
            continue
        merged, layer = weight.merged(), layers[name.removesuffix(".weight")]
        with torch.no_grad():
            by_unit_vectors = layer(torch.eye(merged.shape[1])).T
        torch.testing.assert_close(merged, by_unit_vectors, rtol=1e-4, atol=1e-5)
        own = whole.get_parameter(name)
        base = weight._replace(lora_a=None, lora_b=None).merged()
        assert 0.01 < (base - own).norm() / own.norm() < 0.5  # so far off are matrices as small as these


def test_an_export_says_what_the_packed_model_says(packed, tiny_tokenizer, tmp_path):
    model, _ = packed
    ids = torch.arange(4, 24).view(2, 10)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        save_export(tmp_path / "export", model, tiny_tokenizer)
        assert model(input_ids=ids).logits.equal(expected), "the export left the model as it was"
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
        assert not hasattr(loaded.config, "quantization_config")
        torch.testing.assert_close(loaded(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_experts_are_adapted_as_they_are_beside_packed_layers(
    family, library, tiny_model_folder, tiny_tokenizer, tmp_path
):
    folder = tiny_model_folder(family)
    options = ModelOptions(folder, dropout=0.0, load_in_4bit=True)
    model = add_lora(load_causal_lm(options, 320), LoraOptions(3, module_name=".")).eval()
    weights, ids = trained_weights(model), torch.arange(4, 24).view(2, 10)
    for weight in weights.values():
        if weight.lora_b is not None:
            nn.init.normal_(weight.lora_b, std=0.1)
    experts = [weight for weight in weights.values() if weight.num_stacked == 4]
    assert experts and all(w.packing is None and w.parameter.dtype == torch.float32 for w in experts)
    assert all((w.lora_a is None) == (w.packing is None) for w in weights.values() if w.num_stacked == 1)
    save_adapter(tmp_path / "adapter", model, tiny_tokenizer, {})
    save_export(tmp_path / "export", model, tiny_tokenizer)
    again = add_lora(load_causal_lm(options, 320), LoraOptions(folder=str(tmp_path / "adapter"))).eval()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        assert again(input_ids=ids).logits.equal(expected)
        torch.testing.assert_close(exported(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_a_pass_in_eval_mode_packs_nothing_anew(packed, library):
    """Where bitsandbytes would: on CPUs with AVX512-BF16."""
    model, _ = packed
    ids = torch.arange(4, 24).view(2, 10)
    before = {name: weight.parameter.clone() for name, weight in trained_weights(model).items()}
    with torch.no_grad():
        in_eval = model.eval()(input_ids=ids).logits
        assert model.train()(input_ids=ids).logits.equal(in_eval)
    assert all(weight.parameter.equal(before[name]) for name, weight in trained_weights(model).items())


def test_four_bit_rejects_gpt2_layers_before_any_is_loaded():
    problems = Problems()
    flags = SFTArguments(load_in_4bit=True, lora_dim=4)
    check_lora("", tiny_config("gpt2", 320), flags, flags, problems)
    check_lora("", tiny_config("llama", 320), flags, flags, problems)
    assert problems.messages == ["--load_in_4bit does not support Conv1D layers (GPT-2); leave it out"]


def test_four_bit_rejects_gpt2_layers():
    layer = SimpleNamespace(source_cls=four_bit.Conv1D)
    with pytest.raises(ValueError, match=r"--load_in_4bit .*GPT-2"):
        four_bit.keep_packed(SimpleNamespace(modules=lambda: [layer]))


@pytest.mark.parametrize("merges", ["auto", "true"])
def test_a_plan_has_the_packed_bases_and_unpacked_weights_to_generate(merges):
    """A layer of OPT has 12 H^2 weights in matrices. The critic has no adapters, and is not packed. Beside a
    base, copies of the factors A suffice: 5 of width H and one of 4 H, and one matrix is unpacked at a time.
    """
    flags = ("--dtype", "bf16", "--actor_lora_dim", "8", "--enable_hybrid_engine", "--merge_adapters", merges)
    plain, packed = (ppo(OPT_1B, OPT_350M, *flags, *more) for more in ((), ("--load_in_4bit",)))
    matrices = 24 * 12 * 2048**2
    assert [role.num_packed for role in packed.roles if not role.spec.uses_actor] == [matrices, 0, 0]
    held, before = (MemoryPlan(run).of_phase("generate").gpu for run in (packed, plain))
    saved = before["actor", "weights"] - held["actor", "weights"]
    assert saved == pytest.approx(matrices * (2 - BYTES_PER_WEIGHT))
    assert held["actor", "slices of weights"] == before["actor", "slices of weights"]
    copied = matrices if merges == "true" else 24 * 8 * 9 * 2048
    assert held["actor", "slices of weights"] == 2 * copied
    assert held["actor", "unpacked weight"] == 2 * 4 * 2048**2 and ("actor", "unpacked weight") not in before
