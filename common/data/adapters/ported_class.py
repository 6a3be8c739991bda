"""A data set class written for DeepSpeed-Chat, or any class with its methods, read as an Adapter.

Its file stays as it is: nothing of ours is imported there, and it need not derive from anything of ours.
"""

import ast
import contextlib
import dis
import hashlib
import inspect
import io
import os
import re
import shutil
import tempfile
import textwrap
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from os.path import commonprefix
from pathlib import Path
from types import CodeType
from typing import Any

from common.data.adapters.base import Adapter, Parts, digest_code
from common.data.adapters.local_files import AnyForm, LocalFiles
from common.data.adapters.row_parts import messages_from_prompt
from common.data.example import BadRow, EmptyRow, Example
from common.data.raw_rows import FrozenRows, RawRows
from common.ranks.failures import kind_and_line

PROMPT_METHODS = ("get_prompt", "get_prompt_and_chosen")  # one of them is enough
ROW_METHODS = (*PROMPT_METHODS, "get_chosen", "get_rejected", "get_prompt_and_rejected")
SIDES = ("chosen", "rejected")
SEED = 1234  # the default of both programs; it must be the same in all steps, or their shares would overlap
SAMPLE = "(sample)"  # the column of a row that is no dict in the class's own data

_CUE_ON_ITS_LINE = re.compile(r"(?:\A|\n\s*)Assistant:")
_CUE = re.compile(r"(?:\A|\s)Assistant:")
_LEADING_CUE = re.compile(r"\A\s*Assistant:")


def row_methods_of(kind: type) -> frozenset[str]:
    """The names of ROW_METHODS that a class gives, other than by a body that does nothing."""
    return frozenset(name for name in ROW_METHODS if _is_given(kind, name))


