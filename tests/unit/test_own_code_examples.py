"""The functions of the examples and the example rewards, by numbers worked out by hand.

tests/programs/test_examples.py runs the examples.
"""

import importlib
import sys

import pytest
import torch
from rollout_batches import make_batch

from common.data.registry import load_source
from examples.own_reward.keyword import says_keyword
from step3_ppo.algorithms import ALGORITHMS, fill_defaults
from step3_ppo.arguments import PPOArguments
from step3_ppo.rewards.examples.arithmetic import right_answer
from step3_ppo.rewards.examples.length import brevity
from step3_ppo.rewards.examples.vader import sentiment
from step3_ppo.rollout_batch import tokens


def test_a_line_of_the_quiz_is_a_pair():
    source = load_source("examples.own_data.quiz:Quiz")
    assert len(source.train) == 20 and source.eval is None
    [example] = source.adapter.to_examples(source.train[0])
    assert example.prompt[0].content == "How many legs has a spider?"
    assert (example.chosen, example.rejected) == ("A spider has eight legs.", "A spider has six legs.")


def test_a_keyword_is_worth_one_and_words_too_many_a_tenth():
    rows = [{"keyword": "Dog"}] * 3
    scores = says_keyword([""] * 3, ["A dog!", "A cat.", "dog " * 32], rows)
    assert scores == [1.0, 0.0, pytest.approx(0.8)]


@pytest.fixture
def add_advantages():
    """The algorithm, forgotten at the end: other tests know the programs' own, or let --plugins import it."""
    yield importlib.import_module("examples.own_algorithm.win_rate").add_advantages
    ALGORITHMS.pop("win_rate")
    sys.modules.pop("examples.own_algorithm.win_rate")


def test_advantages_are_what_was_won_of_each_group(add_advantages):
    lengths, scores, groups = [2, 1, 2, 1, 2], [3.0, 1.0, 1.0, 7.0, 2.0], [0, 0, 0, 1, 1]
    zeros = torch.zeros(5, 2)
    batch = make_batch(
        lengths, group_ids=torch.tensor(groups), scores=torch.tensor(scores), old_logprobs=zeros,
        ref_logprobs=zeros - 1,
    )  # fmt: skip
    args = fill_defaults(PPOArguments(), ALGORITHMS["win_rate"])
    done = add_advantages(batch, args, 0.1)
    # 3 beats both others; each 1 ties with the other and loses to 3: (0 - 1) / 2; 7 is clipped to 5.
    advantages = tokens(done, "advantages")
    assert advantages.tolist() == [[1.0, 1.0], [-0.5, 0.0], [-0.5, -0.5], [1.0, 0.0], [-1.0, -1.0]]
    assert tokens(done, "rewards").sum(1).tolist() == [3.0, 1.0, 1.0, 5.0, 2.0]
    scaled = batch.with_numbers("scores", batch.numbers("scores") * 0.01)
    assert torch.equal(tokens(add_advantages(scaled, args, 0.1), "advantages"), advantages)


# ---- step3_ppo/rewards/examples


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
        ("7", "3 and 4 make 7.\n#### 7", 1.0),
        ("7", "7 and 4 make 11.\n#### 11", 0.0),
        ("7", "3 and 4 make 7.\n#### ", 0.0),  # cut off before it is stated
        ("7", "#### 8, or rather\n#### 7", 1.0),
        ("7", "none", 0.0),
    ],
)
def test_the_stated_number_is_compared_with_the_right_answer(answer, response, score):
    assert right_answer([""], [response], [{"answer": answer}]) == [score]


@pytest.mark.parametrize("row", [{}, {"answer": None}, {"answer": "none"}])
def test_a_row_without_a_right_answer_is_an_error(row):
    with pytest.raises(ValueError, match="holds no number"):
        right_answer([""], ["7"], [row])
