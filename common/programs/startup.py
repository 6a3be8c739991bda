"""Start-up of every program before a model is loaded: quiet libraries, checks, tokenizer, one list of
problems."""

import contextlib
import dataclasses
import json
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedTokenizerFast

from common.data.data_options import DataOptions, check_sources
from common.data.dialogue import Template
from common.data.stage_datasets import StageData, build_data, preview_rows
from common.data.tokenizer import load_tokenizer
from common.engine.ds_config import effective_zero_stage, load_overrides
from common.flags.args import Problems, parse_args
from common.flags.groups import RunArguments
from common.flags.optimizer import check_optimizer
from common.flags.plugins import import_plugins
from common.flags.problems import has_hub_form, no_effect_notes
from common.flags.streams import settle_streams
from common.models.fingerprint import changed_models, fingerprint
from common.models.saved_adapters import base_of, is_adapter, tokenizer_of
from common.models.transformers_internals import TRANSFORMERS
from common.programs.conversation_form import find_template
from common.programs.memory_check import check_memory
from common.ranks import distributed, watchdog
from common.ranks.deepspeed_internals import DEEPSPEED, require_version
from common.ranks.failures import (
    StepRefused,
    TooManyBadSteps,
    cure_of_write,
    first_line,
    has_lost_ranks,
    say,
)
from common.runs import run_files
from common.runs.durable_files import SaveFailed, read_if_whole
from common.runs.export import read_metadata
from common.runs.resume import EarlierRun, find_run, settle_dtype
from common.runs.run import Stopped
from common.runs.run_files import STOPPED
from common.runs.run_logger import missing_trackers

OF_A_GROUP = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def quiet_libraries() -> None:
    """Silence the warnings and progress bars of libraries; our own checks replace them."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch|deepspeed|peft")
    warnings.filterwarnings("ignore", category=FutureWarning)


@dataclass
class Start:
    """A command line and the results of its checks; no model is loaded yet."""

    args: Any
    options: DataOptions
    problems: Problems
    notes: list[str] = field(default_factory=list)
    argv: Sequence[str] | None = None  # the command line, None for this process's
    tokenizer: Any = None
    template: Template | None = None
    earlier: EarlierRun = field(default_factory=EarlierRun)
    ds_config: dict[str, Any] = field(default_factory=dict)  # of steps 1 and 2, which train one model
    frozen: dict[str, str] = field(default_factory=dict)  # by its flag, what is not trained


def read_flags(
    flags: type, stage: int, description: str, argv: Sequence[str] | None, kind: type[Start] = Start
) -> Any:
    """Flags of a step as a `kind`, and the problems that every step may have with them."""
    problems = Problems()
    args = parse_args(flags, argv, description=description, problems=problems)
    import_plugins(args.plugins, problems)
    notes = problems.notes + check_run(args, problems)
    return kind(args, DataOptions.of(args, stage), problems, notes, argv)


def finish_checks(start: Start, flag: str) -> None:
    """Check the data; find the template of the model that `flag` names, and an earlier run; print notes.

    Prints all problems and exits if there are any.
    """
    args, problems = start.args, start.problems
    for problem in check_sources(start.options, start.tokenizer):
        problems.add(problem)
    name = getattr(args, flag.removeprefix("--"))
    start.template, notes = find_template(flag, name, args, start.tokenizer, problems)
    start.earlier = find_run(args, problems)
    problems.exit_if_any()
    if not args.output_dir:
        print_note("without --output_dir nothing is saved: no model, no checkpoint, no metrics")
    print_notes(args, start.argv)
    print_note(*start.notes, *notes)


def check_run(args: RunArguments, problems: Problems) -> list[str]:
    """Add the problems of device, offload, --trackers, --ds_config and environment; return notes.

    Exits immediately if the launcher's environment is inconsistent.
    """
    if not check_environment(problems):  # nobody may be the first process then
        problems.exit_if_any(is_told_by_all=True)
    for library, tested in {"deepspeed": DEEPSPEED, "transformers": TRANSFORMERS}.items():
        with problems.catch():
            require_version(library, tested)
    notes = settle_dtype(args) + check_device(args.dtype, problems)
    dtype, data_types = distributed.dtype_name(args.dtype), None
    with problems.catch():
        data_types = load_overrides(args).get("data_types")
    sums = data_types.get("grad_accum_dtype") if isinstance(data_types, dict) else None
    check_offload(args, dtype, problems, sums)
    check_optimizer(args, dtype, problems)
    for problem in missing_trackers(args.trackers):
        problems.add(problem)
    return notes


def check_environment(problems: Problems) -> bool:
    """Whether the launcher's variables are consistent; adds a problem if not."""
    given = {name: os.environ[name] for name in (*OF_A_GROUP, "LOCAL_RANK") if name in os.environ}
    lone = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_PORT": 29500}
    try:
        rank, size, _, port = (int(given.get(name, number)) for name, number in lone.items())
        is_whole = all(given.get(name) for name in OF_A_GROUP) or ("RANK" not in given and size == 1)
        is_good = is_whole and rank in range(size) and port in range(2**16)
    except ValueError:
        is_good = False
    shown = " ".join(f"{name}={value}" for name, value in given.items())
    problems.check(
        is_good,
        f"{shown} in the environment do not define a process group, which needs {', '.join(OF_A_GROUP)}, "
        "and RANK from 0 and below WORLD_SIZE; start with deepspeed or torchrun, or unset them for "
        "a single process",
    )
    return is_good


