"""Where weights are cut for tensor parallelism: ranges by hand, covers, errors, and the sum of parts."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from tiny_configs import tiny_config
from torch import nn

from common.generation.inference_module import cut_module
from common.generation.tp_plans import (
    PLANS,
    Column,
    Cut,
    GroupedHeads,
    NoPlan,
    Part,
    Row,
    build_cuts,
    join_ranges,
    register_tp_plan,
    working_tp_sizes,
)

MODELS = (
    "opt", "gpt2", "gptj", "gpt_neox", "bloom", "falcon", "falcon_alibi", "falcon_new",
    "llama", "qwen3", "phi",
)  # fmt: skip
GROUPED = ("llama", "qwen3")  # two key/value heads


def make_model(family: str, **changes: Any) -> nn.Module:
    """Return a model on the meta device."""
    config = tiny_config(family, 320)
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def indices_of(cut: Cut, tp_rank: int) -> list[int]:
    return [i for start, stop in cut.ranges[tp_rank] for i in range(start, stop)]


def shared_of(name: str, tp_size: int) -> tuple[str, ...]:
    """Return the ends of the names of weights whose parts lie on several ranks."""
    if name == "falcon" or (name == "falcon_new" and tp_size == 4):
        return ("query_key_value.weight", "query_key_value.bias")
    if name in GROUPED and tp_size == 4:
        return ("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias")
    return ()


@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_the_parts_cover_every_weight(name, tp_size):
    model = make_model(name)
    cuts = build_cuts(model, tp_size)
    whole = {key: parameter for key, parameter in model.named_parameters() if key not in cuts}
    for key, parameter in model.named_parameters():
        if key not in cuts:
            continue
        parts = [indices_of(cuts[key], rank) for rank in range(tp_size)]
        assert len({len(part) for part in parts}) == 1  # equal shapes on all ranks
        indices = sorted(index for part in parts for index in part)
        if key.endswith(shared_of(name, tp_size)) and shared_of(name, tp_size):
            assert sorted({*indices}) == list(range(parameter.shape[cuts[key].dim]))
            assert len(indices) > len({*indices})
        else:
            assert indices == list(range(parameter.shape[cuts[key].dim]))
    # What stays whole: norms, positions, biases that are added after the sum, OPT's narrow projections.
    for key, parameter in whole.items():
        is_position = "wpe" in key or "embed_positions" in key
        assert parameter.ndim == 1 or is_position or "project_" in key, key
        after_sum = ("o_proj", "out_proj", "c_proj", "fc2", "fc_out", "dense", "dense_4h_to_h")
        is_norm = any(word in key for word in ("norm", "ln_", "ln."))
        assert parameter.ndim > 1 or is_norm or key.split(".")[-2] in after_sum, key


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
    cuts = build_cuts(make_model(name), 4)
    for key, cut in cuts.items():
        if "query_key_value" in key:
            assert cut == Cut(0, (((0, 24),), ((24, 48),), ((48, 72),), ((72, 96),)))


def test_falcon_of_one_key_and_value_head_gives_it_to_all():
    cuts = build_cuts(make_model("falcon"), 2)
    cut = cuts["transformer.h.0.self_attention.query_key_value.weight"]
    assert cut == Cut(0, (((0, 16), (32, 48)), ((16, 48),)))


def test_falcon_in_groups_of_two_queries_a_key_and_a_value():
    name = "transformer.h.0.self_attention.query_key_value.weight"
    assert build_cuts(make_model("falcon_new"), 2)[name] == Cut(0, (((0, 32),), ((32, 64),)))
    ranges = (((0, 8), (16, 32)), ((8, 32),), ((32, 40), (48, 64)), ((40, 64),))
    assert build_cuts(make_model("falcon_new"), 4)[name] == Cut(0, ranges)


def test_llama_with_fewer_key_heads_than_ranks():
    name = "model.layers.0.self_attn"
    two, four = (build_cuts(make_model("llama", attention_bias=True), size) for size in (2, 4))
    assert two[f"{name}.q_proj.weight"] == Cut(0, (((0, 16),), ((16, 32),)))
    assert two[f"{name}.k_proj.weight"] == Cut(0, (((0, 8),), ((8, 16),)))
    assert two[f"{name}.o_proj.weight"] == Cut(1, (((0, 16),), ((16, 32),)))
    assert four[f"{name}.q_proj.weight"].ranges == (((0, 8),), ((8, 16),), ((16, 24),), ((24, 32),))
    shared = (((0, 8),), ((0, 8),), ((8, 16),), ((8, 16),))
    for key in ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias"):
        assert four[f"{name}.{key}"] == Cut(0, shared)
    assert f"{name}.o_proj.bias" not in four  # added once, after the sum


def test_a_tied_vocabulary_is_cut_once_and_untied_ones_both():
    tied, untied = (build_cuts(make_model("llama", tie_word_embeddings=tied), 2) for tied in (True, False))
    rows = Cut(0, (((0, 160),), ((160, 320),)))
    assert tied["model.embed_tokens.weight"] == rows and "lm_head.weight" not in tied
    assert untied["model.embed_tokens.weight"] == untied["lm_head.weight"] == rows


def test_the_bias_of_an_output_head_is_cut_with_it():
    assert build_cuts(make_model("gptj"), 2)["lm_head.bias"] == Cut(0, (((0, 160),), ((160, 320),)))


def test_a_vocabulary_that_cannot_be_dealt_out_stays_whole():
    cuts = build_cuts(make_model("llama", vocab_size=321), 2)
    assert not {"model.embed_tokens.weight", "lm_head.weight"} & cuts.keys()


def test_take_is_a_view_of_one_stretch_and_joins_several():
    tensor = torch.arange(12).view(2, 6)
    cut = Cut(1, (((0, 2),), ((2, 3), (5, 6))))
    assert cut.take(tensor, 0).tolist() == [[0, 1], [6, 7]]
    assert cut.take(tensor, 0).data_ptr() == tensor.data_ptr()
    assert cut.take(tensor, 1).tolist() == [[2, 5], [8, 11]]


def test_groups_are_split_between_ranks_by_their_queries():
    ranges = [join_ranges((GroupedHeads(2, 4, 1),), rank, 4) for rank in range(4)]
    assert ranges == [((0, 2), (4, 6)), ((2, 6),), ((6, 8), (10, 12)), ((8, 12),)]
    assert not GroupedHeads(3, 4, 1).fits(2) and GroupedHeads(3, 4, 1).fits(6)


@pytest.mark.parametrize("name", ["opt", "falcon_new", "llama"])
def test_a_size_that_does_not_fit_names_those_that_do(name):
    model = make_model(name)
    assert working_tp_sizes(model) == [1, 2, 4]
    with pytest.raises(
        ValueError, match="--inference_tp_size 3 does not divide the 4 attention heads"
    ) as raised:
        build_cuts(model, 3)
    assert str(raised.value).endswith("sizes that work for this model: 1, 2, 4")


def test_key_heads_that_are_neither_a_divisor_nor_a_multiple_are_refused():
    model = make_model("llama", num_attention_heads=8, hidden_size=64, num_key_value_heads=4)
    assert working_tp_sizes(model) == [1, 2, 4, 8]
    model = make_model("llama", num_attention_heads=12, hidden_size=96, num_key_value_heads=3)
    message = "--inference_tp_size 2 neither divides nor is a multiple of the 3 key/value heads of .*k_proj"
    with pytest.raises(ValueError, match=message):
        build_cuts(model, 2)


def test_sizes_below_one_are_refused():
    with pytest.raises(ValueError, match="--inference_tp_size 0.*1, 2, 4"):
        build_cuts(make_model("opt"), 0)


@pytest.fixture
def codegen() -> nn.Module:
    """A model of a family without a plan."""
    config = transformers.CodeGenConfig(
        n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=320, rotary_dim=4
    )
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.fixture
def plans() -> Iterator[None]:
    """Take back what a test registers."""
    before = dict(PLANS)
    yield
    PLANS.clear()
    PLANS.update(before)


def test_an_unknown_family_has_no_plan(codegen):
    assert working_tp_sizes(codegen) == [1]
    assert build_cuts(codegen, 1) == {}
    with pytest.raises(
        NoPlan, match="'codegen' has no .* use --inference_tp_size 1, or register .* with register_tp_plan"
    ):
        build_cuts(codegen, 2)


def test_styles_that_are_not_understood_are_no_plan():
    config = transformers.MixtralConfig()
    assert config.base_model_tp_plan
    with pytest.raises(NoPlan, match="'mixtral' cuts .* by '"):
        build_cuts(make_shell(config), 2)


def test_layers_that_differ_in_their_heads_are_no_plan():
    config = transformers.Gemma4TextConfig()
    with pytest.raises(NoPlan, match="layers of the family 'gemma4_text' differ in their heads"):
        build_cuts(make_shell(config), 2)


def make_shell(config: Any) -> nn.Module:
    """Return a module that has a config and nothing else."""
    shell = nn.Module()
    shell.config = config
    return shell


def test_a_plan_that_misses_weights_of_heads_is_no_plan():
    model = make_model("llama")
    model.model.layers[0].self_attn.sinks = nn.Parameter(torch.empty(4, device="meta"))
    with pytest.raises(NoPlan, match="leaves it out"):
        build_cuts(model, 2)


def test_a_projection_of_another_size_is_no_plan():
    model = make_model("llama")
    model.model.layers[1].self_attn.q_proj = nn.Linear(32, 64, device="meta")  # queries and their gates
    with pytest.raises(NoPlan, match="layers.1.self_attn.q_proj: the plan expects a size of 32, not 64"):
        build_cuts(model, 2)


def test_users_register_plans_of_their_own(plans, codegen):
    @register_tp_plan("codegen")
    def plan_mlp_only(config):
        return {
            "h.*.mlp.fc_in": Column((Part(config.n_embd * 4, 32),)),
            "h.*.mlp.fc_out": Row((Part(config.n_embd * 4, 32),)),
        }

    assert working_tp_sizes(codegen) == [1, 2, 4]
    assert build_cuts(codegen, 2)["transformer.h.1.mlp.fc_out.weight"] == Cut(1, (((0, 64),), ((64, 128),)))


def test_a_plan_that_names_nothing_of_the_model_is_no_plan(plans, codegen):
    register_tp_plan("codegen")(lambda config: {"h.*.mlp.up": Column()})
    with pytest.raises(NoPlan, match=r"CodeGenForCausalLM has no h\.\*\.mlp\.up"):
        build_cuts(codegen, 2)


@pytest.mark.parametrize(("name", "tp_size"), [("opt", 4), ("gpt2", 2), ("falcon_new", 4), ("llama", 2)])
def test_a_cut_module_keeps_names_and_ties_and_has_local_shapes(name, tp_size):
    whole, model = make_model(name), make_model(name)
    cuts = build_cuts(model, tp_size)
    cut_module(model, cuts, tp_rank=tp_size - 1, tp_size=tp_size, group=None)
    parts = dict(model.named_parameters())
    assert [*parts] == [key for key, _ in whole.named_parameters()]
    for key, parameter in whole.named_parameters():
        expected = cuts[key].take(parameter, tp_size - 1) if key in cuts else parameter
        assert parts[key].shape == expected.shape
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = whole.get_output_embeddings().weight is whole.get_input_embeddings().weight
    assert (head.weight is embedding.weight) == is_tied
    assert embedding.num_embeddings == head.out_features == 320 // tp_size


def test_real_weights_are_cut_and_the_whole_is_let_go():
    model = make_model("llama").to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    cuts = build_cuts(model, 2)
    cut_module(model, cuts, tp_rank=1, tp_size=2, group=None)
    for key, parameter in model.named_parameters():
        expected = cuts[key].take(before[key], 1) if key in cuts else before[key]
        assert parameter.equal(expected)
        assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()


@pytest.mark.parametrize(("tp_size", "groups"), [(2, 2), (4, 1)])
def test_an_attention_counts_its_own_heads(tp_size, groups):
    llama, gpt2 = make_model("llama"), make_model("gpt2")
    for model in (llama, gpt2):
        cut_module(model, build_cuts(model, tp_size), tp_rank=0, tp_size=tp_size, group=None)
    assert llama.model.layers[0].self_attn.num_key_value_groups == groups
    attention = gpt2.transformer.h[0].attn
    assert (attention.num_heads, attention.split_size, attention.head_dim) == (4 // tp_size, 32 // tp_size, 8)
