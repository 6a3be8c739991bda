"""Adapters, which turn the rows of a data set into Examples; the adapter of the usual row formats."""

import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.data import hub_data
from common.data.adapters import message_trees, row_forms
from common.data.adapters.row_parts import messages_from_prompt, parse_reply
from common.data.example import BadRow, EmptyRow, Example
from common.data.raw_rows import RawRows, readable
from common.flags.plugins import origin_of
from common.ranks.failures import kind_and_line

DEFAULT_SCORE_COLUMN = "helpfulness"  # column of HelpSteer2
MOST_UNREAD = 20  # columns and keys listed in the report
ADAPTERS: dict[str, type] = {}  # Adapters, and classes that PortedClass can wrap


def digest_code(kind: type) -> str:
    """Digest of the files that define a class and its bases, and of this folder, whose code reads their
    rows.
    """
    files = [origin_of(part)[1] for part in kind.__mro__]
    files += map(str, sorted(Path(__file__).parent.glob("*.py")))
    total = hashlib.sha256(kind.__qualname__.encode())
    for file in files:
        total.update(Path(file).read_bytes() if Path(file).is_file() else file.encode())
    return total.hexdigest()


class Adapter:
    """Turns rows of one data set into Examples.

    The simplest adapter defines `get_prompt`, `get_chosen` and `get_rejected`, as in DeepSpeed-Chat's
    raw_datasets.py. Each may return None or an empty text: the row is then left out of the steps that need
    the text, and counts as empty, not bad. Override `to_examples` for rows with several pairs or another
    meaning.
    """

    notes: tuple[str, ...] = ()  # lines of the data report, complete once the rows are read
    kind: type | None = None  # the user's class that the adapter wraps
    arguments: dict[str, Any] = {}  # constructor arguments from --data_path
    score_column: str = DEFAULT_SCORE_COLUMN  # --score_column
    local: Path | None = None  # the file or folder to read instead of `load`
    max_rows: int | None = None  # rows read from each file; None: all
    hub_config: str | None = None  # configuration of a hub data set or of a local copy
    own_names: Mapping[str, str] = {}  # --columns: form column -> column of the rows

    def __init__(self, source: str = "") -> None:
        """`source` is the name under which the data set was requested."""
        self.source = source

    def load(self) -> tuple[Sequence[dict[str, Any]] | RawRows, Sequence[dict[str, Any]] | RawRows | None]:
        """Training rows, and the data set's own evaluation rows, if any.

        By default those of the hub, by the registered name. Not called if there is a `local` copy.
        """
        return hub_data.load_hub(self.source, self.hub_config)

    def arrange(self, rows: RawRows) -> RawRows:
        """Rows as `to_examples` expects them: by default unchanged; several may be joined into one.

        Called once for each part from `load` or a local copy.
        """
        return rows

    def notes_of(self, stage: int) -> list[str]:
        """Lines for a step's data report, after the rows have been read."""
        return list(self.notes)

    def code_digest(self) -> str:
        """Digest of this adapter's code, so that no token cache outlives the code that filled it."""
        return " ".join(digest_code(kind) for kind in (type(self), self.kind) if kind)

    def to_examples(self, row: dict[str, Any]) -> list[Example]:
        """Examples of a raw row. Raises BadRow for a wrong form."""
        self.check_columns(row)
        texts = (self.get_prompt(row), self.get_chosen(row), self.get_rejected(row))
        prompt, chosen, rejected = (None if isinstance(t, str) and not t.strip() else t for t in texts)
        if prompt is None:
            raise EmptyRow("the row has no prompt")
        absent = "answer" if chosen is None else "rejected answer" if rejected is None else ""
        return [
            Example(
                prompt=messages_from_prompt(prompt),
                chosen=None if chosen is None else parse_reply("the chosen answer", chosen),
                rejected=None if rejected is None else parse_reply("the rejected answer", rejected),
                absence=EmptyRow(f"the row has no {absent}") if absent else None,
            )
        ]

    def check_columns(self, row: dict[str, Any]) -> None:
        """Raise BadRow if a row lacks one of `columns()`."""
        missing = [name for name in self.columns() if name not in row]
        if missing:
            raise BadRow(
                f"no column {', '.join(map(repr, missing))}; found {', '.join(map(repr, row)) or 'none'}"
            )

    def columns(self) -> tuple[str, ...]:
        """Columns that every row must have."""
        return ()

    def get_prompt(self, row: dict[str, Any]) -> str | None:
        """The text up to the reply, as `Human: ... Assistant:` or as a bare question; or None."""
        raise NotImplementedError(
            f"{type(self).__name__} needs get_prompt, get_chosen and get_rejected, or to_examples"
        )

    def get_chosen(self, row: dict[str, Any]) -> str | None:
        """The preferred reply, or None."""
        raise NotImplementedError(f"{type(self).__name__} needs get_chosen")

    def get_rejected(self, row: dict[str, Any]) -> str | None:
        """The other reply, or None."""
        return None


