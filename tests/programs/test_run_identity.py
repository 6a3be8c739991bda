"""A run goes on as itself or not at all: other weights, data, flags, programs; a start that was cut off."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from test_resume import KILLED, PPO, SINGLE, TRAIN_STEP
from tiny_inputs import from_words, step_flags

from export import main as run_export

TRAIN_STEPS = {1: TRAIN_STEP, 2: "common.programs.single_model:Trainer.train_step"}
TRAIN_STEPS[3] = "step3_ppo.ppo_trainer:PPOTrainer.train_step"


def copy_of(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


def change_weights(model: Path) -> bytes:
    """Put another model of the same shapes in a model's place; return what was there."""
    file = model / "model.safetensors"
    before, weights = file.read_bytes(), load_file(file)
    torch.manual_seed(5)
    save_file({n: t + 0.01 * torch.randn_like(t) for n, t in weights.items()}, file, {"format": "pt"})
    return before


@pytest.fixture
def variants(tiny, tmp_path):
    """Short runs: the step, its flags, the model that is not trained and the flag that names it."""
    base, reward = copy_of(tiny.gpt2, tmp_path / "base"), copy_of(tiny.reward, tmp_path / "reward")
    single, name = from_words(SINGLE) | {"max_train_steps": 3}, "model_name_or_path"
    lora = {"lora_dim": 2, name: base}
    short = from_words(PPO) | {"max_train_steps": 2, "eval_interval": 0, "keep_best": ""}
    llama = copy_of(tiny.base, tmp_path / "actor")
    ppo = short | {"actor_model_name_or_path": llama, "reward": f"model:{reward}"}
    return {
        "sft, LoRA": (1, step_flags(tiny, 1, **single | lora), base, f"--{name}"),
        "reward, LoRA": (2, step_flags(tiny, 2, **single | lora), base, f"--{name}"),
        "dpo": (2, step_flags(tiny, 2, **single | {"loss": "dpo", name: base}), base, f"--{name}"),
        "ppo, reference": (3, step_flags(tiny, 3, **ppo), llama, "--actor_model_name_or_path"),
        "ppo, reward": (3, step_flags(tiny, 3, **ppo), reward, f"--reward model:{reward}"),
    }


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["sft, LoRA", "reward, LoRA", "dpo", "ppo, reference", "ppo, reward"])
def test_other_frozen_weights_are_another_run(forks, variants, variant, tmp_path, capsys):
    step, flags, model, flag = variants[variant]
    flags |= {"output_dir": tmp_path / "run"}
    first = forks.run(step, flags, hooks=[{"at": TRAIN_STEPS[step], "call": 2, "do": "kill"}])
    assert first.code == KILLED, first.text()
    before = change_weights(model)
    again = forks.run(step, flags)
    assert again.code == 2 and f"the model of {flag} has changed since then" in again.text(), again.text()
    if "LoRA" in variant:
        with pytest.raises(SystemExit, match="2"):
            run_export([str(tmp_path / "run"), "--output", str(tmp_path / "new")])
        assert f"the model of {flag} has changed" in capsys.readouterr().err
    (model / "model.safetensors").write_bytes(before)
    assert (done := forks.run(step, flags)).code == 0, done.text()
    change_weights(model)
    again = forks.run(step, flags)
    assert again.code == 2 and f"has finished; the model of {flag} has changed" in again.text(), again.text()
    assert forks.run(step, flags | {"resume": "overwrite"}).code == 0


