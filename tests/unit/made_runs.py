"""Folders of runs that nobody ran, and an HTML page taken apart."""

import json
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from common.runs.run_logger import RunLogger
from common.runs.saved_state import TensorReader
from step1_sft.arguments import SFTArguments

VOID = {"meta", "wbr"}


def write_run(
    folder: Path,
    metrics: Sequence[dict[str, Any]],
    samples: Sequence[dict[str, Any]] = (),
    flags: dict[str, Any] | None = None,
    about: dict[str, Any] | None = None,
) -> Path:
    """Write the files of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("metrics.jsonl", metrics), ("samples.jsonl", samples)):
        if rows:
            (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, value in (("args.json", flags), ("run.json", about)):
        if value is not None:
            (folder / name).write_text(json.dumps(value))
    return folder


def start_logger(
    folder: Path | str, numbers: dict[str, Any] | None = None, columns=("a/b",), num_steps=9, **flags: Any
) -> RunLogger:
    """A logger that begins anew, or resumes where another was when it gave these numbers."""
    args = SFTArguments(model_name_or_path="m", output_dir=str(folder), **flags)
    logger = RunLogger(args, columns, num_steps)
    if numbers is None:
        logger.open()
    else:
        logger.load(TensorReader([]), json.loads(json.dumps(numbers)))
        logger.open(last_step=1)
    return logger


def over_steps(num_steps: int, **numbers: Callable[[int], float]) -> list[dict[str, Any]]:
    """Return rows of metrics; `objective__score=lambda step: ...` becomes objective/score."""
    return [
        {"step": step} | {name.replace("__", "/"): of(step) for name, of in numbers.items()}
        for step in range(1, num_steps + 1)
    ]


class Page(HTMLParser):
    """An HTML page: its tags with attributes, its text, and what was not closed."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], f"not closed: {self.open}"
        self.text = "".join(self.texts)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.texts.append(data)
