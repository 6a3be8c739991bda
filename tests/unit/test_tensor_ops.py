"""common/models/tensor_ops.py: masked sums and whitening, by hand, against float64 and wrong forms."""

import functools
import math

import pytest
import torch
from right_or_wrong import close, forms, judge, play_ranks

from common.models.tensor_ops import masked_sum, whiten


def random_entries(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return 2 + 3 * torch.randn(*shape, generator=generator), torch.rand(*shape, generator=generator) < 0.5


@forms(
    whiten,
    adds_the_mean_back=lambda x, mask: whiten(x, mask) + mask * x[mask].mean(),
    statistics_of_padding=lambda x, mask: (x - x.mean()) * torch.rsqrt(x.var(correction=0)) * mask,
    divides_by_variance=lambda x, mask: whiten(x, mask) / x[mask].std(correction=0),
)
def test_whiten_by_hand(form, is_right):
    def check(form):
        # 1, 3, 5, 7: mean 4, variance (9 + 1 + 1 + 9) / 4 = 5
        x = torch.tensor([[1.0, 3.0, 100.0], [5.0, 7.0, -100.0]])
        mask = torch.tensor([[True, True, False], [True, True, False]])
        expected = torch.tensor([[-3.0, -1.0, 0.0], [1.0, 3.0, 0.0]]) / math.sqrt(5)
        close(form(x, mask), expected)

    judge(check, form, is_right)


def test_whiten_zeroes_what_is_masked():
    x = torch.tensor([1.0, 3.0, torch.nan])
    mask = torch.tensor([True, True, False])
    # mean 2, variance 1
    close(whiten(x, mask), [-1.0, 1.0, 0.0])
    assert whiten(x, torch.zeros(3).bool()).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_whiten_over_ranks_is_whiten_of_the_whole(num_ranks):
    x, mask = random_entries(4, 30)
    mask[3] = False  # a rank without a single response token still takes part
    shares = zip(x.chunk(num_ranks), mask.chunk(num_ranks), strict=True)
    results = play_ranks([functools.partial(whiten_share, *share) for share in shares])
    close(torch.cat(results), whiten(x, mask))


def whiten_share(x, mask, reduce_sum):
    return whiten(x, mask, reduce_sum=reduce_sum)


@forms(
    masked_sum,
    times_mask=lambda x, mask, dim: (x * mask).sum(dim),
    opposite_mask=lambda x, mask, dim: masked_sum(x, ~mask, dim),
    in_bf16=lambda x, mask, dim: torch.where(mask, x, 0.0).bfloat16().sum(dim),
)
def test_masked_sum_by_hand(form, is_right):
    def check(form):
        x = torch.tensor([[1.0, 2.0, 6.0, torch.nan], [5.0, torch.inf, 9.0, -9.0], [7.0] * 4])
        mask = torch.tensor([[True, True, True, False], [True, False, False, False], [False] * 4])
        assert form(x, mask, 1).tolist() == [9.0, 5.0, 0.0]  # 1 + 2 + 6, 5, nothing
        ones = torch.ones(1, 1001, dtype=torch.bfloat16)  # bf16 knows 1000 and 1004
        assert form(ones, ones > 0, 1).tolist() == [1001.0]

    judge(check, form, is_right)