class PortedClass(Adapter):
    """Rows by `get_train_data` and `get_eval_data`, their meaning by the five methods, each optional but one.

    DeepSpeed-Chat trains on `get_prompt_and_chosen` and `get_prompt_and_rejected`, so these come first: a
    reply is what they have behind the prompt. Where they give nothing, `get_chosen` and `get_rejected` do. A
    method that gives None leaves the row out of the steps that need it, as there; one that raises makes it a
    bad row there. What the methods print is dropped, for they say the same of every row.
    """

    def __init__(self, kind: type, source: str, dataset_name: str = "") -> None:
        """`dataset_name` is what the constructor is given; empty: the name that the class has for itself.

        Raises:
            ValueError: too few methods, named.
        """
        super().__init__(source)
        self._kind, self._given = kind, row_methods_of(kind)
        self._name = dataset_name or _own_name(kind)
        if not self._given.intersection(PROMPT_METHODS):
            missing = [name for name in ROW_METHODS if name not in self._given]
            raise ValueError(
                f"--data_path {source}: {kind.__name__} has no {', '.join(missing)}; it needs "
                f"{' or '.join(PROMPT_METHODS)}, as DeepSpeed-Chat's classes have, or must derive from "
                "common.data.registry.Adapter"
            )

    def load(self) -> Parts:
        """See Adapter.

        Raises:
            ValueError: the class cannot be made, or has no rows.
        """
        train = self._part("get_train_data", "train")
        if train is None:
            if not self._name:
                raise ValueError(
                    f"--data_path {self.source}: {self._kind.__name__} has no rows: neither get_train_data "
                    "nor raw_datasets['train'] gives any; add one, or name a file, folder or hub data set by "
                    f"--data_path {self.source}:NAME"
                )
            reader = (LocalFiles if Path(self._name).exists() else AnyForm)(self._name)
            reader.max_rows = self.max_rows
            return reader.load()
        try:
            held_out = self._part("get_eval_data", None)
        except ValueError as error:
            held_out = None
            self._note(f"{error}; --eval_fraction is held out")
        if held_out is train:
            held_out = None
            self._note("get_eval_data gives the training rows; --eval_fraction is held out")
        if len(train) == 0:
            raise ValueError(f"--data_path {self.source}: get_train_data is empty; give at least one row")
        is_empty = held_out is None or len(held_out) == 0
        return Parts(_rows(train, self.source), None if is_empty else _rows(held_out, f"{self.source}/eval"))

    def code_digest(self) -> str:
        """See Adapter; the user's file counts, and the name that it is given."""
        parts = (super().code_digest(), digest_code(self._kind), self._name)
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()

    def to_examples(self, row: dict[str, Any]) -> list[Example]:
        """See Adapter."""
        sample = row[SAMPLE] if row.keys() == {SAMPLE} else row
        with contextlib.redirect_stdout(io.StringIO()):
            prompt, *wholes = (
                self._ask(name, sample) for name in ("get_prompt", *(f"get_prompt_and_{s}" for s in SIDES))
            )
            replies = [self._ask(f"get_{side}", sample) for side in SIDES]
        if isinstance(prompt, BadRow) and not isinstance(prompt, EmptyRow):
            raise prompt
        if not isinstance(prompt, str):
            return [_from_wholes(prompt, *wholes)]
        chosen, rejected = (_reply(prompt, *texts) for texts in zip(wholes, replies, strict=True))
        return [_example(prompt, chosen, rejected)]

    @cached_property
    def _inner(self) -> Any:
        """An instance of the class.

        Raises:
            ValueError: its constructor takes something unknown, or raised.
        """
        # Some classes write their shares as files: each process has a folder, for as long as this lives.
        folder = tempfile.mkdtemp(prefix="triptych-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        values = {
            "output_path": folder,
            "seed": SEED,
            "local_rank": 0,
            "dataset_name": self._name or self.source,
            "chat_path": os.getcwd(),  # of its local/jsonfile: the folder that holds data/
        }
        call = f"{self._kind.__name__}({', '.join(f'{k}={v!r}' for k, v in values.items())})"
        try:
            args, named = _arguments(self._kind, values, has_name=bool(self._name))
            return self._kind(*args, **named)
        except Exception as error:  # the network's, the disk's, or the class's own
            cure = "check the network and the class" if self._name else f"name its data: {self.source}:NAME"
            raise ValueError(f"--data_path {self.source}: {call} {_raised(error)}; {cure}") from error

    def _part(self, method: str, split: str | None) -> Any:
        """What `method` gives, or the split of `raw_datasets` where the class does not have it, or None.

        Raises:
            ValueError: the method raised, or gave no sequence.
        """
        data = None
        if _is_given(self._kind, method):
            inner = self._inner
            try:
                data = getattr(inner, method)()
            except Exception as error:  # the class's own
                raise ValueError(f"--data_path {self.source}: {method} {_raised(error)}") from error
        if data is None and split is not None:
            raw = getattr(self._inner, "raw_datasets", None)
            data = raw.get(split) if isinstance(raw, Mapping) else raw
        if data is not None and not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            raise ValueError(
                f"--data_path {self.source}: {method} gave {type(data).__name__}, which has no length and no "
                "index; give a list or a map-style data set"
            )
        return data

    def _ask(self, method: str, sample: Any) -> str | BadRow | None:
        """The text that a method gives, or why there is none; None when the class does not have it."""
        if method not in self._given:
            return None
        inner = self._inner
        try:
            text = getattr(inner, method)(sample)
        except Exception as error:  # the class's own
            return BadRow(f"{method} {_raised(error)}")
        if text is None or isinstance(text, str):
            return text if text and text.strip() else EmptyRow(f"{method} gave {text!r}")
        return BadRow(f"{method} gave {type(text).__name__}, not text")

    def _note(self, text: str) -> None:
        self.notes = (*self.notes, text.removeprefix(f"--data_path {self.source}: "))


def _is_given(kind: type, name: str) -> bool:
    """Whether a class has the method, and it is no stub such as PromptRawDataset's, which only return."""
    method = inspect.getattr_static(kind, name, None)
    code = getattr(inspect.unwrap(getattr(method, "__func__", method)), "__code__", None)
    return method is not None and (code is None or not _does_nothing(code))


def _does_nothing(code: CodeType) -> bool:
    steps = [(step.opname, step.argval) for step in dis.get_instructions(code) if step.opname != "RESUME"]
    return steps in ([("LOAD_CONST", None), ("RETURN_VALUE", None)], [("RETURN_CONST", None)])


