"""Algorithms: each by hand, where every other one must fail; how one is found.

R57 and the like in a docstring are rows of the seeds.
"""

import ast
import dataclasses
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from right_or_wrong import close
from rollout_batches import make_batch, random_batch

from common.data.packed_batch import PackedBatch
from common.models.tensor_ops import whiten
from step3_ppo.algorithms import ALGORITHMS, Algorithm, fill_defaults, find_algorithm, unused_flags
from step3_ppo.arguments import PPOArguments
from step3_ppo.ppo_math import group_centre, group_whiten
from step3_ppo.rollout_batch import response_mask, tokens, with_tokens

NAMES = ("ppo", "grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++-baseline", "remax", "distill")


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
        "greedy_scores": torch.full((len(lengths),), 0.5),
        "greedy_is_finished": torch.ones(len(lengths)).bool(),
        "greedy_lengths": torch.full((len(lengths),), 9),
    }
    padded = {"rollout_logprobs": rollout, "old_logprobs": old, "ref_logprobs": ref, "old_values": values}
    made |= {name: x[:, :width] for name, x in padded.items()}
    return make_batch(lengths, **made | tensors)


def run(name, batch, args, kl_coef=0.3):
    """Return what an algorithm adds: rewards, advantages, loss_mask, returns or None, all (b, R)."""
    done = ALGORITHMS[name].add_advantages(batch, fill_defaults(args, ALGORITHMS[name]), kl_coef)
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
        greedy_scores=torch.tensor([2.0, 5.0, 2.0, 5.0]),
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
    "distill": (SCORE_ONLY, [[-2, -2], [0, 0], [2, 0], [0, 0]]),  # as rloo, without a penalty
    "reinforce++": (WITH_KL, [[0.5, 1.1], [3.8, 0], [2.9, 0], [1.95, 3.9]]),
    # scores -1, 0, 1, 0; -0.05 + 0.5 * (-1 + 0.1)
    "reinforce++-baseline": (WITH_KL, [[-0.5, -0.9], [-0.2, 0], [0.9, 0], [-0.05, -0.1]]),
    # scores less the greedy 2 and 5: -1, -1, 1, -1; -0.05 + 0.5 * (-1 + 0.1); 0.5 * (-1 - 0.1)
    "remax": (WITH_KL, [[-0.5, -0.9], [-1.2, 0], [0.9, 0], [-0.55, -1.1]]),
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
        ("rloo", "loss", SCORE_ONLY, -2.0),
        ("reinforce++", "loss", SCORE_ONLY, 0.5),
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


def test_distillation_by_hand():
    """Rewards: score - mean of the others. sampled: weight x (teacher - student), each token for itself."""
    batch = by_hand()
    gain = -(tokens(batch, "old_logprobs") - tokens(batch, "ref_logprobs"))
    of_rewards = run("rloo", batch, make_args(kl_in="loss")).advantages
    for loss, weight, part in (("jsd", 2.0, 0.0), ("sampled", 1.0, 1.0), ("sampled", 0.25, 0.25)):
        args = make_args(distill_loss=loss, distill_weight=weight, gamma=0.5, kl_in="loss", kl_coef=9.0)
        close(run("distill", batch, args).advantages, of_rewards + part * gain)
        unscored = PackedBatch(batch.ids, dict(batch.data), dict(batch.lengths))
        del unscored.data["scores"], unscored.lengths["scores"]
        close(run("distill", unscored, args).advantages, part * gain)
        masked = batch.with_key("loss_mask", torch.zeros(6).bool(), like="response_ids")
        assert run("distill", masked, args).advantages.eq(0).all()
    # The penalty of the policy loss, which would be paid to the teacher, is left out too.
    assert fill_defaults(args, ALGORITHMS["distill"]).kl_in == "reward"


