"""Two commands that tools.translate prints run: TRL's PPO, and LLaMA-Factory's SFT of an alpaca set."""

import json
import shlex

import pytest
import yaml
from program_runs import ROOT, read_curve, run_here

from tools import translate

pytestmark = pytest.mark.slow


def printed(capsys, *words: str) -> list[str]:
    """Words of the command that the tool prints, without remarks."""
    translate.main(words)
    command = capsys.readouterr().out.split("\n# ")[0]
    return shlex.split(command.replace("\\\n", " "))


def test_ppo_of_trl(tiny, output, capsys, monkeypatch, lone_process, no_pictures):
    monkeypatch.chdir(ROOT)
    theirs = (
        f"accelerate launch --num_processes 1 examples/scripts/ppo/ppo.py --dataset_name {tiny.rows} "
        f"--model_name_or_path {tiny.base} --sft_model_path {tiny.base} --reward_model_path {tiny.reward} "
        "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --num_mini_batches 2 --bf16 false "
        f"--total_episodes 16 --response_length 6 --stop_token eos --output_dir {output} --num_ppo_epochs 2"
    )
    program, *words = printed(capsys, theirs)[1:]
    assert program == "step3_ppo/main.py"
    run_here(3, [*words, "--max_prompt_seq_len", "24", "--data_output_path", str(tiny.cache)])
    assert len(read_curve(output, "objective/score")) == 2  # 16 episodes of 8 responses


def test_sft_of_llamafactory(tiny, output, tmp_path, capsys, monkeypatch, lone_process, no_pictures):
    rows = [
        {
            "instruction": f"How warm is day {i}?",
            "input": "Here.",
            "output": "Warm.",
            "history": [["Hi?", "Yes."]],
        }
        for i in range(8)
    ]
    (tmp_path / "data").mkdir()
    (tmp_path / "data/days.json").write_text(json.dumps(rows))
    columns = {"prompt": "instruction", "query": "input", "response": "output", "history": "history"}
    sets = {"days": {"file_name": "days.json", "columns": columns}}
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(sets))
    theirs = {
        "stage": "sft", "do_train": True, "model_name_or_path": str(tiny.base), "finetuning_type": "lora",
        "dataset": "days", "dataset_dir": str(tmp_path / "data"), "cutoff_len": 96, "output_dir": str(output),
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 1.0,
    }  # fmt: skip
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(theirs))
    program, *words = printed(capsys, str(tmp_path / "sft.yaml"))[1:]
    assert program == "step1_sft/main.py"
    monkeypatch.chdir(ROOT)
    run_here(1, [*words, "--data_output_path", str(tiny.cache)])
    assert len(read_curve(output, "sft/loss")) == 2  # 8 rows, 4 of an update
    assert json.loads((output / "adapter/adapter_config.json").read_text())["lora_alpha"] == 16
