"""Streams of a pretended GPU, and who waits for whom; graphs: see `pretended_gpu`."""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from pretended_tensors import now, tensors_in
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only


class Stream:
    """A stream, whose work is done at once; `known` counts the writes of each stream that come before."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.gpu, self.device = now(), now().device
        self.known: Counter[Any] = Counter()

    def wait_stream(self, stream: Any) -> None:
        """Come after what the stream, or the stream of an event, was given until then."""
        self.known |= stream.known

    wait_event = wait_stream

    def record_event(self, event: Any = None) -> Any:
        """Return what others can wait for."""
        event = event or StreamEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The host waits."""
        self.gpu.wait(f"{type(self).__name__}.synchronize", self)

    def query(self) -> bool:
        """All is done."""
        self.gpu.settle()
        return True

    def is_capturing(self) -> bool:
        """Whether operators are recorded."""
        return self.gpu.capture is not None


class StreamEvent(Stream):
    """An event of a stream: it has happened."""

    def record(self, stream: Any = None) -> None:
        """Stand behind what the stream was given until now."""
        self.known = Counter((stream or self.gpu.stream).known)

    def wait(self, stream: Any = None) -> None:
        """Have a stream come after it."""
        (stream or self.gpu.stream).wait_event(self)

    def elapsed_time(self, other: Any) -> float:
        """No time is kept."""
        return 0.0


@contextlib.contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    """Give work to the stream in the block."""
    gpu = now()
    before, gpu.thread.stream = gpu.thread.stream, stream or gpu.thread.stream
    try:
        yield
    finally:
        gpu.thread.stream = before


class Graph:
    """A captured graph: a tape of operations, with the Python numbers of its capture.

    It keeps alive what was made in the capture, and nothing else that it reads.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        self.gpu, self.stream = now(), None
        self.reset()

    def record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Take an operation on the tape."""
        with self.gpu.quiet():
            args, kwargs = tree_map_only(Tensor, self._take, (args, kwargs))
        is_new = not (hasattr(func, "_schema") and func._schema.is_mutable)
        self.tape.append((func, args, kwargs, list(tensors_in(out)) if is_new else []))

    def own(self, made: Any) -> None:
        """Keep what is made in the capture: its memory is the graph's."""
        tensors = [tensor for tensor in tree_leaves(made) if isinstance(tensor, Tensor)]
        self._kept += tensors
        self._made |= set(map(_address, tensors))

    def _take(self, tensor: Tensor) -> Tensor:
        gpu = self.gpu
        if not gpu.has(tensor) and not gpu.has(tensor, "pinned"):
            return tensor.clone()  # a number
        if _address(tensor) not in self._made:
            self._read[_address(tensor)] += 1
        return tensor.detach()

    def keep(self, written: Iterable[Any]) -> None:
        """Keep what an operation is about to write: nothing is done while it is captured."""
        for tensor in (x for x in tree_leaves(list(written)) if isinstance(x, Tensor)):
            storage = tensor.untyped_storage()
            self._before.setdefault(storage._cdata, (storage, storage.clone()))

    def end(self) -> None:
        """Put back what the operations of the capture have written."""
        with self.gpu.quiet():
            for storage, before in self._before.values():
                storage.copy_(before)
        self._before = {}

    def replay(self) -> None:
        """Run the tape: results go where they went when it was captured."""
        gpu = self.gpu
        assert self.tape, "an empty graph, or one that was reset, is replayed"
        for address, num_own in self._read.items():  # Python has one, too
            if torch._C._storage_Use_Count(address) <= num_own + 1:
                raise RuntimeError("CUDA error: an illegal memory access: the graph reads what was freed")
        gpu.launches["a graph"] += 1
        with gpu.quiet(), torch.no_grad():
            for func, args, kwargs, out in self.tape:
                new = func(*args, **kwargs)
                if getattr(func, "namespace", "") == "c10d":
                    new[-1].wait()
                    continue
                for old, value in zip(out, tensors_in(new) if out else (), strict=True):
                    if isinstance(old, Tensor):
                        old.copy_(value)

    def has_collectives(self) -> bool:
        """Whether some were captured."""
        return any(getattr(func, "namespace", "") == "c10d" for func, *_ in self.tape)

    def reset(self) -> None:
        """Forget the tape."""
        self.tape: list[tuple[Any, Any, Any, Any]] = []
        self._kept: list[Tensor] = []
        self._made: set[int] = set()  # their storages
        self._read: Counter[int] = Counter()  # other storages, and how many tensors of the tape have them
        self._before: dict[int, tuple[Any, Any]] = {}  # storages, what was in them
        self.gpu.graphs.discard(self)

    def pool(self) -> Any:
        """A name for its memory."""
        return (0, id(self))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