def check_device(dtype: str, problems: Problems) -> list[str]:
    """Add the problems of --dtype, and of missing or invisible GPUs; return notes.

    Chooses this rank's GPU; exits immediately if there is none for it.
    """
    if not distributed.has_gpu():
        problems.check(dtype != "fp16", "--dtype fp16 needs a GPU; use fp32 or bf16 on a CPU")
        return _check_hidden_gpu(problems) if distributed.has_hidden_gpu() else []
    rank, num_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    num_ranks = max(rank + 1, distributed.num_ranks_here())
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
    problems.check(
        num_ranks <= num_gpus,
        f"{num_ranks} ranks on a machine with {num_gpus} visible GPUs (CUDA_VISIBLE_DEVICES {shown}); each "
        f"needs its own; start {num_gpus}: --num_gpus of deepspeed, --nproc_per_node of torchrun",
    )
    if rank >= num_gpus:
        problems.exit_if_any(is_told_by_all=True)
    distributed.choose_device()
    if dtype not in ("", "bf16") or distributed.computes_bf16():
        return []
    why = f"{torch.cuda.get_device_name()} emulates bf16, slower than fp32"
    problems.check(not dtype, f"--dtype bf16: {why}; use fp16 or fp32")
    return [f"{why}: this runs in fp32; --dtype fp16 takes half the memory and less time"]


