"""Every algorithm raises the reward on sums whose answers are checked, from the same script."""

import pytest
from program_runs import ROOT, read_curve, run

from step3_ppo.algorithms import ALGORITHMS

pytestmark = pytest.mark.slow

SCRIPT = ROOT / "training_scripts/verifiable/run.sh"


def start(output, algorithm: str, *more: str) -> None:
    run(["env", f"OUTPUT_DIR={output}", "bash", str(SCRIPT), algorithm, *more], seconds=300)


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """The folder with the SFT model that all algorithms begin as."""
    folder = tmp_path_factory.mktemp("verifiable")
    start(folder, "rloo", "--max_train_steps", "1")
    return folder


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS.keys() - {"distill"}))
def test_the_reward_rises(output, algorithm):
    start(output, algorithm, "--max_train_steps", "40")  # the script makes 60
    folder = output / algorithm
    scores = read_curve(folder, "objective/score")
    before, after = sum(scores[:3]) / 3, sum(scores[-5:]) / 5
    assert 0.25 < before < 0.55, "the SFT model is as right as its teacher, which is 40 %"
    assert after > before + 0.1, scores
    assert (folder / "report.html").stat().st_size > 10_000


def test_a_student_comes_close_to_its_teacher(output):
    """Without a reward, on held-out sums; the teacher is what grpo made of the same SFT model."""
    start(output, "distill", "--max_train_steps", "40")
    divergence = read_curve(output / "distill", "eval/divergence")
    assert divergence[-1] < 0.5 * divergence[0], divergence
    assert set(read_curve(output / "distill", "objective/score")) == {0.0}


def test_decoupled_stale_and_replayed_rollouts_learn_too(output):
    flags = "--rollout_staleness 1 --rollout_correction tis --top_k 5 --replay_sampling_support"
    flags += f" --max_train_steps 40 --output_dir {output / 'stale'}"
    start(output, "grpo", *flags.split())
    scores = read_curve(output / "stale", "objective/score")
    assert sum(scores[-5:]) / 5 > sum(scores[:3]) / 3 + 0.1, scores
    assert read_curve(output / "stale", "rollout/staleness")[1:] == [1.0] * (len(scores) - 1)
