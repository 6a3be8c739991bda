"""The sampler: its distribution against loops, its edges, and that nothing else in a batch moves a token."""

import math

import pytest
import torch
from chi_square import NUM_DRAWS, SMALLEST_P_VALUE, p_value
from right_or_wrong import forms, judge
from torch.utils._python_dispatch import TorchDispatchMode

from common.models import sampling
from common.models.sampling import counter_uniform


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


def loop_token(row: list[float], uniform: float, **options) -> int:
    cumulated = 0.0
    for token, probability in enumerate(loop_probabilities(row, **options)):
        cumulated += probability
        if cumulated > uniform:
            return token
    raise AssertionError("the cumulated probabilities stay below the uniform")


def plain_sampler(adapt):
    """Return a sampler that first changes the options it was given by `adapt`."""
    return lambda logits, uniforms, **options: sample_tokens(logits, uniforms, **adapt(options))


def drops_the_crossing_token(logits, uniforms, *, top_p=1.0, **options):
    if top_p < 1:
        ordered, order = (logits / options.get("temperature", 1.0)).softmax(-1).sort(-1, descending=True)
        is_dropped = ordered.cumsum(-1) > top_p
        is_dropped[:, 0] = False
        logits = logits.masked_fill(is_dropped.gather(-1, order.argsort(-1)), -torch.inf)
    return sample_tokens(logits, uniforms, **options)


SAMPLER_FORMS = forms(
    sample_tokens,
    no_temperature=plain_sampler(lambda options: options | {"temperature": 1.0}),
    temperature_inverted=plain_sampler(
        lambda options: options | {"temperature": 1 / options.get("temperature", 1.0)}
    ),
    one_more_top_k=plain_sampler(
        lambda options: options | {"top_k": options["top_k"] + 1 if options.get("top_k") else 0}
    ),
    no_top_p=plain_sampler(lambda options: options | {"top_p": 1.0}),
    drops_the_crossing_token=drops_the_crossing_token,
    greedy=plain_sampler(lambda options: options | {"do_sample": False}),
)
ALL_OPTIONS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 4},
    {"top_p": 0.8},
    {"temperature": 1.3, "top_k": 6, "top_p": 0.85},
]


@SAMPLER_FORMS
def test_a_token_by_hand(form, is_right):
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


@SAMPLER_FORMS
def test_tokens_equal_a_float64_loop(form, is_right):
    def check(form):
        logits = 2 * torch.randn(40, 700, generator=torch.Generator().manual_seed(0))
        uniforms = counter_uniform(1, torch.arange(40), torch.arange(40))
        for options in ALL_OPTIONS:
            expected = [
                loop_token(row, u, **options)
                for row, u in zip(logits.double().tolist(), uniforms.tolist(), strict=True)
            ]
            assert form(logits, uniforms, **options).tolist() == expected

    judge(check, form, is_right)


@SAMPLER_FORMS
def test_the_distribution_passes_a_chi_square_test(form, is_right):
    def check(form):
        row = 1.2 * torch.randn(12, generator=torch.Generator().manual_seed(5))
        uniforms = counter_uniform(2, torch.arange(NUM_DRAWS), torch.zeros(NUM_DRAWS, dtype=torch.int64))
        for options in ALL_OPTIONS:
            tokens = form(row.expand(NUM_DRAWS, -1), uniforms, **options)
            observed = torch.bincount(tokens, minlength=12).double()
            expected = NUM_DRAWS * torch.tensor(loop_probabilities(row.double().tolist(), **options))
            assert p_value(observed, expected) > SMALLEST_P_VALUE, options

    judge(check, form, is_right)


