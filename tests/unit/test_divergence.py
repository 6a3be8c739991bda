"""common/models/divergence.py: the chunked divergences against a plain float64 loop over whole softmaxes."""

import math

import pytest
import torch
from right_or_wrong import LargestTensor, close, forms, judge

from common.models import divergence as module
from common.models import output_head
from common.models.divergence import (
    FORWARD_KL,
    REVERSE_KL,
    divergence,
    scores_and_divergence,
    summed_divergence,
)
from common.models.output_head import LogitOptions, OutputHead

N, H, TEACHER_H, V, TEACHER_V, VALID = 11, 6, 9, 40, 44, 33
BETAS = (FORWARD_KL, 0.3, 0.5, 0.9, REVERSE_KL)
CASES = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "padded vocabulary": {"num_valid_tokens": VALID},
    "multiplier and cap": {"multiplier": 0.25, "cap": 3.0, "temperature": 1.3},
}


def make(dtype=torch.float64, teacher_rows=V, **options):
    """Random inputs; the teacher has another hidden size, and treats its logits in no way of its own."""
    g = torch.Generator().manual_seed(0)
    shapes = [(N, H), (V, H), (V,), (N, TEACHER_H), (teacher_rows, TEACHER_H), (teacher_rows,)]
    tensors = [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes]
    of_teacher = {k: v for k, v in options.items() if k in ("temperature", "num_valid_tokens")}
    teacher = OutputHead(*tensors[3:], LogitOptions(**of_teacher))
    weights = torch.linspace(0, 0.2, N, dtype=torch.float64)
    return [x.requires_grad_() for x in tensors[:3]], LogitOptions(**options), teacher, weights


def plain(inputs, options, teacher, weights, beta):
    """The same token by token and id by id in float64: (sum, divergences)."""
    hidden, weight, bias = inputs
    values = []
    for row in range(N):
        q, p = (
            (o.transform(h[row] @ w.T + b) / o.temperature)[: o.num_valid_tokens].softmax(-1)
            for h, w, b, o in ((hidden, weight, bias, options), teacher)
        )
        value = 0.0
        for j in range(len(q)):
            m = beta * p[j] + (1 - beta) * q[j]
            if beta == FORWARD_KL:
                value = value + p[j] * (p[j] / q[j]).log()
            elif beta == REVERSE_KL:
                value = value + q[j] * (q[j] / p[j]).log()
            else:
                value = value + beta * p[j] * (p[j] / m).log() + (1 - beta) * q[j] * (q[j] / m).log()
        values.append(value)
    values = torch.stack(values)
    return (values * weights).sum(), values


def fast(inputs, options, teacher, weights, beta):
    return summed_divergence(OutputHead(*inputs, options), teacher, beta, weights)


def swapped(inputs, options, teacher, weights, beta):
    """The divergence of the student's distribution from the teacher's read the wrong way round."""
    mirrored = REVERSE_KL if beta == FORWARD_KL else FORWARD_KL if beta == REVERSE_KL else beta
    if mirrored != beta:
        return fast(inputs, options, teacher, weights, mirrored)
    other = OutputHead(*(x.detach() for x in inputs), options)
    return summed_divergence(teacher, other, beta, weights)


@forms(
    fast,
    swapped=swapped,
    beta_mirrored=lambda *x: fast(*x[:-1], 1 - x[-1]),
    temperature_ignored=lambda i, o, t, w, b: fast(
        i, LogitOptions(), t._replace(options=LogitOptions()), w, b
    ),
    temperature_of_the_student_alone=lambda i, o, t, w, b: fast(
        i, o, t._replace(options=LogitOptions()), w, b
    ),
    weights_left_out=lambda i, o, t, w, b: fast(i, o, t, torch.ones_like(w), b),
)
@pytest.mark.parametrize("beta", [b for b in BETAS if b != 0.5])
def test_values_and_gradients_are_those_of_a_plain_loop(form, is_right, beta, monkeypatch):
    monkeypatch.setattr(output_head, "CPU_CHUNK_ELEMENTS", 4 * 3 * V)  # three tokens
    inputs, *rest = make(temperature=0.6)

    def check(form):
        (expected, of_tokens), (found, found_of_tokens) = (
            plain(inputs, *rest, beta),
            form(inputs, *rest, beta),
        )
        close(found.detach(), expected.detach(), 2e-6)
        close(found_of_tokens, of_tokens.detach(), 2e-6)
        assert not found_of_tokens.requires_grad
        slow = torch.autograd.grad(-3 * expected, inputs)
        for a, b in zip(torch.autograd.grad(-3 * found, inputs), slow, strict=True):
            close(a, b, 2e-6)

    judge(check, form, is_right)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("case", CASES)
