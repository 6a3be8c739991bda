"""Runs to be planned, of models whose shapes training_scripts/model_shapes.json has."""

import json
from functools import cache
from pathlib import Path

from common.flags.args import Problems
from tools.memory_plan import MemoryPlan
from tools.planned_run import Models, Run, build_run, read_models
from tools.step_flags import PlanArguments, parse_step_args

GIB = 2**30
OPT_350M, OPT_1B = (f"facebook/opt-{size}" for size in ("350m", "1.3b"))
LLAMA_7B, LLAMA_70B = "meta-llama/Llama-2-7b-hf", "meta-llama/Llama-3.1-70B"
NUM_350M, NUM_1B, NUM_7B = 331_196_416, 1_315_758_080, 6_738_415_616  # without score heads


@cache  # to make the models takes longest
def _read(*words: str) -> Models:
    problems = Problems()
    models = read_models(parse_step_args(PlanArguments, words, problems=problems), problems)
    assert not problems.messages, problems.messages
    return models


def make_run(words: tuple[str, ...], flags: tuple[str, ...]) -> Run:
    """Return the run of these flags; `words` are those that choose the models."""
    problems = Problems()
    args = parse_step_args(PlanArguments, [*words, *flags], problems=problems)
    run = build_run(args, _read(*words), problems)
    assert run, problems.messages
    return run


def single(model: str, *flags: str) -> Run:
    """Return a run of step 1."""
    return make_run(("--stage", "1", "--model_name_or_path", model), flags)


def ppo(actor: str, critic: str, *flags: str) -> Run:
    """Return a run of step 3, without a critic that of RLOO."""
    critic_words = ("--critic_model_name_or_path", critic) if critic else ("--algorithm", "rloo")
    return make_run(("--stage", "3", "--actor_model_name_or_path", actor, *critic_words), flags)


def with_zero(folder: Path, **keys: float) -> tuple[str, str]:
    """Return the flag that sets these keys of ZeRO."""
    (folder / "ds.json").write_text(json.dumps({"zero_optimization": keys}))
    return "--ds_config", str(folder / "ds.json")


def items(plan: MemoryPlan, phase: str, verb: str) -> dict[str, float]:
    """Return the bytes on a device by item, of all roles together or of the only one."""
    (moment,) = (m for m in plan.moments if m.phase == phase and m.verb == verb)
    return {item: num_bytes for (_, item), num_bytes in moment.gpu.items()}
