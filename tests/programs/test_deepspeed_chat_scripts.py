"""DeepSpeed-Chat's 37 training scripts: what each gives its main.py, run for two steps with tiny models.

deepspeed_chat_scripts.txt has a line per script of applications/DeepSpeed-Chat/training at DeepSpeedExamples
of 2026-09: its name, and the words after main.py for OUTPUT OUT, models ACTOR and CRITIC, and ZeRO stage 2.
"""

import shlex
from pathlib import Path

import pytest
import tiny_inputs
from program_runs import read_metrics

LINES = Path(__file__).with_name("deepspeed_chat_scripts.txt").read_text().splitlines()
SCRIPTS = dict(line.split(" ", 1) for line in LINES)
PROGRAMS = {"step1": 1, "dpo": "step2_reward.dpo.main", "step2": 2, "step3": 3}
METRICS = {"step1": "sft/loss", "dpo": "dpo/loss", "step2": "reward/loss", "step3": "objective/score"}
TOO_FEW_RANKS = {"step3/opt/multi_node/run_66b.sh": 8, "step3/opt/single_node/run_13b.sh": 2}


@pytest.fixture(scope="module")
def many_rows(tiny) -> Path:
    """Enough rows for the largest batches of the scripts after the split."""
    return tiny_inputs.write_rows(tiny.folder / "many.jsonl", tiny_inputs.make_rows(1600, seed=4))


def test_scripts_are_counted():
    assert len(SCRIPTS) == len(LINES) == 37


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_deepspeed_chat_script(script, forks, tiny, many_rows, tiny_model_folder, tmp_path):
    step = script.split("/")[0]
    words = shlex.split(SCRIPTS[script])
    is_llama = "llama" in script
    model = str(tiny.base) if is_llama else tiny_model_folder("opt")
    short = ["--data_path", str(many_rows), "--data_output_path", str(tiny.cache), "--max_train_steps", "2"]
    short += ["--log_interval", "1"]
    short += ["--output_dir", str(tmp_path / "out")]
    for name in (word for word in words if word.endswith("lora_dim")):  # a rank below this model's width
        short += [name, "4"]
    if step == "step3":
        short += ["--actor_model_name_or_path", model, "--critic_model_name_or_path", str(tiny.reward)]
        short += ["--max_prompt_seq_len", "24", "--max_answer_seq_len", "8"]
    else:
        short += ["--model_name_or_path", model, "--max_seq_len", "48"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out/training.log").write_text("")  # the script's own
    done = forks.run(PROGRAMS[step], [*words, *short], cwd=str(tmp_path))
    if script in TOO_FEW_RANKS:
        size = TOO_FEW_RANKS[script]
        assert done.code == 2 and f"--inference_tp_size {size}" in done.text(), done.text()
        return
    assert done.code == 0, done.text()
    assert len(read_metrics(tmp_path / "out", METRICS[step])) == 2
