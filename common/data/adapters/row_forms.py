"""The usual forms of a row, told apart by their columns."""

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any, NamedTuple

from common.data.adapters import message_trees, rankings
from common.data.adapters.row_parts import (
    filled_text,
    finite_number,
    kind_of,
    messages_from_prompt,
    parse_messages,
    parse_turns,
    reply_text,
    split_transcripts,
)
from common.data.example import BadRow, EmptyRow, Example, Message


def _margin(row: Mapping[str, Any]) -> float:
    return finite_number("margin", row.get("margin") or 0.0)


def _scores_are_equal(row: Mapping[str, Any]) -> bool:
    """Whether the scores that UltraFeedback's pairs bring along prefer neither answer."""
    scores = [row.get(name) for name in ("score_chosen", "score_rejected")]
    return None not in scores and scores[0] == scores[1]


def _pair(row: Mapping[str, Any]) -> list[Example]:
    prompt = messages_from_prompt(row["prompt"])
    if isinstance(row["chosen"], list | tuple) and isinstance(row["rejected"], list | tuple):
        prompt = _with_turns(prompt, _shared_turns(row["chosen"], row["rejected"]))
    return [_pair_after(prompt, row, row["chosen"], row["rejected"])]


def _transcripts(row: Mapping[str, Any]) -> list[Example]:
    if isinstance(row["chosen"], list) and isinstance(row["rejected"], list):
        prompt = _shared_turns(row["chosen"], row["rejected"])
        if not prompt:
            raise BadRow("there is no turn before the reply in chosen, and no 'prompt'")
        return [_pair_after(prompt, row, row["chosen"], row["rejected"])]
    prompt, reply, other = split_transcripts(
        filled_text("chosen", row["chosen"]), filled_text("rejected", row["rejected"])
    )
    return [_pair_after(messages_from_prompt(prompt), row, reply, other)]


def _pair_after(prompt: tuple[Message, ...], row: Mapping[str, Any], chosen: Any, rejected: Any) -> Example:
    return Example(
        prompt=prompt,
        chosen=reply_text("chosen", chosen),
        rejected=reply_text("rejected", rejected),
        margin=_margin(row),
        is_tie=_scores_are_equal(row),
    )


def _shared_turns(chosen: Any, rejected: Any) -> tuple[Message, ...]:
    """The turns before the last one, which must be the same in both."""
    turns = parse_messages("chosen", chosen)[:-1]
    if turns != parse_messages("rejected", rejected)[:-1]:
        raise BadRow("chosen and rejected do not share the turns before their last one")
    return turns


def _with_turns(prompt: tuple[Message, ...], turns: tuple[Message, ...]) -> tuple[Message, ...]:
    """The whole context, where the answers' lists bring turns too; `prompt` must be among them."""
    told, said = ([(m.role, m.content.strip()) for m in messages] for messages in (prompt, turns))
    if not turns:
        return prompt
    if not any(said[i : i + len(told)] == told for i in range(len(said))):
        raise BadRow("the turns before the reply in chosen do not hold 'prompt'")
    return turns


def _answer_lists(row: Mapping[str, Any]) -> list[Example]:
    prompt = messages_from_prompt(row["prompt"])
    for column in ("pos_answers", "neg_answers"):
        if not isinstance(row[column], list | tuple):
            raise BadRow(f"{column!r} is {kind_of(row[column])}, not a list of texts")
        if not row[column]:
            raise EmptyRow(f"{column!r} is empty")
    chosen = [reply_text(f"pos_answers[{i}]", answer) for i, answer in enumerate(row["pos_answers"])]
    rejected = [reply_text(f"neg_answers[{i}]", answer) for i, answer in enumerate(row["neg_answers"])]
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
    messages = parse_messages("messages", row["messages"])
    if messages[-1].role != "assistant":
        return [Example(prompt=messages)]
    if len(messages) == 1:
        raise BadRow("'messages' holds only the assistant's turn")
    reply = filled_text("the last of 'messages'", messages[-1].content)
    return [Example(prompt=messages[:-1], chosen=reply, learn_all_turns=True)]


