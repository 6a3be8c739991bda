"""The program: what it prints, how it leaves, and suggestions that hold when they are followed."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from planned_runs import GIB, LLAMA_7B, NUM_350M, OPT_1B, OPT_350M, make_run, ppo, single
from pretended_gpu import pretended_gpu

from common.flags.groups import AUTO_FLAGS
from tools.auto_plan import as_flags, has_adapters, suggest
from tools.machines import machines_of_kind
from tools.memory_plan import MemoryPlan
from tools.plan import main, with_own_cpu, with_own_gpu
from tools.traffic_plan import plan_traffic

Plan = Callable[..., tuple[int, str]]


@pytest.fixture
def run_plan(capsys) -> Plan:
    """Plan and return (exit code, what was printed)."""

    def run(stage: int, *flags: str) -> tuple[int, str]:
        models = ["--model_name_or_path", OPT_1B]
        if stage == 3:
            models = ["--actor_model_name_or_path", OPT_1B, "--critic_model_name_or_path", OPT_350M]
        code = 0
        try:
            main(["--stage", str(stage), *models, *flags])
        except SystemExit as stop:
            code = stop.code
        out, errors = capsys.readouterr()
        return code, out + errors

    return run


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            ("--inference_tp_size", "3", "--enable_hybrid_engine", "--num_gpus", "3"),
            "sizes that work for this model: 1, 2, 4",
        ),
        (("--offload", "param"), "--offload param needs --actor_zero_stage 3, not 0"),
        (("--critic_offload", "param"), "--critic_offload param needs --critic_zero_stage 3, not 0"),
        (("--max_answer_seq_len", "5000"), "tokens are more than the model's 2048 positions"),
        (("--ds_config", "missing.json"), "--ds_config missing.json cannot be read as JSON"),
        (("--critic_model_name_or_path", ""), "--critic_model_name_or_path is required for --stage 3"),
        (
            ("--actor_lora_dim", "8", "--actor_lora_module_name", "x"),
            "matches no linear layer and no stacked",
        ),
    ],
)
def test_wrong_flags_leave_with_2_and_say_what(run_plan, flags, problem):
    code, told = run_plan(3, *flags)
    assert code == 2 and problem in told


# ---- what is said ---------------------------------------------------------------------------------------


def test_a_run_that_fits_leaves_with_0_and_says_what_is_left(monkeypatch, run_plan):
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", None)  # a known shape: no hub is asked
    words = (
        "--num_gpus 8 --cpu_memory_gib 900 --old_logprobs rollout --enable_hybrid_engine --actor_lora_dim 8"
    )
    code, printed = run_plan(3, *words.split())
    plan = MemoryPlan(ppo(OPT_1B, OPT_350M, *words.split()))
    assert code == 0 and plan.fits and f"{plan.left / GIB:.2f} GiB are left" in printed
    assert max(moment.total for moment in plan.moments) + plan.left == pytest.approx(79.1 * GIB)
    rows = {line.split()[0]: line for line in printed.splitlines() if "opt" in line.split()[1:2]}
    adapter = 8 * 24 * (4 * (2048 + 2048) + 2 * (2048 + 8192))  # four projections and two of the MLP
    assert f" {adapter / 1e6:.1f} " in rows["actor"] and f" {(NUM_350M + 512) / 1e6:.1f} " in rows["critic"]
    assert "adapters off" in printed
    assumed = printed[printed.index("assumed") :]
    for text in ("512 tokens", "900 GiB", "are the sampler's", "without flash-attn"):
        assert text in assumed


def test_the_tables_say_what_the_numbers_are(run_plan):
    flags = ("--num_gpus", "2", "--zero_stage", "2")
    _, printed = run_plan(1, *flags)
    table = printed[printed.index("received per rank") :]
    [received] = [line.split()[1:] for line in table.splitlines() if line.startswith("train ")]
    phase = plan_traffic(single(OPT_1B, *flags))["train"]
    assert received == [f"{phase.intra_bytes / GIB:.2f}", "-", "-"]
    lines = printed.splitlines()
    top = next(i for i, line in enumerate(lines) if line.startswith("GPU memory"))
    bottom = next(i for i, line in enumerate(lines) if line.startswith("total "))
    columns = [line.split()[-3:] for line in lines[top + 3 : bottom]]
    sums = [sum(float(c[i]) for c in columns if c[i] != "-") for i in range(3)]
    assert sums == pytest.approx([float(x) for x in lines[bottom].split()[-3:]], abs=0.05)


def test_cpus_can_be_planned_for(run_plan):
    _, printed = run_plan(2, "--gpu", "cpu", "--per_device_train_batch_size", "2")
    assert "step 2, reward model, on 1 x cpu, fp32" in printed


def test_a_pass_has_one_sequence_at_least():
    """A cap below --max_seq_len is no mistake: rows may be shorter."""
    assert single(OPT_1B, "--max_tokens_per_micro_batch", "300").tokens_per_pass == 512


def test_an_evaluation_has_batches_of_training_unless_told():
    few = ("--per_device_train_batch_size", "2")
    assert single(OPT_1B, *few).tokens_per_score == 2 * 512
    assert single(OPT_1B, *few, "--per_device_eval_batch_size", "32").tokens_per_score == 32 * 512
    lora = (*few, "--lora_dim", "8")
    usual = MemoryPlan(single(OPT_1B, *lora)).peak
    large = MemoryPlan(single(OPT_1B, *lora, "--per_device_eval_batch_size", "128")).peak
    assert usual.verb == "backward" and large.verb == "score" and large.total > usual.total


def test_dpo_is_a_policy_on_two_sequences_a_pair(run_plan):
    words = ("--stage", "2", "--loss", "dpo", "--model_name_or_path", OPT_1B)
    pairs = make_run(words, ("--per_device_train_batch_size", "3"))
    rows = single(OPT_1B, "--per_device_train_batch_size", "6")
    assert MemoryPlan(pairs).moments == MemoryPlan(rows).moments and plan_traffic(pairs) == plan_traffic(rows)
    assert "step 2, DPO, on 1 x" in run_plan(2, "--loss", "dpo")[1]


# ---- before a start ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gib", "code", "words"),
    [
        (40.0, 0, ("(pretended), bf16", "\nleft of 40 ", "\nfits: at the peak")),
        (16.0, 2, ("\ndoes not fit", "\nchange: --", "error: step 1 was not started; apply the change, or")),
    ],
)
def test_a_step_that_does_not_fit_the_gpu_that_is_there_is_not_started(
    gib, code, words, run_plan, monkeypatch, tmp_path
):
    def ask(args: Any) -> Any:
        with pretended_gpu(memory_gib=gib):  # not around the plan: it is no device for fake tensors
            return with_own_gpu(args)

    monkeypatch.setattr("tools.plan.with_own_gpu", ask)
    flags = ("--per_device_train_batch_size", "1", "--json", str(tmp_path / "plan.json"))
    found, printed = run_plan(1, "--gpu", "here", *flags)
    assert found == code and all(text in printed for text in words), printed
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["memory_gib"].keys() == {"idle", "evaluate", "train policy"}
    assert run_plan(1, "--gpu", "here", *flags[:3], str(tmp_path / "no/plan.json"))[0] == code


@pytest.mark.parametrize(("num_gpus", "gib"), [(2, 24.0), (1, 80.0), (3, 16.0), (4, 13.0)])
def test_the_fullest_gpu_that_is_used_is_planned_for(num_gpus, gib):
    """The first has a GiB of contexts, which may be this run's; the last 12 GiB of another program's."""
    args = single(OPT_1B, "--num_gpus", str(num_gpus)).args
    own = [(79 * GIB, 80 * GIB), (24 * GIB, 24 * GIB), (16 * GIB, 16 * GIB), (12 * GIB, 24 * GIB)]
    answers = {"device_count": lambda: len(own), "mem_get_info": own.__getitem__}
    answers["get_device_properties"] = lambda index: mock.Mock(major=8, minor=0)
    with pretended_gpu(), mock.patch.multiple(torch.cuda, **answers):
        assert with_own_gpu(args).gpu_memory_gib == gib


def test_a_rank_on_a_cpu_has_a_share_of_the_memory_that_is_there(monkeypatch):
    monkeypatch.setattr("tools.plan.available_cpu_bytes", lambda: 9 * GIB)
    args = single(OPT_1B, "--num_gpus", "3").args
    own = with_own_cpu(args)
    assert (own.gpu, own.gpu_memory_gib) == ("cpu", 3.0)
    assert with_own_cpu(replace(args, gpu_memory_gib=2.0)).gpu_memory_gib == 2.0


@pytest.mark.parametrize(("limit", "gib"), [("max", 9.0), (str(8 * GIB), 5.0), (str(20 * GIB), 9.0)])
def test_a_start_is_checked_for_the_memory_that_the_machine_or_its_container_has(
    limit, gib, tmp_path, monkeypatch, run_plan
):
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text(str(3 * GIB))
    monkeypatch.setattr("tools.plan.CGROUP", tmp_path)
    monkeypatch.setattr("tools.plan.psutil.virtual_memory", lambda: mock.Mock(available=9 * GIB))
    args = single(OPT_1B).args
    with pretended_gpu():
        assert with_own_gpu(args).cpu_memory_gib == gib
        assert with_own_gpu(replace(args, cpu_memory_gib=3.0)).cpu_memory_gib == 3.0
    own = {"gpu": "a100-80g", "cpu_memory_gib": gib}
    monkeypatch.setattr("tools.plan.with_own_gpu", lambda args: replace(args, **own))
    offload = ("--offload", "optimizer", "--zero_stage", "2", "--gradient_checkpointing")
    code, printed = run_plan(1, "--gpu", "here", *offload)
    assert code == 2 and f"of CPU memory, and has {gib:.2f}" in printed


def test_what_cannot_be_planned_stops_nobody(run_plan):
    assert run_plan(1, "--gpu", "here") == (0, "no memory plan: torch sees no GPU\n")
    with pretended_gpu():
        code, printed = run_plan(1, "--gpu", "here", "--model_name_or_path", "./nowhere")
        assert code == 0 and printed.startswith("no memory plan: --model_name_or_path ./nowhere is neither")
        code, printed = run_plan(1, "--gpu", "here", "--lora_dim", "x")
        assert code == 0 and printed.startswith("no memory plan: --lora_dim x")


# ---- memory that is shared, or comes and goes -------------------------------------------------------------


def test_a_shared_prompts_keys_are_saved_for_each_of_its_responses():
    """16 rows a pass, 4 to a prompt of 256: keys and values of width 2048 in 24 layers, 2 bytes each."""
    flags = ("--num_samples_per_prompt", "4", "--algorithm", "grpo", "--gpu", "a100-80g")
    flags += ("--per_device_training_batch_size", "16", "--max_answer_seq_len", "64")

    def saved() -> float:
        moments = MemoryPlan(ppo(OPT_1B, OPT_350M, *flags)).moments
        [training] = [m for m in moments if (m.role, m.verb) == ("actor", "backward")]
        return training.gpu["actor", "activations"]

    with mock.patch("tools.memory_plan.kv_bytes_per_token", lambda *_: 0):
        without = saved()
    assert saved() - without == 24 * 16 * 256 * (2 * 2048 * 2)


def test_an_offloaded_teacher_is_there_while_the_actor_learns():
    """It scores each micro-batch then; the actor's step does without."""
    flags = ("--offload_reference_model", "--teacher_model_name_or_path", OPT_350M, "--algorithm", "distill")
    moments = MemoryPlan(ppo(OPT_1B, OPT_350M, *flags)).moments
    there = {moment.verb for moment in moments if ("reference", "weights") in moment.gpu}
    assert there == {"score", "backward"}


