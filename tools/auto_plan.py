"""The flags of --auto: those with which a run fits its machines and is fastest by the plan of its seconds.

Flags that are given stay, and so do the rows of an optimizer step. Flags are compared in combinations: the
fastest of those that leave MARGIN of a device's memory. 4 bits change the results, so they are tried only if
nothing else fits.
"""

import itertools
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from typing import Any, NamedTuple

from common.data.micro_batches import CPU_PASS_TOKENS
from common.flags.args import Problems
from common.flags.groups import AUTO_FLAGS
from common.generation.tp_plans import working_tp_sizes
from common.runs.durable_files import read_if_whole
from common.runs.resume import find_run
from common.runs.run_files import RUN_FILE
from tools.machines import Machines
from tools.memory_plan import MemoryPlan
from tools.planned_run import Run, build_run
from tools.time_plan import plan_times, step_seconds

MARGIN = 0.05  # of a device's memory: peaks are planned within a tenth of those that runs reach
LEAST_GAIN = 0.01  # share of a step that a flag must save to be set
GPU_PASS_TOKENS = 2**16  # larger passes save nothing
GPUS_OF_MACHINE, MOST_RANKS = 8, 64  # of clusters that are suggested
IN_4BIT = {"load_in_4bit": True}

Flags = dict[str, Any]


class Choice(NamedTuple):
    """Flags to set, the run with them, the bytes that it lacks (0 if it fits), the seconds of its step."""

    flags: Flags
    run: Run
    lacking: float
    seconds: float

    @property
    def cost(self) -> float:
        """Seconds, and a little for each flag."""
        return self.seconds * (1 + LEAST_GAIN * len(self.flags))


def choose(run: Run, machines: Machines, given: Set[str]) -> Choice:
    """The fastest combination of the flags that are not `given`; the one that lacks least if none fits."""
    kept = kept_flags(run, given)
    if kept and (choice := rate(run, machines, kept)):
        return choice
    choice = search(run, machines, given, {})
    assert choice is not None  # the flags as they are
    if choice.lacking and has_adapters(run) and "load_in_4bit" not in given:
        return search(run, machines, given, IN_4BIT) or choice
    return choice


def suggest(run: Run, machines: Machines, given: Set[str]) -> Choice | None:
    """The fastest change with which a run fits; None if there is none.

    Flags that are not `given` change before those that are. In step 3 the hybrid engine, which has slots, and
    smaller scoring passes are next. What changes the results comes last: 16 bits in place of a GPU's fp32,
    adapters in place of all weights, 4 bits under adapters.
    """
    attempts: list[tuple[Set[str], Flags]] = [(given, {}), (set(), {})]
    others: Flags = {}
    if run.actor:
        others = {"enable_hybrid_engine": True, "max_tokens_per_scoring_pass": 0}
        attempts.append((set(), others))
    if run.args.dtype == "fp32" and not run.is_cpu:
        others = others | {"dtype": "fp16"}
        attempts.append((set(), others))
    if not has_adapters(run):
        others = others | {f"{prefix}lora_dim": 64 for prefix in run.args.roles()}
        attempts.append((set(), others))
    attempts.append((set(), others | IN_4BIT))
    choices = (search(run, machines, kept, fixed) for kept, fixed in attempts)
    return next((choice for choice in choices if choice and MemoryPlan(choice.run).fits), None)


def has_adapters(run: Run) -> bool:
    """Whether a model is trained by adapters."""
    return any(flags.lora_dim for flags in run.args.roles().values())


def kept_flags(run: Run, given: Set[str]) -> Flags:
    """The flags that --auto chose for the run to be resumed, if it had as many ranks; {} if there is none."""
    earlier = find_run(run.args, Problems())
    if not earlier.checkpoints:
        return {}
    folder, saved = earlier.checkpoints[0].folder, earlier.checkpoints[0].meta["args"]
    starts = read_if_whole(folder.parents[1] / RUN_FILE, starts=list).get("starts") or [{}]
    is_same = saved.get("auto") and starts[-1].get("world_size") == run.num_ranks
    return {name: saved[name] for name in AUTO_FLAGS if name in saved.keys() - given} if is_same else {}


def rate(run: Run, machines: Machines, flags: Mapping[str, Any]) -> Choice | None:
    """The run with these flags; None if they exclude each other."""
    changes = {name: value for name, value in flags.items() if value != getattr(run.args, name)}
    changed = build_run(replace(run.args, **changes), run.models, Problems())
    if changed is None:
        return None
    memory = MemoryPlan(changed)
    lacking = memory.lacking + max(MARGIN * changed.memory_bytes - max(memory.left, 0.0), 0.0)
    return Choice(changes, changed, lacking, step_seconds(plan_times(changed, machines).values()))


