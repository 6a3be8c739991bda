"""--reward_on_error: answers that a reward gives no score; rewards that are asked beside the other roles."""

import dataclasses
import math
import threading
from itertools import cycle
from types import SimpleNamespace

import pytest
import torch
from rollout_batches import make_rollout_batch

from common.ranks import passes
from common.ranks.failures import StepSkipped
from step3_ppo.algorithms import ALGORITHMS
from step3_ppo.arguments import PPOArguments
from step3_ppo.evaluation import compare, gather_results, measure
from step3_ppo.metrics import summarise_scores
from step3_ppo.ppo_losses import PPOLosses
from step3_ppo.ppo_math import KLController, constant_groups
from step3_ppo.ppo_trainer import PPOTrainer
from step3_ppo.rewards.reward_specs import RewardSpec
from step3_ppo.rewards.scorer import PREFIX, Scorer
from step3_ppo.rewards.text_rewards import TextReward, checked_scores

# ---- the sum -----------------------------------------------------------------------------------------------


def scores_of(on_error, *, texts, model=None, weights=(1.0, 1.0)):
    """Return (Scorer, the batch with what it gave) of four responses; `texts` are a function's scores."""
    specs = [
        RewardSpec("function", "m:f", weights[0], "function_f"),
        RewardSpec("model", "x", weights[1], "model"),
    ]
    reward = FakeReward(lambda answers: texts, on_error)
    scores = Scorer(specs, {"function_f": reward}, lambda ids: "", on_error=on_error, default_score=-3.0)
    batch = make_rollout_batch([0, 1, 2, 3], [2] * 4, [3, 1, 2, 4], num_samples=2)
    given = torch.tensor(model or [0.5] * 4)
    models = {"model": SimpleNamespace(score=lambda batchs: [given])}
    of_names = scores.start([batch], {n: ("", {}) for n in (0, 1)}).wait(models)
    for name, found in of_names.items():
        batch = batch.with_numbers(name, found[0])
    return scores, batch


@pytest.mark.parametrize(
    ("on_error", "total", "counts"),
    [("default", [1.5, -2.5, 2.5, -2.5], [True] * 4), ("mask", [1.5, 0.5, 2.5, 0.5], [True, False] * 2)],
)
def test_an_answer_without_a_score_has_the_default_or_does_not_count(on_error, total, counts):
    scores, batch = scores_of(on_error, texts=[1.0, None, 2.0, math.nan])
    assert batch.numbers("scores").tolist() == total and scores.counts(batch).tolist() == counts
    assert "gave 'None' for response 2 of 4" in scores.first_failure
    found = summarise_scores(batch, scores)
    assert {k: v for k, v in found.items() if "failed" in k} == {
        "objective/failed_fraction": 0.5, "objective/failed_fraction_function_f": 0.5,
        "objective/failed_fraction_model": 0.0,
    }  # fmt: skip
    assert found["objective/score_function_f"] == 1.5 and found["objective/score_model"] == 0.5


def test_a_models_nan_is_a_failure_and_one_of_a_reward_without_weight_masks_nobody():
    texts = [None, 1.0, 1.0, 1.0]
    scores, batch = scores_of("mask", texts=texts, model=[0.0, 0.0, math.inf, 0.0], weights=(0.0, 1.0))
    assert scores.counts(batch).tolist() == [True, True, False, True]
    assert batch.numbers("scores").isfinite().all()
    assert summarise_scores(batch, scores)["objective/failed_fraction"] == 0.5
    assert scores_of("mask", texts=[1.0] * 4, model=[0.0, 0.0, math.inf, 0.0])[0].first_failure == (
        "reward model returned NaN or infinity"
    )
    with pytest.raises(StepSkipped, match="function_f, for a batch of 4 .*gave 'None'"):
        scores_of("refuse", texts=texts)


