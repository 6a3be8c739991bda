"""Groups of responses to one prompt: by hand, against float64 loops and wrong forms.

A6 and the like in a docstring are rows of the seeds.
"""

import math

import pytest
import torch
from response_batches import PADDING, fill, random_batch
from right_or_wrong import close, forms, judge

from common.models.tensor_ops import whiten
from step3_ppo.group_math import GroupBaselines, constant_groups, group_baselines, group_whiten

BY_HAND_SCORES = torch.tensor([1.0, 10.0, 3.0, 8.0, 20.0, 18.0])
BY_HAND_GROUPS = torch.tensor([7, -2, 7, 7, -2, 2**40])  # {1, 3, 8}, {10, 20}, {18}


def random_groups(num: int = 40, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return 3 + torch.randn(num, generator=generator), torch.randint(-3, 9, (num,), generator=generator)


def equal_scores() -> tuple[torch.Tensor, torch.Tensor]:
    """Groups of 3 to 8 equal scores that no power of 2 has."""
    generator = torch.Generator().manual_seed(0)
    sizes = [3 + i % 6 for i in range(200)]
    scores = torch.cat([torch.rand(1, generator=generator).expand(size) for size in sizes])
    return scores, torch.arange(200).repeat_interleave(torch.tensor(sizes))


def loop_baselines(scores, group_ids):
    rows = []
    for i, group in enumerate(group_ids.tolist()):
        members = [s for s, g in zip(scores.tolist(), group_ids.tolist(), strict=True) if g == group]
        others = [s for j, s in enumerate(scores.tolist()) if group_ids[j] == group and j != i]
        mean = math.fsum(members) / len(members)
        square = math.fsum((s - mean) ** 2 for s in members)
        own = scores[i].item()
        rows.append(
            (
                mean,
                math.sqrt(square / (len(members) - 1)) if others else 0.0,
                math.fsum(others) / len(others) if others else own,
            )
        )
    return torch.tensor(rows, dtype=torch.float64).T


def one_pass(scores, group_ids, correct=True):
    """The deviation from E[x^2] - E[x]^2, in float64."""
    baselines = group_baselines(scores, group_ids)
    mean_square = group_baselines(scores.double().square(), group_ids).mean
    size = (group_ids[:, None] == group_ids).sum(1)
    bessel = size / (size - 1).clamp(min=1) if correct else 1
    return baselines._replace(std=((mean_square - baselines.mean.square()) * bessel).sqrt())


def by_place(scores, group_ids):
    """Take groups to be equally long and next to each other, as `view(-1, group_size)` does."""
    size = len(scores) // len(group_ids.unique())
    rows = scores.double()[: len(scores) // size * size].view(-1, size)
    mean = rows.mean(1, keepdim=True).expand_as(rows).flatten()
    std = rows.std(1, keepdim=True).expand_as(rows).flatten()
    others = ((rows.sum(1, keepdim=True) - rows) / (size - 1)).flatten()
    return GroupBaselines(mean, std, others)


def population(scores, group_ids):
    size = (group_ids[:, None] == group_ids).sum(1)
    baselines = group_baselines(scores, group_ids)
    return baselines._replace(std=baselines.std * ((size - 1) / size).sqrt())


def in_fp32(scores, group_ids):
    """Of equal numbers neither the sum nor its n-th part is exact."""
    same = (group_ids[:, None] == group_ids).float()
    sums, size = same @ scores, same.sum(1)
    mean = sums / size
    std = ((same * (scores - mean[:, None]).square()).sum(1) / (size - 1).clamp(min=1)).sqrt()
    return GroupBaselines(mean.double(), std.double(), ((sums - scores) / (size - 1).clamp(min=1)).double())


BASELINE_FORMS = forms(
    group_baselines,
    by_place=by_place,
    population_deviation=population,
    of_the_batch=lambda scores, ids: group_baselines(scores, torch.zeros_like(ids)),
    leaves_none_out=lambda scores, ids: group_baselines(scores, ids)._replace(
        leave_one_out_mean=group_baselines(scores, ids).mean
    ),
)


@BASELINE_FORMS
def test_group_baselines_by_hand(form, is_right):
    """A9: group_ids, not places. A7: leave-one-out."""

    def check(form):
        found = form(BY_HAND_SCORES, BY_HAND_GROUPS)
        close(found.mean, [4.0, 15.0, 4.0, 4.0, 15.0, 18.0])
        three, two = math.sqrt((9 + 1 + 16) / 2), math.sqrt(50)
        close(found.std, [three, two, three, three, two, 0.0])
        # (3 + 8) / 2; 20; (1 + 8) / 2; (1 + 3) / 2; 10; nobody else: its own
        close(found.leave_one_out_mean, [5.5, 20.0, 4.5, 2.0, 10.0, 18.0])

    judge(check, form, is_right)


@BASELINE_FORMS
def test_group_baselines_equal_a_float64_loop(form, is_right):
    def check(form):
        scores, ids = random_groups()
        for found, expected in zip(form(scores, ids), loop_baselines(scores, ids), strict=True):
            close(found, expected, atol=1e-12)

    judge(check, form, is_right)


@forms(
    group_baselines,
    one_pass=one_pass,
    sums_in_fp32=in_fp32,
)
def test_equal_scores_have_an_advantage_of_exactly_0(form, is_right):
    """A6: the one-pass variance is negative for some of them, and its root NaN."""

    def check(form):
        scores, ids = equal_scores()
        found = form(scores, ids)
        assert (scores.double() - found.mean).eq(0).all()
        assert (scores.double() - found.leave_one_out_mean).eq(0).all()
        assert found.std.eq(0).all()

    judge(check, form, is_right)


def test_the_one_pass_variance_of_equal_scores_is_negative_in_float64():
    """A6: what the two passes are there for."""
    assert one_pass(*equal_scores()).std.isnan().any()
    scores, ids = random_groups()
    close(one_pass(scores, ids).std[:5], group_baselines(scores, ids).std[:5])  # else the form is right


def test_rows_of_groups_may_stand_anywhere_and_have_any_id():
    scores, ids = random_groups()
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))
    expected = group_baselines(scores, ids)
    for found, wanted in zip(group_baselines(scores[order], ids[order]), expected, strict=True):
        close(found, wanted[order], atol=1e-12)
    for found, wanted in zip(group_baselines(scores, -977 * ids), expected, strict=True):
        assert torch.equal(found, wanted)