def register_dataset(*names: str) -> Callable[[type], type]:
    """Class decorator: `--data_path NAME` uses this class for each of `names`.

    It is an Adapter, or a class with the methods of DeepSpeed-Chat's (see ported_class.py). Importing a
    module twice may register its classes again.
    """

    def register(kind: type) -> type:
        for name in names:
            known = ADAPTERS.get(name, kind)
            if origin_of(known) != origin_of(kind):
                raise ValueError(f"data set name {name!r} is registered twice: by {known} and {kind}")
            ADAPTERS[name] = kind
        return kind

    return register


class AnyForm(Adapter):
    """Rows of the usual forms; the first row decides whether rows are joined."""

    def __init__(self, source: str = "") -> None:
        super().__init__(source)
        self._unread: Counter[str] = Counter()

    def arrange(self, rows: RawRows) -> RawRows:
        """See Adapter; messages of a tree become one row, and so do scored responses to one prompt."""
        _, first = next(readable(rows), (0, {}))
        if first.keys() >= set(message_trees.MESSAGE_COLUMNS):
            return message_trees.group_trees(rows, self._unread)
        try:
            row = row_forms.Row(first, self.own_names)
        except BadRow:  # counted as bad when it is read
            return rows
        if not ("prompt" in row and "response" in row) or "rejected" in row:
            return rows
        if self.score_column in first:
            return row_forms.group_scored(rows, self.score_column, self.own_names, self._unread)
        if self.score_column != DEFAULT_SCORE_COLUMN:
            note = f"no column {self.score_column!r} (--score_column): read as prompt/response without scores"
            self.notes = tuple(dict.fromkeys((*self.notes, note)))  # one note for both parts
        return rows

    def to_examples(self, row: dict[str, Any]) -> list[Example]:
        if message_trees.TREE in row:
            return message_trees.tree_examples(row)
        return row_forms.read_row(row, self.own_names, self._unread)

    def notes_of(self, stage: int) -> list[str]:
        """See Adapter; columns and keys that were not read. Step 3 passes columns to rewards."""
        counts = {what: n for what, n in self._unread.items() if stage != 3 or not what.startswith("column")}
        lines = [f"{what} is not read: {n:,} rows" for what, n in sorted(counts.items())]
        more = [f"{len(lines) - MOST_UNREAD} more are not read"] if len(lines) > MOST_UNREAD else []
        return [*self.notes, *lines[:MOST_UNREAD], *more]


def parameters_of(kind: type) -> set[str]:
    """Parameter names of a class's constructor."""
    try:
        return set(inspect.signature(kind).parameters)
    except ValueError:  # built-in class without a signature
        return set()


def make_own(kind: type, source: str, args: list[Any], named: dict[str, Any]) -> Any:
    """An object of a user's class. Raises ValueError if its constructor has other parameters, or raises."""
    try:
        return kind(*args, **named)
    except Exception as error:  # TypeError for wrong arguments, or any error of the class
        raise ValueError(
            f"--data_path {source}: the constructor of {kind.__name__} raised {kind_and_line(error)}; give "
            "it other arguments, MODULE:CLASS:ARGUMENT=VALUE,ARGUMENT=VALUE, or fix it"
        ) from error


class MapStyle(AnyForm):
    """Rows of a class with a length and an index, which needs no base class."""

    def __init__(self, kind: type, source: str, args: list[Any], named: dict[str, Any]) -> None:
        """The class is constructed with these arguments. Raises ValueError as `make_own` does, or if it lacks
        either method.
        """
        super().__init__(source)
        if not (hasattr(kind, "__len__") and hasattr(kind, "__getitem__")):
            raise ValueError(
                f"--data_path {source}: {kind.__name__} needs get_prompt, as DeepSpeed-Chat's classes have, "
                "or __len__ and __getitem__ that give rows, or must derive from common.data.registry.Adapter"
            )
        self.kind = kind
        self._rows = make_own(kind, source, args, named)

    def load(self) -> tuple[RawRows, None]:
        """See Adapter; a row is bad if the index raises. Raises ValueError if the length raises."""
        try:
            return RawRows(range(len(self._rows)), self.source, read=self._read), None
        except Exception as error:  # any error of the class
            raise ValueError(
                f"--data_path {self.source}: its length raised {kind_and_line(error)}; fix it"
            ) from error

    def _read(self, index: int) -> Any:
        try:
            return self._rows[index]
        except Exception as error:  # any error of the class
            raise BadRow(f"the index raised {kind_and_line(error)}") from error


@register_dataset("local/jsonfile")
class LocalJsonFile(AnyForm):
    """DeepSpeed-Chat's name for data/train.json and data/eval.json, in the working folder."""

    local = Path("data")
