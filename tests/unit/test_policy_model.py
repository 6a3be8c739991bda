"""common/models/policy_model.py: scores of tokens against the logits of transformers' own forward pass."""

from functools import partial

import pytest
import torch
from plain_logits import compute_logits
from tiny_configs import CONFIGS, tiny_config
from transformers import AutoModelForCausalLM, CohereConfig, GraniteConfig, LlamaConfig, LlamaForCausalLM

from common.models.lora import LoraOptions, add_lora
from common.models.model_inputs import build_model_inputs
from common.models.output_head import OutputHead
from common.models.policy_model import PolicyModel

LENGTHS = (5, 1, 9, 3)
OPTIONS = {"num_valid_tokens": 64, "temperature": 2.0}  # models have 72 rows
SMALL = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 72, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SCALED = {
    "granite": GraniteConfig(**SMALL, logits_scaling=7.0),
    "cohere": CohereConfig(**SMALL, logit_scale=0.0625),
}


def build(family):
    torch.manual_seed(0)
    config = SCALED.get(family) or tiny_config(family, 72)
    return AutoModelForCausalLM.from_config(config).eval()


def sequences():
    g = torch.Generator().manual_seed(1)
    return [torch.randint(3, 64, (n,), generator=g) for n in LENGTHS]


def expected_logprobs(model, rows):
    """One sequence at a time, without padding, by the model's own forward pass; with OPTIONS."""
    found = []
    for row in rows:
        logits = compute_logits(model, row[None], torch.ones_like(row[None]))[0, :-1]
        found.append(torch.log_softmax(logits[:, :64].double() / 2.0, -1).gather(1, row[1:, None])[:, 0])
    return torch.cat(found)


def scored_slots(rows, inputs):
    is_scored = torch.cat([torch.arange(len(row)) > 0 for row in rows])
    return inputs.slots_before(is_scored), torch.cat(rows)[is_scored]


@pytest.mark.parametrize("family", [*CONFIGS, *SCALED])
def test_scores_equal_the_models_own_logits(family):
    model, rows = build(family), sequences()
    expected = expected_logprobs(model, rows)
    policy = PolicyModel(model, **OPTIONS)
    inputs = build_model_inputs(torch.cat(rows), torch.tensor(LENGTHS), is_packed=False)
    slots, token_ids = scored_slots(rows, inputs)
    with torch.no_grad():
        logprobs, entropies = policy(
            inputs, slots, token_ids, partial(OutputHead.logprobs, with_entropy=True)
        )
        total = -policy(inputs, slots, token_ids, OutputHead.nll_sum)
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(total.double(), expected.sum(), atol=1e-4, rtol=1e-5)
    assert (entropies > 0).all()


def test_a_treatment_of_logits_that_is_not_known_is_refused():
    config = LlamaConfig(**SMALL, logits_scaling=0.5)  # a granite divides by it, hyperclovax multiplies
    with pytest.raises(ValueError, match="llama: the configuration's logits_scaling 0.5"):
        PolicyModel(LlamaForCausalLM(config), **OPTIONS)


def test_adapters_are_part_of_the_scores():
    rows, adapted = sequences(), add_lora(build("llama"), LoraOptions(4))
    policy = PolicyModel(adapted, **OPTIONS)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    inputs = build_model_inputs(torch.cat(rows), torch.tensor(LENGTHS), is_packed=False)
    found = policy(inputs, *scored_slots(rows, inputs))[0]
    torch.testing.assert_close(found.double(), expected_logprobs(adapted, rows), atol=1e-5, rtol=1e-5)