def test_a_failure_of_another_rank_is_told_where_there_is_none_of_this_one(monkeypatch):
    def gather(own, group=None):
        return ["", own, "one of the third rank"] if isinstance(own, str) else [own]

    monkeypatch.setattr("common.ranks.distributed.gather_objects", gather)
    assert scores_of("mask", texts=[1.0] * 4)[0].first_failure == "one of the third rank"
    assert "gave 'None'" in scores_of("mask", texts=[None] * 4)[0].first_failure


def test_held_out_answers_without_a_score_are_in_no_mean_and_tie():
    scores, batch = scores_of("mask", texts=[1.0, None, 2.0, math.nan], weights=(1.0, 0.0))
    shown = torch.where(scores.counts(batch), batch.numbers("scores"), math.nan)
    results = gather_results(batch, shown)
    assert results["scores"] == [1.0, None, 2.0, None]
    before = {"scores": [0.0, 5.0, None, None], "answers": ["another"] * 4}
    assert compare(results, before)["eval/win_rate"] == (1 + 0.5 + 0.5 + 0.5) / 4
    kept = batch.select(scores.counts(batch).nonzero()[:, 0])
    assert measure(kept, [])["eval/score"] == 1.5
    assert measure(batch, [])["eval/score_function_f"] == 1.5


# ---- masked answers count nowhere --------------------------------------------------------------------------


def learned(name, batch, on_error, **flags):
    """Return (the batch with what the losses read, the numbers) of a PPO step without engines."""
    algorithm = ALGORITHMS[name]
    flags = {
        "algorithm": name,
        "kl_in": algorithm.kl_in,
        "kl_estimator": "k1",
        "adv_norm": "batch",
        "clip_range": 0.2,
    } | flags
    args = dataclasses.replace(PPOArguments(), whiten_scores="batch", value_norm="exp", **flags)
    specs = [RewardSpec("function", "m:f", 1.0, "function_f")]
    scores = Scorer(specs, on_error=on_error)
    rollout = SimpleNamespace(scores=scores, recomputes=False, roles=None)
    losses = PPOLosses(args, None, KLController(args.kl_coef), None)
    trainer = PPOTrainer(algorithm, rollout, losses, None, SimpleNamespace(log_interval=100))
    done = trainer.add_advantages(1, batch)
    state = {name: getattr(trainer.value_normaliser, name, 0.0) for name in ("weight", "mean", "variance")}
    summary = {name: value for name, value in done.summary.items() if "failed" not in name}
    return done.batch, summary | {k: float(v) for k, v in state.items()}


@pytest.mark.parametrize(
    ("name", "aggregation"), [("ppo", "constant"), *zip(ALGORITHMS, cycle(("sequence", "constant")))]
)
def test_a_step_with_masked_answers_is_a_step_without_them(name, aggregation):
    """Whatever the algorithm: no baseline, whitening, mean or normaliser sees what is masked."""
    batch = make_rollout_batch(range(9), [2] * 9, [3, 1, 2, 4, 5, 2, 3, 1, 4], num_samples=3)
    is_scored = torch.tensor([True, False, True, True, True, True, False, False, True])
    given = torch.where(is_scored, batch.numbers("scores"), torch.nan)
    masked = batch.with_numbers("scores", torch.where(is_scored, batch.numbers("scores"), 1e6))
    masked = masked.select([4, 0, 1, 2, 3, 5, 6, 7, 8]).with_numbers(
        PREFIX + "function_f", given[[4, 0, 1, 2, 3, 5, 6, 7, 8]]
    )
    kept = [i for i, sample in enumerate(masked.ids) if is_scored[sample]]
    found, numbers = learned(name, masked, "mask", loss_aggregation=aggregation)
    expected, expected_numbers = learned(name, masked.select(kept), "refuse", loss_aggregation=aggregation)
    assert found.ids == masked.ids and numbers == expected_numbers
    among_kept = found.select(kept)
    assert set(found.data) == set(expected.data)
    for key, value in expected.data.items():
        torch.testing.assert_close(among_kept.data[key], value, rtol=0, atol=0, equal_nan=True, msg=key)
    others = found.select([i for i in range(9) if i not in kept])
    assert others.numbers("scores").isnan().all() and not others.data["loss_mask"].any()
    assert not others.data["loss_weights"].any() and not others.data["loss_counts"].any()


