"""What --output_dir holds of an earlier run, and whether this one resumes it."""

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.flags.args import Problems
from common.flags.other_names import REMOVED, rename_flags
from common.ranks import distributed
from common.runs.checkpoints import FOLDER, META, Checkpoint, find_checkpoints, read_checkpoint
from common.runs.durable_files import read_object
from common.runs.run_description import flag_defaults
from common.runs.run_files import ARGS_FILE, FINISHED_FILE
from common.runs.run_lock import LOCK_FILE, held_message

# What a launch script or the demo may have put into the folder before the program starts.
FOREIGN_FILES = {"train.log", "log", LOCK_FILE}
NOT_WORTH_A_NOTE = {"output_dir", "resume", "dry_run", "local_rank"}
LENGTH_FLAGS = ("num_train_epochs", "max_train_steps")


@dataclass(frozen=True)
class EarlierRun:
    """What to resume: `checkpoints` with the newest first, none for a new run."""

    checkpoints: list[Checkpoint] = field(default_factory=list)
    is_elsewhere: bool = False  # of another folder than --output_dir
    notes: list[str] = field(default_factory=list)
    finished: str = ""  # what to say of a run that has nothing left to do


def find_run(args: Any, problems: Problems) -> EarlierRun:
    """Return what this run resumes, after adding why it cannot, or must not, write to its folder."""
    held = held_message(Path(args.output_dir)) if args.output_dir and distributed.is_main() else ""
    if held:
        problems.add(held)
        return EarlierRun()
    if args.resume not in ("auto", "never", "overwrite"):
        return _named_checkpoint(args, problems)
    folder = Path(args.output_dir) if args.output_dir else None
    if folder is None or not _can_write(folder, problems) or args.resume == "overwrite":
        return EarlierRun()
    if args.resume == "never" or not (folder / ARGS_FILE).is_file():
        _refuse_other_files(folder, args, problems)
        return EarlierRun()
    found, doubts = find_checkpoints(folder)
    finished = read_object(folder / FINISHED_FILE)
    saved = found[0].meta["args"] if found else read_object(folder / ARGS_FILE)
    if finished and all(getattr(args, n, None) == finished["args"].get(n) for n in LENGTH_FLAGS):
        text = (
            f"the run in {folder} has finished: {finished['steps']} steps; its models are in {folder}/export"
        )
        return EarlierRun(finished=f"{text}. --resume overwrite starts it anew")
    if finished and not found:
        _refuse_other_files(folder, args, problems)
        return EarlierRun()
    if doubts and not found:
        problems.add(
            f"{'; '.join(doubts)}. No checkpoint of {folder} can be used: --resume overwrite starts anew"
        )
    notes = [f"{doubt}; it is passed over" for doubt in doubts]
    notes += compare_flags(args, saved, str(found[0].folder if found else folder), problems)
    if not found:
        notes.append(f"the run in {folder} had saved no checkpoint yet: it begins anew")
    return EarlierRun(found, notes=notes)


def find_named(path: Path) -> tuple[list[Checkpoint], list[str]]:
    """Return the checkpoint that a path is, or those of a run's folder, newest first, and what is wrong."""
    try:
        if (path / META).exists():
            return [read_checkpoint(path)], []
        found, doubts = find_checkpoints(path.parent if path.name == FOLDER else path)
    except ValueError as error:
        return [], [f"checkpoint {path}: {error}"]
    return found, doubts if found or doubts else [f"{path} is no checkpoint and has none in {path / FOLDER}"]


def _named_checkpoint(args: Any, problems: Problems) -> EarlierRun:
    """Return the checkpoint that --resume PATH names: itself, or the newest of a run's folder."""
    path = Path(args.resume)
    if args.output_dir:
        _can_write(Path(args.output_dir), problems)
    found, doubts = find_named(path)
    if not found:
        why = "; ".join(doubts)
        problems.add(f"--resume {path}: {why}; give a folder such as OUTPUT_DIR/{FOLDER}/step-000200")
        return EarlierRun()
    home = found[0].folder.resolve().parent.parent
    is_elsewhere = not args.output_dir or Path(args.output_dir).resolve() != home
    if is_elsewhere and args.output_dir:
        _refuse_other_files(Path(args.output_dir), args, problems)
    notes = compare_flags(args, found[0].meta["args"], str(found[0].folder), problems)
    return EarlierRun(found, is_elsewhere, notes)


def _can_write(folder: Path, problems: Problems) -> bool:
    existing = next((p for p in (folder, *folder.resolve().parents) if p.exists()), Path("/"))
    if existing.is_dir() and os.access(existing, os.W_OK):
        return True
    problems.add(f"--output_dir {folder}: {existing} is not a folder that can be written; choose another")
    return False


def _refuse_other_files(folder: Path, args: Any, problems: Problems) -> None:
    left = sorted(p.name for p in folder.iterdir() if p.name not in FOREIGN_FILES) if folder.is_dir() else []
    if left:
        problems.add(
            f"--output_dir {folder} holds {', '.join(left[:3])} of an earlier run; choose another folder"
            + (", or give --resume overwrite to replace it" if args.resume in ("auto", "never") else "")
        )


def compare_flags(args: Any, saved: dict[str, Any], origin: str, problems: Problems) -> list[str]:
    """Add a problem for flags that differ from a saved run's and may not; return notes on those that may."""
    notes = []
    saved = rename_flags(saved)
    for name in REMOVED.keys() & saved.keys():
        default, instead = REMOVED[name]
        if saved[name] != default:
            problems.add(
                f"{origin} was made with --{name} {saved[name]}, a flag that has been removed ({instead}): "
                "resume it with the version that wrote it, or give --resume overwrite to begin anew"
            )
    saved = flag_defaults(args) | saved  # an older program did not have all flags
    for flag in dataclasses.fields(args):
        now, before = getattr(args, flag.name), saved[flag.name]
        if flag.name == "dtype":
            now, before = distributed.dtype_name(now), before or saved.get("resolved_dtype")
        if now == before:
            continue
        if flag.metadata["may_change"]:
            if flag.name not in NOT_WORTH_A_NOTE:
                notes.append(f"--{flag.name} is {now} from here on; it was {before}")
        else:
            problems.add(
                f"--{flag.name} {now} differs from the {before} of {origin}, and would make it another run: "
                f"give {before}, or another --output_dir, or --resume overwrite to begin anew"
            )
    return notes