@pytest.mark.parametrize("scale", [0.0, 0.01, 0.5, 3.0])
@pytest.mark.parametrize("top_k", [0, 1500])
def test_a_nucleus_of_any_size_is_that_of_the_loop(scale, top_k, monkeypatch):
    """Above and below the number of candidates that a CPU tries first."""
    monkeypatch.setattr(sampling, "_CPU_NUCLEUS_CANDIDATES", 1024)
    num_tokens = 2300
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(4, num_tokens, generator=generator) + 1e-3 * torch.arange(num_tokens)
    logits[0] *= 5  # one row with a small nucleus among large ones
    uniforms = torch.rand(4, generator=generator)
    for top_p in (0.05, 0.5, 0.97):
        expected = [
            loop_token(row, u, top_p=top_p, top_k=top_k)
            for row, u in zip(logits.double().tolist(), uniforms.tolist(), strict=True)
        ]
        assert sample_tokens(logits, uniforms, top_p=top_p, top_k=top_k).tolist() == expected


def cumulated_in_fp32(logits, uniforms, *, num_valid_tokens=None, **_):
    cumulated = logits[:, :num_valid_tokens].softmax(-1).cumsum(-1)
    found = torch.searchsorted(cumulated, uniforms[:, None])[:, 0]
    return found.clamp(max=logits.shape[-1] - 1)


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


@pytest.mark.parametrize("options", ALL_OPTIONS, ids=str)
def test_the_ends_of_the_interval_give_the_first_and_last_token_kept(options):
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(0)).expand(len(EDGE_UNIFORMS), -1)
    tokens = sample_tokens(logits, torch.tensor(EDGE_UNIFORMS), **options)
    kept = [j for j, p in enumerate(loop_probabilities(logits[0].double().tolist(), **options)) if p > 0]
    assert tokens[0] == kept[0] and tokens[-1] == kept[-1] and set(tokens.tolist()) <= set(kept)


def test_only_one_possible_token_is_always_drawn():
    logits = torch.full((5, 1000), -torch.inf)
    logits[:, 700] = -3.0
    for options in ALL_OPTIONS:
        assert sample_tokens(logits, torch.tensor(EDGE_UNIFORMS), **options).tolist() == [700] * 5


def test_greedy_is_the_argmax_of_the_valid_tokens():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    logits[:, 40:] = 100.0
    uniforms = torch.rand(6, generator=torch.Generator().manual_seed(1))
    tokens = sample_tokens(logits, uniforms, do_sample=False, num_valid_tokens=40, top_k=3, top_p=0.5)
    assert torch.equal(tokens, logits[:, :40].argmax(-1)) and tokens.dtype == torch.int64
    assert torch.equal(sample_tokens(logits, uniforms, top_k=1, num_valid_tokens=40), tokens)
    assert torch.equal(sample_tokens(logits, uniforms, top_p=1e-6, num_valid_tokens=40), tokens)


def test_padded_vocabulary_changes_no_token():
    logits = torch.randn(64, 500, generator=torch.Generator().manual_seed(0))
    uniforms = torch.rand(64, generator=torch.Generator().manual_seed(1))
    for options in ALL_OPTIONS:
        short = sample_tokens(logits[:, :450].clone(), uniforms, **options)
        for padding in (0.0, 50.0, torch.nan):
            logits[:, 450:] = padding
            assert torch.equal(sample_tokens(logits, uniforms, num_valid_tokens=450, **options), short)


def with_batch_mean(logits, uniforms, **options):
    return sample_tokens(logits + logits.mean(0) * 0.1, uniforms, **options)


@forms(
    sample_tokens,
    uniform_by_row=lambda logits, uniforms, **options: sample_tokens(
        logits, torch.linspace(0, 0.99, len(uniforms)), **options
    ),
    neighbours_matter=with_batch_mean,
)
def test_a_row_draws_its_token_whatever_the_batch(form, is_right):
    def check(form):
        logits = torch.randn(32, 777, generator=torch.Generator().manual_seed(0)).bfloat16()
        uniforms = counter_uniform(5, torch.arange(32), torch.arange(32))
        order = torch.randperm(32, generator=torch.Generator().manual_seed(1))
        for options in ALL_OPTIONS:
            whole = form(logits, uniforms, **options)
            assert torch.equal(form(logits[order], uniforms[order], **options), whole[order])
            for i in (0, 13, 31):
                assert torch.equal(form(logits[i : i + 1], uniforms[i : i + 1], **options), whole[i : i + 1])

    judge(check, form, is_right)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_draws_the_tokens_of_a_cpu():
    logits = torch.randn(256, 5000, generator=torch.Generator().manual_seed(0))
    uniforms = counter_uniform(5, torch.arange(256), torch.arange(256))
    for options in ALL_OPTIONS:
        on_gpu = sample_tokens(logits.cuda(), uniforms.cuda(), **options).cpu()
        # exp differs in its last bit, which moves a border between tokens by about 1e-7
        assert (on_gpu != sample_tokens(logits, uniforms, **options)).sum() <= 1


