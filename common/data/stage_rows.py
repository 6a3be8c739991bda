"""Conversion of Examples to the token rows of each step."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from common.data.adapters.row_forms import TREE
from common.data.adapters.row_parts import check_encodable
from common.data.data_options import DataOptions
from common.data.dialogue import Segment, Template, Tokenised, response_start, truncate
from common.data.example import BadRow, Example, RewritesPast, one_for_each_reply
from common.data.token_cache import DataReport

MAX_FIELD_CHARACTERS = 4096  # limit of a field's JSON: enough for answers and labels, not documents
# Columns that the Example already contains.
CARRIED_COLUMNS = {"prompt", "chosen", "rejected", "messages", "conversations", TREE}
_AS_JSON = TypeAdapter(Any)  # writes NaN and infinity as null

# Columns of each kind of row, with types of token_cache.COLUMN_TYPES.
COLUMNS = {
    "sft": {"input_ids": "ids", "loss_mask": "mask", "conversation": "int", "row_id": "text"},
    "pair": {
        "chosen_ids": "ids",
        "rejected_ids": "ids",
        "chosen_response_start": "int",
        "rejected_response_start": "int",
        "margin": "float",
        "prompt_index": "int",
        "row_id": "text",
    },
    "rated": {"answer_ids": "ids", "answer_response_start": "int", "label": "int", "row_id": "text"},
    "prompt": {
        "prompt_ids": "ids",
        "row_id": "text",
        "prompt_text": "text",
        "messages": "text",
        "fields": "text",
    },
}


class Item(NamedTuple):
    """An Example with its name and location, known to be usable in the step."""

    example: Example
    row_id: str
    location: str
    prompt_index: int = 0  # shared by all pairs of a prompt, or all rows of a conversation
    fields: str = "{}"  # the raw row's other columns as JSON, if the step's rows have them


@dataclass(frozen=True)
class RowBuilder:
    """Builds the rows of step `options.stage`, and counts truncated and skipped ones in the report."""

    template: Template
    options: DataOptions
    report: DataReport

    def build(self, items: Sequence[Item]) -> list[dict[str, Any]]:
        """Rows of Examples, tokenised together.

        sft: input_ids, loss_mask (True = a target; never the first token, which nothing predicts),
            conversation: its number; it has several rows, one per reply, if the template rewrites earlier
            turns.
        pair: chosen_ids and rejected_ids after the same context, the starts of their responses, margin,
            prompt_index (the same of all pairs of a prompt). A pair with identical answers is skipped.
        rated: answer_ids, the start of the response, label (1 good, 0 bad).
        prompt: prompt_ids (truncated on the left), the prompt's full text and messages, the row's fields.
        All have a row_id.
        """
        make_row = {
            "sft": self._sft_row,
            "pair": self._pair_row,
            "rated": self._rated_row,
            "prompt": self._prompt_row,
        }[self.options.kind]
        rows = [(item, make_row(item, *tokenised)) for item, tokenised in self._tokenise(items)]
        return [row | {"row_id": item.row_id} for item, row in rows if row is not None]

    def _sft_row(self, item: Item, tokens: Tokenised) -> dict[str, Any]:
        row = self._truncate(tokens)
        if item.example.text is None:
            row = self._closed(row, is_response=False)
        ids, mask = row.input_ids, row.response_mask
        mask = [False] + (mask[1:] if self.options.loss_on == "response" else [True] * (len(ids) - 1))
        self._count(row)
        return {"input_ids": ids, "loss_mask": mask, "conversation": item.prompt_index}

    def _pair_row(self, item: Item, *pair: Tokenised) -> dict[str, Any] | None:
        if pair[0].input_ids == pair[1].input_ids:
            self.report.num_identical += 1
            return None
        longer = max(map(_response_length, pair))
        chosen, rejected = (self._truncate(row, longer) for row in pair)
        if chosen.input_ids == rejected.input_ids:
            self.report.num_identical_truncated += 1
            return None
        chosen, rejected = (self._closed(row, is_response=True) for row in (chosen, rejected))
        self._count(chosen, rejected)
        return {
            "chosen_ids": chosen.input_ids,
            "rejected_ids": rejected.input_ids,
            "chosen_response_start": response_start(chosen.response_mask),
            "rejected_response_start": response_start(rejected.response_mask),
            "margin": item.example.margin,
            "prompt_index": item.prompt_index,
        }

    def _rated_row(self, item: Item, tokens: Tokenised) -> dict[str, Any]:
        row = self._truncate(tokens)
        label = int(item.example.chosen is not None)
        self._count(row)
        self.report.num_good_answers += label
        self.report.num_bad_answers += 1 - label
        start = response_start(row.response_mask)
        return {"answer_ids": row.input_ids, "answer_response_start": start, "label": label}

    def _prompt_row(self, item: Item, tokens: Tokenised) -> dict[str, Any]:
        row = self._truncate(tokens)
        self._count(row)
        text = self.template.prompt_text(item.example.prompt, item.example.tools)
        messages = json.dumps([message.as_dict() for message in item.example.prompt])
        return {
            "prompt_ids": row.input_ids,
            "prompt_text": text,
            "messages": messages,
            "fields": item.fields,
        }

    def _count(self, *rows: Tokenised) -> None:
        self.report.num_truncated += any(row.is_truncated for row in rows)
        self.report.num_straddling += any(row.straddles for row in rows)
        self.report.num_tokens += sum(len(row.input_ids) for row in rows)

    def _texts(self, example: Example) -> list[list[Segment]]:
        """The texts of an Example to tokenise: two for a pair, else one."""
        if example.text is not None:
            return [self.template.text_segments(example.text)]
        kind = self.options.kind
        answers = {
            "sft": (example.chosen,),
            "pair": (example.chosen, example.rejected),
            "rated": (example.chosen or example.rejected,),
            "prompt": (None,),
        }[kind]
        learns_all = kind == "sft" and example.learn_all_turns
        segments = partial(self.template.segments, learn_all_turns=learns_all, tools=example.tools)
        return [segments(example.prompt, answer) for answer in answers]

    def _rendered(self, item: Item) -> list[tuple[Item, list[list[Segment]]]]:
        """The texts of an item, one per reply if the template rewrites earlier turns. Raises BadRow."""
        try:
            return [(item, self._texts(item.example))]
        except RewritesPast:
            examples = one_for_each_reply(item.example)
        self.report.num_split += 1
        parts = [item._replace(example=e, row_id=f"{item.row_id}#{n}") for n, e in enumerate(examples)]
        return [(part, self._texts(part.example)) for part in parts]

    def _tokenise(self, items: Sequence[Item]) -> list[tuple[Item, list[Tokenised]]]:
        """Items that the template can render, each with the tokens of its texts, tokenised as one batch."""
        kept, segments = [], []
        for item in items:
            try:
                parts = self._rendered(item)
                for segment in (segment for _, texts in parts for text in texts for segment in text):
                    check_encodable(segment.text)
            except BadRow as error:
                self.report.add_bad(item.location, str(error))
            else:
                kept += [part for part, _ in parts]
                segments += [text for _, texts in parts for text in texts]
        flat = iter(self.template.tokenise_batch(segments))
        rows = zip(flat, flat, strict=True) if self.options.kind == "pair" else zip(flat, strict=True)
        return [(item, self._shorten(item.example, list(row))) for item, row in zip(kept, rows, strict=True)]

    def _shorten(self, example: Example, rows: list[Tokenised]) -> list[Tokenised]:
        """The tokenised texts; if too long and headers must stay, whole turns of the prompt are dropped."""
        max_tokens = self._max_tokens
        is_short = max(len(row.input_ids) for row in rows) <= max_tokens
        if is_short or not example.prompt or not self.template.keeps_headers:
            return rows
        room = max(max_tokens - max(map(_response_length, rows)), self._least_context())
        with suppress(BadRow):  # the template rejects the shorter prompt: truncate the row on its left
            prompt = self.template.shorten(example.prompt, room, example.tools)
            shorter = replace(example, prompt=prompt)
            rows = self.template.tokenise_batch(self._texts(shorter))
            rows = [row._replace(is_truncated=True) for row in rows]
        return rows

    def _truncate(self, row: Tokenised, max_response_tokens: int = 0) -> Tokenised:
        return truncate(
            row,
            self._max_tokens,
            bos_id=self.template.bos_id,
            max_response_tokens=max_response_tokens,
            min_context_tokens=self._least_context(),
        )

    def _least_context(self) -> int:
        """Tokens of context kept before a long response: half of the row if headers must stay."""
        return self.options.max_tokens // 2 if self.template.keeps_headers else 1

    @property
    def _closing_ids(self) -> list[int]:
        """Token ids after the end of turn in rows of this step; none in pairs of a policy."""
        return self.template.closing_ids if self.options.kind == "sft" or self.options.is_scored else []

    @property
    def _max_tokens(self) -> int:
        return self.options.max_tokens - len(self._closing_ids)

    def _closed(self, row: Tokenised, *, is_response: bool) -> Tokenised:
        """The row with the template's closing, unless its end was truncated."""
        if row.input_ids[-1:] != [self.template.eot_id]:
            return row
        ids = row.input_ids + self._closing_ids
        return row._replace(
            input_ids=ids,
            response_mask=row.response_mask + [is_response] * (len(ids) - len(row.input_ids)),
        )


def _response_length(row: Tokenised) -> int:
    return len(row.input_ids) - response_start(row.response_mask)


def build_row_fields(row: Mapping[str, Any]) -> str:
    """Columns of a raw row that a reward can read besides its prompt, as a JSON object.

    CARRIED_COLUMNS, long fields and values that JSON cannot represent are left out. NaN and infinity become
    null, arrays lists, dates texts.
    """
    parts = []
    columns = {name: value for name, value in row.items() if name not in CARRIED_COLUMNS}
    for name, value in columns.items():
        with suppress(ValueError):  # a type or text (half of a surrogate pair) that JSON cannot represent
            text = _AS_JSON.dump_json(value, fallback=_to_list).decode()
            if len(text) <= MAX_FIELD_CHARACTERS:
                parts.append(f"{_AS_JSON.dump_json(name).decode()}:{text}")
    return "{" + ",".join(parts) + "}"


def _to_list(value: Any) -> Any:
    """Arrays and numbers of numpy and torch as Python's."""
    if not hasattr(value, "tolist"):
        raise ValueError(f"{type(value).__name__} is not JSON")
    return value.tolist()
