"""The sampler and its uniforms: their distribution against loops, their edges, independence of the batch."""

import itertools
import math

import pytest
import torch
from pretended_gpu import pretended_gpu
from right_or_wrong import forms, judge

from common.models import sampling
from common.models.sampling import counter_uniform, sampling_mask

NUM_DRAWS = 20_000
SMALLEST_P_VALUE = 1e-4  # the seeds are fixed, so a test that passes once passes always


def p_value(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the chi-square test's p-value; 0 where something was seen that cannot be."""
    possible = expected > 0
    if observed[~possible].any():
        return 0.0
    statistic = ((observed - expected)[possible].double().square() / expected[possible]).sum()
    half_freedom = torch.tensor((possible.sum().item() - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(half_freedom, statistic / 2).item()


def sample_tokens(logits, uniforms, **options):
    return sampling.sample_tokens(logits, uniforms, **options).token_ids


def loop_probabilities(
    row: list[float], *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> list[float]:
    largest = max(row)
    weights = [math.exp((x - largest) / temperature) for x in row]
    order = sorted(range(len(row)), key=lambda j: -weights[j])
    kept = order[: top_k or None]
    total, before, nucleus = math.fsum(weights[j] for j in kept), 0.0, set()
    for j in kept:
        if before < top_p * total:
            nucleus.add(j)
        before += weights[j]
    total = math.fsum(weights[j] for j in nucleus)
    return [weights[j] / total if j in nucleus else 0.0 for j in range(len(row))]


def loop_tokens(logits: torch.Tensor, uniforms: torch.Tensor, **options) -> list[int]:
    """The first token of each row whose cumulated probability is above the uniform."""
    rows = zip(logits.double().tolist(), uniforms.tolist(), strict=True)
    cumulated = ((itertools.accumulate(loop_probabilities(row, **options)), u) for row, u in rows)
    return [next(token for token, total in enumerate(totals) if total > u) for totals, u in cumulated]


ALL_OPTIONS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 4},
    {"top_p": 0.8},
    {"temperature": 1.3, "top_k": 6, "top_p": 0.85},
]


@forms(
    sample_tokens,
    temperature_inverted=lambda *args, temperature=1.0, **options: sample_tokens(
        *args, temperature=1 / temperature, **options
    ),
    one_more_top_k=lambda *args, top_k=0, **options: sample_tokens(
        *args, top_k=top_k + 1 if top_k else 0, **options
    ),
    no_top_p=lambda *args, top_p=1.0, **options: sample_tokens(*args, **options),
)
def test_sample_tokens_by_hand(form, is_right):
    def check(form):
        # p = .1 .4 .2 .3, cumulated .1 .5 .7 1
        logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().expand(6, 4)
        uniforms = torch.tensor([0.0, 0.09, 0.11, 0.51, 0.71, 0.999])
        assert form(logits, uniforms).tolist() == [0, 0, 1, 2, 3, 3]
        # the two likeliest: 4/7 and 3/7, cumulated 0 .571 .571 1
        assert form(logits, uniforms, top_k=2).tolist() == [1, 1, 1, 1, 3, 3]
        # .4 + .3 reach .65: the same two, the second one crossing it
        assert form(logits, uniforms, top_p=0.65).tolist() == [1, 1, 1, 1, 3, 3]
        # .4 + .3 + .2 reach .75: cumulated 0 4/9 6/9 1
        assert form(logits, uniforms, top_p=0.75).tolist() == [1, 1, 1, 2, 3, 3]
        # the two likeliest first; of their mass 4/7 already reaches .5
        assert form(logits, uniforms, top_k=2, top_p=0.5).tolist() == [1] * 6
        # temperature 1/2 squares: .01 .16 .04 .09 of .30, cumulated .033 .567 .7 1
        assert form(logits, uniforms, temperature=0.5).tolist() == [0, 1, 1, 1, 3, 3]

    judge(check, form, is_right)


@pytest.mark.parametrize("padding", [0.0, 50.0, math.nan])
@pytest.mark.parametrize("options", ALL_OPTIONS)
def test_sample_tokens_equals_a_float64_loop(options, padding):
    """Whatever stands behind the valid tokens."""
    logits = 2 * torch.randn(40, 750, generator=torch.Generator().manual_seed(0))
    valid = logits[:, :700].clone()
    logits[:, 700:] = padding
    uniforms = counter_uniform(1, torch.arange(40), torch.arange(40))
    sample = sampling.sample_tokens(logits, uniforms, num_valid_tokens=700, **options)
    assert sample.token_ids.tolist() == loop_tokens(valid, uniforms, **options)
    mask = sampling_mask(logits, num_valid_tokens=700, **options)
    for row, log_kept, is_kept in zip(valid.tolist(), sample.log_kept.tolist(), mask.tolist(), strict=True):
        kept = [p > 0 for p in loop_probabilities(row, **options)]
        assert is_kept == kept + [False] * 50
        whole = loop_probabilities(row, temperature=options.get("temperature", 1.0))
        expected = math.log(math.fsum(itertools.compress(whole, kept)))
        assert abs(log_kept - expected) < 1e-6


def test_the_mask_of_each_row_goes_by_that_row_and_has_no_impossible_token():
    logits = torch.tensor([[0.0, -math.inf, 1.0, 2.0], [-200.0, -201.0, -math.inf, -202.0]])
    assert sampling_mask(logits).tolist() == [[True, False, True, True], [True, True, False, True]]
    # Of weights e^2, e, 1 the first has 0.67 of the sum, the first two have 0.91.
    both = [[False, False, True, True], [True, True, False, False]]
    assert sampling_mask(logits, top_p=0.9).tolist() == both
    impossible = torch.tensor([[0.0, -math.inf, -math.inf], [0.0, -27.8, -27.6]])  # 2^-40 is e^-27.73
    assert sampling_mask(impossible, top_k=2).tolist() == [[True, False, False], [True, False, True]]
    assert sampling_mask(impossible).tolist() == [[True, False, False], [True, False, True]]


def test_the_share_kept_of_a_large_vocabulary_is_summed_in_float64():
    logits = torch.randn(4, 49152, generator=torch.Generator().manual_seed(0))
    sample = sampling.sample_tokens(logits, torch.full((4,), 0.5), top_p=0.9999)
    mask = sampling_mask(logits, top_p=0.9999)
    for row, is_kept, log_kept in zip(logits, mask, sample.log_kept, strict=True):
        weights = ((row - row.max()).exp() * 2.0**40).double()
        assert abs(log_kept.item() / (weights[is_kept].sum() / weights.sum()).log().item() - 1) < 1e-5


def test_the_inverse_of_the_cumulative_weights_at_its_edges():
    one = 2.0**40
    behind = [one] + [0.0] * 256 + [one]  # block 1 begins with a weight of 0
    for weights, uniform, token in (([1.0, one], 0.0, 0), ([one, 1.0], 1.0, 1), (behind, 0.5, 257)):
        token_ids = sampling._invert_cumulative(torch.tensor([weights]), torch.tensor([uniform]))
        assert token_ids.tolist() == [token]


@pytest.mark.parametrize(("scale", "top_k"), [(0.0, 0), (0.01, 1500), (0.5, 0), (3.0, 1500)])
def test_sample_tokens_nucleus_equals_the_loop_at_any_size(scale, top_k, monkeypatch):
    """Above and below the number of candidates that a CPU tries first."""
    monkeypatch.setattr(sampling, "_NUCLEUS_CANDIDATES", 1024)
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(4, 2300, generator=generator) + 1e-3 * torch.arange(2300)
    logits[0] *= 5  # one row with a small nucleus among large ones
    uniforms = torch.rand(4, generator=generator)
    for top_p in (0.05, 0.5, 0.97):
        options = {"top_p": top_p, "top_k": top_k}
        assert sample_tokens(logits, uniforms, **options).tolist() == loop_tokens(logits, uniforms, **options)


def cumulated_in_fp32(logits, uniforms, *, num_valid_tokens=None, **_):
    cumulated = logits[:, :num_valid_tokens].softmax(-1).cumsum(-1)
    found = torch.searchsorted(cumulated, uniforms[:, None])[:, 0]
    return found.clamp(max=logits.shape[-1] - 1)


def test_both_ways_to_the_nucleus_find_the_very_weight_of_a_loop():
    """Also among neighbours in the last bit of fp32, and where the masses meet the target exactly."""
    generator = torch.Generator().manual_seed(0)
    base = torch.tensor(2.0**30).view(torch.int32)
    neighbours = (base + torch.randperm(64, generator=generator, dtype=torch.int32)).view(torch.float32)
    spread = (2.0 ** torch.linspace(40, 0, 64)).floor()[torch.randperm(64, generator=generator)]
    exact = torch.zeros(64).index_copy(0, torch.tensor([5, 9]), torch.tensor([1.0, 3.0]))
    weights = torch.stack([neighbours, spread, exact])
    for top_p in (0.01, 0.5, 0.75, 0.9, 0.999):
        expected = []
        for row in weights.long().tolist():
            target, mass = top_p * sum(row), 0
            for weight in sorted(row, reverse=True):
                mass += weight
                if mass >= target:
                    break
            expected.append([float(weight)])
        targets = top_p * weights.long().sum(-1, keepdim=True).double()
        by_digits = sampling._find_weight_by_digits(weights.clone(), weights.long(), targets)
        assert by_digits.tolist() == expected
        assert sampling._smallest_weight_in_nucleus(weights, top_p, 64).tolist() == expected


def test_digits_find_the_last_one_and_masses_to_the_unit():
    """The last of the low digits; and weights with a mass of 1 each below one of 2^40."""
    one = sampling._BITS_OF_WEIGHT_ONE
    last = torch.tensor([[one - 0x7FFF, one - 0x7FFE]], dtype=torch.int32).view(torch.float32)
    masses = last.long()
    assert sampling._find_weight_by_digits(last, masses, masses.sum(1, keepdim=True).double()) == last[:, :1]
    ones = (torch.tensor(1.0).view(torch.int32) + torch.arange(9, dtype=torch.int32)).view(torch.float32)
    weights = torch.cat([torch.tensor([2.0**40]), ones]).unsqueeze(0)
    target = torch.tensor([[2.0**40 + 3]], dtype=torch.float64)
    assert sampling._find_weight_by_digits(weights, weights.long(), target) == ones[6]


@pytest.mark.parametrize(("scale", "top_k"), [(0.0, 0), (0.01, 0), (0.5, 5000), (3.0, 0), (3.0, 50)])
def test_a_gpu_finds_the_nucleus_without_sorting_or_waiting(scale, top_k):
    """It would sort the whole vocabulary for every token, or wait to see that fewer tokens are enough."""
    generator = torch.Generator().manual_seed(0)
    logits = (scale * torch.randn(6, 6000, generator=generator)).bfloat16()  # with ties
    logits[1, 100:], logits[2, 9], logits[3, 7] = -torch.inf, 60.0, torch.nan
    uniforms = torch.rand(6, generator=generator)
    for top_p in (1e-6, 0.3, 0.97, 1 - 2.0**-30):
        options = {"top_p": top_p, "top_k": top_k}
        expected = sampling.sample_tokens(logits, uniforms, **options)
        with pretended_gpu() as gpu:
            inputs = logits.to("cuda"), uniforms.to("cuda")
            gpu.clear()
            found = sampling.sample_tokens(*inputs, **options)
            assert not gpu.waits and not gpu.copies
            assert gpu.launches["aten::topk"] == (2 if top_k == 50 else top_k > 0), "of few tokens alone"
            sound = [0, 1, 2, 4, 5]
            for one, other in zip(found, expected, strict=True):
                assert one.cpu()[sound].equal(other[sound])


EDGE_UNIFORMS = [0.0, 2.0**-24, 0.5, 1 - 2.0**-24, 1.0]


@forms(
    sample_tokens,
    cumulated_in_fp32=cumulated_in_fp32,
    forgets_the_mask=lambda logits, uniforms, num_valid_tokens=None: sample_tokens(logits, uniforms),
)
def test_a_token_of_probability_zero_is_never_drawn(form, is_right):
    def check(form):
        for num_tokens in (5, 256, 257, 1000):
            for seed in range(3):
                generator = torch.Generator().manual_seed(seed)
                logits = torch.randn(len(EDGE_UNIFORMS), num_tokens + 50, generator=generator)
                is_impossible = torch.rand(num_tokens + 50, generator=generator) < 0.7
                is_impossible[[0, num_tokens - 1]] = True  # where uniforms of 0 and 1 would land
                is_impossible[2] = False
                logits[:, is_impossible] = -torch.inf
                tokens = form(logits, torch.tensor(EDGE_UNIFORMS), num_valid_tokens=num_tokens)
                assert (tokens < num_tokens).all() and not is_impossible[tokens].any()

    judge(check, form, is_right)


def test_sample_tokens_greedy_is_the_argmax_of_valid_tokens():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    logits[:, 40:] = 100.0
    uniforms = torch.rand(6, generator=torch.Generator().manual_seed(1))
    expected = logits[:, :40].argmax(-1)
    for options in ({"do_sample": False, "top_k": 3, "top_p": 0.5}, {"top_k": 1}, {"top_p": 1e-6}):
        sample = sampling.sample_tokens(logits, uniforms, num_valid_tokens=40, **options)
        assert torch.equal(sample.token_ids, expected) and sample.token_ids.dtype == torch.int64
        assert ("do_sample" in options) == (not sample.log_kept.any())


def test_a_row_samples_its_token_whatever_the_batch():
    logits = torch.randn(32, 777, generator=torch.Generator().manual_seed(0)).bfloat16()
    uniforms = counter_uniform(5, torch.arange(32), torch.arange(32))
    order = torch.randperm(32, generator=torch.Generator().manual_seed(1))
    for options in ALL_OPTIONS:
        whole = sample_tokens(logits, uniforms, **options)
        assert torch.equal(sample_tokens(logits[order], uniforms[order], **options), whole[order])
        assert torch.equal(sample_tokens(logits[13:14], uniforms[13:14], **options), whole[13:14])


def test_sample_tokens_keeps_ties_with_the_last_kept_token():
    logits = torch.tensor([[1.0, 0.0, 1.0, 1.0, 0.0]]).expand(300, -1)
    uniforms = torch.arange(300) / 300
    assert sample_tokens(logits, uniforms, top_k=2).unique().tolist() == [0, 2, 3]
    assert sample_tokens(logits, uniforms, top_p=0.3).unique().tolist() == [0, 2, 3]


def test_a_broken_row_gives_a_valid_token_and_moves_no_other():
    uniforms = torch.tensor([0.2, 0.4, 0.6, 0.8])
    for options in ALL_OPTIONS:
        logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
        sound = sample_tokens(logits, uniforms, **options)
        logits[1, 7], logits[2] = torch.nan, -torch.inf
        tokens = sample_tokens(logits, uniforms, **options)
        assert torch.equal(tokens[[0, 3]], sound[[0, 3]])
        assert ((0 <= tokens) & (tokens < 300)).all()


# ---- uniforms --------------------------------------------------------------------------------------------


def assert_uniform(cells: torch.Tensor, num_cells: int) -> None:
    observed = torch.bincount(cells.flatten(), minlength=num_cells).double()
    assert len(observed) == num_cells
    expected = torch.full_like(observed, cells.numel() / num_cells)
    p = p_value(observed, expected)
    assert SMALLEST_P_VALUE < p < 1 - SMALLEST_P_VALUE  # too even is not random either


def test_uniforms_are_those_of_unbounded_integers_and_of_every_version():
    """A change of these changes every text that a resumed run goes on to write."""
    pinned = counter_uniform(1234, torch.tensor([0, 0, 1, 5]), torch.tensor([0, 1, 0, 511]))
    assert (pinned * 2**24).long().tolist() == [2970356, 2995282, 11027298, 3397742]
    # splitmix64 of Python's unbounded integers, modulo 2**64
    edges = (
        (2**64 - 1, 2**40 + 3, 2**31, 7213389),
        (-1, 2**63 - 1, 2**63 - 1, 8824809),
        (2**63, 2**31 - 1, 7, 15740977),
    )
    for seed, sample, position, expected in edges:
        found = counter_uniform(seed, torch.tensor([sample]), torch.tensor([position]))
        assert (found * 2**24).tolist() == [expected]


def grid(num_rows: int, num_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids, positions = torch.meshgrid(torch.arange(num_rows), torch.arange(num_columns), indexing="ij")
    return ids.flatten(), positions.flatten()


@forms(
    counter_uniform,
    ignores_position=lambda seed, ids, positions: counter_uniform(seed, ids, 0 * positions),
    ignores_seed=lambda seed, ids, positions: counter_uniform(0, ids, positions),
    adds_sample_and_position=lambda seed, ids, positions: counter_uniform(seed, ids + positions, 0 * ids),
)
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
