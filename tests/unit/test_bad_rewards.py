"""Reward functions that misbehave, one line a case: the message names the function and the batch."""

import math
import sys
import textwrap

import pytest

from step3_ppo.arguments import PPOArguments
from step3_ppo.rewards.function_reward import FunctionReward
from step3_ppo.rewards.text_rewards import Answers, RewardError

ANSWERS = Answers(["Is it?", "And no?"], ["yes", "no"], [{"gold": "yes"}, {}])
FIRST, SECOND = (
    "for response 1 of 2, prompt 'Is it?', response 'yes'",
    "for response 2 of 2, prompt 'And no?'",
)
BAD = [  # what the function does; what is said of it
    # No list of two numbers.
    ("return None", "gave 'None' for 2 responses"),
    ("return 1.0", "gave '1.0' for 2 responses"),
    ("return 'good'", "gave 'good' for 2 responses"),
    ("return b'ab'", "for 2 responses"),
    ("return {'yes': 1.0, 'no': 0.0}", "for 2 responses"),
    ("return []", "gave 0 scores for 2 responses"),
    ("return [1.0]", "gave 1 scores for 2 responses"),
    ("return [1.0, 2.0, 3.0]", "gave 3 scores for 2 responses"),
    ("return [[1.0, 2.0]]", "gave 1 scores for 2 responses"),
    ("import torch; return torch.zeros(2, 2)", "gave '[0.0, 0.0]' " + FIRST),
    ("import torch; return torch.tensor(1.0)", "for 2 responses"),
    ("import numpy; return numpy.zeros((2, 1, 3))", FIRST),
    ("return {1.0}", "for 2 responses"),
    ("pass", "gave 'None' for 2 responses"),
    # One of them is no finite number.
    ("return [1.0, None]", "gave 'None' " + SECOND),
    ("return [float('nan'), 1.0]", "gave 'nan' " + FIRST),
    ("return [1.0, float('inf')]", "gave 'inf' " + SECOND),
    ("return [1.0, -float('inf')]", "gave '-inf' " + SECOND),
    ("return [1e39, 1.0]", "gave '1e+39' " + FIRST),  # infinite in fp32
    ("return [10 ** 400, 1.0]", FIRST),
    ("return ['2', 1.0]", "gave '2' " + FIRST),
    ("return [1.0, '']", "gave '' " + SECOND),
    ("return [1j, 1.0]", "gave '1j' " + FIRST),
    ("return [1.0, [1.0]]", "gave '[1.0]' " + SECOND),
    ("return [1.0, {'score': 1.0}]", SECOND),
    ("import numpy; return numpy.array([1.0, numpy.nan])", "gave 'nan' " + SECOND),
    ("import torch; return torch.tensor([1.0, torch.inf], dtype=torch.bfloat16)", SECOND),
    # It raises, at once or while its answer is read.
    ("raise KeyError('gold')", "raised KeyError: 'gold'"),
    ("return [row['gold'] == 'yes' for row in rows]", "raised KeyError: 'gold'"),
    ("return 1 / 0", "raised ZeroDivisionError: division by zero"),
    ("assert responses == prompts, 'not the same'", "raised AssertionError: not the same"),
    ("raise RuntimeError", "raised RuntimeError"),
    ("raise MemoryError", "raised MemoryError"),
    ("raise SystemExit(3)", "raised SystemExit: 3"),
    ("raise KeyboardInterrupt", "raised KeyboardInterrupt"),
    ("raise GeneratorExit", "raised GeneratorExit"),
    ("raise StopIteration('end')", "raised StopIteration: end"),
    ("raise ExceptionGroup('both', [ValueError(1), TypeError(2)])", "raised ExceptionGroup: both"),
    ("raise ValueError('x' * 10 ** 6)", "raised ValueError: xxx"),
    ("raise UnicodeDecodeError('utf-8', b'\\xff', 0, 1, 'bad')", "raised UnicodeDecodeError: "),
    ("raise type('Odd', (BaseException,), {})('why')", "Odd: why"),
    ("return f(prompts, responses, rows)", "raised RecursionError: "),
    ("return (1 / (n - 1) for n in range(2))", "raised ZeroDivisionError"),
    ("return iter([1.0])", "gave 1 scores for 2 responses"),
]


@pytest.fixture(params=BAD, ids=[body for body, _ in BAD])
def bad(request, tmp_path, monkeypatch):
    """The name of a function, and words that are said of it."""
    body, words = request.param
    module = f"bad_reward_{BAD.index(request.param)}"
    code = "def f(prompts, responses, rows):\n" + textwrap.indent(body, "    ")
    (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    yield f"{module}:f", words
    sys.modules.pop(module, None)


def test_a_bad_reward_is_named_with_its_batch(bad):
    name, words = bad
    with pytest.raises(RewardError) as error:
        FunctionReward(name, PPOArguments()).score(ANSWERS)
    message = str(error.value)
    assert message.startswith(f"reward function:{name}, for a batch of 2 ") and words in message
    assert len(message) < 3_000


def test_a_bad_reward_gives_no_score_under_mask(bad):
    name, _ = bad
    reward = FunctionReward(name, PPOArguments(reward_on_error="mask"))
    scores = reward.score(ANSWERS)
    assert len(scores) == 2 and any(map(math.isnan, scores)) and reward.first_failure