def _conversation(row: Mapping[str, Any]) -> list[Example]:
    """All that the assistant says is learnt; what the user says after its last turn is left out."""
    messages = parse_turns("conversations", row["conversations"])
    ends = [i for i, message in enumerate(messages) if message.role == "assistant"]
    if not ends:
        return [Example(prompt=messages)]
    prompt, reply = messages[: ends[-1]], messages[ends[-1]].content
    if not prompt:
        raise BadRow("'conversations' begins with its only turn of the assistant")
    return [Example(prompt=prompt, chosen=filled_text("the last reply", reply), learn_all_turns=True)]


def _conversation_pair(row: Mapping[str, Any]) -> list[Example]:
    """`chosen` and `rejected` are turns that follow the conversation, each alone or in a list."""
    prompt = parse_turns("conversations", row["conversations"])
    replies = []
    for column in ("chosen", "rejected"):
        value = row[column] if isinstance(row[column], str | list | tuple) else [row[column]]
        if not isinstance(value, str):
            last = parse_turns(column, value)[-1]
            if last.role != "assistant":
                raise BadRow(f"{column} ends with a turn of the {last.role}, not of the assistant")
            value = last.content
        replies.append(value)
    return [_pair_after(prompt, row, *replies)]


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
ROW_FORMS = (
    RowForm(("prompt", "chosen", "rejected"), _pair, (1, 2, 3)),
    RowForm(("prompt", "pos_answers", "neg_answers"), _answer_lists, (1, 2, 3)),
    RowForm(("prompt", "ranked_answers"), rankings.best_first, (1, 2, 3)),
    RowForm(("prompt", "responses", "scores"), rankings.responses_and_scores, (1, 2, 3)),
    RowForm(("prompt", "responses", "ranks"), rankings.responses_and_ranks, (1, 2, 3)),
    RowForm(("prompt", "answers"), rankings.ranked_objects, (1, 2, 3), rankings.has_ranked_objects),
    RowForm(("instruction", "completions"), rankings.completions, (1, 2, 3)),
    RowForm(("context", "response1", "response2", "overall_preference"), rankings.two_responses, (1, 2, 3)),
    RowForm(
        ("prompt", "response_1", "response_2", "preference_strength"),
        rankings.two_responses_and_strength,
        (1, 2, 3),
    ),
    RowForm(("conversations", "chosen", "rejected"), _conversation_pair, (1, 2, 3)),
    RowForm(("chosen", "rejected"), _transcripts, (1, 2, 3)),
    RowForm(("message_id", "text", "role"), _message_of_a_tree, (1, 2, 3), lambda row: "parent_id" in row),
    RowForm(
        ("message_tree_id", "prompt"), message_trees.nested_tree, (1, 2, 3), message_trees.has_nested_replies
    ),
    RowForm(("prompt", "answer"), _prompt_and("answer"), (1, 3)),
    RowForm(("prompt", "response"), _prompt_and("response"), (1, 3)),
    RowForm(("prompt", "chosen"), _prompt_and("chosen"), (1, 3)),
    RowForm(("instruction", "output"), _instruction, (1, 3)),
    RowForm(("messages",), _messages, (1, 3)),
    RowForm(("conversations",), _conversation, (1, 3)),
    RowForm(("prompt",), _prompt_only, (3,)),
    RowForm(("text",), _plain_text, (1,)),
)


def form_of(row: Mapping[str, Any]) -> RowForm | None:
    """The form of a row, or None when its columns fit none."""
    present = {column for column, value in row.items() if value is not None}
    return next(
        (
            form
            for form in ROW_FORMS
            if present.issuperset(form.columns) and (form.fits is None or form.fits(row))
        ),
        None,
    )


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