def test_a_finished_run_is_that_of_its_data_and_flags(forks, tiny, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_bytes(Path(tiny.rows).read_bytes())
    flags = step_flags(tiny, 1, **from_words(SINGLE) | {"max_train_steps": 1, "data_path": data})
    flags |= {"output_dir": tmp_path / "run", "data_split": "1,0,0"}
    assert (done := forks.run(1, flags)).code == 0, done.text()
    again = forks.run(1, flags)
    assert again.code == 0 and "has finished: 1 steps" in again.text(), again.text()
    assert (tmp_path / "run" / "lock.json").exists()
    export = tmp_path / "run" / "export" / "model.safetensors"
    whole = export.read_bytes()
    export.write_bytes(whole[:-1])
    again = forks.run(1, flags)
    assert again.code == 0 and "it will be written again" in again.text(), again.text()
    assert export.read_bytes() == whole
    assert forks.run(1, flags | {"learning_rate": 0.5}).code == 2
    assert forks.run(2, flags).code == 2
    data.write_text(data.read_text() * 2)
    again = forks.run(1, flags)
    assert again.code == 2 and "the data have changed since the run" in again.text(), again.text()
    assert export.read_bytes() == whole


FULL = "exec:import errno; raise OSError(errno.ENOSPC, 'No space left', 'x')"
STARTS = ["common.runs.run:write_file", "common.runs.run_logger:RunLogger.open", "common.runs.run:Run._clear"]
STARTS += ["common.runs.run:Run.describe", "common.runs.durable_files:sync", "common.runs.run:_code_version"]


@pytest.mark.parametrize(
    "do", ["kill", "exec:import errno; raise OSError(errno.ENOSPC, 'No space left', 'x')"]
)
@pytest.mark.parametrize("at", STARTS)
def test_a_start_that_is_cut_off_is_made_again_by_the_same_command(at, do, forks, tiny, tmp_path):
    flags = step_flags(tiny, 1, **from_words(SINGLE) | {"max_train_steps": 1, "save_interval": 0})
    flags |= {"output_dir": tmp_path / "run", "enable_tensorboard": True}
    first = forks.run(1, flags, hooks=[{"at": at, "do": do}])
    assert first.code == (KILLED if do == "kill" else 2), first.text()
    assert do == "kill" or "x cannot be used (No space left); make room" in first.text(), first.text()
    assert (done := forks.run(1, flags)).code == 0, done.text()


FAILING = """
def fails(prompts, responses, rows):
    raise KeyboardInterrupt
"""


def test_a_run_that_has_learned_nothing_is_no_success(forks, tiny, tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    short = {
        "max_train_steps": 2,
        "max_bad_steps": 9,
        "eval_fraction": 0,
        "eval_interval": 0,
        "keep_best": "",
    }
    flags = step_flags(tiny, 3, **from_words(PPO) | short | {"reward": "function:failing:fails"})
    flags |= {"output_dir": tmp_path / "run"}
    for _ in range(2):
        done = forks.run(3, flags, cwd=str(tmp_path))
        assert done.code == 3, done.text()
        assert "none of the 2 steps changed the model, so nothing is exported" in done.text()
        assert json.loads((tmp_path / "run" / "lock.json").read_text())["exit_code"] == 3
        assert not [*tmp_path.glob("run/export*"), *tmp_path.glob("run/finished.json")]


def test_it_is_said_first_that_nothing_will_be_saved(forks, tiny):
    flags = step_flags(tiny, 1, **from_words(SINGLE) | {"max_train_steps": 1})

    done = forks.run(1, flags)
    assert done.code == 0, done.text()
    said = (done.folder / "rank-0.err").read_text().splitlines()
    assert said[0] == "note: without --output_dir nothing is saved: no model, no checkpoint, no metrics"


@pytest.mark.parametrize("step", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_config_file_of_a_run_alone_starts_the_same_run(forks, tiny, step, tmp_path):
    words = PPO if step == 3 else SINGLE
    flags = step_flags(tiny, step, **from_words(words) | {"max_train_steps": 2, "save_interval": 1})
    flags["output_dir"] = tmp_path / "run"
    done = forks.run(step, flags)
    assert done.code == 0, done.text()
    config = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert config["output_dir"] == str(tmp_path / "run") and config["max_train_steps"] == 2
    again = forks.run(step, {"config": tmp_path / "run/config.yaml"})
    assert again.code == 0 and "has finished: 2 steps" in again.text(), again.text()
    elsewhere = forks.run(step, {"config": tmp_path / "run/config.yaml", "output_dir": tmp_path / "other"})
    assert elsewhere.code == 0, elsewhere.text()
    first, second = (load_file(tmp_path / name / "export/model.safetensors") for name in ("run", "other"))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "at",
    [
        "common.models.loading:load_weights",
        "common.runs.export:_gather",
        "torch.distributed:init_process_group",
        "common.ranks.distributed:start",
    ],
)
def test_a_lost_rank_is_a_lost_rank_wherever(at, rank, forks, tiny, tmp_path):
    flags = step_flags(tiny, 2, **from_words(SINGLE) | {"max_train_steps": 1, "zero_stage": 3})
    flags |= {"output_dir": tmp_path / "run", "per_device_train_batch_size": 1}
    short = "exec:import common.ranks.distributed as d; d.JOIN_SECONDS = 5.0"
    hooks = [{"at": at, "do": "kill", "rank": rank}, {"at": "common.ranks.distributed:_join", "do": short}]
    done = forks.run(2, flags, ranks=2, hooks=hooks)
    other = done.codes[1 - rank]
    text = done.text(0) + done.text(1)
    if at.endswith(":start"):  # before it has come to the others
        assert other == 4 and "cannot join the others" in text, (done.codes, text)
    else:
        is_named = f"rank {rank} died" in text or "cannot join the others" in text  # while it connects
        assert other == 4 and is_named, (done.codes, text)
    assert done.codes[rank] == KILLED and done.seconds < 60
    assert "make room" not in text.lower() and "problem" not in text, text
    again = forks.run(2, flags, ranks=2)
    assert again.codes == [0, 0], again.text()
