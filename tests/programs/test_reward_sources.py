"""Step 3 with rewards of a user's own: several with weights, and what happens when one fails."""

import pytest
from program_runs import as_flags, read_metrics
from tiny_inputs import step_flags

pytestmark = pytest.mark.slow

REWARDS = """
import time

calls = []


def second_call(prompts):
    calls.append(len(prompts))
    return len(calls) == 2


def good(prompts, responses, rows):
    assert len(prompts) == len(responses) == len(rows)
    assert all("chosen" not in row and row["number"] >= 0 for row in rows), rows
    return [float(len(response)) for response in responses]


def second_fails(prompts, responses, rows):
    return [None if second_call(prompts) else 1.0] * len(prompts)


def second_hangs(prompts, responses, rows):
    if second_call(prompts):
        time.sleep(60)
    return [1.0] * len(prompts)


async def waits(prompts, responses, rows):
    return [0.5] * len(prompts)
"""


@pytest.fixture
def start(tiny, forks, tmp_path):
    """Run step 3 with rewards of a module of ours, on one rank or two."""
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    rows = [f'{{"prompt": "how is dog {i}?", "chosen": "fine", "number": {i}}}\n' for i in range(24)]
    (tmp_path / "rows.jsonl").write_text("".join(rows))

    def run_step(*rewards, ranks=1, **changes):
        flags = {
            "data_path": tmp_path / "rows.jsonl", "output_dir": tmp_path / "output", "data_split": "0,0,1",
            "critic_model_name_or_path": None, "algorithm": "reinforce++", "max_train_steps": 2,
            "per_device_generation_batch_size": 8 // ranks, "per_device_training_batch_size": 8 // ranks,
        }  # fmt: skip
        words = as_flags(step_flags(tiny, 3, **flags | changes))
        return forks.run(
            3, [*words, "--reward", *rewards], ranks=ranks, cwd=str(tmp_path)
        ), tmp_path / "output"

    return run_step


def test_weighted_rewards_are_added_up_and_logged_apart(start, tiny):
    own = ("2*function:my_rewards:good", "function:my_rewards:waits")
    unused = "0*function:step3_ppo.rewards.examples.vader:sentiment"
    done, output = start(f"0.5*model:{tiny.reward}", *own, unused)
    assert done.code == 0, done.text()
    rows = read_metrics(output, "objective/score")
    assert len(rows) == 2
    for row in rows:
        total = 0.5 * row["objective/score_model"] + 2 * row["objective/score_function_good"] + 0.5
        assert row["objective/score"] == pytest.approx(total, abs=1e-4)
        assert row["objective/score_function_waits"] == 0.5 and "objective/agreement_model" in row
    assert (output / "export").is_dir()


@pytest.mark.parametrize(
    ("name", "ranks", "words"),
    [("second_fails", 2, "gave 'None'"), ("second_hangs", 1, "--reward_timeout_seconds 3")],
)
def test_a_reward_that_fails_or_hangs_refuses_its_step_and_keeps_what_was_learned(start, name, ranks, words):
    limits = {"max_bad_steps": 0, "reward_timeout_seconds": 3}
    done, output = start(f"function:my_rewards:{name}", ranks=ranks, **limits)
    assert 0 not in done.codes and name in done.text() and words in done.text(), done.text()
    assert "Traceback" not in done.text().split("error: ")[1].split("\n")[0]
    assert len(read_metrics(output, "objective/score")) == 1, "the second step was refused"
    assert (output / "export").is_dir(), "the first step is kept"
