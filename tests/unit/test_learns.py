"""Numbers and verdicts of tools.doctor --learns, by hand; tests/programs/test_doctor_learns.py runs it."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from common.data.packed_batch import PackedBatch
from step3_ppo.rewards.scorer import Scorer
from step3_ppo.rewards.text_rewards import Answers
from tools import learns, learns_ppo
from tools.doctor import NOTE, OK, PROBLEM, main


def engine(*rates: float) -> SimpleNamespace:
    groups = [{"lr": rate} for rate in rates]
    scheduler = SimpleNamespace(base_lrs=[*rates])
    return SimpleNamespace(lr_scheduler=scheduler, optimizer=SimpleNamespace(param_groups=groups))


def test_rates_rise_tenfold_until_a_value_is_fitted():
    made = engine(0.5, 0.0)
    rates = []

    def take_step() -> float:
        rates.append(made.optimizer.param_groups[0]["lr"])
        return float(len(rates))

    done = learns.fit([made], take_step, lambda value: value == 5, 2)
    assert done == learns.Fit([1, 2, 3, 4, 5], 100, is_fitted=True, is_late=False)
    assert rates == [0.5, 0.5, 5.0, 5.0, 50.0]
    assert made.lr_scheduler.base_lrs == [50.0, 0.0] and made.optimizer.param_groups[1]["lr"] == 0
    assert learns.fit([engine(1.0)], take_step, lambda value: value == 6, 2).values == [6.0]
    done = learns.fit([engine(1.0)], take_step, lambda value: False, 2)
    assert done == learns.Fit([7, 8, 9, 10, 11, 12], 100, is_fitted=False, is_late=False)


def test_steps_have_shares_of_a_time_and_a_late_check_decides_nothing(monkeypatch):
    clock = itertools.count(step=1.0)  # a second passes at each look
    monkeypatch.setattr(learns.time, "monotonic", lambda: float(next(clock)))
    assert list(learns.within(3.0, range(9))) == [0, 1, 2, 3]
    assert list(learns.within(0.0, range(9))) == [0]
    done = learns.fit([engine(1.0)], lambda: 2.0, lambda value: False, 9, 8.0)
    assert done == learns.Fit([2.0] * (3 + 3 + 5), 100, is_fitted=False, is_late=True)
    state, _, text = done.judge("name", "text", "raise it", has_moved=True)
    assert state == NOTE and text.startswith(
        "text after 11 updates at up to 100 times the learning rates; und"
    )
    state, _, text = done.judge("name", "text", "raise it", role="actor_", has_moved=False)
    assert state == PROBLEM and "no weight moves: --actor_learning_rate, --actor_lora_learning" in text


def test_a_rise_is_counted_in_standard_errors():
    first = torch.tensor([1.0, 2.0, 3.0])  # variances 1 and 4, of means 1/3 and 4/3
    assert learns_ppo.rise_of(first, torch.tensor([4.0, 6.0, 8.0])) == pytest.approx(4 / (5 / 3) ** 0.5)
    assert learns_ppo.rise_of(first, first - 1) == pytest.approx(-1 / (2 / 3) ** 0.5)
    assert learns_ppo.rise_of(torch.ones(3), torch.ones(3)) == 0.0


def test_a_length_is_scored_in_deviations_of_the_first_ones():
    reward = learns_ppo.LengthReward("length", SimpleNamespace(reward_on_error="refuse"))
    answers = Answers(["", ""], ["a", "abc"], [{}, {}])
    assert reward.score(answers) == [-1.0, 1.0]  # mean 2, deviation 1
    assert reward.score(Answers([""], ["abcde"], [{}])) == [3.0]


@pytest.mark.parametrize(
    ("losses", "state", "text"),
    [
        ([2.0, 0.05], OK, "loss 2.000 -> 0.050 (should be below 0.1) after 2 updates at up to 1 times"),
        ([2.0] + [0.9] * 59, NOTE, "after 60 updates at up to 100 times"),
        ([2.0] + [1.5] * 59, PROBLEM, "raise --learning_rate"),
        ([2.0] * 60, PROBLEM, "no weight moves"),
    ],
)
def test_verdicts_of_a_batch(losses, state, text):
    values = iter(losses)
    trainer = SimpleNamespace(kind="sft", engine=engine(1.0), logger=SimpleNamespace(last={}))
    trainer.train_step = lambda step, batches: trainer.logger.last.update({"sft/loss": next(values)})
    line = learns.fit_rows(trainer, PackedBatch((), {}, {}), 0.1)
    assert line[:2] == (state, "overfits one batch") and text in line[2]


@pytest.mark.parametrize(
    ("scores", "responses", "state", "text"),
    [
        ([0.0, 1.0, 1.0, 1.5], [1, 2, 3, 4], OK, "2 of 2 groups"),
        ([0.0, 1.0, 1.0, 1.0], [1, 2, 3, 4], NOTE, "1 of 2 groups"),
        ([1.0, 1.0, 2.0, 2.0], [1, 2, 3, 4], PROBLEM, "different responses have the same score, 1"),
        ([1.0, 1.0, 2.0, 2.0], [1, 1, 1, 1], PROBLEM, "--temperature"),
    ],
)
def test_verdicts_of_groups(scores, responses, state, text):
    batch = PackedBatch.build([*range(4)], {"response_ids": [torch.tensor([token]) for token in responses]})
    batch = batch.with_numbers("scores", torch.tensor(scores))
    batch = batch.with_numbers("group_ids", torch.tensor([0, 0, 1, 1]))
    line = learns_ppo.check_groups(batch, Scorer([]))
    assert line[0] == state and text in line[2]


def test_the_context_of_a_row_ends_before_its_last_learned_run():
    row = {"input_ids": [5, 6, 7, 8, 9, 10], "loss_mask": [False, True, False, True, True, False]}
    assert learns.context_of(row) == [5, 6, 7]


@pytest.mark.parametrize(("longer", "state", "text"), [(2, OK, "in 0.50 of 4"), (4, NOTE, "in 1.00 of 4")])
def test_the_share_of_longer_chosen_responses(longer, state, text):
    rows = [
        {"chosen_ids": [0] * (4 + is_longer), "rejected_ids": [0] * (5 - is_longer)}
        | dict.fromkeys(("chosen_response_start", "rejected_response_start"), 2)
        for is_longer in [True] * longer + [False] * (4 - longer)
    ]
    line = learns.check_lengths(rows)
    assert line[0] == state and text in line[2]


def test_an_error_ends_the_checks_as_a_problem(capsys):
    def check_step():
        yield OK, "first", "good"
        raise RuntimeError("no memory")

    assert main([check_step], "well") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["ok", "first", "good"]
    assert lines[1].split(maxsplit=2) == ["problem", "check_step", "RuntimeError: no memory"]
    assert lines[-1] == "1 problems"
    assert main([lambda: []], "well") == 0 and capsys.readouterr().out.splitlines()[-1] == "ok: well"
