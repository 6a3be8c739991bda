"""A data set class written for DeepSpeed-Chat, or any class with its methods, read as an Adapter.

Its file stays unchanged: it needs no import and no base class of ours.
"""

import contextlib
import inspect
import io
import os
import re
import tempfile
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from common.data import hub_data
from common.data.adapters.base import Adapter
from common.data.adapters.row_parts import LEADING_CUE, messages_from_prompt
from common.data.example import BadRow, EmptyRow, Example
from common.data.raw_rows import RawRows
from common.ranks.failures import kind_and_line

SEED = 1234  # default here and in DeepSpeed-Chat; the steps' shares would overlap if their seeds differed

_OWN_NAME = re.compile(r"""\bdataset_name\s*=\s*["']([^"']+)["']""")


class PortedClass(Adapter):
    """Rows (dicts) from `get_train_data` and `get_eval_data`, their texts from the five methods.

    `get_prompt` is required. DeepSpeed-Chat trains on `get_prompt_and_chosen` and `get_prompt_and_rejected`,
    so a reply is their text after the prompt, else that of `get_chosen` and `get_rejected`. A method that
    returns None leaves the row out of the steps that need it, as in DeepSpeed-Chat; one that raises makes the
    row bad in these steps. The output of print() is dropped: it would be repeated for every row.
    """

    def __init__(
        self, kind: type, source: str, dataset_name: str = "", given: Mapping[str, Any] | None = None
    ) -> None:
        """`dataset_name` is an argument of the constructor; if empty, the name that the class gives itself.

        `given` are further arguments of its constructor; its seed is SEED, unless they have another.
        """
        super().__init__(source)
        self.kind = kind
        self._given = {name: value for name, value in (given or {}).items() if name != "dataset_name"}
        self._name = str((given or {}).get("dataset_name") or dataset_name or _own_name(kind))

    def load(self) -> tuple[Any, Any]:
        """See Adapter. Raises ValueError if the class cannot be constructed, or has no rows."""
        train = self._part("get_train_data")
        if train is None:
            raw = getattr(self._inner, "raw_datasets", None)
            train = raw.get("train") if isinstance(raw, Mapping) else raw
        if train is None and self._name:
            path = Path(self._name)
            return (
                hub_data.load_local(path, self.max_rows) if path.exists() else hub_data.load_hub(self._name)
            )
        if train is None or len(train) == 0:
            raise self._refusal(
                f"{self.kind.__name__} has no rows: neither get_train_data nor raw_datasets['train'] gives "
                f"any; add one, or name a file, folder or hub data set by --data_path {self.source}:NAME"
            )
        held_out = None
        try:
            held_out = self._part("get_eval_data")
            note = "get_eval_data gives the training rows" if held_out is train else ""
        except ValueError as error:
            note = str(error).removeprefix(f"--data_path {self.source}: ")
        if note:
            self.notes = (*self.notes, f"{note}; --eval_fraction is held out")
        has_own = held_out is not None and not note and len(held_out) > 0
        return train, RawRows(held_out, f"{self.source}/eval") if has_own else None

    def to_examples(self, row: dict[str, Any]) -> list[Example]:
        with contextlib.redirect_stdout(io.StringIO()):
            prompt = self._ask("get_prompt", row)
            if isinstance(prompt, BadRow):
                raise prompt
            chosen, rejected = (
                _reply(prompt, self._ask(f"get_prompt_and_{side}", row), self._ask(f"get_{side}", row))
                for side in ("chosen", "rejected")
            )
        absences = [part for part in (chosen, rejected) if isinstance(part, BadRow)]
        return [
            Example(
                prompt=messages_from_prompt(prompt),
                chosen=chosen if isinstance(chosen, str) else None,
                rejected=rejected if isinstance(rejected, str) else None,
                absence=absences[0] if absences else None,
            )
        ]

    @cached_property
    def _inner(self) -> Any:
        """An instance of the class. Raises ValueError if its constructor has an unknown parameter, or
        raises.
        """
        # Some classes write their shares to files: each process has a folder, deleted with this object.
        self._folder = tempfile.TemporaryDirectory(prefix="triptych-")
        values = {
            "output_path": self._folder.name,
            "seed": SEED,
            "local_rank": 0,
            "dataset_name": self._name or self.source,
            "chat_path": os.getcwd(),  # for its local/jsonfile: the folder that contains data/
        }
        try:
            args, named = _arguments(self.kind, values, self._given)
            return self.kind(*args, **named)
        except Exception as error:  # error of the network, the disk or the class
            call = f"{self.kind.__name__}({', '.join(f'{k}={v!r}' for k, v in values.items())})"
            cure = "check the network and the class" if self._name else f"name its data: {self.source}:NAME"
            raise self._refusal(f"{call} raised {kind_and_line(error)}; {cure}") from error

    def _refusal(self, reason: str) -> ValueError:
        return ValueError(f"--data_path {self.source}: {reason}")

    def _part(self, method: str) -> Any:
        """Data of a method; None if the class does not have it.

        Raises ValueError if the method raises, or does not return a sequence.
        """
        if not hasattr(self.kind, method):
            return None
        inner = self._inner
        try:
            data = getattr(inner, method)()
        except Exception as error:  # any error of the class
            raise self._refusal(f"{method} raised {kind_and_line(error)}") from error
        if data is not None and not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            raise self._refusal(
                f"{method} gave {type(data).__name__}, which has neither length nor index; give a list or a "
                "map-style data set"
            )
        return data

    def _ask(self, method: str, row: dict[str, Any]) -> str | BadRow | None:
        """Text of a method, or the reason why it has none; None if the class lacks the method."""
        if not hasattr(self.kind, method):
            return None
        inner = self._inner
        try:
            text = getattr(inner, method)(row)
        except Exception as error:  # any error of the class
            return BadRow(f"{method} raised {kind_and_line(error)}")
        if text is None or isinstance(text, str):
            return text if text and text.strip() else EmptyRow(f"{method} gave {text!r}")
        return BadRow(f"{method} gave {type(text).__name__}, not text")