def test_dynamic_sampling_looks_at_scored_answers_alone():
    groups, scores = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]), torch.tensor([1.0, 9, 1, 2, 3, 3, 5, 6])
    is_scored = torch.tensor([True, False, True, True, True, True, False, False])
    found = constant_groups(scores, groups, is_scored)
    assert found.tolist() == [True, True, False, False, True, True, True, True]


# ---- beside the other roles --------------------------------------------------------------------------------


class FakeReward(TextReward):
    """Gives the scores of a function of Answers."""

    def __init__(self, score, on_error="refuse") -> None:
        super().__init__("function_f", PPOArguments(reward_on_error=on_error))
        self.give = score

    def ask(self, batch):
        return checked_scores(self.give(batch), batch)


def asked_of(function):
    """Return (Scorer, batches, texts) of a function of Answers."""
    specs = [RewardSpec("function", "m:f", 1.0, "function_f")]
    scores = Scorer(specs, {"function_f": FakeReward(function)}, lambda ids: "")
    return scores, [make_rollout_batch([0, 1], [2, 2], [3, 1])], {0: ("", {}), 1: ("", {})}


def test_a_reward_is_asked_while_the_other_roles_score():
    """Each waits for the other to have begun: in a row, none would."""
    asked, scoring = threading.Event(), threading.Event()

    def slow(answers):
        asked.set()
        assert scoring.wait(30)
        return [1.0, 2.0]

    scores, batches, texts = asked_of(slow)
    pending = scores.start(batches, texts)
    assert asked.wait(30)
    scoring.set()
    assert pending.wait({})["scores"][0].tolist() == [1.0, 2.0]


def test_a_reward_is_asked_by_one_step_at_a_time():
    """A step that another role refused leaves its question open, and the next one waits for its end."""
    running, most, may_end = [], [], threading.Event()

    def slow(answers):
        running.append(1)
        most.append(len(running))
        assert may_end.wait(30)
        running.pop()
        return [1.0, 2.0]

    scores, batches, texts = asked_of(slow)
    scores.start(batches, texts)
    threading.Timer(0.05, may_end.set).start()
    assert scores.start(batches, texts).wait({})["scores"][0].tolist() == [1.0, 2.0]
    assert most == [1, 1]


@pytest.mark.parametrize("is_own", [True, False], ids=["this rank", "another rank"])
def test_a_request_to_stop_does_not_wait_for_a_reward(is_own, monkeypatch):
    """The rank that is asked leaves its question open; another one waits for its own, and they agree."""
    may_end, pending = threading.Event(), None

    def slow(answers):
        assert may_end.wait(30)
        return [1.0, 2.0]

    scores, batches, texts = asked_of(slow)
    pending = scores.start(batches, texts)
    monkeypatch.setattr(passes, "is_asked", lambda: is_own)
    monkeypatch.setattr(passes, "must_stop", lambda: True)
    if not is_own:
        threading.Timer(0.3, may_end.set).start()
    with pytest.raises(passes.Interrupted):
        pending.wait({})
    assert may_end.is_set() != is_own
    may_end.set()


def test_a_request_to_stop_does_not_wait_for_a_judge(monkeypatch):
    may_end = threading.Event()
    judge = SimpleNamespace(prefer=lambda *_: may_end.wait(30) and [0.5], costs={})
    scores, *_ = asked_of(lambda answers: [])
    monkeypatch.setattr(Scorer, "judges", {"judge_m": judge})
    monkeypatch.setattr(passes, "is_asked", lambda: True)
    monkeypatch.setattr(passes, "must_stop", lambda: True)
    with pytest.raises(passes.Interrupted):
        scores.compare(["p"], ["a"], ["b"])
    may_end.set()
    monkeypatch.setattr(passes, "is_asked", bool)
    monkeypatch.setattr(passes, "must_stop", bool)
    monkeypatch.setattr(scores, "gather_costs", lambda: None)
    assert scores.compare(["p"], ["a"], ["b"]) == {"judge_m": [0.5]}