def test_a_group_reads_no_other_group():
    scores, ids = random_groups()
    expected = group_baselines(scores, ids)
    spoilt = group_baselines(torch.where(ids == 3, torch.nan, scores), ids)
    for found, wanted in zip(spoilt, expected, strict=True):
        assert torch.equal(found[ids != 3], wanted[ids != 3]) and found[ids == 3].isnan().all()


def test_leave_one_out_is_the_mean_rescaled():
    """n / (n - 1) (x - mean) = x - mean of the others."""
    scores, ids = random_groups()
    size = (ids[:, None] == ids).sum(1)
    found = group_baselines(scores, ids)
    expected = (scores.double() - found.mean) * size / (size - 1).clamp(min=1)
    close(scores.double() - found.leave_one_out_mean, expected, atol=1e-12)


def test_groups_carry_no_gradient_and_there_may_be_none():
    scores = torch.ones(3, requires_grad=True)
    assert not any(x.requires_grad for x in group_baselines(scores, torch.zeros(3).long()))
    empty = torch.zeros(0).long()
    assert all(x.shape == (0,) for x in group_baselines(torch.zeros(0), empty))
    assert constant_groups(torch.zeros(0), empty).shape == (0,)
    assert group_whiten(torch.zeros(2, 0), torch.zeros(2, 0).bool(), torch.arange(2)).shape == (2, 0)


# --- constant_groups ---


@forms(
    constant_groups,
    deviation_of_one_pass=lambda scores, ids: one_pass(scores, ids).std == 0,
    of_the_batch=lambda scores, ids: constant_groups(scores, torch.zeros_like(ids)),
    all_zero=lambda scores, ids: constant_groups(scores, ids) & (scores == 0),
)
def test_constant_groups_by_hand(form, is_right):
    def check(form):
        scores = torch.tensor([0.1, 1.0, 0.1, 0.1, 0.0, 5.0, 1.0, 0.1])
        ids = torch.tensor([4, 2, 4, 4, 2, 9, 0, 0])
        assert form(scores, ids).tolist() == [True, False, True, True, False, True, False, False]
        assert form(*equal_scores()).all()

    judge(check, form, is_right)


# --- group_whiten ---


def loop_group_whiten(x, mask, group_ids, eps=1e-8):
    whitened = torch.zeros(x.shape, dtype=torch.float64)
    for group in set(group_ids.tolist()):
        rows = [i for i, g in enumerate(group_ids.tolist()) if g == group]
        kept = [x[i, t].item() for i in rows for t in range(x.shape[1]) if mask[i, t]]
        mean = math.fsum(kept) / max(len(kept), 1)
        variance = math.fsum((value - mean) ** 2 for value in kept) / max(len(kept), 1)
        for i in rows:
            for t in range(x.shape[1]):
                if mask[i, t]:
                    whitened[i, t] = (x[i, t].item() - mean) / math.sqrt(variance + eps)
    return whitened


