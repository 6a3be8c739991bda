"""Algorithms: each by hand, where every other one must fail, and against a loop in float64.

R57 and the like in a docstring are rows of the seeds.
"""

import dataclasses
import math

import pytest
import torch
from response_batches import PADDING, fill, random_batch
from right_or_wrong import close, forms, judge

from common.models.tensor_ops import whiten
from step3_ppo.algorithms import ALGORITHMS
from step3_ppo.algorithms.shared_steps import counted, normalised
from step3_ppo.arguments import PPOArguments
from step3_ppo.experience import Experience
from step3_ppo.group_math import group_whiten

NAMES = ("ppo", "grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++-baseline")


def make_args(**changes) -> PPOArguments:
    return dataclasses.replace(PPOArguments(), **changes)


def make_experience(lengths, group_ids, scores, **tensors) -> Experience:
    """Return an experience; what is not given is random. is_finished: all, unless given."""
    num = len(lengths)
    *numbers, mask = random_batch(4, lengths=lengths, seed=5)
    width = next((x.shape[1] for x in tensors.values() if x.dim() == 2), mask.shape[1])
    old, ref, rollout, values = (x[:, :width] for x in numbers)
    zeros = torch.zeros(num, width, dtype=torch.int64)
    made = {
        "sample_ids": torch.arange(num),
        "group_ids": torch.tensor(group_ids),
        "response_ids": zeros,
        "response_mask": mask[:, :width],
        "is_finished": torch.ones(num).bool(),
        "versions": zeros,
        "rollout_logprobs": rollout,
        "old_logprobs": old,
        "ref_logprobs": ref,
        "scores": torch.as_tensor(scores, dtype=torch.float32),
        "old_values": values,
        "next_values": values[:, 0],
    }
    return Experience(**made | tensors)


def fields_of(experience: Experience) -> dict:
    return {field.name: getattr(experience, field.name) for field in dataclasses.fields(experience)}


def by_hand() -> Experience:
    """Two groups, {0, 2} and {1, 3}, of 2, 1, 1 and 2 tokens; k1: 0.5 -1 | 2 | 1 | 0 1."""
    kl = torch.tensor([[0.5, -1.0, 9.0], [2.0, 9.0, 9.0], [1.0, 9.0, 9.0], [0.0, 1.0, 9.0]])
    ref = torch.full((4, 3), -3.0)
    return make_experience(
        [2, 1, 1, 2], [8, 3, 8, 3], [1.0, 4.0, 3.0, 4.0],
        ref_logprobs=ref, old_logprobs=ref + kl,
        old_values=torch.full((4, 3), 0.5), next_values=torch.full((4,), 7.0),
    )  # fmt: skip


A = 1 / (math.sqrt(2) + 1e-4)
SCORE_ONLY = [[0, 1, 0], [4, 0, 0], [3, 0, 0], [0, 4, 0]]
WITH_KL = [[-0.05, 1.1, 0], [3.8, 0, 0], [2.9, 0, 0], [0, 3.9, 0]]  # kl_coef 0.1
BY_HAND = {  # rewards; advantages with gamma 0.5, lambda 0.5 and no normalisation
    # delta_1 = 1.1 - 0.5, delta_0 = -0.05 + 0.5 * 0.5 - 0.5; A_0 = -0.3 + 0.25 * 0.6; ...
    "ppo": (WITH_KL, [[-0.15, 0.6, 0], [3.3, 0, 0], [2.4, 0, 0], [-0.25 + 0.85, 3.4, 0]]),
    # 1, 3: mean 2, deviation sqrt(2); 4, 4: constant
    "grpo": (SCORE_ONLY, [[-A, -A, 0], [0, 0, 0], [A, 0, 0], [0, 0, 0]]),
    "dr_grpo": (SCORE_ONLY, [[-1, -1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0]]),
    # 1 + 0.05 against 3 - 0.1; 4 - 0.2 against 4 - 0.1
    "rloo": (WITH_KL, [[-1.85, -1.85, 0], [-0.1, 0, 0], [1.85, 0, 0], [0.1, 0.1, 0]]),
    "reinforce++": (WITH_KL, [[0.5, 1.1, 0], [3.8, 0, 0], [2.9, 0, 0], [1.95, 3.9, 0]]),
    # scores -1, 0, 1, 0; -0.05 + 0.5 * (-1 + 0.1)
    "reinforce++-baseline": (WITH_KL, [[-0.5, -0.9, 0], [-0.2, 0, 0], [0.9, 0, 0], [-0.05, -0.1, 0]]),
}


