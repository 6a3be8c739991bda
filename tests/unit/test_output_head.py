"""common/models/output_head.py: the chunked head against plain float64 logits, values and gradients."""

import math
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from plain_logits import plain_logprobs
from right_or_wrong import LargestTensor, close

from common.models import output_head
from common.models.output_head import LogitOptions, OutputHead, SamplingMask
from common.models.sampling import sample_tokens

N, H, V = 23, 8, 40
PLAIN = LogitOptions()
CASES = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "padded vocabulary": {"num_valid_tokens": 33},
    "cap": {"cap": 3.0},
    "multiplier and cap": {"multiplier": 0.25, "cap": 3.0, "temperature": 1.3},
}


def make(dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, H, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    bias = torch.randn(V, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, bias, torch.randint(0, 33, (N,), generator=g)


def head_of(inputs, options=PLAIN):
    """The head of hidden, weight and bias, which come first."""
    return OutputHead(*inputs[:3], options)


def plain(hidden, weight, bias, ids, options, is_kept=None):
    """All logits at once, in float64."""
    logits = hidden.double() @ weight.double().T + bias.double()
    logits = options.transform(logits)[:, : options.num_valid_tokens] / options.temperature
    if is_kept is not None:
        logits = logits.masked_fill(~is_kept, -torch.inf)
    logprobs = torch.log_softmax(logits, -1)
    entropy = -(logprobs.exp() * logprobs.clamp(min=-1e30)).sum(-1)
    return logprobs.gather(1, ids[:, None])[:, 0], entropy


@pytest.fixture(params=[(1, 0), (5, 10), (100, 100)], ids=str)
def chunk(request, monkeypatch):
    """Tokens of a chunk, and those whose logits wait for the backward pass."""
    for name, num_tokens in zip(("CPU_CHUNK_ELEMENTS", "CPU_KEPT_ELEMENTS"), request.param, strict=True):
        monkeypatch.setattr(output_head, name, num_tokens * V)


def compare(options, upstream, atol, is_kept=None, mask=None):
    inputs = make()
    expected = plain(*inputs, options, is_kept)
    found = head_of(inputs, options).logprobs(inputs[3], with_entropy=True, mask=mask)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-6, rtol=1e-6)
    slow = torch.autograd.grad(expected, inputs[:3], [u.double() for u in upstream])
    for a, b in zip(torch.autograd.grad(found, inputs[:3], upstream), slow, strict=True):
        torch.testing.assert_close(a, b, atol=atol, rtol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_equal_plain_float64_logits(case, chunk):
    compare(
        LogitOptions(**CASES[case]), [torch.linspace(-1, 2, N) + i for i in range(2)], 2e-6
    )  # these come in fp32


@pytest.mark.parametrize("case", CASES)
def test_the_sum_has_the_gradient_of_its_parts(case, chunk):
    inputs, options = make(), LogitOptions(**CASES[case])
    total = head_of(inputs, options).nll_sum(inputs[3])
    expected = -plain(*inputs, options)[0].sum()
    torch.testing.assert_close(total.double(), expected, atol=1e-4, rtol=1e-6)
    at_one = head_of(inputs, options).nll_sum(inputs[3], temperature=1.0)
    close(at_one.double(), -plain(*inputs, replace(options, temperature=1.0))[0].sum(), 1e-4)
    slow = torch.autograd.grad(expected * -0.3, inputs[:3])
    for a, b in zip(torch.autograd.grad(total * -0.3, inputs[:3]), slow, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_chunks_and_neighbours_change_no_bit_and_the_sampler_computes_the_same():
    head = head_of(make(torch.float32), LogitOptions(temperature=0.9))
    logits, uniforms = head.raw_logits(slice(None)), torch.linspace(0, 0.99, N)
    ids, logprobs, _ = sample_tokens(logits, uniforms, temperature=0.9)
    whole, _ = head.logprobs(ids)
    assert torch.equal(logprobs, whole)
    for rows in (slice(2, 3), slice(4, 11)):
        sample = sample_tokens(logits[rows], uniforms[rows], temperature=0.9)
        assert torch.equal(sample.logprobs, whole[rows])


def test_logprobs_by_hand():
    # weights e^(x / 2): 1, 2, 5 -> sum 8; chosen 5 / 8 and 1 / 8
    logits = 2 * torch.tensor([[1.0, 2.0, 5.0], [1.0, 2.0, 5.0]]).log()
    sample = sample_tokens(logits, torch.tensor([0.5, 0.0]), temperature=2.0)
    assert sample.token_ids.tolist() == [2, 0]
    close(sample.logprobs, [math.log(5 / 8), math.log(1 / 8)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_logprobs_of_a_large_vocabulary_equal_float64_to_a_millionth(dtype):
    g = torch.Generator().manual_seed(0)
    logits, uniforms = torch.randn(64, 32000, generator=g).to(dtype), torch.rand(64, generator=g)
    if dtype == torch.float64:
        logits = logits + 1e6  # fp32 holds it to 0.06 only
    for do_sample in (True, False):
        ids, found, _ = sample_tokens(logits, uniforms, do_sample=do_sample)
        assert found.dtype == torch.float32
        close(found, plain_logprobs(logits.double(), ids))


@pytest.mark.parametrize("padding", [0.0, 1e4, torch.nan])
def test_vocabulary_padding_is_out_of_the_softmax_and_gets_no_gradient(padding):
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(8, 60, generator=g), torch.eye(60)
    bias = torch.zeros(60)
    bias[50:] = padding
    ids = torch.randint(0, 50, (8,), generator=g)
    short = head_of((hidden[:, :50], torch.eye(50), None)).logprobs(ids, with_entropy=True)
    leaf = bias.requires_grad_()
    head = head_of((hidden, weight, leaf), LogitOptions(num_valid_tokens=50))
    found = head.logprobs(ids, with_entropy=True)
    (found[0] + found[1]).sum().backward()
    assert torch.equal(found[0], short[0]) and torch.equal(found[1], short[1])
    assert leaf.grad[50:].eq(0).all() and leaf.grad.isfinite().all()
    assert head.logprobs(torch.arange(49, 57))[0].isinf().tolist() == [False] + [True] * 7


@pytest.mark.parametrize(("num_kept", "num_products"), [(0, 13 + 13), (12, 13 + 11), (64, 13)])
def test_no_more_logits_than_a_chunks_are_held_or_saved_but_for_those_that_may_wait(
    num_kept, num_products, monkeypatch
):
    monkeypatch.setattr(output_head, "CPU_CHUNK_ELEMENTS", 5 * 300)
    monkeypatch.setattr(output_head, "CPU_KEPT_ELEMENTS", num_kept * 300)
    linear = Mock(wraps=output_head.F.linear)
    monkeypatch.setattr(output_head.F, "linear", linear)
    hidden, weight = torch.randn(64, 4).requires_grad_(), torch.randn(300, 4).requires_grad_()
    ids, saved = torch.zeros(64, dtype=torch.int64), []
    with (
        LargestTensor() as largest,
        torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x),
    ):
        logprobs, entropies = head_of((hidden, weight, None)).logprobs(ids, with_entropy=True)
        (logprobs + entropies).sum().backward()
    assert largest.num_elements == 5 * 300 and max(x.numel() for x in saved) == weight.numel()
    assert linear.call_count == num_products


def test_the_softmax_is_taken_among_the_sampling_mask(chunk):
    is_kept = torch.rand(N, V, generator=torch.Generator().manual_seed(3)) < 0.3
    is_kept[torch.arange(N), make()[3]] = True
    mask = SamplingMask(is_kept.nonzero()[:, 1], is_kept.sum(1))
    compare(LogitOptions(temperature=0.9), [torch.linspace(0.5, 1, N)] * 2, 1e-6, is_kept, mask)


def test_kept_tokens_have_the_sampled_one_even_where_rounding_left_it_out(chunk):
    inputs = make()
    likeliest = head_of(inputs).raw_logits(slice(None)).argmax(1)
    sampled = torch.where(torch.arange(N) < 9, likeliest, (likeliest + 1) % V)
    token_ids, counts = head_of(inputs).kept_tokens(sampled, top_k=1, top_p=1.0)
    assert counts.tolist() == [1] * 9 + [2] * (N - 9)
    for kept, *expected in zip(token_ids.split(counts.tolist()), sampled, likeliest, strict=True):
        assert set(kept.tolist()) == set(map(int, expected))


def test_bf16_gradients_of_the_weight_are_summed_in_fp32(monkeypatch):
    monkeypatch.setattr(output_head, "CPU_CHUNK_ELEMENTS_BF16", V)
    inputs = make(torch.bfloat16)
    exact = torch.autograd.grad(plain(*inputs, LogitOptions())[0].sum(), inputs[1])[0]
    found = head_of(inputs).logprobs(inputs[3])[0].sum()
    error = (torch.autograd.grad(found, inputs[1])[0].double() - exact.double()).abs().max()
    assert error < 0.06  # one rounding of logits and one of the sum; rounding each of 23 sums reads above 0.1


@pytest.mark.parametrize("chunk_tokens", [1 << 15, 1 << 10])
def test_fp16_sums_of_many_tokens_are_scaled_down_before_they_are_fp16(monkeypatch, chunk_tokens):
    """30,000 times a hidden outlier of 60 is far above 65504, the mean is not."""
    monkeypatch.setattr(output_head, "CPU_CHUNK_ELEMENTS", chunk_tokens * 8)
    num_tokens, g = 1 << 15, torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(num_tokens, 4, generator=g), torch.randn(8, 4, generator=g)
    hidden[:, 0], weight[:, 0] = 60.0, 0.01
    inputs = [x.half().requires_grad_() for x in (hidden, weight, torch.zeros(8))]
    ids, head, scale = torch.zeros(num_tokens, dtype=torch.int64), head_of(inputs), 1024 / num_tokens
    exact = torch.autograd.grad(plain(*inputs, ids, head.options)[0].sum() * scale, inputs)
    for total in (-head.nll_sum(ids), head.logprobs(ids)[0].sum()):
        for found, right in zip(torch.autograd.grad(total * scale, inputs), exact, strict=True):
            assert found.dtype == torch.float16
            torch.testing.assert_close(found, right, atol=0.002 * float(right.abs().max()), rtol=0)


def test_no_tokens_give_no_scores_and_zero_gradients():
    hidden, weight, bias, ids = make()
    head = head_of((hidden[:0], weight, bias))
    logprobs, entropies = head.logprobs(ids[:0], with_entropy=True)
    assert logprobs.shape == entropies.shape == (0,)
    assert not torch.autograd.grad(logprobs.sum(), weight)[0].any()
