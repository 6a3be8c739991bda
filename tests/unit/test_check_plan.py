"""The program: what it prints, how it leaves, and suggestions that hold when they are followed."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import transformers

from common.flags.args import Problems
from common.models.model_flops import DEVICES
from tools import plan as check_plan
from tools import plan_changes
from tools.memory_plan import plan_memory
from tools.plan_changes import apply, find_changes
from tools.planned_run import Models, PlanArguments, build_run, find_problems, read_models
from tools.step_flags import parse_step_args

LLAMA = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 6, "num_attention_heads": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """The configuration of a model of 1.48 B parameters, without weights."""
    path = tmp_path_factory.mktemp("llama")
    transformers.LlamaConfig(**LLAMA, tie_word_embeddings=False).save_pretrained(path)
    return str(path)


@pytest.fixture
def run_plan(folder, capsys) -> Callable[..., tuple[int, str, dict[str, Any]]]:
    """Plan and return (exit code, what was printed, the JSON object of the last line)."""

    def run(stage: int, *flags: str) -> tuple[int, str, dict[str, Any]]:
        models = ["--model_name_or_path", folder]
        if stage == 3:
            models = ["--actor_model_name_or_path", folder, "--critic_model_name_or_path", folder]
        code = 0
        try:
            check_plan.main(["--stage", str(stage), *models, *flags, "--json"])
        except SystemExit as stop:
            code = stop.code
        printed = capsys.readouterr().out
        return code, printed, json.loads(printed.splitlines()[-1])

    return run


def as_flags(changes: list[dict[str, Any]]) -> list[str]:
    flags: dict[str, Any] = {}
    for change in changes:
        flags |= change
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def read(flags: list[str]) -> tuple[Any, Models]:
    problems = Problems()
    args = parse_step_args(PlanArguments, flags, problems=problems)
    sizes = read_models(args, problems)
    assert not problems.messages
    return args, sizes


# ---- flags ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            ("--inference_tp_size", "3", "--enable_hybrid_engine"),
            "size 3 does not fit the actor; use 1, 2",
        ),
        (("--inference_tp_size", "2", "--enable_hybrid_engine"), "does not divide the number of ranks, 1"),
        (("--inference_tp_size", "2", "--num_gpus", "2"), "size 2 needs --enable_hybrid_engine"),
        (("--offload", "param"), "--offload param needs ZeRO stage 3, not 0"),
        (("--algorithm", "pp"), "--algorithm pp"),
        (("--max_tokens_per_micro_batch", "100"), "raise it to at least 512"),
        (("--per_device_training_batch_size", "6"), "16 samples a rank are no multiple"),
        (("--num_gpus", "0"), "--num_gpus 0 must be at least 1"),
        (("--max_answer_seq_len", "5000"), "tokens are more than the model's 2048 positions"),
        (("--ds_config", "missing.json"), "--ds_config missing.json cannot be read as JSON"),
        (("--actor_zero_stag", "3"), "did you mean --actor_zero_stage?"),
    ],
)
def test_wrong_flags_leave_with_2_and_say_what(folder, capsys, flags, problem):
    models = ["--actor_model_name_or_path", folder, "--critic_model_name_or_path", folder]
    with pytest.raises(SystemExit) as stop:
        check_plan.main(["--stage", "3", *models, *flags])
    assert stop.value.code == 2
    assert problem in capsys.readouterr().err


def test_a_model_of_known_shape_is_planned_without_a_hub(monkeypatch, capsys):
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", None)
    check_plan.main(["--stage", "1", "--model_name_or_path", "facebook/opt-350m", "--json"])
    plan = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert plan["parameters"]["policy"]["num_params"] == 331_196_416


def test_models_that_are_missing_are_named(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        check_plan.main(["--stage", "3", "--actor_model_name_or_path", str(tmp_path)])
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert "holds no config.json" in told
    assert "--critic_model_name_or_path is needed for --stage 3: give it, or an --algorithm without a" in told


# ---- what is said ---------------------------------------------------------------------------------------


def test_a_run_that_fits_leaves_with_0_and_says_what_is_left(run_plan):
    code, printed, plan = run_plan(3, "--gpu", "h100-80g", "--num_gpus", "8", "--enable_hybrid_engine")
    assert code == 0 and plan["memory"]["fits"]
    left = plan["memory"]["left"] / 2**30
    assert f"{left:.2f} GiB are left" in printed
    totals = [sum(moment["gpu"].values()) for moment in plan["memory"]["moments"]]
    assert max(totals) + plan["memory"]["left"] == pytest.approx(80 * 2**30)
    assert plan["suggestion"] is None


def test_everything_that_is_assumed_is_said(run_plan):
    flags = ("--num_gpus", "8", "--matmul_efficiency", "0.5", "--cpu_memory_gib", "900")
    _, printed, plan = run_plan(3, *flags, "--old_logprobs", "rollout")
    assumed = printed[printed.index("assumed") : printed.index("{")]
    reached = f"{0.5 * 989:.4g} TFLOP/s of matrix products and {0.6 * 3350:.4g} GB/s of memory"
    for text in (reached, "50% and 60%", "512 tokens", "900 GiB", "6 us", "are the sampler's", "a mask of"):
        assert text in assumed
    assert "ZeRO 1 of the actor, in elements: gradient bucket 5e+08" in assumed
    assert plan["hardware"]["num_gpus"] == 8 and plan["dtype"] == "bf16"


def test_the_table_adds_up(run_plan):
    _, printed, plan = run_plan(1, "--num_gpus", "2", "--zero_stage", "2")
    lines = printed.splitlines()
    top = next(i for i, line in enumerate(lines) if line.startswith("GPU memory"))
    bottom = next(i for i, line in enumerate(lines) if line.startswith("all "))
    columns = [line.split()[-3:] for line in lines[top + 3 : bottom]]
    sums = [sum(float(c[i]) for c in columns if c[i] != "-") for i in range(3)]
    assert sums == pytest.approx([float(x) for x in lines[bottom].split()[-3:]], abs=0.05)
    assert plan["parameters"]["policy"]["num_params"] == 1_476_448_256


@pytest.mark.parametrize("gpu", ["h200", "cpu"])
def test_every_device_can_be_planned_for(run_plan, gpu):
    code, printed, plan = run_plan(2, "--gpu", gpu, "--per_device_train_batch_size", "2")
    assert gpu in DEVICES
    assert code in (0, 1) and plan["dtype"] == ("fp32" if gpu == "cpu" else "bf16")
    assert f"step 2, reward model, on 1 x {gpu}" in printed
    assert plan["step_seconds"] > 0 and plan["phases"]["train"]["bound"]


def test_dpo_is_a_policy_on_two_sequences_a_pair(run_plan):
    _, printed, pairs = run_plan(2, "--loss", "dpo", "--per_device_train_batch_size", "3")
    _, _, rows = run_plan(1, "--per_device_train_batch_size", "6", "--per_device_eval_batch_size", "32")
    assert "step 2, DPO, on 1 x" in printed
    assert pairs["memory"] == rows["memory"] and pairs["step_seconds"] == rows["step_seconds"]
    _, _, scores = run_plan(2, "--per_device_train_batch_size", "3")
    assert set(pairs["parameters"]) == {"policy"} and set(scores["parameters"]) == {"reward"}


def test_the_models_own_numbers_stand_in_the_head(run_plan):
    _, printed, plan = run_plan(3, "--actor_lora_dim", "8", "--critic_lora_dim", "8")
    adapter = 8 * 6 * (4 * (4096 + 4096) + 3 * (4096 + 11008))  # four projections and three of the MLP
    assert plan["parameters"]["actor"]["num_trained"] == adapter
    assert plan["parameters"]["critic"]["num_trained"] == adapter + 4096  # and the score head
    rows = {line.split()[0]: line for line in printed.splitlines() if line.count(" B ") == 1}
    assert f"{adapter / 1e6:.4g} M" in rows["actor"] and "adapters off" in rows["reference"]


# ---- suggestions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "flags"),
    [
        (1, ("--gpu", "a100-40g", "--gpu_memory_gib", "30")),
        (1, ("--gpu", "a100-40g", "--num_gpus", "4", "--gpu_memory_gib", "16")),
        (2, ("--gpu", "a100-40g", "--gpu_memory_gib", "30", "--cpu_memory_gib", "20")),
        (3, ("--gpu", "a100-40g", "--enable_hybrid_engine")),
        (3, ("--gpu", "a100-40g", "--num_gpus", "8", "--gpu_memory_gib", "14")),
        (3, ("--gpu", "a100-40g", "--gpu_memory_gib", "9", "--cpu_memory_gib", "30")),
    ],
)
def test_a_suggestion_fits_when_it_is_followed_and_nothing_of_it_is_idle(folder, stage, flags):
    models = ["--model_name_or_path", folder]
    if stage == 3:
        models = ["--actor_model_name_or_path", folder, "--critic_model_name_or_path", folder]
    given = ["--stage", str(stage), *models, *flags]
    args, sizes = read(given)
    assert not plan_memory(build_run(args, sizes)).fits
    changes = find_changes(args, sizes)
    followed, _ = read([*given, *as_flags([change.flags for change in changes])])
    assert not find_problems(followed, sizes)
    plan = plan_memory(build_run(followed, sizes))
    assert plan.fits
    for i in range(len(changes)):
        rest = apply(args, changes[:i] + changes[i + 1 :])
        assert find_problems(rest, sizes) or not plan_memory(build_run(rest, sizes)).fits


def test_a_single_cheap_change_comes_before_dear_ones(run_plan):
    _, printed, plan = run_plan(1, "--gpu_memory_gib", "40", "--per_device_train_batch_size", "64")
    assert plan["suggestion"]["changes"] == [{"gradient_checkpointing": True}]
    assert "change: --gradient_checkpointing" in printed


def test_more_gpus_are_the_last_resort(run_plan, monkeypatch):
    flags = ("--gpu_memory_gib", "24", "--zero_stage", "3")
    _, _, plan = run_plan(1, *flags)
    assert not any("num_gpus" in change for change in plan["suggestion"]["changes"])
    monkeypatch.setattr(plan_changes, "candidate_changes", lambda *_: [])
    _, _, plan = run_plan(1, *flags)
    assert plan["suggestion"]["changes"] == [{"num_gpus": 4}]
    _, _, plan = run_plan(1, *flags, "--num_gpus", "2")
    assert plan["suggestion"]["changes"] == [{"num_gpus": 4}]


def test_nothing_helps_a_model_that_is_too_large(run_plan):
    code, printed, plan = run_plan(1, "--gpu_memory_gib", "2.2")
    assert code == 1 and plan["suggestion"] is None
    assert "take a smaller model" in printed