@pytest.mark.parametrize("form", NAMES)
@pytest.mark.parametrize("name", NAMES)
def test_algorithms_by_hand(name, form):
    """O4, O14 (ppo), A7 (groups): what one algorithm gives, no other does."""

    def check(form):
        found = form(by_hand(), make_args(gamma=0.5, gae_lambda=0.5, adv_norm="none"), 0.1)
        rewards, advantages = BY_HAND[name]
        close(found.rewards, rewards)
        close(found.advantages, advantages)

    judge(check, ALGORITHMS[form].add_advantages, form == name)


def test_group_algorithms_with_the_penalty_in_the_other_place_by_hand():
    """O8: KL in the reward or in the loss. Rewards of a response: 1.05, 3.8, 2.9, 3.9."""
    args = make_args(gamma=0.5)
    for name, kl_in, rewards, first in (
        ("grpo", "reward", WITH_KL, -0.925 / (1.85 / math.sqrt(2) + 1e-4)),
        ("dr_grpo", "reward", WITH_KL, -0.925),
        ("rloo", "loss", SCORE_ONLY, -2.0),
        ("reinforce++", "loss", SCORE_ONLY, 0.5),
        ("reinforce++-baseline", "loss", SCORE_ONLY, -0.5),
        ("ppo", "loss", SCORE_ONLY, -0.25 + 0.475 * 0.5),
    ):
        changed = dataclasses.replace(args, kl_in=kl_in, adv_norm="none")
        found = ALGORITHMS[name].add_advantages(by_hand(), changed, 0.1)
        close(found.rewards, rewards)
        close(found.advantages[0, 0], first)
        if kl_in == "loss":  # the reference is not even read
            blind = dataclasses.replace(by_hand(), ref_logprobs=torch.full((4, 3), math.nan))
            again = ALGORITHMS[name].add_advantages(blind, changed, 0.1)
            assert torch.equal(again.advantages, found.advantages)


# --- against loops ---


def random_experience(num=24) -> Experience:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 10, (num,), generator=generator).tolist()
    group_ids = torch.randint(-2, 5, (num - 1,), generator=generator).tolist() + [99]
    scores = 3 * torch.randn(num, generator=generator)
    finished = torch.rand(num, generator=generator) < 0.6
    return make_experience(lengths, group_ids, scores, is_finished=finished)


def loop_advantages(name, e, args, kl_coef):
    """Return the advantages before normalisation, one response after another, in float64."""
    lengths = e.response_lengths.tolist()
    kl = [(e.old_logprobs[i, :n] - e.ref_logprobs[i, :n]).double().tolist() for i, n in enumerate(lengths)]
    scores = [max(-args.reward_clip, min(args.reward_clip, s)) for s in e.scores.tolist()]
    in_reward = 0.0 if "grpo" in name else kl_coef
    whole = [s - in_reward * math.fsum(k) for s, k in zip(scores, kl, strict=True)]
    advantages = torch.zeros(e.response_mask.shape, dtype=torch.float64)
    for i, length in enumerate(lengths):
        group = [j for j in range(len(lengths)) if e.group_ids[j] == e.group_ids[i]]
        others = [whole[j] for j in group if j != i]
        mean = math.fsum(whole[j] for j in group) / len(group)
        square = math.fsum((whole[j] - mean) ** 2 for j in group)
        if name == "rloo":
            advantages[i, :length] = whole[i] - math.fsum(others) / len(others) if others else 0.0
        elif name == "dr_grpo":
            advantages[i, :length] = whole[i] - mean
        elif name == "grpo":
            advantages[i, :length] = (whole[i] - mean) / (math.sqrt(square / max(len(others), 1)) + 1e-4)
        else:
            score_mean = math.fsum(scores[j] for j in group) / len(group)
            last = scores[i] - (score_mean if name.endswith("baseline") else 0.0)
            to_go, next_value = 0.0, 0.0
            for t in reversed(range(length)):
                reward = -kl_coef * kl[i][t] + (last if t == length - 1 else 0.0)
                if name == "ppo":
                    value = e.old_values[i, t].item()
                    delta = reward + args.gamma * next_value - value
                    to_go, next_value = delta + args.gamma * args.gae_lambda * to_go, value
                else:
                    to_go = reward + args.gamma * to_go
                advantages[i, t] = to_go
    return advantages


