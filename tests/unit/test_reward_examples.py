"""The example rewards, by numbers worked out by hand, and through the interface that users name them by."""

import pytest

from step3_ppo.rewards.examples.arithmetic import right_answer
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
    ("answer", "response", "score"),
    [
        ("19", "It is 19, not 20.", 1.0),
        (19, "19.5", 0.0),
        ("-7", "-7", 1.0),
        (1234, "1,234 apples", 1.0),
        ("3 and 4 make 7.\n#### 7", "7", 1.0),
        ("7", "none", 0.0),
    ],
)
def test_the_first_number_is_compared_with_the_right_answer(answer, response, score):
    assert right_answer([""], [response], [{"answer": answer}]) == [score]


@pytest.mark.parametrize("row", [{}, {"answer": None}, {"answer": "none"}])
def test_a_row_without_a_right_answer_is_an_error(row):
    with pytest.raises(ValueError, match="holds no number"):
        right_answer([""], ["7"], [row])
