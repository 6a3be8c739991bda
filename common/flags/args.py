"""Command-line flags as dataclasses: a field is a flag, its help stands beside it. No torch in here.

A program's arguments are one flat dataclass put together from the groups below (data only, no behaviour), so
every flag has one definition, one default and one help text. `parse_args` reads a command line into it and
collects every problem before it speaks: unknown flags with the nearest known one, values of the wrong type,
missing flags. `Problems` carries on from there: the start-up checks of a program add to it, and `exit_if_any`
prints them all once and leaves with exit code 2 before any model is loaded.
"""

import argparse
import dataclasses
import difflib
import functools
import re
import sys
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from common.flags.other_names import IGNORED, OLDER_NAMES, REMOVED, SWITCHES
from common.flags.problems import KINDS, RANGE, Problems, describe_range, is_usable, shortened
from common.flags.value_forms import Interval, TokenCaps

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
SCHEDULES = ("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup")
# The flags of a usual run: what --help shows of a program that has many; --help_all shows all of them.
USUAL = set(
    """model_name_or_path actor_model_name_or_path critic_model_name_or_path data_path data_split output_dir
    max_seq_len max_prompt_seq_len max_answer_seq_len template dtype zero_stage actor_zero_stage lora_dim
    actor_lora_dim learning_rate actor_learning_rate critic_learning_rate num_train_epochs max_train_steps
    per_device_train_batch_size per_device_generation_batch_size per_device_training_batch_size
    gradient_accumulation_steps gradient_checkpointing packed loss algorithm reward kl_coef
    num_samples_per_prompt enable_hybrid_engine eval_interval eval_fraction save_interval keep_best
    resume dry_run seed plugins""".split()
)
MOST_SHOWN = 40  # flags of a program that --help shows all of
REQUIRED = object()
NO_VALUE = object()  # what the parser gives for a flag without its value
T = TypeVar("T")


def flag(
    default: Any,
    help: str,
    *,
    choices: tuple = (),
    const: Any = None,
    only_with: str = "",
    may_change: bool = False,
    **limits: float,
) -> Any:
    """Return a dataclass field that `parse_args` turns into a flag.

    `default=REQUIRED` makes the flag mandatory; `const` is the value of a flag given without one;
    `only_with` names the flags without which this one does nothing, one of them at least: NAME, NAME=VALUE or
    NAME!=VALUE, "top_k top_p"; `may_change`: a resumed run may pass another value; results change by rounding
    only. A number (each number of a list) keeps its `limits`, named as in `RANGE`: from `low` to `high`;
    `above` and `below` may not be reached.
    """
    metadata = {
        "help": help,
        "choices": choices,
        "const": const,
        "only_with": only_with,
        "may_change": may_change,
        "range": limits,
        "required": default is REQUIRED,
    }
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=None if default is REQUIRED else default, metadata=metadata)


@dataclass
class SourceArguments:
    """Which data, and how their rows are read."""

    data_path: list[str] = flag(
        ["Dahoas/rm-static"],
        "data sets: files, folders, saved `datasets` folders, registered or hub names, "
        "MODULE:CLASS[:NAME or :ARGUMENT=VALUE,...]",
    )
    data_output_path: str = flag("", "folder of the token cache; empty: ~/.cache/triptych", may_change=True)
    template: str = flag(
        "",
        "dialogue form: Human:/Assistant: on lines of their own or on one, the tokenizer's own, or the "
        "prompt as it is; empty: what the model's triptych.json says, else human_assistant",
        choices=("human_assistant", "one_line", "chat", "plain"),
    )
    max_bad_rows: int = flag(100, "stop when more than N rows cannot be read", may_change=True, low=0)
    score_column: str = flag(
        "helpfulness", "column that ranks the answers of a prompt, for data with one answer a row"
    )
    columns: str = flag("", "what the rows call the columns of a form, such as prompt=Frage,response=Antwort")


@dataclass
class DataArguments(SourceArguments):
    """How the data are shared between the steps, and what is held out."""

    data_split: str = flag("2,4,4", "share of each data set for steps 1, 2 and 3; disjoint and stable")
    eval_fraction: float = flag(
        0.05, "held-out share of a data set that brings no evaluation part", low=0, below=1
    )


