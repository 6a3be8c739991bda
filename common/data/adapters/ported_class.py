"""A data set class written for DeepSpeed-Chat, or any class with its methods, read as an Adapter.

Its file stays as it is: nothing of ours is imported there, and it need not derive from anything of ours.
"""

import contextlib
import hashlib
import inspect
import io
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from common.data.adapters.base import Adapter, Parts, digest_code
from common.data.adapters.local_files import AnyForm, LocalFiles
from common.data.adapters.row_parts import messages_from_prompt
from common.data.example import BadRow, EmptyRow, Example
from common.data.raw_rows import RawRows
from common.ranks.failures import kind_and_line

SIDES = ("chosen", "rejected")
SEED = 1234  # the default of both programs; it must be the same in all steps, or their shares would overlap
SAMPLE = "(sample)"  # the column of a row that is no dict in the class's own data

_OWN_NAME = re.compile(r"""\bdataset_name\s*=\s*["']([^"']+)["']""")
_LEADING_CUE = re.compile(r"\A\s*Assistant:")


class PortedClass(Adapter):
    """Rows by `get_train_data` and `get_eval_data`, their meaning by the five methods.

    `get_prompt` must be there. DeepSpeed-Chat trains on `get_prompt_and_chosen` and
    `get_prompt_and_rejected`, so these come first: a reply is what they have behind the prompt. Where they
    give nothing, `get_chosen` and `get_rejected` do. A method that gives None leaves the row out of the steps
    that need it, as there; one that raises makes it a bad row there. What the methods print is dropped, for
    they say the same of every row.
    """

    def __init__(self, kind: type, source: str, dataset_name: str = "") -> None:
        """`dataset_name` is what the constructor is given; empty: the name that the class has for itself.

        Raises:
            ValueError: it has no get_prompt.
        """
        super().__init__(source)
        self._kind = kind
        self._name = dataset_name or _own_name(kind)
        if not hasattr(kind, "get_prompt"):
            raise self._refusal(
                f"{kind.__name__} needs get_prompt, as DeepSpeed-Chat's classes have, or must derive from "
                "common.data.registry.Adapter"
            )

    def load(self) -> Parts:
        """See Adapter.

        Raises:
            ValueError: the class cannot be made, or has no rows.
        """
        train = self._part("get_train_data")
        if train is None:
            raw = getattr(self._inner, "raw_datasets", None)
            train = raw.get("train") if isinstance(raw, Mapping) else raw
        if train is None:
            if not self._name:
                raise self._refusal(
                    f"{self._kind.__name__} has no rows: neither get_train_data nor raw_datasets['train'] "
                    "gives any; add one, or name a file, folder or hub data set by "
                    f"--data_path {self.source}:NAME"
                )
            reader = (LocalFiles if Path(self._name).exists() else AnyForm)(self._name)
            reader.max_rows = self.max_rows
            return reader.load()
        if len(train) == 0:
            raise self._refusal("get_train_data is empty; give at least one row")
        return Parts(RawRows(_Samples(train), self.source), self._held_out(train))

    def code_digest(self) -> str:
        """See Adapter; the user's file counts, and the name that it is given."""
        parts = (super().code_digest(), digest_code(self._kind), self._name)
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()

    def to_examples(self, row: dict[str, Any]) -> list[Example]:
        sample = row[SAMPLE] if row.keys() == {SAMPLE} else row
        with contextlib.redirect_stdout(io.StringIO()):
            prompt = self._ask("get_prompt", sample)
            wholes = [self._ask(f"get_prompt_and_{side}", sample) for side in SIDES]
            replies = [self._ask(f"get_{side}", sample) for side in SIDES]
        if isinstance(prompt, BadRow):
            raise prompt
        chosen, rejected = (_reply(prompt, *texts) for texts in zip(wholes, replies, strict=True))
        return [_example(prompt, chosen, rejected)]

    @cached_property
    def _inner(self) -> Any:
        """An instance of the class. Raises ValueError: its constructor takes something unknown, or raised."""
        # Some classes write their shares as files: each process has a folder, for as long as this lives.
        self._folder = tempfile.TemporaryDirectory(prefix="triptych-")
        values = {
            "output_path": self._folder.name,
            "seed": SEED,
            "local_rank": 0,
            "dataset_name": self._name or self.source,
            "chat_path": os.getcwd(),  # of its local/jsonfile: the folder that holds data/
        }
        call = f"{self._kind.__name__}({', '.join(f'{k}={v!r}' for k, v in values.items())})"
        try:
            args, named = _arguments(self._kind, values)
            return self._kind(*args, **named)
        except Exception as error:  # the network's, the disk's, or the class's own
            cure = "check the network and the class" if self._name else f"name its data: {self.source}:NAME"
            raise self._refusal(f"{call} raised {kind_and_line(error)}; {cure}") from error

    def _refusal(self, reason: str) -> ValueError:
        return ValueError(f"--data_path {self.source}: {reason}")

    def _held_out(self, train: Any) -> RawRows | None:
        """The class's own evaluation part, where it has one that is not the training rows."""
        try:
            found = self._part("get_eval_data")
        except ValueError as error:
            reason = str(error).removeprefix(f"--data_path {self.source}: ")
            self.notes = (*self.notes, f"{reason}; --eval_fraction is held out")
            return None
        if found is train:
            note = "get_eval_data gives the training rows; --eval_fraction is held out"
            self.notes = (*self.notes, note)
            return None
        return RawRows(_Samples(found), f"{self.source}/eval") if found is not None and len(found) else None

    def _part(self, method: str) -> Any:
        """What `method` gives; None where the class does not have it.

        Raises:
            ValueError: the method raised, or gave no sequence.
        """
        if not hasattr(self._kind, method):
            return None
        inner = self._inner
        try:
            data = getattr(inner, method)()
        except Exception as error:  # the class's own
            raise self._refusal(f"{method} raised {kind_and_line(error)}") from error
        if data is not None and not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            raise self._refusal(
                f"{method} gave {type(data).__name__}, which has no length and no index; give a list or a "
                "map-style data set"
            )
        return data

    def _ask(self, method: str, sample: Any) -> str | BadRow | None:
        """The text that a method gives, or why there is none; None when the class does not have it."""
        if not hasattr(self._kind, method):
            return None
        inner = self._inner
        try:
            text = getattr(inner, method)(sample)
        except Exception as error:  # the class's own
            return BadRow(f"{method} raised {kind_and_line(error)}")
        if text is None or isinstance(text, str):
            return text if text and text.strip() else EmptyRow(f"{method} gave {text!r}")
        return BadRow(f"{method} gave {type(text).__name__}, not text")


