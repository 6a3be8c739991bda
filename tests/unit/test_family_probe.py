"""Families are measured on a small random model: what is right is used, what is wrong named before a load."""

import copy
import sys
import time

import pytest
import torch
import transformers
from pretended_gpu import pretended_gpu
from tiny_configs import CONFIGS, tiny_config
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from common.flags.args import Problems
from common.generation.decode_probe import why_not_generated
from common.models import family_probe
from common.models.attention import takes_packed
from common.models.family_probe import probe_family
from common.models.loading import ModelOptions, load_causal_lm, load_pretrained
from common.models.output_head import LogitOptions
from common.models.replica import build_replica
from common.models.value_model import load_value_model
from common.programs.model_checks import check_length
from serving.answering import load_template
from serving.arguments import AnsweringArguments
from step3_ppo.arguments import PPOArguments
from step3_ppo.checks import check_generation

_TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_TINY |= {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
_STATES = {"layer_types": ["linear_attention", "full_attention"], "num_key_value_heads": 2, "head_dim": 8}
_STATES |= {f"linear_num_{part}_heads": 2 for part in ("key", "value")}
_STATES |= {f"linear_{part}_head_dim": 8 for part in ("key", "value")}
_CPM = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "dim_head": 8, "dim_ff": 64}
_CPM |= {"num_hidden_layers": 2, "prompt_length": 4, "prompt_types": 8, "segment_types": 8}


def config_of(family: str, **more):
    return AutoConfig.for_model(family, **(_TINY | more))


def policy_probe(family: str, **more):
    return probe_family(AutoModelForCausalLM, config_of(family, **more))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (config_of("modernbert-decoder", cls_token_id=0, sep_token_id=0), "its head is more than a matrix"),
        (config_of("roberta", is_decoder=True), "its head is more than a matrix"),
        (config_of("bert", is_decoder=True), "its head is more than a matrix"),
        (transformers.CpmAntConfig(**_CPM), "padded rows: off by"),
        (config_of("rwkv", attention_hidden_size=32), "this pass changes its weights"),
        (config_of("phimoe", num_key_value_heads=2, num_local_experts=4), "set router_jitter_noise to 0"),
    ],
    ids=["modernbert", "roberta", "bert", "cpmant", "rwkv", "phimoe"],
)
def test_a_family_that_we_compute_otherwise_is_refused_by_its_name(config, words, tmp_path):
    refusal = probe_family(AutoModelForCausalLM, config).refusal
    assert words in refusal and config.model_type in refusal and "docs/families.md" in refusal
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"torn")  # nothing is loaded before it is refused
    with pytest.raises(ValueError, match="is not supported"):
        load_causal_lm(ModelOptions(str(tmp_path)), 64)


@pytest.mark.parametrize("family", ["nemotron", "doge"])
def test_rows_that_would_see_each_other_are_padded_and_a_line_says_so(family, tmp_path, capfd):
    config = config_of(family, num_key_value_heads=2, max_position_embeddings=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load_causal_lm(ModelOptions(str(tmp_path)), 64)
    assert not takes_packed(model)
    assert "different results for packed rows" in capfd.readouterr().err


@pytest.mark.parametrize("family", CONFIGS)
def test_the_families_that_we_know_are_right_in_all_ways(family):
    config = tiny_config(family, 64)
    for auto_class in (AutoModelForCausalLM, AutoModelForSequenceClassification):
        probe = probe_family(auto_class, config)
        assert (probe.refusal, probe.note, probe.packs) == ("", "", True)
    assert why_not_generated(config) == why_not_generated(config, by_transformers=True) == ""


@pytest.mark.parametrize(
    ("of", "wrong"),
    [
        ("common.models.attention.Packing.keys_of", lambda self, states: states.roll(1, 2)),
        ("common.models.model_inputs.token_positions", lambda lengths: torch.zeros(lengths.sum()).long()),
        ("common.models.policy_model.read_logit_transform", lambda _: LogitOptions(1.01)),
    ],
    ids=["keys", "positions", "factor"],
)
def test_a_mistake_of_ours_is_measured_too(of, wrong, monkeypatch):
    config = tiny_config("qwen3", 72)
    assert family_probe._measure(copy.deepcopy(config), AutoModelForCausalLM, False).packs
    monkeypatch.setattr(of, wrong)
    probe = family_probe._measure(config, AutoModelForCausalLM, False)
    assert probe.refusal or not probe.packs


_LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


@pytest.mark.parametrize(
    ("config", "limit", "words"),
    [
        (config_of("llama", max_position_embeddings=64), 64, "64 positions"),
        (AutoConfig.for_model("gpt2", n_positions=64), 64, "64 positions"),
        (AutoConfig.for_model("gemma3"), 131072, "131072 positions"),
        (config_of("phi3", original_max_position_embeddings=16, rope_scaling=_LONG), 16, "rotary factors"),
        (config_of("doge", keep_window_size=32), 32, "32 tokens of its keep_window_size"),
        (config_of("bloom"), sys.maxsize - 1, ""),
    ],
    ids=["llama", "gpt2", "gemma3", "phi3", "doge", "bloom"],
)
def test_rows_are_no_longer_than_a_family_computes_alike(config, limit, words):
    for num_tokens in (limit, limit + 1):
        problems = Problems()
        check_length(config, num_tokens, "--max_seq_len", problems)
        assert bool(problems.messages) == (num_tokens > limit and bool(words))
    assert words in "".join(problems.messages)


# ---- generation


def test_a_family_with_a_state_is_named_with_the_way_that_works(tmp_path, tiny_tokenizer):
    config = config_of("qwen3_5_text", **_STATES)
    problems = Problems()
    args = PPOArguments(actor_model_name_or_path="m", data_path=["d"], enable_hybrid_engine=True)
    check_generation(args, config, problems)
    [problem] = problems.messages
    assert "qwen3_5_text carries a state" in problem and "leave --enable_hybrid_engine out" in problem
    args.enable_hybrid_engine = False  # the cure is none if that way is wrong too
    problems = Problems()
    check_generation(args, config, problems)
    assert problems.messages == []

    config.vocab_size = len(tiny_tokenizer)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    problems = Problems()
    load_template("--path", str(tmp_path), AnsweringArguments(), problems)
    assert "carries a state" in problems.messages[0] and "transformers chat" in problems.messages[0]


def test_a_family_that_no_way_decodes_rightly_is_no_actor():
    block = {"block_types": ["recurrent", "recurrent", "attention"], "num_hidden_layers": 3, "lru_width": 32}
    config = config_of("recurrent_gemma", attention_window_size=8, **block)
    problems = Problems()
    args = PPOArguments(actor_model_name_or_path="m", data_path=["d"], enable_hybrid_engine=True)
    check_generation(args, config, problems)
    assert "give an actor of another family" in problems.messages[0]


# ---- value models


def test_a_family_without_a_classifier_is_said_to_have_none(tmp_path):
    config = config_of("granite")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="the family granite has no classifier in transformers") as raised:
        load_value_model(ModelOptions(str(tmp_path)), 64)
    assert "again" not in str(raised.value)


