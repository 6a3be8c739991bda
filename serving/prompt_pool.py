"""Prompts of a data set in random order, for people who have none of their own at hand."""

import random
import threading
from collections.abc import Sequence

from common.data.example import BadRow, Message
from common.data.registry import RawSource


class PromptPool:
    """Draws each row once before any a second time; rows without a prompt are passed over."""

    def __init__(self, source: RawSource, draw: random.Random) -> None:
        self._source, self._draw = source, draw
        self._waiting: list[int] = []
        self._lock = threading.Lock()

    def next(self) -> tuple[Sequence[Message], str]:
        """Return a prompt and where it comes from. Raises ValueError when there is none in the data."""
        rows = self._source.train
        with self._lock:
            for _ in range(len(rows) + 1):
                if not self._waiting:
                    self._waiting = self._draw.sample(range(len(rows)), len(rows))
                index = self._waiting.pop()
                try:
                    examples = self._source.adapter.to_examples(rows[index])
                except BadRow:
                    continue
                prompt = next((example.prompt for example in examples if example.prompt), None)
                if prompt:
                    return prompt, rows.row_id(index)
        raise ValueError(f"--data_path {self._source.name} has no prompts; give a data set of questions")
