"""Algorithms: each by hand, where every other one must fail, and against a loop in float64.

R57 and the like in a docstring are rows of the seeds.
"""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from records import make_batch
from response_batches import random_batch
from right_or_wrong import close

from common.data.packed_batch import PackedBatch
from common.models.tensor_ops import whiten
from step3_ppo.algorithms import ALGORITHMS, loss_tokens, normalised
from step3_ppo.arguments import PPOArguments
from step3_ppo.group_math import group_whiten
from step3_ppo.rollout_batch import response_mask, tokens, with_tokens

NAMES = ("ppo", "grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++-baseline")


def make_args(**changes) -> PPOArguments:
    return dataclasses.replace(PPOArguments(), **changes)


def make_rollout(lengths, group_ids, scores, **tensors) -> PackedBatch:
    """Return a rollout batch; what is not given is random. is_finished: all, unless given."""
    old, ref, rollout, values, _ = random_batch(4, lengths=lengths, seed=5)
    width = next((x.shape[1] for x in tensors.values() if x.dim() == 2), 9)
    made = {
        "group_ids": torch.tensor(group_ids),
        "scores": torch.as_tensor(scores, dtype=torch.float32),
        "next_values": values[:, 0],
    }
    padded = {"rollout_logprobs": rollout, "old_logprobs": old, "ref_logprobs": ref, "old_values": values}
    made |= {name: x[:, :width] for name, x in padded.items()}
    return make_batch(lengths, **made | tensors)


def run(name, batch, args, kl_coef=0.3):
    """Return what an algorithm adds: rewards, advantages, loss_mask, returns or None, all (b, R)."""
    done = ALGORITHMS[name].add_advantages(batch, args, kl_coef)
    names = ("rewards", "advantages", "loss_mask", "returns")
    return SimpleNamespace(**{n: tokens(done, n) if n in done.data else None for n in names})


def by_hand() -> PackedBatch:
    """Two groups, {0, 2} and {1, 3}, of 2, 1, 1 and 2 tokens; k1: 0.5 -1 | 2 | 1 | 0 1."""
    kl = torch.tensor([[0.5, -1.0, 9.0], [2.0, 9.0, 9.0], [1.0, 9.0, 9.0], [0.0, 1.0, 9.0]])
    ref = torch.full((4, 3), -3.0)
    return make_rollout(
        [2, 1, 1, 2], [8, 3, 8, 3], [1.0, 4.0, 3.0, 4.0],
        ref_logprobs=ref, old_logprobs=ref + kl,
        old_values=torch.full((4, 3), 0.5), next_values=torch.full((4,), 7.0),
    )  # fmt: skip


A = 1 / (math.sqrt(2) + 1e-4)
SCORE_ONLY = [[0, 1], [4, 0], [3, 0], [0, 4]]
WITH_KL = [[-0.05, 1.1], [3.8, 0], [2.9, 0], [0, 3.9]]  # kl_coef 0.1
BY_HAND = {  # rewards; advantages with gamma 0.5, lambda 0.5 and no normalisation
    # delta_1 = 1.1 - 0.5, delta_0 = -0.05 + 0.5 * 0.5 - 0.5; A_0 = -0.3 + 0.25 * 0.6; ...
    "ppo": (WITH_KL, [[-0.15, 0.6], [3.3, 0], [2.4, 0], [-0.25 + 0.85, 3.4]]),
    # 1, 3: mean 2, deviation sqrt(2); 4, 4: constant
    "grpo": (SCORE_ONLY, [[-A, -A], [0, 0], [A, 0], [0, 0]]),
    "dr_grpo": (SCORE_ONLY, [[-1, -1], [0, 0], [1, 0], [0, 0]]),
    # 1 + 0.05 against 3 - 0.1; 4 - 0.2 against 4 - 0.1
    "rloo": (WITH_KL, [[-1.85, -1.85], [-0.1, 0], [1.85, 0], [0.1, 0.1]]),
    "reinforce++": (WITH_KL, [[0.5, 1.1], [3.8, 0], [2.9, 0], [1.95, 3.9]]),
    # scores -1, 0, 1, 0; -0.05 + 0.5 * (-1 + 0.1)
    "reinforce++-baseline": (WITH_KL, [[-0.5, -0.9], [-0.2, 0], [0.9, 0], [-0.05, -0.1]]),
}