def _own_name(kind: type) -> str:
    """The name that a class has for itself: an attribute, or `self.dataset_name = "..."` as it is made."""
    name = getattr(kind, "dataset_name", None)
    if isinstance(name, str):
        return name
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind.__init__)))
    except (OSError, TypeError, SyntaxError):
        return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            names = [target.attr for target in node.targets if isinstance(target, ast.Attribute)]
            if "dataset_name" in names and isinstance(node.value.value, str):
                return node.value.value
    return ""


def _arguments(kind: type, values: dict[str, Any], *, has_name: bool) -> tuple[list, dict[str, Any]]:
    """What a constructor is called with: by name where it uses DeepSpeed-Chat's, else by their order.

    Raises:
        TypeError: it needs something else.
    """
    parameters = [] if kind.__init__ is object.__init__ else list(inspect.signature(kind).parameters.values())
    kinds = {parameter.kind for parameter in parameters}
    plain = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    needed = [p.name for p in plain if p.default is p.empty]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return list(values.values())[:4], {}
    if set(needed) <= values.keys():
        has_default = {p.name for p in plain} - set(needed)
        useful = has_default & values.keys() - (set() if has_name else {"dataset_name"})
        return [], {name: values[name] for name in (*needed, *useful)}
    if len(needed) in (4, 5):
        return list(values.values())[: len(needed)], {}
    unknown = ", ".join(name for name in needed if name not in values)
    raise TypeError(f"its constructor needs {unknown}, besides {', '.join(values)}; give it a default")


def _raised(error: Exception) -> str:
    return f"raised {kind_and_line(error)}"


class _Samples(Sequence):
    """The class's own rows, in its own format, as dicts."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self._data[index]
        return dict(sample) if isinstance(sample, Mapping) else {SAMPLE: sample}


def _rows(data: Any, origin: str) -> RawRows:
    """Rows of a list, a `datasets` split, or torch's Subset of one; those two have fingerprints."""
    split, indices = getattr(data, "dataset", data), getattr(data, "indices", None)
    fingerprint = getattr(split, "_fingerprint", None)
    if not isinstance(fingerprint, str):
        return RawRows(_Samples(data), origin)
    if indices is not None:
        fingerprint += hashlib.sha256(repr([int(index) for index in indices]).encode()).hexdigest()
    return FrozenRows(_Samples(data), origin, fingerprint)


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
            end = _prompt_end(whole)
            return whole[end:] if end else BadRow("the text does not begin with the prompt")
    if isinstance(reply, str) or whole is None:
        return reply
    return whole


def _from_wholes(
    prompt: BadRow | None, chosen: str | BadRow | None, rejected: str | BadRow | None
) -> Example:
    """An Example of whole dialogues: the prompt ends at the last `Assistant:` that they share."""
    if not isinstance(chosen, str):
        raise chosen or prompt or BadRow("there is no prompt")
    end = _prompt_end(chosen if not isinstance(rejected, str) else commonprefix([chosen, rejected]))
    if end is not None:
        other = rejected[end:] if isinstance(rejected, str) else rejected
        return _example(chosen[:end], chosen[end:], other)
    if isinstance(rejected, str):
        raise BadRow("chosen and rejected share no 'Assistant:' at which a prompt could end")
    return Example(text=chosen)  # step 1 learns it as a whole, as DeepSpeed-Chat does


def _prompt_end(text: str) -> int | None:
    """Where the last `Assistant:` ends, one at the start of a line before any other; None without one."""
    marks = list(_CUE_ON_ITS_LINE.finditer(text)) or list(_CUE.finditer(text))
    return marks[-1].end() if marks else None


def _example(prompt: str, chosen: str | BadRow | None, rejected: str | BadRow | None) -> Example:
    absences = [part for part in (chosen, rejected) if isinstance(part, BadRow)]
    return Example(
        prompt=messages_from_prompt(prompt),
        chosen=chosen if isinstance(chosen, str) else None,
        rejected=rejected if isinstance(rejected, str) else None,
        absence=absences[0] if absences else None,
    )
