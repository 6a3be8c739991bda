"""The counter-based uniforms: their bits, their distribution, and that nothing else in a batch moves them."""

import itertools

import pytest
import torch
from chi_square import NUM_DRAWS, SMALLEST_P_VALUE, p_value
from right_or_wrong import forms, judge

from common.models.sampling import counter_uniform

MASK64 = 2**64 - 1
CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
)


def assert_uniform(cells: torch.Tensor, num_cells: int) -> None:
    observed = torch.bincount(cells.flatten(), minlength=num_cells).double()
    assert len(observed) == num_cells
    expected = torch.full_like(observed, cells.numel() / num_cells)
    p = p_value(observed, expected)
    assert SMALLEST_P_VALUE < p < 1 - SMALLEST_P_VALUE  # too even is not random either


def python_mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def python_uniform(seed: int, sample_id: int, position: int) -> float:
    gamma = 0x9E3779B97F4A7C15
    state = python_mix((seed + gamma) & MASK64)
    for word in (sample_id, position):
        state = python_mix((state + word * gamma) & MASK64)
    return (state >> 40) / 2**24


def test_the_mixer_is_splitmix64():
    # The first outputs of splitmix64 seeded with 0, as its authors' C code prints them.
    gamma = 0x9E3779B97F4A7C15
    outputs = [python_mix((i * gamma) & MASK64) for i in (1, 2, 3)]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_uniforms_are_those_of_unbounded_integers_and_of_every_version():
    edges = [0, 1, 2, 7, 2**31 - 1, 2**31, 2**40 + 3, 2**63 - 1]
    cases = list(itertools.product([0, 1, 1234, 2**63, 2**64 - 1, -1], edges, edges))
    for seed, group in itertools.groupby(cases, key=lambda case: case[0]):
        ids, positions = torch.tensor([case[1:] for case in group]).unbind(1)
        expected = [
            python_uniform(seed, *case) for case in zip(ids.tolist(), positions.tolist(), strict=True)
        ]
        assert counter_uniform(seed, ids, positions).tolist() == expected
    # A change of these changes every text that a resumed run goes on to write.
    pinned = counter_uniform(1234, torch.tensor([0, 0, 1, 5]), torch.tensor([0, 1, 0, 511]))
    assert (pinned * 2**24).long().tolist() == [2970356, 2995282, 11027298, 3397742]


def unmixed(seed, ids, positions):
    return ((seed + ids * 7919 + positions * 104729) % 2**24).float() / 2**24


UNIFORM_FORMS = forms(
    counter_uniform,
    unmixed=unmixed,
    ignores_position=lambda seed, ids, positions: counter_uniform(seed, ids, 0 * positions),
    ignores_sample=lambda seed, ids, positions: counter_uniform(seed, 0 * ids, positions),
    ignores_seed=lambda seed, ids, positions: counter_uniform(0, ids, positions),
    adds_sample_and_position=lambda seed, ids, positions: counter_uniform(seed, ids + positions, 0 * ids),
    squared=lambda seed, ids, positions: counter_uniform(seed, ids, positions).square(),
)


def grid(num_rows: int, num_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids, positions = torch.meshgrid(torch.arange(num_rows), torch.arange(num_columns), indexing="ij")
    return ids.flatten(), positions.flatten()


@UNIFORM_FORMS
def test_uniforms_are_uniform_and_neighbours_are_independent(form, is_right):
    def check(form):
        fixed = torch.zeros(NUM_DRAWS, dtype=torch.int64)
        counted = torch.arange(NUM_DRAWS)
        assert_uniform((form(3, counted, fixed) * 100).long(), 100)
        assert_uniform((form(3, fixed, counted) * 100).long(), 100)
        assert_uniform((form(3, *grid(200, 100)) * 2**24).long() % 64, 64)  # the low bits
        u = form(3, *grid(200, 100)).reshape(200, 100)
        assert_uniform((u * 100).long(), 100)
        tenths = (u * 10).long()
        assert_uniform(tenths[:, :-1] * 10 + tenths[:, 1:], 100)  # successive positions
        assert_uniform(tenths[:-1] * 10 + tenths[1:], 100)  # successive samples
        assert_uniform(tenths[:-1, 1:] * 10 + tenths[1:, :-1], 100)  # sample + 1 at position - 1
        other = (form(4, *grid(200, 100)).reshape(200, 100) * 10).long()
        assert_uniform(tenths * 10 + other, 100)  # successive seeds
        assert 0 <= u.min() and u.max() < 1 and u.dtype == torch.float32

    judge(check, form, is_right)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_uniforms_know_nothing_of_the_batch_and_the_device(device):
    ids, positions = grid(20, 30)
    whole = counter_uniform(7, ids, positions)
    order = torch.randperm(600, generator=torch.Generator().manual_seed(0))
    shuffled = counter_uniform(7, ids[order].to(device), positions[order].to(device))
    assert torch.equal(shuffled.cpu(), whole[order])
    assert torch.equal(
        counter_uniform(7, ids[17:18].to(device), positions[17:18].to(device)).cpu(), whole[17:18]
    )


def test_uniforms_of_another_dtype_are_refused():
    with pytest.raises(ValueError, match="int64"):
        counter_uniform(0, torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64))