def test_ties_with_the_last_token_kept_are_kept():
    logits = torch.tensor([[1.0, 0.0, 1.0, 1.0, 0.0]]).expand(300, -1)
    uniforms = torch.arange(300) / 300
    assert sample_tokens(logits, uniforms, top_k=2).unique().tolist() == [0, 2, 3]
    assert sample_tokens(logits, uniforms, top_p=0.3).unique().tolist() == [0, 2, 3]


def test_an_empty_batch_draws_nothing():
    nothing = torch.zeros(0, dtype=torch.int64)
    for options in ALL_OPTIONS:
        assert sample_tokens(torch.zeros(0, 300), counter_uniform(0, nothing, nothing), **options).shape == (
            0,
        )


class Operations(TorchDispatchMode):
    """Collects the names of the operations that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("options", "sorts"), [({}, False), ({"top_k": 3}, True), ({"top_p": 0.9}, True)])
def test_nothing_is_sorted_where_nothing_is_cut_off(options, sorts):
    with Operations() as operations:
        sample_tokens(torch.zeros(2, 1000), torch.zeros(2), **options)
    assert bool({"sort", "topk", "argsort", "kthvalue"} & operations.names) == sorts


@pytest.mark.parametrize("options", ALL_OPTIONS, ids=str)
def test_a_broken_row_gives_a_valid_token_and_moves_no_other(options):
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    uniforms = torch.tensor([0.2, 0.4, 0.6, 0.8])
    sound = sample_tokens(logits, uniforms, **options)
    logits[1, 7], logits[2] = torch.nan, -torch.inf
    tokens = sample_tokens(logits, uniforms, **options)
    assert torch.equal(tokens[[0, 3]], sound[[0, 3]])
    assert ((0 <= tokens) & (tokens < 300)).all()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"temperature": 0.0}, "do_sample=False"),
        ({"top_p": 0.0}, "top_p 0"),
        ({"top_p": 1.1}, "top_p 1.1"),
        ({"top_k": -1}, "top_k -1"),
        ({"num_valid_tokens": 11}, "num_valid_tokens 11"),
    ],
)
def test_an_option_out_of_range_is_named(options, word):
    with pytest.raises(ValueError, match=word):
        sample_tokens(torch.zeros(2, 10), torch.zeros(2), **options)


def test_what_truncation_kept_is_told():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, 300, generator=generator, dtype=torch.float64).float()
    for options in ({"top_k": 7}, {"top_p": 0.4}, {"top_k": 50, "top_p": 0.8, "temperature": 1.7}):
        draw = sampling.sample_tokens(logits, torch.full((5,), 0.5), **options)
        for row, log_kept in zip(logits.tolist(), draw.log_kept.tolist(), strict=True):
            kept = loop_probabilities(row, **options)
            whole = loop_probabilities(row, temperature=options.get("temperature", 1.0))
            expected = math.log(math.fsum(w for w, k in zip(whole, kept, strict=True) if k > 0))
            assert abs(log_kept - expected) < 1e-6
    assert sampling.sample_tokens(logits, torch.full((5,), 0.5)).log_kept.tolist() == [0.0] * 5
    assert (
        sampling.sample_tokens(logits, torch.zeros(5), do_sample=False, top_k=2).log_kept.tolist()
        == [0.0] * 5
    )