def search(run: Run, machines: Machines, given: Set[str], fixed: Flags) -> Choice | None:
    """The fastest combination that fits, with the flags `fixed`, of those that are not `given`; the one that
    lacks least if none fits, None if all exclude each other.

    Placements are tried in the order of their seconds with the largest passes, which smaller ones do not
    undercut.
    """
    base = rate(run, machines, fixed)
    if base is None:
        return None
    free = {name for name in AUTO_FLAGS if hasattr(run.args, name)} - given
    sizes = combine([passes(base.run), slots(base.run)], free)
    placed = [{**placement, **fixed} for placement in combine(placements(base.run), free)]
    largest = [(rate(run, machines, placement | sizes[0]), placement) for placement in placed]
    bounds = [(choice.seconds, placement) for choice, placement in largest if choice]
    fitting: list[Choice] = []
    others: list[Choice] = []
    for seconds, placement in sorted(bounds, key=lambda pair: pair[0]):
        if any(choice.cost <= seconds for choice in fitting):
            break
        smallest = rate(run, machines, placement | sizes[-1])
        if smallest and smallest.lacking:
            others.append(smallest)
        elif smallest:
            rated = [rate(run, machines, placement | size) for size in sizes]
            fitting += [choice for choice in rated if choice and not choice.lacking]
    if fitting:
        return min(fitting, key=lambda choice: choice.cost)
    return min(others, key=lambda choice: choice.lacking, default=None)


def combine(options: Iterable[Iterable[Flags]], free: Set[str]) -> list[Flags]:
    """Every combination of one item of each option, the first items first, without flags that are given."""
    combined: list[Flags] = []
    for flags in itertools.product(*options):
        merged = {name: value for part in flags for name, value in part.items() if name in free}
        if merged not in combined:
            combined.append(merged)
    return combined


def placements(run: Run) -> list[list[Flags]]:
    """Options of where weights and states are, of what is recomputed, and of the ranks of a replica."""
    args = run.args
    prefixes = list(args.roles())
    options = [
        [{f"{prefix}zero_stage": stage for prefix in prefixes} for stage in range(4)],
        [{f"{prefix}gradient_checkpointing": value for prefix in prefixes} for value in (False, True)],
    ]
    if not run.is_cpu:
        options.append([{"offload": value} for value in ("none", "optimizer", "all")])
    if run.actor and not run.is_cpu:
        frozen = ("offload_reference_model", "offload_reward_model")
        options.append([dict.fromkeys(frozen, value) for value in (False, True)])
    if run.actor and args.enable_hybrid_engine:
        options.append([{"release_inference_cache": value} for value in (False, True)])
        of_model = working_tp_sizes(run.actor.model.plain)
        fitting = [size for size in of_model if args.num_gpus % size == 0]
        options.append([{"inference_tp_size": size} for size in fitting])
    return options


def passes(run: Run) -> list[Flags]:
    """Options of the tokens of a pass, from those of an optimizer step to a single row."""
    most = CPU_PASS_TOKENS if run.is_cpu else GPU_PASS_TOKENS
    size = min(max(most, run.row_length), run.sequences_per_update * run.length)
    sizes = halved(size, run.row_length)
    options: list[Flags] = [{"max_tokens_per_micro_batch": size} for size in sizes]
    return [*options[:1], {}, *options[1:]]


def slots(run: Run) -> list[Flags]:
    """Options of the sequences that a replica of any size generates at a time, from all to one."""
    if not (run.actor and run.args.enable_hybrid_engine):
        return [{}]
    args = run.args
    most = args.per_device_generation_batch_size * args.num_samples_per_prompt * args.num_gpus
    options: list[Flags] = [{"generation_slots": size} for size in halved(most, 1)]
    return [*options[:1], {}, *options[1:]]


def halved(largest: int, smallest: int) -> list[int]:
    """`largest`, its halves, rounded down, and `smallest`."""
    sizes = [largest]
    while sizes[-1] // 2 > smallest:
        sizes.append(sizes[-1] // 2)
    return [*sizes, smallest] if smallest < largest else sizes


def as_flags(flags: Mapping[str, Any]) -> str:
    """Flags as on a command line."""
    words = [f"--{name}" if value is True else f"--{name} {value}" for name, value in flags.items()]
    return " ".join(words)


def describe(choice: Choice) -> str:
    """What was chosen, as flags."""
    text = as_flags(choice.flags) or "no flag"
    if not MemoryPlan(choice.run).fits:
        return f"--auto: nothing fits; {text} lacks least"
    return f"--auto sets {text}" + f", and leaves less than {MARGIN:.0%} of the memory" * bool(choice.lacking)


def with_more_gpus(run: Run, machines: Machines) -> Choice | None:
    """The fastest change on as few such GPUs as fit the run, twice as many each time; None if MOST_RANKS are
    too few.
    """
    num_ranks = 2 * run.num_ranks
    while num_ranks <= MOST_RANKS:
        num_gpus = min(num_ranks, GPUS_OF_MACHINE)
        args = replace(run.args, num_gpus=num_gpus, num_nodes=num_ranks // num_gpus)
        larger = build_run(args, run.models, Problems())
        choice = search(larger, machines, set(), {}) if larger else None
        if choice and not choice.lacking:
            return choice
        num_ranks *= 2
    return None
