"""Rows that belong together as one row: shares, evaluation parts and limits then never part them."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from common.data.example import BadRow
from common.data.raw_rows import RawRows


class GroupedRows(RawRows):
    """Row i is made of the rows `groups[i]` of `base`; it stands where the first of them does."""

    def __init__(
        self,
        base: RawRows,
        groups: Sequence[Sequence[int]],
        build: Callable[[list[dict[str, Any]]], dict[str, Any]],
    ) -> None:
        """`build` makes one row of those of a group."""
        super().__init__(groups, base.origin)
        self._base, self._build = base, build

    def __getitem__(self, index: int) -> dict[str, Any]:
        """See RawRows."""
        return self._build([self._base[i] for i in self._rows[index]])

    def line(self, index: int) -> int:
        """See RawRows."""
        return self._base.line(self._rows[index][0])

    def location(self, index: int) -> str:
        """See RawRows."""
        return self._base.location(self._rows[index][0])

    def row_id(self, index: int) -> str:
        """See RawRows."""
        return self._base.row_id(self._rows[index][0])

    def update_digest(self, total: Any) -> None:
        """See RawRows."""
        self._base.update_digest(total)


def readable(rows: RawRows) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield index and row of all rows that are rows."""
    for index in range(len(rows)):
        try:
            yield index, rows[index]
        except BadRow:
            continue


def group_by_key(num_rows: int, keys: dict[int, Hashable]) -> list[list[int]]:
    """Row indexes with equal keys together, in the order of the first of each; a row without a key alone."""
    groups: dict[Hashable, list[int]] = {}
    for index in range(num_rows):
        key = ("key", keys[index]) if index in keys else ("row", index)
        groups.setdefault(key, []).append(index)
    return list(groups.values())
