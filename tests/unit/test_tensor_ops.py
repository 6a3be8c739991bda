"""Log-probabilities and entropy against float64, their memory and gradients; masked means."""

import math

import pytest
import torch
from right_or_wrong import forms, judge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.models.tensor_ops import masked_mean, masked_sum, token_entropy, token_logprobs

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
    ),
]


def random_logits(*shape: int, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_ids(*shape: int, below: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))


def loop_logprob(row: list[float], token_id: int, temperature: float) -> float:
    total = math.fsum(math.exp(x / temperature) for x in row)
    return row[token_id] / temperature - math.log(total)


def loop_entropy(row: list[float], temperature: float) -> float:
    logprobs = [loop_logprob(row, j, temperature) for j in range(len(row))]
    return -math.fsum(math.exp(x) * x for x in logprobs)


# --- token_logprobs ---


def plain_logprobs(logits, token_ids, *, temperature=1.0, num_valid_tokens=None):
    scaled = (logits / temperature)[..., :num_valid_tokens].log_softmax(-1)
    return scaled.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)


LOGPROB_FORMS = forms(
    token_logprobs,
    temperature_times=lambda logits, ids, temperature, **_: plain_logprobs(logits * temperature**2, ids),
    temperature_after_softmax=lambda logits, ids, temperature, **_: plain_logprobs(logits, ids) / temperature,
    probability=lambda logits, ids, **options: plain_logprobs(logits, ids, **options).exp(),
    next_token=lambda logits, ids, **options: plain_logprobs(logits, ids.roll(-1, -1), **options),
    bf16=lambda logits, ids, **options: plain_logprobs(logits.bfloat16(), ids, **options).float(),
)


@LOGPROB_FORMS
def test_logprobs_by_hand(form, is_right):
    def check(form):
        # weights e^(x / 2): 1, 2, 5 -> sum 8; chosen 5 / 8 and 1 / 8
        logits = 2 * torch.tensor([[1.0, 2.0, 5.0], [1.0, 2.0, 5.0]]).log()
        expected = torch.tensor([math.log(5 / 8), math.log(1 / 8)])
        torch.testing.assert_close(form(logits, torch.tensor([2, 0]), temperature=2.0), expected)

    judge(check, form, is_right)


@LOGPROB_FORMS
def test_logprobs_equal_a_float64_loop_to_a_millionth(form, is_right):
    def check(form):
        logits, ids = random_logits(3, 5, 257), random_ids(3, 5, below=257)
        rows = logits.double().reshape(-1, 257).tolist()
        pairs = zip(rows, ids.flatten().tolist(), strict=True)
        expected = torch.tensor([loop_logprob(row, i, 0.7) for row, i in pairs], dtype=torch.float64)
        result = form(logits, ids, temperature=0.7)
        assert result.dtype == torch.float32 and result.shape == ids.shape
        torch.testing.assert_close(result.double().flatten(), expected, rtol=0, atol=1e-6)

    judge(check, form, is_right)


@pytest.mark.parametrize("device", DEVICES)
def test_logprobs_of_a_large_vocabulary_equal_float64_to_a_millionth(device):
    # Below -16 the nearest fp32 itself may be a millionth away.
    logits = random_logits(64, 32000, scale=1.0).to(device)
    ids = random_ids(64, below=32000).to(device)
    ids[:8] = logits[:8].argmax(-1)
    expected = plain_logprobs(logits.double(), ids)
    torch.testing.assert_close(token_logprobs(logits, ids).double(), expected, rtol=0, atol=1e-6)


def test_logprobs_are_fp32_for_bf16_logits():
    logits, ids = random_logits(4, 100).bfloat16(), random_ids(4, below=100)
    result = token_logprobs(logits, ids)
    assert result.dtype == torch.float32
    torch.testing.assert_close(
        result.double(), plain_logprobs(logits.double(), ids), rtol=0, atol=1e-6
    )  # the logits are bf16, nothing after them


def test_logprobs_keep_float64_logits_in_float64_until_the_end():
    logits, ids = 1e6 + random_logits(4, 100).double(), random_ids(4, below=100)
    expected = plain_logprobs(logits, ids)  # fp32 holds 1e6 to 0.06 only
    torch.testing.assert_close(token_logprobs(logits, ids).double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("vocabulary", [257, 1000])
def test_chunks_and_neighbours_change_no_bit(vocabulary):
    logits, ids = random_logits(6, 7, vocabulary), random_ids(6, 7, below=vocabulary)
    whole = token_logprobs(logits, ids, temperature=0.9)
    for chunk in (1, 5, 41, 42, 1000):
        assert torch.equal(token_logprobs(logits, ids, temperature=0.9, chunk_tokens=chunk), whole)
    assert torch.equal(token_logprobs(logits[2, 3], ids[2, 3], temperature=0.9), whole[2, 3])
    assert torch.equal(token_logprobs(logits[2:3], ids[2:3], temperature=0.9), whole[2:3])


@LOGPROB_FORMS
def test_gradient_is_that_of_the_plain_form(form, is_right):
    def check(form):
        upstream = random_logits(2, 6, seed=3)
        ids = random_ids(2, 6, below=50)
        logits = random_logits(2, 6, 50).requires_grad_()
        exact = logits.detach().double().requires_grad_()
        (form(logits, ids, temperature=1.3) * upstream).sum().backward()
        (plain_logprobs(exact, ids, temperature=1.3) * upstream).sum().backward()
        torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=0, atol=2e-6)

    judge(check, form, is_right)


