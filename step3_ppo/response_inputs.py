"""Prompts with their responses as a model reads them, and the slots of the response tokens.

# B responses, total response tokens of all
"""

from dataclasses import dataclass

import torch

from common.data.packed_batch import PackedBatch
from common.models.model_inputs import ModelInputs, build_model_inputs
from common.ranks import distributed


@dataclass(frozen=True)
class ResponseInputs:
    """The inputs of a forward pass over a record; slots and ids are on the CPU."""

    inputs: ModelInputs
    slots: torch.Tensor  # (total,) int64, of the response tokens, rows end to end
    token_ids: torch.Tensor  # (total,) int64


def build_response_inputs(record: PackedBatch, *, is_packed: bool) -> ResponseInputs:
    """Return each prompt followed by its response, as padded rows or end to end, on this rank's device."""
    token_ids, lengths = record.interleave("prompt_ids", "response_ids")
    is_response = torch.tensor([False, True]).repeat(len(record)).repeat_interleave(lengths.flatten())
    inputs = build_model_inputs(token_ids, lengths.sum(1), is_packed=is_packed, device=distributed.device())
    return ResponseInputs(inputs, inputs.token_slots[is_response], record.data["response_ids"])
