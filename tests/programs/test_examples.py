"""examples/: the notebook; a README's commands with a tiny model in place of their own, in this process."""

import json
import sys
from pathlib import Path

import pytest
from page_commands import commands_of
from program_runs import ROOT, read_curve, read_metrics, run, run_here
from tiny_inputs import step_flags
from transformers import AutoModelForCausalLM

from common.runs import run_files
from step3_ppo.algorithms import ALGORITHMS
from tools import check_data

pytestmark = pytest.mark.slow

SHORT = {
    1: "--max_seq_len 48 --max_train_steps 2",
    3: "--max_prompt_seq_len 24 --max_answer_seq_len 6 --max_train_steps 2",
}


def words_of(example: str) -> list[list[str]]:
    """Return the words of each command of an example's page."""
    return [command.words for command in commands_of(ROOT / f"examples/{example}/README.md")]


@pytest.fixture
def start(tiny, tmp_path, monkeypatch, lone_process, no_pictures):
    """Run a step's command; what it writes goes to a folder of the test, which is returned."""
    monkeypatch.chdir(ROOT)

    def run(words: list[str]) -> Path:
        step = {"step1_sft/main.py": 1, "step3_ppo/main.py": 3}[words[1]]
        output = tmp_path / words[words.index("--output_dir") + 1]
        words = [str(tiny.base) if "/Qwen" in f"/{word}" else word for word in words[2:]]
        folders = ["--data_output_path", str(tiny.cache), "--output_dir", str(output)]
        run_here(step, [*words, *SHORT[step].split(), *folders])
        return output

    return run


def test_own_data(start, tiny, capsys):
    look, train = words_of("own_data")
    words = [str(tiny.base) if word.startswith("Qwen") else word for word in look[3:]]
    check_data.main([*words, "--data_output_path", str(tiny.cache)])
    assert "20 rows to train" in capsys.readouterr().out  # all of quiz.txt
    output = start(train)
    assert len(read_curve(output, "sft/loss")) == 2
    AutoModelForCausalLM.from_pretrained(output / "export")


def test_a_program_returns_the_outcome_of_its_run(tiny, tmp_path, lone_process, no_pictures):
    flags = step_flags(tiny, 1, max_train_steps=2, eval_fraction=0.2, output_dir=tmp_path / "run")
    result = run_here(1, flags)
    assert (result.folder, result.export) == (tmp_path / "run", tmp_path / "run/export")
    values = {n: v for row in read_metrics(tmp_path / "run") for n, v in row.items()}
    kept = {name: value for name, value in values.items() if name.startswith("sft/")}
    assert result.metrics == kept and "sft/eval_loss" in kept
    run_files.release_lock(0)
    assert run_here(1, flags) == result, "it had finished"
    run_files.release_lock(0)
    assert run_here(1, flags | {"output_dir": ""})[:2] == (None, None)


def test_own_reward(start):
    [words] = words_of("own_reward")
    output = start(words)
    assert len(read_curve(output, "objective/score")) == 2


def test_own_environment(start):
    [words] = words_of("own_environment")
    output = start(
        [*(word for word in words if word not in ("--template", "chat"))]
    )  # it has no chat template
    assert len(read_curve(output, "rollout/turns")) == 2


def test_own_algorithm(start):
    [words] = words_of("own_algorithm")
    output = start(words)
    assert len(read_curve(output, "policy/loss")) == 2
    assert ALGORITHMS.pop("win_rate").needs_group
    sys.modules.pop("examples.own_algorithm.win_rate")


def test_the_notebook(tmp_path):
    """Its code, and that PPO reaches something; `jupyter execute --inplace FILE` writes its outputs anew."""
    notebook = json.loads((ROOT / "examples/three_steps.ipynb").read_text())
    code = "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    assert code.count("output/three_steps") == 1
    code = code.replace("output/three_steps", str(tmp_path))
    code += "\nassert share['step3_ppo'] > share['step1_sft'] + 0.15, share"
    run([sys.executable, "-c", code], cwd=ROOT / "examples")
