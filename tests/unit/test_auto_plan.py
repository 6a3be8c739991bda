"""Flags of --auto: they fit, none is faster, given ones stay, and so do the rows of an optimizer step."""

import itertools
import json

import pytest
from planned_runs import GIB, LLAMA_7B, OPT_1B, OPT_350M, ppo, single

from common.flags.groups import AUTO_FLAGS
from common.runs.checkpoints import Checkpoint
from common.runs.resume import EarlierRun
from tools import auto_plan
from tools.auto_plan import MARGIN, choose, describe, rate, with_more_gpus
from tools.machines import CPU, machines_of_kind
from tools.memory_plan import MemoryPlan
from tools.planned_run import Run
from training_scripts.launch_table import find_row, step_flags, without


def choice_for(run: Run, *given: str) -> auto_plan.Choice:
    """The choice for a run, on its own machines."""
    return choose(run, machines_of_kind(run.args.gpu, run.args.dtype) or CPU, set(given))


def has_room(choice: auto_plan.Choice) -> bool:
    """Whether the memory plan, made again, leaves the margin."""
    memory = MemoryPlan(choice.run)
    return memory.fits and memory.left >= MARGIN * choice.run.memory_bytes


RUNS = {
    "an optimizer that waits on the CPU": single(OPT_1B, "--gpu", "4090-24g"),
    "adapters": single(LLAMA_7B, "--gpu", "4090-24g", "--lora_dim", "16"),
    "shards": single(LLAMA_7B, "--gpu", "a100-80g", "--num_gpus", "8", "--per_device_train_batch_size", "64"),
    "PPO on a card": ppo(OPT_1B, OPT_350M, "--gpu", "4090-24g", "--enable_hybrid_engine"),
    "PPO on a machine": ppo(
        LLAMA_7B, OPT_350M, "--gpu", "a100-80g", "--num_gpus", "8", "--enable_hybrid_engine"
    ),
    "PPO without the engine": ppo(OPT_1B, OPT_350M, "--gpu", "a100-40g"),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_none_is_faster_that_fits(run, monkeypatch):
    """Beside a loop over all placements and some passes and slots."""
    halved = auto_plan.halved
    monkeypatch.setattr(auto_plan, "halved", lambda *limits: sorted(set(halved(*limits)[::4]))[::-1])
    choice = choice_for(run)
    assert not choice.lacking and has_room(choice)
    machines = machines_of_kind(run.args.gpu, "bf16")
    options = [*auto_plan.placements(run), auto_plan.passes(run), auto_plan.slots(run)]
    fastest = min(
        rated.cost
        for parts in itertools.product(*options)
        if (rated := rate(run, machines, {k: v for part in parts for k, v in part.items()}))
        and has_room(rated)
    )
    assert choice.cost == pytest.approx(fastest)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_the_rows_of_an_optimizer_step_stay(run):
    flags = ("per_device_train_batch_size", "per_device_training_batch_size", "gradient_accumulation_steps")
    flags += ("per_device_generation_batch_size", "num_samples_per_prompt", "ppo_epochs", "lora_dim", "dtype")
    changed = choice_for(run).run
    assert changed.sequences_per_update == run.sequences_per_update
    for name in flags:
        assert getattr(changed.args, name, None) == getattr(run.args, name, None)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("an optimizer that waits on the CPU", "offload"),
        ("adapters", "max_tokens_per_micro_batch"),
        ("PPO on a machine", "release_inference_cache"),
        ("PPO on a machine", "inference_tp_size"),
    ],
)
def test_a_given_flag_is_never_chosen(name, given):
    run = RUNS[name]
    assert given in choice_for(run).flags
    choice = choice_for(run, given)
    assert given not in choice.flags and getattr(choice.run.args, given) == getattr(run.args, given)
    assert choice_for(run, *AUTO_FLAGS).flags == {}


def test_4_bits_only_where_nothing_else_fits():
    words = ("--gpu", "4090-24g", "--gpu_memory_gib", "14")
    run = single(LLAMA_7B, *words, "--lora_dim", "16")
    assert "load_in_4bit" not in choice_for(run).flags and has_room(choice_for(run))
    choice = choice_for(run, "offload")
    assert choice.flags["load_in_4bit"] is True and has_room(choice)
    assert choice_for(run, "offload", "load_in_4bit").lacking
    full = choice_for(single(LLAMA_7B, *words), "offload")  # there are no adapters
    assert full.lacking and "load_in_4bit" not in full.flags


def test_where_nothing_fits_the_nearest_and_the_gpus_that_would_do_are_named():
    run = single(LLAMA_7B, "--gpu", "4090-24g", "--cpu_memory_gib", "50")
    choice = choice_for(run)
    assert choice.lacking > GIB and not has_room(choice) and "lacks least" in describe(choice)
    larger = with_more_gpus(run, machines_of_kind("4090-24g"))
    assert has_room(larger) and larger.run.num_ranks == 8
    with_4 = single(LLAMA_7B, "--gpu", "4090-24g", "--cpu_memory_gib", "50", "--num_gpus", "4")
    assert choice_for(with_4).lacking
    assert choice_for(larger.run, *larger.flags).flags == {}  # as it is


def test_on_a_cpu_no_offload_and_passes_of_2048_tokens():
    words = ("--gpu", "cpu", "--enable_hybrid_engine", "--per_device_generation_batch_size", "64")
    run = ppo(OPT_350M, OPT_350M, *words, "--gpu_memory_gib", "22")
    choice = choice_for(run)
    assert not any(name.startswith("offload") for name in choice.flags) and has_room(choice)
    assert [flags.get("max_tokens_per_micro_batch") for flags in auto_plan.passes(run)] == [
        2048,
        None,
        1024,
        512,
    ]


@pytest.mark.parametrize(
    ("was_auto", "ranks", "is_kept"), [(True, 8, True), (True, 4, False), (False, 8, False)]
)
def test_a_resumed_run_keeps_what_was_chosen(was_auto, ranks, is_kept, tmp_path, monkeypatch):
    run = RUNS["shards"]
    fresh = choice_for(run, "offload").flags
    saved = {"auto": was_auto, "zero_stage": 3, "gradient_checkpointing": True, "offload": "all", "seed": 7}
    (tmp_path / "run.json").write_text(json.dumps({"starts": [{"world_size": 1}, {"world_size": ranks}]}))
    checkpoint = Checkpoint(tmp_path / "checkpoints/step-000002", {"args": saved})
    monkeypatch.setattr(auto_plan, "find_run", lambda args, problems: EarlierRun([checkpoint]))
    choice = choice_for(run, "offload")
    kept = {"zero_stage": 3, "gradient_checkpointing": True}
    assert choice.flags == (kept if is_kept else fresh) and fresh != kept
    assert choice.run.args.seed == run.args.seed


def test_scripts_leave_the_flags_of_auto_out():
    for step in ("sft", "reward", "dpo", "ppo"):
        words = step_flags(step, find_row("Qwen/Qwen2.5-14B", "single_node"))
        kept = without(words, AUTO_FLAGS)
        assert len(kept) < len(words) and not {f"--{name}" for name in AUTO_FLAGS} & set(kept)
        dropped = [word for word in words if word.startswith("--") and word not in kept]
        assert {word.removeprefix("--") for word in dropped} <= set(AUTO_FLAGS)
    assert without(["--a", "1", "2", "--zero_stage", "3", "--b"], AUTO_FLAGS) == ["--a", "1", "2", "--b"]