@pytest.mark.parametrize("chunk", [1, 4, None])
def test_gradient_flows_through_a_slice_and_has_the_dtype_of_the_logits(chunk):
    logits = random_logits(3, 6, 50).bfloat16().requires_grad_()
    exact = logits.detach().double().requires_grad_()
    ids = random_ids(3, 5, below=50)
    token_logprobs(logits[:, :-1], ids, chunk_tokens=chunk).sum().backward()
    plain_logprobs(exact[:, :-1], ids).sum().backward()
    assert logits.grad.dtype == torch.bfloat16
    torch.testing.assert_close(
        logits.grad.double(), exact.grad, rtol=0, atol=2e-3
    )  # half a bf16 step below 1


def test_vocabulary_padding_is_out_of_the_softmax_and_gets_no_gradient():
    logits, ids = random_logits(2, 4, 60), random_ids(2, 4, below=50)
    short = token_logprobs(logits[..., :50].clone(), ids)
    for padding in (0.0, 1e4, torch.nan):
        logits[..., 50:] = padding
        leaf = logits.clone().requires_grad_()
        result = token_logprobs(leaf, ids, num_valid_tokens=50)
        result.sum().backward()
        assert torch.equal(result, short)
        assert leaf.grad[..., 50:].eq(0).all() and leaf.grad.isfinite().all()


def test_an_id_of_the_vocabulary_padding_is_impossible():
    leaf = random_logits(2, 60).requires_grad_()
    result = token_logprobs(leaf, torch.tensor([3, 55]), num_valid_tokens=50)
    assert result[0].isfinite() and result[1] == -torch.inf
    result.sum().backward()
    # (1 at the id, if it takes part) - p
    expected = -leaf.detach()[:, :50].softmax(-1)
    expected[0, 3] += 1
    torch.testing.assert_close(leaf.grad[:, :50], expected, rtol=0, atol=1e-6)
    assert leaf.grad[:, 50:].eq(0).all()


def test_logits_of_minus_infinity_are_impossible_tokens():
    logits = torch.tensor([[0.0, -torch.inf, 0.0]], requires_grad=True)
    logprobs = token_logprobs(logits, torch.tensor([2]))
    entropy = token_entropy(logits)
    torch.testing.assert_close(logprobs, torch.tensor([-math.log(2)]))  # two equally likely tokens
    torch.testing.assert_close(entropy, torch.tensor([math.log(2)]))
    (logprobs + entropy).sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.5, 0.0, 0.5]]))


class LargestFloat(TorchDispatchMode):
    """Records the number of elements of the largest fp32 or float64 tensor that any operation makes."""

    num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [
            leaf.numel()
            for leaf in tree_leaves(result)
            if isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.float32, torch.float64)
        ]
        self.num_elements = max([self.num_elements, *sizes])
        return result


@forms(
    lambda logits, ids: token_logprobs(logits, ids, chunk_tokens=4) + token_entropy(logits, chunk_tokens=4),
    log_softmax_and_gather=lambda logits, ids: plain_logprobs(logits.float(), ids),
)
def test_no_fp32_copy_of_all_logits_is_ever_made(form, is_right):
    def check(form):
        logits = random_logits(8, 9, 300).bfloat16().requires_grad_()
        with LargestFloat() as largest:
            form(logits[:, :-1], random_ids(8, 8, below=300)).sum().backward()
        assert logits.grad is not None
        assert largest.num_elements <= 4 * 300

    judge(check, form, is_right)


def test_saved_for_backward_are_the_logits_as_they_came_and_one_number_a_row():
    saved = []
    logits = random_logits(4, 8, 100).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        token_logprobs(logits, random_ids(4, 8, below=100))
    assert sorted(x.numel() for x in saved) == [32, 32, 3200]
    assert all(x.dtype == torch.bfloat16 for x in saved if x.numel() == 3200)
    assert any(x.data_ptr() == logits.data_ptr() for x in saved)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"temperature": 0.0}, "temperature 0"),
        ({"temperature": -1.0}, "temperature -1"),
        ({"num_valid_tokens": 11}, "num_valid_tokens 11"),
        ({"num_valid_tokens": 0}, "num_valid_tokens 0"),
        ({"chunk_tokens": 0}, "chunk_tokens 0"),
    ],
)
def test_an_option_out_of_range_is_named(options, word):
    with pytest.raises(ValueError, match=word):
        token_logprobs(torch.zeros(2, 10), torch.zeros(2, dtype=torch.int64), **options)
    with pytest.raises(ValueError, match=word):
        token_entropy(torch.zeros(2, 10), **options)


def test_ids_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="leading shape"):
        token_logprobs(torch.zeros(2, 3, 10), torch.zeros(2, 4, dtype=torch.int64))


