"""Dialogues in one text, Human:/Assistant: or USER:/ASSISTANT:, most with a better and a worse reply."""

import re
from typing import Any

from common.data.adapters.base import Adapter, register_dataset
from common.data.adapters.row_parts import filled_text, split_marked, split_transcripts
from common.data.example import BadRow, EmptyRow, Example

_LEADING_CUE = re.compile(r"\A\s*Assistant:")
_VICUNA_TURN = re.compile(r"(?:\A|(?<=\s)|(?<=</s>))(USER|ASSISTANT):")


@register_dataset(
    "Dahoas/rm-static",
    "Dahoas/full-hh-rlhf",
    "Dahoas/synthetic-instruct-gptj-pairwise",
)
class PromptChosenRejected(Adapter):
    """A prompt (a dialogue up to `Assistant:`, or a bare instruction) with a better and a worse reply."""

    def columns(self) -> tuple[str, ...]:
        """See Adapter."""
        return ("prompt", "chosen", "rejected")

    def get_prompt(self, row: dict[str, Any]) -> str:
        """See Adapter."""
        return row["prompt"]

    def get_chosen(self, row: dict[str, Any]) -> str:
        """See Adapter."""
        return row["chosen"]

    def get_rejected(self, row: dict[str, Any]) -> str:
        """See Adapter."""
        return row["rejected"]


@register_dataset("yitingxie/rlhf-reward-datasets")
class CueInTheReply(PromptChosenRejected):
    """A prompt that ends with the human's turn, and replies that begin with `Assistant:`."""

    def get_prompt_and_chosen(self, row: dict[str, Any]) -> str:
        """See Adapter."""
        return row["prompt"] + row["chosen"]

    def get_prompt_and_rejected(self, row: dict[str, Any]) -> str:
        """See Adapter."""
        return row["prompt"] + row["rejected"]

    def get_chosen(self, row: dict[str, Any]) -> str:
        """See Adapter."""
        return self._without_cue(row["chosen"])

    def get_rejected(self, row: dict[str, Any]) -> str:
        """See Adapter."""
        return self._without_cue(row["rejected"])

    @staticmethod
    def _without_cue(reply: Any) -> Any:
        return _LEADING_CUE.sub("", reply) if isinstance(reply, str) else reply


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


@register_dataset("Anthropic/hh-rlhf")
class TwoTranscripts(Adapter):
    """Two whole dialogues that differ in their last reply."""

    def columns(self) -> tuple[str, ...]:
        """See Adapter."""
        return ("chosen", "rejected")

    def get_prompt(self, row: dict[str, Any]) -> str:
        """See Adapter."""
        return self._split(row)[0]

    def get_chosen(self, row: dict[str, Any]) -> str:
        """See Adapter."""
        return self._split(row)[1]

    def get_rejected(self, row: dict[str, Any]) -> str:
        """See Adapter."""
        return self._split(row)[2]

    @staticmethod
    def _split(row: dict[str, Any]) -> tuple[str, str, str]:
        chosen, rejected = row["chosen"], row["rejected"]
        if not isinstance(chosen, str) or not isinstance(rejected, str):
            raise BadRow("'chosen' and 'rejected' must both be text")
        return split_transcripts(chosen, rejected)
