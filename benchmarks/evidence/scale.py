"""Bytes, memory and seconds of steps as ranks grow: bytes counted on ranks of gloo, the rest planned.

The seconds are those of tools/time_plan.py: no GPU has run any of it.
"""

import argparse
from collections.abc import Iterator
from functools import cache
from typing import Any

from benchmarks.evidence.counted_traffic import CASES, count_all
from common.flags.args import Problems
from common.generation.tp_plans import working_tp_sizes
from tools.memory_plan import MemoryPlan
from tools.plan import halvings
from tools.planned_run import Models, PlanArguments, Run, build_run, read_models
from tools.report.run_reader import Curve
from tools.step_flags import parse_step_args
from tools.time_plan import H100, PhaseTime, plan_times, step_seconds

MODELS = {name: f"meta-llama/{path}" for name, path in (
    ("7B", "Llama-2-7b-hf"), ("70B", "Llama-3.1-70B"), ("405B", "Llama-3.1-405B")
)}  # fmt: skip
GPUS, GPUS_OF_MACHINE = (8, 16, 32, 64, 128, 256, 512, 1024), 8
RANKS = (2, 4, 8, 16)
X_NAME = "GPUs"
# A step of all sizes: so many prompts with a response each, and one optimizer step.
NUM_PROMPTS, PROMPT_TOKENS, RESPONSE_TOKENS = 1024, 1024, 1024
MOST_ROWS, MOST_SLOTS, NUM_TP_SIZES = 8, 128, 3  # of a micro-batch, of a replica, sizes that are tried
QUICK_CASES = ["SFT, ZeRO 2", "PPO, ZeRO 3, t = 2"]
TOLERANCE = 0.02  # of the plan's bytes
FLAGS = "--gpu h100-80g --actor_zero_stage 3 --critic_zero_stage 3 --enable_hybrid_engine"
FLAGS += " --actor_gradient_checkpointing --critic_gradient_checkpointing --release_inference_cache"
FLAGS += f" --max_prompt_seq_len {PROMPT_TOKENS} --max_answer_seq_len {RESPONSE_TOKENS}"
# What NVIDIA publishes of NeMo-RL v0.5: GRPO of Llama-3.1-8B on 16 H100, 2,048 responses of 1,019 tokens on
# average, 4,096 at most, in 92.8 seconds. Planned as if all had that average, 32 to a prompt of 128 tokens.
ANCHOR = "--algorithm grpo --num_gpus 8 --num_nodes 2 --per_device_generation_batch_size 4"
ANCHOR += " --num_samples_per_prompt 32 --max_prompt_seq_len 128 --max_answer_seq_len 1019"
ANCHOR += " --per_device_training_batch_size 8 --gradient_accumulation_steps 16"
ANCHOR_SECONDS = 92.8
# Does generation stay the largest phase if what is assumed is otherwise?
DOUBTS: dict[str, dict[str, Any]] = {
    "as assumed": {},
    "kernels start in no time": {"layer_seconds": 0.0},
    "memory and links as on data sheets": {"memory_share": 1.0, "link_share": 1.0},
    "rings of NCCL's Simple protocol": {"ring": (8.4e-6, 3.4e-6, 14e-6)},
    "all of it": {
        "layer_seconds": 0.0,
        "memory_share": 1.0,
        "link_share": 1.0,
        "ring": (8.4e-6, 3.4e-6, 14e-6),
    },
}


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, dict[str, Curve]]]:
    """Return the section's facts and its figure.

    Raises RuntimeError where ranks receive other bytes than the plan says: its other figures would say
    nothing.
    """
    counted = count_all(QUICK_CASES, [2]) if args.quick else count_all(list(CASES), list(RANKS))
    for row in counted:
        check_counted(row)
    names, sizes = (["7B"], (8,)) if args.quick else (list(MODELS), GPUS)
    planned = [plan_fastest(name, num_gpus) for name in names for num_gpus in sizes]
    doubtful = [row for row in planned if row["model"] == names[len(names) // 2]][-1]
    anchor = make_run("meta-llama/Llama-3.1-8B", f"{FLAGS} {ANCHOR}", has_critic=False)
    facts = {
        "assumed": H100._asdict(),
        "flags": FLAGS,
        "step": {"prompts": NUM_PROMPTS, "prompt": PROMPT_TOKENS, "response": RESPONSE_TOKENS},
        "counted": counted,
        "planned": planned,
        "generation_share": {doubt: generation_share(doubtful, doubt) for doubt in DOUBTS},
        "anchor": {
            "published": ANCHOR_SECONDS,
            "planned": round(step_seconds(plan_times(anchor).values()), 1),
        },
    }
    return facts, {f"{name}: GPU-seconds of a step, planned": draw_model(planned, name) for name in names}


def check_counted(row: dict[str, Any]) -> None:
    """Raise RuntimeError unless each phase received what was planned, and the sockets what was counted."""
    pairs = {name: (row["received"].get(name, 0), planned) for name, planned in row["planned"].items()}
    pairs["all, on sockets"] = (row["on_wire"], row["expected_on_wire"])
    pairs |= {name: (num, 0) for name, num in row["received"].items() if name not in row["planned"]}
    for name, (found, expected) in pairs.items():
        if abs(found - expected) > TOLERANCE * expected:
            raise RuntimeError(
                f"{row['case']} on {row['ranks']} ranks, {name}: {found:.0f} bytes of {expected:.0f}"
            )


# ---- planned --------------------------------------------------------------------------------------------


@cache
def models_of(path: str, *, has_critic: bool) -> Models:
    """Return the models of step 3: the critic and the reward model are of the actor's size."""
    problems = Problems()
    models = read_models(_parse(path, "", problems, has_critic=has_critic), problems)
    problems.exit_if_any()
    return models


def _parse(path: str, flags: str, problems: Problems, *, has_critic: bool) -> Any:
    critic = ["--critic_model_name_or_path", path] if has_critic else ["--algorithm", "grpo"]
    words = ["--stage", "3", "--actor_model_name_or_path", path, *critic, *flags.split()]
    return parse_step_args(PlanArguments, words, problems=problems)


def make_run(path: str, flags: str, *, has_critic: bool = True) -> Run:
    """Return a run of step 3 with these flags."""
    problems = Problems()
    args = _parse(path, flags, problems, has_critic=has_critic)
    run = build_run(args, models_of(path, has_critic=has_critic), problems)
    problems.exit_if_any()
    assert run is not None
    return run


def find_layouts(path: str, num_gpus: int) -> Iterator[tuple[dict[str, Any], Run]]:
    """Yield the flags and the run of each way to generate: with the most slots, and then with the largest
    micro-batches, that fit; one that does not fit with the least of both.
    """
    rows = NUM_PROMPTS // num_gpus
    sizes = [
        t for t in working_tp_sizes(models_of(path, has_critic=True)["actor"].plain) if num_gpus % t == 0
    ]
    memory, weights = (
        make_run(path, FLAGS).memory_bytes,
        2 * models_of(path, has_critic=True)["actor"].num_params,
    )
    holding = [t for t in sizes if t & (t - 1) == 0 and weights / t < memory] or sizes[-1:]
    for t in holding[:NUM_TP_SIZES]:
        for groups in ("contiguous", "strided")[: 2 if t > 1 else 1]:
            for moves_states in (False, True):
                flags = {"inference_tp_size": t}
                flags |= {"inference_tp_groups": groups} if t > 1 else {}
                flags |= {"offload_states_for_generation": True} if moves_states else {}
                yield _largest(path, num_gpus, flags, min(MOST_SLOTS, rows * t), min(MOST_ROWS, rows))


def _largest(
    path: str, num_gpus: int, flags: dict[str, Any], slots: int, rows: int
) -> tuple[dict[str, Any], Run]:
    chosen = flags | {"generation_slots": 1, "per_device_training_batch_size": 1}
    for name, largest in (("generation_slots", slots), ("per_device_training_batch_size", rows)):
        for size in (largest, *halvings(largest)):
            run = _run_of(path, num_gpus, chosen | {name: size})
            if MemoryPlan(run).fits or size == 1:
                chosen[name] = size
                break
    return chosen, _run_of(path, num_gpus, chosen)


def _run_of(path: str, num_gpus: int, flags: dict[str, Any]) -> Run:
    rows = NUM_PROMPTS // num_gpus
    machines = {"num_gpus": GPUS_OF_MACHINE, "num_nodes": num_gpus // GPUS_OF_MACHINE}
    accumulated = rows // flags["per_device_training_batch_size"]
    sizes = {"per_device_generation_batch_size": rows, "gradient_accumulation_steps": accumulated}
    words = [
        f"--{name}" + ("" if value is True else f" {value}")
        for name, value in (machines | sizes | flags).items()
    ]
    return make_run(path, f"{FLAGS} {' '.join(words)}")


def plan_fastest(name: str, num_gpus: int) -> dict[str, Any]:
    """Return the fastest way that fits of a model on so many GPUs; where none fits, the one that lacks least,
    without seconds.
    """
    found = []
    for flags, run in find_layouts(MODELS[name], num_gpus):
        memory = MemoryPlan(run)
        times = plan_times(run) if memory.fits else {}
        rank = step_seconds(times.values()) if memory.fits else memory.lacking
        found.append((not memory.fits, rank, flags, memory, times))
    does_not_fit, _, flags, memory, times = min(found, key=lambda way: way[:2])
    row = {"model": name, "gpus": num_gpus, "fits": not does_not_fit, "flags": flags}
    row["gib"] = round(memory.peak.total / 2**30, 1)
    row["peak"] = memory.peak.phase
    if times:
        row["seconds"] = round(step_seconds(times.values()), 1)
        row["phases"] = {phase: told(time) for phase, time in times.items()}
        row["largest"] = max(times, key=lambda phase: times[phase].seconds)
    return row


def told(time: PhaseTime) -> dict[str, Any]:
    """Return a phase's seconds, all and by cause, and the cause that takes longest."""
    causes = {cause: round(seconds, 2) for cause, seconds in time.causes.items() if seconds}
    return {"seconds": round(time.seconds, 2), "bound": time.bound, "by_cause": causes}


def generation_share(row: dict[str, Any], doubt: str) -> float:
    """Return generation's share of the seconds of a row of `plan_fastest` under other assumptions."""
    run = _run_of(MODELS[row["model"]], row["gpus"], row["flags"])
    times = plan_times(run, H100._replace(**DOUBTS[doubt]))
    return round(times["generate"].seconds / step_seconds(times.values()), 3)


def draw_model(planned: list[dict[str, Any]], name: str) -> dict[str, Curve]:
    """Return a model's curves, one for each kind of phase: a level one scales perfectly."""
    rows = [row for row in planned if row["model"] == name and row["fits"]]
    kinds = ("generate", "score", "train", "switch")
    return {
        kind: Curve([row["gpus"] for row in rows], [row["gpus"] * seconds_of(row, kind) for row in rows])
        for kind in kinds
    }


def seconds_of(row: dict[str, Any], kind: str) -> float:
    """Return the seconds of a kind of phase in a row of `plan_fastest`."""
    return sum(phase["seconds"] for name, phase in row["phases"].items() if name.split()[0] == kind)
