"""Modules of the user's own, which register data sets, rewards, algorithms: found by name, imported once."""

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType

from common.flags.args import Problems
from common.ranks.failures import kind_and_line


def import_plugins(names: Sequence[str], problems: Problems) -> None:
    """Import what --plugins names, in order; each that cannot be is a problem with its cure.

    Every rank must call this, before the flags that name what the modules register are checked.
    """
    for name in names:
        try:
            import_own_module(name)
        except ImportError as error:
            problems.add(f"--plugins {name}: {error}")


def import_own_module(name: str) -> ModuleType:
    """The module; the working folder is searched after everything else on the import path.

    Raises:
        ImportError: it cannot be imported, whatever it raised itself; the text says why, where, and the cure.
    """
    if name.endswith(".py") or "/" in name:
        module = name.removesuffix(".py").strip("./").replace("/", ".")
        raise ImportError(f"a module is named without path and .py; use {module}")
    here = os.getcwd()
    if here not in sys.path:  # at the end: a file called json.py there must not hide a library
        sys.path.append(here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            raise ImportError(
                f"there is no module {error.name}; start from the folder that holds it (this is {here}) or "
                "add that folder to PYTHONPATH"
            ) from error
        raise ImportError(_what_it_raised(error)) from error
    except (Exception, SystemExit) as error:  # it is the user's program: it raises what it likes
        raise ImportError(_what_it_raised(error)) from error


def get_from(module: ModuleType, name: str) -> object:
    """The thing called `name` in a module.

    Raises:
        ImportError: there is none; the nearest name is offered.
    """
    if hasattr(module, name):
        return getattr(module, name)
    near = difflib.get_close_matches(name, vars(module), n=1)
    raise ImportError(
        f"module {module.__name__} has no {name}" + (f"; did you mean {near[0]}?" if near else "")
    )


def _what_it_raised(error: BaseException) -> str:
    """One line: type, text and place of what a module raised while it was imported."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if len(frames) > 1 else ""  # frame 0 is ours
    told = kind_and_line(error)
    if isinstance(error, SyntaxError):
        place, told = f"{error.filename}:{error.lineno}", f"{type(error).__name__}: {error.msg}"
    return f"importing it raised {told}" + (f" ({place})" if place else "") + "; mend it"
