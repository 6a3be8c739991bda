"""Bytes, memory and seconds of steps against the number of ranks: bytes counted on gloo, the rest planned.

The seconds are estimates of tools/time_plan.py: nothing was run on a GPU.
"""

import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

from benchmarks.evidence.counted_traffic import CASES, count_all
from benchmarks.evidence.runs import Measured
from benchmarks.measuring import plan_run
from common.generation.tp_plans import working_tp_sizes
from tools.auto_plan import halved
from tools.machines import machines_of_kind
from tools.memory_plan import MemoryPlan
from tools.planned_run import Models, Run
from tools.report.run_reader import Curve
from tools.time_plan import plan_times, step_seconds

H100 = machines_of_kind("h100-80g")
MODELS = {
    "7B": "meta-llama/Llama-2-7b-hf",
    "70B": "meta-llama/Llama-3.1-70B",
    "405B": "meta-llama/Llama-3.1-405B",
}
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
GPUS_OF_MACHINE = 8
RANKS = (2, 4, 8, 16)
# A step at every size: these prompts with one response each, and one optimizer step.
NUM_PROMPTS = 1024
PROMPT_TOKENS = 1024
RESPONSE_TOKENS = 1024
MAX_ROWS = 8  # per micro-batch
MAX_SLOTS = 128  # per replica
NUM_TP_SIZES = 3  # number of sizes to try
QUICK_CASES = ["SFT, ZeRO 2", "PPO, ZeRO 3, t = 2"]
TOLERANCE = 0.02  # relative to the planned bytes
FLAGS = {
    "gpu": "h100-80g",
    "actor_zero_stage": 3,
    "critic_zero_stage": 3,
    "enable_hybrid_engine": True,
    "actor_gradient_checkpointing": True,
    "critic_gradient_checkpointing": True,
    "release_inference_cache": True,
    "old_logprobs": "recompute",
    "max_prompt_seq_len": PROMPT_TOKENS,
    "max_answer_seq_len": RESPONSE_TOKENS,
}
# NVIDIA's published figures of NeMo-RL v0.5: GRPO of Llama-3.1-8B on 16 H100, 2,048 responses of 1,019 tokens
# on average, 4,096 at most, in 92.8 seconds. Planned with that average for all, 32 per prompt of 128 tokens.
ANCHOR = {
    "algorithm": "grpo",
    "num_gpus": 8,
    "num_nodes": 2,
    "per_device_generation_batch_size": 4,
    "num_samples_per_prompt": 32,
    "max_prompt_seq_len": 128,
    "max_answer_seq_len": 1019,
    "per_device_training_batch_size": 8,
    "gradient_accumulation_steps": 16,
}
ANCHOR_SECONDS = 92.8
# Other assumptions, to check whether generation remains the largest phase.
DOUBTS: dict[str, dict[str, Any]] = {
    "as assumed": {},
    "kernels start in no time": {"layer_seconds": 0.0},
    "memory and links as on data sheets": {"memory_share": 1.0, "reads": H100.memory, "link_share": 1.0},
    "rings of NCCL's Simple protocol": {"ring": (8.4e-6, 3.4e-6, 14e-6)},
    "all of it": {
        "layer_seconds": 0.0,
        "memory_share": 1.0,
        "reads": H100.memory,
        "link_share": 1.0,
        "ring": (8.4e-6, 3.4e-6, 14e-6),
    },
}


