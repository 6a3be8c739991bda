"""Checks a run: makes steps of it again and compares every phase, or finds where two runs part.

    python -m tools.replay RUN --step 137 [--until 140] [--num_ranks 1] [-- FLAGS]
    python -m tools.replay RUN OTHER_RUN

RUN is an --output_dir with digests.jsonl.gz, which the run wrote. The steps are made again from the newest
checkpoint before them, or from the start, in a temporary folder; nothing in RUN changes. On as many ranks as
before, bits are compared; on other ranks, or with FLAGS of the program that change how it computes, such as
--zero_stage 2, numbers within BOUNDS. The exit code is 0 if all is equal, 1 if not, 2 if it cannot be known.
"""

import contextlib
import gzip
import json
import math
import operator
import os
import sys
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from common.flags.args import Problems, begin_tool, flag, parse_args
from common.flags.streams import run_tool


@dataclass
class ReplayArguments:
    """Runs and steps; flags of the program may follow after --."""

    run_dir: list[str] = flag([], "--output_dir of one or two runs; may be given first, without --run_dir")
    step: int = flag(0, "step to make again, from 1", low=0)
    until: int = flag(0, "last step to make again; 0: --step", low=0)
    num_ranks: int = flag(0, "ranks to make the steps on; 0: as many as before", low=0)


def parse(cls: type, argv: Sequence[str] | None = None, **options: Any) -> ReplayArguments:
    """The arguments before --."""
    words = [*(sys.argv[1:] if argv is None else argv), "--"]
    return parse_args(cls, words[: words.index("--")], leading="run_dir", **options)


if __name__ == "__main__":
    begin_tool(ReplayArguments, __doc__, parse)

import psutil
import yaml

from common.runs.checkpoints import checkpoint_order, find_checkpoints
from common.runs.digest_log import NO_BITS
from common.runs.durable_files import read_if_whole, read_object
from common.runs.resume import NOT_WORTH_A_NOTE, program_of
from common.runs.run_files import ARGS_FILE, CONFIG_FILE, DIGESTS, RUN_FILE

ROOT = Path(__file__).resolve().parents[1]
# Largest relative difference on other ranks, by dtype: they add up in another order.
BOUNDS = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 1e-2}
LEAST = 1e-2  # numbers below it are compared as if they were as large
# Numbers of a rank's batches, and their sizes in rows.
BATCHES = {
    "gradient_accumulation_steps": ("per_device_train_batch_size", "per_device_training_batch_size"),
    "generation_batches": ("per_device_generation_batch_size",),
}
MAX_SHOWN = 6
SCRATCH_FLAGS = ("output_dir", "resume", "trackers", "tensorboard_path", "save_interval", "digest_interval")
START_FACTS = ("world_size", "device", "threads", "dtype", "data_key", "models", "code")
POLL_SECONDS = 0.2


class Value(NamedTuple):
    """Digest of a tensor, or a number: `bits` is then NO_BITS."""

    bits: str
    total: float | None


Phases = dict[str, dict[str, Value]]  # phase -> tensor -> digest, in the order of the step


def read_digests(folder: Path) -> dict[int, list[Phases]]:
    """Phases by step and rank. Raises ValueError if the folder has no digests, or a line is damaged."""
    path = folder / DIGESTS
    names: dict[str, list[str]] = {}
    steps = {}
    try:
        # The last line is torn if the run was killed, or still writes.
        with contextlib.suppress(EOFError), gzip.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                row = json.loads(line)
                for own_names, _ in row["ranks"]:
                    names |= own_names
                steps[row["step"]] = [_unpack(phases, names) for _, phases in row["ranks"]]
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror or error}); a run writes it unless --digest_interval is "
            "0; an earlier version's digests.jsonl is not read"
        ) from error
    except (KeyError, TypeError, ValueError, zlib.error) as error:
        raise ValueError(f"{path}, line {len(steps) + 1} is damaged: {error}") from error
    if not steps:
        raise ValueError(f"{path} has no step yet")
    return steps


def _unpack(phases: dict[str, Any], names: dict[str, list[str]]) -> Phases:
    unpacked = {}
    width = len(NO_BITS)
    for phase, (key, text, totals) in phases.items():
        bits = [text[first : first + width] for first in range(0, len(text), width)]
        unpacked[phase] = dict(zip(names[key], map(Value, bits, totals), strict=True))
    return unpacked


def find_difference(before: list[Phases], now: list[Phases], bound: float | None) -> list[str]:
    """Lines about the first phase that differs, [] if none does: bit by bit, or with a bound in numbers."""
    if bound is not None:
        before, now = [merge_ranks(before)], [merge_ranks(now)]
    if len(before) != len(now):
        return [f"the number of ranks: {len(before)}, then {len(now)}"]
    for phase in dict.fromkeys(phase for ranks in (before, now) for rank in ranks for phase in rank):
        lines = [
            f"  {f'rank {rank}, ' * (len(before) > 1)}{text}"
            for rank, (one, other) in enumerate(zip(before, now, strict=True))
            for text in _differing(one.get(phase, {}), other.get(phase, {}), bound)
        ]
        if lines:
            more = [f"  and {len(lines) - MAX_SHOWN} more"] * (len(lines) > MAX_SHOWN)
            return [f"{phase} differs:", *lines[:MAX_SHOWN], *more]
    return []


