"""train.py on tiny models: three steps, stopped in the second, gone on with, reported."""

import signal
import sys

import pytest
from program_runs import read_curve, run, start, wait_for_steps
from transformers import AutoModelForCausalLM

from common.runs.run_files import STOPPED

pytestmark = [pytest.mark.slow, pytest.mark.smoke]


def test_three_steps_with_a_stop(tiny, tmp_path):
    """A model that no script knows, on the processor, by DeepSpeed's launcher."""
    output = tmp_path / "output"
    small = f"--data_output_path {tiny.cache} --max_train_steps 3"
    long = small.replace("steps 3", "steps 4000") + " --num_train_epochs 4000 --lr_scheduler_type constant"
    command = [
        sys.executable, "train.py", "--actor-model", str(tiny.base), "--reward-model", str(tiny.base),
        "--output-dir", str(output), "--data_path", str(tiny.rows),
        "--sft-flags", f"{small} --max_seq_len 48",
        "--ppo-flags", f"{small} --max_prompt_seq_len 24 --max_answer_seq_len 6",
    ]  # fmt: skip
    first = [*command, "--reward-flags", f"{long} --max_seq_len 48"]
    process = start(first, tmp_path / "log")
    try:
        wait_for_steps(output / "step2_reward", "reward/loss", 2, process, tmp_path / "log")
        process.send_signal(signal.SIGTERM)  # to train.py alone
        assert process.wait(timeout=60) == STOPPED, (tmp_path / "log").read_text()
    finally:
        process.kill()
    text = (tmp_path / "log").read_text()
    assert "step 2 was stopped; its output is in" in text and "step 3" not in text
    num_done = len(read_curve(output / "step2_reward", "reward/loss"))
    more = small.replace("steps 3", f"steps {num_done + 1}") + " --num_train_epochs 4000"
    done = run([*command, "--reward-flags", f"{more} --lr_scheduler_type constant --max_seq_len 48"])
    assert "has finished: 3 steps" in done.stdout and "resumes from" in done.stdout
    assert len(read_curve(output / "step2_reward", "reward/loss")) == num_done + 1
    assert len(read_curve(output / "step3_ppo", "objective/score")) == 2  # an epoch of the prompts
    for step in ("step1_sft", "step2_reward", "step3_ppo"):
        assert f"export: {output}/{step}/export" in done.stdout
    assert done.stdout.splitlines()[-1] == f"talk to it: python chat.py {output}/step3_ppo/export"
    assert "objective/score" in (output / "report.html").read_text()
    AutoModelForCausalLM.from_pretrained(output / "step3_ppo/export")