def measure(*, is_quick: bool) -> Measured:
    """The section's facts and its figure.

    Raises RuntimeError if the counted bytes differ from the planned ones: the other figures would then be
    meaningless.
    """
    counted = count_all(QUICK_CASES, [2]) if is_quick else count_all(list(CASES), list(RANKS))
    for row in counted:
        check_counted(row)
    names, sizes = (["7B"], (8,)) if is_quick else (list(MODELS), GPUS)
    planned = [plan_fastest(name, num_gpus) for name in names for num_gpus in sizes]
    doubtful = [row for row in planned if row["model"] == names[len(names) // 2]][-1]
    anchor = make_run("meta-llama/Llama-3.1-8B", ANCHOR)
    facts = {
        "assumed": H100._asdict(),
        "flags": FLAGS,
        "step": {"prompts": NUM_PROMPTS, "prompt": PROMPT_TOKENS, "response": RESPONSE_TOKENS},
        "counted": counted,
        "planned": planned,
        "generation_share": {doubt: generation_share(doubtful, doubt) for doubt in DOUBTS},
        "anchor": {
            "published": ANCHOR_SECONDS,
            "planned": round(step_seconds(plan_times(anchor, H100).values()), 1),
        },
    }
    panels = {f"{name}: GPU-seconds of a step, planned": draw_model(planned, name) for name in names}
    return facts, panels, "GPUs"


def check_counted(row: dict[str, Any]) -> None:
    """Raise RuntimeError unless each phase received the planned bytes, and the sockets the counted ones."""
    pairs = {name: (row["received"].get(name, 0), planned) for name, planned in row["planned"].items()}
    pairs["all, on sockets"] = (row["on_wire"], row["expected_on_wire"])
    pairs |= {name: (num, 0) for name, num in row["received"].items() if name not in row["planned"]}
    for name, (received, expected) in pairs.items():
        if abs(received - expected) > TOLERANCE * expected:
            raise RuntimeError(
                f"{row['case']} on {row['ranks']} ranks, {name}: {received:.0f} bytes of {expected:.0f}"
            )


# ---- planned --------------------------------------------------------------------------------------------


@cache
def read_models(path: str, algorithm: str) -> Models:
    """The models of step 3: critic and reward model have the actor's size."""
    return plan_run(model_flags(path, algorithm)).models


def model_flags(path: str, algorithm: str) -> dict[str, Any]:
    """The flags that name step 3's models."""
    flags = {"stage": 3, "actor_model_name_or_path": path, "algorithm": algorithm}
    if algorithm == "ppo":
        flags["critic_model_name_or_path"] = path
    return flags


def make_run(path: str, flags: dict[str, Any]) -> Run:
    """A run of step 3 with these flags in addition to FLAGS."""
    algorithm = flags.get("algorithm", "ppo")
    flags = model_flags(path, algorithm) | FLAGS | flags
    return plan_run(flags, read_models(path, algorithm))


def find_layouts(path: str, num_gpus: int) -> Iterator[dict[str, Any]]:
    """The flags of each generation layout with the most slots, and then the largest micro-batches, that fit;
    1 for both if nothing fits.
    """
    actor = read_models(path, "ppo")["actor"]
    sizes = [t for t in working_tp_sizes(actor.plain) if num_gpus % t == 0]
    memory = make_run(path, {}).memory_bytes
    holding = [t for t in sizes if t & (t - 1) == 0 and 2 * actor.num_params / t < memory] or sizes[-1:]
    states: tuple[dict[str, Any], ...] = ({}, {"offload_states_for_generation": True})
    for t in holding[:NUM_TP_SIZES]:
        groups: list[dict[str, Any]] = [{}]
        if t > 1:
            groups = [{"inference_tp_groups": kind} for kind in ("contiguous", "strided")]
        for group, moved in itertools.product(groups, states):
            yield take_largest(path, num_gpus, {"inference_tp_size": t} | group | moved)


def take_largest(path: str, num_gpus: int, flags: dict[str, Any]) -> dict[str, Any]:
    """The flags with the most slots, and then the largest micro-batches, that fit."""
    rows = NUM_PROMPTS // num_gpus
    largest = {
        "generation_slots": min(MAX_SLOTS, rows * flags["inference_tp_size"]),
        "per_device_training_batch_size": min(MAX_ROWS, rows),
    }
    chosen = flags | dict.fromkeys(largest, 1)
    for name, size in largest.items():
        runs = ((n, make_large_run(path, num_gpus, chosen | {name: n})) for n in halved(size, 1))
        chosen[name] = next((n for n, run in runs if MemoryPlan(run).fits), 1)
    return chosen


def make_large_run(path: str, num_gpus: int, flags: dict[str, Any]) -> Run:
    """A run of NUM_PROMPTS prompts on this number of GPUs."""
    rows = NUM_PROMPTS // num_gpus
    sizes = {
        "num_gpus": GPUS_OF_MACHINE,
        "num_nodes": num_gpus // GPUS_OF_MACHINE,
        "per_device_generation_batch_size": rows,
        "gradient_accumulation_steps": rows // flags["per_device_training_batch_size"],
    }
    return make_run(path, sizes | flags)


def plan_fastest(name: str, num_gpus: int) -> dict[str, Any]:
    """The fastest layout that fits for a model on this number of GPUs; if none fits, the one that lacks the
    least memory, without seconds.
    """
    ways = []
    for flags in find_layouts(MODELS[name], num_gpus):
        run = make_large_run(MODELS[name], num_gpus, flags)
        memory = MemoryPlan(run)
        times = plan_times(run, H100) if memory.fits else {}
        rank = step_seconds(times.values()) if memory.fits else memory.lacking
        ways.append((not memory.fits, rank, flags, memory, times))
    _, rank, flags, memory, times = min(ways, key=lambda way: way[:2])
    row = {"model": name, "gpus": num_gpus, "fits": memory.fits, "flags": flags}
    row |= {"gib": round(memory.peak.total / 2**30, 1), "peak": memory.peak.phase}
    if times:
        row["seconds"] = round(rank, 1)
        row["phases"] = {}
        for phase, time in times.items():
            causes = {cause: round(seconds, 2) for cause, seconds in time.causes.items() if seconds}
            row["phases"][phase] = {
                "seconds": round(time.seconds, 2),
                "bound": time.bound,
                "by_cause": causes,
            }
        row["largest"] = max(times, key=lambda phase: times[phase].seconds)
    return row


def generation_share(row: dict[str, Any], doubt: str) -> float:
    """Generation's share of the seconds of a row of `plan_fastest` under other assumptions."""
    run = make_large_run(MODELS[row["model"]], row["gpus"], row["flags"])
    times = plan_times(run, H100._replace(**DOUBTS[doubt]))
    return round(times["generate"].seconds / step_seconds(times.values()), 3)


def draw_model(planned: list[dict[str, Any]], name: str) -> dict[str, Curve]:
    """A model's curves, one for each kind of phase: a flat curve means perfect scaling."""
    rows = [row for row in planned if row["model"] == name and row["fits"]]
    gpus = [row["gpus"] for row in rows]
    curves = {}
    for kind in ("generate", "score", "train", "switch"):
        phases = [
            [phase["seconds"] for title, phase in row["phases"].items() if title.split()[0] == kind]
            for row in rows
        ]
        curves[kind] = Curve(gpus, [n * sum(seconds) for n, seconds in zip(gpus, phases, strict=True)])
    return curves
