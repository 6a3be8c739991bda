"""Ranking metrics of the reward model: by hand, against wrong forms."""

import json
import math

import pytest
import torch
from right_or_wrong import close

from common.flags.args import Problems, parse_args
from common.models.tensor_ops import correlation
from step2_reward.ranking_metrics import (
    accuracy_figures,
    expected_calibration_error,
    longer_share,
    pair_accuracy,
)
from step3_ppo.arguments import PPOArguments
from step3_ppo.rewards.reward_specs import RewardSpec
from step3_ppo.start_up import doubts_about_rewards


def test_pair_accuracy_by_hand():
    # right, right, wrong, a tie: (1 + 1 + 0 + 1/2) / 4
    chosen, rejected = torch.tensor([3.0, -1.0, 0.0, 2.0]), torch.tensor([1.0, -2.0, 0.5, 2.0])
    close(pair_accuracy(chosen, rejected), 0.625)


def test_calibration_error_by_hand():
    # confidence 3/4 (bin [.7, .8) of 5): four times right, gap 1/4, weight 4/6
    # confidence 9/10 (bin [.9, 1]): right, wrong: 1/2, gap 0.4, weight 2/6
    odds = torch.tensor([3.0, 3.0, 3.0, 3.0, 9.0001, 1 / 9.0001])
    close(expected_calibration_error(odds.log(), bins=5), (0.25 * 4 + 0.4 * 2) / 6, atol=1e-5)


def test_calibration_of_extremes():
    assert expected_calibration_error(torch.tensor([100.0, 1000.0])) == 0  # certain and right
    assert expected_calibration_error(torch.tensor([-100.0])) == 1  # certain and wrong
    assert expected_calibration_error(torch.zeros(8)) == 0  # no opinion, no claim


def test_correlation_by_hand():
    # scores 0 1 5: centred -2 -1 3; lengths 10 30 20: centred -10 10 0
    # (20 - 10) / sqrt(14 * 200)
    close(correlation(torch.tensor([0.0, 1.0, 5.0]), torch.tensor([10.0, 30.0, 20.0])), 10 / math.sqrt(2800))


def test_correlation_of_extremes_and_of_whole_lengths():
    scores, lengths = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([100, 200, 400])
    close(correlation(scores, lengths), 1.0)
    close(correlation(-scores, lengths), -1.0)
    assert correlation(scores, torch.tensor([7, 7, 7])) == 0
    assert correlation(torch.full((3,), 0.1), lengths) == 0


def test_metrics_of_nothing_say_so():
    nothing = torch.zeros(0)
    with pytest.raises(ValueError, match="no pairs"):
        pair_accuracy(nothing, nothing)


def test_share_of_the_longer_by_hand():
    """Of four pairs one has answers of one length; of the other three the longer wins one, and ties one."""
    scores, lengths = torch.tensor([2.0, -1.0, 0.0, 5.0]), torch.tensor([3, 4, -2, 0])
    assert longer_share(scores, lengths) == pytest.approx((1 + 0 + 0.5) / 3)
    assert longer_share(scores[3:], lengths[3:]) == 0.5


def test_accuracy_has_its_interval_and_the_number_of_pairs():
    chosen = torch.tensor([1.0] * 5 + [-1.0] * 3)
    # The ends solve (p - 5/8)^2 = 1.96^2 p (1 - p) / 8.
    expected = {"accuracy": 0.625, "accuracy_low": 0.30574, "accuracy_high": 0.86316, "pairs": 8}
    assert accuracy_figures(chosen, torch.zeros(8)) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("accuracy", "pairs", "told"),
    [
        (0.55, 1000, "ranked 55.0% of 1000 held-out pairs rightly (95 % interval 51.9% to 58.1%): less than"),
        (0.75, 8, "too few pairs to tell that it is above 60%"),
        (0.65, 1000, ""),
    ],
)
def test_a_reward_model_is_doubted_by_the_interval_of_its_accuracy(tmp_path, accuracy, pairs, told):
    facts = {"template": "plain", "eval": {"accuracy": accuracy, "pairs": pairs}}
    (tmp_path / "triptych.json").write_text(json.dumps(facts))
    args = parse_args(PPOArguments, ["--template", "chat"], problems=Problems())
    specs = [RewardSpec("model", str(tmp_path), 1.0, "model")]
    *lines, of_template = doubts_about_rewards(args, specs)
    assert (told in lines[0] and len(lines) == 1) if told else lines == []
    assert of_template.endswith("was trained with --template plain, and scores dialogues of --template chat")
