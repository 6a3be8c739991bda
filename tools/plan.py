"""Plans whether a run fits its machines, which flags to change if not, and what each rank receives.

    python -m tools.plan --stage 3 --actor_model_name_or_path SFT --critic_model_name_or_path REWARD \
        --actor_zero_stage 3 --enable_hybrid_engine --gpu a100-80g --num_gpus 8

    python -m tools.plan --run OUTPUT_DIR

The flags are those of the step and of the machines; --run plans for those of a run, and prints what it has
reached beside. Nothing is loaded and no GPU is needed: the figures are computed from the models'
configurations (`memory_plan.py`, `traffic_plan.py`). The exit code is 1 if the run does not fit. run.sh,
train.py and the steps' programs call it with --gpu here before a step starts: then the exit code is 2 if the
run does not fit, and 0 after a one-line note if it cannot be planned.
"""

import contextlib
import json
import sys
from collections.abc import Sequence, Set
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from common.flags.args import Problems, begin_tool
from tools.step_flags import STEP_NAMES, THIS_MACHINE, PlanArguments, parse_step_args

if __name__ == "__main__":
    begin_tool(PlanArguments, __doc__, parse_step_args)

import psutil
import torch

from common.flags.streams import run_tool
from common.programs import startup
from common.ranks import distributed
from common.ranks.devices import kind_of
from common.ranks.failures import first_line
from common.runs.durable_files import read_if_whole, write_file
from common.runs.run_files import PLAN_FILE
from tools.auto_plan import as_flags, choose, describe, has_adapters, suggest, with_more_gpus
from tools.machines import CARDS, CPU, Machines, machines_of_kind
from tools.measured_machine import file_of_measures, machines_here, measure_machine, read_measures
from tools.memory_plan import TRAINING, Holdings, MemoryPlan, reserved_gib
from tools.plan_of_run import read_planned_run
from tools.planned_run import Run, build_run, read_models, read_run
from tools.report.planned import compare_run
from tools.time_plan import ACCURACY, describe_lengths, hours_of_run, plan_times, step_seconds
from tools.traffic_plan import is_recomputed, plan_traffic

CGROUP = Path("/sys/fs/cgroup")  # a container's limits, and what it uses


def main(argv: Sequence[str] | None = None) -> None:
    """Check the flags, plan, print; exit code 1 if the run does not fit, 2 for invalid flags."""
    startup.quiet_libraries()
    problems = Problems()
    args = parse_step_args(PlanArguments, argv, description=__doc__.splitlines()[0], problems=problems)
    if args.measure:
        measure()
    files = None
    if args.run:
        args, files = read_planned_run(args, problems)
    if not args.stage:
        return None
    if args.gpu == THIS_MACHINE:
        return plan_start(args, problems)
    run, flags, chosen = choose_flags(read_run(args, problems), problems, is_wanted=args.auto)
    memory = MemoryPlan(run)
    facts = plan_facts(run, memory, flags)
    if files:
        facts["flags"] = read_if_whole(files.folder / PLAN_FILE, flags=dict).get("flags", {})
        write_plan(args.json or files.folder / PLAN_FILE, facts)
        lines = [*head_lines(run), "", *grid(compare_run(facts, files.curves))]
        threads = files.starts[-1].get("threads")
        lines += [f"planned for {facts['lengths']}, with the rates of: {facts['source']}"]
        lines += [f"reached in {files.last_step} steps, but for the first; threads per rank: {threads}"]
        print("\n".join(lines))
        return None
    write_plan(args.json, facts)
    sections = [chosen, head_lines(run), memory_lines(run, memory)]
    sections += [verdict_lines(run, memory, problems.given), time_lines(run)]
    sections += [traffic_lines(run), assumption_lines(run)]
    print("\n\n".join("\n".join(lines) for lines in sections if lines))
    sys.stdout.flush()
    if not memory.fits:
        raise SystemExit(1)


