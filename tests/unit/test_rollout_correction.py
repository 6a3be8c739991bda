"""Importance weights of --rollout_correction, and the loss that has them: by hand.

O22 and the like in a docstring are rows of the seeds.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from right_or_wrong import close, play_ranks
from rollout_batches import PADDING, fill

from common.data.packed_batch import PackedBatch
from common.flags.problems import Problems
from step3_ppo.algorithms import ALGORITHMS, fill_defaults
from step3_ppo.arguments import PPOArguments
from step3_ppo.checks import check_flags
from step3_ppo.policy_losses import build_policy_loss
from step3_ppo.ppo_losses import PPOLosses
from step3_ppo.ppo_math import KLController
from step3_ppo.rollout_correction import (
    BINS,
    FORMS,
    Correction,
    correction_weights,
    find_correction,
    prox_share,
    summarise_weights,
)

# Probabilities by the sampler's: 1 2 0.5 | 4 (padding) | 0.25 4 0.5
RAW = torch.tensor([[1.0, 2.0, 0.5], [4.0, 9.0, 9.0], [0.25, 4.0, 0.5]])
COUNTED = torch.tensor([[True, True, True], [True, False, False], [True, True, True]])
# Of the tokens, or of the responses: products 1, 4 and 0.5, geometric means 1, 4 and 0.79.
CORRECTED = {
    "tis:2.5": [[1.0, 2.0, 0.5], [2.5, 0.0, 0.0], [0.25, 2.5, 0.5]],
    "tis:0.4,3": [[1.0, 2.0, 0.5], [3.0, 0.0, 0.0], [0.4, 3.0, 0.5]],
    "mis:3.5": [[1.0, 2.0, 0.5], [0.0, 0.0, 0.0], [0.25, 0.0, 0.5]],
    "mis:0.4,2.5": [[1.0, 2.0, 0.5], [0.0, 0.0, 0.0], [0.0, 0.0, 0.5]],
    "seq_tis": [1.0, 2.0, 0.5],
    "seq_mis:0.75,4.5": [1.0, 4.0, 0.0],
    "geo_rs:0.7,1.1": [1.0, 0.0, 1.0],
    "geo_rs:0.8,1.1": [1.0, 0.0, 0.0],
}


def flags_of(text: str) -> dict[str, str | float]:
    """The flags of FORM, or FORM:[LOW,]HIGH."""
    name, _, bounds = text.partition(":")
    low, _, high = bounds.rpartition(",")
    return {
        "rollout_correction": name, "correction_low": float(low or 0), "correction_high": float(high or 0),
    }  # fmt: skip


def correction_of(text: str) -> Correction | None:
    """The correction of such a text."""
    return find_correction(PPOArguments(**flags_of(text)))


@pytest.mark.parametrize("text", CORRECTED)
def test_corrections_by_hand(text):
    """A14, A16: prox against the sampler. A21: level, action, metric and bounds. A23: padding is not read."""
    for padding in PADDING:
        prox, sampled = (fill(x, COUNTED, padding) for x in (RAW.log() - 3.0, torch.full((3, 3), -3.0)))
        found = correction_weights(prox, sampled, COUNTED, correction_of(text))
        close(found.weights, CORRECTED[text])
    prox = torch.where(COUNTED, math.nan, prox)  # a number that is none shows where it counts
    weights = correction_weights(prox, sampled, COUNTED, correction_of(text)).weights
    assert weights.isnan().tolist() == (COUNTED if weights.dim() == 2 else COUNTED.any(1)).tolist()


def summarise(rows, text, *others) -> dict[str, float]:
    """What the weights of these rows are like."""
    sampled, how = torch.full((3, 3), -3.0), correction_of(text)
    found = correction_weights((RAW.log() + sampled)[rows], sampled[rows], COUNTED[rows], how)
    return summarise_weights(found, *others)


def test_what_weights_are_like_by_hand():
    """A22: the largest, the share beyond the bounds, a histogram; A3: of what counts, of all ranks."""
    alone = summarise([0, 1, 2], "mis:0.4,2.5", lambda x: x, lambda x: x)
    # 1 2 0.5 4 0.25 4 0.5, of which 4, 0.25 and 4 are masked: 1 2 0.5 0.5 stay
    assert alone["correction/weight_mean"] == pytest.approx(12.25 / 7)
    assert alone["correction/weight_max"] == pytest.approx(4.0)
    assert alone["correction/capped_fraction"] == pytest.approx(3 / 7)
    assert alone["correction/effective_fraction"] == pytest.approx(4.0**2 / (7 * 5.5))
    # below 0.5: 0.25; from 0.5 on: 0.5 0.5; from 0.8 on: 1; from 1.25 on: none; from 2 on: 2 4 4
    assert [alone[f"correction/{name}"] * 7 for name in BINS] == pytest.approx([1, 2, 1, 0, 3])
    programs = [
        lambda reduce_sum, rows=rows: summarise(rows, "mis:0.4,2.5", reduce_sum, lambda x: max(x, 4.0))
        for rows in ([0], [1, 2])
    ]
    for of_rank in play_ranks(programs):
        assert of_rank == pytest.approx(alone)
    sequences = summarise([0, 1, 2], "seq_tis", lambda x: x, lambda x: x)
    assert sequences["correction/capped_fraction"] == pytest.approx(1 / 3)  # of responses


def test_bounds_of_a_correction():
    assert correction_of("none") is None and correction_of("tis") == correction_of("tis:0,2")
    assert correction_of("mis:0,2") == FORMS["mis"] and correction_of("geo_rs:0,2").lower == 0.0
    problems = Problems()
    args = PPOArguments(rollout_correction="mis", correction_low=2.0, correction_high=2.0)
    check_flags(args, 1, "fp32", problems)
    assert problems.messages == ["--correction_low 2.0 is not below --correction_high 2.0; lower it"]
    for low in (0.0, 3.0):  # without an upper bound the lower one is not read
        problems = Problems()
        check_flags(PPOArguments(rollout_correction="mis", correction_low=low), 1, "fp32", problems)
        assert problems.messages == []


@pytest.mark.parametrize(
    ("flags", "more"),
    # 0.5 (1 / 2 + 2 + 4 / 4) and 0.25 (1 / 2 + 2 + 3 / 4), which no weight of a correction is for.
    [({}, 0.0), ({"kl_in": "loss", "kl_estimator": "k1"}, 1.75), ({"entropy_coef": 0.25}, -0.8125)],
    ids=["", "KL", "entropy"],
)
def test_the_decoupled_loss_and_its_statistics_by_hand(flags, more):
    """A14, O22: the ratio is taken to prox, the loss weighed. A3: statistics are of what counts."""
    ratios, weights = torch.tensor([1.5, 1.0, 0.5, 9.0]), torch.tensor([2.0, 1.0, 0.0, 9.0])
    mask, old = torch.tensor([True, True, True, False]), torch.full((4,), -3.0)
    prox = old + 0.5
    data = {"old_logprobs": old, "prox_logprobs": prox, "rollout_logprobs": old, "loss_mask": mask}
    data |= {"correction_weights": weights, "response_ids": torch.zeros(4, dtype=torch.int64)}
    data |= {"advantages": torch.tensor([1.0, -1.0, 1.0, 1.0])}
    data |= {"loss_weights": torch.tensor([0.5, 1.0, 0.25, 0.0])}
    new = prox + ratios.log()
    data["ref_logprobs"] = new - torch.tensor([1.0, 2.0, 4.0, 9.0])
    data["loss_counts"] = torch.tensor([5.0])
    mixture = SimpleNamespace(router_loss=torch.tensor(4.0), router_coefficient=0.5)
    actor = SimpleNamespace(
        model=mixture, compute_logprobs=lambda *_, **__: (new, torch.tensor([1.0, 2.0, 3.0, 9.0]))
    )
    flags = flags | {"rollout_correction": "mis", "clip_range": 0.1, "clip_range_high": 0.3}
    args = fill_defaults(PPOArguments(**flags), ALGORITHMS["ppo"])
    losses = PPOLosses(
        args, SimpleNamespace(actor=actor), KLController(0.5), build_policy_loss(args)
    )  # as it has moved
    found, stats = losses._policy_sums(PackedBatch.build([0], {key: [x] for key, x in data.items()}))
    # 0.5 * 2 * -1 * 1.3, at the bound; 1 * 1 * 1; a weight of 0; padding; the router's by the loss's divisor
    assert float(found) == pytest.approx(-1.3 + 1.0 + 5 * 0.5 * 4.0 + more, abs=1e-5)
    assert float(stats["policy/router_loss"]) == 5 * 4.0
    means = {"ratio": (1.5 + 1 + 0.5) / 3, "clip_fraction_high": 1 / 3, "clip_fraction_low": 0, "entropy": 2}
    means["logprob_gap"] = (0.5 + math.log(1.5) + 0.5 + abs(0.5 + math.log(0.5))) / 3
    if "kl_in" in flags:
        means["kl_loss"] = (1 + 2 + 4) / 3
    for name, mean in means.items():
        total, count = stats[f"policy/{name}"]
        assert float(total / count) == pytest.approx(mean, abs=1e-5), name


@pytest.mark.parametrize(
    ("correction", "slopes", "capped"),
    [
        ("tis:2", [-1.1 * 1.21, 1.5, -0.5 * 0.5, 0.0], 0.0),
        ("mis:0.6,2", [-1.1 * 1.21, 1.5, 0.0, 0.0], 1 / 3),
        ("seq_tis:1.2", [-1.1 * 1.2, 1.5 * 1.2, -0.5 * 0.5, 0.0], 1 / 2),  # of responses
    ],
)
def test_prox_between_rollout_and_now_by_hand(correction, slopes, capped):
    """A30: tokens of 2, 0 and 1 steps before are at 2/3, 0 and 1/2 of the way; the last does not count."""
    batch = PackedBatch.build(
        [7, 8],
        {
            "response_ids": [torch.zeros(2, dtype=torch.int64)] * 2,
            "versions": [torch.tensor([2, 4]), torch.tensor([3, 1])],
            "old_logprobs": [torch.full((2,), -3.0)] * 2,
            "rollout_logprobs": [torch.full((2,), -3.0)] * 2,
            "ref_logprobs": [torch.full((2,), -3.0)] * 2,
            "loss_mask": [torch.tensor([True, True]), torch.tensor([True, False])],
            "loss_weights": [torch.ones(2), torch.tensor([1.0, 0.0])],
            "loss_counts": [torch.ones(2), torch.tensor([1.0, 0.0])],
            "advantages": [torch.tensor([1.0, -1.0]), torch.tensor([1.0, 5.0])],
        },
    )
    batch = batch.with_key("prox_share", prox_share(batch, step=5), like="response_ids")
    new = -3 + torch.tensor([1.1**3, 1.5, 0.5**2, 9.0]).log()
    new.requires_grad_()
    actor = SimpleNamespace(
        model=SimpleNamespace(router_loss=None), compute_logprobs=lambda *_, **__: (new, torch.zeros(4))
    )
    args = fill_defaults(PPOArguments(prox_logprobs="loglinear", **flags_of(correction)), ALGORITHMS["ppo"])
    losses = PPOLosses(args, SimpleNamespace(actor=actor), None, build_policy_loss(args))
    loss, stats = losses._policy_sums(batch)
    loss.backward()
    close(new.grad, slopes)  # each loss is its slope: no gradient flows through prox
    assert float(loss) == pytest.approx(sum(slopes), abs=1e-5)
    means = {"policy/ratio": (1.1 + 1.5 + 0.5) / 3, "correction/capped_fraction": capped}
    # k3: the samples are of the policy before the step
    means["policy/approx_kl"] = (1.1 + 1.5 + 0.5 - 3 - math.log(1.1 * 1.5 * 0.5)) / 3
    means["correction/weight_mean"] = (1.21 + 0.5) / 2 if "seq" in correction else (1.21 + 1 + 0.5) / 3
    for name, mean in means.items():
        total, count = stats[name]
        assert float(total / count) == pytest.approx(mean, abs=1e-5), name
