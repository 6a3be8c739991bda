"""What adapters reach, experts too, and what of it is said, or refused by its name."""

import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from tiny_configs import tiny_config
from transformers import AddedToken, AutoModelForCausalLM

from common.data.tokenizer import load_tokenizer, num_token_ids
from common.flags.args import Problems
from common.generation.resharding import TPLayout
from common.models.loading import ModelOptions, load_causal_lm, plain_model
from common.models.lora import LoraOptions, adapted_model_targets, add_lora, stacked_names, trained_weights
from common.models.model_flops import ModelFlops
from common.programs.model_checks import check_lora, check_new_tokens
from common.ranks import distributed
from common.runs.export import save_adapter, save_export
from serving.answering import merge_adapter
from step1_sft.arguments import SFTArguments
from tools.planned_model import PlannedModel, plan_switch

STACKED = ("mixtral", "qwen2_moe", "qwen3_moe")


def sft_flags(**more) -> SFTArguments:
    return SFTArguments(model_name_or_path="m", data_path=["d"], **more)


def adapted(base: Path, **more):
    options = LoraOptions(dim=0 if "folder" in more else 2, **more)
    return add_lora(load_causal_lm(ModelOptions(str(base)), 1), options)


@pytest.fixture
def save_model(tmp_path):
    def save(family: str, num_rows: int = 320, std: float = 0.02) -> Path:
        config = tiny_config(family, num_rows)
        config.initializer_range = std
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / family)
        return tmp_path / family

    return save


@pytest.mark.parametrize("family", [*STACKED, "llama"])
def test_a_line_says_which_share_the_adapters_reach(family, save_model, capfd):
    distributed.print_once.cache_clear()  # another test may have had the same model
    model = adapted(save_model(family))
    said = capfd.readouterr().err
    layers = [m for name, m in model.named_modules() if name.endswith(".base_layer")]
    reached = sum(m.weight.numel() for m in layers)
    total = sum(p.numel() for name, p in model.named_parameters() if "lora_" not in name)
    assert (
        f"the adapters reach {len(layers)} matrices, {reached / total:.1%} of the {total:,} weights" in said
    )
    stacked = sum(
        p.numel() for name, p in model.named_parameters() if name.endswith(("up_proj", "down_proj"))
    )
    told = f"{stacked / total:.1%} are stacked matrices, such as experts, which they do not reach"
    assert (f"{told}: the module name 'experts' adds them, '.' adds all matrices" in said) == (
        family in STACKED
    )
    adapted(save_model(family), module_name=".")
    assert "stacked" not in capfd.readouterr().err