def plan_start(args: Any, problems: Problems) -> None:
    """Print the plan of a step on this machine's GPUs; exit with 2 if the step does not fit.

    Nothing else prevents a start: the step itself reports invalid flags better.
    """
    try:
        uses_cpu = args.auto and not distributed.has_gpu()
        args = with_own_cpu(args) if uses_cpu else with_own_gpu(args)
        models = read_models(args, problems)
        run = None if problems.messages else build_run(args, models, problems)
        if run is None:
            raise ValueError(problems.messages[0])
        run, flags, chosen = choose_flags(run, problems, is_wanted=args.auto)
        memory = MemoryPlan(run)
        lines = [*chosen, *head_lines(run)[:1], *memory_lines(run, memory), ""]
        lines += [*verdict_lines(run, memory, problems.given), "", *time_lines(run)]
        write_plan(args.json, plan_facts(run, memory, flags))
    except Exception as error:  # any error of a model's code or a driver; a step can start without a plan
        print(f"no memory plan: {first_line(error)}", flush=True)
        return
    print("\n".join(lines), flush=True)
    if not memory.fits:
        cure = "apply the change, or start anyway with NO_PLAN=1, or --no_plan of train.py"
        if args.auto:
            cure = "apply the change, or leave out --auto"
        print(f"error: step {args.stage} was not started; {cure}", file=sys.stderr)
        raise SystemExit(2)


def with_own_gpu(args: Any) -> Any:
    """The flags with this machine's memory, and the name and precision of its fullest GPU.

    Raises ValueError if torch sees none.
    """
    if not distributed.has_gpu():
        raise ValueError("torch sees no GPU")
    indices = range(min(torch.cuda.device_count(), args.num_gpus))
    num_bytes, fullest = min((free_bytes(index), index) for index in indices)
    return replace(
        args,
        gpu=torch.cuda.get_device_properties(fullest).name,
        gpu_memory_gib=args.gpu_memory_gib or num_bytes / 2**30,
        cpu_memory_gib=args.cpu_memory_gib or available_cpu_bytes() / 2**30,
        dtype=distributed.dtype_name(args.dtype),
    )


def with_own_cpu(args: Any) -> Any:
    """The flags with this machine's CPUs, and a rank's share of the memory that is available."""
    share = available_cpu_bytes() / args.num_gpus / 2**30
    return replace(args, gpu="cpu", gpu_memory_gib=args.gpu_memory_gib or share)


def choose_flags(run: Run, problems: Problems, *, is_wanted: bool) -> tuple[Run, dict[str, Any], list[str]]:
    """The run with the flags that --auto chooses, these, and lines that name them; without --auto the run."""
    if not is_wanted:
        return run, {}, []
    choice = choose(run, rates_of(run), problems.given)
    return choice.run, choice.flags, [describe(choice)]


def free_bytes(index: int) -> int:
    """Memory of a GPU without what other programs hold; a GiB counts as this run's: its ranks start."""
    free, total = torch.cuda.mem_get_info(index)
    return min(free + 2**30, total)


def available_cpu_bytes() -> int:
    """CPU memory that new processes can use, within the limit of a container."""
    available = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # no limit, or none of this kind
        limit, used = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        available = min(available, limit - used)
    return available


def plan_facts(run: Run, memory: MemoryPlan, flags: dict[str, Any]) -> dict[str, Any]:
    """Content of plan.json: flags that --auto has chosen, seconds and memory peaks by phase, where the rates
    come from, the lengths of the rows that the seconds are of.

    Memory is what perf/peak_memory_gib counts: that of tensors on a GPU, a whole process on a CPU.
    """
    machines, source = find_machines(run)
    times = plan_times(run, machines) if machines else {}
    outside = reserved_gib(run) * (not run.is_cpu)
    peaks = {moment.phase: memory.of_phase(moment.phase).total / 2**30 - outside for moment in memory.moments}
    return {
        "flags": flags,
        "seconds": {phase: time.seconds for phase, time in times.items() if time.seconds},
        "memory_gib": peaks,
        "source": source,
        "lengths": describe_lengths(run),
    }


def write_plan(path: str | Path, facts: dict[str, Any]) -> None:
    """Write the content of plan.json; a failure is a note. "": write nothing."""
    if path:
        try:
            write_file(Path(path), json.dumps(facts, indent=1) + "\n")
        except OSError as error:  # the plan is printed, and a run can start without the file
            print(f"note: {path} cannot be written ({error.strerror})", file=sys.stderr)


# ---- printing -------------------------------------------------------------------------------------------


