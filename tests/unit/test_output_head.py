"""common/models/output_head.py: the chunked head against plain float64 logits, values and gradients."""

import pytest
import torch

from common.models.output_head import LogitOptions, Support, summed_logprobs, token_scores

N, H, V = 23, 8, 40
CASES = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "padded vocabulary": {"num_valid_tokens": 33},
    "multiplier and cap": {"multiplier": 0.25, "cap": 3.0, "temperature": 1.3},
}


def make(dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, H, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    bias = torch.randn(V, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, bias, torch.randint(0, 33, (N,), generator=g)


def plain(hidden, weight, bias, ids, options, support=None):
    """All logits at once, in float64."""
    logits = hidden.double() @ weight.double().T + bias.double()
    logits = options.transform(logits)[:, : options.num_valid_tokens] / options.temperature
    if support is not None:
        logits = logits.masked_fill(~support, -torch.inf)
    logprobs = torch.log_softmax(logits, -1)
    entropy = -(logprobs.exp() * logprobs.clamp(min=-1e30)).sum(-1)
    return logprobs.gather(1, ids[:, None])[:, 0], entropy


def gradients(outputs, upstream, inputs):
    return torch.autograd.grad(outputs, inputs, upstream)


@pytest.mark.parametrize("chunk", [1, 5, 23, 100])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_equal_plain_float64_logits(case, chunk):
    inputs = make()
    options = LogitOptions(**CASES[case], chunk_tokens=chunk)
    upstream = tuple(torch.linspace(-1, 2, N) + i for i in range(2))
    expected = plain(*inputs, options)
    found = token_scores(*inputs, options, with_entropy=True)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-6, rtol=1e-6)
    slow = gradients(expected, [u.double() for u in upstream], inputs[:3])
    for a, b in zip(gradients(tuple(found), upstream, inputs[:3]), slow, strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-6)  # upstream gradients come in fp32


@pytest.mark.parametrize("chunk", [4, 100])
@pytest.mark.parametrize("case", CASES)
def test_the_sum_has_the_gradient_of_its_parts(case, chunk):
    inputs = make()
    options = LogitOptions(**CASES[case], chunk_tokens=chunk)
    total = summed_logprobs(*inputs, options)
    expected = plain(*inputs, options)[0].sum()
    torch.testing.assert_close(total.double(), expected, atol=1e-4, rtol=1e-6)
    slow = torch.autograd.grad(expected * -0.3, inputs[:3])
    for a, b in zip(torch.autograd.grad(total * -0.3, inputs[:3]), slow, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_chunks_do_not_change_the_numbers():
    inputs = make(torch.float32)
    whole, pieces = (
        token_scores(*inputs, LogitOptions(chunk_tokens=n), with_entropy=True).logprobs for n in (23, 4)
    )
    torch.testing.assert_close(whole, pieces, atol=1e-6, rtol=1e-6)


def test_the_softmax_is_taken_among_the_support():
    inputs = make()
    hidden, weight, bias, ids = inputs
    g = torch.Generator().manual_seed(3)
    mask = torch.rand(N, V, generator=g) < 0.3
    mask[torch.arange(N), ids] = True
    support = Support(mask.nonzero()[:, 1], torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)))
    options = LogitOptions(temperature=0.9, chunk_tokens=5)
    expected = plain(*inputs, options, mask)
    found = token_scores(*inputs, options, with_entropy=True, support=support)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-6, rtol=1e-6)
    upstream = [torch.linspace(0.5, 1, N)] * 2
    slow = gradients(expected, [u.double() for u in upstream], inputs[:3])
    for a, b in zip(gradients(tuple(found), upstream, inputs[:3]), slow, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_bf16_gradients_of_the_weight_are_summed_in_fp32():
    inputs = make(torch.bfloat16)
    exact = torch.autograd.grad(plain(*inputs, LogitOptions())[0].sum(), inputs[1])[0]
    found = token_scores(*inputs, LogitOptions(chunk_tokens=1)).logprobs.sum()
    error = (torch.autograd.grad(found, inputs[1])[0].double() - exact.double()).abs().max()
    assert error < 0.06  # one rounding of logits and one of the sum; rounding each of 23 sums reads above 0.1


def test_a_frozen_weight_gets_no_gradient_and_none_is_made_without_need():
    hidden, weight, bias, ids = make()
    loss = token_scores(hidden, weight.detach(), None, ids, LogitOptions()).logprobs.sum()
    assert torch.autograd.grad(loss, hidden)[0].abs().sum() > 0
    with torch.no_grad():
        assert not summed_logprobs(hidden, weight, bias, ids, LogitOptions()).requires_grad
    assert not summed_logprobs(hidden.detach(), weight.detach(), None, ids, LogitOptions()).requires_grad


def test_no_tokens_give_no_scores_and_zero_gradients():
    hidden, weight, bias, ids = make()
    scores = token_scores(hidden[:0], weight, bias, ids[:0], LogitOptions(), with_entropy=True)
    assert scores.logprobs.shape == scores.entropies.shape == (0,)
    assert not torch.autograd.grad(scores.logprobs.sum(), weight)[0].any()
