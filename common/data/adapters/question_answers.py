"""Questions with human answers and none rejected: Zhihu, HC3-Chinese and MKQA. Steps 1 and 3."""

from typing import Any

from common.data.adapters.base import RowsWithGaps, register_dataset
from common.data.adapters.row_parts import first_item, member
from common.data.hub_data import HubPlace


@register_dataset("wangrui6/Zhihu-KOL")
class ZhihuKOL(RowsWithGaps):
    """INSTRUCTION and RESPONSE, Chinese."""

    def columns(self) -> tuple[str, ...]:
        """See Adapter."""
        return ("INSTRUCTION", "RESPONSE")

    def get_prompt(self, row: dict[str, Any]) -> str | None:
        """See Adapter."""
        return row["INSTRUCTION"]

    def get_chosen(self, row: dict[str, Any]) -> str | None:
        """See Adapter."""
        return row["RESPONSE"]


@register_dataset("Hello-SimpleAI/HC3-Chinese")
class HC3Chinese(RowsWithGaps):
    """question with human_answers, of which the first is learnt; chatgpt_answers are not used."""

    hub_places = {"Hello-SimpleAI/HC3-Chinese": HubPlace("Hello-SimpleAI/HC3-Chinese", "all")}

    def columns(self) -> tuple[str, ...]:
        """See Adapter."""
        return ("question", "human_answers")

    def get_prompt(self, row: dict[str, Any]) -> str | None:
        """See Adapter."""
        return row["question"]

    def get_chosen(self, row: dict[str, Any]) -> str | None:
        """See Adapter."""
        return first_item("human_answers", row["human_answers"])


class MKQA(RowsWithGaps):
    """queries and answers by language; the text of the first answer is learnt."""

    absent_answer = "the question has no answer in this language"
    language: str

    def columns(self) -> tuple[str, ...]:
        """See Adapter."""
        return ("queries", "answers")

    def get_prompt(self, row: dict[str, Any]) -> str | None:
        """See Adapter."""
        return member("queries", row["queries"], self.language)

    def get_chosen(self, row: dict[str, Any]) -> str | None:
        """See Adapter."""
        column = f"answers.{self.language}"
        answer = first_item(column, member("answers", row["answers"], self.language))
        return None if answer is None else member(f"{column}[0]", answer, "text")


@register_dataset("mkqa-Chinese")
class MKQAChinese(MKQA):
    """The Chinese questions of apple/mkqa."""

    hub_places = {"mkqa-Chinese": HubPlace("apple/mkqa", copied_config="mkqa")}
    language = "zh_cn"


@register_dataset("mkqa-Japanese")
class MKQAJapanese(MKQA):
    """The Japanese questions of apple/mkqa."""

    hub_places = {"mkqa-Japanese": HubPlace("apple/mkqa", copied_config="mkqa")}
    language = "ja"
