"""Preference data written as Human:/Assistant: dialogues: Dahoas', Yitingxie's and Anthropic's."""

from typing import Any

from common.data.adapters.base import Adapter, register_dataset
from common.data.adapters.row_forms import split_transcripts
from common.data.example import BadRow


@register_dataset(
    "Dahoas/rm-static",
    "Dahoas/full-hh-rlhf",
    "Dahoas/synthetic-instruct-gptj-pairwise",
    "yitingxie/rlhf-reward-datasets",
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
