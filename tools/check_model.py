"""Whether our passes compute with a saved model what transformers does: a line, a number for each check.

python -m tools.check_model MODEL
python -m tools.check_model MODEL --dtype bf16 --tp_sizes 2 4

MODEL is a causal LM or a reward model: a folder or a hub name. Scores, cached decoding and tensor-parallel
slices are compared with transformers' plain pass over the same weights, one row at a time. Weights are in
memory once; the tensor-parallel ranks, which come last, load their own. The last line is the verdict; exit
code 1 where a check failed.
"""

import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerFast

from common.data.plugins import import_plugins
from common.data.tokenizer import adds_bos
from common.flags.args import REQUIRED, Problems, TokenizerArguments, flag, parse_args
from common.flags.flag_values import given_flags, no_effect_notes
from common.models.loading import ModelOptions, load_causal_lm, plain_model
from common.models.value_model import load_value_model
from common.programs import startup
from common.ranks import distributed
from tools.findings import Finding, guarded, paint, run_tool, told, use_color
from tools.model_checks import Subject, find_causal, find_scores
from tools.tp_check import MAX_DEFAULT_SIZE, RankJob, check_ranks, plan_slices

# Rows are cut from it, so any tokenizer and any number of prompts will do.
TEXT = (
    "The harbour woke slowly. Two boats had come in before dawn with 340 crates of herring, and the men who "
    "unloaded them said little. A gull stood on the wall as if it had paid for the place. By seven the first "
    'carts were on the road: "Mind the ice!" someone called, and for once everybody did. What they sold that '
    "morning, at 2.75 a crate, was gone by noon; what they did not sell went to the smokehouse by the church."
)
LENGTHS = (5, 23, 2, 41, 12, 31, 8, 17)  # tokens of the prompts, in turn
_MIN_ROW = 2
WINDOWS = ("sliding_window", "window_size", "attention_chunk_size")  # as families call it


@dataclass
class CheckModelArguments(TokenizerArguments):
    """What is checked, and how much of it."""

    path: str = flag(REQUIRED, "the model, a folder or a hub name; as the first word it needs no --path")
    dtype: str = flag("fp32", "weights and activations; fp32 shows errors best", choices=("fp32", "bf16"))
    tp_sizes: list[int] = flag(
        [], f"tensor-parallel sizes; empty: those up to {MAX_DEFAULT_SIZE} that work, 1: none", low=1
    )
    prompts: int = flag(4, "rows of different lengths that are scored and continued", low=2)
    max_new_tokens: int = flag(16, "tokens of a continuation at most", low=1)
    tp_timeout_minutes: float = flag(
        20.0, "minutes that the ranks of one tensor-parallel size may take", above=0
    )
    no_color: bool = flag(False, "no colours; also by NO_COLOR, and where no terminal is")
    plugins: list[str] = flag([], "modules to import first: a tensor-parallel plan of your own, for one")


def main(argv: Sequence[str] | None = None) -> None:
    """Check the flags, load the model, print what is found and a verdict."""
    startup.quiet_libraries()
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv and not argv[0].startswith("-"):
        argv = ["--path", *argv]
    problems = Problems()
    args = parse_args(CheckModelArguments, argv, description=__doc__.splitlines()[0], problems=problems)
    tokenizer, is_reward = check_flags(args, problems)
    for note in no_effect_notes(args, argv):
        print(f"note: {note}", file=sys.stderr)
    if is_reward:
        for name in sorted(given_flags(argv) & {"tp_sizes", "max_new_tokens"}):
            print(f"note: --{name} has no effect: a reward model generates nothing", file=sys.stderr)
    has_color, findings = use_color(args.no_color), []
    for finding in find_all(args, tokenizer, problems, is_reward=is_reward):
        print(finding.line(has_color), flush=True)
        findings.append(finding)
    wrong = [finding.name for finding in findings if finding.is_ok is False]
    if wrong:
        print("\n" + paint("not ok:", "bad", has_color) + f" {', '.join(wrong)}")
        raise SystemExit(1)
    num_ok = sum(finding.is_ok is True for finding in findings)
    print("\n" + paint("ok:", "good", has_color) + f" {num_ok} checks of {args.path}, all within rounding")


