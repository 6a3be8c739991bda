"""What a step will train on, before it does: counts, decoded rows with their masks, lengths, bad rows.

python -m tools.check_data --stage 1 --model_name_or_path MODEL --data_path FILE

The flags are those of the step. The rows are made as the step makes them; those of a lone data set stay in
its token cache. Only the tokenizer is loaded. The last line is the verdict; exit code 1 where the step could
not use the data.
"""

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import transformers

from common.data.data_options import DataOptions
from common.data.dialogue import Template
from common.data.plugins import import_plugins
from common.data.source_checks import check_sources
from common.data.stage_datasets import StageData, build_data
from common.data.token_cache import TokenTable
from common.flags.args import Problems, flag
from common.flags.flag_values import no_effect_notes
from common.programs import startup
from tools.findings import paint, run_tool, use_color
from tools.row_samples import KINDS, sample_lines, sequences_of
from tools.step_flags import STEP_NAMES, StageArguments, parse_step_args

LEGENDS = {
    1: (("context", "context"), ("learned", "learned"), ("end of turn", "learned special")),
    2: (("prompt", "context"), ("chosen", "learned"), ("rejected", "rejected")),
    3: (("prompt", "context"), ("special token", "special")),
}
PLAIN_LEGENDS = {1: "context [[learned]]", 2: "prompt, c [[chosen]], r [[rejected]]", 3: "prompt"}
MAX_MEASURED = 50_000  # rows whose masks are read: a second or two
NUM_BINS = 8
BAR_WIDTH = 40


@dataclass
class CheckDataArguments(StageArguments):
    """How the rows are shown."""

    num_samples: int = flag(3, "rows shown of each data set", low=0)
    no_color: bool = flag(False, "brackets in place of colours; also by NO_COLOR, and where no terminal is")


def main(argv: Sequence[str] | None = None) -> None:
    """Check the flags, then make, show and judge the rows of every data set."""
    transformers.logging.set_verbosity_error()
    argv = sys.argv[1:] if argv is None else list(argv)
    problems = Problems()
    args = parse_step_args(CheckDataArguments, argv, description=__doc__.splitlines()[0], problems=problems)
    template = check_flags(args, problems)
    for note in no_effect_notes(args, argv):
        print(f"note: {note}", file=sys.stderr)
    wrong, verdict = show_all(args, template)
    has_color = use_color(args.no_color)
    if wrong:
        told = "; ".join(text.splitlines()[0].removesuffix(" The first:") for text in wrong)
        print("\n" + paint("not ok:", "bad", has_color) + f" {told}")
        raise SystemExit(1)
    print("\n" + paint("ok:", "good", has_color) + f" {verdict}")


def check_flags(args: Any, problems: Problems) -> Template:
    """Return the template when all flags are right, else leave with all that are not."""
    import_plugins(args.plugins, problems)
    for problem in DataOptions.of(args, args.stage).problems():
        problems.add(problem)
    name = "actor_model_name_or_path" if args.stage == 3 else "model_name_or_path"
    path = getattr(args, name)
    tokenizer = startup.check_tokenizer(f"--{name}", path, args, problems)
    template, notes = startup.find_template(f"--{name}", path, args, tokenizer, problems)
    problems.exit_if_any()
    assert template is not None
    startup.print_note(*notes)
    return template


def show_all(args: Any, template: Template) -> tuple[list[str], str]:
    """Print what there is to say of every data set; return what is wrong, and how many rows there are."""
    has_color = use_color(args.no_color)
    if args.num_samples:
        colored = "  ".join(paint(text, style, True) for text, style in LEGENDS[args.stage])
        print(colored if has_color else PLAIN_LEGENDS[args.stage])
    num_train = num_eval = num_bad = 0
    wrong: list[str] = []
    options = DataOptions.of(args, args.stage)
    # The rows of a data set do not depend on the others.
    of_each = [dataclasses.replace(options, data_path=[p], sft_only_data_path=[]) for p in options.data_path]
    of_each += [
        dataclasses.replace(options, data_path=[], sft_only_data_path=[p]) for p in options.sft_only_data_path
    ]
    for options in of_each:
        try:
            data = show_source(options, args, template, has_color)
        except (ValueError, OSError) as error:
            wrong.append(str(error))
            print(paint(str(error), "bad", has_color))
            continue
        num_train, num_eval = num_train + len(data.train), num_eval + len(data.eval)
        num_bad += data.report.num_bad
    if num_bad > args.max_bad_rows:  # each data set alone had few enough
        wrong.append(f"{num_bad} rows are bad, more than --max_bad_rows {args.max_bad_rows}; mend them")
    return wrong, f"{num_train:,} rows to train, {num_eval:,} held out"


