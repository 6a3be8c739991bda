"""Collators: the rows of a step as a `PackedBatch`. PURE: imports torch only.

Other projects pad their rows here. Ours are laid end to end, and `lengths` replace the attention mask. The
padded form, for families whose layers do not receive the boundaries of sequences, is made for each pass by
`common.models.model_inputs.build_model_inputs`: token ids (S, T) int64 padded on the right, and an attention
mask (S, T), 1 at tokens. `PackedBatch.pad` has it for any key, on either side.

  collate_sft      step 1    input_ids (total,) int64, loss_mask (total,) bool
  collate_texts    step 3    the same, of texts for the unsupervised loss
  collate_pairs    step 2    chosen_ids, rejected_ids (total,) int64, with the responses' starts (B,)
  collate_prompts  step 3    prompt_ids (total,) int64 and texts

# B items (a row or a pair), S sequences, T tokens of the longest sequence, total tokens of all
"""

import json
from collections.abc import Sequence
from typing import Any

import torch

from common.data.packed_batch import ROW_IDS, PackedBatch, pack_rows, token_positions

Rows = Sequence[dict[str, Any]]


def collate_sft(rows: Rows) -> PackedBatch:
    """Batch of step 1's rows: input_ids int64, loss_mask bool of the same lengths, and the number of each
    row's conversation if rows have one.

    loss_mask is True if the token itself is a target (the hidden state one position before predicts it); a
    row's first token never is.
    """
    input_ids, lengths = pack_rows([row["input_ids"] for row in rows])
    loss_mask = torch.tensor([is_target for row in rows for is_target in row["loss_mask"]], dtype=torch.bool)
    loss_mask &= token_positions(lengths) > 0  # nothing predicts a first token
    batch = PackedBatch(_unique_ids(rows), {"input_ids": input_ids}, {"input_ids": lengths})
    if "conversation" in rows[0]:
        batch = batch.with_numbers("conversation", torch.tensor([row["conversation"] for row in rows]))
    return batch.with_key("loss_mask", loss_mask, like="input_ids")


def collate_texts(rows: Rows) -> PackedBatch:
    """Batch of `build_pretraining`'s blocks, as `collate_sft`: all tokens but a block's first are targets."""
    return collate_sft([{**row, "loss_mask": [True] * len(row["input_ids"]), "row_id": ""} for row in rows])


def collate_pairs(rows: Rows) -> PackedBatch:
    """Batch of step 2's rows, one item per pair: a chosen and a rejected response, or for --loss kto a rated
    response and one to another prompt.

    chosen_ids, rejected_ids int64; numbers chosen_response_start, rejected_response_start int64 (a response
    is [response_start, length): its end is never searched for) and margin fp32; `reference_logprobs` (2,)
    fp32 of rows that have them; weight fp32, by default 1. For kto: answer_ids, mismatched_ids and so on, and
    label int64.
    """
    starts = [key for key in rows[0] if key.endswith("_response_start")]
    keys = [key.replace("_response_start", "_ids") for key in starts] + ["reference_logprobs"]
    columns = {key: [torch.as_tensor(row[key]) for row in rows] for key in keys if key in rows[0]}
    batch = PackedBatch.build(_unique_ids(rows), columns)
    for key in [*starts, *({"label"} & rows[0].keys())]:
        batch = batch.with_numbers(key, torch.tensor([row[key] for row in rows]))
    weights = torch.tensor([row.get("weight", 1.0) for row in rows], dtype=torch.float32)
    batch = batch.with_numbers("weight", weights)
    if "margin" not in rows[0]:
        return batch
    return batch.with_numbers("margin", torch.tensor([row["margin"] for row in rows], dtype=torch.float32))


def collate_prompts(rows: Rows) -> PackedBatch:
    """Batch of step 3's rows: prompt_ids int64; texts prompt_texts, messages and row_fields (both JSON), and
    row_ids.
    """
    prompt_ids, lengths = pack_rows([row["prompt_ids"] for row in rows])
    batch = PackedBatch(_unique_ids(rows), {"prompt_ids": prompt_ids}, {"prompt_ids": lengths})
    batch = batch.with_texts("prompt_texts", [row["prompt_text"] for row in rows])
    batch = batch.with_texts("messages", [row["messages"] for row in rows])
    batch = batch.with_texts("row_fields", [row["fields"] for row in rows])
    return batch.with_texts(ROW_IDS, [row["row_id"] for row in rows])


def prompt_texts(prompts: PackedBatch) -> list[tuple[str, dict[str, Any]]]:
    """Each prompt's text and the other columns of its row, for a batch of `collate_prompts`."""
    fields = [json.loads(text) for text in prompts.texts("row_fields")]
    return list(zip(prompts.texts("prompt_texts"), fields, strict=True))


def _unique_ids(rows: Rows) -> tuple[tuple[int, str], ...]:
    """(index in the batch, row id) of each row, since two sources may use the same row ids."""
    return tuple((index, row["row_id"]) for index, row in enumerate(rows))
