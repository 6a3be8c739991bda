#!/usr/bin/env python
"""Chat with a saved model in the terminal.

    python chat.py output/step3/export
    python chat.py output/sft/export --compare output/ppo/export --reward output/reward/export

PATH is an export/ folder, an adapter's folder, or a hub name. An empty line or Ctrl-D leaves, Ctrl-C ends a
response, /help shows the commands.
"""

import contextlib
import dataclasses
import errno
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from common.flags.args import REQUIRED, Problems, begin_tool, flag, parse_args, say_loading
from serving.arguments import SamplingArguments


@dataclass
class ChatArguments(SamplingArguments):
    """A conversation."""

    path: str = flag(REQUIRED, "the model: an export/ or adapter/ folder, or a hub name")
    compare: str = flag("", "second model, whose answers are shown beside the first's")
    reward: str = flag("", "reward model (export/ of step 2) that scores each answer")
    system: str = flag("", "system message of every conversation")
    max_new_tokens: int = flag(128, "maximum tokens of an answer", low=1)
    seed: int = flag(1234, "seed of the sampling", low=-(2**32), high=2**32)


if __name__ == "__main__":
    begin_tool(ChatArguments, __doc__, leading="path")
    say_loading()

from common.data.example import Message
from common.models.value_model import has_saved_head
from common.programs import running, startup
from common.programs.conversation_form import closing_of
from common.programs.reward_scorer import RewardScorer, load_frozen_value_model
from common.runs.durable_files import json_line, write_file
from serving.answering import (
    Answerer,
    Sampling,
    load_answerer,
    load_template,
)
from tools.terminal import visible

HELP = """\
/reset            clear the conversation (also: clear)
/system TEXT      set the system message; without TEXT: remove it
/temperature T    set the sampling temperature; 0: greedy
/save FILE        save the conversation as a row with `messages`, for steps 1 and 3
/help             this list
/quit             leave (also: /exit, an empty line, Ctrl-D)
//...              send a message that begins with a /
Ctrl-C stops the answer being generated; otherwise it leaves."""
QUIT_COMMANDS = ("/quit", "/exit")


# ---- display


def printable(text: str) -> str:
    """The text without control characters other than line breaks and tabs: a model must not control the
    terminal.
    """
    return visible(text, kept="\n\t")


@contextlib.contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Context with an event; Ctrl-C sets the event and has no other effect. Main thread only.

    A second Ctrl-C before the response has ended calls the previous handler, which exits the program.
    """
    is_interrupted = threading.Event()
    before = signal.getsignal(signal.SIGINT)

    def interrupt(*_: Any) -> None:
        is_interrupted.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield is_interrupted
    finally:
        signal.signal(signal.SIGINT, before)


class OneAfterAnother(contextlib.nullcontext):
    """Prints texts as they come; a pipe or a file gets them unchanged."""

    def add(self, number: int, text: str) -> None:
        """Print the next chunk of a text."""
        print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)


class SideBySide(Live):
    """Context that draws two texts in two columns of a terminal as they grow, and leaves the final texts on
    the screen.
    """

    def __init__(self, console: Console | None = None) -> None:
        # A live display taller than the screen cannot be redrawn: it is cropped, then printed whole below.
        console = console or Console(highlight=False)
        self._texts: list[Text] = []
        super().__init__(console=console, transient=True, get_renderable=self._table)

    def __enter__(self) -> "SideBySide":
        # Text objects, not markup: [red] in a response is literal text.
        self._texts = [Text(overflow="fold"), Text(overflow="fold")]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.console.print(self._table())

    def add(self, number: int, text: str) -> None:
        """Print the next chunk of a text."""
        self._texts[number].append(printable(text))

    def _table(self) -> Table:
        table = Table.grid(Column(ratio=1), Column(ratio=1), expand=True, padding=(0, 2))
        table.add_row(*self._texts)
        return table


# ---- conversations


@dataclass
class Conversation:
    """The turns so far without the system message, and the model that responds."""

    name: str
    answerer: Answerer
    said: list[Message] = field(default_factory=list)


Score = Callable[[list[Message]], str]  # of the last message as a response to those before it


@dataclass
class Session:
    """Conversations with one or two models, line by line; `system` starts each, unless it is empty."""

    conversations: list[Conversation]
    display: OneAfterAnother | SideBySide
    score: Score | None
    system: str

    def with_system(self, said: list[Message]) -> list[Message]:
        """The system message and the turns after it."""
        return [Message("system", self.system), *said] if self.system else said

    def set_temperature(self, text: str) -> str:
        """Change the temperature."""
        try:
            temperature = float(text)
        except ValueError:
            temperature = -1.0
        if not 0 <= temperature <= 100:
            return f"/temperature {text}: expected a number from 0 to 100"
        for conversation in self.conversations:
            answerer = conversation.answerer
            answerer.sampling = dataclasses.replace(answerer.sampling, temperature=temperature)
        return f"temperature {temperature:g}"

    def save(self, name: str) -> str:
        """Write every conversation as a line of JSON to a new file."""
        if not self.conversations[0].said:
            return f"/save {name}: the conversation is empty"
        lines = []
        for conversation in self.conversations:
            messages = [message.as_dict() for message in self.with_system(conversation.said)]
            lines.append(json_line({"messages": messages, "model": conversation.name}))
        try:
            path = Path(name).expanduser()
            if path.exists():
                raise FileExistsError(errno.EEXIST, "File exists")
            write_file(path, "".join(lines))
        except (OSError, RuntimeError) as error:  # RuntimeError: no user of ~NAME
            reason = getattr(error, "strerror", error)
            return f"/save {name}: cannot be written ({reason}); give the name of a new file"
        return f"saved to {path}"

    def command(self, text: str) -> str:
        """Run a line that begins with a / (or is `clear`); return the reply."""
        word, _, rest = text.partition(" ")
        if word in ("/reset", "clear"):
            for conversation in self.conversations:
                conversation.said = []
            return "forgotten"
        if word == "/system":
            self.system = rest.strip()
            return "the system message is set" if self.system else "there is no system message"
        if word == "/temperature":
            return self.set_temperature(rest.strip())
        if word == "/save":
            return self.save(rest.strip())
        return HELP if word == "/help" else f"{word} is not a command; /help lists them"

    def answer(self, text: str) -> None:
        """Show every model's response to a message; the oldest turns are dropped if they do not fit."""
        with interruptible() as is_interrupted, self.display:
            for number, conversation in enumerate(self.conversations):
                show = functools.partial(self.display.add, number)
                show(f"{conversation.name}> " if len(self.conversations) > 1 else "bot> ")
                said = [*conversation.said, Message("user", text)]
                try:
                    [reply] = conversation.answerer.answer(
                        self.with_system(said),
                        on_text=lambda _, piece, show=show: show(piece),
                        is_gone=is_interrupted.is_set,
                    )
                except ValueError as error:  # the chat template rejects this conversation
                    show(f"no answer: {error}\n")
                    continue
                conversation.said = [*said, Message("assistant", reply)]
                show(f"\n{self.score(self.with_system(conversation.said))}\n" if self.score else "\n")
                if is_interrupted.is_set():
                    return


