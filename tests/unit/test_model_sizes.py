"""Counts of models without weights: against really built models, and against what the hybrid engine moves."""

import pytest
import torch
import transformers
from families import DECODERS
from tiny_configs import tiny_config
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from common.generation import reshard_plan
from common.generation.reshard_plan import TPLayout, plan_weight
from common.generation.tp_plans import Cut
from common.models.loading import LoraOptions, add_lora
from common.models.output_head import LogitOptions, token_scores
from tools.model_sizes import LiveBytes, ModelSizes, group_by_layers, head_bytes, plan_move, trace_activations

NO_LORA = LoraOptions()


def even_cut(dim: int, size: int, tp_size: int) -> Cut:
    step = size // tp_size
    return Cut(dim, tuple(((j * step, (j + 1) * step),) for j in range(tp_size)))


@pytest.mark.parametrize("is_value_model", [False, True], ids=["causal", "value"])
@pytest.mark.parametrize("family", DECODERS)
def test_counts_are_those_of_a_built_model(family, is_value_model):
    config = tiny_config(family, 320)
    config.num_labels = 1
    sizes = ModelSizes(config, is_value_model=is_value_model)
    auto_class = AutoModelForSequenceClassification if is_value_model else AutoModelForCausalLM
    built = auto_class.from_config(config)
    assert sizes.num_params == sum(p.numel() for p in built.parameters())
    assert sizes.counts(NO_LORA).num_trained == sizes.num_params
    lora = LoraOptions(dim=4, only_optimize_lora=is_value_model)
    counts = sizes.counts(lora)
    adapted = add_lora(built, lora)
    trained = [p for p in adapted.parameters() if p.requires_grad]
    assert counts.num_params == sum(p.numel() for p in adapted.parameters())
    assert counts.num_trained == sum(p.numel() for p in trained)
    factors = [p for n, p in adapted.named_parameters() if "lora_" in n]
    assert counts.num_adapter == sum(p.numel() for p in factors)


def test_tied_embeddings_count_once_and_the_head_computes_all_the_same():
    options = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    options |= {"num_attention_heads": 4, "num_key_value_heads": 4}
    tied = ModelSizes(transformers.LlamaConfig(**options, tie_word_embeddings=True))
    untied = ModelSizes(transformers.LlamaConfig(**options, tie_word_embeddings=False))
    # a layer: 4 projections, 3 matrices of the MLP, 2 norms; then the last norm
    assert tied.num_body == untied.num_body == 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32
    assert tied.num_params == tied.num_body + 320 * 32
    assert untied.num_params == untied.num_body + 2 * 320 * 32
    assert tied.num_head == untied.num_head == 320 * 32


def test_published_sizes():
    llama = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "vocab_size": 32000}
    sizes = ModelSizes(transformers.LlamaConfig(**llama, num_attention_heads=32, tie_word_embeddings=False))
    assert sizes.num_params == 6_738_415_616  # Llama-2-7B
    opt = {"hidden_size": 2048, "ffn_dim": 8192, "num_hidden_layers": 24, "num_attention_heads": 32}
    sizes = ModelSizes(transformers.OPTConfig(**opt, word_embed_proj_dim=2048))
    assert sizes.num_params == 1_315_758_080  # OPT-1.3B


def test_a_family_without_a_score_head_is_refused():
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, is_decoder=True
    )
    with pytest.raises(ValueError, match="BertForSequenceClassification has no linear `score` head"):
        ModelSizes(config, is_value_model=True)


# ---- the switch -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["opt", "gpt2", "llama", "falcon", "falcon_new", "gpt_neox"])
@pytest.mark.parametrize(("num_ranks", "tp_size"), [(1, 1), (2, 1), (2, 2), (4, 2), (8, 4), (16, 2)])
def test_a_switch_receives_what_the_reshard_plan_counts(family, num_ranks, tp_size):
    sizes = ModelSizes(tiny_config(family, 320))
    cuts = sizes.cuts(tp_size)
    expected, held = 0, 0
    for rank in range(num_ranks):
        layout = TPLayout(num_ranks, tp_size, rank)
        plans = [plan_weight(shape, cuts.get(name), layout) for name, shape in sizes.shapes.items()]
        expected += sum(plan.count_received() for plan in plans)
        held += sum(torch.Size(plan.local_shape).numel() for plan in plans if not plan.is_view)
    found = sizes.switch_sizes(
        num_ranks=num_ranks, tp_size=tp_size, is_sharded=True, layers_per_group=8, lora=NO_LORA
    )
    received = found.received_from_neighbours + found.received_from_all
    assert received * num_ranks == pytest.approx(expected, abs=1e-3)
    assert found.held * num_ranks == held