def grid(rows: Sequence[Sequence[str]], num_left: int = 1) -> list[str]:
    """The rows as lines with aligned columns, the first `num_left` columns left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    formats = [f"{{:{'<' if i < num_left else '>'}{width}}}" for i, width in enumerate(widths)]
    return ["  ".join(formats).format(*row).rstrip() for row in rows]


def gib(num_bytes: float) -> str:
    """Bytes in GiB, a dash for none."""
    return f"{num_bytes / 2**30:.2f}" if num_bytes else "-"


def head_lines(run: Run) -> list[str]:
    """Step, machines and models of the plan."""
    args = run.args
    rows = [["role", "family", "parameters, M", "trained, M", "ZeRO"]]
    for role in run.roles:
        model = role.model
        family = model.plain.config.model_type + (", adapters off" if role.spec.uses_actor else "")
        family += ", base shared" if role.num_shared and not role.spec.uses_actor else ""
        trained = f"{model.num_trained / 1e6:,.1f}" if role.spec.is_trained else "-"
        stage = str(role.zero.stage) if role.spec.is_trained or role.is_sharded else "-"
        rows.append([role.name, family, f"{model.num_params / 1e6:,.1f}", trained, stage])
    step = STEP_NAMES[args.stage]
    if args.stage == 2 and args.kind != "reward":
        step = f"step 2, {args.loss.upper()}"
    machines = f"{args.num_nodes} machines of " if args.num_nodes > 1 else ""
    return [f"{step}, on {machines}{args.num_gpus} x {args.gpu}, {args.dtype}", "", *grid(rows, num_left=2)]


def memory_lines(run: Run, memory: MemoryPlan) -> list[str]:
    """Memory of a rank in each phase, and on its CPU."""
    moments = [memory.of_phase(phase) for phase in dict.fromkeys(m.phase for m in memory.moments)]
    rows = [
        [f"{'' if run.is_cpu else 'GPU '}memory of a rank, GiB", "", *(m.phase.split()[0] for m in moments)],
        ["", "", *(m.role for m in moments)],
        ["", "", *(m.verb if m.verb in TRAINING else "" for m in moments)],
        *item_rows([m.gpu for m in moments]),
        ["total", "", *(gib(m.total) for m in moments)],
        [f"left of {run.memory_bytes / 2**30:g}", "", *(gib(run.memory_bytes - m.total) for m in moments)],
    ]
    on_cpu = item_rows([m.cpu for m in moments])
    if on_cpu:
        totals = [gib(sum(m.cpu.values()) * run.args.num_gpus) for m in moments]
        blank = [""] * (len(moments) + 1)
        rows += [["CPU memory of a rank, GiB", *blank], *on_cpu, ["all ranks of a machine", "", *totals]]
    loading = gib(memory.loading)
    return [*grid(rows, num_left=2), f"loading needs up to {loading} GiB of a machine's CPU memory"]


def item_rows(columns: Sequence[Holdings]) -> list[list[str]]:
    """A row for each role's item that is not negligible."""
    keys = dict.fromkeys(key for column in columns for key in column)
    roles = list(dict.fromkeys(role for role, _ in keys))
    rows = []
    for role, item in sorted(keys, key=lambda key: roles.index(key[0])):
        cells = [gib(column.get((role, item), 0.0)) for column in columns]
        if any(cell not in ("-", "0.00") for cell in cells):
            rows.append([role, item, *cells])
    return rows


def verdict_lines(run: Run, memory: MemoryPlan, given: Set[str]) -> list[str]:
    """Whether the run fits, and changes that would make it fit."""
    peak = memory.peak
    phase = f"{peak.phase}, {peak.verb}" if peak.verb in TRAINING else f"{peak.phase} {peak.role}".strip()
    if memory.fits:
        return [f"fits: at the peak, {phase}, {gib(memory.left)} GiB are left"]
    if memory.left < 0:
        verdict = f"does not fit: {phase} needs {gib(peak.total)} GiB, {gib(-memory.left)} too many"
    else:
        needed = max(memory.cpu_peak, memory.loading)
        available = run.args.cpu_memory_gib
        verdict = f"does not fit: a machine needs {gib(needed)} GiB of CPU memory, and has {available:.2f}"
    machines = rates_of(run)
    choice = suggest(run, machines, given)
    if choice is None:
        cure = "use more GPUs or a smaller model"
        if not run.is_cpu and (larger := with_more_gpus(run, machines)):
            cure = f"use {larger.run.num_ranks} such GPUs with {as_flags(larger.flags)}, or a smaller model"
        return [verdict, f"no combination of flags makes it fit: {cure}"]
    left = MemoryPlan(choice.run).left
    lines = [verdict, f"change: {as_flags(choice.flags)}"]
    lines.append(f"        leaves {gib(left)} GiB; a step takes about {choice.seconds:.3g} s")
    if has_adapters(choice.run) and not has_adapters(run):
        lines.append("        trains adapters only: different results")
    return lines


