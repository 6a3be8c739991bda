"""Sequences end to end, with what they begin alike once: the same numbers as padded rows of their own."""

from functools import partial

import pytest
import torch
from plain_logits import compute_logits
from tiny_configs import CONFIGS, NOISY, PADDED_IN_5_23, VARIANTS, tiny_config
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from common.models.attention import (
    VARLEN_ATTENTION,
    attend_packed,
    choose_attention,
    narrow_last_layer,
    takes_packed,
)
from common.models.loading import set_dropout
from common.models.model_inputs import build_model_inputs, common_lengths
from common.models.output_head import OutputHead
from common.models.policy_model import PolicyModel

# Attention of their own, caps of scores within it, layers with a state.
PADDED = {"bloom", "falcon", "falcon_alibi", "falcon_new", "gpt_neo", "xglm", "gemma2", "minimax"}
PADDED |= PADDED_IN_5_23 | {"bloom_twelve_heads", "falcon_biased", "falcon_alibi_one_key"}
# A sequence alone, three that begin alike (one of them is all beginning), one token, a pair that is alike at
# one place behind its beginning, too.
GROUPS = torch.tensor([1, 3, 1, 2])
LENGTHS = torch.tensor([7, 12, 9, 5, 1, 4, 10])
SHARED = torch.tensor([0, 5, 0, 2])
# Layers that see all and layers with a window have masks of one length each.
TWO_WINDOWS = "gemma3 of four layers"
ATTENDED = [(7, 7), (5, 5), (7, 12), (4, 9), (1, 1), (2, 2), (2, 4), (8, 10)]  # tokens and keys of pieces


def build_ids():
    sequences = list(
        torch.randint(3, 64, (48,), generator=torch.Generator().manual_seed(1)).split(LENGTHS.tolist())
    )
    sequences[2][:5] = sequences[3][:5] = sequences[1][:5]
    sequences[6][[0, 1, 3]] = sequences[5][[0, 1, 3]]
    for a, b in ((1, 2), (5, 6)):
        length = int(SHARED[1 if a == 1 else 3])
        assert sequences[a][length] != sequences[b][length]
    return torch.cat(sequences)


def build_model(family):
    torch.manual_seed(0)
    config = tiny_config("gemma3" if family == TWO_WINDOWS else family, 64)
    if family == TWO_WINDOWS:
        layers = ["sliding_attention", "full_attention"] * 2
        more = {"num_hidden_layers": 4, "layer_types": layers, "sliding_window": 4}
        config = Gemma3TextConfig(**config.to_dict() | more)
    set_dropout(config, 0.0)
    model = AutoModelForCausalLM.from_config(config).train()
    for parameter in model.parameters():  # norms and biases of their own, too
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def make_packed(model):
    model.set_attn_implementation(choose_attention(type(model), model.config, "fp32"))
    narrow_last_layer(model)