def _check_hidden_gpu(problems: Problems) -> list[str]:
    """Add a problem if torch does not see the machine's GPU; return a note if the user asked for that."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
    if shown.strip() in ("", "-1"):
        return [f"CUDA_VISIBLE_DEVICES={shown} in the environment hides the GPUs: this runs on the CPUs"]
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    problems.add(
        f"torch {torch.__version__}, built {built}, does not see this machine's GPU (CUDA_VISIBLE_DEVICES "
        f"{shown}); update its driver or install a torch that fits it (nvidia-smi names both), or set "
        "DS_ACCELERATOR=cpu to run on the CPUs"
    )
    return []


def check_offload(args: Any, dtype: str, problems: Problems, sums: str | None = None) -> None:
    """Add a problem if a model's offload needs another ZeRO stage, or if `sums`, the grad_accum_dtype in
    --ds_config, does.
    """
    for prefix, role in args.roles().items():
        name = f"{prefix}zero_stage"
        stage = role.zero_stage
        flag = f"{prefix}offload" if getattr(args, f"{prefix}offload", "") else "offload"  # --critic_offload
        offload = role.offload
        if offload == "param" and stage != 3:
            problems.add(f"--{flag} param needs --{name} 3, not {stage}; use --{flag} optimizer or stage 3")
        if offload in ("optimizer", "all") and effective_zero_stage(stage, dtype) == 0:
            problems.add(f"--{flag} {offload} needs --{name} 1, 2 or 3: stage 0 cannot offload")
        # Else DeepSpeed has another optimizer, or keeps the sums of a refused step.
        problems.check(
            sums in (None, dtype) or stage == 3 or (stage == 2 and offload in ("none", "param")),
            f"--ds_config {args.ds_config}: grad_accum_dtype {sums} needs --{name} 3, or 2 without --{flag}",
        )


def check_model(
    flag: str, name_or_path: str, args: Any, problems: Problems, *, takes_adapter: bool = False
) -> Any:
    """The model's configuration, or None after adding why the model cannot be loaded.

    For a saved adapter, in programs that support them, it is that of its base.
    """
    if not name_or_path:
        return None
    folder = Path(name_or_path)
    if closed := _closed_path(folder):
        problems.add(f"{flag} {closed} cannot be read by this user; its owner can run chmod -R a+rX {folder}")
        return None
    try:
        read_metadata(name_or_path)
    except ValueError as error:
        problems.add(f"{flag}: {error}; remove the file, or save the model again")
        return None
    if is_adapter(name_or_path):
        if not takes_adapter:
            problems.add(
                f"{flag} {name_or_path} is an adapter without its base model, which this program does not "
                "support; give the export/ folder of the run, where it is merged"
            )
            return None
        flag = f"{flag} {name_or_path}, an adapter of"
        with problems.catch():
            return check_model(flag, base_of(name_or_path), args, problems)
        return None
    if folder.is_dir() and not (folder / "config.json").exists():
        near = folder / "export"
        is_run = (near / "config.json").exists()
        cure = f"did you mean {near}?" if is_run else "give the folder that save_pretrained wrote"
        problems.add(f"{flag} {folder} has no config.json, so it is not a model; {cure}")
        return None
    try:
        return AutoConfig.from_pretrained(name_or_path, trust_remote_code=args.trust_remote_code)
    except Exception as error:  # OSError, ValueError, KeyError ... by what is missing
        is_absent = not has_hub_form(name_or_path) and not folder.is_dir()
        why = "there is no such folder" if is_absent else first_line(error)
        problems.add(f"{flag} {name_or_path} is neither a model folder nor an available hub model: {why}")
        return None


def _closed_path(folder: Path) -> Path | None:
    """The first file in a model's folder that this user cannot read, or the folder itself."""
    try:
        files = sorted(folder.iterdir()) if folder.is_dir() else []
    except PermissionError:
        return folder
    return next((file for file in files if not os.access(file, os.R_OK)), None)


def check_tokenizer(
    flag: str, name_or_path: str, args: Any, problems: Problems
) -> PreTrainedTokenizerFast | None:
    """The tokenizer with EOS and PAD set, or None after adding its problem."""
    if not name_or_path:
        return None
    with problems.catch():
        return load_tokenizer(
            tokenizer_of(name_or_path),
            eot_token=args.eot_token or None,
            add_eot_token=args.add_eot_token,
            trust_remote_code=args.trust_remote_code,
            flag=flag,
        )
    return None


def print_notes(args: Any, argv: Sequence[str] | None = None) -> None:
    """Print, once and on the first process, which flags have no effect."""
    print_note(*no_effect_notes(args, argv))


def print_note(*texts: str) -> None:
    """Print notes on the first process, once, before the start."""
    for text in texts if distributed.is_main() else ():
        print(f"note: {text}", file=sys.stderr)


