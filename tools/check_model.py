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

from common.data.dialogue import adds_bos
from common.data.registry import import_plugins
from common.flags.args import REQUIRED, Problems, TokenizerArguments, flag, parse_args
from common.models.loading import ModelOptions, load_causal_lm, plain_model
from common.models.value_model import load_value_model
from common.programs import startup
from common.ranks import distributed
from common.ranks.failures import first_line, kind_and_line
from tools.model_checks import Finding, Subject, check_generation, check_logprobs, check_scores
from tools.terminal import paint, run_tool
from tools.tp_check import MAX_DEFAULT_SIZE, check_ranks, choose_sizes

TEXT = "The harbour woke slowly: two boats had come in with 340 crates of herring. Mind the ice, they called!"
LENGTHS = (5, 23, 2, 41)  # tokens of the rows that are scored and continued


@dataclass
class CheckModelArguments(TokenizerArguments):
    """What is checked, and how much of it."""

    path: str = flag(REQUIRED, "the model, a folder or a hub name; as the first word it needs no --path")
    dtype: str = flag("fp32", "weights and activations; fp32 shows errors best", choices=("fp32", "bf16"))
    tp_sizes: list[int] = flag(
        [], f"tensor-parallel sizes; empty: those up to {MAX_DEFAULT_SIZE} that work, 1: none", low=1
    )
    max_new_tokens: int = flag(16, "tokens of a continuation at most", low=1)
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
    startup.print_notes(args, argv)
    findings = []
    for finding in find_all(args, tokenizer, problems, is_reward=is_reward):
        print(finding.line(), flush=True)
        findings.append(finding)
    wrong = [finding.name for finding in findings if finding.is_ok is False]
    if wrong:
        print("\n" + paint("not ok:", "bad") + f" {', '.join(wrong)}")
        raise SystemExit(1)
    num_ok = sum(finding.is_ok is True for finding in findings)
    print("\n" + paint("ok:", "good") + f" {num_ok} checks of {args.path}, all within rounding")


def check_flags(args: CheckModelArguments, problems: Problems) -> tuple[PreTrainedTokenizerFast, bool]:
    """Return the tokenizer and whether it is a reward model, or leave with all that is wrong."""
    import_plugins(args.plugins, problems)
    config = startup.check_model("--path", args.path, args, problems)
    tokenizer, is_reward = None, False
    if config is not None:
        tokenizer = startup.check_tokenizer("--path", args.path, args, problems)
        num_tokens = args.max_new_tokens + min(LENGTHS)
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
        problems.add(f"--path {told(error)}")
        problems.exit_if_any()
    model = plain_model(loaded.classifier) if is_reward else loaded
    rows = build_rows(tokenizer, model.config, args.max_new_tokens)
    num_parameters, lengths = sum(p.numel() for p in model.parameters()), [len(row) for row in rows]
    print(
        f"{args.path}: {type(model).__name__}, {num_parameters:,} parameters, {args.dtype} on "
        f"{model.device.type}; {len(rows)} rows of {min(lengths)} to {max(lengths)} tokens"
    )
    saved_as = model.config.architectures or []
    if saved_as and type(model).__name__ not in saved_as:
        text = f"saved as {', '.join(saved_as)}, loaded as {type(model).__name__}: its head may be new"
        yield Finding("architecture", text)
    if is_reward:
        rows = [[*row, tokenizer.eos_token_id] for row in rows]
    subject = Subject(model, tokenizer, rows, args.dtype, args.max_new_tokens)
    if is_reward:
        yield from guarded("scores", check_scores(subject, loaded))
        return
    yield from guarded("log-probabilities", check_logprobs(subject))
    yield from guarded("cached decoding", check_generation(subject))
    findings, tp_sizes = choose_sizes(model, args.tp_sizes)
    yield from findings
    del loaded, model, subject  # the ranks need the memory
    gc.collect()
    for tp_size in tp_sizes:
        found = check_ranks(tp_size, options, len(tokenizer), rows, args.plugins)
        yield from guarded(f"tensor parallel {tp_size}", found)


def guarded(name: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """Yield what a check finds; what it raises is a failure of this name, and the next check still runs."""
    try:
        yield from findings
    except Exception as error:  # the model's own code raises what it likes, and that it does is the finding
        yield Finding(name, told(error), is_ok=False)


def told(error: BaseException) -> str:
    """Return an error in one line: our own speak for themselves, others with their type."""
    return first_line(error) if type(error) is ValueError else kind_and_line(error)


def build_rows(tokenizer: PreTrainedTokenizerFast, config: Any, num_more: int) -> list[list[int]]:
    """Return token rows of LENGTHS, each with room for `num_more` tokens in the model's positions."""
    ids = tokenizer(TEXT, add_special_tokens=False).input_ids
    head = [tokenizer.bos_token_id] if adds_bos(tokenizer) else []
    limit = getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    rows = []
    for i, most in enumerate(LENGTHS):
        length = max(min(most, limit - num_more), min(LENGTHS)) - len(head)
        rows.append(head + [ids[(7 * i + k) % len(ids)] for k in range(length)])
    return rows


if __name__ == "__main__":
    run_tool(main)
