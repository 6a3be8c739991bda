"""Prompts with their responses as a model reads them, and where the response tokens stand.

# S responses, total response tokens of all
"""

from dataclasses import dataclass

import torch

from common.data.packed_batch import PackedBatch
from common.models.model_inputs import ModelInputs, build_model_inputs
from common.ranks import distributed


@dataclass(frozen=True)
class ResponseInputs:
    """The inputs of a forward pass over a record, on this rank's device."""

    inputs: ModelInputs
    slots: torch.Tensor  # (total,) int64, of the response tokens, rows end to end
    token_ids: torch.Tensor  # (total,) int64


def build_response_inputs(record: PackedBatch, *, is_packed: bool) -> ResponseInputs:
    """Return each prompt followed by its response, as padded rows or end to end."""
    device = distributed.device()
    num_prompt, num_response = record.lengths["prompt_ids"], record.lengths["response_ids"]
    kinds = torch.stack([torch.zeros_like(num_prompt), torch.ones_like(num_prompt)], dim=1).flatten()
    counts = torch.stack([num_prompt, num_response], dim=1).flatten()
    is_response = kinds.bool().repeat_interleave(counts).to(device)  # (all tokens,)
    prompt_ids, response_ids = (record.data[key].to(device) for key in ("prompt_ids", "response_ids"))
    token_ids = torch.empty(len(is_response), dtype=torch.int64, device=device)
    token_ids[is_response], token_ids[~is_response] = response_ids, prompt_ids
    inputs = build_model_inputs(token_ids, num_prompt + num_response, is_packed=is_packed, device=device)
    return ResponseInputs(inputs, inputs.token_slots[is_response], response_ids)
