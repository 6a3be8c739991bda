"""The loop of step 3 without engines: what it makes of rollout batches, when roles say what they are told."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from right_or_wrong import close
from rollout_batches import make_batch, make_rollout_batch

from common.ranks.failures import StepSkipped
from step3_ppo.algorithms import ALGORITHMS, fill_defaults
from step3_ppo.arguments import PPOArguments
from step3_ppo.hooks import HOOKS, register_hook
from step3_ppo.policy_losses import build_policy_loss
from step3_ppo.ppo_losses import PPOLosses
from step3_ppo.ppo_math import KLController
from step3_ppo.ppo_trainer import PPOTrainer
from step3_ppo.rewards.scorer import Scorer
from step3_ppo.roles import has_text_steps
from step3_ppo.rollout_batch import TokenCap
from step3_ppo.trainer_state import NUM_TOKENS, OpenStep, ValueNormaliser

ENGINE = SimpleNamespace(received_bytes=0)


def test_the_schedules_are_as_long_as_the_optimizer_steps():
    args = PPOArguments(
        per_device_generation_batch_size=8, generation_batches=2, num_samples_per_prompt=3,  # 48 samples
        per_device_training_batch_size=4, gradient_accumulation_steps=2,  # 6 updates an epoch
        ppo_epochs=3,
    )  # fmt: skip
    assert args.updates_per_step == 3 * 6


def make_trainer(args, algorithm, rollout, logger=None) -> PPOTrainer:
    """A trainer without prompts."""
    kl = KLController(args.kl_coef, args.kl_target, args.kl_horizon)
    losses = PPOLosses(args, rollout.roles, kl, build_policy_loss(args))
    return PPOTrainer(algorithm, rollout, losses, SimpleNamespace(num_steps=0), logger)


def run_without_checkpoints() -> SimpleNamespace:
    """A run that saves nothing and is not stopped."""
    return SimpleNamespace(num_updates=0, checkpoint_if_due=lambda *_: None, stoppable=nullcontext)


def open_trainer(**flags):
    """A trainer with one step open, of two minibatches, and the list of what its losses are asked for."""
    args, algorithm, rollout, asked = PPOArguments(**flags), ALGORITHMS["ppo"], KnowingCritic(), []
    rollout.max_gap = 1e-3
    trainer = make_trainer(fill_defaults(args, algorithm), algorithm, rollout)
    trainer.open_step = OpenStep(1, None, {})

    def minibatches(current):
        for current.num_minibatches in (1, 2):
            yield [f"minibatch {current.num_minibatches}"]

    def update(what, max_gap=None):
        asked.append((*what, max_gap))
        if fails and what[0] in fails:
            raise StepSkipped("no")
        return {"policy/approx_kl": 0.0} if max_gap else {"policy/unsup_loss": 1.0}

    fails = []
    trainer.minibatches, trainer.finish_step = minibatches, lambda current: dict(current.means)
    trainer.losses = SimpleNamespace(update=update, update_on_text=lambda: update(["text"]))
    run = SimpleNamespace(
        num_updates=0, checkpoint_if_due=lambda *_: None, record_bad_step=lambda *_: asked.append("refused")
    )
    return trainer, run, asked, fails


def test_a_gap_is_looked_at_until_the_policy_has_moved():
    trainer, run, asked, fails = open_trainer()
    fails.append("minibatch 1")
    trainer.train_step(1, run)
    assert asked == [("minibatch 1", 1e-3), "refused", ("minibatch 2", 1e-3)]
    trainer, run, asked, _ = open_trainer()
    trainer.train_step(1, run)
    assert asked == [("minibatch 1", 1e-3), ("minibatch 2", math.inf)]


def test_a_step_on_text_follows_each_step_that_was_made():
    """A restart behind a refused step must make the same ones."""
    text = {"unsupervised_dataset_name": "x", "unsup_step": "own"}
    trainer, run, asked, fails = open_trainer(**text)
    averaged = []
    trainer.ema = SimpleNamespace(update=lambda: averaged.append(len(asked)))
    assert trainer.train_step(1, run) == {"policy/approx_kl": [0.0] * 2, "policy/unsup_loss": [1.0] * 2}
    assert [one[0] for one in asked] == ["minibatch 1", "text", "minibatch 2", "text"]
    assert averaged == [1, 2, 3, 4], "the average moves with each of them"
    assert run.num_updates == 2, "of minibatches"
    trainer, run, asked, fails = open_trainer(**text)
    fails += ["minibatch 1", "text"]
    means = trainer.train_step(1, run)
    assert [one if one == "refused" else one[0] for one in asked] == [
        "minibatch 1", "refused", "minibatch 2", "text", "refused",
    ]  # fmt: skip
    assert means == {"policy/approx_kl": [0.0]}, "what was made before counts"
    assert [has_text_steps(PPOArguments(**text | {name: value})) for name, value in (
        ("unsup_step", "own"), ("unsup_step", "joint"), ("unsupervised_dataset_name", "")
    )] == [True, False, False]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "num_made", "loss", "approx_kl"),
    [
        ({}, 5, (1 + 2 + 6 + 7 + 9) / 5, (0.125 * 1 + 0.25 * 6) / 16),
        ({"early_stop_kl": 0.125}, 4, (1 + 2 + 6 + 7) / 4, (0.125 * 1 + 0.25 * 6) / 14),
        ({"early_stop_imp_ratio": 1.5}, 3, (1 + 2 + 6) / 3, 0.125 * 1 / 8),
        ({"early_stop_imp_ratio": 1.5, "early_stop_kl": 0.125}, 3, 3.0, 0.125 * 1 / 8),
    ],
)
def test_a_step_ends_behind_the_first_update_beyond_a_limit(flags, num_made, loss, approx_kl, monkeypatch):
    """A limit that is met is not exceeded. A step on text follows the last update too, and begins none anew.

    Means are of the updates that were made, those over tokens by their number.
    """
    # KL, ratio, loss, tokens; the third minibatch is left out.
    updates = [(0.125, 1.0, 1, 1), (0.0, 1.5, 2, 3), (), (0.0, 1.75, 6, 4), (0.25, 1.0, 7, 6), (0, 1, 9, 2)]
    names = ["policy/approx_kl", "policy/ratio", "policy/loss", NUM_TOKENS]
    trainer, run, asked, _ = open_trainer(unsupervised_dataset_name="x", unsup_step="own", **flags)
    del trainer.minibatches, trainer.finish_step
    trainer.rollout.cap, trainer.logger = None, SimpleNamespace(log=lambda *_: None)
    trainer._write_responses = lambda *_: None
    trainer.open_step = OpenStep(1, make_rollout_batch([0], [2], [3]), {"objective/kl": 0.0})
    monkeypatch.setattr("step3_ppo.ppo_trainer.cut_minibatches", lambda *_, first: iter(updates[first:]))

    def update(what, max_gap):
        asked.append("update")
        return dict(zip(names, what, strict=True)) | {"policy/logprob_gap": what[3]} if what else {}

    text = {"policy/unsup_loss": 1.0}
    trainer.losses = SimpleNamespace(update=update, update_on_text=lambda: asked.append("text") or text)
    monkeypatch.setattr("step3_ppo.ppo_trainer.run_hooks", lambda point, trainer, what: what)
    numbers = trainer.train_step(1, run)
    assert asked == [*["update", "text"] * 2, "update", *["update", "text"] * (num_made - 2)]
    assert run.num_updates == num_made and numbers.get("policy/num_updates", num_made) == num_made
    assert numbers["policy/loss"] == pytest.approx(loss) and numbers["policy/logprob_gap"] == 1
    assert numbers["policy/approx_kl"] == pytest.approx(approx_kl)


class KnowingCritic:
    """Rollouts with a critic that is right: a state is worth the score, that after the last token nothing.

    Its values are in the units of the statistics at that time. Scores grow from rollout to rollout.
    """

    recomputes, max_gap, check_logprob_gap = True, math.inf, lambda self, gap: None
    scores = Scorer([])
    roles = SimpleNamespace(actor=SimpleNamespace(hybrid_engine=ENGINE))

    normaliser: ValueNormaliser
    num_rollouts = 0

    def collect(self, prompts, version):
        """Three responses, of which the last was cut."""
        self.num_rollouts += 1
        batch, says = make_rollout_batch([0, 1, 2], [2, 1, 1], [3, 1, 6]), self.normaliser.normalise
        scores = torch.tensor([1.0, 2.0, 4.0]) * 3**self.num_rollouts
        values = scores.repeat_interleave(batch.lengths["response_ids"])
        versions = torch.full((10,), version)  # of the policy that gave each token
        batch = batch.with_key("versions", versions, like="response_ids")
        batch = batch.with_numbers("scores", scores).with_numbers("next_values", says(torch.zeros(3)))
        return batch.with_key("old_values", says(values), like="response_ids")


@pytest.mark.parametrize(("kind", "staleness"), [("exp", 0), ("ma", 1), ("exp", 2)])
def test_a_critic_that_is_right_leaves_no_advantage_while_statistics_move(kind, staleness):
    args = PPOArguments(
        value_norm=kind, adv_norm="none", kl_coef=0.0, gamma=1.0, reward_clip=0.0, truncated="bootstrap",
        rollout_staleness=staleness,
    )  # fmt: skip
    learned, algorithm, rollout = [], ALGORITHMS["ppo"], KnowingCritic()
    logger, run = SimpleNamespace(log=lambda *_: None), run_without_checkpoints()
    trainer = make_trainer(fill_defaults(args, algorithm), algorithm, rollout, logger)
    rollout.normaliser = normaliser = trainer.value_normaliser
    normaliser.beta = 0.5
    trainer.minibatches = lambda current: learned.append(current.batch) or ()
    trainer._write_responses = lambda *_: None
    for step in range(1, 5):
        worth = (torch.tensor([1.0, 2.0, 4.0]) * 3**step).repeat_interleave(torch.tensor([3, 1, 6]))
        critic_says = normaliser.normalise(worth)
        metrics, learned_from = trainer.train_step(step, run), learned[-1].data
        assert learned_from["advantages"].abs().max() < 1e-3, step  # of scores up to 324
        assert metrics["value/explained_variance"] == pytest.approx(1.0)
        # A27: the flag bounds the age of what is learned from; the first steps have younger rollouts.
        assert metrics.get("rollout/staleness", 0) == min(step - 1, staleness)
        gaps = (learned_from["old_logprobs"] - learned_from["rollout_logprobs"]).abs()
        assert metrics["policy/logprob_gap"] == pytest.approx(float(gaps.sum()) / 10)  # tokens
        # The losses compare what the critic says before its update with returns that it is to learn.
        assert torch.allclose(learned_from["old_values"], critic_says, atol=1e-4)
        assert torch.allclose(normaliser.denormalise(learned_from["returns"]), worth, rtol=1e-5)


NOTE = "note: 67% of the first scores are beyond --reward_clip 5: PPO sees 5 or -5 "


@pytest.mark.parametrize(
    ("flags", "shares", "notes"),
    [
        ({}, [2 / 3, 1.0, 1.0], [NOTE]),
        ({"whiten_scores": "batch"}, [None] * 3, []),
        ({"reward_clip": 0.0}, [None] * 3, []),
    ],
)
def test_scores_beyond_the_clip_are_counted_and_noted_at_first(flags, shares, notes):
    """Of 3, 6, 12, then 9, 18, 36, then 27, 54, 108."""
    printed, algorithm = [], ALGORITHMS["reinforce++"]
    logger = SimpleNamespace(log=lambda *_: None, note=printed.append)
    trainer = make_trainer(
        fill_defaults(PPOArguments(**flags), algorithm), algorithm, KnowingCritic(), logger
    )
    trainer.rollout.normaliser = ValueNormaliser("ma", 0.5)
    trainer.minibatches, trainer._write_responses = lambda current: (), lambda *_: None
    run = run_without_checkpoints()
    logged = [trainer.train_step(step, run).get("objective/clipped_fraction") for step in (1, 2, 3)]
    assert logged == pytest.approx(shares)
    assert [text[: len(note)] for text, note in zip(printed, notes, strict=True)] == notes


def test_returns_that_do_not_count_move_no_statistics():
    trainer, *_ = open_trainer(value_norm="ma")
    batch = make_batch([2, 1], returns=torch.tensor([[1.0, 3.0], [100.0, 0.0]]), old_values=torch.ones(2, 2))
    batch = batch.with_key("loss_mask", torch.tensor([True, True, False]), like="response_ids")
    found = trainer._normalise_values(batch).data
    assert (trainer.value_normaliser.mean, trainer.value_normaliser.variance) == (2.0, 1.0)
    assert found["returns"].tolist() == [-1.0, 1.0, 98.0]
    assert found["old_values"].tolist() == [1.0] * 3, "in the units of the critic before its update"


def test_hooks_run_before_and_after_each_phase(monkeypatch):
    """R37: in the order of the phases, each with what the phase begins or ends with, which it may change."""
    seen, learned, minibatches = [], [], [["first"], ["second"], ["left out"]]
    monkeypatch.setattr("step3_ppo.hooks.HOOKS", {point: [] for point in HOOKS})
    for point in HOOKS:
        register_hook(point)(lambda trainer, batch, point=point: seen.append((point, batch)))

    @register_hook("after_rollout")
    def double(trainer, batch):
        return batch.with_numbers("scores", 2 * batch.numbers("scores"))

    @register_hook("before_advantages")
    def raise_scores(trainer, batch):
        return batch.with_numbers("scores", 1 + batch.numbers("scores"))

    @register_hook("after_advantages")
    def mark_batch(trainer, batch):
        return batch.with_numbers("marks", batch.numbers("scores"))

    @register_hook("before_update")
    def mark(trainer, micro_batches):
        return [*micro_batches, "marked"]

    with pytest.raises(ValueError, match="there is no hook 'after_rolout'; choose from before_step"):
        register_hook("after_rolout")
    algorithm, rollout = ALGORITHMS["ppo"], KnowingCritic()
    rollout.normaliser = ValueNormaliser("exp")
    logger = SimpleNamespace(log=lambda *_: None)
    run = run_without_checkpoints()
    args = fill_defaults(PPOArguments(reward_clip=0.0, kl_coef=0.0), algorithm)
    trainer = make_trainer(args, algorithm, rollout, logger)
    trainer.minibatches = lambda current: learned.append(current.batch) or list(minibatches)

    def update(current, make_step, micro_batches, *_):
        seen.append(("update", micro_batches))
        return micro_batches != ["left out", "marked"]

    trainer.update = update
    trainer._write_responses = lambda *_: None
    numbers = trainer.train_step(1, run)
    update = ["before_update", "update", "after_update"]
    begin = ["before_step", "before_rollout", "after_rollout", "before_advantages", "after_advantages"]
    assert [point for point, _ in seen] == [*begin, *update, *update, *update[:2], "after_step"]
    of_point = dict(seen)
    assert of_point["before_rollout"] is None and of_point["after_update"] == ["second", "marked"]
    assert of_point["before_update"] == ["left out"]
    assert of_point["update"] == ["left out", "marked"], "what a hook returns is used"
    assert numbers["objective/score"] == pytest.approx(1 + 2 * 7.0)  # of 3, 6 and 12
    assert run.num_updates == 2, "what is left out is no update"
    assert "marks" in learned[0].data and of_point["after_step"] is learned[0]
    assert "advantages" in of_point["after_advantages"].data and of_point["after_step"] is not None


@pytest.mark.parametrize(
    ("sampled_at", "recomputes", "is_spared"),
    [(4, True, True), (4, False, False), (3, True, False), (5, True, None)],
    ids=["current", "of the sampler", "stale", "of the future"],
)
def test_the_pass_for_prox_is_spared_where_versions_are_equal(sampled_at, recomputes, is_spared):
    """A15, R39: step 5 begins with the policy of 4 steps; a ratio to one of 5 is refused."""
    batch = make_rollout_batch([2, 0, 1], [2, 1, 1], [3, 1, 6])
    batch = batch.with_key("versions", torch.full((10,), sampled_at), like="response_ids")
    mask = torch.arange(10) != 8
    batch = batch.with_key("loss_mask", mask, like="response_ids")
    algorithm, passes = ALGORITHMS["reinforce++"], []

    def score(parts):
        passes.append(parts)
        return [part.data["rollout_logprobs"] + 0.25 for part in parts]

    actor = SimpleNamespace(score=score, hybrid_engine=ENGINE)
    rollout = SimpleNamespace(
        roles=SimpleNamespace(actor=actor), scores=Scorer([]), recomputes=recomputes, score_cap=TokenCap(8)
    )
    lengths = {"loss_aggregation": "constant", "max_answer_seq_len": 40, "max_prompt_seq_len": 9}
    args = fill_defaults(PPOArguments(rollout_correction="tis", correction_high=1.2, **lengths), algorithm)
    trainer = make_trainer(args, algorithm, rollout)
    if is_spared is None:
        with pytest.raises(AssertionError, match="step 5 has tokens of a policy that has taken 5 steps"):
            trainer.add_advantages(5, batch)
        return
    args.prox_logprobs = "loglinear"
    share = trainer.add_advantages(5, batch).batch.data["prox_share"]
    assert not passes and share.tolist() == [(4 - sampled_at) / (5 - sampled_at)] * 10
    args.prox_logprobs = "pass"
    found, numbers = trainer.add_advantages(5, batch).batch, trainer.add_advantages(5, batch).summary
    assert found.ids == batch.ids and bool(passes) != is_spared
    assert found.numbers("loss_counts").tolist() == [40.0] * 3, "as many tokens as an answer may have"
    sampled = found.data["rollout_logprobs"]
    prox = found.data["old_logprobs"] if is_spared else sampled + 0.25
    close(found.data["prox_logprobs"], prox)
    close(found.data["correction_weights"], (prox - sampled).exp().clamp(max=1.2) * mask)
    assert numbers["correction/kl"] == pytest.approx(float((sampled - prox)[mask].mean()), abs=1e-6)
    assert numbers["correction/weight_max"] == pytest.approx(float((prox - sampled)[mask].exp().max()))
    if sampled_at == 4:  # a single token that is older: the policy that sampled it is not there any more
        batch.data["versions"][9], passes[:] = 3, []
        trainer.add_advantages(5, batch)
        assert passes


def test_responses_of_all_ranks_are_written_a_share_at_a_time(monkeypatch):
    """Every second step all of them; the first two are shown at each."""
    trainer, *_ = open_trainer(save_rollouts=2)
    asked, shown, written = [], [], []
    monkeypatch.setattr("step3_ppo.ppo_trainer.gather_numbers", lambda batch: {"ids": torch.arange(5)})

    def response_rows(batch, ids, decode):
        asked.append(ids)
        return [{"row_id": sample} for sample in ids]

    monkeypatch.setattr("step3_ppo.ppo_trainer.metrics.response_rows", response_rows)
    trainer.logger = SimpleNamespace(
        sample=lambda step, row_id: shown.append(row_id),
        rollout=lambda step, rows: written.append((step, [row["row_id"] for row in rows])),
    )
    for step in (1, 2):
        trainer._write_responses(step, make_rollout_batch([0, 1], [2, 1], [1, 1]))
    assert shown == [0, 1, 0, 1] and written == [(2, [0, 1, 2, 3, 4])]
    assert asked == [[0, 1], [0, 1], [0, 1], [2, 3], [4]], "of two rows on this rank"


def test_rewards_pay_for_kl_by_the_coefficient_that_has_moved():
    trainer, *_ = open_trainer(kl_in="reward", kl_coef=0.5, kl_target=0.1)
    trainer.kl_controller.coef = 2.0
    says = {"old_logprobs": torch.full((2, 2), -1.0), "ref_logprobs": torch.full((2, 2), -1.25)}
    batch = make_batch([2, 1], old_values=torch.zeros(2, 2), next_values=torch.zeros(2), **says)
    assert trainer.add_advantages(1, batch).batch.data["rewards"].tolist() == [-0.5] * 3


@pytest.mark.parametrize(
    ("aggregation", "first", "counts"),
    [
        ("token", [0, 1, 1, 1], [2, 1, 0]),
        ("sequence", [0, 0.5, 0.5, 1], [1, 1, 0]),
        ("constant", [0, 1, 1, 1], [8] * 3),
    ],
)
def test_the_mean_of_a_loss_is_over_the_tokens_that_count(aggregation, first, counts):
    """Responses of 3, 1 and 6 tokens: the first token does not count, and the last response was cut."""
    trainer, *_ = open_trainer(truncated="mask", loss_aggregation=aggregation, max_answer_seq_len=8)
    batch = make_rollout_batch([0, 1, 2], [2, 1, 1], [3, 1, 6])
    batch = batch.with_key("loss_mask", torch.arange(10) > 0, like="response_ids")
    weighted = trainer.add_advantages(1, batch).batch
    assert weighted.data["loss_weights"].tolist() == first + [0] * 6
    assert weighted.numbers("loss_counts").tolist() == counts


def test_the_kl_controller_counts_the_samples_of_all_ranks(monkeypatch):
    """Three on this rank, of two; the step's own coefficient is logged, and the tokens a second of both."""
    algorithm, logger = ALGORITHMS["ppo"], SimpleNamespace(log=lambda *_: None)
    args = fill_defaults(PPOArguments(kl_coef=0.5, kl_target=0.1), algorithm)
    trainer = make_trainer(args, algorithm, KnowingCritic(), logger)
    trainer._write_responses = lambda *_: None
    monkeypatch.setattr("step3_ppo.ppo_trainer.distributed.world_size", lambda: 2)
    monkeypatch.setattr("step3_ppo.ppo_trainer.COSTS.end_step", lambda num_ranks: {"ranks": num_ranks})
    batch = make_rollout_batch([0, 1, 2], [2, 1, 1], [3, 1, 6])
    numbers = trainer.finish_step(OpenStep(1, batch, {"objective/kl": 0.11}))
    assert numbers["objective/kl_coef"] == 0.5 and numbers["ranks"] == 2
    assert trainer.kl_controller.coef == pytest.approx(0.5 * (1 + 0.1 * 6 / 10_000), rel=1e-9)


