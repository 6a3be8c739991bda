"""Rows of the usual forms: from local files and folders, or from a hub data set without an adapter."""

from pathlib import Path
from typing import Any

from common.data import hub_data, raw_files
from common.data.adapters import message_trees, rankings
from common.data.adapters.base import DEFAULT_SCORE_COLUMN, Adapter, Parts, register_dataset
from common.data.adapters.row_forms import read_row
from common.data.example import Example
from common.data.raw_rows import RawRows, readable


class AnyForm(Adapter):
    """A hub data set whose rows have one of the usual forms, which the first row decides where rows join."""

    def arrange(self, rows: RawRows) -> RawRows:
        """See Adapter; messages of a tree become one row, and so do scored responses to one prompt."""
        _, first = next(readable(rows), (0, {}))
        if first.keys() >= set(message_trees.MESSAGE_COLUMNS):
            return message_trees.group_trees(rows)
        if not first.keys() >= {"prompt", "response"} or "rejected" in first:
            return rows
        if self.score_column in first:
            return rankings.group_scored(rows, self.score_column)
        if self.score_column != DEFAULT_SCORE_COLUMN:
            note = f"no column {self.score_column!r} (--score_column): read as prompt/response without scores"
            self.notes = tuple(dict.fromkeys((*self.notes, note)))
        return rows

    def to_examples(self, row: dict[str, Any]) -> list[Example]:
        if message_trees.TREE in row:
            return message_trees.tree_examples(row)
        if rankings.SCORED in row:
            return rankings.scored_responses(row, self.score_column)
        return read_row(row)


class LocalFiles(AnyForm):
    """A file, a folder of train and eval files, or a folder saved by `datasets`."""

    def load(self) -> Parts:
        """See Adapter.

        Raises:
            ValueError: nothing usable there; says what was found and what would do.
        """
        path = Path(self.source)
        if hub_data.is_saved_folder(path):
            return Parts(*hub_data.load_saved(path))
        train, held_out = raw_files.find_parts(path)
        rows = raw_files.read_files(train, self.max_rows)
        return Parts(rows, raw_files.read_files(held_out, self.max_rows) if held_out else None)

    def data_digest(self) -> str:
        path = Path(self.source)
        if hub_data.is_saved_folder(path):
            return raw_files.digest_files(sorted(p for p in path.rglob("*") if p.is_file()), path)
        train, held_out = raw_files.find_parts(path)
        return raw_files.digest_files([*train, *held_out], path)


@register_dataset("local/jsonfile")
class LocalJsonFile(LocalFiles):
    """DeepSpeed-Chat's name for data/train.json and data/eval.json."""

    def __init__(self, source: str = "") -> None:
        """The folder is fixed: data, in the working folder."""
        super().__init__("data")
