"""PURE: a message and its reply, and the text form in which the demo writes them."""

from typing import NamedTuple

_BEFORE, _AFTER = "\n\nHuman: ", "\n\nAssistant:"


class Turn(NamedTuple):
    """One human message and the human reply to it, whitespace normalised."""

    context: str
    reply: str


def format_prompt(context: str) -> str:
    """The prompt of hh-rlhf's own form; the reply follows after one space."""
    return f"{_BEFORE}{context}{_AFTER}"


def context_of(prompt: str) -> str:
    """The message inside a prompt that `format_prompt` made. Raises ValueError for any other text."""
    if not (prompt.startswith(_BEFORE) and prompt.endswith(_AFTER)):
        raise ValueError(f"{prompt!r} is no prompt of build_inputs.py; run that program again")
    return prompt[len(_BEFORE) : len(prompt) - len(_AFTER)]