@dataclass
class TokenizerArguments:
    """The end-of-turn token, one across all steps."""

    add_eot_token: bool = flag(False, "add --eot_token to the vocabulary if the tokenizer lacks it")
    chat_template_kwargs: str = flag(
        "",
        'variables of the chat template as JSON, such as {"enable_thinking": false}; empty: those that the '
        "model was trained with",
    )
    eot_token: str = flag(
        "",
        "text of the end-of-turn token; empty: the tokenizer's EOS, or what its chat template ends turns by",
    )
    trust_remote_code: bool = flag(False, "run the code of a hub model", may_change=True)


@dataclass
class DecodeArguments:
    """How tokens are decoded."""

    no_cuda_graphs: bool = flag(
        False,
        "run the passes of decoding on a GPU one kernel after the other, as is done for models that "
        "cannot be captured",
        may_change=True,
    )


@dataclass
class ScheduleArguments:
    """How long, and how the learning rate moves."""

    gradient_accumulation_steps: int = flag(1, "micro-batches per optimizer step", may_change=True, low=1)
    num_train_epochs: int = flag(1, "passes over the data", may_change=True, low=1)
    max_train_steps: int = flag(0, "stop after N steps; 0: whole epochs", may_change=True, low=0)
    lr_scheduler_type: str = flag(
        "cosine",
        "learning-rate schedule",
        choices=SCHEDULES,
    )


@dataclass
class PackingArguments:
    """Micro-batches by tokens."""

    packed: bool = flag(
        False,
        "cut micro-batches by tokens: --max_tokens_per_micro_batch, or what its rows may have",
        may_change=True,
    )
    max_tokens_per_micro_batch: TokenCaps = flag(
        TokenCaps("0"),
        "size micro-batches by tokens that are computed, not by rows; TRAIN,SCORE: step 3's passes without "
        "gradients by SCORE; 0: by rows; steps 1 and 2 on a CPU: 2,048",
        may_change=True,
    )


@dataclass
class SharingArguments:
    """Sequences that begin alike."""

    no_share_prompts: bool = flag(
        False, "compute a prompt for each of its answers again, not once for all of them", may_change=True
    )


@dataclass
class RunArguments:
    """Precision, offload, seeds, output and launcher."""

    output_dir: str = flag("", "folder of everything that is saved; empty: nothing is saved", may_change=True)
    dtype: str = flag(
        "",
        "dtype of weights and activations; empty: bf16 on a GPU that has it, else fp32; auto: the same, but "
        "on a CPU the faster of fp32 and bf16, measured at the start, or what a resumed run had",
        choices=("fp32", "bf16", "fp16", "auto"),
    )
    offload: str = flag(
        "none",
        "offload to the CPU: optimizer state, parameters (ZeRO-3 only), or all; without a value: all",
        choices=("none", "optimizer", "param", "all"),
        const="all",
        may_change=True,
    )
    gradient_clipping: float = flag(1.0, "maximum global gradient norm; 0: no clipping", low=0)
    pad_vocab_multiple: int = flag(
        1, "pad the vocabulary to a multiple of this during training", low=1, high=2**16
    )
    seed: int = flag(1234, "seed of shuffling, dropout, new weights and sampling", low=-(2**32), high=2**32)
    deterministic: bool = flag(
        False,
        "on a GPU take only operations that sum in a fixed order (slower); what has no such form is an error",
        may_change=True,
    )
    trackers: list[str] = flag(
        [], "experiment trackers that get the metrics too", choices=TRACKERS, may_change=True
    )
    tensorboard_path: str = flag(
        "",
        "folder of TensorBoard's event files; empty: OUTPUT_DIR/tensorboard",
        may_change=True,
        only_with="trackers=tensorboard",
    )
    log_interval: int = flag(
        1, "print a line every N steps; metrics.jsonl has every step", may_change=True, low=1
    )
    ds_config: str = flag("", "JSON file merged over the DeepSpeed configuration that the flags make")
    plugins: list[str] = flag(
        [], "modules to import first; what they register can be named by flags", may_change=True
    )
    dry_run: bool = flag(
        False,
        "check flags and first rows, print the resolved configuration as JSON, load no model",
        may_change=True,
    )
    local_rank: int = flag(-1, "set by the deepspeed launcher", may_change=True, low=-1)


