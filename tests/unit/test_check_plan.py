"""The program: what it prints, how it leaves, and suggestions that hold when they are followed."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import transformers
from planned_runs import LLAMA_7B, NUM_350M, OPT_1B, OPT_350M, ppo, single

from tools import plan as check_plan
from tools import plan_changes
from tools.memory_plan import MemoryPlan
from tools.plan_changes import apply, find_changes
from tools.planned_run import Run, find_problems

Plan = Callable[..., tuple[int, str, dict[str, Any]]]


@pytest.fixture
def run_plan(capsys) -> Plan:
    """Plan and return (exit code, what was printed, the JSON object of the last line)."""

    def run(stage: int, *flags: str) -> tuple[int, str, dict[str, Any]]:
        models = ["--model_name_or_path", OPT_1B]
        if stage == 3:
            models = ["--actor_model_name_or_path", OPT_1B, "--critic_model_name_or_path", OPT_350M]
        code = 0
        try:
            check_plan.main(["--stage", str(stage), *models, *flags, "--json"])
        except SystemExit as stop:
            code = stop.code
        printed = capsys.readouterr().out
        return code, printed, json.loads(printed.splitlines()[-1])

    return run


# ---- flags ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--inference_tp_size", "3", "--enable_hybrid_engine"), "sizes that work for this model: 1, 2, 4"),
        (("--offload", "param"), "--offload param needs --actor_zero_stage 3, not 0"),
        (("--max_tokens_per_micro_batch", "100"), "raise it to at least 512"),
        (("--per_device_training_batch_size", "6"), "16 samples a rank must be a multiple of"),
        (("--max_answer_seq_len", "5000"), "tokens are more than the model's 2048 positions"),
        (("--ds_config", "missing.json"), "--ds_config missing.json cannot be read as JSON"),
        (("--critic_model_name_or_path", ""), "--critic_model_name_or_path is needed for --stage 3: give it"),
    ],
)
def test_wrong_flags_leave_with_2_and_say_what(capsys, flags, problem):
    models = ["--actor_model_name_or_path", OPT_1B, "--critic_model_name_or_path", OPT_350M]
    with pytest.raises(SystemExit) as stop:
        check_plan.main(["--stage", "3", *models, *flags])
    assert stop.value.code == 2
    assert problem in capsys.readouterr().err


# ---- what is said ---------------------------------------------------------------------------------------


def test_a_run_that_fits_leaves_with_0_and_says_what_is_left(monkeypatch, run_plan):
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", None)  # a known shape: no hub is asked
    code, printed, plan = run_plan(3, "--gpu", "h100-80g", "--num_gpus", "8", "--enable_hybrid_engine")
    assert code == 0 and plan["memory"]["fits"]
    left = plan["memory"]["left"] / 2**30
    assert f"{left:.2f} GiB are left" in printed
    totals = [sum(moment["gpu"].values()) for moment in plan["memory"]["moments"]]
    assert max(totals) + plan["memory"]["left"] == pytest.approx(80 * 2**30)
    assert plan["suggestion"] is None
    assert plan["parameters"]["critic"]["num_params"] == NUM_350M + 512  # and the score head


def test_everything_that_is_assumed_is_said(run_plan):
    flags = ("--num_gpus", "8", "--cpu_memory_gib", "900", "--old_logprobs", "rollout")
    _, printed, plan = run_plan(3, *flags)
    assumed = printed[printed.index("assumed") : printed.index("{")]
    for text in ("512 tokens", "900 GiB", "are the sampler's", "a mask of"):
        assert text in assumed
    assert plan["flags"]["num_gpus"] == 8 and plan["dtype"] == "bf16"


def test_the_tables_say_what_the_numbers_are(run_plan):
    _, printed, plan = run_plan(1, "--num_gpus", "2", "--zero_stage", "2")
    [received] = [line.split()[1:] for line in printed.splitlines() if line.startswith("train ")]
    assert received == [f"{plan['phases']['train']['intra_bytes'] / 2**30:.2f}", "-", "-"]
    lines = printed.splitlines()
    top = next(i for i, line in enumerate(lines) if line.startswith("GPU memory"))
    bottom = next(i for i, line in enumerate(lines) if line.startswith("all "))
    columns = [line.split()[-3:] for line in lines[top + 3 : bottom]]
    sums = [sum(float(c[i]) for c in columns if c[i] != "-") for i in range(3)]
    assert sums == pytest.approx([float(x) for x in lines[bottom].split()[-3:]], abs=0.05)


def test_cpus_can_be_planned_for(run_plan):
    _, printed, plan = run_plan(2, "--gpu", "cpu", "--per_device_train_batch_size", "2")
    assert plan["dtype"] == "fp32" and "step 2, reward model, on 1 x cpu" in printed


def test_dpo_is_a_policy_on_two_sequences_a_pair(run_plan):
    _, printed, pairs = run_plan(2, "--loss", "dpo", "--per_device_train_batch_size", "3")
    _, _, rows = run_plan(1, "--per_device_train_batch_size", "6", "--per_device_eval_batch_size", "32")
    assert "step 2, DPO, on 1 x" in printed
    assert pairs["memory"] == rows["memory"] and pairs["phases"] == rows["phases"]
    _, _, scores = run_plan(2, "--per_device_train_batch_size", "3")
    assert set(pairs["parameters"]) == {"policy"} and set(scores["parameters"]) == {"reward"}


def test_the_models_own_numbers_stand_in_the_head(run_plan):
    _, printed, plan = run_plan(3, "--actor_lora_dim", "8", "--critic_lora_dim", "8")
    adapter = 8 * 24 * (4 * (2048 + 2048) + 2 * (2048 + 8192))  # four projections and two of the MLP
    assert plan["parameters"]["actor"]["num_trained"] == adapter
    rows = {line.split()[0]: line for line in printed.splitlines() if line.count(" B ") == 1}
    assert f"{adapter / 1e6:.4g} M" in rows["actor"] and "adapters off" in rows["reference"]


# ---- suggestions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "models", "flags"),
    [
        (single, [OPT_1B], "--gpu_memory_gib 26"),
        (single, [OPT_1B], "--num_gpus 4 --gpu_memory_gib 14"),
        (single, [OPT_1B], "--gpu_memory_gib 26 --cpu_memory_gib 12"),
        (ppo, [LLAMA_7B, OPT_350M], "--num_gpus 8 --enable_hybrid_engine"),
        (ppo, [OPT_1B, OPT_1B], "--gpu_memory_gib 9 --cpu_memory_gib 30"),
    ],
    ids=["sft", "sft-4-gpus", "sft-little-cpu", "ppo-8-gpus", "ppo-little-cpu"],
)
def test_a_suggestion_fits_when_it_is_followed_and_nothing_of_it_is_idle(make, models, flags):
    run = make(*models, *flags.split())

    def fits(changes: list) -> bool:
        args = apply(run.args, changes)
        return not find_problems(args, run.models) and MemoryPlan(Run(args, run.models)).fits

    changes = find_changes(run.args, run.models)
    assert not fits([]) and fits(changes)
    assert not any(fits(changes[:i] + changes[i + 1 :]) for i in range(len(changes)))


def test_a_single_cheap_change_comes_before_dear_ones(run_plan):
    code, printed, plan = run_plan(1, "--gpu_memory_gib", "40", "--per_device_train_batch_size", "64")
    assert code == 1 and plan["suggestion"]["changes"] == [{"gradient_checkpointing": True}]
    assert "change: --gradient_checkpointing" in printed


def test_more_gpus_are_the_last_resort(run_plan, monkeypatch):
    flags = ("--gpu_memory_gib", "24", "--zero_stage", "3")
    _, _, plan = run_plan(1, *flags)
    assert not any("num_gpus" in change for change in plan["suggestion"]["changes"])
    monkeypatch.setattr(plan_changes, "candidate_changes", lambda *_: [])
    _, _, plan = run_plan(1, *flags)
    assert plan["suggestion"]["changes"] == [{"num_gpus": 4}]


def test_nothing_helps_a_model_that_is_too_large(run_plan):
    code, printed, plan = run_plan(1, "--gpu_memory_gib", "2.1")
    assert code == 1 and plan["suggestion"] is None
    assert "take a smaller model" in printed
