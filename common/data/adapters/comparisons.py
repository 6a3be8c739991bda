"""Two answers to a question with a vote between them: WebGPT comparisons, the Stanford Human Preferences."""

import re
from typing import Any

from common.data.adapters.base import Adapter, register_dataset
from common.data.adapters.row_parts import finite_number
from common.data.example import BadRow

_CITATION = re.compile(r" ?\[\d+(?:\s*[,;-]\s*\d+)*\]")  # to a page that was quoted: [1], [2, 3]


@register_dataset("openai/webgpt_comparisons")
class WebGPTComparisons(Adapter):
    """answer_0 and answer_1 with score_0 and score_1; equal scores are a tie. Citations are taken out."""

    def columns(self) -> tuple[str, ...]:
        """See Adapter."""
        return ("question", "answer_0", "answer_1", "score_0", "score_1")

    def is_tie(self, row: dict[str, Any]) -> bool:
        """See Adapter."""
        return self._score(row, 0) == self._score(row, 1)

    def get_prompt(self, row: dict[str, Any]) -> str:
        """See Adapter."""
        question = row["question"]
        if isinstance(question, dict):
            if "full_text" not in question:
                raise BadRow("'question' has no 'full_text'")
            question = question["full_text"]
        return question

    def get_chosen(self, row: dict[str, Any]) -> str:
        """See Adapter."""
        return self._answer(row, better=True)

    def get_rejected(self, row: dict[str, Any]) -> str:
        """See Adapter."""
        return self._answer(row, better=False)

    def _answer(self, row: dict[str, Any], *, better: bool) -> str:
        first_wins = self._score(row, 0) >= self._score(row, 1)
        answer = row["answer_0"] if first_wins == better else row["answer_1"]
        return _CITATION.sub("", answer) if isinstance(answer, str) else answer

    @staticmethod
    def _score(row: dict[str, Any], which: int) -> float:
        return finite_number(f"score_{which}", row[f"score_{which}"])


@register_dataset("stanfordnlp/SHP")
class StanfordHumanPreferences(Adapter):
    """A post (`history`) with two comments; `labels` 1 prefers human_ref_A, 0 prefers human_ref_B."""

    def columns(self) -> tuple[str, ...]:
        """See Adapter."""
        return ("history", "human_ref_A", "human_ref_B", "labels")

    def get_prompt(self, row: dict[str, Any]) -> str:
        """See Adapter."""
        return row["history"]

    def get_chosen(self, row: dict[str, Any]) -> str:
        """See Adapter."""
        return row["human_ref_A"] if self._prefers_a(row) else row["human_ref_B"]

    def get_rejected(self, row: dict[str, Any]) -> str:
        """See Adapter."""
        return row["human_ref_B"] if self._prefers_a(row) else row["human_ref_A"]

    @staticmethod
    def _prefers_a(row: dict[str, Any]) -> bool:
        if row["labels"] not in (0, 1, "0", "1"):
            raise BadRow(f"'labels' is {row['labels']!r}, not 0 or 1")
        return int(row["labels"]) == 1