@dataclass
class CheckpointArguments:
    """Stopping, going on, and what goes wrong meanwhile."""

    save_interval: Interval = flag(
        Interval("500"),
        "save the whole state every so many steps, after each epoch, or after a time such as 30m, and at the "
        "end; 0: only when stopped",
        may_change=True,
    )
    save_total_limit: int = flag(2, "checkpoints that are kept, the newest; 0: all", may_change=True, low=0)
    resume: str = flag(
        "auto",
        "auto: resume from the newest valid checkpoint in --output_dir; never: refuse a folder "
        "with an earlier run; overwrite: replace that run; or a checkpoint's path",
        may_change=True,
    )
    max_bad_steps: int = flag(3, "skip at most this many non-finite steps, then stop", may_change=True, low=0)
    collective_timeout: float = flag(
        1800.0, "seconds to wait for a rank before all ranks are stopped", may_change=True, low=1, high=1e7
    )


def field_type(field: dataclasses.Field) -> tuple[type, bool]:
    """Return (scalar type, is a list) of a field's annotation such as `int | None` or `list[str]`."""
    annotation = field.type
    if typing.get_origin(annotation) is list:
        return typing.get_args(annotation)[0], True
    if isinstance(annotation, types.UnionType):
        annotation = next(a for a in typing.get_args(annotation) if a is not type(None))
    return annotation, False


def _build_parser(cls: type, description: str, *, shows_all: bool) -> argparse.ArgumentParser:
    shows_all = shows_all or len(dataclasses.fields(cls)) <= MOST_SHOWN
    more = "" if shows_all else " These are the flags of a usual run; --help_all shows all of them."
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--flag value ...]",
        description=description + more,
        formatter_class=functools.partial(argparse.HelpFormatter, max_help_position=36),
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    # -1e-3 and -2*model:PATH are values too, not flags: no flag of ours begins with a digit.
    parser._negative_number_matcher = re.compile(r"-\.?\d")  # type: ignore[attr-defined]
    names, groups = cls.__dataclass_fields__, {}
    bases = [base for base in reversed(cls.__mro__) if dataclasses.is_dataclass(base)]
    for field in dataclasses.fields(cls):
        owner = next(base for base in bases if field.name in base.__dataclass_fields__)
        if owner not in groups:
            title = (owner.__doc__ or owner.__name__).splitlines()[0].removesuffix(".")
            groups[owner] = parser.add_argument_group(title)
        scalar, is_list = field_type(field)
        default = field.default_factory() if is_list else field.default
        shown = "required" if field.metadata["required"] else f"default: {default!r}"
        text = field.metadata["help"]
        text = text if shows_all else text.split(";")[0]
        options: dict[str, Any] = {"help": f"{text} ({shown})".replace("%", "%%")}
        if not shows_all and field.name not in USUAL:
            options["help"] = argparse.SUPPRESS
        options["metavar"] = "|".join(map(str, field.metadata["choices"])) or scalar.__name__.upper()
        if scalar is bool:
            options |= {"nargs": "?", "const": "true", "metavar": "true|false"}
        elif is_list:
            options["nargs"] = "*"
        else:
            options |= {"nargs": "?", "const": field.metadata["const"] or NO_VALUE}
        older = OLDER_NAMES.get(field.name)
        is_free = older and older not in names
        groups[owner].add_argument(f"--{field.name}", *[f"--{older}"] * bool(is_free), **options)
    group = parser.add_argument_group("DeepSpeed-Chat's flags")
    for name, (flag_name, value) in SWITCHES.items():
        if flag_name in names:
            shown = f"as --{flag_name} {value}" if shows_all else argparse.SUPPRESS
            group.add_argument(f"--{name}", nargs="?", const="true", metavar="true|false", help=shown)
    for name, reason in IGNORED.items():
        if issubclass(cls, TokenizerArguments) and name not in names:
            shown = f"no effect: {reason}" if shows_all else argparse.SUPPRESS
            group.add_argument(f"--{name}", nargs="*", metavar="...", help=shown)
    return parser


