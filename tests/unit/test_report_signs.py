"""The signs of reward hacking, what changed in a text, and the charts of a report, by numbers worked out."""

import pytest
from made_runs import Page, over_steps, write_run

from common.runs.report.page import build_page
from common.runs.report.run_files import build_curves, read_run
from common.runs.report.run_tables import as_duration
from common.runs.report.sample_cards import spread
from common.runs.report.signs import FITTING, find_signs
from common.runs.report.svg_charts import Line, choose_ticks, draw_lines, is_noisy, shown, smooth, thin
from common.runs.report.word_changes import find_changes, similarity

PPO = {
    "objective__score": lambda s: s / 10,
    "objective__kl": lambda s: s / 5,
    "rollout__response_tokens": lambda s: 20.0,
}


def signs_of(rules=None, **numbers) -> list[str]:
    curves = build_curves(over_steps(50, **numbers))
    found = find_signs(curves) if rules is None else find_signs(curves, rules, min_steps=1)
    return [sign.title for sign in found if sign.seen]


def test_a_sound_run_shows_nothing():
    sound = PPO | {
        "objective__score_length_correlation": lambda s: 0.1,
        "rollout__finished_fraction": lambda s: 0.95,
        "rollout__distinct_2": lambda s: 0.9,
        "policy__entropy": lambda s: 3.0 - s / 50,
        "value__explained_variance": lambda s: s / 100,
    }
    assert signs_of(**sound) == []


HACKS = {
    "The score has turned while KL goes on (over-optimisation)": (
        {"objective__score": lambda s: min(s, 60 - s), "objective__kl": lambda s: s / 5},
        {"objective__score": lambda s: min(s, 60 - s), "objective__kl": lambda s: 6.0},
    ),
    "The score stands still while KL goes on": (
        {"objective__score": lambda s: min(s, 20), "objective__kl": lambda s: s / 5},
        {"objective__score": lambda s: min(s, 20), "objective__kl": lambda s: min(s, 20) / 5},
    ),
    "The score is paid for length": (
        {
            "objective__score_length_correlation": lambda s: s / 130,
            "rollout__response_tokens": lambda s: 20 + s,
        },
        {
            "objective__score_length_correlation": lambda s: s / 130,
            "rollout__response_tokens": lambda s: 20.0,
        },
    ),
    "Responses do not end": (
        {"rollout__finished_fraction": lambda s: 1 - s / 130},
        {"rollout__finished_fraction": lambda s: 1 - s / 200},
    ),
    "Responses have become very short": (
        {"rollout__response_tokens": lambda s: 60 - s},
        {"rollout__response_tokens": lambda s: 60 - s / 2},
    ),
    "Responses repeat each other, or themselves": (
        {"rollout__distinct_2": lambda s: 0.9 - s / 100},
        {"rollout__distinct_2": lambda s: 0.9 - s / 250},
    ),
    "The policy has stopped to explore": (
        {"policy__entropy": lambda s: 3 * 0.95**s},
        {"policy__entropy": lambda s: 3 * 0.98**s},
    ),
    "KL is negative": ({"objective__kl": lambda s: -s / 50}, {"objective__kl": lambda s: -0.2}),
    "The critic is worse than a constant": (
        {"value__explained_variance": lambda s: 0.4 - s / 50},
        {"value__explained_variance": lambda s: -0.4 + s / 50},
    ),
    "Another reward falls while the score rises": (
        {
            "objective__score": lambda s: s,
            "objective__score_b": lambda s: -s,
            "objective__agreement_b": lambda s: 0,
        },
        {
            "objective__score": lambda s: s,
            "objective__score_b": lambda s: s,
            "objective__agreement_b": lambda s: 0,
        },
    ),
}


@pytest.mark.parametrize("title", HACKS)
def test_a_pattern_is_seen_and_its_neighbour_is_not(title):
    shows, does_not = HACKS[title]
    assert title in signs_of(**shows)
    assert title not in signs_of(**does_not)


def test_few_steps_say_nothing():
    few = build_curves(over_steps(9, policy__entropy=lambda s: 1.0 if s < 5 else 0.0))
    assert find_signs(few) == []


def test_a_fit_that_goes_too_far_and_weak_judges():
    assert signs_of(FITTING, sft__eval_loss=lambda s: abs(s - 20) + 5) == ["The held-out loss rises again"]
    assert signs_of(FITTING, sft__eval_loss=lambda s: 60 - s) == []
    weak = {"reward__eval_accuracy": lambda s: 0.55, "reward__eval_length_correlation": lambda s: 0.7}
    assert signs_of(FITTING, **weak) == [
        "The reward model is a weak judge", "The reward model judges by length",
    ]  # fmt: skip
    of = {"eval_pairs": 8, "eval_accuracy_low": 0.3, "eval_accuracy_high": 0.8}
    curves = build_curves(over_steps(60, **weak, **{f"reward__{n}": lambda s, v=v: v for n, v in of.items()}))
    seen = [sign.seen for sign in find_signs(curves, FITTING, min_steps=1) if sign.seen]
    assert seen[0] == "it ranks 55.0 % of 8 held-out pairs rightly (95 % interval 30.0 to 80.0 %)"