@pytest.mark.parametrize(("num_ranks", "tp_size"), [(4, 2), (8, 4), (64, 8), (1024, 8)])
def test_shares_of_a_matrix_by_hand(num_ranks, tp_size):
    n, t, size = num_ranks, tp_size, 8192 * 8192
    rows = plan_move((8192, 8192), even_cut(0, 8192, t), n, t, True)
    assert rows.neighbours == size * (n - t) / (n * t) and rows.everyone == 0
    columns = plan_move((8192, 8192), even_cut(1, 8192, t), n, t, True)
    assert columns.everyone == size * (n - 1) / (n * t) and columns.neighbours == 0
    whole = plan_move((8192, 8192), None, n, t, True)
    assert whole.everyone == size * (n - 1) / n and whole.held == size
    assert rows.local == columns.local == size / t
    assert rows.neighbours < columns.everyone < whole.everyone  # to gather everything would be the wrong form


def test_whole_weights_move_nothing_and_cost_memory_only_where_they_are_copied():
    assert plan_move((64, 64), None, 4, 2, False).held == 0
    assert plan_move((64, 64), even_cut(0, 64, 2), 4, 2, False).held == 0  # a view of the rows
    assert plan_move((64, 64), even_cut(1, 64, 2), 4, 2, False).held == 64 * 32
    moves = [plan_move((64, 64), even_cut(dim, 64, 2), 4, 2, False) for dim in (0, 1)]
    assert all(move.neighbours == move.everyone == 0 for move in moves)


def test_merged_adapters_are_new_memory_though_nothing_is_sent():
    sizes = ModelSizes(tiny_config("llama", 320))
    lora = LoraOptions(dim=4)
    found = sizes.switch_sizes(num_ranks=1, tp_size=1, is_sharded=False, layers_per_group=8, lora=lora)
    assert found.held == sizes.counts(lora).num_adapted > 0
    assert found.received_from_neighbours == found.received_from_all == 0


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_layers_are_grouped_as_the_engine_groups_them(num_layers):
    names = list(ModelSizes(tiny_config("llama", 320)).shapes)
    assert list(group_by_layers(names, num_layers)) == reshard_plan.group_by_layers(names, num_layers)


# ---- activations ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_traced_activations_are_those_of_a_real_pass_with_padding(family):
    length, saved = 48, []
    for num_layers in (1, 2):
        config = tiny_config(family, 320)
        config.num_hidden_layers, config.use_cache = num_layers, False
        for name in ("dropout", "attention_dropout", "hidden_dropout"):
            if hasattr(config, name):
                setattr(config, name, 0.0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        backbone = getattr(model, model.base_model_prefix)
        mask = torch.ones(1, length, dtype=torch.int64)
        mask[0, -3:] = 0
        with LiveBytes(backbone) as live:
            hidden = backbone(input_ids=torch.zeros_like(mask), attention_mask=mask)[0]
            saved.append(live.now)
        del hidden
    sizes = ModelSizes(tiny_config(family, 320))
    found = trace_activations(sizes, "bf16", length, is_flash=False)
    assert found.saved_by_layer == saved[1] - saved[0]
    assert found.saved_outside == pytest.approx(2 * saved[0] - saved[1], abs=512)  # ids and the like


def test_flash_attention_is_linear_in_length_and_a_mask_is_not():
    sizes = ModelSizes(tiny_config("llama", 320))
    flash = [trace_activations(sizes, "bf16", n, is_flash=True).saved_by_layer for n in (48, 96)]
    masked = trace_activations(sizes, "bf16", 48, is_flash=False).saved_by_layer
    assert flash[1] == 2 * flash[0]
    # a mask in bf16 of each layer, and keys and values repeated for the other two query heads
    assert masked == flash[0] + 2 * 48**2 + 2 * 48 * 2 * 2 * 8


@pytest.mark.parametrize(("dtype", "has_entropy"), [(torch.bfloat16, True), (torch.float32, False)])
def test_the_head_holds_what_is_planned(dtype, has_entropy):
    config = transformers.LlamaConfig(
        vocab_size=3000, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    hidden, weight = (torch.nn.Parameter(torch.randn(n, 64, dtype=dtype)) for n in (1000, 3000))
    ids, options = torch.zeros(1000, dtype=torch.int64), LogitOptions(chunk_tokens=250)
    with LiveBytes(torch.nn.ParameterList([hidden, weight])) as live:
        scores = token_scores(hidden, weight, None, ids, options, with_entropy=has_entropy)
        (scores.logprobs + scores.entropies if has_entropy else scores.logprobs).sum().backward()
    planned = head_bytes(
        ModelSizes(config), 1000, dtype.itemsize, chunk=250 * 3000, is_training=True,
        has_entropy=has_entropy, is_trained=True,
    )  # fmt: skip
    assert planned == pytest.approx(live.peak, rel=0.15)
