#!/usr/bin/env python
"""Talk to a saved model in the terminal.

python chat.py --path output/step3/export
An empty line or Ctrl-D leaves, `clear` forgets what was said.
"""

import sys
from dataclasses import dataclass

from common import startup
from common.args import REQUIRED, Problems, flag, parse_args
from common.data.example import Message
from common.generation.answering import Answerer, AnsweringArguments, load_answerer, load_template


@dataclass
class ChatArguments(AnsweringArguments):
    """A conversation."""

    path: str = flag(REQUIRED, "the model: an export/ folder, or a hub name")
    max_new_tokens: int = flag(128, "tokens of an answer at most")
    temperature: float = flag(0.7, "sampling temperature; 0 takes the likeliest token")
    top_k: int = flag(0, "sample from the k likeliest tokens only; 0: all")
    top_p: float = flag(0.95, "sample from the smallest set of tokens with this probability")


class Conversation:
    """What was said so far, and the model that answers."""

    def __init__(self, answerer: Answerer) -> None:
        self.answerer = answerer
        self.messages: list[Message] = []

    def answer(self, text: str) -> str:
        """Return the answer to the next message; the oldest turns are left out when room runs short."""
        self.messages.append(Message("user", text))
        [[reply]] = self.answerer.answer([self.messages])
        self.messages.append(Message("assistant", reply))
        return reply

    def clear(self) -> None:
        """Forget what was said."""
        self.messages = []


def load_conversation(args: ChatArguments, problems: Problems) -> Conversation:
    """Return a conversation with the model of --path, or leave with one message."""
    template = load_template("--path", args.path, args, problems)
    problems.exit_if_any()
    with startup.as_problem(problems):
        answerer = load_answerer(
            args.path,
            template,
            args,
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature or 1.0,
            top_k=args.top_k,
            top_p=args.top_p,
            do_sample=args.temperature > 0,
        )
    return Conversation(answerer)


def main() -> None:
    """Read a line, answer it, until there is none."""
    problems = Problems()
    args = parse_args(ChatArguments, description=__doc__.splitlines()[0], problems=problems)
    startup.check_positive(args, ["max_new_tokens", "top_p"], problems)
    problems.check(args.top_p <= 1, f"--top_p {args.top_p} must be at most 1, which takes all tokens")
    for name in ("temperature", "top_k"):
        problems.check(getattr(args, name) >= 0, f"--{name} {getattr(args, name)} must be at least 0")
    problems.exit_if_any()
    conversation = load_conversation(args, problems)
    is_terminal = sys.stdin.isatty()
    while True:
        try:
            text = input("you> " if is_terminal else "").strip()
        except EOFError:
            text = ""
        if not text:
            return
        if text == "clear":
            conversation.clear()
            continue
        print(f"bot> {conversation.answer(text)}", flush=True)


if __name__ == "__main__":
    startup.run_program(main)
