"""Public data sets by name: what of a row is the prompt and the replies.

Sets whose rows have a usual form need an entry of `USUAL_FORMS` alone, sets whose texts lie at fixed places
of a row one of `TEXT_PATHS`. Where on the hub a set lies is told by `hub_data.HUB_PLACES`.
"""

import re
from typing import Any, NamedTuple

from common.data.adapters.base import Adapter, AnyForm, register_dataset
from common.data.adapters.row_parts import (
    filled_text,
    finite_number,
    kind_of,
    member,
    messages_from_prompt,
    parse_reply,
    rank_by_score,
    split_marked,
)
from common.data.example import BadRow, EmptyRow, Example

_LEADING_CUE = re.compile(r"\A\s*Assistant:")
_VICUNA_TURN = re.compile(r"(?:\A|\s|</s>)\s*(USER|ASSISTANT):")
_CITATION = re.compile(r" ?\[\d+(?:\s*[,;-]\s*\d+)*\]")  # to a page that was quoted: [1], [2, 3]
USUAL_FORMS = (
    "Dahoas/rm-static",
    "Dahoas/full-hh-rlhf",
    "Dahoas/synthetic-instruct-gptj-pairwise",
    "Anthropic/hh-rlhf",
    "OpenAssistant/oasst1",
    "OpenAssistant/oasst2",
    "nvidia/HelpSteer2",
    "nvidia/HelpSteer3",
    "HuggingFaceH4/ultrafeedback_binarized",
    "berkeley-nest/Nectar",
)
register_dataset(*USUAL_FORMS)(AnyForm)


@register_dataset("yitingxie/rlhf-reward-datasets")
class CueInTheReply(AnyForm):
    """A prompt that ends with the human's turn, and replies that begin with `Assistant:`."""

    def to_examples(self, row: dict[str, Any]) -> list[Example]:
        replies = {name: row[name] for name in ("chosen", "rejected") if isinstance(row.get(name), str)}
        return super().to_examples(row | {name: _LEADING_CUE.sub("", text) for name, text in replies.items()})


@register_dataset("pvduy/sharegpt_alpaca_oa_vicuna_format")
class VicunaText(Adapter):
    """A dialogue as `USER: ... ASSISTANT: ...</s>USER: ... ASSISTANT:` and, in `label`, the last reply."""

    def columns(self) -> tuple[str, ...]:
        return ("prompt", "label")

    def to_examples(self, row: dict[str, Any]) -> list[Example]:
        """See Adapter; a row with a null in it is left out, as in DeepSpeed-Chat."""
        self.check_columns(row)
        if row["prompt"] is None or row["label"] is None:
            raise EmptyRow("'prompt' or 'label' is null")
        text = filled_text("prompt", row["prompt"]).rstrip().removesuffix("</s>")
        opening_role = "system" if _VICUNA_TURN.search(text) else "user"
        prompt = split_marked(text, _VICUNA_TURN, opening_role=opening_role)
        if not prompt:
            raise EmptyRow("'prompt' holds nothing but the cue")
        reply = filled_text("label", row["label"]).rstrip().removesuffix("</s>")
        return [Example(prompt=prompt, chosen=filled_text("label", reply))]


@register_dataset("openai/webgpt_comparisons")
class WebGPTComparisons(Adapter):
    """answer_0 and answer_1 with score_0 and score_1; equal scores are a tie. Citations are taken out."""

    def columns(self) -> tuple[str, ...]:
        return ("question", "answer_0", "answer_1", "score_0", "score_1")

    def to_examples(self, row: dict[str, Any]) -> list[Example]:
        self.check_columns(row)
        question = row["question"]
        if isinstance(question, dict):
            question = member("question", question, "full_text")
        texts = [parse_reply(name, row[name]) for name in ("answer_0", "answer_1")]
        answers = [filled_text("the answer less its citations", _CITATION.sub("", text)) for text in texts]
        scores = [finite_number(name, row[name]) for name in ("score_0", "score_1")]
        return rank_by_score(messages_from_prompt(question), answers, scores, with_margin=False)


@register_dataset("stanfordnlp/SHP")
class StanfordHumanPreferences(Adapter):
    """A post (`history`) with two comments; `labels` 1 prefers human_ref_A, 0 prefers human_ref_B."""

    def columns(self) -> tuple[str, ...]:
        return ("history", "human_ref_A", "human_ref_B", "labels")

    def to_examples(self, row: dict[str, Any]) -> list[Example]:
        self.check_columns(row)
        if row["labels"] not in (0, 1, "0", "1"):
            raise BadRow(f"'labels' is {row['labels']!r}, not 0 or 1")
        answers = [parse_reply(name, row[name]) for name in ("human_ref_A", "human_ref_B")]
        scores = [int(row["labels"]), 0.5]
        return rank_by_score(messages_from_prompt(row["history"]), answers, scores, with_margin=False)


# ---- texts at fixed places of a row, some of which may be missing: Chinese and Japanese sets


class TextPaths(NamedTuple):
    """Each text by its path: a column, then names of an object, and 0 for the first item of a list."""

    prompt: str
    chosen: str
    rejected: str = ""


_MIRACL = TextPaths("query", "positive_passages.0.text", "negative_passages.0.text")
TEXT_PATHS = {
    "wangrui6/Zhihu-KOL": TextPaths("INSTRUCTION", "RESPONSE"),
    "Hello-SimpleAI/HC3-Chinese": TextPaths("question", "human_answers.0"),
    "Cohere/miracl-zh-queries-22-12": _MIRACL,
    "Cohere/miracl-ja-queries-22-12": _MIRACL,
    "lmqg/qg_jaquad": TextPaths("question", "sentence"),
    "lmqg/qag_jaquad": TextPaths("questions.0", "paragraph"),
}


@register_dataset(*TEXT_PATHS)
class TextsByPath(Adapter):
    """A set of `TEXT_PATHS`."""

    paths: TextPaths | None = None  # None: by the name of the set

    def __init__(self, source: str = "") -> None:
        super().__init__(source)
        self.paths = self.paths or TEXT_PATHS[source]

    def columns(self) -> tuple[str, ...]:
        return tuple(path.split(".")[0] for path in self.paths if path)

    def get_prompt(self, row: dict[str, Any]) -> str | None:
        return _find(row, self.paths.prompt)

    def get_chosen(self, row: dict[str, Any]) -> str | None:
        return _find(row, self.paths.chosen)

    def get_rejected(self, row: dict[str, Any]) -> str | None:
        return _find(row, self.paths.rejected) if self.paths.rejected else None


def _find(row: dict[str, Any], path: str) -> Any:
    name, *parts = path.split(".")
    value = row[name]
    for part in parts:
        if part != "0":
            value, name = member(name, value, part), f"{name}.{part}"
        elif value is not None and not isinstance(value, list | tuple):
            raise BadRow(f"{name!r} is {kind_of(value)}, not a list")
        elif not value or value[0] is None:
            return None
        else:
            value, name = value[0], f"{name}[0]"
    return value


@register_dataset("mkqa-Chinese")
class MKQAChinese(TextsByPath):
    """The Chinese questions of apple/mkqa; the text of the first answer is learnt."""

    paths = TextPaths("queries.zh_cn", "answers.zh_cn.0.text")


@register_dataset("mkqa-Japanese")
class MKQAJapanese(TextsByPath):
    """The Japanese questions of apple/mkqa."""

    paths = TextPaths("queries.ja", "answers.ja.0.text")
