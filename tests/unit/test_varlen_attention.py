"""Sequences end to end under a kernel for them, here in plain torch: the same numbers as padded rows."""

import pytest
import torch
import torch.nn.functional as F
from plain_logits import compute_logits
from tiny_configs import tiny_config
from transformers import AutoModelForCausalLM

from common.models.loading import set_dropout
from common.models.model_inputs import VARLEN_ATTENTION, build_model_inputs, takes_packed
from common.models.policy_model import PolicyModel

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "mistral_window", "gemma", "phi", "gpt_neox", "gpt2", "opt")
LENGTHS = torch.tensor([7, 1, 12, 4])


@pytest.fixture
def plain_kernel(monkeypatch):
    """Stand in for torch's CUDA kernel: one attention a sequence."""
    calls = []

    def attend(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa):
        calls.append((cu_q.tolist(), max_q))
        left = window_size[0] if window_size[0] >= 0 else 10**6
        outputs = []
        for first, last in zip(cu_q.tolist(), cu_q.tolist()[1:], strict=False):
            q, k, v = (x[first:last].transpose(0, 1)[None] for x in (query, key, value))
            distance = torch.arange(last - first)[:, None] - torch.arange(last - first)
            mask = (distance >= 0) & (distance <= left)
            found = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)
            outputs.append(found[0].transpose(0, 1))
        return torch.cat(outputs)

    monkeypatch.setattr("common.models.model_inputs.varlen.varlen_attn", attend)
    return calls


def scores_and_gradients(model, *, is_packed):
    policy = PolicyModel(model, num_valid_tokens=64)
    ids = torch.randint(3, 64, (int(LENGTHS.sum()),), generator=torch.Generator().manual_seed(1))
    inputs = build_model_inputs(ids, LENGTHS, is_packed=is_packed)
    is_scored = torch.ones(len(ids), dtype=torch.bool)
    is_scored[F.pad(LENGTHS.cumsum(0)[:-1], (1, 0))] = False
    logprobs, entropies = policy(inputs, inputs.token_slots[is_scored], ids[is_scored], with_entropy=True)
    model.zero_grad()
    (logprobs.sum() + 0.1 * entropies.sum()).backward()
    return logprobs.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_flat_and_padded_give_the_same_scores_and_gradients(family, checkpointing, plain_kernel):
    torch.manual_seed(0)
    config = tiny_config(family, 64)
    set_dropout(config, 0.0)
    model = AutoModelForCausalLM.from_config(config).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    expected, expected_gradients = scores_and_gradients(model, is_packed=False)
    model.set_attn_implementation(VARLEN_ATTENTION)
    if not takes_packed(model):
        pytest.skip(f"{family} does not hand through what the attention needs")
    found, gradients = scores_and_gradients(model, is_packed=True)
    assert plain_kernel and plain_kernel[0] == ([0, 7, 8, 20, 24], 12)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], atol=1e-5, rtol=1e-4, msg=name)


def test_the_module_still_reads_padded_rows_and_single_ones(plain_kernel):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("llama", 64)).eval()
    assert not takes_packed(model)  # torch's own attention
    ids = torch.randint(3, 64, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    expected = compute_logits(model, ids, mask), compute_logits(model, ids[1:], mask[1:])
    model.set_attn_implementation(VARLEN_ATTENTION)
    found = compute_logits(model, ids, mask), compute_logits(model, ids[1:], mask[1:])
    torch.testing.assert_close(found[0][mask.bool()], expected[0][mask.bool()], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[1], expected[1], atol=1e-5, rtol=1e-5)
    assert not plain_kernel


def test_layers_that_keep_a_state_are_not_told_where_sequences_begin(plain_kernel):
    model = AutoModelForCausalLM.from_config(tiny_config("minimax", 64))
    model.set_attn_implementation(VARLEN_ATTENTION)
    assert not takes_packed(model)
