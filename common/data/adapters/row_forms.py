"""The usual forms of a row, told apart by their columns."""

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any, NamedTuple

from common.data.adapters import message_trees, rankings
from common.data.adapters.row_parts import (
    filled_text,
    finite_number,
    messages_from_prompt,
    parse_turns,
    reply_text,
    reply_texts,
    split_transcripts,
)
from common.data.example import BadRow, Example, Message

_SIDES = ("chosen", "rejected")


def _pair(row: Mapping[str, Any]) -> list[Example]:
    prompt = messages_from_prompt(row["prompt"])
    if isinstance(row["chosen"], list | tuple) and isinstance(row["rejected"], list | tuple):
        prompt = _with_turns(prompt, _shared_turns(row["chosen"], row["rejected"]))
    return [_pair_after(prompt, row, row["chosen"], row["rejected"])]


def _transcripts(row: Mapping[str, Any]) -> list[Example]:
    chosen, rejected = row["chosen"], row["rejected"]
    if isinstance(chosen, list) and isinstance(rejected, list):
        prompt = _shared_turns(chosen, rejected)
        if not prompt:
            raise BadRow("there is no turn before the reply in chosen, and no 'prompt'")
        return [_pair_after(prompt, row, chosen, rejected)]
    texts = (filled_text(name, row[name]) for name in _SIDES)
    shared, reply, other = split_transcripts(*texts)
    return [_pair_after(messages_from_prompt(shared), row, reply, other)]


def _conversation_pair(row: Mapping[str, Any]) -> list[Example]:
    """`chosen` and `rejected` are texts, or turns that follow the conversation, each alone or in a list."""
    prompt = parse_turns("conversations", row["conversations"])
    turns = (row[name] if isinstance(row[name], str | list | tuple) else [row[name]] for name in _SIDES)
    return [_pair_after(prompt, row, *turns)]


def _pair_after(prompt: tuple[Message, ...], row: Mapping[str, Any], chosen: Any, rejected: Any) -> Example:
    """A pair; it is a tie where the scores that UltraFeedback's pairs bring along prefer neither answer."""
    scores = [row.get(name) for name in ("score_chosen", "score_rejected")]
    return Example(
        prompt=prompt,
        chosen=reply_text("chosen", chosen),
        rejected=reply_text("rejected", rejected),
        margin=finite_number("margin", row.get("margin") or 0.0),
        is_tie=None not in scores and scores[0] == scores[1],
    )


def _shared_turns(chosen: Any, rejected: Any) -> tuple[Message, ...]:
    """The turns before the last one, which must be the same in both."""
    turns = parse_turns("chosen", chosen)[:-1]
    if turns != parse_turns("rejected", rejected)[:-1]:
        raise BadRow("chosen and rejected do not share the turns before their last one")
    return turns


def _with_turns(prompt: tuple[Message, ...], turns: tuple[Message, ...]) -> tuple[Message, ...]:
    """The whole context, where the answers' lists bring turns too; `prompt` must be among them."""
    if not turns:
        return prompt
    told, said = ([(m.role, m.content.strip()) for m in messages] for messages in (prompt, turns))
    if not any(said[i : i + len(told)] == told for i in range(len(said))):
        raise BadRow("the turns before the reply in chosen do not hold 'prompt'")
    return turns


def _answer_lists(row: Mapping[str, Any]) -> list[Example]:
    prompt = messages_from_prompt(row["prompt"])
    chosen, rejected = (reply_texts(name, row[name]) for name in ("pos_answers", "neg_answers"))
    return [Example(prompt=prompt, chosen=a, rejected=b) for a, b in product(chosen, rejected)]


def _prompt_and(answer: str) -> Callable[[Mapping[str, Any]], list[Example]]:
    def to_examples(row: Mapping[str, Any]) -> list[Example]:
        return [Example(prompt=messages_from_prompt(row["prompt"]), chosen=reply_text(answer, row[answer]))]

    return to_examples


def _instruction(row: Mapping[str, Any]) -> list[Example]:
    question = filled_text("instruction", row["instruction"])
    if row.get("input"):
        question = f"{question}\n\n{filled_text('input', row['input'])}"
    return [Example(prompt=(Message("user", question),), chosen=reply_text("output", row["output"]))]


def _messages(row: Mapping[str, Any]) -> list[Example]:
    messages = parse_turns("messages", row["messages"])
    if messages[-1].role != "assistant":
        return [Example(prompt=messages)]
    return [_whole_dialogue("messages", messages)]