@pytest.mark.parametrize("name", NAMES)
def test_algorithms_by_hand(name):
    """O4, O14 (ppo), A7 (groups): what one algorithm gives, no other does."""
    args, (rewards, advantages) = make_args(gamma=0.5, gae_lambda=0.5, adv_norm="none"), BY_HAND[name]
    found = run(name, by_hand(), args, 0.1)
    close(found.rewards, rewards)
    close(found.advantages, advantages)
    for other in set(NAMES) - {name}:
        assert not torch.allclose(run(other, by_hand(), args, 0.1).advantages, found.advantages, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "kl_in", "rewards", "first"),
    [
        ("grpo", "reward", WITH_KL, -0.925 / (1.85 / math.sqrt(2) + 1e-4)),
        ("dr_grpo", "reward", WITH_KL, -0.925),
        ("rloo", "loss", SCORE_ONLY, -2.0),
        ("reinforce++", "loss", SCORE_ONLY, 0.5),
        ("reinforce++-baseline", "loss", SCORE_ONLY, -0.5),
        ("ppo", "loss", SCORE_ONLY, -0.25 + 0.475 * 0.5),
    ],
)
def test_the_penalty_in_the_other_place_by_hand(name, kl_in, rewards, first):
    """O8: KL in the reward or in the loss. Rewards of a response: 1.05, 3.8, 2.9, 3.9."""
    args = make_args(gamma=0.5, kl_in=kl_in, adv_norm="none")
    found = run(name, by_hand(), args, 0.1)
    close(found.rewards, rewards)
    close(found.advantages[0, 0], first)
    if kl_in == "loss":  # the reference is not even read
        blind = with_tokens(by_hand(), ref_logprobs=torch.full((4, 2), math.nan))
        assert torch.equal(run(name, blind, args, 0.1).advantages, found.advantages)


# --- against loops ---


def random_rollout(num=24) -> PackedBatch:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 10, (num,), generator=generator).tolist()
    group_ids = torch.randint(-2, 5, (num - 1,), generator=generator).tolist() + [99]
    scores = 3 * torch.randn(num, generator=generator)
    finished = torch.rand(num, generator=generator) < 0.6
    return make_rollout(lengths, group_ids, scores, is_finished=finished)


def loop_advantages(name, batch, args, kl_coef):
    """Return the advantages before normalisation, one response after another, in float64."""
    lengths, group_ids = batch.lengths["response_ids"].tolist(), batch.numbers("group_ids").tolist()
    difference = (batch.data["old_logprobs"] - batch.data["ref_logprobs"]).double()
    kl = [of_response.tolist() for of_response in difference.split(lengths)]
    scores = [max(-args.reward_clip, min(args.reward_clip, s)) for s in batch.numbers("scores").tolist()]
    in_reward = 0.0 if "grpo" in name else kl_coef
    whole = [s - in_reward * math.fsum(k) for s, k in zip(scores, kl, strict=True)]
    advantages = torch.zeros(response_mask(batch).shape, dtype=torch.float64)
    for i, length in enumerate(lengths):
        group = [j for j in range(len(lengths)) if group_ids[j] == group_ids[i]]
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
                    value = tokens(batch, "old_values")[i, t].item()
                    delta = reward + args.gamma * next_value - value
                    to_go, next_value = delta + args.gamma * args.gae_lambda * to_go, value
                else:
                    to_go = reward + args.gamma * to_go
                advantages[i, t] = to_go
    return advantages


