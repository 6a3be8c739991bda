"""The flags of the plan of a run in a folder: its own, its machine, and the mean lengths of its rows."""

import dataclasses
from pathlib import Path
from statistics import fmean
from typing import Any

from common.flags.args import Problems, default_of, typed
from common.flags.other_names import rename_flags
from common.ranks.devices import kind_of
from common.runs.resume import program_of
from tools.report.run_reader import RunFiles, read_run
from tools.step_flags import MEAN_LENGTHS, STEPS, PlanArguments, with_step_flags

TAKEN = ("stage", "run", "json", "measure", "num_nodes")  # flags of the plan that --run can have beside it
OF_START = {"device", "world_size", "global_rows", "dtype", "data"}


def read_planned_run(given: PlanArguments, problems: Problems) -> tuple[Any, RunFiles]:
    """The flags of the plan for --run, and the run's files; exits with the problems if there are any."""
    for field in dataclasses.fields(PlanArguments):
        is_given = field.name not in TAKEN and getattr(given, field.name) != default_of(field)
        problems.add_if(is_given, f"--{field.name} has no effect with --run: leave it out")
    try:
        files = read_run(Path(given.run))
    except (ValueError, OSError) as error:
        problems.add(f"--run {error}")
        problems.exit_if_any()
    start = [{}, *files.starts][-1]
    is_whole = files.flags and start.keys() >= OF_START and "perf/step_seconds" in files.curves
    causes = "; ".join(files.notes) or "an earlier version wrote it"
    problems.add_if(
        not is_whole, f"--run {given.run}: {causes}; wait for a step, or plan with --stage and flags"
    )
    num_gpus, rest = divmod(start.get("world_size", 0), given.num_nodes)
    problems.add_if(
        rest, f"--num_nodes {given.num_nodes} does not divide the {start.get('world_size')} ranks"
    )
    problems.exit_if_any()
    stage = int(program_of(files.flags)[len("step")])
    saved = rename_flags(files.flags, STEPS[stage].__dataclass_fields__)
    flags = {f.name: typed(f, saved[f.name]) for f in dataclasses.fields(STEPS[stage]) if f.name in saved}
    gpu = "cpu" if kind_of(start["device"]) == "cpu" else start["device"]
    flags |= {"stage": stage, "dtype": start["dtype"], "gpu": gpu, "gpu_memory_gib": float("inf")}  # it fits
    flags |= {"num_gpus": num_gpus, "auto": False}  # its flags are chosen
    args = with_step_flags(PlanArguments, stage)(**vars(given) | flags)
    return dataclasses.replace(args, **mean_lengths(args, files)), files


def mean_lengths(args: Any, files: RunFiles) -> dict[str, float]:
    """Mean lengths of the rows of a run's steps, as flags of the plan."""
    start = files.starts[-1]
    values = {name: curve.values for name, curve in files.curves.items()}
    if args.stage == 3:
        data = start["data"]
        prompt = data["num_tokens"] / (data["num_train"] + data["num_eval"])
        answer = fmean(values["rollout/response_tokens"])
        means = {"mean_prompt_seq_len": prompt, "mean_answer_seq_len": answer}
    else:
        pairs = zip(values["perf/tokens_per_second"], values["perf/step_seconds"], strict=True)
        num_sequences = start["global_rows"] * (1 + (args.stage == 2 and not args.is_unpaired))
        means = {"mean_seq_len": fmean(speed * seconds for speed, seconds in pairs) / num_sequences}
    return {name: min(mean, getattr(args, MEAN_LENGTHS[name])) for name, mean in means.items()}
