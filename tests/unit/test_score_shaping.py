"""From the reward model's scores to what PPO maximises."""

import torch

from step3_ppo.rewards.score_shaping import length_shortfall, shape_scores

LENGTHS = torch.tensor([0, 5, 10, 40])
FINISHED = torch.tensor([True, True, False, False])
SCORES = torch.tensor([1.0, -9.0, 9.0, 2.0])


def test_the_length_term_by_hand():
    assert length_shortfall(LENGTHS, 10).tolist() == [1.0, 0.5, 0.0, 0.0]
    assert length_shortfall(LENGTHS, 0).tolist() == [0.0] * 4


def test_nothing_is_changed_without_flags():
    assert shape_scores(SCORES, LENGTHS, FINISHED).equal(SCORES)


def test_clip_then_penalty_then_length():
    found = shape_scores(
        SCORES, LENGTHS, FINISHED,
        reward_clip=5.0, truncated="penalty", truncated_penalty=-2.0,
        length_reward_coef=2.0, length_reward_tokens=10,
    )  # fmt: skip
    # 1 - 2*1; clip(-9) = -5, - 2*0.5; cut: -2; cut: -2
    assert found.tolist() == [-1.0, -6.0, -2.0, -2.0]


def test_the_length_term_still_counts_at_the_clip():
    short, enough = torch.tensor([2]), torch.tensor([10])
    options = {"reward_clip": 5.0, "length_reward_coef": 1.0, "length_reward_tokens": 10}
    done = torch.tensor([True])
    a, b = (shape_scores(torch.tensor([9.0]), n, done, **options) for n in (short, enough))
    assert abs(float(b - a) - 0.8) < 1e-6


def test_whitened_scores_have_mean_0_and_deviation_1():
    found = shape_scores(SCORES, LENGTHS, FINISHED, whiten_scores=True)
    assert abs(float(found.mean())) < 1e-6 and abs(float(found.std(correction=0)) - 1) < 1e-5