def test_the_weights_of_a_correction_are_those_of_all_ranks(monkeypatch):
    """Ten tokens here; four of a weight of 3, which is cut to 1.25, on the other rank."""
    algorithm = ALGORITHMS["reinforce++"]
    args = fill_defaults(PPOArguments(rollout_correction="tis", correction_high=1.25), algorithm)
    trainer = make_trainer(args, algorithm, KnowingCritic())
    batch = make_rollout_batch([2, 0, 1], [2, 1, 1], [3, 1, 6])
    batch = batch.with_key("loss_mask", torch.ones(10).bool(), like="response_ids")
    near = batch.data["rollout_logprobs"] + 0.5
    batch = batch.with_key("old_logprobs", near, like="response_ids")
    of_other_rank = torch.tensor([4 * 3, 5.0, 6.25, 4, 0, 0, 0, 0, 4])  # sums, then a histogram

    def reduce_sum(x):
        return x + of_other_rank if len(x) == 9 else x

    monkeypatch.setattr("step3_ppo.ppo_trainer.distributed.reduce_sum", reduce_sum)
    monkeypatch.setattr("step3_ppo.ppo_trainer.distributed.max_float", lambda x: max(x, 3.0))
    _, numbers = trainer._correct(batch, trainer.correction, is_current=True)
    assert numbers["correction/weight_mean"] == pytest.approx((10 * math.exp(0.5) + 12) / 14)
    assert (numbers["correction/capped_fraction"], numbers["correction/weight_max"]) == (1.0, 3.0)
    assert numbers["correction/weights_from_2"] == pytest.approx(4 / 14)