def _own_name(kind: type) -> str:
    """The name that a class has for itself: an attribute, or `self.dataset_name = "..."` as it is made."""
    name = getattr(kind, "dataset_name", None)
    if isinstance(name, str):
        return name
    try:
        found = _OWN_NAME.search(inspect.getsource(kind))
    except (OSError, TypeError):
        return ""
    return found[1] if found else ""


def _arguments(kind: type, values: dict[str, Any]) -> tuple[list, dict[str, Any]]:
    """What a constructor is called with: by name where it uses DeepSpeed-Chat's, else by their order.

    Raises:
        TypeError: it needs something else.
    """
    parameters = [] if kind.__init__ is object.__init__ else list(inspect.signature(kind).parameters.values())
    if any(parameter.kind == parameter.VAR_POSITIONAL for parameter in parameters):
        return list(values.values())[:4], {}
    plain = [p for p in parameters if p.kind != p.VAR_KEYWORD]
    needed = [p.name for p in plain if p.default is p.empty]
    if set(needed) <= values.keys():
        return [], {p.name: values[p.name] for p in plain if p.name in values}
    if len(needed) in (4, 5):
        return list(values.values())[: len(needed)], {}
    unknown = ", ".join(name for name in needed if name not in values)
    raise TypeError(f"its constructor needs {unknown}, besides {', '.join(values)}; give it a default")


class _Samples(Sequence):
    """The class's own rows, in its own format, as dicts."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self._data[index]
        return dict(sample) if isinstance(sample, Mapping) else {SAMPLE: sample}


def _reply(prompt: str, whole: str | BadRow | None, reply: str | BadRow | None) -> str | BadRow | None:
    """What stands behind the prompt in `whole`, else `reply`; else why there is none."""
    if isinstance(whole, str):
        head, text = prompt.strip(), whole.strip()
        if text.startswith(head):
            rest = text[len(head) :]
            rest = rest if head.endswith("Assistant:") else _LEADING_CUE.sub("", rest)
            if rest.strip():
                return rest
            whole = EmptyRow("there is nothing behind the prompt")
        elif not isinstance(reply, str):
            return BadRow("the text does not begin with the prompt")
    if isinstance(reply, str) or whole is None:
        return reply
    return whole


def _example(prompt: str, chosen: str | BadRow | None, rejected: str | BadRow | None) -> Example:
    absences = [part for part in (chosen, rejected) if isinstance(part, BadRow)]
    return Example(
        prompt=messages_from_prompt(prompt),
        chosen=chosen if isinstance(chosen, str) else None,
        rejected=rejected if isinstance(rejected, str) else None,
        absence=absences[0] if absences else None,
    )
