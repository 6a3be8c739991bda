"""What a run finds in its folder, and what it does with it: go on, begin, say that it is done, or refuse."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from simple_parts import make_parts

from common.flags.args import Problems, parse_args
from common.flags.other_names import IGNORED
from common.runs.checkpoints import save_checkpoint
from common.runs.resume import EarlierRun, compare_flags, find_run, resolve_dtype, resumed_dtype
from step1_sft.arguments import SFTArguments
from step2_reward.arguments import RewardArguments
from step3_ppo.arguments import PPOArguments


def parse(words: str) -> SFTArguments:
    problems = Problems()
    args = parse_args(SFTArguments, ["--model_name_or_path", "m", *words.split()], problems=problems)
    assert not problems.messages
    return args


def flags_of(words: str) -> dict:
    """The flags of a run as it saves them."""
    return dataclasses.asdict(parse(words)) | {"resolved_dtype": "fp32"}


def leave_run(folder: Path, words: str = "", steps=(1, 2), *, is_finished: bool = False) -> Path:
    """A folder as a run has left it."""
    folder.mkdir(parents=True, exist_ok=True)
    flags = flags_of(f"--output_dir {folder} {words}")
    (folder / "args.json").write_text(json.dumps(flags))
    (folder / "metrics.jsonl").write_text("")
    for step in steps:
        save_checkpoint(folder, f"step-{step:06d}", make_parts(step), flags, 0)
    if is_finished:
        (folder / "finished.json").write_text('{"steps": 2}')
        (folder / "export").mkdir()
        (folder / "export" / "config.json").write_text('{"model_type": "x"}')
        save_file({"a": torch.zeros(9)}, folder / "export" / "model.safetensors")
    return folder


def find(words: str) -> tuple[EarlierRun, list[str]]:
    """What is found, and what is wrong."""
    problems = Problems()
    return find_run(parse(words), problems), problems.messages


def names(earlier: EarlierRun) -> list[str]:
    return [checkpoint.folder.name for checkpoint in earlier.checkpoints]


@pytest.fixture
def run(tmp_path) -> Path:
    return leave_run(tmp_path / "run")


# ---- The folder of the run itself


def test_find_run_of_an_empty_folder_is_a_new_run(tmp_path):
    (tmp_path / "run" / "log").mkdir(parents=True)  # as a launch script has left them
    for name in ("train.log", "training.log", "step1_z2.log"):  # DeepSpeed-Chat's scripts write the last two
        (tmp_path / "run" / name).write_text("")
    for words in ("", f"--output_dir {tmp_path / 'new' / 'deep'}", f"--output_dir {tmp_path / 'run'}"):
        assert find(words) == (EarlierRun(), [])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"], "a check makes no folder"


def test_find_run_resumes_from_the_newest_checkpoint(run):
    earlier, problems = find(f"--output_dir {run}")
    assert names(earlier) == ["step-000002", "step-000001"] and not problems and not earlier.notes
    assert not earlier.is_elsewhere and not earlier.finished


def test_find_run_skips_a_damaged_checkpoint_with_a_note(run):
    (run / "checkpoints" / "step-000002" / "meta.json").write_text("{")
    earlier, problems = find(f"--output_dir {run}")
    assert names(earlier) == ["step-000001"] and not problems
    assert (
        "step-000002: meta.json is not a checkpoint of this program, or is incomplete; it is skipped"
        in earlier.notes[0]
    )


def test_find_run_rejects_a_run_whose_checkpoints_are_all_damaged(run):
    for step in (1, 2):
        (run / "checkpoints" / f"step-00000{step}" / "meta.json").unlink()
    earlier, (problem,) = find(f"--output_dir {run}")
    assert "step-000002: meta.json cannot be read" in problem and "step-000001: " in problem
    assert "start over with --resume overwrite" in problem
    assert find(f"--output_dir {run} --resume overwrite") == (EarlierRun(), [])


def test_find_run_starts_over_a_run_without_checkpoints_with_a_note(tmp_path):
    run = leave_run(tmp_path / "run", steps=())
    earlier, problems = find(f"--output_dir {run}")
    assert not names(earlier) and not problems
    assert earlier.notes == [f"the run in {run} has no checkpoint yet: it starts over"]


def test_find_run_reports_a_finished_run_unless_it_is_made_longer(tmp_path):
    run = leave_run(tmp_path / "run", is_finished=True)
    earlier, problems = find(f"--output_dir {run}")
    assert f"the run in {run} has finished: 2 steps; its models are in {run}/export" in earlier.finished
    assert "--resume overwrite starts it over" in earlier.finished and not problems
    assert find(f"--output_dir {run} --resume overwrite") == (EarlierRun(), [])
    earlier, problems = find(f"--output_dir {run} --num_train_epochs 7")
    assert names(earlier)[0] == "step-000002" and not earlier.finished and not problems
    assert earlier.notes == ["--num_train_epochs is 7 from here on; it was 1"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--learning_rate 0.5", "--learning_rate 0.5 differs from the"),
        ("--model_name_or_path other", "--model_name_or_path other differs from the m of"),
        ("--data_path other.jsonl", "--data_path ['other.jsonl'] differs"),
    ],
)
def test_find_run_rejects_a_finished_run_with_other_flags(words, told, tmp_path):
    run = leave_run(tmp_path / "run", is_finished=True)
    _, (problem,) = find(f"--output_dir {run} {words}")
    assert told in problem and "another --output_dir" in problem


@pytest.mark.parametrize("is_finished", [True, False])
@pytest.mark.parametrize("kind", [RewardArguments, PPOArguments])
def test_find_run_rejects_a_folder_of_another_program(kind, is_finished, tmp_path):
    run = leave_run(tmp_path / "run", is_finished=is_finished)
    problems = Problems()
    find_run(kind(output_dir=str(run)), problems)
    assert "belongs to a run of step1_sft/main.py; choose another --output_dir" in problems.messages[0]


@pytest.mark.parametrize(
    "damage",
    [
        lambda export: shutil.rmtree(export),
        lambda export: (export / "model.safetensors").unlink(),
        lambda export: (export / "config.json").unlink(),
        lambda export: (export / "model.safetensors").write_bytes(b""),
        lambda export: os.truncate(export / "model.safetensors", 90),
        lambda export: (export / "config.json").write_text("{"),
        lambda export: (export / "model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "model-2.safetensors"}}'
        ),
    ],
)
def test_find_run_resumes_a_finished_run_with_a_damaged_export(damage, tmp_path):
    run = leave_run(tmp_path / "run", is_finished=True)
    damage(run / "export")
    earlier, problems = find(f"--output_dir {run}")
    assert not earlier.finished and names(earlier)[0] == "step-000002" and not problems
    assert f"{run}/export" in earlier.notes[0] and "it will be written again" in earlier.notes[0]
    shutil.rmtree(run / "checkpoints")
    _, (problem,) = find(f"--output_dir {run}")
    assert "No checkpoint" in problem and f"{run}/export" in problem


@pytest.mark.parametrize("text", ["[]", "{", "5", '{"steps": "2"}', '{"exports": 5}', "[" * 100_000, "\xff"])
@pytest.mark.parametrize("name", ["finished.json", "args.json"])
def test_find_run_names_a_malformed_file(name, text, tmp_path):
    if name == "args.json" and text.startswith('{"'):
        return
    run = leave_run(tmp_path / "run", is_finished=True)
    (run / name).write_text(text, encoding="latin-1")
    _, (problem,) = find(f"--output_dir {run}")
    assert str(run / name) in problem and "--resume overwrite" in problem
    assert find(f"--output_dir {run} --resume overwrite") == (EarlierRun(), [])


def test_find_run_ignores_what_a_kill_left_at_the_start(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "args.json.writing").write_text("{")
    assert find(f"--output_dir {run}") == (EarlierRun(), [])


def test_find_run_rejects_a_folder_with_other_files(run):
    _, (problem,) = find(f"--output_dir {run} --resume never")
    assert problem.startswith(f"--output_dir {run} contains ")
    (run / "args.json").unlink()  # some folder, and no run's
    earlier, (problem,) = find(f"--output_dir {run}")
    assert "--resume overwrite to replace it" in problem and not names(earlier)


# ---- --resume PATH


def test_resume_path_may_be_a_checkpoint_their_folder_or_a_run(run):
    first = run / "checkpoints" / "step-000001"
    expected = {first: ["step-000001"], run: ["step-000002", "step-000001"]}
    for path, found in (expected | {run / "checkpoints": expected[run]}).items():
        for words, is_elsewhere in ((f"--output_dir {run}", False), ("", True)):
            earlier, problems = find(f"--resume {path} {words}")
            assert names(earlier) == found and not problems and earlier.is_elsewhere is is_elsewhere


def test_resume_path_continues_in_another_empty_folder(run, tmp_path):
    earlier, problems = find(f"--resume {run} --output_dir {tmp_path / 'new'}")
    assert earlier.is_elsewhere and names(earlier)[0] == "step-000002" and not problems
    other = leave_run(tmp_path / "other", steps=())
    _, (problem,) = find(f"--resume {run} --output_dir {other}")
    assert problem.endswith("; choose another folder")


def test_resume_path_without_a_checkpoint_is_rejected_with_the_reason(run, tmp_path):
    damaged = run / "checkpoints" / "step-000001"
    (damaged / "meta.json").write_bytes(b"")
    for path, why in (
        (tmp_path, "there is no checkpoint"),
        (damaged, "meta.json is not a checkpoint of this program"),
    ):
        earlier, (problem,) = find(f"--resume {path}")
        assert problem.startswith(f"--resume {path}: ") and why in problem and not names(earlier)
        assert "give a folder such as OUTPUT_DIR/checkpoints/step-000200" in problem


# ---- Flags


def compare(now: str, before: dict) -> tuple[list[str], list[str]]:
    problems = Problems()
    return compare_flags(parse(now), before, "ORIGIN", problems), problems.messages


def test_compare_flags_rejects_changed_hyperparameters_with_both_values():
    notes, problems = compare("--learning_rate 1e-3 --seed 5", flags_of("--learning_rate 2e-3 --seed 4"))
    rate, seed = sorted(problems)
    expected = "--learning_rate 0.001 differs from the 0.002 of ORIGIN and cannot change on resume; use"
    assert rate.startswith(f"{expected} 0.002") and "--resume overwrite" in rate and not notes
    assert seed.startswith("--seed 5 differs from the 4 of ORIGIN")


def test_compare_flags_notes_changes_that_affect_no_result():
    before = flags_of("--zero_stage 0 --save_interval 5")
    notes, problems = compare("--zero_stage 3 --save_interval 7 --output_dir x --local_rank 1", before)
    assert not problems
    told = {"--save_interval is 7 from here on; it was 5", "--zero_stage is 3 from here on; it was 0"}
    assert set(notes) == told


def test_compare_flags_translates_flags_of_earlier_versions():
    """Those without effect, and switches, are translated; a removed one is refused where it did something."""
    ignored = dict.fromkeys(IGNORED, "something else")
    assert compare("", flags_of("") | ignored | {"disable_dropout": False}) == ([], [])
    assert compare("--disable_dropout", flags_of("") | {"disable_dropout": True}) == ([], [])
    assert compare("", flags_of("") | {"max_out_tokens": 0, "max_logprob_gap": 0.001}) == ([], [])
    assert compare("", flags_of("") | {"save_interval": 500, "max_tokens_per_micro_batch": 0}) == ([], [])
    _, (problem,) = compare("", flags_of("") | {"max_logprob_gap": 2.0})
    assert problem.startswith("ORIGIN was made with --max_logprob_gap 2.0, a removed flag (see CHANGELOG.md)")
    before = flags_of("")
    del before["learning_rate"], before["data_path"]  # they were at their defaults
    assert compare("", before) == ([], [])
    _, (problem,) = compare("--learning_rate 1e-3", before)
    assert problem.startswith(f"--learning_rate 0.001 differs from the {parse('').learning_rate} of")


@pytest.mark.parametrize(("is_on", "decay", "words"), [(False, 0.992, ""), (True, 0.5, "--ema_decay 0.5")])
def test_compare_flags_reads_ema_flags_of_an_earlier_version(is_on, decay, words):
    now = parse_args(PPOArguments, ["--actor_model_name_or_path", "m", *words.split()], problems=Problems())
    before = dataclasses.asdict(now) | {"enable_ema": is_on, "ema_decay": decay, "resolved_dtype": "fp32"}
    before["early_stop_kl"] = "0"  # a text then
    problems = Problems()
    assert compare_flags(now, before, "ORIGIN", problems) == [] == problems.messages


def test_compare_flags_compares_the_resolved_dtype(monkeypatch):
    """An empty --dtype is what the machine has best."""
    before = flags_of("") | {"resolved_dtype": "bf16"}
    monkeypatch.setattr("common.ranks.distributed.dtype_name", lambda flag: flag or "bf16")
    assert compare("", before) == compare("--dtype bf16", before) == ([], [])
    monkeypatch.setattr("common.ranks.distributed.dtype_name", lambda flag: flag or "fp32")
    for words in ("", "--dtype fp32"):
        _, (problem,) = compare(words, before)
        assert problem.startswith("--dtype fp32 differs from the bf16 of ORIGIN")


def test_resumed_dtype_keeps_what_auto_was(run, tmp_path):
    """As the newest checkpoint has it, or the flags of a run without one."""
    told = flags_of("") | {"resolved_dtype": "bf16"}
    save_checkpoint(run, "step-000003", make_parts(3), told, 0)
    assert resumed_dtype(parse(f"--output_dir {run} --dtype auto")) == "bf16"
    args = parse(f"--output_dir {run} --dtype auto")
    assert "bf16" in resolve_dtype(args)[0] and args.dtype == "bf16"
    assert resumed_dtype(parse(f"--resume {run}/checkpoints/step-000002 --dtype auto")) == "fp32"
    assert resumed_dtype(parse(f"--output_dir {run} --resume overwrite --dtype auto")) == ""
    begun = leave_run(tmp_path / "begun", steps=())
    assert resumed_dtype(parse(f"--output_dir {begun} --dtype auto")) == "fp32"
    assert resumed_dtype(parse(f"--output_dir {tmp_path}/new --dtype auto")) == resumed_dtype(parse("")) == ""


def test_find_run_compares_flags_of_the_checkpoint_not_of_args_json(run):
    """args.json is what the last start had, which may have been refused later or have saved nothing."""
    (run / "args.json").write_text(json.dumps(flags_of(f"--output_dir {run} --learning_rate 0.5")))
    _, problems = find(f"--output_dir {run}")
    assert not problems
