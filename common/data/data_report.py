"""What became of the raw rows: counts, and the first few that could not be used."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from common.data.example import BadRow, EmptyRow
from common.data.raw_rows import RawRows

NUM_NAMED = 5  # bad rows named in a message


@dataclass
class DataReport:
    """Counts over all sources of one step."""

    kind: str = ""
    num_raw_rows: int = 0
    num_train: int = 0
    num_eval: int = 0
    num_bad: int = 0
    num_empty: int = 0  # right form, nothing in it: skipped
    num_identical: int = 0  # pairs whose answers are the same: skipped
    num_identical_truncated: int = 0  # pairs whose answers differ only in what was cut off: skipped
    num_ties: int = 0  # pairs that nobody preferred: skipped
    num_truncated: int = 0
    num_straddling: int = 0  # a token crosses from prompt into response: counts as prompt
    num_dropped_pairs: int = 0  # beyond --max_pairs_per_prompt
    num_tokens: int = 0
    bad_rows: list[str] = field(default_factory=list)  # "file:line: reason", the first few
    notes: list[str] = field(default_factory=list)  # what an adapter has to say of how it read its rows
    cache_folder: str = ""
    from_cache: bool = False

    def add_bad(self, location: str, reason: str) -> None:
        """Count a row of bad form; name it if it is among the first."""
        self.num_bad += 1
        if len(self.bad_rows) < NUM_NAMED:
            self.bad_rows.append(f"{location}: {reason}")

    def check_bad_rows(self, max_bad_rows: int) -> None:
        """Stop when more rows are bad than may be.

        Raises:
            ValueError: names the first few by file, line and reason.
        """
        if self.num_bad > max_bad_rows:
            named = "".join(f"\n    {row}" for row in self.bad_rows)
            raise ValueError(
                f"more than --max_bad_rows {max_bad_rows} of the rows are bad; mend them or raise the "
                f"limit. The first:{named}"
            )

    def read(
        self, rows: RawRows, indexes: Iterable[int], use: Callable[[dict], Any], max_bad_rows: int
    ) -> Iterator[tuple[int, Any]]:
        """Index and `use(row)` of each row that can be used; the others are counted, the bad ones named.

        Raises:
            ValueError: see `check_bad_rows`.
        """
        for index in indexes:
            self.num_raw_rows += 1
            try:
                found = use(rows[index])
            except EmptyRow:
                self.num_empty += 1
            except BadRow as error:
                self.add_bad(rows.location(index), str(error))
                self.check_bad_rows(max_bad_rows)
            else:
                yield index, found

    def lines(self) -> list[str]:
        """The report for the log: one line, and one for every kind of row that was cut or left out."""
        origin = f"token cache {self.cache_folder} ({'reused' if self.from_cache else 'new'})"
        result = [
            f"{self.kind} data: {self.num_train} train and {self.num_eval} eval rows of {self.num_raw_rows} "
            f"raw rows, {self.num_tokens} tokens, {origin}"
        ]
        notes = {
            "rows truncated to the length limit": self.num_truncated,
            "rows skipped: bad form": self.num_bad,
            "rows skipped: empty": self.num_empty,
            "pairs skipped: both answers are the same": self.num_identical,
            "pairs skipped: both answers are the same after truncation": self.num_identical_truncated,
            "pairs skipped: neither answer was preferred": self.num_ties,
            "pairs left out by --max_pairs_per_prompt": self.num_dropped_pairs,
            "rows with a token that starts in the prompt and ends in the response": self.num_straddling,
        }
        result += [f"{self.kind} data: {count} {what}" for what, count in notes.items() if count]
        result += [f"{self.kind} data: bad row {row}" for row in self.bad_rows]
        return result + [f"{self.kind} data: {note}" for note in self.notes]

    def facts(self) -> dict[str, int]:
        """The counts, by their names, for a run's description."""
        return {name: value for name, value in vars(self).items() if name.startswith("num_")}

    def to_json(self) -> str:
        """All fields, as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "DataReport":
        """The report that `to_json` wrote."""
        return cls(**json.loads(text))
