"""Shows what a step will train on: counts, decoded rows with their masks, lengths, bad rows.

    python -m tools.check_data --stage 1 --model_name_or_path MODEL --data_path FILE

The flags are those of the step. The rows are built as the step builds them; a step on a single data set
reuses its token cache. Only the tokenizer is loaded. The last line is the verdict; the exit code is 1 if the
step could not use the data.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from common.flags.args import Problems, begin_tool, flag
from tools.step_flags import STEP_NAMES, StageArguments, parse_step_args


@dataclass
class CheckDataArguments(StageArguments):
    """Display of the rows."""

    num_samples: int = flag(3, "rows shown of each data set", low=0)


if __name__ == "__main__":
    begin_tool(CheckDataArguments, __doc__, parse_step_args)

import numpy as np
import transformers
from rich.text import Text

from common.data.data_options import DataOptions, check_sources
from common.data.dialogue import Template
from common.data.stage_datasets import StageData, build_data
from common.data.token_cache import TokenTable
from common.flags.plugins import import_plugins
from common.flags.streams import run_tool
from common.programs import conversation_form, model_checks, startup
from tools.terminal import CONSOLE, visible

CONTEXT = "bright_black"
LEARNED = "green"
REJECTED = "red"
SPECIAL = " reverse"  # suffix of a style: visible even if the text is blank
Span = tuple[str, str]  # text, style
LEGENDS: dict[str, list[Span]] = {
    "sft": [("context ", CONTEXT), ("learned", LEARNED), (" end of turn", LEARNED + SPECIAL)],
    "pair": [("prompt, c ", CONTEXT), ("chosen", LEARNED), (", r ", CONTEXT), ("rejected", REJECTED)],
    "rated": [("prompt, + ", CONTEXT), ("good", LEARNED), (", - ", CONTEXT), ("bad", REJECTED)],
    "prompt": [("prompt ", CONTEXT), ("special token", CONTEXT + SPECIAL)],
}
MAX_MEASURED = 50_000  # rows whose masks are read, in a second or two
MAX_SHOWN = 1600  # characters of a span; longer ones lose their middle
NUM_BINS, BAR_WIDTH = 8, 40


def main(argv: Sequence[str] | None = None) -> None:
    """Check the flags, then build, print and assess the rows of every data set."""
    transformers.logging.set_verbosity_error()
    problems = Problems()
    args = parse_step_args(CheckDataArguments, argv, description=__doc__.splitlines()[0], problems=problems)
    options = DataOptions.of(args, args.stage)
    template = check_flags(args, options, problems)
    startup.print_notes(args, argv)
    wrong = []
    if args.num_samples:
        CONSOLE.print(show(LEGENDS[options.kind]))
    num_train = num_eval = num_bad = 0
    sources = [("data_path", path) for path in options.data_path]
    sources += [("sft_only_data_path", path) for path in options.sft_only_data_path]
    for name, path in sources:  # rows of a data set do not depend on other data sets
        single_options = dataclasses.replace(
            options, **{"data_path": [], "sft_only_data_path": [], name: [path]}
        )
        form = f"{STEP_NAMES[args.stage]}, template {template.name}, at most {options.max_tokens} tokens"
        CONSOLE.print(Text.assemble("\n", (path, "bold"), f"  {form}"))
        try:
            data = build_source(single_options, template)
        except (ValueError, OSError) as error:
            wrong.append(str(error))
            CONSOLE.print(str(error), style="bold red")
            continue
        show_source(data, single_options, args.num_samples, template)
        num_train += len(data.train)
        num_eval += len(data.eval)
        num_bad += data.report.num_bad
    if num_bad > args.max_bad_rows:  # each data set alone is below the limit
        wrong.append(f"{num_bad} rows are bad, more than --max_bad_rows {args.max_bad_rows}; fix them")
    if wrong:
        reasons = "; ".join(text.splitlines()[0].removesuffix(" The first:") for text in wrong)
        CONSOLE.print(Text.assemble("\n", ("not ok:", "bold red"), f" {reasons}"))
        raise SystemExit(1)
    verdict = f"{num_train:,} rows to train, {num_eval:,} held out"
    CONSOLE.print(Text.assemble("\n", ("ok:", "bold green"), f" {verdict}"))


def check_flags(args: Any, options: DataOptions, problems: Problems) -> Template:
    """The template if all flags are valid; else exits with all problems."""
    import_plugins(args.plugins, problems)
    for problem in options.problems():
        problems.add(problem)
    name = "actor_model_name_or_path" if args.stage == 3 else "model_name_or_path"
    path = getattr(args, name)
    tokenizer = model_checks.check_tokenizer(f"--{name}", path, args, problems)
    template, notes = conversation_form.find_template(f"--{name}", path, args, tokenizer, problems)
    problems.exit_if_any()
    assert template is not None
    startup.print_note(*notes)
    return template


def build_source(options: DataOptions, template: Template) -> StageData:
    """The rows of a data set. Raises ValueError if the step could not use it."""
    if problems := check_sources(options, template.tokenizer):
        raise ValueError("\n".join(problems))
    return build_data(options, template)


def show_source(data: StageData, options: DataOptions, num_samples: int, template: Template) -> None:
    """Print counts and lengths of one data set, then rows evenly spaced over it."""
    first, *others = (line.removeprefix(f"{data.report.kind} data: ") for line in data.report.lines())
    CONSOLE.print(first)
    for line in others:
        CONSOLE.print(line, style="yellow")
    CONSOLE.print("", *length_lines(data.train), sep="\n")
    count = min(num_samples, len(data.train))
    for i in range(count):
        CONSOLE.print()
        for line in sample_lines(data.train[(2 * i + 1) * len(data.train) // (2 * count)], options, template):
            CONSOLE.print(line)


# ---- lengths --------------------------------------------------------------------------------------------


def part_lengths(row: dict[str, Any]) -> dict[str, int]:
    """Token counts of each part of a row of any step; the last one decides the width of a batch."""
    if "prompt_ids" in row:
        return {"prompt": len(row["prompt_ids"])}
    if "input_ids" in row:
        num_learned = sum(row["loss_mask"])
        num_tokens = len(row["input_ids"])
        return {"context": num_tokens - num_learned, "learned": num_learned, "whole row": num_tokens}
    sides = [side for side in ("answer", "chosen", "rejected") if f"{side}_ids" in row]
    lengths = {"prompt": row[f"{sides[0]}_response_start"]}
    lengths |= {side: len(row[f"{side}_ids"]) - row[f"{side}_response_start"] for side in sides}
    longest = "whole row" if sides == ["answer"] else "longer row"
    return lengths | {longest: max(len(row[f"{side}_ids"]) for side in sides)}


def length_lines(table: TokenTable) -> list[str]:
    """A table of the parts of at most MAX_MEASURED rows, then a histogram of the last of them."""
    rows = [part_lengths(table[i]) for i in range(0, len(table), -(-len(table) // MAX_MEASURED))]
    lines = [f"{'tokens':<12}" + "".join(f"{name:>9}" for name in ("min", "median", "p95", "max"))]
    for name in rows[0]:
        lengths = np.array([row[name] for row in rows])
        numbers = np.percentile(lengths, (0, 50, 95, 100)).round().astype(int)
        lines.append(f"{name:<12}" + "".join(f"{number:>9,}" for number in numbers))
    lines += ["", f"{name}, tokens"]
    edges = np.unique(np.linspace(lengths.min(), lengths.max() + 1, NUM_BINS + 1).astype(int))
    counts, _ = np.histogram(lengths, edges)
    for count, (first, end) in zip(counts.tolist(), pairwise(edges.tolist()), strict=True):
        label = f"{first:,}-{end - 1:,}" if end - first > 1 else f"{first:,}"
        bar = "#" * -(-BAR_WIDTH * count // int(counts.max()))
        lines.append(f"{label:<12}{count:>9,} {count / len(lengths):>6.1%}  {bar}".rstrip())
    return lines


# ---- samples --------------------------------------------------------------------------------------------


def sample_lines(row: dict[str, Any], options: DataOptions, template: Template) -> list[Text]:
    """A row's name and lengths, then its text with a margin: for responses the prompt once, then each
    response; then the fields of a prompt.
    """
    parts = part_lengths(row)
    facts = ", ".join(f"{name} {tokens}" for name, tokens in parts.items()) + " tokens"
    if row.get("margin"):
        facts += f", margin {row['margin']:g}"
    full = (
        f", which fill the {options.max_tokens} allowed" if max(parts.values()) >= options.max_tokens else ""
    )
    lines = [Text.assemble((visible(row["row_id"]), "bold"), f"  {facts}", (full, "yellow"))]
    sides = [("  c ", "chosen", LEARNED), ("  r ", "rejected", REJECTED)]
    if "label" in row:
        sides = [("  + ", "answer", LEARNED) if row["label"] else ("  - ", "answer", REJECTED)]
    ids = row.get("input_ids") or row.get("prompt_ids")
    if ids:
        sides = []
    else:
        first = sides[0][1]
        ids = row[f"{first}_ids"][: row[f"{first}_response_start"]]
    blocks = [("  | ", spans_of(ids, row.get("loss_mask", [False] * len(ids)), template))]
    for margin, side, style in sides:
        ids = row[f"{side}_ids"]
        start = row[f"{side}_response_start"]
        blocks.append((margin, spans_of(ids, [True] * len(ids), template, start=start, style=style)))
    for margin, spans in blocks:
        lines += [Text(margin).append_text(line) for line in show(spans).split("\n", allow_blank=True)]
    if row.get("fields", "{}") != "{}":
        lines.append(Text(f"  fields {shorten(visible(row['fields']))}"))
    return lines


def spans_of(
    ids: list[int], loss_mask: list[bool], template: Template, *, start: int = 0, style: str = LEARNED
) -> list[Span]:
    """Tokens from `start` on as spans of one style each; `style` marks scored ones.

    A span's text is the text decoded up to its end without the text before it: decoded alone, the tokens of
    some tokenizers lose their leading space.
    """
    special_ids = {*template.tokenizer.all_special_ids, template.eot_id}
    styles = [style if is_scored else CONTEXT for is_scored in loss_mask]
    styles = [s + SPECIAL if i in special_ids else s for i, s in zip(ids, styles, strict=True)]
    changes = [i for i in range(start + 1, len(ids)) if styles[i] != styles[i - 1]]

    def decode(end: int) -> str:
        return template.tokenizer.decode(
            ids[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    borders = pairwise([start, *changes, len(ids)])
    return [(decode(end)[len(decode(begin)) :], styles[begin]) for begin, end in borders if begin < end]


def show(spans: list[Span]) -> Text:
    """Concatenated spans, long ones shortened; without colours `[[` and `]]` surround scored text."""
    shown = [(shorten(visible(text)), style) for text, style in spans]
    if CONSOLE.color_system and not CONSOLE.no_color:
        return Text.assemble(*shown)
    result = Text()
    for is_context, group in groupby(shown, lambda span: span[1].startswith(CONTEXT)):
        text = "".join(text for text, _ in group)
        result.append(text if is_context else f"[[{text}]]")
    return result


def shorten(text: str) -> str:
    """Start and end of a text of more than MAX_SHOWN characters."""
    hidden = len(text) - MAX_SHOWN
    if hidden <= 0:
        return text
    return f"{text[: MAX_SHOWN // 2]} [... {hidden:,} characters ...] {text[-MAX_SHOWN // 2 :]}"


if __name__ == "__main__":
    run_tool(main)
