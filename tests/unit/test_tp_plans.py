"""Where weights are cut for tensor parallelism: ranges by hand, covers, errors, and the sum of parts."""

from typing import Any

import pytest
import torch
import transformers
from tiny_configs import tiny_config
from torch import nn

from common.generation import tp_plans
from common.generation.inference_module import cut_module
from common.generation.tp_plans import (
    PLANS,
    Column,
    Cut,
    NoPlan,
    Part,
    Row,
    build_cuts,
    register_tp_plan,
    working_tp_sizes,
)

MODELS = (
    "opt", "gpt2", "gptj", "gpt_neox", "bloom", "falcon", "falcon_alibi", "falcon_new",
    "llama", "qwen3", "phi",
)  # fmt: skip


def make_model(family: str, **changes: Any) -> nn.Module:
    """Return a model on the meta device."""
    config = tiny_config(family, 320)
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("family", "tp_size"), [(f, t) for f in MODELS for t in (2, 4) if (f, t) != ("falcon_new", 4)]
)
def test_the_parts_cover_every_weight(family, tp_size):
    model = make_model(family)
    cuts = build_cuts(model, tp_size)
    for name, parameter in model.named_parameters():
        if name in cuts:
            of_ranks = [[i for a, b in ranges for i in range(a, b)] for ranges in cuts[name].ranges]
            assert len(of_ranks) == tp_size and len({*map(len, of_ranks)}) == 1  # equal shapes on all ranks
            indices = sorted(index for part in of_ranks for index in part)
            assert sorted({*indices}) == list(range(parameter.shape[cuts[name].dim]))
        elif parameter.ndim == 1:  # a norm, or a bias that is added after the sum
            after_sum = ("o_proj", "out_proj", "c_proj", "fc2", "fc_out", "dense", "dense_4h_to_h")
            is_norm = any(word in name for word in ("norm", "ln_", "ln."))
            assert is_norm or name.split(".")[-2] in after_sum, name
        else:
            assert "wpe" in name or "embed_positions" in name, name


def test_gpt2_cuts_queries_keys_and_values_each():
    cuts = build_cuts(make_model("gpt2"), 2)
    ranges = (((0, 16), (32, 48), (64, 80)), ((16, 32), (48, 64), (80, 96)))
    name = "transformer.h.1.attn.c_attn"
    assert cuts[f"{name}.weight"] == Cut(1, ranges)  # Conv1D: (inputs, outputs)
    assert cuts[f"{name}.bias"] == Cut(0, ranges)
    assert cuts["transformer.h.1.attn.c_proj.weight"] == Cut(0, (((0, 16),), ((16, 32),)))
    assert "transformer.h.1.attn.c_proj.bias" not in cuts
    assert "transformer.wpe.weight" not in cuts


@pytest.mark.parametrize("name", ["gpt_neox", "bloom", "falcon_alibi"])
def test_interleaved_heads_stay_together(name):
    for key, cut in build_cuts(make_model(name), 4).items():
        if "query_key_value" in key:
            assert cut == Cut(0, (((0, 24),), ((24, 48),), ((48, 72),), ((72, 96),)))


def test_falcons_share_key_and_value_heads():
    name = "transformer.h.0.self_attention.query_key_value.weight"
    one = Cut(0, (((0, 16), (32, 48)), ((16, 48),)))  # all queries, then the only key and value
    assert build_cuts(make_model("falcon"), 2)[name] == one
    groups = Cut(0, (((0, 32),), ((32, 64),)))  # two queries, their key and value, twice
    assert build_cuts(make_model("falcon_new"), 2)[name] == groups


def test_llama_with_fewer_key_heads_than_ranks():
    name = "model.layers.0.self_attn"
    four = build_cuts(make_model("llama", attention_bias=True), 4)
    assert four[f"{name}.q_proj.weight"].ranges == (((0, 8),), ((8, 16),), ((16, 24),), ((24, 32),))
    shared = (((0, 8),), ((0, 8),), ((8, 16),), ((8, 16),))
    for key in ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias"):
        assert four[f"{name}.{key}"] == Cut(0, shared)
    assert f"{name}.o_proj.bias" not in four  # added once, after the sum


def test_the_vocabulary_is_cut_by_rows_where_it_can_be():
    tied, untied = (build_cuts(make_model("llama", tie_word_embeddings=tied), 2) for tied in (True, False))
    rows = Cut(0, (((0, 160),), ((160, 320),)))
    assert tied["model.embed_tokens.weight"] == rows and "lm_head.weight" not in tied
    assert untied["model.embed_tokens.weight"] == untied["lm_head.weight"] == rows
    assert build_cuts(make_model("gptj"), 2)["lm_head.bias"] == rows
    odd = build_cuts(make_model("llama", vocab_size=321), 2)
    assert odd and not {"model.embed_tokens.weight", "lm_head.weight"} & odd.keys()


