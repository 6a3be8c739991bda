"""What adapters do not reach is said, or refused by its name."""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from tiny_configs import tiny_config
from transformers import AddedToken, AutoModelForCausalLM

from common.data.tokenizer import load_tokenizer, num_token_ids
from common.flags.args import Problems
from common.models.loading import ModelOptions, load_causal_lm
from common.models.lora import LoraOptions, add_lora
from common.programs.model_checks import check_lora, check_new_tokens
from common.ranks import distributed
from common.runs.export import save_export
from step1_sft.arguments import SFTArguments

STACKED = ("mixtral", "qwen2_moe", "qwen3_moe")


def sft_flags(**more) -> SFTArguments:
    return SFTArguments(model_name_or_path="m", data_path=["d"], **more)


def adapted(folder: Path, **more):
    return add_lora(load_causal_lm(ModelOptions(str(folder)), 1), LoraOptions(dim=2, **more))


@pytest.fixture
def save_model(tmp_path):
    def save(family: str, num_rows: int = 320) -> Path:
        AutoModelForCausalLM.from_config(tiny_config(family, num_rows)).save_pretrained(tmp_path / family)
        return tmp_path / family

    return save


@pytest.mark.parametrize("family", [*STACKED, "llama"])
def test_a_line_says_which_share_the_adapters_reach(family, save_model, capfd):
    distributed.say_once.cache_clear()  # another test may have had the same model
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
    assert (f"{stacked / total:.1%} are stacked matrices" in said) == (family in STACKED)


@pytest.mark.parametrize("family", STACKED)
def test_experts_alone_are_refused_with_the_true_reason_and_the_cure_trains_them(family, save_model):
    problems = Problems()
    check_lora("--lora_module_name", tiny_config(family, 320), "experts", sft_flags(lora_dim=2), problems)
    [problem] = problems.messages
    assert "'experts' means 4 stacked matrices, such as model.layers.0.mlp.experts" in problem
    assert "--only_optimize_lora false trains them whole" in problem
    model = adapted(save_model(family), module_name="q_proj", only_optimize_lora=False)
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    assert experts and all(p.requires_grad for p in experts)


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
    assert "1 tokens behind them (<|end|>): adapters do not train rows" in problem
    messages, [note] = check(only_optimize_lora=False)
    assert messages == [] and "<|end|>): their rows begin as the mean of the others" in note

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
    assert "2 tokens behind them" in problems.messages[0]
