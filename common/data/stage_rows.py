"""Examples to the token rows of each step."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from common.data.adapters.message_trees import TREE
from common.data.adapters.rankings import SCORED
from common.data.data_options import DataOptions
from common.data.data_report import DataReport
from common.data.dialogue import Encoded, Template, Tokenised, response_start, truncate
from common.data.example import BadRow, Example

_AS_JSON = TypeAdapter(Any)  # NaN and infinity are null
MAX_FIELD_CHARACTERS = 4096  # of one field's JSON: answers and labels pass, whole documents do not
# An Example has them already.
CARRIED_COLUMNS = {"prompt", "chosen", "rejected", "messages", "conversations", TREE, SCORED}


class Item(NamedTuple):
    """An Example with its name and place, already known to serve the step."""

    example: Example
    row_id: str
    location: str
    fields: str = "{}"  # the raw row's other columns as JSON, where the step's rows have them


@dataclass(frozen=True)
class RowKind:
    """What a step's rows hold, and how a batch of Examples becomes rows."""

    name: str
    stage: int
    columns: dict[str, str]  # see token_cache.COLUMN_TYPES
    text_key: Callable[[Example], Any]  # examples of one raw row with equal keys would give the same row
    to_rows: Callable[..., list[dict[str, Any]]]


def sft_rows(
    items: Sequence[Item], template: Template, report: DataReport, options: DataOptions
) -> list[dict[str, Any]]:
    """input_ids, loss_mask (True = a target; never the first token, which nothing predicts), row_id."""

    def learnt(example: Example) -> list:
        if example.text is not None:
            return [template.text_segments(example.text)]
        return [template.segments(example.prompt, example.chosen, learn_all_turns=example.learn_all_turns)]

    rows = []
    for item, (row,) in _tokenise(items, template, report, options.max_tokens, learnt):
        ids, mask, truncated = _truncate(row, options.max_tokens, template)
        mask = [False] + (mask[1:] if options.loss_on == "response" else [True] * (len(ids) - 1))
        report.num_truncated += truncated
        report.num_straddling += row.straddles
        report.num_tokens += len(ids)
        rows.append({"input_ids": ids, "loss_mask": mask, "row_id": item.row_id})
    return rows


def pair_rows(
    items: Sequence[Item], template: Template, report: DataReport, options: DataOptions
) -> list[dict[str, Any]]:
    """Both answers after the same context; a pair whose answers are alike teaches nothing and is skipped."""

    def both(example: Example) -> list:
        return [template.segments(example.prompt, answer) for answer in (example.chosen, example.rejected)]

    rows = []
    for item, (chosen, rejected) in _tokenise(items, template, report, options.max_tokens, both):
        if chosen.input_ids == rejected.input_ids:
            report.num_identical += 1
            continue
        longer = max(len(row.input_ids) - response_start(row.response_mask) for row in (chosen, rejected))
        chosen_row, rejected_row = (
            _truncate(row, options.max_tokens, template, max_response_tokens=longer)
            for row in (chosen, rejected)
        )
        if chosen_row.input_ids == rejected_row.input_ids:
            report.num_identical_truncated += 1
            continue
        report.num_truncated += chosen_row.truncated or rejected_row.truncated
        report.num_straddling += chosen.straddles or rejected.straddles
        report.num_tokens += len(chosen_row.input_ids) + len(rejected_row.input_ids)
        rows.append(
            {
                "chosen_ids": chosen_row.input_ids,
                "rejected_ids": rejected_row.input_ids,
                "chosen_response_start": response_start(chosen_row.response_mask),
                "rejected_response_start": response_start(rejected_row.response_mask),
                "margin": item.example.margin,
                "row_id": item.row_id,
            }
        )
    return rows


def prompt_rows(
    items: Sequence[Item], template: Template, report: DataReport, options: DataOptions
) -> list[dict[str, Any]]:
    """prompt_ids (the last `max_tokens` of them), row_id, the prompt's whole text, the raw row's fields."""

    def prompt(example: Example) -> list:
        return [template.segments(example.prompt, None)]

    rows = []
    for item, (row,) in _tokenise(items, template, report, options.max_tokens, prompt):
        ids, _, truncated = _truncate(row, options.max_tokens, template)
        report.num_truncated += truncated
        report.num_tokens += len(ids)
        text = template.prompt_text(item.example.prompt)
        rows.append({"prompt_ids": ids, "row_id": item.row_id, "prompt_text": text, "fields": item.fields})
    return rows