@pytest.mark.parametrize(
    ("family", "changes", "size", "working", "message"),
    [
        ("opt", {}, 3, "1, 2, 4", "3 does not divide the 4 attention heads"),
        ("falcon_new", {}, 4, "1, 2", "4 does not divide the 2 groups of attention heads"),
        (
            "llama",
            {"num_attention_heads": 12, "hidden_size": 96, "num_key_value_heads": 3, "intermediate_size": 96},
            2,
            "1, 3, 6, 12",
            "2 neither divides nor is a multiple of the 3 key/value heads of .*k_proj",
        ),
    ],
)
def test_a_size_that_does_not_fit_names_those_that_do(family, changes, size, working, message):
    model = make_model(family, **changes)
    assert working_tp_sizes(model) == [int(size) for size in working.split(", ")]
    with pytest.raises(ValueError, match=f"--inference_tp_size {message}") as raised:
        build_cuts(model, size)
    assert str(raised.value).endswith(f"sizes that work for this model: {working}")


@pytest.fixture
def mpt(monkeypatch) -> nn.Module:
    """A model of a family without a plan; what a test registers is taken back."""
    monkeypatch.setattr(tp_plans, "PLANS", dict(PLANS))
    config = transformers.MptConfig(d_model=32, n_layers=2, n_heads=4, max_seq_len=64, vocab_size=320)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def test_an_unknown_family_has_no_plan_until_a_user_registers_one(mpt):
    assert working_tp_sizes(mpt) == [1] and build_cuts(mpt, 1) == {}
    cure = "use --inference_tp_size 1, or register .* with register_tp_plan"
    with pytest.raises(NoPlan, match=f"'mpt' has no .* {cure}"):
        build_cuts(mpt, 2)
    register_tp_plan("mpt")(lambda config: {"blocks.*.ffn.up": Column()})
    with pytest.raises(NoPlan, match=r"MptForCausalLM has no blocks\.\*\.ffn\.up"):
        build_cuts(mpt, 2)

    @register_tp_plan("mpt")
    def plan_mlp_only(config):
        parts = (Part(config.d_model * 4, 32),)
        return {"blocks.*.ffn.up_proj": Column(parts), "blocks.*.ffn.down_proj": Row(parts)}

    assert working_tp_sizes(mpt) == [1, 2, 4]
    assert build_cuts(mpt, 2)["transformer.blocks.1.ffn.down_proj.weight"] == Cut(
        1, (((0, 64),), ((64, 128),))
    )


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.MixtralConfig, "'mixtral' cuts .* by '"),
        (transformers.Gemma4TextConfig, "layers of the family 'gemma4_text' differ in their heads"),
    ],
)
def test_a_plan_of_transformers_that_is_not_understood_is_none(config, reason):
    shell = nn.Module()
    shell.config = config()
    with pytest.raises(NoPlan, match=reason):
        build_cuts(shell, 2)


def test_a_plan_that_does_not_fit_the_weights_is_none():
    model = make_model("llama")
    model.model.layers[0].self_attn.sinks = nn.Parameter(torch.empty(4, device="meta"))
    with pytest.raises(NoPlan, match="leaves it out"):
        build_cuts(model, 2)
    model.model.layers[1].self_attn.q_proj = nn.Linear(32, 64, device="meta")  # queries and their gates
    with pytest.raises(NoPlan, match="layers.1.self_attn.q_proj: the plan expects a size of 32, not 64"):
        build_cuts(model, 2)


@pytest.mark.parametrize(("name", "tp_size"), [("opt", 4), ("gpt2", 2), ("falcon_new", 2), ("llama", 2)])
def test_a_cut_module_keeps_names_and_ties_and_lets_the_whole_go(name, tp_size):
    model = make_model(name).to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    cuts = build_cuts(model, tp_size)
    cut_module(model, cuts, tp_rank=tp_size - 1, tp_size=tp_size, group=None)
    parts = dict(model.named_parameters())
    assert [*parts] == [*before]
    for key, parameter in parts.items():
        assert parameter.equal(cuts[key].take(before[key], tp_size - 1) if key in cuts else before[key])
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert (head.weight is embedding.weight) == is_tied
    assert embedding.num_embeddings == head.out_features == 320 // tp_size
