"""Checks a run: makes steps of it again and compares every phase, or finds where two runs part.

    python -m tools.replay RUN --step 137 [--until 140] [--num_ranks 1] [-- FLAGS]
    python -m tools.replay RUN OTHER_RUN

RUN is an --output_dir with digests.jsonl, in which the run wrote digests of what it computed. The steps are
made again from the newest checkpoint before them, or from the start, in a temporary folder; nothing in RUN
changes. On as many ranks as before, bits are compared; on other ranks, or with FLAGS of the program that
change how it computes, such as --zero_stage 2, numbers within BOUNDS. The exit code is 0 if all is equal,
1 if not, 2 if it cannot be found out.
"""

import contextlib
import json
import math
import operator
import os
import sys
import tempfile
import time
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
BATCHES_PER_STEP = {"gradient_accumulation_steps", "generation_batches"}  # of a rank
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
    try:
        lines = (folder / DIGESTS).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        hint = "a run writes it unless --digest_interval is 0"
        raise ValueError(f"{folder / DIGESTS} cannot be read ({error.strerror}); {hint}") from error
    names: dict[str, list[str]] = {}
    steps = {}
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            names |= row["names"]
            steps[row["step"]] = [_unpack(phases, names) for phases in row["ranks"]]
        except (KeyError, TypeError, ValueError) as error:
            if number == len(lines):  # a run that was killed, or that still writes
                break
            raise ValueError(f"{folder / DIGESTS}, line {number} is damaged: {error}") from error
    if not steps:
        raise ValueError(f"{folder / DIGESTS} has no step yet")
    return steps


def _unpack(phases: dict[str, Any], names: dict[str, list[str]]) -> Phases:
    width = len(NO_BITS)
    return {
        phase: {
            name: Value(bits[index * width : (index + 1) * width], total)
            for index, (name, total) in enumerate(zip(names[key], totals, strict=True))
        }
        for phase, (key, bits, totals) in phases.items()
    }


def find_difference(before: list[Phases], now: list[Phases], bound: float | None) -> list[str]:
    """Lines about the first phase that differs, [] if none does: bit by bit, or with a bound in numbers."""
    if bound is not None:
        before, now = [merge_ranks(before)], [merge_ranks(now)]
    if len(before) != len(now):
        return [f"the number of ranks: {len(before)}, then {len(now)}"]
    for phase in dict.fromkeys(phase for ranks in (before, now) for rank in ranks for phase in rank):
        lines = []
        for rank, (one, other) in enumerate(zip(before, now, strict=True)):
            differing = _differing(one.get(phase, {}), other.get(phase, {}), bound)
            where = f"rank {rank}, " * (len(before) > 1)
            lines += [f"  {where}{text}" for text in differing]
        if len(lines) > MAX_SHOWN:
            lines[MAX_SHOWN:] = [f"  and {len(lines) - MAX_SHOWN} more"]
        if lines:
            return [f"{phase} differs:", *lines]
    return []


def _differing(one: dict[str, Value], other: dict[str, Value], bound: float | None) -> Iterator[str]:
    """Yield a text for each tensor of a phase that differs."""
    for name in dict.fromkeys((*one, *other)):
        if name not in one or name not in other:
            yield f"{name}: only the {'first' if name in one else 'second'} has it"
        elif not _is_equal(one[name], other[name], bound):
            yield f"{name}: {_describe(one[name], other[name])}"


def _is_equal(a: Value, b: Value, bound: float | None) -> bool:
    if bound is None or a.total is None or b.total is None:
        return a == b
    if bound <= BOUNDS["fp32"] and isinstance(a.total, int) and isinstance(b.total, int):
        return a.total == b.total
    return abs(a.total - b.total) <= bound * max(abs(a.total), abs(b.total), LEAST)


def _describe(a: Value, b: Value) -> str:
    if a.total is None or b.total is None:
        return "other bits"
    if a.total == b.total:
        return "other bits, the same total"
    share = abs(a.total - b.total) / max(abs(a.total), abs(b.total))
    return f"{a.total:.9g} against {b.total:.9g}, {share:.1e} of it"


def merge_ranks(ranks: list[Phases]) -> Phases:
    """The numbers that do not depend on how ranks share the work: norms and sums over all ranks."""
    merged: dict[str, dict[str, Value]] = {}
    for rank in ranks:
        for phase, values in rank.items():
            for name, value in values.items():
                if value.total is None or phase == "state of random":
                    continue
                of_phase = merged.setdefault(phase, {})
                name = name.partition("@")[0]  # of a slice
                total = value.total
                if name in of_phase and value.bits != NO_BITS:
                    add = {int: operator.add}.get(type(total), math.hypot)
                    total = add(of_phase[name].total, total)
                of_phase[name] = Value(NO_BITS, total)
    return merged