@pytest.mark.parametrize("name", NAMES)
def test_algorithms_equal_float64_loops(name):
    """A9: groups of any size, told by their ids; one has a single response."""
    batch, args = random_rollout(), make_args(gamma=0.9, gae_lambda=0.8, adv_norm="none", reward_clip=4.0)
    close(run(name, batch, args).advantages, loop_advantages(name, batch, args, 0.3), atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_adv_norm_of_every_algorithm(name):
    """A6, A7: over the step, inside a group, not at all."""
    batch = random_rollout()
    mask = response_mask(batch)
    plain = run(name, batch, make_args(adv_norm="none")).advantages
    expected = {
        "none": plain,
        "batch": whiten(plain, mask),
        "group": group_whiten(plain, mask, batch.numbers("group_ids")),
    }
    for adv_norm, wanted in expected.items():
        assert torch.equal(run(name, batch, make_args(adv_norm=adv_norm)).advantages, wanted)
    assert torch.equal(run(name, batch, PPOArguments()).advantages, expected[ALGORITHMS[name].adv_norm])


@pytest.mark.parametrize("name", NAMES)
def test_no_algorithm_reads_the_order_of_rows_or_values_without_a_critic(name):
    """O9, O16."""
    batch, args = random_rollout(), make_args(truncated="mask")
    found = run(name, batch, args)
    assert found.advantages.dtype == torch.float32 and not found.advantages.requires_grad
    assert found.advantages[~response_mask(batch)].eq(0).all() and "advantages" not in batch.data
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(1))
    close(run(name, batch.select(order), args).advantages, found.advantages[order], atol=2e-6)
    if name != "ppo":
        blind = with_tokens(batch, old_values=torch.full(response_mask(batch).shape, math.nan))
        assert torch.equal(run(name, blind, args).advantages, found.advantages) and found.returns is None


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_equal_scores_of_a_group_teach_exactly_nothing(name):
    """A6: and they make no NaN."""
    batch = make_rollout([3, 9, 5, 2, 7, 1], [1, 1, 1, 4, 4, 6], [0.1, 0.1, 0.1, 0.3, 0.3, 0.7])
    for adv_norm in ("none", "group", "batch"):
        assert run(name, batch, make_args(adv_norm=adv_norm, kl_in="loss")).advantages.eq(0).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_cut_response_under_truncated_mask_counts_in_no_loss(name):
    """A32, R57: from the finished flag; its score still counts in its group."""
    batch = random_rollout()
    mask, args = response_mask(batch), make_args(adv_norm="none", truncated="mask")
    found = run(name, batch, args)
    expected_mask = mask & batch.numbers("is_finished")[:, None]
    assert torch.equal(found.loss_mask, expected_mask) and 0 < expected_mask.sum() < mask.sum()
    plain = run(name, batch, make_args(adv_norm="none"))
    assert torch.equal(plain.loss_mask, mask)
    assert torch.equal(found.advantages, torch.where(expected_mask, plain.advantages, 0.0))
    # What counts in no loss counts in no normalisation.
    found = run(name, batch, dataclasses.replace(args, adv_norm="batch"))
    assert torch.equal(found.advantages, whiten(plain.advantages, expected_mask))


SCORE_FLAGS = [
    ({}, [1.0, 9.0]),
    ({"reward_clip": 2.0}, [1.0, 2.0]),
    ({"whiten_scores": True}, [-1.0, 1.0]),
    ({"length_reward_coef": 2.0, "length_reward_tokens": 8}, [1.0 - 1.0, 9.0]),
    ({"truncated": "penalty", "truncated_penalty": -7.0}, [1.0, -7.0]),
    # 9 tokens of 10, the last 4 of them in the buffer: 3 / 4
    ({"overlong_penalty": 3.0, "overlong_buffer_tokens": 4, "max_answer_seq_len": 10}, [1.0, 9.0 - 2.25]),
    ({"overlong_penalty": 3.0, "max_answer_seq_len": 9}, [1.0, 9.0 - 3.0]),
]


@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_reads_the_flags_of_scores(name):
    """O6, A31."""
    batch = make_rollout([4, 9], [0, 0], [1.0, 9.0], is_finished=torch.tensor([True, False]))
    for flags, expected in SCORE_FLAGS:
        rewards = run(name, batch, make_args(**{"reward_clip": 0.0} | flags), 0.0).rewards
        close(rewards[[0, 1], [3, 8]], expected)
        assert rewards.ne(0).sum() == sum(score != 0 for score in expected)


def test_what_counts_by_hand():
    """A32, A6: normalisation looks at what counts, not at everything."""
    batch = by_hand().with_numbers("is_finished", torch.tensor([True, False, True, True]))
    batch = with_tokens(batch, loss_mask=(torch.arange(4) != 3)[:, None].expand(4, 2))
    assert loss_tokens(batch, make_args(truncated="mask")).sum(1).tolist() == [2, 0, 1, 0]
    assert loss_tokens(batch, make_args(truncated="score")).sum(1).tolist() == [2, 1, 1, 0]
    batch, args = random_rollout(), make_args(adv_norm="batch", truncated="mask")
    mask, values = loss_tokens(batch, args), tokens(batch, "old_values")
    assert abs(float(normalised(values, batch, args)[mask].mean())) < 1e-6
    assert abs(float(whiten(values, response_mask(batch))[mask].mean())) > 1e-3


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
    batch = make_rollout(
        [2], [0], [2.0],
        old_values=torch.tensor([[0.5, 0.25]]), next_values=torch.tensor([3.0]),
        is_finished=torch.tensor([finished]),
    )  # fmt: skip
    args = make_args(truncated=truncated, truncated_penalty=-1.0, gamma=1.0, gae_lambda=1.0)
    close(run("ppo", batch, args, 0.0).returns[0, 1], last)
