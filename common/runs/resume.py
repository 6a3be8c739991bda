"""The earlier run in --output_dir, and whether this run resumes it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.flags.args import Problems, typed
from common.flags.other_names import REMOVED, rename_flags
from common.models.model_flops import faster_dtype
from common.ranks import distributed
from common.runs.checkpoints import FOLDER, Checkpoint, find_checkpoints
from common.runs.durable_files import WRITING, read_if_whole, read_object
from common.runs.export import damage_of_export
from common.runs.run_files import ARGS_FILE, FINISHED_FILE, LOCK_FILE, PLAN_FILE

# Files, and endings of files, that a launch script, the demo or the program's own start may have written
# before a run begins; DeepSpeed-Chat's scripts write training.log, its sweeps OUTPUT.log.
FOREIGN_FILES = {"log", LOCK_FILE, PLAN_FILE}
FOREIGN_ENDINGS = {".log", WRITING}
NOT_WORTH_A_NOTE = {"output_dir", "resume", "dry_run", "local_rank"}
LENGTH_FLAGS = ("num_train_epochs", "max_train_steps")


@dataclass(frozen=True)
class EarlierRun:
    """The run to resume: its `checkpoints`, newest first; empty for a new run."""

    checkpoints: list[Checkpoint] = field(default_factory=list)
    is_elsewhere: bool = False  # checkpoints outside --output_dir
    notes: list[str] = field(default_factory=list)
    finished: str = ""  # message if nothing is left to do


def find_run(args: Any, problems: Problems) -> EarlierRun:
    """Find the run to resume; add a problem if the output folder cannot or must not be written to."""
    folder = Path(args.output_dir) if args.output_dir else None
    if args.resume not in ("auto", "never", "overwrite"):
        return _named_run(args, folder, problems)
    if folder is None or args.resume == "overwrite":
        return EarlierRun()
    if args.resume == "never" or not (folder / ARGS_FILE).is_file():
        _reject_other_files(folder, problems, ", or use --resume overwrite to replace it")
        return EarlierRun()
    try:
        finished = read_object(folder / FINISHED_FILE, steps=int, exports=list)
        flags = read_object(folder / ARGS_FILE)
    except ValueError as error:
        problems.add(f"{error}; start over with --resume overwrite")
        return EarlierRun()
    notes = []
    if finished and all(getattr(args, name) == flags.get(name) for name in LENGTH_FLAGS):
        exports = [folder / name for name in finished.get("exports", ["export"])]
        if not (broken := "; ".join(filter(None, map(damage_of_export, exports)))):
            compare_flags(args, flags, str(folder), problems)
            text = f"the run in {folder} has finished: {finished.get('steps')} steps; its models are in"
            return EarlierRun(finished=f"{text} {folder}/export. --resume overwrite starts it over")
        notes.append(f"{broken}: it will be written again")
    checkpoints, damages = find_checkpoints(folder)
    notes += [f"{damage}; it is skipped" for damage in damages]
    if checkpoints:
        notes += compare_flags(args, checkpoints[0].meta["args"], str(checkpoints[0].folder), problems)
    elif damages or finished:
        why = "; ".join([*damages, *notes]) or "it has finished without one"
        problems.add(f"{why}. No checkpoint of {folder} can be used; start over with --resume overwrite")
    else:
        notes += compare_flags(args, flags, str(folder), problems)
        notes.append(f"the run in {folder} has no checkpoint yet: it starts over")
    return EarlierRun(checkpoints, notes=notes)


def resolve_dtype(args: Any) -> list[str]:
    """Resolve --dtype auto in `args`; return a note. Every rank must call this.

    On a CPU it becomes the dtype of the resumed run, else the faster one on the first rank.
    """
    if args.dtype != "auto" or distributed.has_gpu():
        args.dtype = args.dtype.replace("auto", "")
        return []

    def choose() -> str:
        before = resumed_dtype(args)
        return f"{before}: as in the resumed run" if before else "{}: {}".format(*faster_dtype())

    resolved = distributed.text_of_first_rank("dtype", choose)
    args.dtype = resolved.partition(":")[0]
    return [f"--dtype auto is {resolved}"]


def resumed_dtype(args: Any) -> str:
    """Dtype of the run that would be resumed or replaced; "" if there is none."""
    if not hasattr(args, "resume"):  # a program without runs
        return ""
    earlier = find_run(args, Problems())
    if earlier.checkpoints:
        return earlier.checkpoints[0].meta["args"]["resolved_dtype"]
    flags = (
        read_if_whole(Path(args.output_dir) / ARGS_FILE) if args.output_dir and args.resume == "auto" else {}
    )
    return flags.get("resolved_dtype", "")


def _named_run(args: Any, folder: Path | None, problems: Problems) -> EarlierRun:
    """Checkpoints that --resume PATH names: the one at the path, or those of a run's folder."""
    checkpoints, damages = find_checkpoints(Path(args.resume))
    if not checkpoints:
        why = "; ".join(damages) or "there is no checkpoint"
        problems.add(f"--resume {args.resume}: {why}; give a folder such as OUTPUT_DIR/{FOLDER}/step-000200")
        return EarlierRun()
    is_elsewhere = folder is None or folder.resolve() != checkpoints[0].folder.resolve().parent.parent
    if folder and is_elsewhere:
        _reject_other_files(folder, problems)
    notes = compare_flags(args, checkpoints[0].meta["args"], str(checkpoints[0].folder), problems)
    return EarlierRun(checkpoints, is_elsewhere, notes)


def _reject_other_files(folder: Path, problems: Problems, cure: str = "") -> None:
    left = sorted(folder.iterdir()) if folder.is_dir() else []
    left = [p.name for p in left if p.name not in FOREIGN_FILES and p.suffix not in FOREIGN_ENDINGS]
    if left:
        names = ", ".join(left[:3])
        problems.add(f"--output_dir {folder} contains {names} of an earlier run; choose another folder{cure}")


def program_of(flags: Mapping[str, Any]) -> str:
    """The program to which these flags belong."""
    if "actor_model_name_or_path" in flags:
        return "step3_ppo/main.py"
    return "step2_reward/main.py" if "loss" in flags else "step1_sft/main.py"


def compare_flags(args: Any, saved: dict[str, Any], origin: str, problems: Problems) -> list[str]:
    """Add a problem for each flag that differs from the saved run's and may not change; return notes on those
    that may change.
    """
    notes = []
    saved = rename_flags(saved, vars(args))
    if (program := program_of(saved)) != program_of(vars(args)):
        problems.add(f"{origin} belongs to a run of {program}; choose another --output_dir")
        return []
    for name in REMOVED.keys() & saved.keys():
        if saved[name] != REMOVED[name]:
            problems.add(
                f"{origin} was made with --{name} {saved[name]}, a removed flag (see CHANGELOG.md): "
                "resume it with the version that wrote it, or start over with --resume overwrite"
            )
    saved = vars(type(args)()) | saved  # older versions lack some flags
    for flag in dataclasses.fields(args):
        now = getattr(args, flag.name)
        before = typed(flag, saved[flag.name])
        if flag.name == "dtype":
            now = distributed.dtype_name(now)
            before = before or saved.get("resolved_dtype")
        if now == before or (flag.metadata["may_change"] and flag.name in NOT_WORTH_A_NOTE):
            continue
        if flag.metadata["may_change"]:
            notes.append(f"--{flag.name} is {now} from here on; it was {before}")
        else:
            problems.add(
                f"--{flag.name} {now} differs from the {before} of {origin} and cannot change on resume; "
                f"use {before}, another --output_dir, or start over with --resume overwrite"
            )
    return notes