# ---- suggestions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "models", "flags", "needs_adapters"),
    [
        (single, [OPT_1B], "--num_gpus 4 --gpu_memory_gib 14", False),
        (single, [OPT_1B], "--gpu_memory_gib 26 --cpu_memory_gib 12", True),
        (ppo, [LLAMA_7B, OPT_350M], "--num_gpus 8 --enable_hybrid_engine", False),
        (ppo, [OPT_1B, OPT_1B], "--gpu_memory_gib 9 --cpu_memory_gib 30", True),
    ],
    ids=["sft-4-gpus", "sft-little-cpu", "ppo-8-gpus", "ppo-little-cpu"],
)
def test_a_suggestion_fits_when_it_is_followed(make, models, flags, needs_adapters):
    run = make(*models, *flags.split())
    choice = suggest(run, machines_of_kind(run.args.gpu), set())
    words = as_flags(choice.flags).split()
    followed = make(*models, *flags.split(), *words)
    assert not MemoryPlan(run).fits and MemoryPlan(followed).fits
    assert has_adapters(followed) == needs_adapters
    assert followed.sequences_per_update == run.sequences_per_update


@pytest.mark.parametrize(
    ("flags", "change"),
    [
        # without the engine a whole batch is generated at a time
        ("--per_device_generation_batch_size 2048", {"enable_hybrid_engine": True}),
        ("--enable_hybrid_engine --max_tokens_per_scoring_pass 2000000", {"max_tokens_per_scoring_pass": 0}),
    ],
)
def test_step_3_is_given_the_engine_or_smaller_scoring_passes(flags, change):
    run = ppo(OPT_350M, OPT_350M, *flags.split(), "--gpu", "a100-40g")
    assert not MemoryPlan(run).fits
    choice = suggest(run, machines_of_kind("a100-40g"), {word[2:] for word in flags.split()})
    assert change.items() <= choice.flags.items() and MemoryPlan(choice.run).fits
    assert not has_adapters(choice.run)


