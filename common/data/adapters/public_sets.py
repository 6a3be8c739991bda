"""Public data sets by name: what of a row is the prompt and the replies, and where the rows lie.

Sets whose rows have a usual form need an entry of `USUAL_FORMS` alone.
"""

import hashlib
import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common.data.adapters.base import Adapter, Parts, RowsWithGaps, register_dataset
from common.data.adapters.local_files import AnyForm
from common.data.adapters.rankings import group_scored
from common.data.adapters.row_parts import filled_text, finite_number, first_item, member, split_marked
from common.data.example import BadRow, EmptyRow, Example, Turn
from common.data.hub_data import HubPlace
from common.data.raw_rows import GroupedRows, RawRows

_LEADING_CUE = re.compile(r"\A\s*Assistant:")
_VICUNA_TURN = re.compile(r"(?:\A|(?<=\s)|(?<=</s>))(USER|ASSISTANT):")
_CITATION = re.compile(r" ?\[\d+(?:\s*[,;-]\s*\d+)*\]")  # to a page that was quoted: [1], [2, 3]
USUAL_FORMS = (
    "Dahoas/rm-static",
    "Dahoas/full-hh-rlhf",
    "Dahoas/synthetic-instruct-gptj-pairwise",
    "Anthropic/hh-rlhf",
    "OpenAssistant/oasst1",
    "OpenAssistant/oasst2",
    "nvidia/HelpSteer3",
    "HuggingFaceH4/ultrafeedback_binarized",
    "berkeley-nest/Nectar",
)


@register_dataset(*USUAL_FORMS)
class UsualForm(AnyForm):
    """A set whose rows have a usual form, some of them elsewhere on the hub than their name says."""

    hub_places = {
        "nvidia/HelpSteer3": HubPlace("nvidia/HelpSteer3", "preference"),
        "HuggingFaceH4/ultrafeedback_binarized": HubPlace(
            "HuggingFaceH4/ultrafeedback_binarized", splits=("train_prefs", "test_prefs")
        ),
    }


@register_dataset("nvidia/HelpSteer2")
class HelpSteer2(AnyForm):
    """Responses with scores, those of one prompt put together."""

    def arrange(self, rows: RawRows) -> GroupedRows:
        """See Adapter."""
        return group_scored(rows, self.score_column)


@register_dataset("yitingxie/rlhf-reward-datasets")
class CueInTheReply(AnyForm):
    """A prompt that ends with the human's turn, and replies that begin with `Assistant:`."""

    def to_examples(self, row: dict[str, Any]) -> list[Example]:
        """See Adapter."""
        replies = {name: row[name] for name in ("chosen", "rejected") if isinstance(row.get(name), str)}
        return super().to_examples(row | {name: _LEADING_CUE.sub("", text) for name, text in replies.items()})


@register_dataset("pvduy/sharegpt_alpaca_oa_vicuna_format")
class VicunaText(Adapter):
    """A dialogue as `USER: ... ASSISTANT: ...</s>USER: ... ASSISTANT:` and, in `label`, the last reply."""

    def columns(self) -> tuple[str, ...]:
        """See Adapter."""
        return ("prompt", "label")

    def to_examples(self, row: dict[str, Any]) -> list[Example]:
        """See Adapter; a row with a null in it is left out, as in DeepSpeed-Chat."""
        self.check_columns(row)
        if row["prompt"] is None or row["label"] is None:
            raise EmptyRow("'prompt' or 'label' is null")
        text = filled_text("prompt", row["prompt"])
        prompt = split_marked(
            text, _VICUNA_TURN, opening_role="system" if _VICUNA_TURN.search(text) else "user"
        )
        if not prompt:
            raise EmptyRow("'prompt' holds nothing but the cue")
        reply = filled_text("label", row["label"]).rstrip().removesuffix("</s>")
        return [Example(prompt=prompt, chosen=filled_text("label", reply))]


class ComparedPair(Adapter):
    """Two answers to a question, and which of them was preferred."""

    question = ""  # the columns
    answers = ("", "")
    preference: tuple[str, ...] = ()

    def columns(self) -> tuple[str, ...]:
        """See Adapter."""
        return (self.question, *self.answers, *self.preference)

    def prefers_first(self, row: dict[str, Any]) -> bool:
        """Return whether the first answer is the better one."""
        raise NotImplementedError

    def get_prompt(self, row: dict[str, Any]) -> str:
        """See Adapter."""
        return row[self.question]

    def get_chosen(self, row: dict[str, Any]) -> str:
        """See Adapter."""
        return row[self.answers[0 if self.prefers_first(row) else 1]]

    def get_rejected(self, row: dict[str, Any]) -> str:
        """See Adapter."""
        return row[self.answers[1 if self.prefers_first(row) else 0]]