def random_rollout(num=24) -> PackedBatch:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 10, (num,), generator=generator).tolist()
    group_ids = torch.randint(-2, 5, (num - 1,), generator=generator).tolist() + [99]
    scores = 3 * torch.randn(num, generator=generator)
    finished = torch.rand(num, generator=generator) < 0.6
    return make_rollout(lengths, group_ids, scores, is_finished=finished)


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
        "group_mean_batch_std": whiten(group_centre(plain, mask, batch.numbers("group_ids")), mask),
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
    assert batch.data["loss_mask"].all()
    mask = response_mask(batch)
    mask[3] = False  # a response that was left out before
    batch = with_tokens(batch, loss_mask=mask)
    args = make_args(adv_norm="none", truncated="mask")
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
    ({"whiten_scores": "group"}, [-1.0, 1.0]),
    ({"length_reward_tokens": 8}, [1.0 - 0.5, 9.0]),
    ({"truncated_score": -7.0}, [1.0, -7.0]),
    # 9 tokens of 10, the last 4 of them in the buffer: 3 / 4
    ({"overlong_buffer_tokens": 4, "max_answer_seq_len": 10}, [1.0, 9.0 - 0.75]),
]


@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_reads_the_flags_of_scores(name):
    """O6, A31."""
    scores, finished = torch.tensor([1.0, 9.0]), torch.tensor([True, False])
    batch = make_rollout([4, 9], [0, 0], scores, greedy_scores=scores, is_finished=finished)
    for flags, expected in SCORE_FLAGS:
        rewards = run(name, batch, make_args(**{"reward_clip": 0.0} | flags), 0.0).rewards
        close(rewards[[0, 1], [3, 8]], expected)
        assert rewards.ne(0).sum() == sum(score != 0 for score in expected)


@pytest.mark.parametrize(
    ("truncated", "score", "finished", "last"),
    [
        ("bootstrap", None, True, 2.0),  # value after the end: 0
        ("bootstrap", None, False, 2.0 + 3.0),  # the critic's
        ("score", -1.0, False, -1.0),
        ("score", -1.0, True, 2.0),
        ("bootstrap", 0.0, False, 3.0),  # no score of its own, as in ReaL
        ("bootstrap", 0.0, True, 2.0),
    ],
)
def test_what_becomes_of_a_cut_response(truncated, score, finished, last):
    """R57: value after the end is 0; bootstrap only for truncated; score only when it ended."""
    batch = make_rollout(
        [2], [0], [2.0],
        old_values=torch.tensor([[0.5, 0.25]]), next_values=torch.tensor([3.0]),
        is_finished=torch.tensor([finished]),
    )  # fmt: skip
    args = make_args(truncated=truncated, truncated_score=score, gamma=1.0, gae_lambda=1.0)
    close(run("ppo", batch, args, 0.0).returns[0, 1], last)


def test_remax_shapes_the_greedy_score_as_the_sampled_one():
    """R43: clipped, replaced where cut, and with its own length's penalty."""
    batch = make_rollout(
        [4, 9], [0, 1], [9.0, 1.0],
        greedy_scores=torch.tensor([7.0, 7.0]), greedy_is_finished=torch.tensor([True, False]),
        greedy_lengths=torch.tensor([2, 10]),
    )  # fmt: skip
    flags = {"reward_clip": 5.0, "truncated_score": -2.0, "length_reward_tokens": 8}
    found = run("remax", batch, make_args(**flags), 0.0)
    # 5 - 0.5 less 5 - 0.75; 1 less -2 (and no shortfall of 9 and 10 tokens)
    close(found.advantages[:, 0], [0.25, 3.0])
    together = run("remax", batch, make_args(whiten_scores="batch", reward_clip=0.0), 0.0)
    deviation = math.sqrt((9 + 25 + 1 + 1) / 4)  # of 9, 1, 7 and 7, whose mean is 6
    close(together.advantages[:, 0], [2 / deviation, -6 / deviation], atol=1e-5)


# --- how one is found ---


