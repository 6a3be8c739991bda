"""A data set in its own format: each line is `question | right answer | wrong answer`."""

from pathlib import Path
from typing import Any

from common.data.registry import Adapter, register_dataset

COLUMNS = ("question", "right", "wrong")


@register_dataset("quiz")
class Quiz(Adapter):
    """Questions with a right and a wrong answer, for all three steps."""

    def load(self) -> tuple[list[dict[str, Any]], None]:
        """Rows to train on, and held-out rows (None: --eval_fraction of the rows are held out)."""
        named = Path(self.source)  # the part after the class, as in examples.own_data.quiz:Quiz:more.txt
        path = named if named.suffix == ".txt" else Path(__file__).with_name("quiz.txt")
        lines = path.read_text().splitlines()
        return [dict(zip(COLUMNS, line.split(" | "), strict=False)) for line in lines if line], None

    def columns(self) -> tuple[str, ...]:
        """Columns that every row must have; a row without one is reported as bad."""
        return COLUMNS

    def get_prompt(self, row: dict[str, Any]) -> str:
        """The question."""
        return row["question"]

    def get_chosen(self, row: dict[str, Any]) -> str:
        """The answer that step 1 trains on and step 2 prefers."""
        return row["right"]

    def get_rejected(self, row: dict[str, Any]) -> str:
        """The other answer."""
        return row["wrong"]
