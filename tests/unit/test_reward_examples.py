"""The example rewards, by numbers worked out by hand, and through the interface that users name them by."""

import pytest

from step3_ppo.rewards.examples.arithmetic import evaluate, right_answer
from step3_ppo.rewards.examples.length import brevity
from step3_ppo.rewards.examples.vader import sentiment


def test_brevity_is_free_up_to_a_number_of_words_and_falls_behind_it():
    responses = ["", "a b", "a b c d", "a b c d e f g"]
    assert brevity([""] * 4, responses, [{}] * 4, num_free_words=4) == [0.0, 0.0, 0.0, -0.75]
    assert brevity([""], ["word " * 200], [{}]) == [-1.0]


def test_sentiment_is_vaders_compound_score():
    good, bad, nothing = sentiment(
        [""] * 3, ["I love this, it is great!", "I hate this awful mess.", ""], [{}] * 3
    )
    assert good > 0.5 and bad < -0.5 and nothing == 0.0


@pytest.mark.parametrize(
    ("prompt", "row", "response", "score"),
    [
        ("0.1 + 0.2 =", {}, "0.3", 1.0),
        ("12 + 7 =", {}, "It is 19, not 20.", 1.0),
        ("12 + 7 =", {}, "19.5", 0.0),
        ("1 + 1 = 2\n3 - 10 =", {}, "-7", 1.0),
        ("Q1. (2 + 3)*4 = ?", {}, "20", 1.0),
        ("How much?", {"answer": 1234}, "1,234 apples", 1.0),
        ("12 + 7 =", {"answer": None}, "19", 1.0),
        ("How much?", {"answer": "3 and 4 make 7.\n#### 7"}, "7", 1.0),
    ],
)
def test_the_first_number_is_compared_with_the_right_answer(prompt, row, response, score):
    assert right_answer([prompt], [response], [row]) == [score]


@pytest.mark.parametrize("text", ["__import__('os')", "2 ** 9", "1 / 0", "1 +", "True + 1"])
def test_nothing_but_sums_is_evaluated(text):
    with pytest.raises(ValueError):
        evaluate(text)