def _conversation(row: Mapping[str, Any]) -> list[Example]:
    """All that the assistant says is learnt; what the user says after its last turn is left out."""
    messages = parse_turns("conversations", row["conversations"])
    ends = [i + 1 for i, message in enumerate(messages) if message.role == "assistant"]
    if not ends:
        return [Example(prompt=messages)]
    return [_whole_dialogue("conversations", messages[: ends[-1]])]


def _whole_dialogue(column: str, messages: tuple[Message, ...]) -> Example:
    """Turns of which the last one is the assistant's, all of whose turns are learnt."""
    if len(messages) == 1:
        raise BadRow(f"{column!r} begins with its only turn of the assistant")
    reply = filled_text(f"the last reply of {column}", messages[-1].content)
    return Example(prompt=messages[:-1], chosen=reply, learn_all_turns=True)


def _message_of_a_tree(row: Mapping[str, Any]) -> list[Example]:
    return message_trees.tree_examples({message_trees.TREE: [row]})


def _prompt_only(row: Mapping[str, Any]) -> list[Example]:
    return [Example(prompt=messages_from_prompt(row["prompt"]))]


def _plain_text(row: Mapping[str, Any]) -> list[Example]:
    return [Example(text=filled_text("text", row["text"]))]


class RowForm(NamedTuple):
    """Columns, how such a row is read, the steps it can serve, and what else tells the form."""

    columns: tuple[str, ...]
    to_examples: Callable[[Mapping[str, Any]], list[Example]]
    stages: tuple[int, ...]
    fits: Callable[[Mapping[str, Any]], bool] | None = None


# The first form whose columns are all there is the row's form.
_HELPSTEER3 = ("context", "response1", "response2", "overall_preference")
_HELPSTEER2 = ("prompt", "response_1", "response_2", "preference_strength")
_ALL, _NO_PAIRS = (1, 2, 3), (1, 3)
ROW_FORMS = (
    RowForm(("prompt", *_SIDES), _pair, _ALL),
    RowForm(("prompt", "pos_answers", "neg_answers"), _answer_lists, _ALL),
    RowForm(("prompt", "ranked_answers"), rankings.best_first, _ALL),
    RowForm(("prompt", "responses", "scores"), rankings.numbered_responses("scores"), _ALL),
    RowForm(("prompt", "responses", "ranks"), rankings.numbered_responses("ranks"), _ALL),
    RowForm(("prompt", "answers"), rankings.ranked_objects, _ALL, rankings.has_ranked_objects),
    RowForm(("instruction", "completions"), rankings.completions, _ALL),
    RowForm(_HELPSTEER3, rankings.two_responses(*_HELPSTEER3), _ALL),
    RowForm(_HELPSTEER2, rankings.two_responses(*_HELPSTEER2), _ALL),
    RowForm(("conversations", *_SIDES), _conversation_pair, _ALL),
    RowForm(_SIDES, _transcripts, _ALL),
    RowForm(("message_id", "text", "role"), _message_of_a_tree, _ALL, lambda row: "parent_id" in row),
    RowForm(("prompt", "answer"), _prompt_and("answer"), _NO_PAIRS),
    RowForm(("prompt", "response"), _prompt_and("response"), _NO_PAIRS),
    RowForm(("prompt", "chosen"), _prompt_and("chosen"), _NO_PAIRS),
    RowForm(("instruction", "output"), _instruction, _NO_PAIRS),
    RowForm(("messages",), _messages, _NO_PAIRS),
    RowForm(("conversations",), _conversation, _NO_PAIRS),
    RowForm(("prompt",), _prompt_only, (3,)),
    RowForm(("text",), _plain_text, (1,)),
)


def form_of(row: Mapping[str, Any]) -> RowForm | None:
    """The form of a row, or None when its columns fit none."""
    present = {column for column, value in row.items() if value is not None}
    for form in ROW_FORMS:
        if present.issuperset(form.columns) and (form.fits is None or form.fits(row)):
            return form
    return None


def accepted_forms(stage: int | None = None) -> str:
    """The column sets that a step can use, for a message."""
    return " | ".join("/".join(form.columns) for form in ROW_FORMS if stage is None or stage in form.stages)


def read_row(row: Mapping[str, Any]) -> list[Example]:
    """Examples of a row of any form.

    Raises:
        BadRow: no form fits, or a column holds the wrong thing.
    """
    form = form_of(row)
    if form is None:
        filled = [repr(column) for column, value in row.items() if value is not None]
        raise BadRow(f"columns {', '.join(filled) or 'none'} fit none of {accepted_forms()}")
    return form.to_examples(row)