def targets_of(family: str, module_name: str) -> tuple[list[str], list[str]]:
    """Return the last two words of the linear layers' and of the stacked matrices' names, of layer 1."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(family, 320))
    found = [n for n in adapted_model_targets(model, module_name) if "layers.1." in n]
    stacked = stacked_names(model)
    words = {True: [], False: []}
    for name in found:
        words[name in stacked].append(".".join(name.split(".")[-2:]))
    return words[False], words[True]


def test_a_name_means_linear_layers_and_experts_and_auto_no_experts():
    experts = ["experts.gate_up_proj", "experts.down_proj"]
    assert targets_of("mixtral", "experts") == targets_of("mixtral", "experts.*proj") == ([], experts)
    assert targets_of("qwen2_moe", "down_proj") == (["shared_expert.down_proj"], experts[1:])
    assert targets_of("gpt_oss", "_proj")[1] == experts  # and no biases of experts
    for family in STACKED:
        (linear, none), (same, every) = targets_of(family, "auto"), targets_of(family, ".")
        assert linear == same and none == [] and every == experts


def test_a_name_that_is_nowhere_names_the_experts_too():
    problems = Problems()
    config = tiny_config("mixtral", 320)
    flags = sft_flags(lora_dim=2, lora_module_name="fc1")
    check_lora("", config, flags, flags, problems)
    [problem] = problems.messages
    assert "'fc1' matches no linear layer and no stacked matrix" in problem and "gate_up_proj" in problem


def add_moved(folder: Path, **more):
    """Return the model with adapters that move it far."""
    model = adapted(folder, alpha=3.0, **more).eval()
    torch.manual_seed(1)
    for weight in trained_weights(model).values():
        if weight.lora_b is not None:
            torch.nn.init.normal_(weight.lora_b, std=0.5)
    return model


def merged_by_hand(model) -> dict[str, torch.Tensor]:
    """Return W_e + alpha/r B_e A_e in float64, expert by expert, from PEFT's own names of the factors.

    A's rows are expert by expert, B's columns rank by rank. The outermost wrapper has the last parameter.
    """
    factors = {n.replace(".default", ""): p.double() for n, p in model.named_parameters() if "lora_" in n}
    found = {}
    for name, stack in model.named_parameters():
        if not name.endswith(("experts.base_layer.base_layer.gate_up_proj", ".down_proj")):
            continue
        wrapper = name.split(".base_layer")[0] + (".base_layer" if "gate_up" in name else "")
        a, b = factors[f"{wrapper}.lora_A.weight"], factors[f"{wrapper}.lora_B.weight"]
        num_experts, rank = len(stack), 2
        whole = stack.double().clone()
        for e in range(num_experts):
            for k in range(rank):
                column, row = b[:, k * num_experts + e], a[e * rank + k]
                delta = 3.0 / rank * torch.outer(column, row)
                whole[e] += delta.T if "gpt_oss" in type(plain_model(model)).__module__ else delta
        found[name.replace(".base_layer", "").removeprefix("base_model.model.")] = whole
    return found


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(1, 13)[None]).logits


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_experts_are_merged_and_computed_as_a_loop_over_them_says(family, save_model):
    folder = save_model(family, std=0.2)
    model = add_moved(folder, module_name="experts")
    expected, weights = merged_by_hand(model), trained_weights(model)
    assert len(expected) == 4 and {n for n, w in weights.items() if w.lora_a is not None} == expected.keys()
    loop = {"dtype": torch.float64, "experts_implementation": "eager"}
    plain = AutoModelForCausalLM.from_pretrained(folder, **loop)
    untouched = logits_of(plain)
    with torch.no_grad():
        for name, whole in expected.items():
            torch.testing.assert_close(weights[name].merged().double(), whole, atol=1e-6, rtol=0)
            plain.get_parameter(name).copy_(whole)
    torch.testing.assert_close(logits_of(model).double(), logits_of(plain), atol=2e-5, rtol=0)
    assert (logits_of(plain) - untouched).abs().max() > 0.1


@pytest.mark.parametrize("module_name", ["experts", "auto", "."])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_plain_peft_and_plain_transformers_compute_what_was_trained(
    family, module_name, save_model, tiny_tokenizer, tmp_path
):
    folder = save_model(family, std=0.2)
    model = add_moved(folder, module_name=module_name)
    expected, base = logits_of(model), AutoModelForCausalLM.from_pretrained(folder)
    assert (expected - logits_of(base)).abs().max() > 0.1
    with model.disable_adapter():
        assert logits_of(model).equal(logits_of(base))
    save_adapter(tmp_path / "adapter", model, tiny_tokenizer, {})
    save_export(tmp_path / "export", model, tiny_tokenizer)
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (config["target_parameters"] or []) == sorted(config["target_parameters"] or [])
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    again = adapted(folder, folder=str(tmp_path / "adapter"))
    for same in (theirs, again):
        assert logits_of(same).equal(expected)
    served = merge_adapter(AutoModelForCausalLM.from_pretrained(folder), str(tmp_path / "adapter"))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    for merged in (exported, theirs.merge_and_unload(), served):
        torch.testing.assert_close(logits_of(merged), expected, atol=5e-5, rtol=0)


def test_new_factors_of_experts_depend_on_the_seed_alone(save_model):
    folder = save_model("mixtral")
    options = ModelOptions(str(folder))

    def factors(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed + 10)  # not this
        model = add_lora(load_causal_lm(options, 1), LoraOptions(dim=2, module_name="experts"), seed)
        weights = trained_weights(model).values()
        assert not any(w.lora_b.any() for w in weights if w.lora_b is not None)
        return [w.lora_a for w in weights if w.lora_a is not None]

    once, again, other = factors(1), factors(1), factors(2)
    assert len(once) == 4 and all(map(torch.equal, once, again)) and not any(map(torch.equal, once, other))
    for a in once:
        assert a.std().item() == pytest.approx(a.shape[1] ** -0.5, rel=0.15)
    assert once[0].shape == (8, 32) and once[1].shape == (8, 64)  # rank times experts, columns


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_moves_the_factors_and_no_expert(checkpointing, save_model):
    folder = save_model("gpt_oss", std=0.2)
    options = ModelOptions(str(folder), dropout=0.0, gradient_checkpointing=checkpointing)
    model = add_lora(load_causal_lm(options, 1), LoraOptions(dim=2, module_name="experts")).train()
    before = {name: p.clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):  # A moves once B is not zero
        model(torch.arange(1, 13)[None]).logits.square().mean().backward()
        optimizer.step()
    moved = {name for name, p in model.named_parameters() if not p.equal(before[name])}
    assert moved == {name for name in before if ".lora_" in name} and len(moved) == 8


def test_all_but_the_adapted_matrices_train_when_asked(save_model):
    model = adapted(save_model("gpt_oss"), module_name="gate_up_proj", only_optimize_lora=False)
    frozen = {n.replace(".base_layer", "") for n, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {f"base_model.model.model.layers.{i}.mlp.experts.gate_up_proj" for i in (0, 1)}


def test_factors_of_experts_count_where_their_experts_do(save_model):
    model = adapted(save_model("mixtral"), module_name="experts")
    flops = ModelFlops(model, plain_model(model).lm_head)
    base = model.unload()
    plain = ModelFlops(base, base.lm_head)
    # Two layers: per expert rank 2 times the sides of both matrices, two of the four experts.
    assert flops.body - plain.body == flops.trained_body == 2 * 2 * 2 * ((32 + 128) + (64 + 32))


def test_a_plan_counts_factors_of_experts_and_the_sums_that_a_pass_makes(save_model):
    folder = str(save_model("mixtral"))
    plain = AutoModelForCausalLM.from_pretrained(folder)
    model = PlannedModel(plain, LoraOptions(dim=2, module_name="experts"))
    assert model.num_trained == 2 * 4 * 2 * ((32 + 128) + (64 + 32))
    assert model.num_params == plain.num_parameters() + model.num_trained
    assert model.num_in_stacks == 2 * 4 * (128 * 32 + 32 * 64)
    assert PlannedModel(plain, LoraOptions(dim=2)).num_in_stacks == 0
    assert plan_switch(model, TPLayout(1, 1), 1, is_sharded=False).new == model.num_in_stacks


def test_new_tokens_are_refused_under_adapters_and_the_cure_trains_their_rows(
    save_model, tiny_tokenizer, tmp_path
):
    num_rows, folder = len(tiny_tokenizer), save_model("llama", len(tiny_tokenizer))
    tiny_tokenizer.save_pretrained(folder)
    tokenizer = load_tokenizer(str(folder), eot_token="<|end|>", add_eot_token=True)

    def check(**flags) -> tuple[list[str], list[str]]:
        problems = Problems()
        args = sft_flags(lora_dim=2, **flags)
        config = tiny_config("llama", num_rows)
        notes = check_new_tokens("--m", config, tokenizer, args, problems, lora_flag="--lora_dim")
        return problems.messages, notes

    [problem], _ = check()
    assert "1 more tokens (<|end|>): adapters do not train embedding rows" in problem
    messages, [note] = check(only_optimize_lora=False)
    assert messages == [] and "<|end|>): their rows are initialised with the mean of the others" in note

    model = load_causal_lm(ModelOptions(str(folder)), num_token_ids(tokenizer))
    model = add_lora(model, LoraOptions(dim=2, only_optimize_lora=False))
    plain = model.get_base_model()
    for weight in (plain.get_input_embeddings().weight, plain.get_output_embeddings().weight):
        assert weight.requires_grad
        weight.data[-1] += 1.0
    save_export(tmp_path / "export", model, tokenizer)
    saved = load_file(tmp_path / "export" / "model.safetensors")["lm_head.weight"]
    assert (saved[-1] - saved[:-1].mean(0)).abs().max() > 0.9


def test_a_new_pad_token_is_no_problem_for_adapters(tiny_tokenizer, tmp_path):
    tiny_tokenizer.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    tokenizer.add_special_tokens({"pad_token": AddedToken("<|pad|>", special=True)})
    problems, config = Problems(), tiny_config("llama", len(tiny_tokenizer))
    [note] = check_new_tokens("--m", config, tokenizer, sft_flags(), problems, lora_flag="--lora_dim")
    assert problems.messages == [] and "<|pad|>" in note
    tokenizer.add_tokens(["<|extra|>"])
    check_new_tokens("--m", config, tokenizer, sft_flags(), problems, lora_flag="--lora_dim")
    assert "2 more tokens" in problems.messages[0]