# ---- the replica


@pytest.mark.parametrize(
    "family",
    "llama qwen2 qwen3 qwen3_moe mixtral gemma2 gemma3 gemma3_text gemma4 gpt_oss deepseek_v3 llama4 phi3 "
    "glm4_moe cohere2 olmo2 granite smollm3 qwen3_next qwen3_5 mamba falcon bloom opt gpt_neox".split(),
)
def test_a_large_model_is_tried_in_small(family):
    """The configurations of these are of billions of weights."""
    config = AutoConfig.for_model(family)
    began = time.perf_counter()
    probe = probe_family(AutoModelForCausalLM, config)
    assert (probe.refusal, probe.note) == ("", "")
    assert not (family == "llama4" and why_not_generated(config))  # its chunks are cut in slots too
    assert time.perf_counter() - began < 20  # 0.05 to 0.2 s on a free machine
    assert config.to_dict() == AutoConfig.for_model(family).to_dict()  # untouched


def test_each_kind_of_layer_is_there_once():
    config = AutoConfig.for_model("gemma3_text")
    replica = build_replica(AutoModelForCausalLM, copy.deepcopy(config))
    assert replica.config.layer_types == ["sliding_attention", "full_attention"]
    assert replica.num_parameters() < 2**24


def test_on_a_gpu_it_is_measured_on_the_cpu():
    config = config_of("llama", hidden_size=40, num_attention_heads=2)
    with pretended_gpu():
        probe = probe_family(AutoModelForCausalLM, config)
        slots = why_not_generated(config)
    assert (probe.refusal, probe.note, probe.packs, slots) == ("", "", True, "")


def test_the_memory_of_a_replica_is_given_back(monkeypatch):
    held, build = [], build_replica
    monkeypatch.setattr(family_probe, "build_replica", lambda *a, **k: held.append(build(*a, **k)) or held[0])
    policy_probe("llama", hidden_size=56)
    assert sum(p.numel() for p in held[0].parameters()) == 0
    assert all(p.grad is None for p in held[0].parameters())


def test_random_numbers_go_on_as_without_a_probe():
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    policy_probe("llama", hidden_size=48)
    why_not_generated(config_of("llama", hidden_size=48))
    assert torch.equal(torch.rand(3), expected)


def test_a_family_that_cannot_be_small_is_padded_and_a_line_says_so(monkeypatch, tmp_path, capfd):
    def fail(*_, **__):
        raise KeyError("rope")

    config = config_of("llama", vocab_size=66)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    monkeypatch.setattr("common.models.family_probe.build_replica", fail)
    model = load_pretrained(AutoModelForCausalLM, ModelOptions(str(tmp_path)), 66)
    assert not takes_packed(model)
    assert (
        "the family llama could not be probed on a small model (KeyError: 'rope')" in capfd.readouterr().err
    )