@contextlib.contextmanager
def as_problem(problems: Problems) -> Iterator[None]:
    """Context that turns a user's error into one message and exit code 2: a ValueError, or an OSError that
    names a file. An error caused by the end of other ranks is passed on.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        if has_lost_ranks(error):
            raise
        text = str(error)
        if isinstance(error, OSError):
            if error.filename is None:  # a connection's, or one that others tell
                raise
            text = (
                f"{error.filename} cannot be used ({error.strerror}); {cure_of_write(error)}, or give "
                "another place by --output_dir, --data_output_path or the flag that names it"
            )
        problems.add(text)
        problems.exit_if_any()


def enter(start: Start) -> StageData | None:
    """Join the process group and prepare the run; return its data, or None under --dry_run and if the same
    run has finished.

    The run holds --output_dir until the process ends. Exits if a run with other data or frozen models has
    finished there.
    """
    args, earlier = start.args, start.earlier
    if args.dry_run:
        with as_problem(start.problems):
            print_note(*preview_rows(start.options, start.template))
        if distributed.is_main():
            resolved = dataclasses.asdict(args) | {"resolved_dtype": distributed.dtype_name(args.dtype)}
            if start.ds_config:
                resolved["deepspeed_config_resolved"] = start.ds_config
            print(json.dumps(resolved, indent=2, sort_keys=True))
        return None
    if not earlier.finished:
        check_memory(start.options.stage, start.argv)
    if distributed.is_main():
        with as_problem(start.problems):
            run_files.take_lock(args.output_dir)
    if args.deterministic:
        _fix_orders_of_sums()
    distributed.start(args.local_rank, args.collective_timeout)
    transformers.set_seed(args.seed % 2**32)  # alike on all ranks: new weights must be equal everywhere
    with as_problem(start.problems), watchdog.phase("the preparation of the data"):
        data = build_data(start.options, start.template)
        if not earlier.finished:
            return data
        started = read_if_whole(Path(args.output_dir) / run_files.RUN_FILE, starts=list).get("starts") or [{}]
        if started[-1].get("data_key", data.key) != data.key:
            start.problems.add(
                f"the data have changed since the run in {args.output_dir} finished: choose another "
                "--output_dir, or start over with --resume overwrite"
            )
        now = {flag: fingerprint(path) for flag, path in start.frozen.items()}
        for problem in changed_models(started[-1].get("models", {}), now):
            start.problems.add(f"the run in {args.output_dir} has finished; {problem}")
    start.problems.exit_if_any()
    if distributed.is_main():
        print(earlier.finished)
    return None


def _fix_orders_of_sums() -> None:
    """Make torch, cuBLAS and flash-attn deterministic; before the first GEMM."""
    os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FLASH_ATTENTION_DETERMINISTIC": "1"}
    torch.use_deterministic_algorithms(True)  # with warn_only torch's attention would stay as it is
    torch.utils.deterministic.fill_uninitialized_memory = False  # finds bugs, and costs a pass each


def _leave_at_once(*_: Any) -> None:
    """End the process; a KeyboardInterrupt would be lost inside a destructor or a C++ callback.

    Waits for nothing: other threads and ranks may be inside a collective.
    """
    os.write(2, b"stopped by Ctrl-C\n")
    run_files.release_lock(130)
    os._exit(130)


def run_program(program: Callable[[], None]) -> None:
    """Run a program's main function.

    Ctrl-C, a skipped step, an out-of-memory error and another rank's failure end it with one line and no
    traceback.
    """
    settle_streams()
    quiet_libraries()
    watchdog.tell_phases()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell may have it ignored
        signal.signal(signal.SIGINT, _leave_at_once)
    code, cause = 0, None
    try:
        program()
    except Stopped as stopped:
        if distributed.is_main():
            say(str(stopped))
        code = STOPPED
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
        cause = left.__context__  # what became a problem
        raise
    except (SaveFailed, StepRefused, TooManyBadSteps) as error:  # by all ranks alike
        if distributed.is_main():
            say(f"error: {error}")
        watchdog.say_goodbye(3, error)
        run_files.release_lock(3)
        os._exit(3)
    except Exception as error:
        watchdog.leave_after(error)
        code = 1
        raise
    finally:
        distributed.stop(code, cause)
        run_files.release_lock(code)
    if code:
        raise SystemExit(code)
