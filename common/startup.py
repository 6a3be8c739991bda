"""What every program does before it loads a model: quiet libraries, checks, tokenizer, one list of
problems."""

import contextlib
import json
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import transformers
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from common import distributed
from common.args import Problems, RunArguments, as_json, no_effect_notes
from common.ds_config import effective_zero_stage
from common.models import linear_module_names, lora_targets
from common.refusal import StepRefused
from common.tokenizer import load_tokenizer

# What a launch script or the demo may have put into the folder before the program starts.
FOREIGN_FILES = {"train.log", "log"}


def quiet_libraries() -> None:
    """Keep libraries from writing over our lines: their warnings are theirs, our checks are ours."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch|deepspeed|peft")
    warnings.filterwarnings("ignore", category=FutureWarning)


def check_output_dir(args: RunArguments, problems: Problems) -> None:
    """Add a problem when --output_dir cannot be written, or holds a run that would be overwritten."""
    if not args.output_dir:
        return
    folder = Path(args.output_dir)
    existing = next((p for p in (folder, *folder.resolve().parents) if p.exists()), Path("/"))
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        problems.add(f"--output_dir {folder}: {existing} is not a folder that can be written; choose another")
    elif folder.is_dir() and not args.overwrite_output_dir:
        left = sorted(p.name for p in folder.iterdir() if p.name not in FOREIGN_FILES)
        if left:
            problems.add(
                f"--output_dir {folder} holds {', '.join(left[:3])} of an earlier run; choose another "
                "folder, or give --overwrite_output_dir to replace it"
            )


def check_run(args: RunArguments, zero_stages: dict[str, int], problems: Problems) -> None:
    """Add the problems of output folder, precision, offload and --ds_config; `zero_stages` by flag."""
    check_output_dir(args, problems)
    if args.dtype == "fp16" and not distributed.has_gpu():
        problems.add("--dtype fp16 needs a GPU; use fp32 or bf16 on a CPU")
    for name, stage in zero_stages.items():
        if args.offload == "param" and stage != 3:
            problems.add(f"--offload param needs {name} 3, not {stage}; use --offload optimizer or stage 3")
        runs_at = effective_zero_stage(stage, args.dtype or distributed.default_dtype_name())
        if args.offload in ("optimizer", "all") and runs_at == 0:
            problems.add(f"--offload {args.offload} needs {name} 1, 2 or 3: under stage 0 no state can move")
    if args.ds_config:
        try:
            if not isinstance(json.loads(Path(args.ds_config).read_text()), dict):
                problems.add(f"--ds_config {args.ds_config}: expected a JSON object")
        except (OSError, ValueError) as error:
            problems.add(f"--ds_config {args.ds_config} cannot be read as JSON: {error}")
    for name in ("log_interval", "num_train_epochs", "gradient_accumulation_steps"):
        if getattr(args, name) < 1:
            problems.add(f"--{name} {getattr(args, name)} must be at least 1")
    for name in ("max_train_steps", "num_warmup_steps", "gradient_clipping"):
        if getattr(args, name) < 0:
            problems.add(f"--{name} {getattr(args, name)} must be at least 0")


def check_positive(args: Any, names: list[str], problems: Problems) -> None:
    """Add a problem for each of these flags that is not above 0."""
    for name in names:
        if not getattr(args, name) > 0:
            problems.add(f"--{name} {getattr(args, name)} must be above 0")


def check_model(flag: str, name_or_path: str, args: Any, problems: Problems) -> Any:
    """Return the model's configuration, or None after adding why this is no model that can be loaded."""
    if not name_or_path:
        return None
    folder = Path(name_or_path)
    if folder.is_dir() and not (folder / "config.json").exists():
        near = next((n for n in ("export", "final") if (folder / n / "config.json").exists()), "")
        hint = f"; did you mean {folder / near}?" if near else "; give the folder that save_pretrained wrote"
        problems.add(f"{flag} {folder} holds no config.json, so it is no model{hint}")
        return None
    try:
        return AutoConfig.from_pretrained(name_or_path, trust_remote_code=args.trust_remote_code)
    except Exception as error:  # OSError, ValueError, KeyError ... by what is missing
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        problems.add(f"{flag} {name_or_path} is neither a model folder nor a hub model at hand: {first_line}")
        return None


def check_lora(flag: str, config: Any, module_name: str, args: Any, problems: Problems) -> None:
    """Add a problem when no linear layer's name contains `module_name`; no weights are made for that."""
    if config is None or module_name == "auto":
        return
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=args.trust_remote_code)
    try:
        lora_targets(linear_module_names(model), module_name)
    except ValueError as error:
        problems.add(str(error).replace("--lora_module_name", flag))


def check_tokenizer(
    flag: str, name_or_path: str, args: Any, problems: Problems
) -> PreTrainedTokenizerFast | None:
    """Return the tokenizer with eos and pad set, or None after adding what is wrong with it."""
    if not name_or_path:
        return None
    try:
        return load_tokenizer(
            name_or_path,
            eot_token=args.eot_token or None,
            add_eot_token=args.add_eot_token,
            trust_remote_code=args.trust_remote_code,
            flag=flag,
        )
    except ValueError as error:
        problems.add(str(error))
        return None


def check_length(config: Any, num_tokens: int, flags: str, problems: Problems) -> None:
    """Add a problem when a model has fewer positions than the flags ask for."""
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if limit and num_tokens > limit:
        problems.add(f"{flags}: {num_tokens} tokens are more than the model's {limit} positions; lower it")


def resolved_json(args: Any, **more: Any) -> str:
    """Return the flags with what they resolve to, as JSON."""
    return as_json(args, resolved_dtype=args.dtype or distributed.default_dtype_name(), **more)


def print_resolved(args: Any, **more: Any) -> None:
    """Print `resolved_json` on the first process: what --dry_run is for."""
    if distributed.is_main():
        print(resolved_json(args, **more))


def load_overrides(args: RunArguments) -> dict[str, Any]:
    """Return the DeepSpeed keys of --ds_config, {} without it."""
    return json.loads(Path(args.ds_config).read_text()) if args.ds_config else {}


def print_notes(args: Any) -> None:
    """Say once, on the first process, which given flags do nothing."""
    for note in no_effect_notes(args):
        print_note(note)


def print_note(text: str) -> None:
    """Say something on the first process, once, before the start."""
    if distributed.is_main():
        print(f"note: {text}", file=sys.stderr)


@contextlib.contextmanager
def as_problem(problems: Problems) -> Iterator[None]:
    """Turn a user's error (ValueError) in the block into the one message and exit code 2."""
    try:
        yield
    except ValueError as error:
        problems.add(str(error))
        problems.exit_if_any()


def _leave_at_once(*_: Any) -> None:
    """End the process: a KeyboardInterrupt gets lost where it meets a destructor or a callback of C++.

    Nothing is waited for: other threads and ranks may still stand in a collective.
    """
    os.write(2, b"stopped by Ctrl-C\n")
    os._exit(130)


def run_program(program: Callable[[], None]) -> None:
    """Run a program's main function.

    Ctrl-C, a refused step, and memory that ran out where a flag would help, end in one line without a
    traceback.
    """
    quiet_libraries()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell may have it ignored
        signal.signal(signal.SIGINT, _leave_at_once)
    try:
        program()
    except (FloatingPointError, MemoryError, StepRefused) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(3)
    finally:
        distributed.stop()