def show_source(options: DataOptions, args: Any, template: Template, has_color: bool) -> StageData:
    """Print all there is to say of one data set, and return its rows.

    Raises:
        ValueError: the step could not use it.
    """
    (name,) = options.data_path or options.sft_only_data_path
    told = f"{STEP_NAMES[options.stage]}, template {template.name}, at most {options.max_tokens} tokens"
    print("\n" + paint(name, "title", has_color) + f"  {told}", flush=True)
    found = check_sources(options)
    if found:
        raise ValueError("\n".join(found))
    data = build_data(options, template)
    lines = [line.removeprefix(f"{data.report.kind} data: ") for line in data.report.lines()]
    print(lines[0], *(paint(line, "note", has_color) for line in lines[1:]), "", sep="\n")
    columns = length_columns(options.stage, data.train)
    print("\n".join(length_lines(columns, has_color)))
    if options.stage != 3:
        widths = list(columns.values())[-1]
        print(padding_line(widths, args.per_device_train_batch_size, options.seed))
    for line in sample_lines(data.train, args.num_samples, options, template, has_color):
        print(line)
    return data


# ---- lengths --------------------------------------------------------------------------------------------


def length_columns(stage: int, table: TokenTable) -> dict[str, np.ndarray]:
    """Return the tokens of each part of a row, (rows,) int64 by its name, of MAX_MEASURED rows at most.

    The last part is what a batch is as wide as.
    """
    step = -(-len(table) // MAX_MEASURED)
    rows = [sequences_of(KINDS[stage], table[i]) for i in range(0, len(table), step)]
    whole = np.array([[len(sequence.ids) for sequence in row] for row in rows])  # (rows, sequences)
    scored = np.array([[sum(sequence.counts) for sequence in row] for row in rows])
    if stage == 3:
        return {"prompt": whole[:, 0]}
    if stage == 1:
        return {"context": (whole - scored)[:, 0], "learned": scored[:, 0], "whole row": whole[:, 0]}
    parts = {"prompt": (whole - scored)[:, 0], "chosen": scored[:, 0], "rejected": scored[:, 1]}
    return parts | {"longer row": whole.max(axis=1)}


def length_lines(columns: dict[str, np.ndarray], has_color: bool) -> list[str]:
    """Return a table of the parts, then the last of them as a histogram."""
    names = ("min", "median", "p95", "max")
    lines = [paint(f"{'tokens':<12}" + "".join(f"{name:>9}" for name in names), "title", has_color)]
    for name, lengths in columns.items():
        numbers = np.percentile(lengths, (0, 50, 95, 100)).round().astype(int)
        lines.append(f"{name:<12}" + "".join(f"{number:>9,}" for number in numbers))
    lines += ["", paint(f"{name}, tokens", "title", has_color)]
    low, high = int(lengths.min()), int(lengths.max())
    width = -(-(high - low + 1) // NUM_BINS)
    counts = np.bincount((lengths - low) // width)
    for i, count in enumerate(counts.tolist()):
        first, last = low + i * width, min(low + (i + 1) * width - 1, high)
        label = f"{first:,}-{last:,}" if last > first else f"{first:,}"
        bar = "#" * (round(BAR_WIDTH * count / counts.max()) or bool(count))
        share = f"{label:<12}{count:>9,} {count / len(lengths):>6.1%}  "
        lines.append((share + paint(bar, "learned", has_color)).rstrip())
    return lines


def padding_line(lengths: np.ndarray, num_rows: int, seed: int) -> str:
    """Return how much of batches of `num_rows` rows would be padding: as they come, and with like lengths."""
    whole = len(lengths) // num_rows * num_rows
    if not whole:
        return f"{len(lengths):,} rows do not fill a batch of {num_rows}"

    def share(ordered: np.ndarray) -> str:
        batches = ordered[:whole].reshape(-1, num_rows)
        return f"{1 - batches.sum() / (batches.max(axis=1).sum() * num_rows):.1%}"

    mixed = share(np.random.default_rng(abs(seed)).permutation(lengths))
    alike = share(np.sort(lengths))
    return f"padding in batches of {num_rows} rows: {mixed}, with --group_by_length at least {alike}"


if __name__ == "__main__":
    run_tool(main)
