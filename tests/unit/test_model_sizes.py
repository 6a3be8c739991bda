"""Counts of models without weights: against really built models, and against what the hybrid engine moves."""

import pytest
import torch
import transformers
from planned_runs import LLAMA_7B, NUM_7B
from tiny_configs import CONFIGS, tiny_config
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from common.generation.reshard_plan import plan_move
from common.generation.tp_plans import Cut
from common.models.lora import LoraOptions, add_lora
from tools.model_sizes import LiveBytes, ModelSizes, count_parameters, switch_sizes, trace_activations
from tools.planned_run import known_config


@pytest.mark.parametrize("is_value_model", [False, True], ids=["causal", "value"])
@pytest.mark.parametrize("family", CONFIGS)
def test_counts_are_those_of_a_built_model(family, is_value_model):
    config = tiny_config(family, 320)
    config.num_labels = 1
    sizes = ModelSizes(config, is_value_model=is_value_model)
    auto_class = AutoModelForSequenceClassification if is_value_model else AutoModelForCausalLM
    built = auto_class.from_config(config)
    assert sizes.num_params == sum(p.numel() for p in built.parameters())
    assert count_parameters(sizes, LoraOptions()).num_trained == sizes.num_params
    lora = LoraOptions(dim=4, only_optimize_lora=is_value_model)
    counts = count_parameters(sizes, lora)
    adapted = add_lora(built, lora)
    trained = [p for p in adapted.parameters() if p.requires_grad]
    assert counts.num_params == sum(p.numel() for p in adapted.parameters())
    assert counts.num_trained == sum(p.numel() for p in trained)
    factors = [p for n, p in adapted.named_parameters() if "lora_" in n]
    assert counts.num_adapter == sum(p.numel() for p in factors)


def test_tied_embeddings_count_once():
    options = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    options |= {"num_attention_heads": 4, "num_key_value_heads": 4}
    tied = ModelSizes(transformers.LlamaConfig(**options, tie_word_embeddings=True))
    untied = ModelSizes(transformers.LlamaConfig(**options, tie_word_embeddings=False))
    # a layer: 4 projections, 3 matrices of the MLP, 2 norms; then the last norm
    body = 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32
    assert tied.num_params == body + 320 * 32
    assert untied.num_params == body + 2 * 320 * 32
    assert tied.num_head == untied.num_head == 320 * 32
    assert ModelSizes(known_config(LLAMA_7B)).num_params == NUM_7B  # as published


def test_a_family_without_a_score_head_is_refused():
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, is_decoder=True
    )
    with pytest.raises(ValueError, match="BertForSequenceClassification has no linear `score` head"):
        ModelSizes(config, is_value_model=True)


# ---- the switch -----------------------------------------------------------------------------------------


def even_cut(dim: int, size: int, tp_size: int) -> Cut:
    step = size // tp_size
    return Cut(dim, tuple(((j * step, (j + 1) * step),) for j in range(tp_size)))


def test_shares_of_a_matrix_by_hand():
    size, n, t = 8192 * 8192, 1024, 8
    rows = plan_move((8192, 8192), even_cut(0, 8192, t), n, t)
    assert rows.from_gather_group == size * (n - t) / (n * t) and rows.from_all == 0
    columns = plan_move((8192, 8192), even_cut(1, 8192, t), n, t)
    assert columns.from_all == size * (n - 1) / (n * t) and columns.from_gather_group == 0
    whole = plan_move((8192, 8192), None, n, t)
    assert whole.from_all == size * (n - 1) / n and whole.new == size
    assert rows.slice == columns.slice == size / t


def test_whole_weights_move_nothing_and_cost_memory_only_where_they_are_copied():
    assert plan_move((64, 64), None, 4, 2, False).new == 0
    assert plan_move((64, 64), even_cut(0, 64, 2), 4, 2, False).new == 0  # a view of the rows
    assert plan_move((64, 64), even_cut(1, 64, 2), 4, 2, False) == (64 * 32, 64 * 32, 0, 0, 0)
    sizes, lora = ModelSizes(tiny_config("llama", 320)), LoraOptions(dim=4)
    merged = switch_sizes(sizes, 1, 1, False, 8, lora)  # new memory though nothing is sent
    assert merged.new == sum(torch.Size(s).numel() for n, s in sizes.shapes.items() if "_proj" in n) > 0
    assert merged.from_gather_group == merged.from_all == 0


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
