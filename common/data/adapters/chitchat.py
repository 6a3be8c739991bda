"""chitchat: 7,168 conversations of two people, from the PyPI package chitchat-dataset (MIT)."""

import hashlib
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common.data.adapters.base import Adapter, Parts, register_dataset
from common.data.example import BadRow, EmptyRow, Example, Turn
from common.data.raw_rows import RawRows


@register_dataset("chitchat")
class Chitchat(Adapter):
    """One row is one conversation, so that no conversation is both trained on and held out.

    Each turn after the first is a reply to the turns before it. The number of turns shown is odd, so that the
    roles alternate and both the first and the last of them are the user's.
    """

    max_context_turns = 3

    def load(self) -> Parts:
        """See Adapter.

        Raises:
            ValueError: the package is not installed.
        """
        conversations = json.loads(self._path().read_bytes())
        rows = [
            {"id": key, "turns": [" ".join(said["text"] for said in turn) for turn in value["messages"]]}
            for key, value in conversations.items()
        ]
        return Parts(RawRows(rows, "chitchat"), None)

    def data_digest(self) -> str:
        """See Adapter."""
        return hashlib.sha256(self._path().read_bytes()).hexdigest()

    def to_examples(self, row: dict[str, Any]) -> list[Example]:
        """See Adapter; a conversation of n turns gives n - 1 examples."""
        turns = row.get("turns")
        if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
            raise BadRow("no list of texts called 'turns'")
        turns = [turn.strip() for turn in turns]
        examples = []
        for i in range(1, len(turns)):
            num_shown = min(i, self.max_context_turns)
            num_shown -= 1 - num_shown % 2
            shown = turns[i - num_shown : i]
            if not turns[i] or not all(shown):
                continue
            roles = ("user", "assistant")
            prompt = tuple(Turn(roles[k % 2], text) for k, text in enumerate(shown))
            examples.append(Example(prompt=prompt, chosen=turns[i]))
        if not examples:
            raise EmptyRow("a conversation without a reply")
        return examples

    @staticmethod
    def _path() -> Path:
        package = find_spec("chitchat_dataset")
        if package is None or not package.submodule_search_locations:
            raise ValueError(
                "--data_path chitchat: its data is not installed; pip install chitchat-dataset==0.9.0"
            )
        return Path(package.submodule_search_locations[0]) / "dataset.json"