def test_every_treatment_of_logits_is_that_of_a_plain_loop(case, beta):
    rows = TEACHER_V if "num_valid_tokens" in CASES[case] else V
    inputs, *rest = make(teacher_rows=rows, **CASES[case])
    expected, found = plain(inputs, *rest, beta)[0], fast(inputs, *rest, beta)[0]
    close(found.detach(), expected.detach(), 2e-6)
    slow = torch.autograd.grad(expected, inputs)
    for a, b in zip(torch.autograd.grad(found, inputs), slow, strict=True):
        close(a, b, 2e-6)
    if "num_valid_tokens" in CASES[case]:
        assert slow[2][VALID:].eq(0).all()


def test_divergences_by_hand():
    """p = (1/2, 1/4, 1/4) and q = (1/8, 3/8, 1/2)."""
    p, q = torch.tensor([[1 / 2, 1 / 4, 1 / 4]]), torch.tensor([[1 / 8, 3 / 8, 1 / 2]])
    forward = math.log(4) / 2 + math.log(2 / 3) / 4 + math.log(1 / 2) / 4
    reverse = math.log(1 / 4) / 8 + math.log(3 / 2) * 3 / 8 + math.log(2) / 2
    # beta 3/4: m = 3/4 p + 1/4 q = (13, 9, 10) / 32
    jsd = 0.75 * (math.log(16 / 13) / 2 + math.log(8 / 9) / 4 + math.log(8 / 10) / 4)
    jsd += 0.25 * (math.log(4 / 13) / 8 + math.log(12 / 9) * 3 / 8 + math.log(16 / 10) / 2)
    for beta, expected in ((FORWARD_KL, forward), (REVERSE_KL, reverse), (0.75, jsd)):
        close(divergence(q.log(), p.log(), beta)[0], [expected])


@pytest.mark.parametrize(("end", "toward"), [(FORWARD_KL, 1e-4), (REVERSE_KL, 1 - 1e-4)])
def test_jsd_meets_both_kls_by_what_it_is_small_by(end, toward):
    """GKD's JSD(beta) itself is 0 at both ends; TRL has the KLs there, and so have we."""
    g = torch.Generator().manual_seed(1)
    q, p = torch.randn(2, 5, 40, generator=g, dtype=torch.float64).log_softmax(-1)
    small, scale = divergence(q, p, toward), min(toward, 1 - toward)
    for near, at_end in zip(small, divergence(q, p, end), strict=True):
        close(near / scale, at_end, 2e-3 * float(at_end.abs().max()))
        assert float(near.abs().max()) < 2e-4 * float(at_end.abs().max())


@pytest.mark.parametrize("beta", BETAS)
def test_equal_distributions_have_no_divergence_and_no_gradient_and_others_have_more(beta):
    g = torch.Generator().manual_seed(2)
    q, p = torch.randn(2, 64, 500, generator=g).log_softmax(-1)
    value, slopes = divergence(q, q.clone(), beta)
    close(value, torch.zeros(64), 1e-6)
    close(slopes, torch.zeros(64, 500), 1e-7)
    assert (divergence(q, p, beta)[0] > 0.01).all()


