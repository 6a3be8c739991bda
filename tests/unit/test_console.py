"""The console of a run: the time left by hand, headings, widths, tables."""

import pytest

from common.flags.value_forms import Interval
from common.runs import console
from common.runs.console import StepTable, TimeLeft, format_number


@pytest.fixture
def clock(monkeypatch):
    """A clock that the tests move."""
    clock = [1000.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: clock[0])
    return clock


def at_steps(clock, left, first, last, **costs):
    """Add steps that have all the same costs, of ten seconds each beside the events between them."""
    for step in range(first, last + 1):
        clock[0] += 10.0 + sum(costs.values())
        left.add(step, {f"perf/{name}_seconds": seconds for name, seconds in costs.items()})


def test_neither_the_start_nor_the_first_step_counts(clock):
    left = TimeLeft(100)
    clock[0] += 500.0  # loading, and a reference
    left.add(1, {"perf/step_seconds": 60.0})
    assert left.seconds() == 99 * 60.0, "the only one that is known"
    at_steps(clock, left, 2, 2)
    assert left.seconds() == 98 * 10.0
    clock[0] += 40.0
    at_steps(clock, left, 3, 3)
    assert left.seconds() == 97 * 30.0, "10 and 50"
    at_steps(clock, left, 4, 100)
    assert left.seconds() == 0.0


def test_a_run_that_slows_down_and_one_that_skips_steps(clock):
    left = TimeLeft(1000)
    at_steps(clock, left, 1, 300)
    for step in range(302, 402, 2):  # every other one is skipped, and took as long
        clock[0] += 60.0
        left.add(step, {})
    assert left.seconds() == 600 * 30.0


@pytest.mark.parametrize(
    ("interval", "has_epochs", "count"),  # of evaluations after step 5 of 100, epochs of 30 steps
    [
        ("20", False, 5),
        ("0", False, 1),
        ("0", True, 4),
        ("40", True, 6),
        ("300s", False, 1),
        ("5", False, 19),
    ],
)
def test_evaluations_to_come(clock, interval, has_epochs, count):
    left = TimeLeft(100)
    due = Interval(interval)
    left.expect("evaluate", lambda step: (has_epochs and step % 30 == 0) or due.is_due(step, 30, 0))
    left.add(1, {"perf/step_seconds": 10.0, "perf/evaluate_seconds": 70.0})
    at_steps(clock, left, 2, 5)
    assert left.seconds() == 95 * 10.0 + count * 70.0


def test_the_last_checkpoint_and_evaluation_are_the_measure(clock):
    left = TimeLeft(100)
    left.expect("save", lambda step: step % 50 == 0)
    left.expect("evaluate", lambda step: step % 3 == 0)
    at_steps(clock, left, 1, 3, evaluate=7.0)
    at_steps(clock, left, 4, 4, save=25.0, evaluate=4.0)
    at_steps(clock, left, 5, 5)
    assert left.seconds() == 95 * 10.0 + 2 * 25.0 + 33 * 4.0


# ---- lines


PPO = ("objective/score", "objective/kl", "rollout/response_tokens", "policy/loss")
PPO += ("policy/clip_fraction", "value/loss", "perf/generate_tokens_per_second")


def lines_of(table, num_steps, metrics, first=1):
    """The lines of steps, counted as a logger counts them."""
    lines = []
    for step in range(first, num_steps + 1):
        new = table.step_lines(step, metrics, 3723.4).splitlines()
        table.num_lines += len(new)
        lines += new
    return lines


def test_heading_is_repeated_and_columns_stand_below_it():
    lines = lines_of(StepTable(PPO, 50), 50, dict.fromkeys(PPO, -1.23456e-7))
    is_heading = [line.split()[0] == "step" for line in lines]
    assert [index for index, value in enumerate(is_heading) if value] == [0, 21, 42]
    assert len({len(line) for line in lines}) == 1 and len(lines[0]) <= 110
    names = ["step", "score", "kl", "response_tokens", "policy_loss", "clip_fraction", "value_loss"]
    assert lines[0].split() == [*names, "sampled/s", "left"]
    assert lines[1].split() == ["1/50", *["-1.23e-07"] * 7, "1:02:03"]


def test_a_metric_that_comes_later_gets_a_new_heading_and_one_that_is_absent_a_dash():
    table = StepTable(("kto/loss", "kto/kl", "perf/tokens_per_second"), 9)
    first = lines_of(table, 1, {"kto/loss": 1.0})
    second = lines_of(table, 2, {"kto/loss": 1.0, "kto/kl": 2.0}, first=2)
    third = lines_of(table, 3, {"kto/loss": 1.0}, first=3)
    assert [len(lines) for lines in (first, second, third)] == [2, 2, 1]
    assert second[0].split() == ["step", "loss", "kl", "left"]
    assert third[0].split() == ["3/9", "1", "-", "1:02:03"]
    line = table.step_lines(4, {"kto/loss": 1.0, "perf/tokens_per_second": 12345.6}, 0)
    assert line.splitlines()[0].split()[-2] == "tokens/s" and "12,346" in line


def test_a_terminal_of_few_rows(monkeypatch):
    monkeypatch.setattr(console.BAR.live, "_started", True)
    monkeypatch.setattr(console.SCREEN, "_height", 13)
    table = StepTable(PPO, 30)
    lines = lines_of(table, 15, dict.fromkeys(PPO, 1.0))
    table.num_lines += 6  # of a table
    lines += lines_of(table, 30, dict.fromkeys(PPO, 1.0), first=16)
    assert [index for index, line in enumerate(lines) if "left" in line] == [0, 11, 17, 28]


def test_an_evaluation_is_a_table_with_changes():
    table = StepTable(("sft/loss",), 30)
    first = table.event(0, {"sft/eval_loss": 6.25, "eval/score_[b]": 3e-9}).splitlines()
    second = table.event(10, {"sft/eval_loss": 4.5, "eval/new": 12345.0}).splitlines()
    assert [line.split() for line in first] == [
        ["after", "step", "0/30", "value", "change"],
        ["sft/eval_loss", "6.25"],
        ["eval/score_[b]", "3e-09"],
    ]
    assert [line.split() for line in second] == [
        ["after", "step", "10/30", "value", "change"],
        ["sft/eval_loss", "4.5", "-1.75"],
        ["eval/new", "12,345"],
    ]
    assert max(map(len, first + second)) <= 110 and "\x1b" not in "".join(first + second)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0"), (0.693147, "0.6931"), (-1.83456e-8, "-1.83e-08"), (22466.2, "22,466")]
    + [(float("inf"), "inf"), (float("nan"), "nan"), (1.5e9, "1.5e+09"), (-999999.9, "-1,000,000")],
)
def test_numbers_have_few_characters(value, text):
    assert format_number(value) == text