def load_score(args: ChatArguments, problems: Problems) -> Score | None:
    """A function that scores responses with the model of --reward in its own template; None after adding the
    problem.
    """
    own = dataclasses.replace(args, template="")
    template = load_template("--reward", args.reward, own, problems, is_ranker=True)
    if template is None:
        return None
    if not has_saved_head(args.reward):
        problems.add(f"--reward {args.reward} has no trained score head; give the export/ folder of step 2")
        return None
    with startup.as_problem(problems):
        model = load_frozen_value_model(args.reward, template.tokenizer, args)
    closing_ids = closing_of(args.reward, template)
    scorer = RewardScorer(model, template.tokenizer, batch_size=1, closing_ids=closing_ids)

    def score(messages: list[Message]) -> str:
        try:
            segments = template.segments(messages[:-1], messages[-1].content)
        except ValueError as error:  # the reward model's template may reject a system message
            return f"no score: {error}"
        row = template.encode(segments, scorer.max_tokens - len(closing_ids))
        return f"score {scorer.score_rows([row])[0]:.3f}"

    return score


def load_session(args: ChatArguments, problems: Problems) -> Session:
    """Load the models of the flags, or exit with one message."""
    names = {"--path": args.path}
    if args.compare:
        names["--compare"] = args.compare
    templates = {flag: load_template(flag, name, args, problems) for flag, name in names.items()}
    problems.exit_if_any()
    score = load_score(args, problems) if args.reward else None
    problems.exit_if_any()
    sampling = Sampling(args.max_new_tokens, args.temperature, args.top_k, args.top_p)
    with startup.as_problem(problems):
        conversations = [
            Conversation(name, load_answerer(name, templates[flag_name], args, sampling, seed=args.seed))
            for flag_name, name in names.items()
        ]
    is_wide = args.compare and sys.stdin.isatty() and sys.stdout.isatty()
    return Session(conversations, SideBySide() if is_wide else OneAfterAnother(), score, args.system)


def main(argv: Sequence[str] | None = None) -> None:
    """Respond to lines until the input ends. `argv` defaults to sys.argv[1:]."""
    problems = Problems()
    args = parse_args(
        ChatArguments, argv, description=__doc__.splitlines()[0], problems=problems, leading="path"
    )
    problems.exit_if_any()
    startup.print_notes(args, argv)
    session = load_session(args, problems)
    if hasattr(sys.stdin, "reconfigure"):  # invalid UTF-8 must not end a conversation
        sys.stdin.reconfigure(errors="replace")
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401  (lets `input` edit a line and remember the last ones)

        print("/help shows the commands, an empty line leaves")
    while True:
        try:
            text = input("you> " if is_terminal else "").strip()
        except EOFError:
            text = ""
        if not text or text in QUIT_COMMANDS:
            return
        if text == "clear" or (text.startswith("/") and not text.startswith("//")):
            print(session.command(text), flush=True, file=sys.stdout if is_terminal else sys.stderr)
            continue
        session.answer(text[1:] if text.startswith("//") else text)


if __name__ == "__main__":
    running.run_program(main, shows_progress=False)
