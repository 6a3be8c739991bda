"""The plan of a run's folder beside what the run reached; plan.json."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from made_runs import Page, over_steps, write_run
from planned_runs import OPT_350M, single

from tools import plan
from tools.memory_plan import MemoryPlan
from tools.report.page import build_page
from tools.report.planned import compare_run
from tools.report.run_reader import Curve, read_run

SFT = {"model_name_or_path": OPT_350M, "max_seq_len": 128, "per_device_train_batch_size": 4, "dtype": ""}
DATA = {"num_tokens": 1000, "num_train": 90, "num_eval": 10, "num_raw_rows": 100, "num_truncated": 0}
START = {"device": "NVIDIA H200", "world_size": 2, "global_rows": 8, "dtype": "bf16", "data": DATA}
STEPS = {
    "perf__step_seconds": lambda step: 9.0 if step == 1 else 0.5,
    "perf__forward_backward_seconds": lambda step: 8.0 if step == 1 else 0.3,
    "perf__optimizer_seconds": lambda step: 0.1,
    "perf__tokens_per_second": lambda step: 8 * 40.5 / (9.0 if step == 1 else 0.5),
    "perf__peak_memory_gib": lambda step: 2.0 * step,
}
PPO = {"actor_model_name_or_path": OPT_350M, "critic_model_name_or_path": OPT_350M, "dtype": "fp32"}


def sft_run(folder: Path, num_steps: int = 3, **start: Any) -> Path:
    """The folder of a run of step 1 on two ranks."""
    about = {"starts": [START | start], "num_steps": 9, "defaults": {}}
    return write_run(folder / "run", over_steps(num_steps, **STEPS), flags=SFT, about=about)


def cells(line: str) -> list[str]:
    """The last three columns of a row."""
    return line.split()[-3:]


def output_of(capsys: pytest.CaptureFixture, *words: Any) -> dict[str, str]:
    """Lines that a program prints, by what stands before their first comma."""
    plan.main(list(map(str, words)))
    return {line.partition(",")[0]: line for line in capsys.readouterr().out.splitlines()}


def test_a_run_is_planned_for_its_own_machine_and_lengths_beside_its_median_step(tmp_path, capsys):
    folder = sft_run(tmp_path, threads=7)
    before = sorted(folder.iterdir())
    lines = output_of(capsys, "--run", folder)
    same = single(OPT_350M, "--gpu", "h200", "--num_gpus", "2", "--max_seq_len", "128",
                  "--per_device_train_batch_size", "4", "--mean_seq_len", "40.5")  # fmt: skip
    facts = plan.plan_facts(same, MemoryPlan(same), {})
    content = json.loads((folder / "plan.json").read_text())
    assert sorted(folder.iterdir()) == sorted([*before, folder / "plan.json"])
    assert content["seconds"] == pytest.approx(facts["seconds"]) and list(content["seconds"]) == ["train"]
    assert content["memory_gib"] == pytest.approx(facts["memory_gib"])
    assert content["flags"] == {} and content["lengths"] == "sequences of 40.5 tokens"
    seconds = facts["seconds"]["train"]
    assert lines["step 1"] == "step 1, SFT, on 2 x NVIDIA H200, bf16"
    assert cells(lines["train"]) == [f"{seconds:.3g}", "0.4", f"{seconds / 0.4:.3g}"]
    assert cells(lines["left out of the plan"]) == ["–", "0.1", "–"]
    assert cells(lines["step"])[1] == "0.5"
    assert cells(lines["peak of memory"])[1] == "6"
    assert "planned for sequences of 40.5 tokens, with the rates of: " in str(lines)
    assert "reached in 3 steps, but for the first; threads per rank: 7" in lines["reached in 3 steps"]


def test_a_ppo_run_has_mean_prompts_of_its_data_and_responses_of_its_steps(tmp_path, capsys):
    steps = STEPS | {"rollout__response_tokens": lambda step: 16.0 + step}
    about = {"starts": [START | {"device": "CPU x86_64", "dtype": "fp32"}]}
    flags = PPO | {"save_interval": "30m"}
    folder = write_run(tmp_path / "run", over_steps(3, **steps), flags=flags, about=about)
    assert output_of(capsys, "--run", folder)["step 3"] == "step 3, PPO, on 2 x cpu, fp32"
    content = json.loads((folder / "plan.json").read_text())
    assert content["lengths"] == "prompts of 10 and responses of 18 tokens"
    assert set(content["memory_gib"]) == {"idle", "generate", "score", "train actor", "train critic"}


def test_pairs_have_two_sequences_a_row_and_a_mean_is_no_longer_than_the_longest(tmp_path, capsys):
    for flags, lengths in ((SFT | {"loss": "dpo"}, "20.25"), (SFT | {"max_seq_len": 32}, "32")):
        about = {"starts": [START]}
        folder = write_run(tmp_path / lengths, over_steps(2, **STEPS), flags=flags, about=about)
        output_of(capsys, "--run", folder)
        content = json.loads((folder / "plan.json").read_text())
        assert content["lengths"] == f"sequences of {lengths} tokens"


def test_json_holds_the_plan_in_every_mode_and_the_flags_of_auto(tmp_path, capsys):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"flags": {"zero_stage": 2}, "seconds": {"old": 1.0}}))
    flags = ("--model_name_or_path", OPT_350M, "--per_device_train_batch_size", "4", "--gpu", "cpu")
    output_of(capsys, "--stage", "1", *flags, "--json", file)
    content = json.loads(file.read_text())
    assert content["flags"] == {} and set(content["memory_gib"]) == {"idle", "evaluate", "train policy"}
    text = output_of(capsys, "--stage", "1", *flags, "--gpu_memory_gib", "7", "--auto", "--json", file)
    assert any(line.endswith(", and leaves less than 5% of the memory") for line in text.values())
    assert json.loads(file.read_text())["flags"] == {"max_tokens_per_micro_batch": 512}
    output_of(capsys, "--run", sft_run(tmp_path), f"--json={tmp_path / 'other'}")
    assert (tmp_path / "other").is_file() and not (tmp_path / "run/plan.json").exists()
    (tmp_path / "run/plan.json").write_text(file.read_text())
    output_of(capsys, "--run", tmp_path / "run")
    again = json.loads((tmp_path / "run/plan.json").read_text())
    assert again["flags"] == {"max_tokens_per_micro_batch": 512} and again["seconds"] != content["seconds"]
    plan.main(["--run", str(tmp_path / "run"), "--json", str(tmp_path / "none/plan.json")])
    assert f"note: {tmp_path / 'none/plan.json'} cannot be written (No such" in capsys.readouterr().err


def test_memory_is_that_of_tensors_on_a_gpu_and_of_a_process_on_a_cpu():
    for gpu, outside in (("h200", 2.0), ("cpu", 0.0)):
        run = single(OPT_350M, "--gpu", gpu)
        memory = MemoryPlan(run)
        peak = memory.peak.total / 2**30 - outside
        assert max(plan.plan_facts(run, memory, {})["memory_gib"].values()) == pytest.approx(peak)


@pytest.mark.parametrize(
    ("spoil", "words", "said"),
    [
        (lambda folder: None, ["--gpu", "h200"], "--gpu has no effect with --run: leave it out"),
        (lambda folder: None, ["--mean_seq_len", "4"], "--mean_seq_len has no effect with --run"),
        (lambda folder: None, ["--num_nodes", "3"], "--num_nodes 3 does not divide the 2 ranks"),
        (
            lambda folder: write_run(folder, [], about={"starts": [{}]}),
            [],
            "an earlier version wrote it; wait",
        ),
        (lambda folder: (folder / "metrics.jsonl").write_text(""), [], "metrics.jsonl has no step yet; wait"),
        (lambda folder: (folder / "args.json").write_text("{"), [], "args.json is missing or torn; wait"),
        (
            lambda folder: (folder / "run.json").unlink(),
            [],
            "run.json is missing or torn; wait for a step, or",
        ),
    ],
)
def test_a_run_that_cannot_be_planned_is_refused_in_one_message(spoil, words, said, tmp_path, capsys):
    folder = sft_run(tmp_path)
    spoil(folder)
    with pytest.raises(SystemExit) as stop:
        plan.main(["--run", str(folder), *words])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and said in error and error.count("  - ") == 1
    assert not (folder / "plan.json").exists()


def test_no_folder_and_a_model_that_is_gone_are_named(tmp_path, capsys):
    gone = SFT | {"model_name_or_path": str(tmp_path / "gone")}
    folder = write_run(tmp_path / "run", over_steps(2, **STEPS), flags=gone, about={"starts": [START]})
    for words, said in ((tmp_path / "x", "--run "), (folder, f"--model_name_or_path {tmp_path / 'gone'}")):
        with pytest.raises(SystemExit) as stop:
            plan.main(["--run", str(words)])
        assert stop.value.code == 2 and said in capsys.readouterr().err


def test_phases_that_share_a_clock_are_one_row():
    planned = {"generate": 1.0, "score reward a": 2.0, "score reward b": 3.0, "train actor": 4.0,
               "train critic": 5.0, "score actor": 0.5}  # fmt: skip
    reached = {"step": 20.0, "generate": 2.0, "reward": 2.5, "actor_update": 6.0, "critic_update": 2.0}
    reached |= {"optimizer": 1.0, "digests": 0.25}
    curves = {f"perf/{name}_seconds": Curve([1, 2], [99.0, of]) for name, of in reached.items()}
    curves["perf/peak_memory_gib"] = Curve([1, 2], [3.0, 4.0])
    gib = {"idle": 1.0, "generate": 5.0, "train actor": 3.0, "train critic": 2.5}
    for name, values in {"actor_update": [2.0, 4.0], "optimizer": [3.0, 1.0], "reward": [1.0, 1.0]}.items():
        curves[f"perf/{name}_peak_gib"] = Curve([1, 2], values)
    rows = compare_run({"seconds": planned, "memory_gib": gib}, curves)
    assert rows[0] == ("", "planned", "reached", "planned / reached")
    assert set(rows[1:]) == {
        ("generate, seconds", "1", "2", "0.5"),
        ("score actor, seconds", "0.5", "–", "–"),
        ("score reward a, score reward b, seconds", "5", "2.5", "2"),
        ("train actor, train critic, seconds", "9", "9", "1"),
        ("left out of the plan, seconds", "–", "6.5", "–"),
        ("step, seconds", "15.5", "20", "0.775"),
        ("peak of train, GiB", "3", "4", "0.75"),
        ("peak of memory, GiB", "5", "4", "1.25"),
    }


# ---- the report -----------------------------------------------------------------------------------------

FACTS = {"flags": {}, "seconds": {"train": 0.2}, "memory_gib": {"idle": 3.0}, "source": "<rates>"}
FACTS |= {"lengths": "sequences of 40 tokens"}


def test_the_page_has_the_table_of_each_run_with_a_plan(tmp_path):
    folder = sft_run(tmp_path)
    other = write_run(tmp_path / "other", over_steps(2, **STEPS), flags=SFT, about={"starts": [START]})
    runs = [read_run(folder), read_run(other)]
    assert "Planned beside reached" not in Page(build_page(runs)).text
    (folder / "plan.json").write_text(json.dumps(FACTS))
    runs[0] = read_run(folder)
    text = Page(build_page(runs)).text
    assert text.count("Planned beside reached: run") == 1 and text.count("Planned beside reached") == 1
    table = "".join(text[text.index("Planned beside reached") :].split())
    assert table.startswith(
        "Plannedbesidereached:runplannedreachedplanned/reachedtrain,seconds0.20.40.5"
        "leftoutoftheplan,seconds–0.1–step,seconds0.20.50.4peakofmemory,GiB360.5"
        "Plannedforsequencesof40tokens,withtheratesof:<rates>."
    )
    assert "Planned beside reached" in Page(build_page(runs[:1])).text
    (folder / "metrics.jsonl").write_text("")
    assert "Planned beside reached" not in Page(build_page([read_run(folder)])).text


@pytest.mark.parametrize("content", ['{"seconds": {', "[]", json.dumps(FACTS | {"seconds": 3}), "{}"])
def test_a_torn_plan_is_a_note(content, tmp_path):
    folder = sft_run(tmp_path)
    (folder / "plan.json").write_text(content)
    run = read_run(folder)
    assert run.plan == {} and run.notes == ["plan.json is torn"]
    text = Page(build_page([run])).text
    assert "plan.json is torn" in text and "Planned beside reached" not in text


def test_the_report_imports_no_torch():
    code = "import sys, tools.report.page; sys.exit('torch' in sys.modules)"
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60).returncode == 0
