"""What an adapter is: it reads a data set's rows and says what a row means."""

import functools
import hashlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from common.data import hub_data
from common.data.adapters.row_parts import messages_from_prompt, reply_text
from common.data.example import BadRow, EmptyRow, Example
from common.data.hub_data import HubPlace
from common.data.raw_rows import RawRows

DEFAULT_SCORE_COLUMN = "helpfulness"  # HelpSteer2's
ADAPTERS: dict[str, type] = {}  # Adapters, and classes that PortedClass can wrap


class Parts(NamedTuple):
    """The rows to train on, and the rows the data set itself keeps for evaluation, if any."""

    train: RawRows
    eval: RawRows | None


def digest_code(kind: type) -> str:
    """Digest of the files that hold a class and its bases: a helper function beside them counts too."""
    total = hashlib.sha256(kind.__qualname__.encode())
    for part in kind.__mro__:
        if part.__module__ == "builtins":
            continue
        try:
            total.update(Path(inspect.getsourcefile(part) or "").read_bytes())
        except (OSError, TypeError):  # made in an interpreter
            total.update(repr(part).encode())
    return total.hexdigest()


@functools.cache
def _digest_shared_code() -> str:
    """Digest of this folder: what reads dialogues, lists and rankings stands in several of its files."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


class Adapter:
    """Rows of one data set to Examples.

    The short way to write one is `get_prompt`, `get_chosen` and `get_rejected`, as in DeepSpeed-Chat's
    raw_datasets.py (`get_rejected` may return None; for the others see RowsWithGaps). A row that means
    several pairs, or none of these, overrides `to_examples`.
    """

    notes: tuple[str, ...] = ()  # for the data report, when the rows have been read
    score_column: str = DEFAULT_SCORE_COLUMN  # --score_column
    max_rows: int | None = None  # of each file, where the first ones are enough; None: all
    hub_places: Mapping[str, HubPlace] = {}  # by name, where the hub has other ones

    def __init__(self, source: str = "") -> None:
        """Keep the name by which the data set was asked for."""
        self.source = source

    def load(self) -> Parts:
        """The rows (RawRows, or plain lists of dicts); by default from the hub, by the registered name."""
        return Parts(*hub_data.load_hub(self.source, self.hub_places.get(self.source)))

    def arrange(self, rows: RawRows) -> RawRows:
        """The rows as `to_examples` takes them: by default as they are; several may become one.

        Called once for each part that `load` gave, or that a local copy holds.
        """
        return rows

    def data_digest(self) -> str | None:
        """Changes when the rows change; None leaves it to the content of the rows that `load` gave."""
        return None

    def code_digest(self) -> str:
        """Changes when this adapter is edited, so that no token cache outlives the code that filled it."""
        return hashlib.sha256((digest_code(type(self)) + _digest_shared_code()).encode()).hexdigest()

    def to_examples(self, row: dict[str, Any]) -> list[Example]:
        """Examples of a raw row.

        Raises:
            BadRow: the row's form is wrong.
        """
        self.check_columns(row)
        rejected = self.get_rejected(row)
        return [
            Example(
                prompt=messages_from_prompt(self.get_prompt(row)),
                chosen=reply_text("the chosen answer", self.get_chosen(row)),
                rejected=None if rejected is None else reply_text("the rejected answer", rejected),
                is_tie=self.is_tie(row),
            )
        ]

    def check_columns(self, row: dict[str, Any]) -> None:
        """Raise BadRow where a row lacks one of `columns()`."""
        missing = [name for name in self.columns() if name not in row]
        if missing:
            raise BadRow(
                f"no column {', '.join(map(repr, missing))}; found {', '.join(map(repr, row)) or 'none'}"
            )

    def columns(self) -> tuple[str, ...]:
        """Columns that every row must have."""
        return ()

    def is_tie(self, row: dict[str, Any]) -> bool:
        """Whether neither answer of the row was preferred."""
        return False

    def get_prompt(self, row: dict[str, Any]) -> str | None:
        """The text up to the reply, as `Human: ... Assistant:` or as a bare question; None: there is none."""
        raise NotImplementedError(
            f"{type(self).__name__} needs get_prompt, get_chosen and get_rejected, or to_examples"
        )

    def get_chosen(self, row: dict[str, Any]) -> str | None:
        """The preferred reply, or None."""
        raise NotImplementedError(f"{type(self).__name__} needs get_chosen")

    def get_rejected(self, row: dict[str, Any]) -> str | None:
        """The other reply, or None."""
        return None


class RowsWithGaps(Adapter):
    """An Adapter whose `get_prompt` and `get_chosen` may return None too, for rows that have no such text.

    As in DeepSpeed-Chat such a row is left out of the steps that need the text; it counts as empty, not bad.
    """

    absent_answer = "the row has no answer"
    absent_rejected: str | None = None  # the reason, where some rows have a rejected answer and others none

    def to_examples(self, row: dict[str, Any]) -> list[Example]:
        """See Adapter."""
        self.check_columns(row)
        prompt, chosen, rejected = self.get_prompt(row), self.get_chosen(row), self.get_rejected(row)
        if _is_gap(prompt):
            raise EmptyRow("the row has no prompt")
        reason = self.absent_rejected if _is_gap(rejected) else None
        if _is_gap(chosen):
            reason = self.absent_answer
        return [
            Example(
                prompt=messages_from_prompt(prompt),
                chosen=None if _is_gap(chosen) else reply_text("the chosen answer", chosen),
                rejected=None if _is_gap(rejected) else reply_text("the rejected answer", rejected),
                absence=None if reason is None else EmptyRow(reason),
            )
        ]


def _is_gap(text: Any) -> bool:
    return text is None or (isinstance(text, str) and not text.strip())


def register_dataset(*names: str) -> Callable[[type], type]:
    """Class decorator: `--data_path NAME` uses this class for each of `names`.

    It is an Adapter, or a class with the methods of DeepSpeed-Chat's (see ported_class.py). A module that is
    imported twice registers its classes again without harm.
    """

    def register(kind: type) -> type:
        for name in names:
            known = ADAPTERS.get(name, kind)
            if not _is_same(known, kind):
                raise ValueError(f"data set name {name!r} is registered twice: by {known} and {kind}")
            ADAPTERS[name] = kind
        return kind

    return register


def _is_same(one: type, other: type) -> bool:
    """Whether two classes are one that was defined again: by a reload, or under another module name."""
    if one.__qualname__ != other.__qualname__:
        return False
    return one.__module__ == other.__module__ or _file_of(one) == _file_of(other) is not None


def _file_of(kind: type) -> str | None:
    try:
        return inspect.getsourcefile(kind)
    except (OSError, TypeError):
        return None