def test_signs_of_a_run_of_dpo():
    assert signs_of(FITTING, dpo__eval_loss=lambda s: abs(s - 20) + 5) == [
        "The held-out DPO loss rises again"
    ]
    rewards = {"dpo__eval_chosen_reward": lambda s: -s / 50, "dpo__eval_rejected_reward": lambda s: -s / 25}
    assert signs_of(FITTING, **rewards) == ["Chosen answers lose probability, too"]  # -1 against -2
    assert signs_of(FITTING, **rewards | {"dpo__eval_rejected_reward": lambda s: -s / 10}) == []  # -5
    assert signs_of(FITTING, **rewards | {"dpo__eval_chosen_reward": lambda s: 0.5}) == []


def test_a_sign_stands_on_the_page_with_its_rule(tmp_path):
    rows = over_steps(50, **PPO | {"rollout__distinct_2": lambda s: 0.9 - s / 100})
    page = Page(build_page([read_run(write_run(tmp_path, rows))]))
    assert "Responses repeat each other, or themselves: distinct-2 went from 0.845 to 0.445." in page.text
    assert "Rule: distinct-2, the share of token pairs" in page.text
    assert "1 of the 6 patterns that were looked for can be seen" in page.text


# ---------------------------------------------------------------------------------------------------------
# Words and charts
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"), [("", ""), ("a b", ""), ("", "a b"), ("a  b\nc", "a b d\n"), ("x" * 9, "so, I say.")]
)
def test_changes_hold_both_texts(before, after):
    changes = find_changes(before, after)
    assert "".join(c.text for c in changes if c.kind != "gone") == after
    assert "".join(c.text for c in changes if c.kind != "new") == before


def test_changes_are_by_words():
    changes = find_changes("the cat sat.", "the dog sat!")
    assert [tuple(c) for c in changes] == [
        ("the ", "same"), ("cat", "gone"), ("dog", "new"), (" sat", "same"), (".", "gone"), ("!", "new"),
    ]  # fmt: skip
    assert similarity("the cat sat.", "the dog sat!") == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.5, "0.5"), (1234567.0, "1.2e6"), (0.00001, "1e-5"), (12345, "12,345"), (-3.14159, "-3.142"),
     (99.999, "100"), (0.0123456, "0.0123")],
)  # fmt: skip
def test_shown_numbers(value, text):
    assert shown(value) == text


def test_ticks_are_round_and_inside():
    assert choose_ticks(0, 10) == [0, 2.5, 5, 7.5, 10]
    assert choose_ticks(-0.013, 0.021) == [-0.01, 0, 0.01, 0.02]
    assert choose_ticks(3, 3) == [3]


def test_thinning_keeps_ends_and_spikes():
    y = [0.0] * 5000
    y[1234], y[4321] = 9.0, -9.0
    points = thin(range(5000), y, 100)
    assert len(points) <= 100 and points[0] == (0, 0.0) and points[-1] == (4999, 0.0)
    assert (1234, 9.0) in points and (4321, -9.0) in points
    assert [x for x, _ in points] == sorted(x for x, _ in points)


def test_only_what_goes_up_and_down_is_smoothed():
    schedule = [min(i, 100 - i) for i in range(100)]
    assert not is_noisy(schedule) and is_noisy([(-1) ** i * 5 + i for i in range(100)])
    texts = [draw_lines([Line(range(100), values, 0)], "x") for values in (schedule, [0.0, 1.0] * 50)]
    assert ["line faint" in text for text in texts] == [False, True]


def test_means_are_centred():
    assert smooth([0, 3, 6, 9], 3) == [1.5, 3, 6, 7.5]


@pytest.mark.parametrize("values", [[1.0], [2.0, 2.0, 2.0], [0.0, 1e-300], [1e149, -1e149], [-5.0] * 50])
def test_any_curve_can_be_drawn(values):
    text = draw_lines([Line(range(len(values)), values, 0)], "x")
    Page(text)
    assert "nan" not in text and "inf" not in text


def test_a_point_stands_where_its_numbers_say():
    text = draw_lines([Line([0, 5, 10], [0.0, 1.0, 2.0], 0)], "x")
    circles = [a for t, a in Page(text).tags if t == "circle"]
    middle = circles[1]
    assert (middle["cx"], middle["cy"]) == ("198", "88")  # halves of 46..350 and 10..166
    assert "step 5: 1" in text


def test_spread_and_durations():
    assert spread(range(10), 4) == [0, 3, 6, 9] and spread([1], 4) == [1]
    assert [as_duration(s) for s in (4.25, 59.6, 200, 18420)] == [
        "4.2 s",
        "1 min 00 s",
        "3 min 20 s",
        "5 h 07 min",
    ]
