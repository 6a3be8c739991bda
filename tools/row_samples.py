"""Rows of a step as a person reads them: their text, and what of it is learned or scored."""

from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from common.data.data_options import DataOptions
from common.data.dialogue import Template, response_start
from common.data.token_cache import TokenTable
from tools.terminal import paint, use_color, visible

MAX_SHOWN = 1600  # characters of one span; of a longer one the beginning and the end are shown


class TokenSequence(NamedTuple):
    """One sequence of a row: its tokens, which of them are learned or scored, and where its context ends."""

    ids: list[int]
    loss_mask: list[bool]
    start: int


class Span(NamedTuple):
    """A piece of text of one kind, a key of findings.STYLES."""

    text: str
    kind: str


def sequences_of(row: dict[str, Any]) -> list[TokenSequence]:
    """Return the sequences of a row of any step: one, or the two of a pair."""
    if "input_ids" in row:
        return [TokenSequence(row["input_ids"], row["loss_mask"], response_start(row["loss_mask"]))]
    if "prompt_ids" in row:
        ids = row["prompt_ids"]
        return [TokenSequence(ids, [False] * len(ids), len(ids))]
    result = []
    for side in ("chosen", "rejected"):
        ids, start = row[f"{side}_ids"], row[f"{side}_response_start"]
        result.append(TokenSequence(ids, [i >= start for i in range(len(ids))], start))
    return result


def sample_lines(
    table: TokenTable, num_samples: int, options: DataOptions, template: Template
) -> Iterator[str]:
    """Yield `num_samples` rows as lines, evenly spaced over the table."""
    count = min(num_samples, len(table))
    for i in range(count):
        row = table[(2 * i + 1) * len(table) // (2 * count)]
        sequences = sequences_of(row)
        is_full = any(len(sequence.ids) >= options.max_tokens for sequence in sequences)
        note = paint(f", which fill the {options.max_tokens} allowed", "note") if is_full else ""
        yield ""
        yield paint(visible(row["row_id"]), "title") + f"  {_counts(row, sequences)}{note}"
        yield from _text_lines(sequences, template)
        if row.get("fields", "{}") != "{}":
            yield f"  fields {shorten(visible(row['fields']))}"


def _counts(row: dict[str, Any], sequences: list[TokenSequence]) -> str:
    counted = [sum(sequence.loss_mask) for sequence in sequences]
    if "prompt_ids" in row:
        return f"prompt {len(sequences[0].ids)} tokens"
    if len(sequences) == 1:
        return f"context {len(sequences[0].ids) - counted[0]}, learned {counted[0]} tokens"
    margin = f", margin {row['margin']:g}" if row["margin"] else ""
    return f"prompt {sequences[0].start}, chosen {counted[0]}, rejected {counted[1]} tokens{margin}"


def _text_lines(sequences: list[TokenSequence], template: Template) -> Iterator[str]:
    """Yield the text of a row behind a margin; of a pair what both share, once, then the answers."""
    first = sequences[0]
    if len(sequences) == 1:
        blocks = [("  | ", spans_of(first, template))]
    else:
        shared = TokenSequence(first.ids[: first.start], first.loss_mask[: first.start], first.start)
        chosen = spans_of(first, template, start=first.start)
        rejected = spans_of(sequences[1], template, start=sequences[1].start, style="rejected")
        blocks = [("  | ", spans_of(shared, template)), ("  c ", chosen), ("  r ", rejected)]
    for margin, spans in blocks:
        for line in show(spans).split("\n"):
            yield (margin + line).rstrip()


def spans_of(
    sequence: TokenSequence, template: Template, *, start: int = 0, style: str = "learned"
) -> list[Span]:
    """Return the tokens from `start` on as spans of one kind each; `style` is that of scored ones.

    A span's text is what its tokens add to the text of all before them: decoded alone, the tokens of some
    tokenizers lose the space at their start.
    """
    ids, special_ids = sequence.ids, {*template.tokenizer.all_special_ids, template.eot_id}
    special = {"context": "special", style: f"{style} special"}
    kinds = [style if is_scored else "context" for is_scored in sequence.loss_mask]
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