def test_the_empty_flags_get_what_the_algorithm_usually_does():
    """The algorithm's, but for what the policy loss has of its own."""
    for (name, loss), expected in {
        ("ppo", "ppo"): ("reward", "k1", "batch", "token", 0.2, 0),
        ("grpo", "ppo:dual_clip=3"): ("loss", "k3", "none", "sequence", 0.2, 0),
        ("dr_grpo", "ppo"): ("loss", "k3", "none", "constant", 0.2, 0),
        ("dr_grpo", "gspo"): ("loss", "k3", "none", "sequence", 3e-4, 4e-4),
        ("grpo", "cispo"): ("loss", "k3", "none", "token", 1, 0.2),
    }.items():
        args = fill_defaults(make_args(policy_loss=loss), ALGORITHMS[name])
        filled = (args.kl_in, args.kl_estimator, args.adv_norm, args.loss_aggregation)
        assert (*filled, args.clip_range, args.clip_range_high) == expected
    chosen = make_args(
        kl_in="loss", kl_estimator="k2", adv_norm="group", loss_aggregation="token", clip_range=0.1,
        policy_loss="gspo",
    )  # fmt: skip
    assert fill_defaults(chosen, ALGORITHMS["ppo"]) == chosen
    assert fill_defaults(make_args(kl_in="loss"), ALGORITHMS["ppo"]).kl_estimator == "k3"
    high = fill_defaults(make_args(clip_range_high=0.3, policy_loss="gspo"), ALGORITHMS["ppo"])
    assert (high.clip_range, high.clip_range_high) == (3e-4, 0.3)


def test_an_algorithm_is_found_by_name_or_imported(tmp_path, monkeypatch):
    """A4: the file that defines the algorithm."""
    assert find_algorithm("grpo") is ALGORITHMS["grpo"]
    (tmp_path / "my_algorithms_of_a_test.py").write_text(
        "from step3_ppo.algorithms import register_algorithm\n\n\n"
        "@register_algorithm('of a test', needs_group=True)\n"
        "def decorated(batch, args, kl_coef):\n    return batch\n\n\n"
        "def plain(batch, args, kl_coef):\n    return batch\n\n\n"
        "def short(batch, args):\n    return batch\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    before = dict(ALGORITHMS)
    try:
        plain = find_algorithm("my_algorithms_of_a_test:plain")
        decorated = find_algorithm("my_algorithms_of_a_test:decorated")
        assert plain == Algorithm("my_algorithms_of_a_test:plain", plain.add_advantages)
        assert decorated is find_algorithm("of a test") and decorated.needs_group
        with pytest.raises(ValueError, match="--algorithm .*:plane: .* has no plane; did you mean plain"):
            find_algorithm("my_algorithms_of_a_test:plane")
        with pytest.raises(ValueError, match=r"--algorithm gropo is unknown; .*grpo\? .*--plugins"):
            find_algorithm("gropo")
        with pytest.raises(ValueError, match=r":short: it is called with \(batch, args, kl_coef\): too many"):
            find_algorithm("my_algorithms_of_a_test:short")
        file = tmp_path / "my_algorithms_of_a_test.py"
        file.rename(tmp_path / "others_of_a_test.py")  # another file's function of the same name
        with pytest.raises(ValueError, match="algorithm 'of a test' is registered twice"):
            find_algorithm("others_of_a_test:decorated")
    finally:
        ALGORITHMS.clear()
        ALGORITHMS.update(before)
        sys.modules.pop("my_algorithms_of_a_test", None)


@pytest.mark.parametrize("name", NAMES)
def test_flags_that_an_algorithm_does_not_read(name):
    critic = {"critic_learning_rate", "critic_lora_dim", "value_clip_range", "value_norm", "gae_lambda"}
    given = critic | {"gamma", "kl_coef", "critic_model_name_or_path", "critic_zero_stage"}
    expected = set() if name == "ppo" else critic
    expected |= {"gamma"} if name in ("grpo", "dr_grpo", "rloo", "distill") else set()
    expected |= {"kl_coef"} if name == "distill" else set()
    assert unused_flags(ALGORITHMS[name], given) == sorted(expected)
    # The critic's model scores, unless --reward says what does.
    both = {"critic_model_name_or_path", "reward"}
    assert unused_flags(ALGORITHMS[name], both) == ([] if name == "ppo" else ["critic_model_name_or_path"])


def test_no_algorithm_imports_an_engine():
    """A1, A4: an algorithm is a function of a page, over tensors."""
    tree = ast.parse(Path(sys.modules[ALGORITHMS["ppo"].add_advantages.__module__].__file__).read_text())
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    engines = ("deepspeed", "common.engine", "common.generation", "step3_ppo.ro", "step3_ppo.ppo_losses")
    assert [n for n in names if n.startswith(engines)] == ["step3_ppo.rollout_batch"]
