"""Losses of a reward model, and metrics of how well it ranks: by hand and against wrong forms."""

import json
import math

import pytest
import torch
from right_or_wrong import close, forms, judge

from common.flags.args import Problems, parse_args
from common.models.tensor_ops import correlation
from step2_reward.pair_math import (
    accuracy_figures,
    center_penalty,
    end_score_loss,
    expected_calibration_error,
    first_difference,
    longer_share,
    token_wise_loss,
)
from step3_ppo.arguments import PPOArguments
from step3_ppo.checks import reward_warnings
from step3_ppo.rewards.reward_specs import RewardSpec


def random_numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- end_score_loss ---


def test_end_score_loss_by_hand():
    # sigmoid(log 3) = 3 / 4; sigmoid(-log 3) = 1 / 4; sigmoid(0) = 1 / 2
    chosen, rejected = torch.tensor([math.log(3), 0.0, 5.0]), torch.tensor([0.0, math.log(3), 5.0])
    close(end_score_loss(chosen, rejected), [math.log(4 / 3), math.log(4), math.log(2)])
    # a margin of log 3 takes the first advantage away
    margin = torch.tensor([math.log(3), 0.0, 0.0])
    close(end_score_loss(chosen, rejected, margin), [math.log(2), math.log(4), math.log(2)])
    close(end_score_loss(chosen, rejected, math.log(3))[0], math.log(2))


@forms(end_score_loss, log_of_sigmoid=lambda c, r: -torch.log(torch.sigmoid(c - r)))
def test_end_score_loss_of_far_apart_scores_is_finite(form, is_right):
    def check(form):
        chosen = torch.tensor([-150.0, 150.0], requires_grad=True)
        loss = form(chosen, torch.zeros(2))
        loss.sum().backward()
        close(loss, [150.0, 0.0])
        close(chosen.grad, [-1.0, 0.0])

    judge(check, form, is_right)


def test_losses_of_bf16_scores_are_fp32():
    scores = random_numbers(2, 4).bfloat16()
    assert end_score_loss(*scores).dtype == center_penalty(*scores).dtype == torch.float32
    lengths = torch.tensor([4, 3])
    assert token_wise_loss(scores, -scores, lengths, lengths, 0 * lengths).dtype == torch.float32


# --- token_wise_loss ---


def right_padded_pairs() -> tuple[torch.Tensor, ...]:
    """Return values, lengths, divergence: chosen longer, rejected longer, equal, a prefix, identical."""
    values = random_numbers(2, 5, 7)
    chosen_lengths, rejected_lengths = torch.tensor([6, 3, 5, 4, 5]), torch.tensor([4, 7, 5, 6, 5])
    return *values, chosen_lengths, rejected_lengths, torch.tensor([2, 1, 4, 4, 5])


def test_token_wise_loss_by_hand():
    """Another window, or a value read at padding, gives another number."""
    log3 = math.log(3)
    # the same prompt of 2, answers of 3 and 1 tokens, padding in column 5 and 6
    chosen = torch.tensor([[9.0, 9.0, log3, 0.0, log3, 70.0, 70.0]])
    rejected = torch.tensor([[5.0, 5.0, 0.0, -80.0, -80.0, -80.0, -80.0]])
    terms = token_wise_loss(chosen, rejected, torch.tensor([5]), torch.tensor([3]), torch.tensor([2]))
    # differences log 3, 0 - 0, log 3 - 0, the rejected value 0 held: (log 4/3 + log 2 + log 4/3) / 3
    close(terms, [(2 * math.log(4 / 3) + math.log(2)) / 3])


def test_token_wise_loss_is_the_mean_of_each_pair_alone():
    """One pair differs at two positions, the other at one, of which the sigmoid is 3/4."""
    log3 = math.log(3)
    chosen = torch.tensor([[9.0, log3, log3], [9.0, log3, 70.0]])
    rejected = torch.tensor([[9.0, 0.0, 0.0], [9.0, 0.0, -80.0]])
    lengths = torch.tensor([3, 2])
    close(token_wise_loss(chosen, rejected, lengths, lengths, torch.tensor([1, 1])), [math.log(4 / 3)] * 2)


def test_token_wise_loss_and_its_gradient_do_not_read_padding():
    *values, chosen_lengths, rejected_lengths, divergence = right_padded_pairs()
    lengths = (chosen_lengths, rejected_lengths)
    expected = token_wise_loss(*values, *lengths, divergence)
    masks = [torch.arange(7) < length[:, None] for length in lengths]
    for padding in (1e6, math.nan, -math.inf):
        filled = [
            torch.where(mask, x, padding).requires_grad_() for x, mask in zip(values, masks, strict=True)
        ]
        loss = token_wise_loss(*filled, *lengths, divergence)
        assert torch.equal(loss, expected)
        loss.sum().backward()
        for leaf, mask in zip(filled, masks, strict=True):
            assert leaf.grad.isfinite().all() and leaf.grad[~mask].eq(0).all()


def test_token_wise_gradient_sums_up_on_the_value_that_is_held():
    chosen = torch.zeros(1, 4, requires_grad=True)
    rejected = torch.zeros(1, 4, requires_grad=True)
    one = torch.tensor([1])
    token_wise_loss(chosen, rejected, 4 * one, 2 * one, one).sum().backward()
    # three positions of weight 1/3, each with a slope of -1/2 at 0; the rejected value of column 1 is in all
    close(chosen.grad, [[0.0, -1 / 6, -1 / 6, -1 / 6]])
    close(rejected.grad, [[0.0, 0.5, 0.0, 0.0]])