def _differing(one: dict[str, Value], other: dict[str, Value], bound: float | None) -> Iterator[str]:
    """Yield a text for each tensor of a phase that differs."""
    for name in dict.fromkeys((*one, *other)):
        if name not in one or name not in other:
            yield f"{name}: only the {'first' if name in one else 'second'} has it"
        elif text := _describe(one[name], other[name], bound):
            yield f"{name}: {text}"


def _describe(a: Value, b: Value, bound: float | None) -> str:
    """The difference of two values; "" if they are equal, or within the bound."""
    if a == b:
        return ""
    if a.total is None or b.total is None:
        return "other bits"
    if a.total == b.total:
        return "other bits, the same total"
    difference = abs(a.total - b.total)
    largest = max(abs(a.total), abs(b.total))
    is_exact = bound == BOUNDS["fp32"] and isinstance(a.total, int) and isinstance(b.total, int)
    if bound is not None and not is_exact and difference <= bound * max(largest, LEAST):
        return ""
    return f"{a.total:.9g} against {b.total:.9g}, {difference / largest:.1e} of it"


def merge_ranks(ranks: list[Phases]) -> Phases:
    """The numbers that do not depend on how ranks share the work: norms and sums over all ranks."""
    merged: Phases = defaultdict(dict)
    values = ((phase, item) for rank in ranks for phase, values in rank.items() for item in values.items())
    for phase, (name, (bits, total)) in values:
        if total is None or phase == "state of random":
            continue
        name = name.partition("@")[0]  # of a slice
        if name in merged[phase] and bits != NO_BITS:
            add = {int: operator.add}.get(type(total), math.hypot)
            total = add(merged[phase][name].total, total)
        merged[phase][name] = Value(NO_BITS, total)
    return merged


def compare(
    folders: tuple[Path, Path],
    before: dict[int, list[Phases]],
    now: dict[int, list[Phases]],
    steps: Sequence[int],
    *,
    is_exact: bool,
) -> int:
    """Print whether the steps of two runs are equal, bit by bit or within BOUNDS, and what differs besides;
    return the exit code.
    """
    bound = None if is_exact else BOUNDS[start_of(folders[0], steps[0])["dtype"]]
    differing = ((step, find_difference(before[step], now[step], bound)) for step in steps)
    step, lines = next(((step, lines) for step, lines in differing if lines), (steps[-1], []))
    if lines:
        print(f"step {step}: {lines[0]}", *lines[1:], sep="\n")
    else:
        precision = "bit for bit" if is_exact else f"within {bound}"
        num_phases = sum(len(rank) for step in steps for rank in before[step])
        print(f"equal {precision}: steps {steps[0]} to {steps[-1]}, {num_phases} phases")
    besides = surroundings(*folders, steps[-1])
    if besides:
        print("besides:", *besides, sep="\n")
    return int(bool(lines))


# ---- what differs around the numbers --------------------------------------------------------------------


def start_of(folder: Path, step: int) -> dict[str, Any]:
    """What run.json has of the start that made a step. Raises ValueError if it is missing or torn."""
    starts = read_object(folder / RUN_FILE, starts=list).get("starts", [])
    earlier = [start for start in starts if start.get("from_step", 0) < step]
    if not earlier:
        raise ValueError(f"{folder / RUN_FILE} is missing, or has no start before step {step}")
    return earlier[-1]


def surroundings(first: Path, second: Path, step: int) -> list[str]:
    """Lines about what differs between two runs besides their numbers: flags, data, machine, versions."""
    flags = [read_if_whole(folder / ARGS_FILE) for folder in (first, second)]
    starts = [start_of(folder, step) for folder in (first, second)]
    facts = [{name: start.get(name) for name in START_FACTS} | start.get("versions", {}) for start in starts]
    return [
        f"  {kind}{name}: {one.get(name)} against {other.get(name)}"
        for kind, (one, other) in (("--", flags), ("", facts))
        for name in sorted({*one, *other} - NOT_WORTH_A_NOTE - {*SCRATCH_FLAGS})
        if one.get(name) != other.get(name)
    ]


# ---- making steps again ---------------------------------------------------------------------------------


def divide_rows(flags: dict[str, Any], recorded_ranks: int, num_ranks: int) -> dict[str, int]:
    """Flags of batches with which a step on `num_ranks` has as many rows as with `flags` on `recorded_ranks`:
    other numbers of batches, or other sizes if these cannot be divided. Raises ValueError if neither can.
    """
    divided = {}
    for batches in sorted(BATCHES.keys() & flags.keys()):
        sizes = [size for size in BATCHES[batches] if size in flags]
        fitting = [name for name in (batches, *sizes) if flags[name] * recorded_ranks % num_ranks == 0]
        if not fitting:
            values = " ".join(f"--{name} {flags[name]}" for name in (batches, *sizes))
            raise ValueError(f"{values} on {recorded_ranks} ranks cannot be divided among {num_ranks}")
        divided[fitting[0]] = flags[fitting[0]] * recorded_ranks // num_ranks
    return divided