def test_no_rows_give_no_logprobs():
    logits = torch.zeros(2, 0, 10, requires_grad=True)
    result = token_logprobs(logits, torch.zeros(2, 0, dtype=torch.int64))
    assert result.shape == (2, 0) and token_entropy(logits).shape == (2, 0)
    result.sum().backward()
    assert logits.grad.shape == logits.shape


# --- token_entropy ---


def plain_entropy(logits, *, temperature=1.0, num_valid_tokens=None):
    logprobs = (logits / temperature)[..., :num_valid_tokens].log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


ENTROPY_FORMS = forms(
    token_entropy,
    sign=lambda logits, **options: -plain_entropy(logits, **options),
    bits=lambda logits, **options: plain_entropy(logits, **options) / math.log(2),
    mean_over_vocabulary=lambda logits, **options: plain_entropy(logits, **options) / logits.shape[-1],
    no_temperature=lambda logits, **_: plain_entropy(logits),
)


@ENTROPY_FORMS
def test_entropy_by_hand(form, is_right):
    def check(form):
        # p = 1/2, 1/4, 1/4: 1/2 log 2 + 2 * 1/4 log 4 = 3/2 log 2
        # half the log weights, at temperature 1/2
        logits = torch.tensor([[0.5, 0.25, 0.25]]).log() / 2
        expected = torch.tensor([1.5 * math.log(2)])
        torch.testing.assert_close(form(logits, temperature=0.5), expected)

    judge(check, form, is_right)


@ENTROPY_FORMS
def test_entropy_equals_a_float64_loop(form, is_right):
    def check(form):
        logits = random_logits(3, 5, 257)
        rows = logits.double().reshape(-1, 257).tolist()
        expected = torch.tensor([loop_entropy(row, 0.7) for row in rows], dtype=torch.float64)
        torch.testing.assert_close(
            form(logits, temperature=0.7).double().flatten(), expected, rtol=0, atol=1e-6
        )

    judge(check, form, is_right)


@ENTROPY_FORMS
def test_entropy_gradient_is_that_of_the_plain_form(form, is_right):
    def check(form):
        upstream = random_logits(2, 6, seed=3)
        logits = random_logits(2, 6, 50).requires_grad_()
        exact = logits.detach().double().requires_grad_()
        (form(logits, temperature=1.3) * upstream).sum().backward()
        (plain_entropy(exact, temperature=1.3) * upstream).sum().backward()
        torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=0, atol=2e-6)

    judge(check, form, is_right)


def test_entropy_of_padded_vocabulary_and_of_any_chunk():
    logits = random_logits(2, 4, 60)
    short = token_entropy(logits[..., :50].clone())
    logits[..., 50:] = torch.nan
    leaf = logits.requires_grad_()
    for chunk in (1, 3, None):
        assert torch.equal(token_entropy(leaf, num_valid_tokens=50, chunk_tokens=chunk), short)
    token_entropy(leaf, num_valid_tokens=50).sum().backward()
    assert leaf.grad.isfinite().all() and leaf.grad[..., 50:].eq(0).all()


# --- masked_sum, masked_mean ---


@forms(
    masked_mean,
    padded_positions=lambda x, mask, dim=None: x.nan_to_num(0).sum(dim) / x.shape[-1],
    times_mask=lambda x, mask, dim=None: (x * mask).sum(dim) / mask.sum(dim),
    opposite_mask=lambda x, mask, dim=None: masked_mean(x, ~mask, dim),
)
def test_masked_mean_by_hand(form, is_right):
    def check(form):
        x = torch.tensor([[1.0, 2.0, 6.0, torch.nan], [5.0, torch.inf, 9.0, -9.0]])
        mask = torch.tensor([[True, True, True, False], [True, False, False, False]])
        torch.testing.assert_close(form(x, mask, 1), torch.tensor([3.0, 5.0]))  # (1 + 2 + 6) / 3, 5 / 1

    judge(check, form, is_right)


def test_masked_sum_and_mean_over_everything_and_nothing():
    x = torch.tensor([[1.0, 2.0], [4.0, torch.nan]])
    mask = torch.tensor([[True, True], [True, False]])
    assert masked_sum(x, mask).item() == 7.0  # 1 + 2 + 4
    assert masked_mean(x, mask).item() == pytest.approx(7 / 3)
    assert masked_sum(x, mask, 0).tolist() == [5.0, 2.0]
    nothing = torch.zeros_like(mask)
    assert masked_mean(x, nothing).item() == 0.0
    assert masked_mean(x, nothing, dim=1, empty=-1.0).tolist() == [-1.0, -1.0]


def test_masked_mean_of_bf16_is_added_up_in_fp32():
    x = torch.ones(1000, dtype=torch.bfloat16)  # bf16 counts to 256 and stays there
    assert masked_mean(x, x > 0).item() == 1.0 and masked_sum(x, x > 0).dtype == torch.float32


def test_masked_mean_gives_no_gradient_to_masked_entries():
    x = torch.tensor([1.0, 2.0, torch.nan], requires_grad=True)
    masked_mean(x, torch.tensor([True, True, False])).backward()
    assert x.grad.tolist() == [0.5, 0.5, 0.0]
