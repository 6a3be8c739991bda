"""What a step will train on, before it does: counts, decoded rows with their masks, lengths, bad rows.

python -m tools.check_data --stage 1 --model_name_or_path MODEL --data_path FILE

The flags are those of the step. The rows are made as the step makes them; those of a lone data set stay in
its token cache. Only the tokenizer is loaded. The last line is the verdict; exit code 1 where the step could
not use the data.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import transformers

from common.data.data_options import DataOptions, check_sources
from common.data.dialogue import Template, response_start
from common.data.registry import import_plugins
from common.data.stage_datasets import StageData, build_data
from common.data.token_cache import TokenTable
from common.flags.args import Problems, flag
from common.programs import startup
from tools.step_flags import STEP_NAMES, StageArguments, parse_step_args
from tools.terminal import paint, run_tool, use_color, visible


class Span(NamedTuple):
    """A piece of text of one kind, a key of terminal.STYLES."""

    text: str
    kind: str


LEGENDS = {
    1: [Span("context ", "context"), Span("learned", "learned"), Span(" end of turn", "learned special")],
    2: [Span("prompt, c ", "context"), Span("chosen", "learned"), Span(", r ", "context")]
    + [Span("rejected", "rejected")],
    3: [Span("prompt ", "context"), Span("special token", "special")],
}
TokenMasks = list[tuple[list[int], list[bool]]]  # of each sequence of a row: ids, and which are scored
MAX_MEASURED = 50_000  # rows whose masks are read: a second or two
MAX_SHOWN = 1600  # characters of one span; of a longer one the beginning and the end are shown
NUM_BINS, BAR_WIDTH = 8, 40


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
    startup.print_notes(args, argv)
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
    print("\n".join(length_lines(data.train)))
    for line in sample_lines(data.train, num_samples, options, template):
        print(line)
    return data


# ---- lengths --------------------------------------------------------------------------------------------


def sequences_of(row: dict[str, Any]) -> TokenMasks:
    """Return ids and loss mask of the sequences of a row of any step: one, or the two of a pair."""
    if "input_ids" in row:
        return [(row["input_ids"], row["loss_mask"])]
    if "prompt_ids" in row:
        return [(row["prompt_ids"], [False] * len(row["prompt_ids"]))]
    result = []
    for side in ("chosen", "rejected"):
        ids, start = row[f"{side}_ids"], row[f"{side}_response_start"]
        result.append((ids, [i >= start for i in range(len(ids))]))
    return result


def part_lengths(row: dict[str, Any]) -> dict[str, int]:
    """Return the tokens of each part of a row by its name; the last is what a batch is as wide as."""
    sequences = sequences_of(row)
    whole = [len(ids) for ids, _ in sequences]
    scored = [sum(loss_mask) for _, loss_mask in sequences]
    if "prompt_ids" in row:
        return {"prompt": whole[0]}
    if len(sequences) == 1:
        return {"context": whole[0] - scored[0], "learned": scored[0], "whole row": whole[0]}
    parts = {"prompt": whole[0] - scored[0], "chosen": scored[0], "rejected": scored[1]}
    return parts | {"longer row": max(whole)}


def length_lines(table: TokenTable) -> list[str]:
    """Return a table of the parts of MAX_MEASURED rows at most, then the last of them as a histogram."""
    rows = [part_lengths(table[i]) for i in range(0, len(table), -(-len(table) // MAX_MEASURED))]
    names = ("min", "median", "p95", "max")
    lines = [paint(f"{'tokens':<12}" + "".join(f"{name:>9}" for name in names), "title")]
    for name in rows[0]:
        lengths = np.array([row[name] for row in rows])
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


# ---- samples --------------------------------------------------------------------------------------------


def sample_lines(
    table: TokenTable, num_samples: int, options: DataOptions, template: Template
) -> Iterator[str]:
    """Yield `num_samples` rows as lines, evenly spaced over the table."""
    count = min(num_samples, len(table))
    for i in range(count):
        row = table[(2 * i + 1) * len(table) // (2 * count)]
        *parts, (_, longest) = part_lengths(row).items()
        told = ", ".join(f"{name} {tokens}" for name, tokens in parts or [("prompt", longest)]) + " tokens"
        told += f", margin {row['margin']:g}" if row.get("margin") else ""
        if longest >= options.max_tokens:
            told += paint(f", which fill the {options.max_tokens} allowed", "note")
        yield ""
        yield paint(visible(row["row_id"]), "title") + f"  {told}"
        yield from _text_lines(sequences_of(row), template)
        if row.get("fields", "{}") != "{}":
            yield f"  fields {shorten(visible(row['fields']))}"


def _text_lines(sequences: TokenMasks, template: Template) -> Iterator[str]:
    """Yield the text of a row behind a margin; of a pair what both share, once, then the answers."""
    ids, loss_mask = sequences[0]
    if len(sequences) == 1:
        blocks = [("  | ", spans_of(ids, loss_mask, template))]
    else:
        start = response_start(loss_mask)
        blocks = [("  | ", spans_of(ids[:start], loss_mask[:start], template))]
        for margin, style, one in zip("cr", ("learned", "rejected"), sequences, strict=True):
            spans = spans_of(*one, template, start=response_start(one[1]), style=style)
            blocks.append((f"  {margin} ", spans))
    for margin, spans in blocks:
        for line in show(spans).split("\n"):
            yield (margin + line).rstrip()


def spans_of(
    ids: list[int], loss_mask: list[bool], template: Template, *, start: int = 0, style: str = "learned"
) -> list[Span]:
    """Return the tokens from `start` on as spans of one kind each; `style` is that of scored ones.

    A span's text is what its tokens add to the text of all before them: decoded alone, the tokens of some
    tokenizers lose the space at their start.
    """
    special_ids = {*template.tokenizer.all_special_ids, template.eot_id}
    special = {"context": "special", style: f"{style} special"}
    kinds = [style if is_scored else "context" for is_scored in loss_mask]
    kinds = [special[kind] if i in special_ids else kind for i, kind in zip(ids, kinds, strict=True)]
    changes = [i for i in range(start + 1, len(ids)) if kinds[i] != kinds[i - 1]]

    def decode(end: int) -> str:
        return template.tokenizer.decode(
            ids[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    borders = pairwise([start, *changes, len(ids)])
    return [Span(decode(end)[len(decode(begin)) :], kinds[begin]) for begin, end in borders if begin < end]


def show(spans: list[Span]) -> str:
    """Return spans end to end, long ones shortened; without colours `[[` and `]]` surround what is scored."""
    shown = [Span(shorten(visible(span.text)), span.kind) for span in spans if span.text]
    if shown:  # a template's own line breaks would look like empty lines of ours
        text = shown[0].text.lstrip("\n")
        shown[0] = Span("\\n" * (len(shown[0].text) - len(text)) + text, shown[0].kind)
    if use_color():
        return "".join(paint(*span) for span in shown)
    result = ""
    for is_scored, group in groupby(shown, lambda span: span.kind.startswith(("learned", "rejected"))):
        text = "".join(span.text for span in group)
        result += f"[[{text}]]" if is_scored else text
    return result


def shorten(text: str) -> str:
    """Return the beginning and the end of a text of more than MAX_SHOWN characters."""
    hidden = len(text) - MAX_SHOWN
    if hidden <= 0:
        return text
    return f"{text[: MAX_SHOWN // 2]} [... {hidden:,} characters ...] {text[-MAX_SHOWN // 2 :]}"


if __name__ == "__main__":
    run_tool(main)
