"""Rows of a data set to the one batch type: nothing is padded here."""

import json
from collections.abc import Sequence
from typing import Any

import torch

from common.data.packed_batch import ROW_IDS, PackedBatch

Rows = Sequence[dict[str, Any]]


def collate_sft(rows: Rows) -> PackedBatch:
    """Batch of step 1's rows: input_ids int64, loss_mask bool of their length.

    loss_mask is True where the token itself is a target (the hidden state one position before predicts it);
    a row's first token never is.
    """
    loss_masks = [torch.tensor(row["loss_mask"], dtype=torch.bool) for row in rows]
    for loss_mask in loss_masks:
        loss_mask[:1] = False  # nothing stands before a first token
    return PackedBatch.build(
        _unique_ids(rows), {"input_ids": _tensors(rows, "input_ids"), "loss_mask": loss_masks}
    )


def collate_texts(rows: Rows) -> PackedBatch:
    """Batch of `build_pretraining`'s blocks, as `collate_sft`: all tokens but a block's first are targets."""
    return collate_sft([{**row, "loss_mask": [True] * len(row["input_ids"]), "row_id": ""} for row in rows])


def collate_pairs(rows: Rows) -> PackedBatch:
    """Batch of step 2's rows, an item a pair.

    chosen_ids, rejected_ids int64; numbers chosen_response_start, rejected_response_start int64 (a response
    is [response_start, length): its end is never searched for) and margin fp32; `reference_logprobs` (2,)
    fp32 of rows that have them.
    """
    columns = {f"{side}_ids": _tensors(rows, f"{side}_ids") for side in ("chosen", "rejected")}
    if "reference_logprobs" in rows[0]:
        columns["reference_logprobs"] = [row["reference_logprobs"] for row in rows]
    batch = PackedBatch.build(_unique_ids(rows), columns)
    for key in ("chosen_response_start", "rejected_response_start"):
        batch = batch.with_numbers(key, torch.tensor([row[key] for row in rows]))
    return batch.with_numbers("margin", torch.tensor([row["margin"] for row in rows], dtype=torch.float32))


def collate_prompts(rows: Rows) -> PackedBatch:
    """Batch of step 3's rows: prompt_ids int64; texts prompt_texts, row_fields (JSON) and row_ids."""
    batch = PackedBatch.build(_unique_ids(rows), {"prompt_ids": _tensors(rows, "prompt_ids")})
    batch = batch.with_texts("prompt_texts", [row["prompt_text"] for row in rows])
    batch = batch.with_texts("row_fields", [row["fields"] for row in rows])
    return batch.with_texts(ROW_IDS, [row["row_id"] for row in rows])


def prompt_texts(prompts: PackedBatch) -> list[tuple[str, dict[str, Any]]]:
    """Each prompt's text and the other columns of its row, of a batch of `collate_prompts`."""
    fields = [json.loads(text) for text in prompts.texts("row_fields")]
    return list(zip(prompts.texts("prompt_texts"), fields, strict=True))


def _tensors(rows: Rows, key: str) -> list[torch.Tensor]:
    return [torch.tensor(row[key], dtype=torch.int64) for row in rows]


def _unique_ids(rows: Rows) -> list[tuple[int, str]]:
    """Return (index in the batch, row id): two sources may name their rows alike."""
    return [(index, row["row_id"]) for index, row in enumerate(rows)]
