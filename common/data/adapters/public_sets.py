"""Public data sets by name. One in a usual format is an entry of `USUAL_FORMS`, one with other column names
an entry of `OWN_NAMES`; any other has a function in `REWRITERS` that rewrites its rows.

`hub_data.HUB_PLACES` has their locations on the hub.
"""

import re
from typing import Any

from common.data.adapters.base import Adapter, AnyForm, register_dataset
from common.data.adapters.row_forms import read_row
from common.data.adapters.row_parts import LEADING_CUE, filled, finite_number, is_true, split_marked
from common.data.example import BadRow, Example

_VICUNA_TURN = re.compile(r"(?:\A|\s|</s>)\s*(USER|ASSISTANT):")
_CITATION = re.compile(r" ?\[\d+(?:\s*[,;-]\s*\d+)*\]")  # reference to a web page: [1], [2, 3]
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
_MIRACL = {
    "prompt": "query",
    "chosen": "positive_passages.0.text",
    "rejected": "negative_passages.0.text",
}
# In the form of --columns; a null in such a column means that the row lacks this text.
OWN_NAMES = {
    "wangrui6/Zhihu-KOL": {"prompt": "INSTRUCTION", "response": "RESPONSE"},
    "Hello-SimpleAI/HC3-Chinese": {"prompt": "question", "response": "human_answers.0"},
    "Cohere/miracl-zh-queries-22-12": _MIRACL,
    "Cohere/miracl-ja-queries-22-12": _MIRACL,
    "lmqg/qg_jaquad": {"prompt": "question", "response": "sentence"},
    "lmqg/qag_jaquad": {"prompt": "questions.0", "response": "paragraph"},
    "mkqa-Chinese": {"prompt": "queries.zh_cn", "response": "answers.zh_cn.0.text"},
    "mkqa-Japanese": {"prompt": "queries.ja", "response": "answers.ja.0.text"},
}
register_dataset(*USUAL_FORMS)(AnyForm)


@register_dataset(*OWN_NAMES)
class NamedColumns(AnyForm):
    """A set of `OWN_NAMES`."""

    def __init__(self, source: str = "") -> None:
        super().__init__(source)
        self.own_names = OWN_NAMES[source]


def without_cues(row: dict[str, Any]) -> dict[str, Any]:
    """Replies without a leading `Assistant:`."""
    replies = {name: row[name] for name in ("chosen", "rejected") if isinstance(row.get(name), str)}
    return row | {name: LEADING_CUE.sub("", reply) for name, reply in replies.items()}


def vicuna_turns(row: dict[str, Any]) -> dict[str, Any]:
    """The turns of `USER: ... ASSISTANT: ...</s>USER: ... ASSISTANT:` and, in `label`, the last reply."""
    text, reply = (
        filled(name, row[name] or "").rstrip().removesuffix("</s>") for name in ("prompt", "label")
    )
    opening_role = "system" if _VICUNA_TURN.search(text) else "user"
    turns = split_marked(text, _VICUNA_TURN, opening_role=opening_role)
    return {"prompt": [turn.as_dict() for turn in turns], "response": reply}


def without_citations(row: dict[str, Any]) -> dict[str, Any]:
    """answer_0 and answer_1, ranked by score_0 and score_1; the difference is not a margin."""
    question = row["question"]
    answers = [_CITATION.sub("", filled(name, row[name])) for name in ("answer_0", "answer_1")]
    ranks = [-finite_number(name, row[name]) for name in ("score_0", "score_1")]
    if isinstance(question, dict):
        question = question["full_text"]
    return {"prompt": question, "responses": answers, "ranks": ranks}


def preferred_comment(row: dict[str, Any]) -> dict[str, Any]:
    """A post (`history`) with two comments; `labels` 1 prefers human_ref_A, 0 prefers human_ref_B."""
    comments = (row["human_ref_A"], row["human_ref_B"])
    prefers_a = is_true("'labels'", row["labels"])
    return {"prompt": row["history"], "chosen": comments[not prefers_a], "rejected": comments[prefers_a]}


REWRITERS = {
    "yitingxie/rlhf-reward-datasets": without_cues,
    "pvduy/sharegpt_alpaca_oa_vicuna_format": vicuna_turns,
    "openai/webgpt_comparisons": without_citations,
    "stanfordnlp/SHP": preferred_comment,
}


@register_dataset(*REWRITERS)
class Rewritten(Adapter):
    """A set of `REWRITERS`."""

    def to_examples(self, row: dict[str, Any]) -> list[Example]:
        try:
            usual_row = REWRITERS[self.source](row)
        except KeyError as error:
            raise BadRow(f"no column {error}; found {', '.join(map(repr, row)) or 'none'}") from error
        return read_row(usual_row)
