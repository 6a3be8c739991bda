"""Models without weights: parameters and switches by hand, activations as a real pass has them."""

import pytest
import torch
import transformers
from planned_runs import LLAMA_7B, NUM_7B
from tiny_configs import tiny_config
from transformers import AutoModelForCausalLM

from common.generation.tp_plans import Cut
from common.models.lora import LoraOptions
from tools.planned_model import (
    LiveBytes,
    PlannedModel,
    plan_switch,
    switch_weight,
    trace_activations,
    with_adapters,
)
from tools.planned_run import known_config

LLAMA = transformers.LlamaConfig(
    vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)


def test_parameters_by_hand():
    tied, untied = (PlannedModel(transformers.LlamaConfig(**LLAMA.to_dict() | {"tie_word_embeddings": tie}))
                    for tie in (True, False))  # fmt: skip
    # a layer: 4 projections, 3 matrices of the MLP, 2 norms; then the last norm
    body = 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32
    assert tied.num_params == body + 320 * 32 and untied.num_params == body + 2 * 320 * 32
    assert PlannedModel(known_config(LLAMA_7B)).num_params == NUM_7B  # as published
    classifier = PlannedModel(LLAMA, is_value_model=True)
    assert classifier.num_trained == classifier.num_params == body + 320 * 32 + 32
    adapted = with_adapters(classifier, LoraOptions(dim=4))
    assert adapted.num_adapter == 2 * 4 * (4 * 64 + 3 * 96)
    assert adapted.num_trained == adapted.num_adapter + 32  # the score head
    assert adapted.num_params == classifier.num_params + adapted.num_adapter
    others = with_adapters(classifier, LoraOptions(dim=4, only_optimize_lora=False))
    assert others.num_trained == adapted.num_trained + 320 * 32 + 2 * 2 * 32 + 32


def test_a_family_without_a_score_head_is_refused():
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, is_decoder=True
    )
    with pytest.raises(ValueError, match="BertForSequenceClassification has no linear `score` head"):
        PlannedModel(config, is_value_model=True)


def even_cut(dim: int, size: int, tp_size: int) -> Cut:
    step = size // tp_size
    return Cut(dim, tuple(((j * step, (j + 1) * step),) for j in range(tp_size)))


def test_switches_by_hand():
    size, n, t = 8192 * 8192, 1024, 8
    rows = switch_weight((8192, 8192), even_cut(0, 8192, t), n, t)
    assert rows.from_gather_group == size * (n - t) / (n * t) and rows.from_all == 0
    columns = switch_weight((8192, 8192), even_cut(1, 8192, t), n, t)
    assert columns.from_all == size * (n - 1) / (n * t) and columns.from_gather_group == 0
    whole = switch_weight((8192, 8192), None, n, t)
    assert whole.from_all == size * (n - 1) / n and whole.new == size
    assert rows.new == columns.new == size / t
    # without shards: no copy of what is not cut, nor of rows
    assert switch_weight((64, 64), None, 4, 2, False).new == 0
    assert switch_weight((64, 64), even_cut(0, 64, 2), 4, 2, False).new == 0
    assert switch_weight((64, 64), even_cut(1, 64, 2), 4, 2, False) == (64 * 32, 0, 0, 0)
    merged = plan_switch(PlannedModel(LLAMA, lora=LoraOptions(dim=4)), 1, 1, False, 8)
    assert merged == (2 * (4 * 32 * 32 + 3 * 32 * 64), 0, 0, 0)  # new memory though nothing is sent


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
    found = trace_activations(PlannedModel(tiny_config(family, 320)), "bf16", length, False)
    assert found.saved_by_layer == saved[1] - saved[0]
    assert found.saved_outside == pytest.approx(2 * saved[0] - saved[1], abs=512)  # ids and the like


def test_flash_attention_is_linear_in_length_and_a_mask_is_not():
    model = PlannedModel(tiny_config("llama", 320))
    flash = [trace_activations(model, "bf16", n, True).saved_by_layer for n in (48, 96)]
    masked = trace_activations(model, "bf16", 48, False).saved_by_layer
    assert flash[1] == 2 * flash[0]
    # a mask in bf16 of each layer, and keys and values repeated for the other two query heads
    assert masked == flash[0] + 2 * 48**2 + 2 * 48 * 2 * 2 * 8