def compare(
    before: dict[int, list[Phases]], now: dict[int, list[Phases]], steps: Sequence[int], bound: float | None
) -> bool:
    """Print the outcome; return whether the steps are equal."""
    for step in steps:
        lines = find_difference(before[step], now[step], bound)
        if lines:
            print(f"step {step}: {lines[0]}", *lines[1:], sep="\n")
            return False
    precision = {None: "bit for bit"}.get(bound, f"within {bound}")
    num_phases = sum(len(rank) for step in steps for rank in before[step])
    print(f"equal {precision}: steps {steps[0]} to {steps[-1]}, {num_phases} phases")
    return True


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
    lines = []
    for kind, (one, other) in (("--", flags), ("", facts)):
        for name in sorted({*one, *other} - NOT_WORTH_A_NOTE - {*SCRATCH_FLAGS}):
            if one.get(name) != other.get(name):
                lines.append(f"  {kind}{name}: {one.get(name)} against {other.get(name)}")
    return lines


# ---- making steps again ---------------------------------------------------------------------------------


def _keep_rows(config: dict[str, Any], flags: dict[str, Any], before: int, now: int) -> None:
    """Change the numbers of batches so that other ranks take as many rows a step. Raises ValueError."""
    for name in BATCHES_PER_STEP & flags.keys() if now != before else ():
        if flags[name] * before % now:
            raise ValueError(f"--{name} {flags[name]} on {before} ranks cannot be divided among {now}")
        config[name] = flags[name] * before // now


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
    _keep_rows(config, run_flags, recorded_ranks, num_ranks)
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
    env = os.environ | {"OMP_NUM_THREADS": str(num_threads)}
    log = scratch / "log"
    with open(log, "wb") as file:
        process = psutil.Popen(command, stdout=file, stderr=file, env=env, start_new_session=True)
    try:
        while True:
            has_ended = process.poll() is not None
            if _has_line(scratch / "run" / DIGESTS) and until in (digests := read_digests(scratch / "run")):
                return digests
            if has_ended:
                text = log.read_text(errors="replace").strip()
                raise ValueError(f"the program ended with exit code {process.returncode}:\n{text[-3000:]}")
            time.sleep(POLL_SECONDS)
    finally:
        if process.poll() is None:
            for member in (*process.children(recursive=True), process):  # each rank has its own session
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            process.wait()


def _has_line(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0 and b"\n" in path.read_bytes()


def replay(folder: Path, args: ReplayArguments, flags: Sequence[str]) -> bool:
    """Make the steps again and compare them; return whether they are equal."""
    recorded = read_digests(folder)
    last = args.until or args.step
    for step in (args.step, last):
        if step not in recorded:
            raise ValueError(
                f"step {step} is not in {folder / DIGESTS}, which has {min(recorded)} to {max(recorded)}"
            )
    start = start_of(folder, args.step)
    num_before = len(recorded[args.step])
    ranks = num_before, args.num_ranks or num_before
    bound = None
    if ranks[0] != ranks[1] or flags:
        bound = BOUNDS[start["dtype"]]
    with tempfile.TemporaryDirectory(prefix="replay-") as name:
        scratch = Path(name)
        command = build_command(folder, scratch, args.step, ranks, flags)
        made = make_steps(command, scratch, last, start["threads"])
        steps = sorted(step for step in recorded.keys() & made.keys() if step <= last)
        is_equal = compare(recorded, made, steps, bound)
        lines = surroundings(folder, scratch / "run", args.step)
    if lines and not is_equal:
        print("besides:", *lines, sep="\n")
    return is_equal


def compare_runs(first: Path, second: Path) -> bool:
    """Compare the steps that two runs recorded; return whether they are equal."""
    before, now = read_digests(first), read_digests(second)
    steps = sorted(before.keys() & now.keys())
    if not steps:
        raise ValueError(f"{first} and {second} have recorded no step in common")
    bound = None
    if len(before[steps[0]]) != len(now[steps[0]]):
        bound = BOUNDS[start_of(first, steps[0])["dtype"]]
    is_equal = compare(before, now, steps, bound)
    lines = surroundings(first, second, steps[-1])
    if lines:
        print("besides:", *lines, sep="\n")
    return is_equal


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
            return int(not compare_runs(*folders))
        return int(not replay(*folders, args, words[words.index("--") + 1 : -1]))
    except (ValueError, OSError) as error:
        problems.add(str(error))
        problems.exit_if_any()


if __name__ == "__main__":
    run_tool(main)