def packed_group_whiten(x, mask, group_size):
    """The seed's loop over the tokens end to end, cut by cu_seqlens; it needs groups of one size in a row."""
    cu_seqlens = [0, *mask.sum(1).cumsum(0).tolist()]
    advantages, parts = x[mask], []
    for i in range(0, len(x), group_size):
        chunk = advantages[cu_seqlens[i] : cu_seqlens[i + group_size]]
        parts.append(whiten(chunk, torch.ones_like(chunk).bool()))
    whitened = torch.zeros_like(x)
    whitened[mask] = torch.cat(parts)
    return whitened


def one_pass_group_whiten(x, mask, group_ids):
    whitened = torch.zeros_like(x)
    for group in group_ids.unique():
        here = mask & (group_ids == group)[:, None]
        kept = x[here].double()
        variance = kept.square().mean() - kept.mean().square()
        whitened[here] = ((kept - kept.mean()) / variance.sqrt()).float()
    return whitened


GROUP_WHITEN_FORMS = forms(
    group_whiten,
    whole_batch=lambda x, mask, ids: whiten(x, mask),
    statistics_of_padding=lambda x, mask, ids: group_whiten(x, torch.ones_like(mask), ids) * mask,
    each_row=lambda x, mask, ids: group_whiten(x, mask, torch.arange(len(ids))),
    only_centred=lambda x, mask, ids: group_whiten(x, mask, ids, eps=1.0),
    bessel=lambda x, mask, ids: group_whiten(x, mask, ids) * math.sqrt(5 / 6),
)


@GROUP_WHITEN_FORMS
def test_group_whiten_by_hand(form, is_right):
    """A6, A7: normalisation inside a group's tokens."""

    def check(form):
        x = torch.tensor([[1.0, 3.0, 99.0], [10.0, 99.0, 99.0], [5.0, 7.0, 99.0], [20.0, 99.0, 99.0]])
        mask = x != 99
        ids = torch.tensor([5, 6, 5, 6])
        # 1, 3, 5, 7: mean 4, variance 5; 10, 20: mean 15, variance 25
        root = math.sqrt(5)
        expected = [[-3 / root, -1 / root, 0], [-1, 0, 0], [1 / root, 3 / root, 0], [1, 0, 0]]
        close(form(x, mask, ids), expected)

    judge(check, form, is_right)


@GROUP_WHITEN_FORMS
def test_group_whiten_equals_a_float64_loop(form, is_right):
    def check(form):
        x, mask = random_batch(1, lengths=[9, 1, 4, 0, 8, 5, 3, 0])
        ids = torch.tensor([3, 1, 3, 3, 1, 8, 1, 0])
        close(form(x, mask, ids), loop_group_whiten(x, mask, ids), atol=2e-6)

    judge(check, form, is_right)


def test_group_whiten_is_the_seeds_loop_over_packed_sequences():
    """A7, A8, A9, A11: cu_seqlens, group after group, nothing crosses ranks."""
    x, mask = random_batch(1, lengths=[9, 1, 4, 2, 8, 5])
    close(group_whiten(x, mask, torch.tensor([0, 0, 0, 1, 1, 1])), packed_group_whiten(x, mask, 3))


@forms(group_whiten, one_pass=one_pass_group_whiten)
def test_constant_advantages_of_a_group_become_0(form, is_right):
    """A6: a group of equal advantages is common, and no NaN."""

    def check(form):
        scores, ids = equal_scores()
        x = scores[:, None].expand(-1, 3).contiguous()
        assert form(x, torch.ones_like(x).bool(), ids).eq(0).all()

    judge(check, form, is_right)


def test_group_whiten_does_not_read_padding_or_the_order_of_rows():
    """A23."""
    x, mask = random_batch(1)
    ids = torch.tensor([2, 1, 2, 1, 1])
    expected = group_whiten(x, mask, ids)
    assert expected.dtype == torch.float32
    for padding in PADDING:
        assert torch.equal(group_whiten(fill(x, mask, padding), mask, ids), expected)
    order = torch.tensor([4, 2, 0, 3, 1])
    close(group_whiten(x[order], mask[order], ids[order]), expected[order])


@pytest.mark.parametrize("lengths", [[0, 0, 3], [1, 0, 0]])
def test_groups_without_a_token_or_with_one(lengths):
    x, mask = random_batch(1, lengths=lengths)
    found = group_whiten(x, mask, torch.tensor([0, 0, 1]))
    assert found.isfinite().all() and found[~mask].eq(0).all() and found[:2].eq(0).all()
