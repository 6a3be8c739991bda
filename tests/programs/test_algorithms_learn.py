"""Every algorithm raises the reward on sums whose answers are checked, from the same script."""

import os
import shlex

import pytest
from program_runs import ROOT, read_curve, run

from step3_ppo.algorithms import ALGORITHMS
from tools.report.page import build_page
from tools.report.run_reader import read_run

pytestmark = pytest.mark.slow

SCRIPT = ROOT / "training_scripts/verifiable/run.sh"
FAKE_PYTHON = '#!/usr/bin/env bash\necho "$@" >> "$COMMANDS"\n'


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """The folder with the SFT model that all algorithms begin as."""
    folder = tmp_path_factory.mktemp("verifiable")
    run(["env", f"OUTPUT_DIR={folder}", "bash", str(SCRIPT), "sft"], seconds=300)
    return folder


@pytest.fixture
def train(output, forks, tmp_path):
    """Run the commands that the script would start, in forked processes; return the last one's output."""
    python, commands = tmp_path / "bin/python", tmp_path / "commands"
    python.parent.mkdir()
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)

    def start(algorithm: str, *more: str):
        path = f"{python.parent}:{os.environ['PATH']}"
        variables = [f"OUTPUT_DIR={output}", f"COMMANDS={commands}", f"PATH={path}"]
        run(["env", *variables, "bash", str(SCRIPT), algorithm, "--max_train_steps", "40", *more])
        for line in commands.read_text().splitlines():  # the script makes 60 steps
            program, *words = shlex.split(line)
            assert program == "step3_ppo/main.py"
            done = forks.run(3, words, cwd=str(ROOT), seconds=300)
            assert done.code == 0, done.text()
        return output / algorithm

    return start


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS.keys() - {"distill"}))
def test_the_reward_rises(train, algorithm):
    folder = train(algorithm)
    scores = read_curve(folder, "objective/score")
    before, after = sum(scores[:3]) / 3, sum(scores[-5:]) / 5
    assert 0.25 < before < 0.55, "the SFT model is as right as its teacher, which is 40 %"
    assert after > before + 0.1, scores
    assert len(build_page([read_run(folder)])) > 10_000


def test_a_student_comes_close_to_its_teacher(train):
    """Without a reward, on held-out sums; the teacher is what grpo made of the same SFT model."""
    folder = train("distill")
    divergence = read_curve(folder, "eval/divergence")
    assert divergence[-1] < 0.5 * divergence[0], divergence
    assert set(read_curve(folder, "objective/score")) == {0.0}


def test_decoupled_stale_and_replayed_rollouts_learn_too(train, output):
    flags = "--rollout_staleness 1 --rollout_correction tis --top_k 5 --replay_sampling_support"
    train("grpo", *flags.split(), "--output_dir", str(output / "stale"))
    scores = read_curve(output / "stale", "objective/score")
    assert sum(scores[-5:]) / 5 > sum(scores[:3]) / 3 + 0.1, scores
    assert read_curve(output / "stale", "rollout/staleness")[1:] == [1.0] * (len(scores) - 1)
