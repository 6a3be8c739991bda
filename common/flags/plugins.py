"""Python modules of the user: importing them, and functions that they register under a name.

Does not import torch.
"""

import difflib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, TypeVar

from common.flags.problems import Problems

T = TypeVar("T")


def import_plugins(names: Sequence[str], problems: Problems) -> None:
    """Import the modules in --plugins, in order; add a problem for each that fails.

    Every rank must call this, before flags that name what the modules register are checked.
    """
    for name in names:
        try:
            import_own_module(name)
        except ImportError as error:
            problems.add(f"--plugins {name}: {error}")


def import_own_module(name: str) -> ModuleType:
    """Import a module of the user; the working folder is searched last.

    Raises ImportError, with reason, location and cure, whatever the module itself raises.
    """
    if name.endswith(".py") or "/" in name:
        module = name.removesuffix(".py").strip("./").replace("/", ".")
        raise ImportError(f"name a module without path and .py: {module}")
    here = os.getcwd()
    if here not in sys.path:  # last: a file named json.py there must not hide a library
        sys.path.append(here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise ImportError(
                f"there is no module {error.name}; start from the folder that holds it (this is {here}) or "
                "add that folder to PYTHONPATH"
            ) from error
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
        place = ""
        if isinstance(error, SyntaxError):
            place = f" ({error.filename}:{error.lineno})"
        elif len(frames) > 1:  # frame 0 is this function
            place = f" ({frames[-1].filename}:{frames[-1].lineno})"
        kind = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
        raise ImportError(f"importing it raised {kind}{place}; fix it") from error


def get_from(module: ModuleType, name: str) -> object:
    """The object called `name` in a module. Raises ImportError, with the nearest name, if there is none."""
    if hasattr(module, name):
        return getattr(module, name)
    raise ImportError(f"module {module.__name__} has no {name}{did_you_mean(name, vars(module))}")


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The nearest of some names, for the end of a message; empty if none is near."""
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]}?" if near else ""


class FunctionsByName(dict[str, T]):
    """Functions that a flag can name: registered ones with their traits, or MODULE:FUNCTION.

    A value is an instance of the class `kind`, whose first two fields are the name and the function.
    `parameters` are what the functions are called with; empty: not checked here.
    """

    def __init__(self, flag: str, kind: Callable[..., T], parameters: Sequence[str] = ()) -> None:
        super().__init__()
        self.flag, self.kind = flag, kind
        self.parameters = parameters

    def register(self, name: str, **traits: object) -> Callable[[T], T]:
        """Decorator that registers a function; `traits` are the other fields of its entry.

        Raises ValueError if another function has the name already.
        """

        def register(function: Any) -> Any:
            known = self.get(name)  # the same function, if its module is imported again
            if known and origin_of(self.function_of(known)) != origin_of(function):
                raise ValueError(f"--{self.flag} {name!r} is registered twice")
            self[name] = self.kind(name, function, **traits)
            return function

        return register

    def function_of(self, entry: T) -> Callable[..., Any]:
        """The function of an entry."""
        return list(vars(entry).values())[1]

    def find(self, name: str) -> T:
        """The entry of a registered name, or of MODULE:FUNCTION, which is imported.

        A function that its module registers keeps its traits; a plain one gets the defaults of the class.
        Raises ValueError for anything else, with the nearest name or the reason why the import failed, and
        for a function that cannot be called with `parameters`.
        """
        entry = self.get(name) or self._import(name)
        form = ", ".join(self.parameters)
        try:
            if form:
                inspect.signature(self.function_of(entry)).bind(*self.parameters)
        except TypeError as error:
            raise ValueError(f"--{self.flag} {name}: it is called with ({form}): {error}") from error
        return entry

    def _import(self, name: str) -> T:
        module_name, colon, function_name = name.partition(":")
        if not colon:
            known = (
                f"(known: {', '.join(sorted(self))}; or MODULE:FUNCTION; or what --plugins MODULE registers)"
            )
            raise ValueError(f"--{self.flag} {name} is unknown{did_you_mean(name, self)} {known}")
        try:
            function = get_from(import_own_module(module_name), function_name)
        except ImportError as error:
            raise ValueError(f"--{self.flag} {name}: {error}") from error
        if not callable(function):
            raise ValueError(f"--{self.flag} {name}: {function_name} is not a function")
        registered = (entry for entry in self.values() if self.function_of(entry) is function)
        return next(registered, None) or self.kind(name, function)


def origin_of(thing: Any) -> tuple[str, str]:
    """Name and file of a class or function; the same when a module is imported again."""
    thing = inspect.unwrap(thing)
    module = sys.modules.get(thing.__module__)
    return thing.__qualname__, getattr(module, "__file__", None) or thing.__module__
