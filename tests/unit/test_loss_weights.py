"""How token losses become one number: by hand, cut into micro-batches, against wrong forms.

O24 and the like in a docstring are rows of the seeds.
"""

import math

import pytest
import torch
from response_batches import PADDING, random_batch
from right_or_wrong import close, forms, judge

from step3_ppo.ppo_math import loss_weights

AGGREGATIONS = ("token", "sequence", "constant")


def aggregate(form, parts, aggregation, max_response_tokens):
    """Return the loss of micro-batches (terms, mask): all sums first, one division at the end."""
    total, count = 0.0, 0.0
    for terms, mask in parts:
        weights, counts = form(mask, aggregation, max_response_tokens)
        total += float((weights.double() * torch.where(mask, terms, 0.0)).sum())
        count += float(counts.sum())
    return total / count


def loop_loss(terms, mask, aggregation, max_response_tokens):
    rows = [[terms[i, t].item() for t in range(mask.shape[1]) if mask[i, t]] for i in range(len(mask))]
    if aggregation == "token":
        return math.fsum(x for row in rows for x in row) / sum(map(len, rows))
    if aggregation == "sequence":
        means = [math.fsum(row) / len(row) for row in rows if row]
        return math.fsum(means) / len(means)
    return math.fsum(x for row in rows for x in row) / (len(rows) * max_response_tokens)


def changed(aggregation, change):
    """Return a wrong form: `change` is made to the weights and counts of one aggregation."""

    def form(mask, chosen, max_response_tokens):
        weights, counts = loss_weights(mask, chosen, max_response_tokens)
        return change(weights, counts, mask) if chosen == aggregation else (weights, counts)

    return form


WEIGHT_FORMS = forms(
    loss_weights,
    token_counts_padding=changed("token", lambda w, c, m: (w, torch.full_like(c, m.shape[1]))),
    token_is_sequence=changed("token", lambda w, c, m: loss_weights(m, "sequence", 0)),
    sequence_counts_the_empty=changed("sequence", lambda w, c, m: (w, torch.ones_like(c))),
    sequence_by_the_width=changed("sequence", lambda w, c, m: (m.float() / m.shape[1], c)),
    constant_drops_the_empty=changed("constant", lambda w, c, m: (w, c * m.any(1))),
    constant_by_the_width=changed("constant", lambda w, c, m: (w, torch.full_like(c, m.shape[1]))),
    constant_by_the_longest=changed("constant", lambda w, c, m: (w, torch.full_like(c, m.sum(1).max()))),
)


@WEIGHT_FORMS
def test_weights_by_hand(form, is_right):
    """O24: the seed's sum over mask by mask.sum() is "token"; the others are alternatives."""

    def check(form):
        terms = torch.tensor([[1.0, 2.0, 6.0, 99.0], [5.0, 99.0, 99.0, 99.0], [99.0, 99.0, 99.0, 99.0]])
        mask = torch.arange(4) < torch.tensor([3, 1, 0])[:, None]
        parts = [(terms, mask)]
        # (1 + 2 + 6 + 5) / 4; (9 / 3 + 5 / 1) / 2; 14 / (3 * 5)
        assert aggregate(form, parts, "token", 5) == pytest.approx(3.5, abs=1e-6)
        assert aggregate(form, parts, "sequence", 5) == pytest.approx(4.0, abs=1e-6)
        assert aggregate(form, parts, "constant", 5) == pytest.approx(14 / 15, abs=1e-6)
        third = 1 / 3
        close(form(mask, "sequence", 5)[0], [[third, third, third, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
        assert [form(mask, a, 5)[1].tolist() for a in AGGREGATIONS] == [[3, 1, 0], [1, 1, 0], [5, 5, 5]]
        for weights, counts in (form(mask, a, 5) for a in AGGREGATIONS):
            assert weights.dtype == torch.float32 and counts.dtype == torch.float64

    judge(check, form, is_right)


@WEIGHT_FORMS
def test_the_loss_does_not_depend_on_how_the_batch_is_cut(form, is_right):
    """A18, O24: weights are added up over micro-batches and ranks, and divided by once."""

    def check(form):
        terms, mask = random_batch(1)
        for aggregation in AGGREGATIONS:
            expected = loop_loss(terms, mask, aggregation, 12)
            for cut in ([5], [1, 4], [2, 2, 1], [1, 1, 1, 1, 1]):
                parts = list(zip(terms.split(cut), mask.split(cut), strict=True))
                assert aggregate(form, parts, aggregation, 12) == pytest.approx(expected, abs=1e-6)

    judge(check, form, is_right)


def test_the_mean_of_the_means_of_micro_batches_is_another_number():
    """What the counts are there to avoid."""
    terms, mask = random_batch(1)
    for aggregation in ("token", "sequence"):
        parts = [(terms[:1], mask[:1]), (terms[1:], mask[1:])]
        means = [aggregate(loss_weights, [part], aggregation, 12) for part in parts]
        assert abs(sum(means) / 2 - loop_loss(terms, mask, aggregation, 12)) > 1e-3


def test_the_token_mean_is_the_masked_mean():
    """O24."""
    terms, mask = random_batch(1)
    found = aggregate(loss_weights, [(terms, mask)], "token", 0)
    assert found == pytest.approx(float(terms[mask].mean()), abs=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gaps_in_the_mask_and_responses_without_a_token(aggregation):
    terms, _ = random_batch(1)
    mask = torch.rand(terms.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[2] = False
    expected = loop_loss(terms, mask, aggregation, 9)
    for padding in PADDING:
        parts = [(torch.where(mask, terms, padding), mask)]
        assert aggregate(loss_weights, parts, aggregation, 9) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("aggregation", "count"), [("token", 0), ("sequence", 0), ("constant", 14)])
def test_nothing_counts(aggregation, count):
    """A24: the weights are numbers, and the caller sees a count of 0."""
    weights, counts = loss_weights(torch.zeros(2, 3).bool(), aggregation, 7)
    assert weights.eq(0).all() and float(counts.sum()) == count


def test_what_cannot_be_is_named():
    mask = torch.ones(1, 2).bool()
    with pytest.raises(ValueError, match="--loss_aggregation mean is unknown; use token, sequence"):
        loss_weights(mask, "mean", 4)
    with pytest.raises(ValueError, match="--max_answer_seq_len 0 must be above 0"):
        loss_weights(mask, "constant", 0)