def check_flags(args: CheckModelArguments, problems: Problems) -> tuple[PreTrainedTokenizerFast, bool]:
    """Return the tokenizer and whether it is a reward model, or leave with all that is wrong."""
    import_plugins(args.plugins, problems)
    config = startup.check_model("--path", args.path, args, problems)
    tokenizer, is_reward = None, False
    if config is not None:
        tokenizer = startup.check_tokenizer("--path", args.path, args, problems)
        num_tokens = args.max_new_tokens + _MIN_ROW
        startup.check_length(config, num_tokens, "--max_new_tokens and a prompt", problems)
        is_reward = any(name.endswith("ForSequenceClassification") for name in config.architectures or [])
        problems.check(
            not is_reward or config.num_labels == 1,
            f"--path {args.path} is a classifier of {config.num_labels} labels; a reward model has one",
        )
    problems.exit_if_any()
    assert tokenizer is not None
    return tokenizer, is_reward


def find_all(
    args: CheckModelArguments, tokenizer: PreTrainedTokenizerFast, problems: Problems, *, is_reward: bool
) -> Iterator[Finding]:
    """Load the model and yield all findings, or leave when it cannot be loaded."""
    options = ModelOptions(
        args.path, dtype=args.dtype, trust_remote_code=args.trust_remote_code, is_packed=True
    )
    load = load_value_model if is_reward else load_causal_lm
    try:
        loaded = load(options, len(tokenizer)).to(distributed.device()).eval()
    except Exception as error:  # transformers raises OSError, KeyError, RuntimeError, ... by what is missing
        reason = told(error)
        is_whole = reason.startswith(args.path)  # what our own loading says
        problems.add(f"--path {reason if is_whole else f'{args.path}: the model cannot be loaded: {reason}'}")
        problems.exit_if_any()
    model = plain_model(loaded.classifier) if is_reward else loaded
    num_new = 0 if is_reward else args.max_new_tokens
    rows = build_rows(tokenizer, model.config, args.prompts, max(num_new, 1))
    if is_reward:
        rows = [[*row, tokenizer.eos_token_id] for row in rows]
    print(describe(args.path, args.dtype, model, rows))
    yield from describe_limits(model, max(map(len, rows)) + num_new)
    subject = Subject(model, tokenizer, rows, args.dtype, args.max_new_tokens)
    if is_reward:
        yield from find_scores(subject, loaded)
        return
    yield from find_causal(subject)
    findings, uncut = plan_slices(model, args.tp_sizes)
    yield from findings
    del loaded, model, subject  # the ranks need the memory
    gc.collect()
    job = RankJob(options, len(tokenizer), rows, args.plugins, args.tp_timeout_minutes * 60)
    for tp_size, share in uncut.items():
        yield from guarded(f"tensor parallel {tp_size}", check_ranks, job, tp_size, share)


def build_rows(
    tokenizer: PreTrainedTokenizerFast, config: Any, num_rows: int, num_more: int
) -> list[list[int]]:
    """Return token rows of mixed lengths, each with room for `num_more` tokens in the model's positions."""
    ids = tokenizer(TEXT, add_special_tokens=False).input_ids
    head = [tokenizer.bos_token_id] if adds_bos(tokenizer) else []
    limit = getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    rows = []
    for i in range(num_rows):
        length = max(min(LENGTHS[i % len(LENGTHS)], limit - num_more), _MIN_ROW)
        rows.append(head + [ids[(7 * i + k) % len(ids)] for k in range(length - len(head))])
    return rows


def describe(path: str, dtype: str, model: Any, rows: Sequence[Sequence[int]]) -> str:
    """Return what was loaded, and what it is asked."""
    lengths = [len(row) for row in rows]
    num_parameters = sum(p.numel() for p in model.parameters())
    return (
        f"{path}: {type(model).__name__}, {num_parameters:,} parameters, {dtype} on "
        f"{model.device.type}; {len(lengths)} rows of {min(lengths)} to {max(lengths)} tokens"
    )


def describe_limits(model: Any, longest: int) -> Iterator[Finding]:
    """Yield what the checks cannot see: weights that were not saved, a window that rows do not reach."""
    own, loaded = model.config.architectures or [], type(model).__name__
    if own and loaded not in own:
        yield Finding("architecture", f"saved as {', '.join(own)}, loaded as {loaded}: its head may be new")
    windows = [getattr(model.config.get_text_config(), name, None) for name in WINDOWS]
    window = max((w for w in windows if isinstance(w, int)), default=0)
    if window > longest:
        text = f"rows end after {longest} tokens, the model's window is {window:,}: not reached"
        yield Finding("window", text)


if __name__ == "__main__":
    run_tool(main)