def _own_name(kind: type) -> str:
    """The name that a class gives itself with `dataset_name = "..."`, in its body or its constructor."""
    text = ""
    with contextlib.suppress(OSError, TypeError):  # no source code available
        text = inspect.getsource(kind)
    own = _OWN_NAME.search(text)
    return own[1] if own else ""


def _arguments(kind: type, values: dict[str, Any], given: dict[str, Any]) -> tuple[list, dict[str, Any]]:
    """Arguments of a constructor: by name if it has DeepSpeed-Chat's names, else the first four or all five
    by position, or none; always with those `given` by name.

    Raises TypeError if it needs something else.
    """
    signature = inspect.signature(kind)
    ordered = list(values.values())
    named = {name: values[name] for name in signature.parameters if name in values}
    ways = [([], named)] if named else []
    for args, names in (*ways, (ordered[:4], {}), (ordered, {}), ([], {})):
        with contextlib.suppress(TypeError):
            signature.bind(*args, **names | given)
            return args, names | given
    if strange := [name for name in given if name not in signature.parameters]:
        raise TypeError(f"its constructor takes no {', '.join(strange)}")
    unknown = ", ".join(name for name in signature.parameters if name not in values)
    raise TypeError(f"its constructor needs {unknown}, besides {', '.join(values)}; give it a default")


def _reply(prompt: str, whole: str | BadRow | None, reply: str | BadRow | None) -> str | BadRow | None:
    """The text after the prompt in `whole`, else `reply`; else the reason why there is no text."""
    if isinstance(whole, str):
        head = prompt.strip()
        text = whole.strip()
        if text.startswith(head):
            rest = text[len(head) :]
            rest = rest if head.endswith("Assistant:") else LEADING_CUE.sub("", rest)
            if rest.strip():
                return rest
            whole = EmptyRow("there is no text after the prompt")
        elif not isinstance(reply, str):
            return BadRow("the text does not begin with the prompt")
    return reply if isinstance(reply, str) or whole is None else whole
