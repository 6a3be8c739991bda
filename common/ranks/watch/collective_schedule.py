"""The collectives that ranks begin, recorded and compared: a debug mode.

Each process group has a record of its own, and the members of a group are compared: ranks of different
groups do different things by right, and calls of two groups may come in either order.
"""

import functools
import hashlib
import inspect
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

NAMES = (
    *("all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "barrier", "monitored_barrier"),
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_single", "gather"),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "scatter"),
    *("_all_gather_base", "_reduce_scatter_base", "all_to_all", "all_to_all_single"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
)
UNEVEN = ("all_to_all", "all_to_all_single", "scatter", "gather")  # sizes may differ from rank to rank
KEPT_CALLS = 1000
# Their frames pass a call on: where it comes from is further up.
PASSING_ON = ("torch.", "deepspeed.", "contextlib", "functools", __name__, "common.ranks.distributed")


class CollectiveRecorder:
    """Stands around the collectives of torch.distributed, through which DeepSpeed goes too.

    `tell(group, what, where)` hears of each call before it is made; `group` names its ranks, `what` must be
    the same on all of them, `where` in the program it comes from need not.
    """

    def __init__(self) -> None:
        self.tell: Callable[[str, str, str], None] = lambda group, what, where: None
        self._keys: dict[Any, str] = {}
        self._plain: dict[tuple[Any, str], Callable] = {}
        self._inside = threading.local()

    def install(self) -> None:
        """Record from now on. To be called before DeepSpeed starts, which keeps some of the functions."""
        for name in NAMES:
            plain = getattr(distributed_c10d, name, None)
            if plain is not None:
                recorded = self._recorded(name, plain)
                for module in (dist, distributed_c10d):
                    if hasattr(module, name):
                        self._plain[module, name] = plain
                        setattr(module, name, recorded)

    def uninstall(self) -> None:
        """Record no more."""
        for (module, name), plain in self._plain.items():
            setattr(module, name, plain)
        self._plain.clear()

    def _recorded(self, name: str, plain: Callable) -> Callable:
        signature = inspect.signature(plain)

        @functools.wraps(plain)
        def recorded(*args: Any, **more: Any) -> Any:
            if getattr(self._inside, "is_so", False):  # all_gather_object is made of other collectives
                return plain(*args, **more)
            self._inside.is_so = True
            try:
                bound = signature.bind(*args, **more)
                bound.apply_defaults()
                self._record(name, bound.arguments)
                return plain(*args, **more)
            finally:
                self._inside.is_so = False

        return recorded

    def _record(self, name: str, arguments: dict[str, Any]) -> None:
        group = arguments.get("group") or dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):
            return  # this rank is no member: the call does nothing
        if group not in self._keys:
            ranks = ",".join(map(str, dist.get_process_group_ranks(group)))
            self._keys[group] = f"{ranks}@{group.group_name}"
        self.tell(self._keys[group], describe(name, arguments), _caller())


def describe(name: str, arguments: dict[str, Any]) -> str:
    """Return what a call must have in common with those of the other ranks, in words."""
    words = [name]
    for key in ("op", "src", "dst", "group_src", "group_dst"):
        if arguments.get(key) is not None:
            words.append(f"{key}={getattr(arguments[key], 'name', arguments[key])}")
    for tensor in arguments.values():
        if isinstance(tensor, torch.Tensor):
            shape = "" if name in UNEVEN else str(list(tensor.shape))
            words.append(str(tensor.dtype).removeprefix("torch.") + shape)
    return " ".join(words)


def _caller() -> str:
    frame = sys._getframe(2)
    while frame.f_back and f"{frame.f_globals.get('__name__', '')}.".startswith(PASSING_ON):
        frame = frame.f_back
    return f"in {frame.f_globals.get('__name__')}:{frame.f_lineno}"


class GroupRecord:
    """What a rank has begun in a group: a hash of all of it, and the last calls in words."""

    def __init__(self) -> None:
        self.count, self.hash = 0, ""
        self.calls: deque[tuple[str, str]] = deque(maxlen=KEPT_CALLS)  # (hash so far, words)

    def add(self, what: str, where: str) -> None:
        """Add a call."""
        self.hash = hashlib.blake2b((self.hash + what).encode(), digest_size=8).hexdigest()
        self.count += 1
        self.calls.append((self.hash, f"{what} {where}"))

    def call(self, index: int) -> tuple[str, str] | None:
        """Return a call by its number from 0, None for one that is not kept or not made."""
        place = index - (self.count - len(self.calls))
        return self.calls[place] if 0 <= place < len(self.calls) else None


class Schedules:
    """What ranks have begun, as far as it was heard here."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.records: dict[int, dict[str, GroupRecord]] = {}  # rank -> group

    def add(self, rank: int, group: str, what: str, where: str) -> None:
        """Take a rank's next call."""
        self.records.setdefault(rank, {}).setdefault(group, GroupRecord()).add(what, where)

    def are_equal(self) -> bool:
        """Return whether the members of every group that were heard have begun the same."""
        return all(
            len({(record.count, record.hash) for record in self._members(group).values()}) == 1
            for group in self._groups()
        )

    def first_difference(self, waiting: set[int]) -> str | None:
        """Return in words the first call in which members of a group differ, None where there is none.

        A rank of `waiting` begins no more until the others have come as far: a call that it lacks is a
        difference. For any other rank it may be yet to come.
        """
        for group in sorted(self._groups(), key=lambda group: (-len(_ranks(group)), group)):
            found = _difference(self._members(group), waiting)
            if found:
                is_all = len(_ranks(group)) == self.world_size
                whose = "all ranks" if is_all else f"ranks {group.split('@')[0]}"
                return f"{found[0]} of {whose} differs: {_by_ranks(found[1])}"
        return None

    def _groups(self) -> set[str]:
        return {group for of_rank in self.records.values() for group in of_rank}

    def _members(self, group: str) -> dict[int, GroupRecord]:
        return {
            rank: self.records[rank].get(group, GroupRecord())
            for rank in _ranks(group)
            if rank in self.records
        }


def _difference(records: dict[int, GroupRecord], waiting: set[int]) -> tuple[str, dict[int, str]] | None:
    """Return (which call, what it was by rank), None where there is no difference."""
    first = max(record.count - len(record.calls) for record in records.values())
    for index in range(first, max(record.count for record in records.values())):
        calls = {rank: record.call(index) for rank, record in records.items()}
        words = {rank: call[1] for rank, call in calls.items() if call is not None}
        which = f"collective {index + 1}"
        if len({call[0] for call in calls.values() if call is not None}) > 1:
            # Of those before the first that is kept there are only the hashes.
            return which + (" or one before it" if index == first > 0 else ""), words
        lacking = {rank: "no such call" for rank, call in calls.items() if call is None and rank in waiting}
        if lacking:
            return which, words | lacking
    return None


def _ranks(group: str) -> list[int]:
    return [int(rank) for rank in group.split("@")[0].split(",")]


def _by_ranks(words: dict[int, str]) -> str:
    """Return what ranks have done, those together that have done the same."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in sorted(words.items()):
        ranks_of.setdefault(text, []).append(rank)
    return "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {text}"
        for text, ranks in ranks_of.items()
    )