@pytest.mark.parametrize("form", NAMES)
@pytest.mark.parametrize("name", NAMES)
def test_algorithms_equal_float64_loops(name, form):
    """A9: groups of any size, told by their ids; one has a single response."""

    def check(form):
        e, args = random_experience(), make_args(gamma=0.9, gae_lambda=0.8, adv_norm="none", reward_clip=4.0)
        found = form(e, args, 0.3)
        close(found.advantages, loop_advantages(name, e, args, 0.3), atol=1e-5)

    judge(check, ALGORITHMS[form].add_advantages, form == name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("adv_norm", ["none", "batch", "group"])
def test_adv_norm_of_every_algorithm(name, adv_norm):
    """A6, A7: over the step, inside a group, not at all."""
    e = random_experience()
    plain = ALGORITHMS[name].add_advantages(e, make_args(adv_norm="none"), 0.3).advantages
    found = ALGORITHMS[name].add_advantages(e, make_args(adv_norm=adv_norm), 0.3).advantages
    expected = {
        "none": plain,
        "batch": whiten(plain, e.response_mask),
        "group": group_whiten(plain, e.response_mask, e.group_ids),
    }
    assert torch.equal(found, expected[adv_norm])
    default = ALGORITHMS[name].add_advantages(e, PPOArguments(), 0.3).advantages
    assert torch.equal(default, expected[ALGORITHMS[name].adv_norm])


@pytest.mark.parametrize("name", NAMES)
def test_no_algorithm_reads_padding_or_the_order_of_rows(name):
    """O9, O16."""
    e, args = random_experience(), make_args(truncated="mask")
    expected = ALGORITHMS[name].add_advantages(e, args, 0.3)
    assert expected.advantages.dtype == torch.float32 and not expected.advantages.requires_grad
    assert expected.advantages[~e.response_mask].eq(0).all() and e.advantages is None
    shown = ["rewards", "advantages", "loss_mask"] + ["returns"] * (name == "ppo")
    tensors = {n: x for n, x in fields_of(e).items() if torch.is_tensor(x)}
    for padding in PADDING:
        spoilt = {
            n: fill(x, e.response_mask, padding)
            for n, x in tensors.items()
            if x.is_floating_point() and x.dim() == 2
        }
        found = ALGORITHMS[name].add_advantages(dataclasses.replace(e, **spoilt), args, 0.3)
        assert all(torch.equal(getattr(found, n), getattr(expected, n)) for n in shown)
    order = torch.randperm(len(e.scores), generator=torch.Generator().manual_seed(1))
    moved = dataclasses.replace(e, **{n: x[order] for n, x in tensors.items()})
    close(ALGORITHMS[name].add_advantages(moved, args, 0.3).advantages, expected.advantages[order], atol=2e-6)


@pytest.mark.parametrize("name", NAMES[1:])
def test_without_a_critic_there_are_no_values(name):
    e, args = random_experience(), PPOArguments()
    expected = ALGORITHMS[name].add_advantages(e, args, 0.3)
    found = ALGORITHMS[name].add_advantages(
        dataclasses.replace(e, old_values=None, next_values=None), args, 0.3
    )
    assert torch.equal(found.advantages, expected.advantages) and found.returns is None


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_equal_scores_of_a_group_teach_exactly_nothing(name):
    """A6: and they make no NaN."""
    e = make_experience([3, 9, 5, 2, 7, 1], [1, 1, 1, 4, 4, 6], [0.1, 0.1, 0.1, 0.3, 0.3, 0.7])
    for adv_norm in ("none", "group", "batch"):
        args = make_args(adv_norm=adv_norm, kl_in="loss")
        assert ALGORITHMS[name].add_advantages(e, args, 0.3).advantages.eq(0).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_cut_response_under_truncated_mask_counts_in_no_loss(name):
    """A32, R57: from the finished flag; its score still counts in its group."""
    e = random_experience()
    args = make_args(adv_norm="none", truncated="mask")
    found = ALGORITHMS[name].add_advantages(e, args, 0.3)
    expected_mask = e.response_mask & e.is_finished[:, None]
    assert torch.equal(found.loss_mask, expected_mask) and 0 < expected_mask.sum() < e.response_mask.sum()
    plain = ALGORITHMS[name].add_advantages(e, make_args(adv_norm="none"), 0.3)
    assert torch.equal(plain.loss_mask, e.response_mask)
    assert torch.equal(found.advantages, torch.where(expected_mask, plain.advantages, 0.0))
    # What counts in no loss counts in no normalisation.
    found = ALGORITHMS[name].add_advantages(e, dataclasses.replace(args, adv_norm="batch"), 0.3)
    assert torch.equal(found.advantages, whiten(plain.advantages, expected_mask))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, [1.0, 9.0]),
        ({"reward_clip": 2.0}, [1.0, 2.0]),
        ({"whiten_scores": True}, [-1.0, 1.0]),
        ({"length_reward_coef": 2.0, "length_reward_tokens": 8}, [1.0 - 1.0, 9.0]),
        ({"truncated": "penalty", "truncated_penalty": -7.0}, [1.0, -7.0]),
        # 9 tokens of 10, the last 4 of them in the buffer: 3 / 4
        ({"overlong_penalty": 3.0, "overlong_buffer_tokens": 4, "max_answer_seq_len": 10}, [1.0, 9.0 - 2.25]),
        ({"overlong_penalty": 3.0, "max_answer_seq_len": 9}, [1.0, 9.0 - 3.0]),
    ],
    ids=lambda value: "+".join(value) or "none" if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_reads_the_flags_of_scores(name, flags, expected):
    """O6, A31."""
    e = make_experience([4, 9], [0, 0], [1.0, 9.0], is_finished=torch.tensor([True, False]))
    args = make_args(**{"reward_clip": 0.0} | flags)
    rewards = ALGORITHMS[name].add_advantages(e, args, 0.0).rewards
    close(rewards[[0, 1], [3, 8]], expected)
    assert rewards.ne(0).sum() == sum(score != 0 for score in expected)