def build_command(
    folder: Path, scratch: Path, step: int, ranks: tuple[int, int], flags: Sequence[str]
) -> list[str]:
    """Command that makes the steps from the newest checkpoint before `step` on, in `scratch`.

    `ranks`: their number in the run, and now. Raises ValueError.
    """
    recorded_ranks, num_ranks = ranks
    run_flags = read_object(folder / ARGS_FILE)
    checkpoints, _ = find_checkpoints(folder)
    earlier = [c for c in checkpoints if checkpoint_order(c.folder.name)[0] < step]
    config = yaml.safe_load((folder / CONFIG_FILE).read_text(encoding="utf-8")) or {}
    config = {name: value for name, value in config.items() if name not in SCRATCH_FLAGS}
    config |= divide_rows(run_flags, recorded_ranks, num_ranks)
    (scratch / CONFIG_FILE).write_text(yaml.safe_dump(config), encoding="utf-8")
    program = [str(ROOT / program_of(run_flags)), "--config", str(scratch / CONFIG_FILE)]
    program += ["--output_dir", str(scratch / "run"), "--save_interval", "0", "--digest_interval", "1"]
    place = "the start"
    if earlier:
        place = earlier[0].folder.name
        program += ["--resume", str(earlier[0].folder.resolve())]
    print(f"makes the steps from {place} on again; ranks: {num_ranks}; folder: {scratch}", flush=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
    return [sys.executable, *launcher * (num_ranks > 1), *program, *flags]


def make_steps(command: list[str], scratch: Path, until: int, num_threads: int) -> dict[int, list[Phases]]:
    """Run the command until it has made the step `until`, then end it; return its digests.

    Raises ValueError with its last lines if it ends before.
    """
    log = scratch / "log"
    with open(log, "wb") as file:
        env = os.environ | {"OMP_NUM_THREADS": str(num_threads)}
        process = psutil.Popen(command, stdout=file, stderr=file, env=env, start_new_session=True)
    try:
        while True:
            has_ended = process.poll() is not None
            with contextlib.suppress(ValueError):  # it has written no step yet
                digests = read_digests(scratch / "run")
                if until in digests:
                    return digests
            if has_ended:
                end = log.read_text(errors="replace").strip()[-3000:]
                raise ValueError(f"the program ended with exit code {process.returncode}:\n{end}")
            time.sleep(POLL_SECONDS)
    finally:
        if process.poll() is None:
            for member in (*process.children(recursive=True), process):  # each rank has its own session
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            process.wait()


def replay(folder: Path, args: ReplayArguments, flags: Sequence[str]) -> int:
    """Make the steps again and compare them; return the exit code."""
    recorded = read_digests(folder)
    last = args.until or args.step
    missing = [step for step in (args.step, last) if step not in recorded]
    if missing:
        raise ValueError(
            f"step {missing[0]} is not in {folder / DIGESTS}, which has {min(recorded)} to {max(recorded)}"
        )
    num_before = len(recorded[args.step])
    num_ranks = args.num_ranks or num_before
    with tempfile.TemporaryDirectory(prefix="replay-") as name:
        scratch = Path(name)
        command = build_command(folder, scratch, args.step, (num_before, num_ranks), flags)
        made = make_steps(command, scratch, last, start_of(folder, args.step)["threads"])
        steps = sorted(step for step in recorded.keys() & made.keys() if step <= last)
        is_exact = num_ranks == num_before and not flags
        return compare((folder, scratch / "run"), recorded, made, steps, is_exact=is_exact)


def compare_runs(first: Path, second: Path) -> int:
    """Compare the steps that two runs recorded; return the exit code."""
    before, now = read_digests(first), read_digests(second)
    steps = sorted(before.keys() & now.keys())
    if not steps:
        raise ValueError(f"{first} and {second} have recorded no step in common")
    is_exact = len(before[steps[0]]) == len(now[steps[0]])
    return compare((first, second), before, now, steps, is_exact=is_exact)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare as the arguments say; return the exit code."""
    problems = Problems()
    words = [*(sys.argv[1:] if argv is None else argv), "--"]
    args = parse(ReplayArguments, words, description=__doc__.splitlines()[0], problems=problems)
    folders = [Path(name) for name in args.run_dir]
    is_clear = (len(folders), args.step > 0) in ((1, True), (2, False))
    problems.add_if(not is_clear, "give either two runs, or one and --step")
    problems.add_if(0 < args.until < args.step, f"--until {args.until} is before --step {args.step}")
    problems.exit_if_any()
    try:
        if not args.step:
            return compare_runs(*folders)
        return replay(*folders, args, words[words.index("--") + 1 : -1])
    except (ValueError, OSError) as error:
        problems.add(str(error))
        problems.exit_if_any()


if __name__ == "__main__":
    run_tool(main)