def test_a_suggestion_changes_given_flags_only_if_no_others_do():
    words = ("--gpu_memory_gib", "14", "--num_gpus", "4", "--zero_stage", "1")
    run = single(OPT_1B, *words)
    machines = machines_of_kind(run.args.gpu)
    assert suggest(run, machines, set()).flags == {"gradient_checkpointing": True}
    others = suggest(run, machines, {"gradient_checkpointing", "zero_stage"}).flags
    assert others and not {"gradient_checkpointing", "zero_stage"} & others.keys()
    all_given = suggest(run, machines, set(AUTO_FLAGS)).flags
    assert all_given == {"gradient_checkpointing": True}


T4 = "--gpu t4-16g --lora_dim 8"
ROWS = "--per_device_train_batch_size"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (f"--gpu_memory_gib 40 {ROWS} 64", ["change: --max_tokens_per_micro_batch 8192\n", "takes about 0."]),
        (f"{T4} --gpu_memory_gib 7 --cpu_memory_gib 4.95", ["on 1 x t4-16g, fp32", "change: --dtype fp16"]),
        (
            "--gpu_memory_gib 8 --cpu_memory_gib 9",
            ["--lora_dim 64", "trains adapters only: different results"],
        ),
        ("--gpu_memory_gib 2.1", ["no combination of flags makes it fit: use more GPUs"]),
    ],
)
def test_plan_of_what_does_not_fit_exits_with_1_and_advice(flags, told, run_plan):
    code, printed = run_plan(1, *flags.split())
    assert code == 1 and all(text in printed for text in told), printed