@register_dataset("openai/webgpt_comparisons")
class WebGPTComparisons(ComparedPair):
    """answer_0 and answer_1 with score_0 and score_1; equal scores are a tie. Citations are taken out."""

    question, answers, preference = "question", ("answer_0", "answer_1"), ("score_0", "score_1")

    def is_tie(self, row: dict[str, Any]) -> bool:
        """See Adapter."""
        first, second = (finite_number(name, row[name]) for name in self.preference)
        return first == second

    def prefers_first(self, row: dict[str, Any]) -> bool:
        """See ComparedPair."""
        first, second = (finite_number(name, row[name]) for name in self.preference)
        return first >= second

    def get_prompt(self, row: dict[str, Any]) -> str:
        """See Adapter."""
        question = row["question"]
        return member("question", question, "full_text") if isinstance(question, dict) else question

    def to_examples(self, row: dict[str, Any]) -> list[Example]:
        """See Adapter."""
        texts = {name: row[name] for name in self.answers if isinstance(row.get(name), str)}
        return super().to_examples(row | {name: _CITATION.sub("", text) for name, text in texts.items()})


@register_dataset("stanfordnlp/SHP")
class StanfordHumanPreferences(ComparedPair):
    """A post (`history`) with two comments; `labels` 1 prefers human_ref_A, 0 prefers human_ref_B."""

    question, answers, preference = "history", ("human_ref_A", "human_ref_B"), ("labels",)

    def prefers_first(self, row: dict[str, Any]) -> bool:
        """See ComparedPair."""
        if row["labels"] not in (0, 1, "0", "1"):
            raise BadRow(f"'labels' is {row['labels']!r}, not 0 or 1")
        return int(row["labels"]) == 1


# ---- texts at fixed places of a row, some of which may be missing: Chinese and Japanese sets


class TextsByPath(RowsWithGaps):
    """Each text by its path: a column, then names of an object, and 0 for the first item of a list."""

    prompt = chosen = rejected = ""

    def columns(self) -> tuple[str, ...]:
        """See Adapter."""
        return tuple(path.split(".")[0] for path in (self.prompt, self.chosen, self.rejected) if path)

    def get_prompt(self, row: dict[str, Any]) -> str | None:
        """See Adapter."""
        return self._find(row, self.prompt)

    def get_chosen(self, row: dict[str, Any]) -> str | None:
        """See Adapter."""
        return self._find(row, self.chosen)

    def get_rejected(self, row: dict[str, Any]) -> str | None:
        """See Adapter."""
        return self._find(row, self.rejected) if self.rejected else None

    @staticmethod
    def _find(row: dict[str, Any], path: str) -> Any:
        name, *parts = path.split(".")
        value = row[name]
        for part in parts:
            if part == "0":
                value = first_item(name, value)
                if value is None:
                    return None
                name = f"{name}[0]"
            else:
                value = member(name, value, part)
                name = f"{name}.{part}"
        return value


@register_dataset("wangrui6/Zhihu-KOL")
class ZhihuKOL(TextsByPath):
    """Questions and answers of Zhihu, Chinese."""

    prompt, chosen = "INSTRUCTION", "RESPONSE"


@register_dataset("Hello-SimpleAI/HC3-Chinese")
class HC3Chinese(TextsByPath):
    """question with human_answers, of which the first is learnt; chatgpt_answers are not used."""

    hub_places = {"Hello-SimpleAI/HC3-Chinese": HubPlace("Hello-SimpleAI/HC3-Chinese", "all")}
    prompt, chosen = "question", "human_answers.0"


@register_dataset("mkqa-Chinese")
class MKQAChinese(TextsByPath):
    """The Chinese questions of apple/mkqa; the text of the first answer is learnt."""

    hub_places = {"mkqa-Chinese": HubPlace("apple/mkqa", copied_config="mkqa")}
    absent_answer = "the question has no answer in this language"
    prompt, chosen = "queries.zh_cn", "answers.zh_cn.0.text"


@register_dataset("mkqa-Japanese")
class MKQAJapanese(TextsByPath):
    """The Japanese questions of apple/mkqa."""

    hub_places = {"mkqa-Japanese": HubPlace("apple/mkqa", copied_config="mkqa")}
    absent_answer = "the question has no answer in this language"
    prompt, chosen = "queries.ja", "answers.ja.0.text"


@register_dataset("Cohere/miracl-zh-queries-22-12", "Cohere/miracl-ja-queries-22-12")
class MiraclQueries(TextsByPath):
    """query with its first positive passage, and its first negative one where there is any."""

    absent_answer = "the query has no positive passage"
    absent_rejected = "the query has no negative passage"
    prompt, chosen, rejected = "query", "positive_passages.0.text", "negative_passages.0.text"


@register_dataset("lmqg/qg_jaquad")
class JaquadSentences(TextsByPath):
    """question with the sentence that holds its answer; Japanese."""

    hub_places = {"lmqg/qg_jaquad": HubPlace("lmqg/qg_jaquad", copied_config="qg_jaquad")}
    prompt, chosen = "question", "sentence"


@register_dataset("lmqg/qag_jaquad")
class JaquadParagraphs(TextsByPath):
    """The first of a paragraph's questions with the paragraph; Japanese."""

    hub_places = {"lmqg/qag_jaquad": HubPlace("lmqg/qag_jaquad", copied_config="qag_jaquad")}
    prompt, chosen = "questions.0", "paragraph"


@register_dataset("chitchat")
class Chitchat(Adapter):
    """7,168 conversations of two people, from the PyPI package chitchat-dataset (MIT); a row is one of them.

    Each turn after the first is a reply to the turns before it. The number of turns shown is odd, so that the
    roles alternate and both the first and the last of them are the user's.
    """

    max_context_turns = 3

    def load(self) -> Parts:
        """See Adapter. Raises ValueError when the package is not installed."""
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
