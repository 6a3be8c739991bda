"""What a step will train on, before it does: counts, decoded rows with their masks, lengths, bad rows.

python -m tools.check_data --stage 1 --model_name_or_path MODEL --data_path FILE

The flags are those of the step. The rows are made as the step makes them; those of a lone data set stay in
its token cache. Only the tokenizer is loaded. The last line is the verdict; exit code 1 where the step could
not use the data.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import transformers

from common.data.data_options import DataOptions, check_sources
from common.data.dialogue import Template
from common.data.registry import import_plugins
from common.data.stage_datasets import StageData, build_data
from common.data.token_cache import TokenTable
from common.flags.args import Problems, flag
from common.flags.problems import no_effect_notes
from common.programs import startup
from tools.row_samples import Span, sample_lines, sequences_of, show
from tools.step_flags import STEP_NAMES, StageArguments, parse_step_args
from tools.terminal import paint, run_tool

LEGENDS = {
    1: [Span("context ", "context"), Span("learned", "learned"), Span(" end of turn", "learned special")],
    2: [Span("prompt, c ", "context"), Span("chosen", "learned"), Span(", r ", "context")]
    + [Span("rejected", "rejected")],
    3: [Span("prompt ", "context"), Span("special token", "special")],
}
MAX_MEASURED = 50_000  # rows whose masks are read: a second or two
NUM_BINS = 8
BAR_WIDTH = 40


@dataclass
class CheckDataArguments(StageArguments):
    """How the rows are shown."""

    num_samples: int = flag(3, "rows shown of each data set", low=0)


def main(argv: Sequence[str] | None = None) -> None:
    """Check the flags, then make, show and judge the rows of every data set."""
    transformers.logging.set_verbosity_error()
    problems = Problems()
    args = parse_step_args(CheckDataArguments, argv, description=__doc__.splitlines()[0], problems=problems)
    options = DataOptions.of(args, args.stage)
    template = check_flags(args, options, problems)
    startup.print_note(*no_effect_notes(args, argv))
    wrong = []
    if args.num_samples:
        print(show(LEGENDS[args.stage]))
    num_train = num_eval = num_bad = 0
    sources = [("data_path", path) for path in options.data_path]
    sources += [("sft_only_data_path", path) for path in options.sft_only_data_path]
    for name, path in sources:  # the rows of a data set do not depend on the others
        alone = dataclasses.replace(options, **{"data_path": [], "sft_only_data_path": [], name: [path]})
        try:
            data = show_source(path, alone, args.num_samples, template)
        except (ValueError, OSError) as error:
            wrong.append(str(error))
            print(paint(str(error), "bad"))
            continue
        num_train, num_eval = num_train + len(data.train), num_eval + len(data.eval)
        num_bad += data.report.num_bad
    if num_bad > args.max_bad_rows:  # each data set alone had few enough
        wrong.append(f"{num_bad} rows are bad, more than --max_bad_rows {args.max_bad_rows}; mend them")
    if wrong:
        told = "; ".join(text.splitlines()[0].removesuffix(" The first:") for text in wrong)
        print("\n" + paint("not ok:", "bad") + f" {told}")
        raise SystemExit(1)
    verdict = f"{num_train:,} rows to train, {num_eval:,} held out"
    print("\n" + paint("ok:", "good") + f" {verdict}")


def check_flags(args: Any, options: DataOptions, problems: Problems) -> Template:
    """Return the template when all flags are right, else leave with all that are not."""
    import_plugins(args.plugins, problems)
    for problem in options.problems():
        problems.add(problem)
    name = "actor_model_name_or_path" if args.stage == 3 else "model_name_or_path"
    path = getattr(args, name)
    tokenizer = startup.check_tokenizer(f"--{name}", path, args, problems)
    template, notes = startup.find_template(f"--{name}", path, args, tokenizer, problems)
    problems.exit_if_any()
    assert template is not None
    startup.print_note(*notes)
    return template


def show_source(path: str, options: DataOptions, num_samples: int, template: Template) -> StageData:
    """Print all there is to say of one data set, and return its rows.

    Raises:
        ValueError: the step could not use it.
    """
    told = f"{STEP_NAMES[options.stage]}, template {template.name}, at most {options.max_tokens} tokens"
    print("\n" + paint(path, "title") + f"  {told}", flush=True)
    found = check_sources(options)
    if found:
        raise ValueError("\n".join(found))
    data = build_data(options, template)
    lines = [line.removeprefix(f"{data.report.kind} data: ") for line in data.report.lines()]
    print(lines[0], *(paint(line, "note") for line in lines[1:]), "", sep="\n")
    print("\n".join(length_lines(length_columns(options.stage, data.train))))
    for line in sample_lines(data.train, num_samples, options, template):
        print(line)
    return data


# ---- lengths --------------------------------------------------------------------------------------------


def length_columns(stage: int, table: TokenTable) -> dict[str, np.ndarray]:
    """Return the tokens of each part of a row, (rows,) int64 by its name, of MAX_MEASURED rows at most.

    The last part is what a batch is as wide as.
    """
    step = -(-len(table) // MAX_MEASURED)
    rows = [sequences_of(table[i]) for i in range(0, len(table), step)]
    whole = np.array([[len(sequence.ids) for sequence in row] for row in rows])  # (rows, sequences)
    scored = np.array([[sum(sequence.loss_mask) for sequence in row] for row in rows])
    if stage == 3:
        return {"prompt": whole[:, 0]}
    if stage == 1:
        return {"context": (whole - scored)[:, 0], "learned": scored[:, 0], "whole row": whole[:, 0]}
    parts = {"prompt": (whole - scored)[:, 0], "chosen": scored[:, 0], "rejected": scored[:, 1]}
    return parts | {"longer row": whole.max(axis=1)}


def length_lines(columns: dict[str, np.ndarray]) -> list[str]:
    """Return a table of the parts, then the last of them as a histogram."""
    names = ("min", "median", "p95", "max")
    lines = [paint(f"{'tokens':<12}" + "".join(f"{name:>9}" for name in names), "title")]
    for name, lengths in columns.items():
        numbers = np.percentile(lengths, (0, 50, 95, 100)).round().astype(int)
        lines.append(f"{name:<12}" + "".join(f"{number:>9,}" for number in numbers))
    lines += ["", paint(f"{name}, tokens", "title")]
    low, high = int(lengths.min()), int(lengths.max())
    width = -(-(high - low + 1) // NUM_BINS)
    counts = np.bincount((lengths - low) // width)
    for i, count in enumerate(counts.tolist()):
        first, last = low + i * width, min(low + (i + 1) * width - 1, high)
        label = f"{first:,}-{last:,}" if last > first else f"{first:,}"
        bar = "#" * (round(BAR_WIDTH * count / counts.max()) or bool(count))
        share = f"{label:<12}{count:>9,} {count / len(lengths):>6.1%}  "
        lines.append((share + paint(bar, "learned")).rstrip())
    return lines


if __name__ == "__main__":
    run_tool(main)
