"""Questions that a passage answers: MIRACL in Chinese and Japanese, JaQuAD."""

from typing import Any

from common.data.adapters.base import RowsWithGaps, register_dataset
from common.data.adapters.row_parts import first_item, member
from common.data.hub_data import HubPlace


@register_dataset("Cohere/miracl-zh-queries-22-12", "Cohere/miracl-ja-queries-22-12")
class MiraclQueries(RowsWithGaps):
    """query with its first positive passage, and its first negative one where there is any."""

    absent_answer = "the query has no positive passage"
    absent_rejected = "the query has no negative passage"

    def columns(self) -> tuple[str, ...]:
        """See Adapter."""
        return ("query", "positive_passages", "negative_passages")

    def get_prompt(self, row: dict[str, Any]) -> str | None:
        """See Adapter."""
        return row["query"]

    def get_chosen(self, row: dict[str, Any]) -> str | None:
        """See Adapter."""
        return self._passage("positive_passages", row)

    def get_rejected(self, row: dict[str, Any]) -> str | None:
        """See Adapter."""
        return self._passage("negative_passages", row)

    @staticmethod
    def _passage(column: str, row: dict[str, Any]) -> str | None:
        passage = first_item(column, row[column])
        return None if passage is None else member(f"{column}[0]", passage, "text")


@register_dataset("lmqg/qg_jaquad")
class JaquadSentences(RowsWithGaps):
    """question with the sentence that holds its answer; Japanese."""

    hub_places = {"lmqg/qg_jaquad": HubPlace("lmqg/qg_jaquad", copied_config="qg_jaquad")}

    def columns(self) -> tuple[str, ...]:
        """See Adapter."""
        return ("question", "sentence")

    def get_prompt(self, row: dict[str, Any]) -> str | None:
        """See Adapter."""
        return row["question"]

    def get_chosen(self, row: dict[str, Any]) -> str | None:
        """See Adapter."""
        return row["sentence"]


@register_dataset("lmqg/qag_jaquad")
class JaquadParagraphs(RowsWithGaps):
    """The first of a paragraph's questions with the paragraph; Japanese."""

    hub_places = {"lmqg/qag_jaquad": HubPlace("lmqg/qag_jaquad", copied_config="qag_jaquad")}

    def columns(self) -> tuple[str, ...]:
        """See Adapter."""
        return ("questions", "paragraph")

    def get_prompt(self, row: dict[str, Any]) -> str | None:
        """See Adapter."""
        return first_item("questions", row["questions"])

    def get_chosen(self, row: dict[str, Any]) -> str | None:
        """See Adapter."""
        return row["paragraph"]
