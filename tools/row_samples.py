"""Rows of a step as a person reads them: their text, what of it counts, and what was cut off."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from common.data.data_options import DataOptions
from common.data.data_report import DataReport
from common.data.dialogue import Template, response_start
from common.data.example import BadRow, missing_for
from common.data.registry import RawSource
from common.data.stage_rows import PAIR, PROMPT, SFT, Item, RowKind
from common.data.token_cache import TokenTable
from tools.painter import Painter, Span, indent, shorten, visible

KINDS = {kind.stage: kind for kind in (SFT, PAIR, PROMPT)}
UNCUT = 10**9  # tokens: more than any row has


class Cut(NamedTuple):
    """Tokens that the length limit took off a sequence."""

    context: int = 0  # at its left
    response: int = 0  # at its end


class TokenSequence(NamedTuple):
    """One sequence of a row: its tokens, which of them count, and where its context ends."""

    ids: list[int]
    counts: list[bool]
    start: int


def sequences_of(kind: RowKind, row: dict[str, Any]) -> list[TokenSequence]:
    """The sequences of a row of any kind."""
    if kind is SFT:
        return [TokenSequence(row["input_ids"], row["loss_mask"], response_start(row["loss_mask"]))]
    if kind is PROMPT:
        ids = row["prompt_ids"]
        return [TokenSequence(ids, [False] * len(ids), len(ids))]
    result = []
    for side in ("chosen", "rejected"):
        ids, start = row[f"{side}_ids"], row[f"{side}_response_start"]
        result.append(TokenSequence(ids, [i >= start for i in range(len(ids))], start))
    return result


class SampleReader:
    """Shows rows of a source's token table."""

    def __init__(self, source: RawSource, options: DataOptions, template: Template, painter: Painter) -> None:
        self._source, self._options, self._template, self._painter = source, options, template, painter
        self._kind = KINDS[options.stage]

    def lines(self, table: TokenTable, num_samples: int) -> Iterator[str]:
        """`num_samples` rows, evenly spaced over the table."""
        count = min(num_samples, len(table))
        rows = [table[(2 * i + 1) * len(table) // (2 * count)] for i in range(count)]
        raw_rows = self._find_raw({row["row_id"] for row in rows})
        for row in rows:
            yield from self._row_lines(row, self._cuts(row, raw_rows.get(row["row_id"])))

    def _row_lines(self, row: dict[str, Any], cuts: list[Cut]) -> Iterator[str]:
        painter, sequences = self._painter, sequences_of(self._kind, row)
        note = painter.paint(", truncated", "cut") if any(any(cut) for cut in cuts) else ""
        yield ""
        yield painter.paint(visible(row["row_id"]), "title") + f"  {self._counts(row, sequences)}{note}"
        if self._kind is PAIR:  # what both share, once; then the answers
            chosen, rejected = sequences
            shared = TokenSequence(chosen.ids[: chosen.start], chosen.counts[: chosen.start], chosen.start)
            yield self._block("  | ", self._spans(shared, Cut(context=cuts[0].context)))
            yield self._block("  c ", self._spans(chosen, Cut(response=cuts[0].response), first=chosen.start))
            cut = Cut(response=cuts[1].response)
            yield self._block("  r ", self._spans(rejected, cut, first=rejected.start, style="rejected"))
        else:
            yield self._block("  | ", self._spans(sequences[0], cuts[0]))
        if self._kind is PROMPT and row["fields"] != "{}":
            yield f"  fields {shorten(visible(row['fields']))}"

    def _counts(self, row: dict[str, Any], sequences: list[TokenSequence]) -> str:
        if self._kind is PROMPT:
            return f"prompt {len(sequences[0].ids)} tokens"
        counted = [sum(sequence.counts) for sequence in sequences]
        if self._kind is SFT:
            return f"context {len(sequences[0].ids) - counted[0]}, learned {counted[0]} tokens"
        margin = f", margin {row['margin']:g}" if row["margin"] else ""
        return f"prompt {sequences[0].start}, chosen {counted[0]}, rejected {counted[1]} tokens{margin}"

    def _block(self, margin: str, spans: list[Span]) -> str:
        return indent(self._painter.show(spans), margin)

    def _spans(
        self, sequence: TokenSequence, cut: Cut, *, first: int = 0, style: str = "learned"
    ) -> list[Span]:
        """Tokens from `first` on as spans of one kind each; `style` is the kind of those that count.

        A span's text is what its tokens add to the text of all before them: decoded alone, the tokens of some
        tokenizers lose the space at their start.
        """
        ids, special_ids = sequence.ids, {*self._template.tokenizer.all_special_ids, self._template.eot_id}
        special = {"context": "special", style: f"{style} special"}
        kinds = [style if counts else "context" for counts in sequence.counts]
        kinds = [special[k] if i in special_ids else k for i, k in zip(ids, kinds, strict=True)]
        behind_bos = int(ids[:1] == [self._template.bos_id])  # what was cut off stood here
        changes = {i for i in range(first + 1, len(ids)) if kinds[i] != kinds[i - 1]}
        borders = sorted({first, len(ids)} | changes | ({behind_bos} if cut.context else set()))
        spans, done = [], self._decode(ids[:first])
        for start, end in pairwise([*borders, len(ids)]):
            if cut.context and start == behind_bos:
                spans.append(_cut_span(cut.context))
            if start < end:
                text = self._decode(ids[:end])
                spans.append(Span(text[len(done) :], kinds[start]))
                done = text
        return [*spans, _cut_span(cut.response)] if cut.response else spans

    def _decode(self, ids: Sequence[int]) -> str:
        return self._template.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def _find_raw(self, row_ids: set[str]) -> dict[str, dict[str, Any]]:
        """Raw rows by the names of the rows made of them."""
        wanted: dict[str, list[str]] = {}
        for row_id in row_ids:  # several rows of one raw row are called name#0, name#1, ...
            for name in {row_id, row_id.rpartition("#")[0]}:
                wanted.setdefault(name, []).append(row_id)
        found: dict[str, dict[str, Any]] = {}
        rows = self._source.train
        for index in range(len(rows)):
            for row_id in wanted.get(rows.row_id(index), ()):
                found[row_id] = rows[index]
            if len(found) == len(row_ids):
                break
        return found

    def _cuts(self, row: dict[str, Any], raw_row: dict[str, Any] | None) -> list[Cut]:
        """What was cut off each sequence of a row: it is made once more, as it is and whole."""
        kind, uncut = self._kind, [Cut()] * (2 if self._kind is PAIR else 1)
        ids = [sequence.ids for sequence in sequences_of(kind, row)]
        try:
            examples = [] if raw_row is None else self._source.adapter.to_examples(raw_row)
        except BadRow:
            return uncut
        for example in examples:
            if missing_for(kind.stage, example) is not None:
                continue
            item = Item(example, row["row_id"], "")
            kept, whole = (self._sequences(item, limit) for limit in (self._options.max_tokens, UNCUT))
            if [sequence.ids for sequence in kept] == ids:
                return [_cut_between(k, w) for k, w in zip(kept, whole, strict=True)]
        return uncut

    def _sequences(self, item: Item, max_tokens: int) -> list[TokenSequence]:
        options = {"loss_on": "response"} if self._kind is SFT else {}
        rows = self._kind.to_rows([item], self._template, DataReport(), max_tokens=max_tokens, **options)
        return sequences_of(self._kind, rows[0]) if rows else []


def _cut_span(num_tokens: int) -> Span:
    return Span(f"[... {num_tokens:,} token{'s' if num_tokens > 1 else ''} cut ...]", "cut")


def _cut_between(kept: TokenSequence, whole: TokenSequence) -> Cut:
    num_kept, num_whole = len(kept.ids) - kept.start, len(whole.ids) - whole.start
    return Cut(context=whole.start - kept.start, response=num_whole - num_kept)