@pytest.mark.parametrize("beta", BETAS)
def test_a_chunk_of_fewer_tokens_changes_nothing(beta, monkeypatch):
    inputs, *rest = make()  # float64: sums in another order round alike on no CPU
    found = []
    for num_tokens in (1, 4, 100):
        monkeypatch.setattr(output_head, "CPU_CHUNK_ELEMENTS", module.TENSORS_OF_A_CHUNK * num_tokens * V)
        total, of_tokens = fast(inputs, *rest, beta)
        found.append((of_tokens, *torch.autograd.grad(total, inputs)))
    for other in found[:2]:
        for a, b in zip(other, found[2], strict=True):
            close(a, b, 2e-6 if a.dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("beta", BETAS)
def test_no_tensor_is_larger_than_a_chunk_and_nothing_of_its_size_waits(beta, monkeypatch):
    monkeypatch.setattr(output_head, "CPU_CHUNK_ELEMENTS", module.TENSORS_OF_A_CHUNK * 5 * 300)
    hidden, weight = torch.randn(64, 4).requires_grad_(), torch.randn(200, 4).requires_grad_()
    options, saved = LogitOptions(num_valid_tokens=200), []
    teacher = OutputHead(torch.randn(64, 3), torch.randn(300, 3), None, options)  # with more padding
    with (
        LargestTensor() as largest,
        torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x),
    ):
        student = OutputHead(hidden, weight, None, options)
        total, _ = summed_divergence(student, teacher, beta, torch.ones(64))
        total.backward()
    assert largest.num_elements == 5 * 300 and not saved


def test_without_gradients_none_are_made(monkeypatch):
    monkeypatch.setattr(module, "HeadGradients", None)
    with torch.no_grad():
        inputs, *rest = make()
        assert fast(inputs, *rest, 0.5)[1].shape == (N,)


def test_the_reward_of_the_sampled_token_has_the_gradient_of_the_reverse_kl_on_average():
    """Its advantage is log p - log q, each token counted as often as the student draws it."""
    inputs, options, teacher, weights = make()
    expected = torch.autograd.grad(fast(inputs, options, teacher, weights, REVERSE_KL)[0], inputs[1])[0]
    student = OutputHead(*inputs, options)
    total = 0.0
    for token in range(V):
        ids = torch.full((N,), token)
        logprobs = student.logprobs(ids)[0].double()
        of_teacher = teacher.logprobs(ids)[0].double()
        advantages = (of_teacher - logprobs).detach()
        total = total - (logprobs.detach().exp() * advantages * logprobs * weights).sum()
    close(torch.autograd.grad(total, inputs[1])[0], expected, 1e-5)


def test_scores_beside_the_divergence_are_those_of_the_head_alone():
    inputs, options, teacher, weights = make(temperature=0.7)
    ids = torch.arange(N)
    student = OutputHead(*inputs, options)
    both = scores_and_divergence(student, ids, teacher=teacher, beta=0.4, token_weights=weights)
    alone = (student.logprobs(ids, with_entropy=True), fast(inputs, options, teacher, weights, 0.4))
    for found, expected in zip(both, [x for part in alone for x in part], strict=True):
        assert torch.equal(found, expected)


def test_logits_of_minus_infinity_are_no_nan():
    """A token that one of both cannot give; JSD bounds it, the KL that it is in must show it."""
    never = [[-math.inf, 0.0, 0.0], [0.0, -math.inf, 0.0]]
    q, p = (module._logprobs(torch.tensor([logits]), LogitOptions()) for logits in never)
    for beta in BETAS:
        value, slopes = divergence(q, p, beta)
        assert not value.isnan().any() and not slopes.isnan().any()
        assert (float(value) > 1e20) == (beta in (FORWARD_KL, REVERSE_KL))
    close(divergence(q, p, 0.5)[0], [0.5 * math.log(2)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_models_have_fp32_divergences(dtype):
    inputs, *rest = make(dtype)
    total, of_tokens = fast(inputs, *rest, 0.5)
    assert total.dtype == of_tokens.dtype == torch.float32
    exact = [x.detach().double().requires_grad_() for x in inputs]
    teacher = OutputHead(*(x.double() for x in rest[1][:3]), rest[1].options)
    expected = plain(exact, rest[0], teacher, rest[2], 0.5)[0]
    close(total.detach(), expected.detach(), 0.02 * float(expected.detach()))
    slow = torch.autograd.grad(expected, exact)
    for a, b in zip(torch.autograd.grad(total, inputs), slow, strict=True):
        assert a.dtype == dtype
        close(a, b, 0.02 * float(b.abs().max()))


def test_no_tokens_have_no_divergence():
    inputs, options, teacher, weights = make()
    short = teacher._replace(hidden=teacher.hidden[:0])
    total, of_tokens = fast([inputs[0][:0], *inputs[1:]], options, short, weights[:0], 0.5)
    assert of_tokens.shape == (0,) and not torch.autograd.grad(total, inputs[1])[0].any()
