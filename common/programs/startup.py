"""Start-up of every program before a model is loaded: flags, their problems in one list, data."""

import contextlib
import ctypes
import dataclasses
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from common.data.data_options import DataOptions, check_sources
from common.data.dialogue import Template
from common.data.stage_datasets import StageData, build_data, preview_rows
from common.engine.ds_config import effective_zero_stage, load_overrides
from common.flags.args import Problems, parse_args
from common.flags.groups import RunArguments
from common.flags.optimizer import check_optimizer
from common.flags.plugins import import_plugins
from common.flags.problems import no_effect_notes
from common.models.fingerprint import changed_models, fingerprint
from common.models.transformers_internals import TRANSFORMERS
from common.programs.conversation_form import find_template
from common.programs.memory_check import make_plan
from common.ranks import distributed, watchdog
from common.ranks.deepspeed_internals import DEEPSPEED, require_version
from common.ranks.failures import cure_of_write, has_lost_ranks
from common.runs import run_files
from common.runs.durable_files import read_if_whole, write_file
from common.runs.resume import EarlierRun, find_run, resolve_dtype
from common.runs.run_logger import missing_trackers

# Options of glibc's mallopt: M_MMAP_THRESHOLD, the size from which a tensor has pages of its own, which are
# returned when it is freed; M_TRIM_THRESHOLD, the free bytes above which the heap returns some.
_MALLOC_LIMITS = {-3: 2**30, -1: 2**31 - 1}
GROUP_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def quiet_libraries() -> None:
    """Silence the warnings and progress bars of libraries; our own checks replace them."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch|deepspeed|peft")
    warnings.filterwarnings("ignore", category=FutureWarning)


def keep_freed_memory() -> None:
    """Keep freed memory in the process, on a CPU: pages that the system has to clear again for the tensors of
    the next pass take a tenth of a step. Does nothing on a GPU, or without glibc.
    """
    libc = ctypes.CDLL(None)
    if not distributed.has_gpu() and hasattr(libc, "mallopt"):
        for option, num_bytes in _MALLOC_LIMITS.items():
            libc.mallopt(option, num_bytes)


@dataclass
class Start:
    """A command line and the results of its checks; no model is loaded yet."""

    args: Any
    options: DataOptions
    problems: Problems
    notes: list[str] = field(default_factory=list)
    argv: Sequence[str] | None = None  # None: sys.argv[1:]
    tokenizer: Any = None
    template: Template | None = None
    earlier: EarlierRun = field(default_factory=EarlierRun)
    ds_config: dict[str, Any] = field(default_factory=dict)  # for steps 1 and 2, which train one model
    frozen: dict[str, str] = field(default_factory=dict)  # paths of frozen models, by flag
    plan: dict[str, Any] = field(default_factory=dict)  # by which --auto has chosen flags


def read_flags(
    flags: type, stage: int, description: str, argv: Sequence[str] | None, kind: type[Start] = Start
) -> Any:
    """Flags of a step as a `kind`, and the problems that every step may have with them."""
    problems = Problems()
    args = parse_args(flags, argv, description=description, problems=problems)
    import_plugins(args.plugins, problems)
    notes = problems.notes + check_run(args, problems)
    plan: dict[str, Any] = {}
    if args.auto and not problems.messages:
        plan = make_plan(stage, argv, chooses=True)
        args = dataclasses.replace(args, **plan.get("flags", {}))
        problems.add_if(
            not plan,
            "--auto: this run cannot be planned, see above; leave it out, and set the flags yourself",
        )
    return kind(args, DataOptions.of(args, stage), problems, notes, argv, plan=plan)


def finish_checks(start: Start, flag: str) -> None:
    """Check the data; find the template of the model that `flag` names, and an earlier run; print notes.

    Prints all problems and exits if there are any.
    """
    args = start.args
    problems = start.problems
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
    if not check_environment(problems):  # there may be no rank 0 in that case
        problems.exit_if_any(on_every_rank=True)
    for library, tested in {"deepspeed": DEEPSPEED, "transformers": TRANSFORMERS}.items():
        with problems.catch():
            require_version(library, tested)
    notes = resolve_dtype(args) + check_device(args.dtype, problems)
    dtype = distributed.dtype_name(args.dtype)
    data_types = None
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
    given = {name: os.environ[name] for name in (*GROUP_VARIABLES, "LOCAL_RANK") if name in os.environ}
    defaults = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_PORT": 29500}
    try:
        rank, size, _, port = (int(given.get(name, number)) for name, number in defaults.items())
        is_whole = all(given.get(name) for name in GROUP_VARIABLES) or ("RANK" not in given and size == 1)
        is_good = is_whole and rank in range(size) and port in range(2**16)
    except ValueError:
        is_good = False
    shown = " ".join(f"{name}={value}" for name, value in given.items())
    problems.add_if(
        not is_good,
        f"{shown} in the environment do not define a process group, which needs "
        f"{', '.join(GROUP_VARIABLES)}, "
        "and RANK from 0 and below WORLD_SIZE; start with deepspeed or torchrun, or unset them for "
        "a single process",
    )
    return is_good


def check_device(dtype: str, problems: Problems) -> list[str]:
    """Add the problems of --dtype, and of missing or invisible GPUs; return notes.

    Chooses this rank's GPU; exits immediately if there is none for it.
    """
    if not distributed.has_gpu():
        problems.add_if(dtype == "fp16", "--dtype fp16 needs a GPU; use fp32 or bf16 on a CPU")
        notes = _check_hidden_gpu(problems) if distributed.has_hidden_gpu() else []
        if dtype == "bf16" and not distributed.is_for_onednn(torch.bfloat16):
            notes.append("--dtype bf16 can take many times as long as fp32 on this CPU; auto measures both")
        return notes
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    num_gpus = torch.cuda.device_count()
    num_ranks = max(rank + 1, distributed.num_ranks_here())
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
    problems.add_if(
        num_ranks > num_gpus,
        f"{num_ranks} ranks on a machine with {num_gpus} visible GPUs (CUDA_VISIBLE_DEVICES {shown}); each "
        f"needs its own; start {num_gpus}: --num_gpus of deepspeed, --nproc_per_node of torchrun",
    )
    if rank >= num_gpus:
        problems.exit_if_any(on_every_rank=True)
    distributed.choose_device()
    if dtype not in ("", "bf16") or distributed.computes_bf16():
        return []
    why = f"{torch.cuda.get_device_name()} emulates bf16, slower than fp32"
    problems.add_if(dtype, f"--dtype bf16: {why}; use fp16 or fp32")
    return [f"{why}: this runs in fp32; --dtype fp16 takes half the memory and less time"]


def _check_hidden_gpu(problems: Problems) -> list[str]:
    """Add a problem if torch does not see the machine's GPU; return a note if the user has hidden it."""
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
        # Otherwise DeepSpeed uses another optimizer, or keeps the gradient sums of a skipped step.
        problems.add_if(
            sums not in (None, dtype) and stage != 3 and (stage != 2 or offload not in ("none", "param")),
            f"--ds_config {args.ds_config}: grad_accum_dtype {sums} needs --{name} 3, or 2 without --{flag}",
        )


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
            if error.filename is None:  # of a connection, or from another rank
                raise
            text = (
                f"{error.filename} cannot be used ({error.strerror}); {cure_of_write(error)}, or choose "
                "another path with --output_dir, --data_output_path or the flag that names it"
            )
        problems.add(text)
        problems.exit_if_any()