@forms(
    counted,
    cut_ones_only=lambda e, args: e.response_mask & ~e.is_finished[:, None],
    always=lambda e, args: e.response_mask & e.is_finished[:, None],
    never=lambda e, args: e.response_mask,
    forgets_the_loss_mask=lambda e, args: counted(dataclasses.replace(e, loss_mask=None), args),
)
def test_what_counts_by_hand(form, is_right):
    """A32."""

    def check(form):
        e = dataclasses.replace(by_hand(), is_finished=torch.tensor([True, False, True, True]))
        e = dataclasses.replace(e, loss_mask=e.response_mask & (torch.arange(4) != 3)[:, None])
        assert form(e, make_args(truncated="mask")).sum(1).tolist() == [2, 0, 1, 0]
        assert form(e, make_args(truncated="score")).sum(1).tolist() == [2, 1, 1, 0]

    judge(check, form, is_right)


def test_the_wrong_masks_of_normalisation_fail():
    """A6: loss_mask, not everything."""
    e = random_experience()
    args = make_args(adv_norm="batch", truncated="mask")
    x = e.old_values
    right = normalised(x, e, args)
    assert abs(float(right[counted(e, args)].mean())) < 1e-6
    for mask in (e.response_mask, torch.ones_like(e.response_mask)):
        assert abs(float(whiten(x, mask)[counted(e, args)].mean())) > 1e-3


# --- PPO's critic ---


def test_ppo_by_hand():
    """O4, O14, O17: one response of two tokens; gamma 1, lambda 0.5, kl_coef 0.1."""
    e = make_experience(
        [2], [0], [7.0],
        old_logprobs=torch.tensor([[-1.0, -2.0]]), ref_logprobs=torch.tensor([[-1.5, -1.0]]),
        old_values=torch.tensor([[0.5, 0.25]]), next_values=torch.tensor([3.0]),
    )  # fmt: skip
    args = make_args(gae_lambda=0.5, reward_clip=5.0, adv_norm="none")
    found = ALGORITHMS["ppo"].add_advantages(e, args, 0.1)
    # k1: 0.5, -1.0; delta_1 = 5.1 - 0.25, delta_0 = -0.05 + 0.25 - 0.5; A_0 = -0.3 + 0.5 * 4.85
    close(found.rewards, [[-0.05, 5.1]])
    close(found.advantages, [[2.125, 4.85]])
    close(found.returns, [[2.625, 5.1]])


@pytest.mark.parametrize(
    ("truncated", "finished", "last"),
    [
        ("bootstrap", True, 2.0),  # value after the end: 0
        ("bootstrap", False, 2.0 + 3.0),  # the critic's
        ("score", False, 2.0),
        ("penalty", False, -1.0),
        ("penalty", True, 2.0),
        ("mask", False, 2.0),
    ],
)
def test_what_becomes_of_a_cut_response(truncated, finished, last):
    """R57: value after the end is 0; bootstrap only for truncated; score only when it ended."""
    e = make_experience(
        [2], [0], [2.0],
        old_values=torch.tensor([[0.5, 0.25]]), next_values=torch.tensor([3.0]),
        is_finished=torch.tensor([finished]),
    )  # fmt: skip
    args = make_args(truncated=truncated, truncated_penalty=-1.0, gamma=1.0, gae_lambda=1.0)
    found = ALGORITHMS["ppo"].add_advantages(e, args, 0.0)
    close(found.returns[0, 1], last)
