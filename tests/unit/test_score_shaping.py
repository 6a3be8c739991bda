"""From the reward model's scores to what PPO maximises. A31 and the like are rows of the seeds."""

import torch
from right_or_wrong import close, forms, judge

from step3_ppo.arguments import PPOArguments
from step3_ppo.rewards import score_shaping
from step3_ppo.rewards.score_shaping import length_shortfall, overlong_share

LENGTHS = torch.tensor([0, 5, 10, 40])
FINISHED = torch.tensor([True, True, False, False])
SCORES = torch.tensor([1.0, -9.0, 9.0, 2.0])


def shape_scores(scores, lengths, finished, groups=None, *, reward_clip=0.0, **flags):
    groups = torch.zeros(len(scores)) if groups is None else groups
    args = PPOArguments(reward_clip=reward_clip, **flags)
    return score_shaping.shape_scores(scores, lengths, finished, groups, args)


def test_the_length_term_by_hand():
    assert length_shortfall(LENGTHS, 10).tolist() == [1.0, 0.5, 0.0, 0.0]


def test_clip_then_penalty_then_length():
    flags = {"reward_clip": 5.0, "truncated_score": -2.0, "length_reward_tokens": 10}
    found = shape_scores(SCORES, LENGTHS, FINISHED, **flags)
    # 1 - 1; clip(-9) = -5, - 0.5; cut: -2; cut: -2
    assert found.tolist() == [0.0, -5.5, -2.0, -2.0], "it still counts at the clip"
    assert shape_scores(SCORES, LENGTHS, FINISHED).equal(SCORES), "nothing is changed without flags"


def test_scores_are_whitened_before_they_are_clipped():
    scores = torch.tensor([1.0, *[3.0] * 6, 5.0])  # mean 3, deviation 1: whitened -2, 0 and 2
    lengths, finished = torch.full((8,), 10), torch.ones(8, dtype=torch.bool)
    found = shape_scores(scores, lengths, finished, whiten_scores="batch", reward_clip=1.5)
    close(found, [-1.5, *[0.0] * 6, 1.5])
    scores, lengths, finished = torch.tensor([1.0, 1.0, 1.0, 1.0, 6.0]), lengths[:5], finished[:5]
    groups = torch.tensor([3, 8, 3, 8, 8])  # A31: 1 1, and 1 1 6 with mean 8/3 and deviation 5 sqrt(2) / 3
    found = shape_scores(scores, lengths, finished, groups, whiten_scores="group", reward_clip=1.2)
    close(found, [0.0, -(0.5**0.5), 0.0, -(0.5**0.5), 1.2])


def test_a_number_is_the_score_of_a_cut_response():
    """R57, A32: score only when it ended, told by the flag; "mask" is the loss's business."""
    found = shape_scores(SCORES, LENGTHS, FINISHED, truncated_score=0.0)
    assert found.tolist() == [1.0, -9.0, 0.0, 0.0]
    assert shape_scores(SCORES, LENGTHS, FINISHED, truncated="mask").equal(SCORES)


# --- the overlong penalty ---


@forms(
    overlong_share,
    step=lambda n, buffer, most: (n > most - buffer).float(),
    not_bounded=lambda n, buffer, most: (n - (most - buffer)) / buffer,
)
def test_the_overlong_share_by_hand(form, is_right):
    """A31: DAPO's eq. 13 with L_max 40 and L_cache 8."""

    def check(form):
        close(form(torch.tensor([1, 32, 33, 36, 40]), 8, 40), [0.0, 0.0, 1 / 8, 1 / 2, 1.0])

    judge(check, form, is_right)


def test_the_overlong_penalty_comes_after_clipping_by_hand():
    """A31."""
    options = {"overlong_buffer_tokens": 20, "max_answer_seq_len": 40}
    lengths = torch.tensor([0, 25, 30, 40])
    found = shape_scores(SCORES, lengths, FINISHED, reward_clip=5.0, **options)
    close(found, [1.0, -5.0 - 0.25, 5.0 - 0.5, 2.0 - 1.0])
    cut = shape_scores(SCORES, lengths, FINISHED, truncated_score=-1.0, **options)
    close(cut, [1.0, -9.25, -1.0 - 0.5, -1.0 - 1.0])  # both are taken off
    assert shape_scores(SCORES, lengths, FINISHED, max_answer_seq_len=40).equal(SCORES)