def test_identical_pairs_have_no_gradient():
    chosen, rejected, chosen_lengths, rejected_lengths, divergence = (x[4:] for x in right_padded_pairs())
    leaf = chosen.clone().requires_grad_()
    terms = token_wise_loss(leaf, rejected, chosen_lengths, rejected_lengths, divergence)
    terms.sum().backward()
    assert terms.tolist() == [0.0] and leaf.grad.eq(0).all()


# --- first_difference ---


def test_first_difference_by_hand():
    # padding may be the token that the longer one has there
    chosen = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 1], [1, 2, 3, 4]])
    rejected = torch.tensor([[5, 6, 9, 8], [5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 2], [9, 2, 3, 4]])
    chosen_lengths, rejected_lengths = torch.tensor([4, 4, 2, 3, 4]), torch.tensor([4, 2, 4, 3, 4])
    # at 7 / 9; where the shorter one ends, twice; identical, of length 3; at the very first
    assert first_difference(chosen, rejected, chosen_lengths, rejected_lengths).tolist() == [2, 2, 2, 3, 0]


# --- center_penalty ---


def test_center_penalty_by_hand():
    chosen = torch.tensor([1.0, 2.0, -1.0], requires_grad=True)
    penalty = center_penalty(chosen, torch.tensor([-1.0, 1.0, -3.0]))
    penalty.sum().backward()
    close(penalty, [0.0, 9.0, 16.0])  # (1 - 1)^2, (2 + 1)^2, (-1 - 3)^2
    close(chosen.grad, [0.0, 6.0, -8.0])


# --- metrics of a whole evaluation ---


def test_pair_accuracy_by_hand():
    # right, right, wrong, a tie: (1 + 1 + 0 + 1/2) / 4
    assert accuracy_figures(torch.tensor([2.0, 1.0, -0.5, 0.0]))["accuracy"] == 0.625
    differences = torch.tensor([1.0] * 5 + [-1.0] * 3)
    # The ends solve (p - 5/8)^2 = 1.96^2 p (1 - p) / 8.
    expected = {"accuracy": 0.625, "accuracy_low": 0.30574, "accuracy_high": 0.86316, "pairs": 8}
    assert accuracy_figures(differences) == pytest.approx(expected, abs=1e-4)
    with pytest.raises(ValueError, match="no pairs"):
        accuracy_figures(torch.zeros(0))


def test_calibration_error_by_hand():
    # confidence 3/4 (bin [.7, .8) of 5): four times right, gap 1/4, weight 4/6
    # confidence 9/10 (bin [.9, 1]): right, wrong: 1/2, gap 0.4, weight 2/6
    odds = torch.tensor([3.0, 3.0, 3.0, 3.0, 9.0001, 1 / 9.0001])
    close(expected_calibration_error(odds.log(), bins=5), (0.25 * 4 + 0.4 * 2) / 6, atol=1e-5)
    assert expected_calibration_error(torch.tensor([100.0, 1000.0])) == 0  # certain and right
    assert expected_calibration_error(torch.tensor([-100.0])) == 1  # certain and wrong
    # A model that gives NaN is neither right nor calibrated, and ends no run.
    assert expected_calibration_error(torch.tensor([math.nan, 1.0])).isnan()
    assert math.isnan(accuracy_figures(torch.tensor([math.nan, 1.0]))["accuracy"])


def test_correlation_by_hand():
    # scores 0 1 5: centred -2 -1 3; lengths 10 30 20: centred -10 10 0: (20 - 10) / sqrt(14 * 200)
    scores, lengths = torch.tensor([0.0, 1.0, 5.0]), torch.tensor([10, 30, 20])
    close(correlation(scores, lengths), 10 / math.sqrt(2800))
    assert correlation(scores, torch.tensor([7, 7, 7])) == correlation(torch.full((3,), 0.1), lengths) == 0


def test_share_of_the_longer_by_hand():
    """Of four pairs one has answers of one length; of the other three the longer wins one, and ties one."""
    scores, lengths = torch.tensor([2.0, -1.0, 0.0, 5.0]), torch.tensor([3, 4, -2, 0])
    assert longer_share(scores, lengths) == pytest.approx((1 + 0 + 0.5) / 3)
    assert longer_share(scores[3:], lengths[3:]) == 0.5


@pytest.mark.parametrize(
    ("accuracy", "pairs", "told"),
    [
        (0.55, 1000, "ranked 55.0% of 1000 held-out pairs correctly (95 % interval 51.9% to 58.1%)"),
        (0.75, 8, "not significantly above 60%"),
        (0.65, 1000, ""),
    ],
)
def test_a_reward_model_is_doubted_by_the_interval_of_its_accuracy(tmp_path, accuracy, pairs, told):
    facts = {"template": "plain", "eval": {"accuracy": accuracy, "pairs": pairs}}
    (tmp_path / "triptych.json").write_text(json.dumps(facts))
    args = parse_args(PPOArguments, ["--template", "chat"], problems=Problems())
    specs = [RewardSpec("model", str(tmp_path), 1.0, "model")]
    *lines, of_template = reward_warnings(args, specs)
    assert (told in lines[0] and len(lines) == 1) if told else lines == []
    assert of_template.endswith("was trained with --template plain, and scores dialogues of --template chat")
