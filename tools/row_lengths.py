"""How long a step's rows are, and how much of a batch would be padding."""

# n rows

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np

from common.data.global_batches import GlobalBatches, TokenBudget
from common.data.micro_batches import padding_fraction
from common.data.token_cache import TokenTable
from tools.painter import Painter

MAX_MEASURED = 50_000  # rows whose masks are read: a second or two; lengths alone are known without reading
MAX_BATCHES = 200  # whose padding is counted
NUM_BINS = 8
BAR_WIDTH = 40


def sequence_lengths(kind: str, table: TokenTable) -> list[tuple[int, ...]]:
    """The lengths of every row's sequences: one, or two of a pair."""
    columns = {"sft": ("input_ids",), "pair": ("chosen_ids", "rejected_ids"), "prompt": ("prompt_ids",)}
    return list(zip(*(table.lengths(column).tolist() for column in columns[kind]), strict=True))


def build_length_columns(kind: str, table: TokenTable) -> dict[str, np.ndarray]:
    """Tokens of each part of a row, (n,) int64 by the part's name; the last is what a batch is as wide as."""
    whole = np.array([max(lengths) for lengths in sequence_lengths(kind, table)], dtype=np.int64)
    if kind == "prompt":
        return {"prompt": whole}
    step = -(-len(table) // MAX_MEASURED)
    rows = [table[i] for i in range(0, len(table), step)]
    if kind == "sft":
        learned = np.array([sum(row["loss_mask"]) for row in rows], dtype=np.int64)
        context = np.array([len(row["input_ids"]) for row in rows], dtype=np.int64) - learned
        return {"context": context, "learned": learned, "whole row": whole}
    parts = {"prompt": [row["chosen_response_start"] for row in rows]}
    for side in ("chosen", "rejected"):
        parts[side] = [len(row[f"{side}_ids"]) - row[f"{side}_response_start"] for row in rows]
    columns = {name: np.array(lengths, dtype=np.int64) for name, lengths in parts.items()}
    return columns | {"longer row": whole}


def length_lines(columns: dict[str, np.ndarray], painter: Painter) -> list[str]:
    """A table of the parts, then the last of them as a histogram."""
    names = ("min", "median", "p95", "max")
    lines = [painter.paint(f"{'tokens':<12}" + "".join(f"{name:>9}" for name in names), "title")]
    for name, lengths in columns.items():
        numbers = np.percentile(lengths, (0, 50, 95, 100)).round().astype(int)
        lines.append(f"{name:<12}" + "".join(f"{number:>9,}" for number in numbers))
    name, lengths = list(columns.items())[-1]
    return [*lines, "", painter.paint(f"{name}, tokens", "title"), *_histogram(lengths, painter)]


def _histogram(lengths: np.ndarray, painter: Painter) -> list[str]:
    low, high = int(lengths.min()), int(lengths.max())
    width = -(-(high - low + 1) // NUM_BINS)
    counts = np.bincount((lengths - low) // width)
    lines = []
    for i, count in enumerate(counts.tolist()):
        first, last = low + i * width, min(low + (i + 1) * width - 1, high)
        label = f"{first:,}-{last:,}" if last > first else f"{first:,}"
        length = round(BAR_WIDTH * count / counts.max()) or bool(count)
        share = f"{count:>9,} {count / len(lengths):>6.1%}"
        lines.append(f"{label:<12}{share}  {painter.paint(painter.bar * length, 'learned')}".rstrip())
    return lines


def padding_lines(
    lengths: Sequence[tuple[int, ...]], num_rows: int, max_tokens: int, seed: int, painter: Painter
) -> list[str]:
    """How much of batches of `num_rows` rows would be padding: as they come, grouped, and packed.

    `max_tokens` is the most that a sequence may have. The batches are those that a single process would make.
    """
    title = painter.paint(f"padding in batches of {num_rows} rows", "title")
    if len(lengths) < num_rows:
        return [title, painter.paint(f"{len(lengths):,} rows do not fill one", "note")]
    budget = TokenBudget(lengths, max_tokens * num_rows * len(lengths[0]))
    longest = [max(row) for row in lengths]

    def share(**options: Any) -> str:
        batches = GlobalBatches(lengths, list, rows_per_micro_batch=num_rows, seed=seed, **options)
        return f"{_padding(batches):.1%}"

    return [
        title,
        f"{'as they come':<17}{share():>7}",
        f"{'--group_by_length':<17}{share(group_lengths=longest):>7}",
        f"{'--packed':<17}{share(budget=budget):>7} on a CPU, none on a GPU",
    ]


def _padding(batches: GlobalBatches) -> float:
    rows: list[tuple[int, ...]] = []
    plan: list[list[int]] = []
    for step in islice(batches.epoch(0), MAX_BATCHES):
        for micro_batch in step:
            plan.append(list(range(len(rows), len(rows) + len(micro_batch))))
            rows += micro_batch
    return padding_fraction([plan], rows)