def rates_of(run: Run) -> Machines:
    """The machines of a run; similar ones if their rates are not known, which are good enough to compare
    flags.
    """
    machines, _ = find_machines(run)
    return machines or (CPU if run.is_cpu else CARDS["a10-24g"])


def find_machines(run: Run) -> tuple[Machines | None, str]:
    """The machines of a run and where their rates come from; None with the reason if they are not known.

    A GPU without a measurement has those of its kind.
    """
    args = run.args
    machines = machines_of_kind(kind_of(args.gpu) or args.gpu, args.dtype)
    sheets = "data sheets, and the shares of them that others reach (tools/machines.py)"
    if args.gpu in CARDS:
        return machines, sheets
    measured, reason = read_measures(args.gpu, args.num_gpus)
    if measured:
        source = f"this machine as measured on {measured['date']}, threads per rank: {measured['threads']}"
        return machines_here(measured, args.dtype), source
    if machines:
        reason = f"{sheets}; {reason}"
    return machines, reason


def time_lines(run: Run) -> list[str]:
    """Estimated seconds of each phase and of a step, and the hours of a run whose rows are known."""
    machines, source = find_machines(run)
    if machines is None:
        return [f"no seconds: {source}"]
    times = plan_times(run, machines)
    step = step_seconds(times.values())
    rows = [[name, f"{time.seconds:.3g}", time.bound] for name, time in times.items() if time.seconds]
    lines = grid([["estimated seconds of a step", "", "mostly"], *rows, ["step", f"{step:.3g}", ""]])
    if hours := hours_of_run(run, step):
        lines.append(f"the run takes {hours:.3g} hours, without evaluation and saving")
    return [*lines, f"rates: {source}", f"an estimate: {ACCURACY}"]


def measure() -> None:
    """Measure this machine for later plans, and print its rates. Exits with 1 if they cannot be written."""
    startup.keep_freed_memory()  # as the steps do
    distributed.start()
    is_main = distributed.is_main()
    distributed.print_once("measuring this machine: at most a minute")
    try:
        measured = measure_machine()
    except OSError as error:
        raise SystemExit(f"error: the rates were not written: {error}") from error
    finally:
        distributed.stop()
    if is_main:
        text = json.dumps(measured, indent=1)
        print(f"{text}\nwritten to {file_of_measures()}: plans with --gpu here or cpu read it", flush=True)


def traffic_lines(run: Run) -> list[str]:
    """Bytes that a rank receives in each phase of a step."""
    rows = [["received per rank and step, GiB", "in the machine", "from others", "from and to the CPU"]]
    rows += [[name, *map(gib, asdict(phase).values())] for name, phase in plan_traffic(run).items()]
    return grid(rows)


def assumption_lines(run: Run) -> list[str]:
    """Assumptions of the figures."""
    args = run.args
    cpu = f"{args.cpu_memory_gib:g} GiB" if args.cpu_memory_gib else "not known, so not checked"
    lines = [
        f"CPU memory {cpu}; the family's attention in transformers, without flash-attn",
        f"memory and bytes are of full sequences, {run.length} tokens; a pass has {run.tokens_per_pass:,} "
        f"tokens, one without gradients {run.tokens_per_score:,}; passes per optimizer step: "
        f"{run.num_micro_batches}",
        f"seconds are of {describe_lengths(run)}",
    ]
    if run.actor:
        source = "are recomputed" if is_recomputed(run) else "are the sampler's"
        weights = "gathered layer by layer" if run.gathers_by_layer else f"by replicas of {run.tp_size}"
        lines += [
            f"generation {weights}: {run.num_slots} sequences at a time, slots of {run.length} tokens",
            f"log-probabilities at rollout {source} (--old_logprobs {args.old_logprobs})",
            "no unsupervised text, no evaluation, no rewards other than models",
        ]
    return ["assumed", *(f"  {line}" for line in lines)]


if __name__ == "__main__":
    run_tool(main)
