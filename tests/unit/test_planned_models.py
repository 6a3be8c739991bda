"""What plans know of models without weights: parameters, switches, activations, prompts of groups."""

import pytest
import torch
import transformers
from planned_runs import LLAMA_7B, NUM_7B, OPT_350M, ppo, single
from tiny_configs import tiny_config
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from common.generation.resharding import TPLayout
from common.models.lora import LoraOptions
from common.models.model_inputs import build_model_inputs
from tools.planned_model import PlannedModel, plan_switch
from tools.traced_layers import LiveBytes, trace_activations

LLAMA = transformers.LlamaConfig(
    vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)


def planned(config, lora=None) -> PlannedModel:
    is_ranker = config.num_labels == 1
    auto_class = AutoModelForSequenceClassification if is_ranker else AutoModelForCausalLM
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
    classifier = planned(of_one_label)
    assert classifier.num_trained == classifier.num_params == body + 320 * 32 + 32
    adapted = planned(of_one_label, LoraOptions(dim=4))
    adapters = 2 * 4 * (4 * 64 + 3 * 96)
    assert adapted.num_trained == adapters + 32  # the score head
    assert adapted.num_params == classifier.num_params + adapters
    others = planned(of_one_label, LoraOptions(dim=4, only_optimize_lora=False))
    assert others.num_trained == adapted.num_trained + 320 * 32 + 2 * 2 * 32 + 32


def test_a_family_without_a_score_head_is_refused():
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, is_decoder=True, num_labels=1
    )
    with pytest.raises(ValueError, match="BertForSequenceClassification has no linear `score` head"):
        planned(config)


def test_switches_by_hand():
    """Of 4 ranks, 2 a replica; the embedding and the head are cut by rows."""
    by_rows = 2 * (3 * 32 * 32 + 2 * 32 * 64) + 2 * 320 * 32
    layers_by_columns, norms = 32 * 32 + 32 * 64, 5 * 32
    by_columns = 2 * layers_by_columns
    layout = TPLayout(4, 2)
    new, near, far, staged, new_at_once = plan_switch(planned(LLAMA), layout, 1, is_sharded=True)
    assert new == (by_rows + by_columns) / 2 + norms
    assert near == by_rows * (4 - 2) / (4 * 2)
    assert far == by_columns * (4 - 1) / (4 * 2) + norms * (4 - 1) / 4
    assert staged == 2 * layers_by_columns * (4 - 1) / (4 * 2)  # sent and received, a layer at a time
    assert new_at_once == (4 * 32 * 32 + 3 * 32 * 64) / 2 + 2 * 32  # a layer's
    assert plan_switch(planned(LLAMA), layout, 2, is_sharded=True).staged == 2 * staged
    # Without shards nothing is sent: rows, and what is not cut, are no copies. Merged adapters are, and the
    # factors A of others, which are put side by side.
    whole = plan_switch(planned(LLAMA), layout, 8, is_sharded=False)
    assert whole == (by_columns / 2, 0, 0, 0, by_columns / 2)
    adapted = planned(LLAMA, LoraOptions(dim=4))
    merged = plan_switch(adapted, TPLayout(1, 1), 8, is_sharded=False, merges=True)
    assert merged == (size := 2 * (4 * 32 * 32 + 3 * 32 * 64), 0, 0, 0, size)
    beside = plan_switch(adapted, TPLayout(1, 1), 8, is_sharded=False)
    assert beside == (size := 2 * 4 * (6 * 32 + 64), 0, 0, 0, size)


@pytest.mark.parametrize("family", ["llama", "bloom", "gemma2"])
def test_traced_activations_are_those_of_a_real_pass(family):
    length, saved = 48, []
    for num_layers in (1, 2):
        config = tiny_config(family, 320)
        config.num_hidden_layers, config.use_cache = num_layers, False
        for name in ("dropout", "attention_dropout", "hidden_dropout"):
            if hasattr(config, name):
                setattr(config, name, 0.0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        backbone = getattr(model, model.base_model_prefix)
        ids, lengths = torch.zeros(length, dtype=torch.int64), torch.tensor([length])
        arguments = build_model_inputs(ids, lengths, is_packed=False).model_arguments(with_packing=False)
        arguments.pop("position_ids" if family == "bloom" else "", None)
        with LiveBytes(backbone) as live:
            hidden = backbone(**arguments)[0]
            saved.append(live.now)
        del hidden
    found = trace_activations(planned(tiny_config(family, 320)), "bf16", length)
    assert found.saved_by_layer == saved[1] - saved[0]
    assert found.saved_outside == pytest.approx(2 * saved[0] - saved[1], abs=1024)  # positions and the like


@pytest.mark.parametrize(
    ("flags", "num_tokens", "num_passes"),
    [
        ("", 12 * 30 + 3 * 10, 2),  # three prompts of 10 tokens, twelve responses of 30
        ("--no_share_prompts", 12 * 40, 2),
        ("--dtype fp32", 12 * 40, 2),  # no GPU has an attention for it, a CPU has
        ("--per_device_training_batch_size 6", 6 * 30 + 3 * 10, 2),  # of up to three groups
        ("--packed", 12 * 40, 2),  # as many as twelve rows may have
    ],
)
def test_a_groups_prompt_is_planned_once(flags, num_tokens, num_passes):
    given = "--num_samples_per_prompt 4 --max_prompt_seq_len 10 --max_answer_seq_len 30 --gpu a100-80g "
    given += "--per_device_training_batch_size 12 --per_device_generation_batch_size 6 "
    given += "--gradient_accumulation_steps 2 --dtype bf16 --reward http://a/b --num_gpus 1 "
    run = ppo(OPT_350M, "", *(given + flags).split())
    assert (run.tokens_per_pass, run.num_micro_batches) == (num_tokens, num_passes)


def test_what_operations_move_is_counted_in_elements_of_what_they_read_and_make():
    one, two = (torch.ones(4, 4) for _ in range(2))
    with LiveBytes(torch.nn.Module()) as live:
        one.view(16)[:3].detach()  # views
        torch.empty(100)
        assert live.moved == (0, 0)
        one + two
        assert live.moved == (1, 3 * 64)
        one @ two  # a product: counted as FLOPs
        assert live.moved == (2, 3 * 64)
        one.add_(two)
        assert live.moved == (3, 6 * 64)
        one.sum()
        assert live.moved == (4, 6 * 64 + 64 + 4)


def test_a_layers_operations_are_traced_for_one_layer():
    """Forward: 7 products, attention, 2 sums, 2 of the activation, the rest of norms and rotation."""
    traced = trace_activations(planned(LLAMA), "bf16", 8)
    assert traced.forward.launches == 38 and traced.training.launches == 98
    twice = trace_activations(planned(LLAMA), "bf16", 16)
    assert twice.forward == (38, pytest.approx(2 * traced.forward.num_bytes, rel=0.05))
