"""Models without weights: parameters and switches by hand, activations as a real pass has them."""

import pytest
import torch
import transformers
from planned_runs import LLAMA_7B, NUM_7B, single
from tiny_configs import tiny_config
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from common.models.lora import LoraOptions
from tools.memory_plan import LiveBytes, trace_activations
from tools.planned_run import PlannedModel, plan_switch

LLAMA = transformers.LlamaConfig(
    vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
CLASSIFIER = AutoModelForSequenceClassification


def planned(config, auto_class=AutoModelForCausalLM, lora=None) -> PlannedModel:
    with torch.device("meta"):
        return PlannedModel(auto_class.from_config(config), lora)


def test_parameters_by_hand():
    tied, untied = (planned(transformers.LlamaConfig(**LLAMA.to_dict() | {"tie_word_embeddings": tie}))
                    for tie in (True, False))  # fmt: skip
    # a layer: 4 projections, 3 matrices of the MLP, 2 norms; then the last norm
    body = 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32
    assert tied.num_params == body + 320 * 32 and untied.num_params == body + 2 * 320 * 32
    assert single(LLAMA_7B).roles[0].model.num_params == NUM_7B  # as published
    of_one_label = transformers.LlamaConfig(**LLAMA.to_dict() | {"num_labels": 1})
    classifier = planned(of_one_label, CLASSIFIER)
    assert classifier.num_trained == classifier.num_params == body + 320 * 32 + 32
    adapted = planned(of_one_label, CLASSIFIER, LoraOptions(dim=4))
    adapters = 2 * 4 * (4 * 64 + 3 * 96)
    assert adapted.num_trained == adapters + 32  # the score head
    assert adapted.num_params == classifier.num_params + adapters
    others = planned(of_one_label, CLASSIFIER, LoraOptions(dim=4, only_optimize_lora=False))
    assert others.num_trained == adapted.num_trained + 320 * 32 + 2 * 2 * 32 + 32


def test_a_family_without_a_score_head_is_refused():
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, is_decoder=True
    )
    with pytest.raises(ValueError, match="BertForSequenceClassification has no linear `score` head"):
        planned(config, CLASSIFIER)


def test_switches_by_hand():
    """Of 4 ranks, 2 a replica; the embedding and the head are cut by rows."""
    by_rows = 2 * (3 * 32 * 32 + 2 * 32 * 64) + 2 * 320 * 32
    layers_by_columns, norms = 32 * 32 + 32 * 64, 5 * 32
    by_columns = 2 * layers_by_columns
    new, near, far, staged = plan_switch(planned(LLAMA), 4, 2, True, 1)
    assert new == (by_rows + by_columns) / 2 + norms
    assert near == by_rows * (4 - 2) / (4 * 2)
    assert far == by_columns * (4 - 1) / (4 * 2) + norms * (4 - 1) / 4
    assert staged == 2 * layers_by_columns * (4 - 1) / (4 * 2)  # sent and received, a layer at a time
    assert plan_switch(planned(LLAMA), 4, 2, True, 2).staged == 2 * staged
    # Without shards nothing is sent: rows, and what is not cut, are no copies. Merged adapters are.
    assert plan_switch(planned(LLAMA), 4, 2, False, 8) == (by_columns / 2, 0, 0, 0)
    merged = plan_switch(planned(LLAMA, lora=LoraOptions(dim=4)), 1, 1, False, 8)
    assert merged == (2 * (4 * 32 * 32 + 3 * 32 * 64), 0, 0, 0)


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
    found = trace_activations(planned(tiny_config(family, 320)), "bf16", length)
    assert found.saved_by_layer == saved[1] - saved[0]
    assert found.saved_outside == pytest.approx(2 * saved[0] - saved[1], abs=512)  # ids and the like