def scores_and_gradients(model, is_scored, **layout):
    policy, ids = PolicyModel(model, num_valid_tokens=64), build_ids()
    inputs = build_model_inputs(ids, LENGTHS, **layout)
    compute = partial(OutputHead.logprobs, with_entropy=True)
    logprobs, entropies = policy(inputs, inputs.slots_before(is_scored), ids[is_scored], compute)
    model.zero_grad()
    (logprobs.sum() + 0.1 * entropies.sum()).backward()
    return logprobs.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def scored_from(start):
    return torch.cat([torch.arange(n) >= max(min(start, n - 1), 1) for n in LENGTHS.tolist()])


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("family", [*sorted((CONFIGS | NOISY | VARIANTS).keys() - PADDED), TWO_WINDOWS])
def test_scores_and_gradients_are_those_of_padded_rows(family, checkpointing):
    model = build_model(family)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    scored = [scored_from(1), scored_from(6), torch.zeros(48, dtype=torch.bool)]
    expected = [scores_and_gradients(model, is_scored, is_packed=False) for is_scored in scored]
    make_packed(model)
    assert takes_packed(model)
    for is_scored, (logprobs, gradients) in zip(scored, expected, strict=True):
        for groups in (None, GROUPS):
            layout = {"is_packed": True, "group_sizes": groups}
            found, of_weights = scores_and_gradients(model, is_scored, **layout)
            torch.testing.assert_close(found, logprobs, atol=1e-5, rtol=1e-5)
            assert of_weights.keys() == gradients.keys()
            for name, gradient in of_weights.items():
                torch.testing.assert_close(gradient, gradients[name], atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("family", sorted(PADDED))
def test_what_is_not_told_where_sequences_begin_takes_padded_rows(family):
    model = build_model(family)
    model.set_attn_implementation(choose_attention(type(model), model.config, "fp32") or "eager")
    assert not takes_packed(model)


def test_a_row_holds_what_a_group_begins_with_once():
    ids = build_ids()
    assert common_lengths(ids, LENGTHS, GROUPS).tolist() == SHARED.tolist()
    inputs = build_model_inputs(ids, LENGTHS, is_packed=True, group_sizes=GROUPS)
    packing, computed = inputs.packing, 48 - 2 * 5 - 2
    assert list(zip(packing.lengths, packing.key_lengths, strict=True)) == ATTENDED
    assert inputs.input_ids.shape == (1, computed) and inputs.num_tokens == computed
    assert inputs.input_ids[0][inputs.token_slots].tolist() == ids.tolist()
    positions = torch.cat([torch.arange(n) for n in LENGTHS.tolist()])
    assert inputs.position_ids[0][inputs.token_slots].tolist() == positions.tolist()
    assert inputs.last_slots.tolist() == inputs.token_slots[LENGTHS.cumsum(0) - 1].tolist()
    # The keys of each piece are the tokens of its sequence, up to its own last one.
    owners = [0, 1, 1, 2, 4, 5, 5, 6]
    of_sequences = inputs.token_slots.split(LENGTHS.tolist())
    for piece, owner in zip(packing.key_slots.split(packing.key_lengths), owners, strict=True):
        assert piece.tolist() == of_sequences[owner][: len(piece)].tolist()
    assert inputs.num_pairs == sum(q * k for q, k in ATTENDED)
    alone = build_model_inputs(ids, LENGTHS, is_packed=True)
    assert alone.packing.key_slots is None and alone.packing.lengths == LENGTHS.tolist()
    assert alone.num_pairs == build_model_inputs(ids, LENGTHS, is_packed=False).num_pairs


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gpt_neox", "phi", "mixtral", "gemma3"])
def test_the_last_layer_is_computed_where_it_is_read(family):
    """Behind its attention; in every pass, and again only there where activations are recomputed."""
    model = build_model(family)
    make_packed(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    sizes = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in (
            "mlp",
            "fc1",
            "fc2",
            "o_proj",
            "out_proj",
            "c_proj",
            "dense",
            "q_proj",
        ):
            see = lambda module, args, name=name: sizes.setdefault(name, []).append(args[0].shape[-2])  # noqa: E731
            module.register_forward_pre_hook(see)
    is_scored = scored_from(6)
    scores_and_gradients(model, is_scored, is_packed=True, group_sizes=GROUPS)
    inputs = build_model_inputs(build_ids(), LENGTHS, is_packed=True, group_sizes=GROUPS)
    read, whole = len(inputs.slots_before(is_scored).unique()), inputs.num_tokens
    found = {name: set(of_module) for name, of_module in sizes.items()}
    narrow = {name for name, of_module in found.items() if of_module == {read}}
    assert read < whole and narrow and set.union(*found.values()) == {read, whole}, found
    assert all(".1." in name for name in narrow)
    assert any("q_proj" in name for name in narrow) == any("q_proj" in name for name in sizes)
    assert {name.replace(".1.", ".0.") for name in narrow} <= found.keys() - narrow
    # A pass that is none of ours computes everything.
    sizes.clear()
    compute_logits(model.eval(), torch.randint(3, 64, (1, 9)), torch.ones(1, 9, dtype=torch.int64))
    assert set.union(*map(set, sizes.values())) == {9}


def test_passes_of_padded_rows_and_single_ones_go_to_torch():
    model = build_model("llama").eval()
    assert not takes_packed(model)  # torch's own attention
    ids = torch.randint(3, 64, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    expected = compute_logits(model, ids, mask), compute_logits(model, ids[1:], mask[1:])
    make_packed(model)
    assert model.config._attn_implementation == VARLEN_ATTENTION
    found = compute_logits(model, ids, mask), compute_logits(model, ids[1:], mask[1:])
    torch.testing.assert_close(found[0][mask.bool()], expected[0][mask.bool()], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[1], expected[1], atol=1e-5, rtol=1e-5)


def test_in_bf16_scores_and_weights_of_attention_are_fp32():
    """As in a GPU's kernels: only inputs, outputs and gradients are rounded to bf16."""
    inputs = build_model_inputs(build_ids(), LENGTHS, is_packed=True, group_sizes=GROUPS)
    packing, module = inputs.packing, torch.nn.Module()
    torch.manual_seed(0)
    total = int(packing.starts[-1])
    rounded = [torch.randn(1, heads, total, 8).bfloat16().requires_grad_() for heads in (4, 2, 2)]
    exact = [x.detach().float().requires_grad_() for x in rounded]
    upstream = torch.randn(1, total, 4, 8).bfloat16()
    found, expected = (attend_packed(module, *states, None, packing)[0] for states in (rounded, exact))
    assert torch.equal(found, expected.bfloat16())
    gradients = torch.autograd.grad(found, rounded, upstream)
    slow = torch.autograd.grad(expected, exact, upstream.float())
    for a, b in zip(gradients, slow, strict=True):
        assert torch.equal(a, b.bfloat16())
