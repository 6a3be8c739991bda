"""Step 3 with rewards of a user's own: several with weights, and what happens when one fails."""

import pytest
from program_runs import STEPS, as_flags, read_metrics, run, run_here, torchrun

pytestmark = pytest.mark.slow

REWARDS = """
import os
import time
import zlib

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


def one_in_ten_fails(prompts, responses, rows):
    if any(zlib.crc32((p + r).encode()) % 10 == 0 for p, r in zip(prompts, responses)):
        raise ValueError("no verdict")
    return [float(len(response)) for response in responses]


async def waits(prompts, responses, rows):
    return [0.5] * len(prompts)
"""


@pytest.fixture
def start(tiny, tmp_path, monkeypatch):
    """Run step 3 with rewards of a module of ours, on one rank or two."""
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    rows = [f'{{"prompt": "how is dog {i}?", "chosen": "fine", "number": {i}}}\n' for i in range(24)]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def run_step(*rewards, ranks=1, may_fail=False, **changes):
        flags = {
            "actor_model_name_or_path": tiny.base, "data_path": tmp_path / "rows.jsonl",
            "data_output_path": tmp_path / "cache", "output_dir": tmp_path / "output",
            "max_prompt_seq_len": 20, "max_answer_seq_len": 6, "data_split": "0,0,1", "max_train_steps": 2,
            "per_device_generation_batch_size": 8 // ranks, "algorithm": "reinforce++",
            "per_device_training_batch_size": 8 // ranks,
        }  # fmt: skip
        words = [STEPS[3] + "/main.py", *as_flags(flags | changes), "--reward", *rewards]
        return run(torchrun(*words, processes=ranks), may_fail=may_fail), tmp_path / "output"

    return run_step


def test_several_rewards_are_added_up_and_logged_apart(start, tiny):
    model = f"model:{tiny.reward}"
    rewards = (
        f"0.5*{model}",
        "2*function:my_rewards:good",
        "function:my_rewards:waits",
        "0*function:step3_ppo.rewards.examples.vader:sentiment",
    )
    done, output = start(*rewards)
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
    done, output = start(f"function:my_rewards:{name}", ranks=ranks, may_fail=True, **limits)
    assert done.returncode != 0 and name in done.stderr and words in done.stderr
    assert "Traceback" not in done.stderr.split("error: ")[1].split("\n")[0]
    assert len(read_metrics(output, "objective/score")) == 1, "the second step was refused"
    assert (output / "export").is_dir(), "the first step is kept"


def test_200_steps_with_a_reward_that_fails_one_time_in_ten(
    tiny, tmp_path, lone_process, no_pictures, monkeypatch
):
    """They end as any run does, the share is named, and the phases are the step but for 5 %."""
    (tmp_path / "failing_judge.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    flags = {
        "actor_model_name_or_path": tiny.base, "data_path": tiny.rows, "data_split": "0,0,1",
        "data_output_path": tiny.cache, "output_dir": tmp_path / "output", "max_prompt_seq_len": 12,
        "max_answer_seq_len": 2, "per_device_generation_batch_size": 4, "num_samples_per_prompt": 2,
        "per_device_training_batch_size": 8, "max_train_steps": 200, "num_train_epochs": 200,
        "algorithm": "grpo", "reward": "function:failing_judge:one_in_ten_fails",
        "enable_hybrid_engine": True, "reward_on_error": "mask", "max_bad_steps": 0, "save_interval": 0,
    }  # fmt: skip
    run_here(3, flags)
    rows = read_metrics(tmp_path / "output", "objective/score")
    assert len(rows) == 200 and (tmp_path / "output/finished.json").is_file()
    shares = [row["objective/failed_fraction"] for row in rows]
    assert 0.03 < sum(shares) / 200 < 0.2 and max(shares) > 0
    assert sum(row["perf/rest_seconds"] for row in rows) < 0.05 * sum(r["perf/step_seconds"] for r in rows)
    assert all(0 < row["perf/mfu"] < 1 for row in rows)
