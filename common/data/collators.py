"""Rows to batches, padded or packed. What padding holds never matters: masks and lengths say what counts."""

# B sequences, N pairs, T tokens of the longest row, P prompt

import json
from collections.abc import Sequence
from typing import Any

import torch

from common.data.packed_batch import PackedBatch

Batch = dict[str, Any] | PackedBatch


def pad_rows(
    rows: Sequence[Sequence[int]], pad: int, *, on_left: bool = False, pad_to_multiple: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (B, T) int64 padded with `pad`, and the mask (B, T) bool of what is no padding.

    T is the longest row's length, rounded up to a multiple of `pad_to_multiple`.
    """
    longest = max(len(row) for row in rows)
    width = -(-longest // pad_to_multiple) * pad_to_multiple
    ids = torch.full((len(rows), width), pad, dtype=torch.int64)  # (B, T)
    mask = torch.zeros((len(rows), width), dtype=torch.bool)  # (B, T)
    for i, row in enumerate(rows):
        span = slice(width - len(row), width) if on_left else slice(0, len(row))
        ids[i, span] = torch.tensor(row, dtype=torch.int64)
        mask[i, span] = True
    return ids, mask


class SFTCollator:
    """Rows of `build_sft` to a right-padded batch."""

    def __init__(self, pad_id: int, pad_to_multiple: int = 1) -> None:
        self.pad_id, self.pad_to_multiple = pad_id, pad_to_multiple

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """input_ids and attention_mask (B, T) int64, loss_mask (B, T) bool, lengths (B,) int64, row_ids.

        loss_mask is True where the token itself is a target (the logits one position before predict it).
        """
        input_ids, is_token = pad_rows(
            [row["input_ids"] for row in rows], self.pad_id, pad_to_multiple=self.pad_to_multiple
        )
        loss_mask, _ = pad_rows([row["loss_mask"] for row in rows], 0, pad_to_multiple=self.pad_to_multiple)
        return {
            "input_ids": input_ids,
            "attention_mask": is_token.long(),
            "loss_mask": loss_mask.bool(),
            "lengths": is_token.sum(dim=1),
            "row_ids": [row["row_id"] for row in rows],
        }


class PairCollator:
    """Rows of `build_pairs` to one right-padded batch: the N chosen rows, then the N rejected ones."""

    def __init__(self, pad_id: int, pad_to_multiple: int = 1) -> None:
        self.pad_id, self.pad_to_multiple = pad_id, pad_to_multiple

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """input_ids, attention_mask (2N, T), lengths, response_starts (2N,) int64, margins (N,) fp32.

        A response is [response_start, length): its end is never searched for. Rows with `reference_logprobs`
        (2,) give those too, as (2N,) fp32.
        """
        sides = ("chosen", "rejected")
        input_ids, is_token = pad_rows(
            [row[f"{side}_ids"] for side in sides for row in rows],
            self.pad_id,
            pad_to_multiple=self.pad_to_multiple,
        )
        starts = [row[f"{side}_response_start"] for side in sides for row in rows]
        reference = [row["reference_logprobs"] for row in rows if "reference_logprobs" in row]
        return {
            "input_ids": input_ids,
            "attention_mask": is_token.long(),
            "lengths": is_token.sum(dim=1),
            "response_starts": torch.tensor(starts, dtype=torch.int64),
            "margins": torch.tensor([row["margin"] for row in rows], dtype=torch.float32),
            "row_ids": [row["row_id"] for row in rows],
        } | ({"reference_logprobs": torch.stack(reference, dim=1).flatten()} if reference else {})


class PackedSFTCollator:
    """Rows of `build_sft` laid end to end."""

    def __call__(self, rows: Sequence[dict[str, Any]]) -> PackedBatch:
        """input_ids int64 and loss_mask bool, one sequence of each a row."""
        input_ids = [[torch.tensor(row["input_ids"], dtype=torch.int64)] for row in rows]
        loss_mask = [[torch.tensor(row["loss_mask"], dtype=torch.bool)] for row in rows]
        return PackedBatch.build(_unique_ids(rows), {"input_ids": input_ids, "loss_mask": loss_mask})


class PackedPairCollator:
    """Rows of `build_pairs` laid end to end: each pair's chosen answer, then its rejected one."""

    def __call__(self, rows: Sequence[dict[str, Any]]) -> PackedBatch:
        """input_ids, response_starts int64 (two sequences a pair), margins fp32; `reference_logprobs` fp32 of
        rows that have them.
        """
        sides = ("chosen", "rejected")
        columns = {
            "input_ids": [[torch.tensor(row[f"{side}_ids"]) for side in sides] for row in rows],
            "response_starts": [
                [torch.tensor([row[f"{side}_response_start"]]) for side in sides] for row in rows
            ],
            "margins": [[torch.tensor([row["margin"]], dtype=torch.float32)] for row in rows],
        }
        if "reference_logprobs" in rows[0]:
            columns["reference_logprobs"] = [list(row["reference_logprobs"].split(1)) for row in rows]
        return PackedBatch.build(_unique_ids(rows), columns)


def _unique_ids(rows: Sequence[dict[str, Any]]) -> list[tuple[int, str]]:
    """Return (place in the batch, row id): two sources may name their rows alike."""
    return [(place, row["row_id"]) for place, row in enumerate(rows)]


def pack_sft(batch: Batch) -> PackedBatch:
    """Return the batch without its padding, if it had any."""
    if isinstance(batch, PackedBatch):
        return batch
    is_token = batch["attention_mask"].bool()
    loss_mask = batch["loss_mask"].bool().clone()
    loss_mask[:, 0] = False  # nothing stands before a first token
    columns = {"input_ids": (batch["input_ids"], is_token), "loss_mask": (loss_mask, is_token)}
    return PackedBatch.unpad(range(len(is_token)), columns)


def pack_pairs(batch: Batch) -> PackedBatch:
    """Return the pairs without their padding, if they had any; row ids become places in the batch."""
    if isinstance(batch, PackedBatch):
        return batch
    num_pairs = len(batch["margins"])
    is_token = batch["attention_mask"].bool()
    sides = range(0, 2 * num_pairs, num_pairs)
    rows = [[batch["input_ids"][r + s][is_token[r + s]] for s in sides] for r in range(num_pairs)]
    starts = batch["response_starts"].view(-1, 1)
    columns = {
        "input_ids": rows,
        "response_starts": [[starts[r + s] for s in sides] for r in range(num_pairs)],
        "margins": [[margin.view(1)] for margin in batch["margins"]],
    }
    if "reference_logprobs" in batch:
        reference = batch["reference_logprobs"].view(-1, 1)
        columns["reference_logprobs"] = [[reference[r + s] for s in sides] for r in range(num_pairs)]
    return PackedBatch.build(range(num_pairs), columns)


class PromptCollator:
    """Rows of `build_prompts` to a left-padded batch, whose last column is every prompt's last token."""

    def __init__(self, pad_id: int, pad_to_multiple: int = 1) -> None:
        self.pad_id, self.pad_to_multiple = pad_id, pad_to_multiple

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """prompt_ids (B, P) int64, prompt_mask (B, P) bool, prompt_texts, row_ids, row_fields (dicts)."""
        prompt_ids, prompt_mask = pad_rows(
            [row["prompt_ids"] for row in rows],
            self.pad_id,
            on_left=True,
            pad_to_multiple=self.pad_to_multiple,
        )
        return {
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "prompt_texts": [row["prompt_text"] for row in rows],
            "row_ids": [row["row_id"] for row in rows],
            "row_fields": [json.loads(row["fields"]) for row in rows],
        }