def parse_args(
    cls: type[T],
    argv: Sequence[str] | None = None,
    *,
    description: str = "",
    problems: Problems,
    leading: str = "",
) -> T:
    """Return the flags of `argv` (default: this process's) as an instance of the dataclass `cls`.

    What is wrong goes into `problems`; the caller adds its own checks and then calls `exit_if_any`. Words
    before the first flag are those of the flag `leading`.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if leading and argv and not argv[0].startswith("-"):
        argv = [f"--{leading}", *argv]
    shows_all = "--help_all" in argv
    parser = _build_parser(cls, description, shows_all=shows_all)
    if shows_all:
        argv = ["--help"]

    def refuse(message: str) -> None:
        problems.add(message)
        problems.exit_if_any()

    parser.error = refuse  # type: ignore[method-assign,assignment]
    words, unknown = parser.parse_known_args(argv)
    given = vars(words)
    _apply_switches(given, problems)
    # Words behind an unknown flag are its values.
    for word in [word for word in unknown if word.startswith("-")] or unknown:
        _add_unknown(shortened(word), list(cls.__dataclass_fields__), problems)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        text, is_required = given.get(field.name), field.metadata["required"]
        if text is NO_VALUE:
            problems.add(f"--{field.name} needs a value: {field.metadata['help']}")
        elif is_required and not text:
            problems.add(f"--{field.name} is required: {field.metadata['help']}")
        elif text is not None:
            try:
                is_list = isinstance(text, list)
                values[field.name] = [_convert(field, t) for t in text] if is_list else _convert(field, text)
            except ValueError as error:  # the default stands in, so that the checks that follow can be made
                problems.add(str(error), flag=f"--{field.name}")
    return cls(**values)


def _apply_switches(given: dict[str, Any], problems: Problems) -> None:
    """Put the flags that switches stand for among those that were given."""
    for name in [name for name in SWITCHES if name in given]:
        (flag_name, value), text = SWITCHES[name], given[name].lower()
        if text not in ("true", "false"):
            problems.add(f"--{name} {shortened(text)}: expected true or false")
        elif text == "true" and flag_name == "trackers":
            given["trackers"] = [*given.get("trackers", []), value]
        elif text == "true":
            given.setdefault(flag_name, value)


def _add_unknown(word: str, known: list[str], problems: Problems) -> None:
    """Add the problem of a word that is no flag of the program and no flag's value."""
    name = word.split("=")[0]
    bare = name.removeprefix("--")
    if bare in REMOVED:
        problems.add(f"{name} has been removed: docs/migration.md has what there is instead")
    elif word.startswith("-"):
        near = difflib.get_close_matches(bare.replace("-", "_"), known, n=1)
        hint = f"; did you mean --{near[0]}?" if near else "; --help_all lists all flags"
        problems.add(f"unknown flag {name}{hint}")
    else:
        problems.add(f"unexpected word {word!r} among the flags")


def _convert(field: dataclasses.Field, text: str) -> Any:
    """Return the flag's value. Raises ValueError, with the message, when `text` is none."""
    scalar, limits, choices = field_type(field)[0], field.metadata["range"], field.metadata["choices"]
    shown = f"--{field.name} {shortened(text)}"
    if scalar is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{shown}: expected true or false")
        return text.lower() == "true"
    if text.lower() == "none" and types.NoneType in typing.get_args(field.type):
        return None
    try:
        value = scalar(text)
        if not is_usable(value):
            raise ValueError(text)
    except ValueError as error:
        raise ValueError(f"{shown}: expected {KINDS[scalar]}") from error
    if not all(RANGE[name][1](value, limit) for name, limit in limits.items()):
        raise ValueError(f"{shown} must be {describe_range(limits)}")
    if choices and value not in choices:
        raise ValueError(f"{shown}: choose from {', '.join(map(str, choices))}")
    return value