def _truncate(row: Tokenised, max_tokens: int, template: Template, **more: int) -> Encoded:
    least = _least_context(max_tokens, template)
    return truncate(row, max_tokens, bos_id=template.bos_id, min_context_tokens=least, **more)


def _least_context(max_tokens: int, template: Template) -> int:
    """Tokens of context that a long response leaves: with special tokens around turns, half of the row."""
    return max_tokens // 2 if template.keeps_headers else 1


def _tokenise(
    items: Sequence[Item],
    template: Template,
    report: DataReport,
    max_tokens: int,
    to_segments: Callable[[Example], list],
) -> list[tuple[Item, list[Tokenised]]]:
    """Items that the template can show, each with the tokens of its texts, from one batch."""
    kept, segments, num_texts = [], [], 0
    for item in items:
        try:
            texts = to_segments(item.example)
            for segment in (segment for text in texts for segment in text):
                segment.text.encode()
        except UnicodeEncodeError as error:
            report.add_bad(item.location, f"the text has half of a surrogate pair at character {error.start}")
            continue
        except BadRow as error:
            report.add_bad(item.location, str(error))
            continue
        kept.append(item)
        segments += texts
        num_texts = len(texts)
    flat = template.tokenise_batch(segments)
    rows = [flat[i : i + num_texts] for i in range(0, len(flat), num_texts or 1)]
    if template.keeps_headers:
        for i, item in enumerate(kept):
            if item.example.prompt and max(len(row.input_ids) for row in rows[i]) > max_tokens:
                with suppress(BadRow):  # a template that refuses the rest: the row is cut on its left
                    rows[i] = _shortened(item.example, rows[i], template, max_tokens, to_segments)
    return list(zip(kept, rows, strict=True))


def _shortened(
    example: Example,
    rows: list[Tokenised],
    template: Template,
    max_tokens: int,
    to_segments: Callable[[Example], list],
) -> list[Tokenised]:
    """The texts of an Example after a prompt that leaves room for the longest response."""
    longest = max(len(row.input_ids) - response_start(row.response_mask) for row in rows)
    room = max(max_tokens - longest, _least_context(max_tokens, template))
    shorter = replace(example, prompt=template.shorten(example.prompt, room))
    return [row._replace(is_shortened=True) for row in template.tokenise_batch(to_segments(shorter))]


# ---- what a reward function may see of a raw row besides its prompt


def build_row_fields(row: Mapping[str, Any]) -> str:
    """A JSON object of the row's columns, less CARRIED_COLUMNS, long fields and what JSON cannot hold.

    NaN and infinity become null, for other languages' JSON knows neither. Arrays become lists, dates texts.
    """
    parts = []
    for name, value in row.items():
        if name in CARRIED_COLUMNS:
            continue
        with suppress(ValueError):  # neither a type nor a text (half of a surrogate pair) that JSON can hold
            text = _AS_JSON.dump_json(value, fallback=_to_list).decode()
            if len(text) <= MAX_FIELD_CHARACTERS:
                parts.append(f"{_AS_JSON.dump_json(name).decode()}:{text}")
    return "{" + ",".join(parts) + "}"


def _to_list(value: Any) -> Any:
    """numpy's and torch's arrays and numbers as Python's."""
    if not hasattr(value, "tolist"):
        raise ValueError(f"{type(value).__name__} is no JSON")
    return value.tolist()


SFT = RowKind(
    "sft",
    1,
    {"input_ids": "ids", "loss_mask": "mask", "row_id": "text"},
    lambda example: (example.prompt, example.chosen, example.text),
    sft_rows,
)
PAIR = RowKind(
    "pair",
    2,
    {
        "chosen_ids": "ids",
        "rejected_ids": "ids",
        "chosen_response_start": "int",
        "rejected_response_start": "int",
        "margin": "float",
        "row_id": "text",
    },
    lambda example: (example.prompt, example.chosen, example.rejected),
    pair_rows,
)
PROMPT = RowKind(
    "prompt",
    3,
    {"prompt_ids": "ids", "row_id": "text", "prompt_text": "text", "fields": "text"},
    lambda example: example.prompt,
    prompt_rows,
)
KINDS = {kind.stage: kind for kind in (SFT, PAIR, PROMPT)}