def enter(start: Start) -> StageData | None:
    """Join the process group and prepare the run; return its data, or None under --dry_run and if the same
    run has finished.

    The run holds --output_dir until the process ends. Exits if a run with other data or frozen models has
    finished there, or if the memory plan, which is made meanwhile, does not fit the GPUs.
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
    if distributed.is_main():
        with as_problem(start.problems):
            run_files.take_lock(args.output_dir)
    if args.deterministic:
        _make_deterministic()
    if distributed.has_gpu():
        choose_tf32(args.tf32, distributed.dtype_name(args.dtype))
    distributed.start(args.local_rank, args.collective_timeout)
    transformers.set_seed(args.seed % 2**32)  # equal on all ranks, for equal new weights
    with as_problem(start.problems), watchdog.phase("the preparation of the data"):
        data = build_data(start.options, start.template)
    if not earlier.finished:
        plan = start.plan or make_plan(start.options.stage, start.argv)
        with as_problem(start.problems):
            keep_plan(start, plan)
        return data
    with as_problem(start.problems):
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


def keep_plan(start: Start, plan: dict[str, Any]) -> None:
    """Write the plan of this start into the run's folder, or remove that of a run that is started over."""
    path = Path(start.args.output_dir) / run_files.PLAN_FILE
    if not (start.args.output_dir and distributed.is_main()):
        return
    if plan:
        write_file(path, json.dumps(plan, indent=1) + "\n")
    elif not start.earlier.checkpoints:
        path.unlink(missing_ok=True)


def choose_tf32(tf32: str, dtype: str) -> None:
    """Let a GPU compute fp32 matrix products in TF32 or not, see --tf32; print a note if it may."""
    is_used = tf32 == "true" or (tf32 == "auto" and dtype != "fp32")
    torch.backends.cuda.matmul.allow_tf32 = is_used
    if is_used and torch.cuda.get_device_capability() >= (8, 0):
        print_note("fp32 matrix products are in TF32, 10 bits of mantissa; --tf32 false for all 23")


def _make_deterministic() -> None:
    """Make torch, cuBLAS and flash-attn deterministic; before the first GEMM."""
    os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FLASH_ATTENTION_DETERMINISTIC": "1"}
    torch.use_deterministic_algorithms(True)  # warn_only would leave torch's attention non-deterministic
    torch.utils.deterministic.fill_uninitialized_memory = False  # debugging aid; costs a pass per allocation
