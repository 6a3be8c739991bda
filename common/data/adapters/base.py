"""What an adapter is: it reads a data set's rows and says what a row means."""

import hashlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from common.data import hub_data
from common.data.adapters.row_forms import messages_from_prompt, reply_text
from common.data.example import BadRow, Example
from common.data.raw_rows import RawRows

ADAPTERS: dict[str, type["Adapter"]] = {}


class Parts(NamedTuple):
    """The rows to train on, and the rows the data set itself keeps for evaluation, if any."""

    train: RawRows
    eval: RawRows | None


class Adapter:
    """Rows of one data set to Examples.

    The short way to write one is `get_prompt`, `get_chosen` and `get_rejected`, as in DeepSpeed-Chat's
    raw_datasets.py (`get_rejected` may return None). A row that means several pairs, or none of these,
    overrides `to_examples`.
    """

    def __init__(self, source: str = "") -> None:
        """Keep the name by which the data set was asked for."""
        self.source = source

    def load(self) -> Parts:
        """The rows (RawRows, or plain lists of dicts); by default from the hub, by the registered name."""
        return Parts(*hub_data.load_hub(self.source))

    def data_digest(self) -> str | None:
        """Changes when the rows change; None leaves it to the content of the rows that `load` gave."""
        return None

    def code_digest(self) -> str:
        """Changes when this adapter is edited, so that no token cache outlives the code that filled it."""
        try:
            code = inspect.getsource(type(self))
        except (OSError, TypeError):
            code = repr(type(self))
        return hashlib.sha256(code.encode()).hexdigest()

    def to_examples(self, row: dict[str, Any]) -> list[Example]:
        """Examples of a raw row.

        Raises:
            BadRow: the row's form is wrong.
        """
        missing = [name for name in self.columns() if name not in row]
        if missing:
            raise BadRow(
                f"no column {', '.join(map(repr, missing))}; found {', '.join(map(repr, row)) or 'none'}"
            )
        rejected = self.get_rejected(row)
        return [
            Example(
                prompt=messages_from_prompt(self.get_prompt(row)),
                chosen=reply_text("the chosen answer", self.get_chosen(row)),
                rejected=None if rejected is None else reply_text("the rejected answer", rejected),
                is_tie=self.is_tie(row),
            )
        ]

    def columns(self) -> tuple[str, ...]:
        """Columns that every row must have."""
        return ()

    def is_tie(self, row: dict[str, Any]) -> bool:
        """Whether neither answer of the row was preferred."""
        return False

    def get_prompt(self, row: dict[str, Any]) -> str:
        """The text up to the reply, as `Human: ... Assistant:` or as a bare question."""
        raise NotImplementedError(
            f"{type(self).__name__} needs get_prompt, get_chosen and get_rejected, or to_examples"
        )

    def get_chosen(self, row: dict[str, Any]) -> str:
        """The preferred reply."""
        raise NotImplementedError(f"{type(self).__name__} needs get_chosen")

    def get_rejected(self, row: dict[str, Any]) -> str | None:
        """The other reply, or None."""
        return None

    def get_prompt_and_chosen(self, row: dict[str, Any]) -> str:
        """Prompt and preferred reply end to end."""
        return self.get_prompt(row) + self.get_chosen(row)

    def get_prompt_and_rejected(self, row: dict[str, Any]) -> str | None:
        """Prompt and the other reply end to end, or None."""
        rejected = self.get_rejected(row)
        return None if rejected is None else self.get_prompt(row) + rejected


def register_dataset(*names: str) -> Callable[[type[Adapter]], type[Adapter]]:
    """Class decorator: `--data_path NAME` uses this adapter for each of `names`."""

    def register(adapter: type[Adapter]) -> type[Adapter]:
        for name in names:
            if ADAPTERS.get(name, adapter).__qualname__ != adapter.__qualname__:
                raise ValueError(
                    f"data set name {name!r} is registered twice: {ADAPTERS[name]} and {adapter}"
                )
            ADAPTERS[name] = adapter
        return adapter

    return register
