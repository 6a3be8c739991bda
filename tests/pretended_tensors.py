"""Tensors that say they live on a GPU, and what is seen of them: see `pretended_gpu`."""

import contextlib
import functools
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

ROOT = Path(__file__).resolve().parents[1]
HARNESS = {__file__, *(str(Path(__file__).with_name(f"pretended_{name}.py")) for name in ("gpu", "streams"))}


def _aten(names: str) -> set[str]:
    return {f"aten::{name}" for name in names.split()}


MIXES = _aten("copy_ _to_copy set_ _foreach_copy_")  # take tensors of both kinds
INDEXING = _aten("index index_put_ _index_put_impl_ index_put")
NO_SCALARS = _aten("cat stack _fused_adamw_ _fused_adam_")  # nor those of the CPU
# The host reads what the device has made: a number, or how large a result is.
WAITS = _aten("_local_scalar_dense bincount equal is_nonzero masked_select nonzero repeat_interleave")
WAITS |= _aten("unique_consecutive unique_dim _unique2")
NO_KERNEL = _aten("empty empty_like empty_strided new_empty new_empty_strided lift_fresh set_ _unsafe_view")
NO_KERNEL |= _aten("resize_ _local_scalar_dense")
NO_FIXED_ORDER = _aten("bincount histc median nll_loss2d_forward put_")
Tensor = torch.Tensor


def _count_integers(values: torch.Tensor, *how: Any) -> torch.Tensor:
    """Return torch.histc, which a CPU has for floats alone."""
    return torch.ops.aten.histc(values.float(), *how).to(values.dtype)


class Event(NamedTuple):
    """Something that the host or the bus feels, and the line of this project that asked for it."""

    name: str
    where: str
    num_bytes: int = 0


class Thread(threading.local):
    """What a thread does: a function of torch, in which C++ may make tensors; which stream gets its work."""

    is_inside = False
    stream: Any = None


class PretendedGpu:
    """What happened: `waits` of the host, `copies` to and from it, kernel `launches` by operation.

    `graphs` are those that hold something; `queries` what torch.cuda was asked without a device before
    `set_device`, with nothing there: a real one would open a context on GPU 0 for it. `allocated` and `peak`
    are bytes of live tensors; more than `total` is out of memory.
    """

    def __init__(self, total: int, capability: tuple[int, int]) -> None:
        self.device, self.total, self.allocated, self.peak = torch.device("cuda:0"), total, 0, 0
        self.capability = capability
        self.waits: list[Event] = []
        self.copies: list[Event] = []
        self.queries: list[Event] = []
        self.launches: Counter[str] = Counter()
        self.graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self.capture: Any = None  # what is captured now
        self.host_groups: set[str] = set()  # names of process groups that are gloo's by their maker's wish
        self.has_device = False  # set_device was called
        self.waits_raise = False  # torch.cuda.set_sync_debug_mode("error")
        self._waited_for: tuple[int, int] | None = (0, 0)  # kernels and copies
        self.thread = Thread()
        self._marks: dict[int, str] = {}  # a storage's address -> device, pinned, or neutral: made by C++
        self._unwritten: set[int] = set()  # storages of the host that the device is still writing
        self.default_stream: Any = None
        self._writers: dict[int, tuple[Any, int]] = {}  # of a storage: a stream, and the number of its write
        self._known: Counter[Any] = Counter()  # writes of each stream that the host has waited for

    def clear(self) -> None:
        """Forget what happened."""
        was_idle = self._is_idle()
        for record in (self.waits, self.copies, self.queries, self.launches):
            record.clear()
        self._waited_for = (0, 0) if was_idle else None

    def _is_idle(self) -> bool:
        return self._waited_for == (self.launches.total(), len(self.copies))

    def mark(self, tensor: Any, mark: str = "device") -> Any:
        """Return the tensor, whose storage now carries the mark; one that has a mark keeps it."""
        if isinstance(tensor, Tensor) and _has_storage(tensor):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._marks:
                num_bytes = storage.nbytes() if mark == "device" else 0
                if self.allocated + num_bytes > self.total:
                    raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {num_bytes} bytes")
                self.allocated += num_bytes
                self.peak = max(self.peak, self.allocated)
                self._marks[storage._cdata] = mark
                if mark == "device":
                    self._note_write(tensor)
                weakref.finalize(storage, self._forget, storage._cdata, num_bytes)
        return tensor

    def _forget(self, address: int, num_bytes: int) -> None:
        del self._marks[address]
        self._unwritten.discard(address)
        self._writers.pop(address, None)
        self.allocated -= num_bytes

    def has(self, tensor: Any, mark: str = "device") -> bool:
        """Whether a tensor's storage carries the mark."""
        if not isinstance(tensor, Tensor) or not _has_storage(tensor):
            return False
        return self._marks.get(tensor.untyped_storage()._cdata) == mark

    @property
    def stream(self) -> Any:
        """The stream that gets this thread's work."""
        return self.thread.stream or self.default_stream

    def _note_write(self, tensor: Tensor) -> None:
        stream = self.stream
        stream.known[stream] += 1
        self._writers[tensor.untyped_storage()._cdata] = stream, stream.known[stream]

    def check_order(self, tensor: Tensor) -> None:
        """Raise where this thread's stream touches what another one may not have written yet."""
        address = tensor.untyped_storage()._cdata if _has_storage(tensor) else None
        writer, number = self._writers.get(address, (self.stream, 0))
        if writer is not self.stream and max(self.stream.known[writer], self._known[writer]) < number:
            raise RuntimeError(f"what another stream may not have written yet is used ({caller()})")

    def wait(self, name: str, stream: Any = None, *, for_all: bool = False) -> None:
        """Take note that the host waits for a stream, by default the one that gets its work; who synchronizes
        with an idle device does not.
        """
        if self.capture:
            raise RuntimeError(f"{name}: operation not permitted when stream is capturing")
        if self.waits_raise:
            raise RuntimeError(f"called a synchronizing CUDA operation: {name}")
        self.settle()
        if not (name.endswith("synchronize") and self._is_idle()):
            self.waits.append(Event(name, caller()))
        self._waited_for = (self.launches.total(), len(self.copies))
        self._known |= (stream or self.stream).known
        if for_all:
            self._writers.clear()

    def settle(self) -> None:
        """Let what the device writes to the host be there."""
        self._unwritten.clear()

    def check_written(self, tensor: Tensor) -> None:
        """Raise where the host touches what the device is still writing."""
        if self._unwritten and _has_storage(tensor):
            if tensor.untyped_storage()._cdata in self._unwritten:
                raise RuntimeError(f"what the device may not have written yet is read ({caller()})")

    def copy(self, source: Tensor, target: Tensor, *, non_blocking: bool = False) -> None:
        """Take note of a copy between host and device; the host waits unless told not to, and pinned."""
        to_device = not self.has(source)
        is_pinned = self.has(source if to_device else target, "pinned")
        if self.capture and not (to_device and is_pinned):
            raise RuntimeError(
                "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is "
                "pinned"
            )
        name = "copy to the device" if to_device else "copy to the host"
        self.copies.append(Event(name, caller(), source.numel() * source.element_size()))
        if to_device and self.has(target):
            self.check_order(target)
            self._note_write(target)
        if not (non_blocking and is_pinned):
            self.wait(name)
        elif not to_device:
            self._unwritten.add(target.untyped_storage()._cdata)

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Let operations be: neither checked nor recorded."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            yield

    def move(self, source: Tensor, kind: str, *, non_blocking: bool = False) -> Tensor:
        """Return the tensor on "cuda" or "cpu": itself where it is there."""
        to_device = kind == "cuda"
        if self.has(source) == to_device:
            return source
        with self.quiet():
            moved = source.clone()
        if to_device or non_blocking:  # torch pins what it will write to later
            self.mark(moved, "device" if to_device else "pinned")
        self.copy(source, moved, non_blocking=non_blocking)
        if self.capture:  # from pinned memory
            self.capture.record(torch.ops.aten.clone.default, (source,), {}, moved)
            self.capture.own(moved)
        if moved.requires_grad:
            moved.register_hook(lambda grad: self.move(grad, "cpu" if to_device else "cuda"))
        return moved


gpus: list[PretendedGpu] = []


def now() -> PretendedGpu:
    """Return the GPU that is pretended."""
    return gpus[-1]


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta


def _knows_size(args: Any, kwargs: Any) -> bool:
    """Whether repeat_interleave repeats by a number, or is told how long its result is."""
    is_number = len(args) > 1 and isinstance(args[1], int)
    return is_number or kwargs.get("output_size") is not None


def tensors_in(found: Any) -> Iterator[Tensor]:
    """Give the tensors that an operation takes or gives, one by one (torch's tree_leaves takes longer)."""
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, list | tuple):
        for part in found:
            yield from tensors_in(part)


def _shares_storage(found: Any, tensors: list[Tensor]) -> bool:
    known = {t.untyped_storage()._cdata for t in tensors if _has_storage(t)}
    return any(t.untyped_storage()._cdata in known for t in tensors_in(found) if _has_storage(t))


@functools.cache
def _written(func: Any) -> list[int]:
    """Return which arguments an operation writes to."""
    arguments = enumerate(func._schema.arguments)
    return [n for n, argument in arguments if argument.alias_info and argument.alias_info.is_write]


def caller() -> str:
    """Return file:line of the nearest frame of this project."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(str(ROOT)) and path not in HARNESS and "site-packages" not in path:
            return f"{Path(path).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


# ---- operations -----------------------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """Sees every operation, forward and backward."""

    def __init__(self, gpu: PretendedGpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, gpu, name = kwargs or {}, self.gpu, func._schema.name
        tensors = [*tensors_in(args), *tensors_in([*kwargs.values()])]
        if name.startswith("c10d::"):
            return self._run_collective(func, args, kwargs, tensors)
        on_device = self._check_devices(func, args, tensors)
        if on_device and torch.are_deterministic_algorithms_enabled():
            is_float_sum = name == "aten::cumsum" and tensors[0].is_floating_point()
            if is_float_sum or name in NO_FIXED_ORDER:
                raise RuntimeError(f"{name} does not have a deterministic implementation ({caller()})")
        self._note_waits(name, args, kwargs, on_device)
        if gpu.capture:
            gpu.capture.keep(args[n] for n in _written(func) if n < len(args))
        is_mutable = func._schema.is_mutable
        if name == "aten::histc":
            func = _count_integers
        out = func(*args, **kwargs)
        # By what it gives back: reshape, contiguous and to may copy, or not.
        is_view = not is_mutable and _shares_storage(out, tensors)
        for tensor in tensors if on_device and not is_view else ():
            gpu.check_order(tensor)
        if not is_view and not (name == "aten::copy_" and on_device):  # a copy waits its turn on the device
            for tensor in tensors:
                gpu.check_written(tensor)
        if on_device and not is_view and name not in NO_KERNEL:
            gpu.launches[name] += 1
            if gpu.capture:
                gpu.capture.record(func, args, kwargs, out)
        if gpu.capture and not is_view and not is_mutable:
            gpu.capture.own(out)
        is_made = not tensors and (gpu.thread.is_inside or torch._C._current_graph_task_id() != -1)
        if is_made or any(gpu.has(tensor, "neutral") for tensor in tensors):
            for tensor in tensors_in(out):
                gpu.mark(tensor, "device" if on_device else "neutral")
        elif on_device and name not in ("aten::copy_", "aten::_local_scalar_dense"):
            for tensor in tensors_in(out):
                gpu.mark(tensor)
        return out

    def _check_devices(self, func: Any, args: Any, tensors: list[Tensor]) -> bool:
        """Return whether the device computes this."""
        gpu, name = self.gpu, func._schema.name

        def is_elsewhere(tensor: Any) -> bool:
            return isinstance(tensor, Tensor) and not gpu.has(tensor) and not gpu.has(tensor, "neutral")

        if name in INDEXING and not gpu.has(args[0]):
            if any(gpu.has(index) for index in args[1]):
                raise RuntimeError(f"indices should be on the indexed tensor's device, the CPU ({caller()})")
        looked_at = [tensors[0], *args[2:3]] if name in INDEXING else tensors
        on_device = any(gpu.has(tensor) for tensor in looked_at)
        if on_device and name not in MIXES:
            others = [t for t in looked_at if (t.dim() or name in NO_SCALARS) and is_elsewhere(t)]
            others += [args[n] for n in _written(func) if n < len(args) and is_elsewhere(args[n])]
            if others:
                raise RuntimeError(
                    f"{name}: Expected all tensors to be on the same device, but found at least two devices, "
                    f"{gpu.device} and cpu! ({caller()})"
                )
        return on_device

    def _note_waits(self, name: str, args: Any, kwargs: Any, on_device: bool) -> None:
        gpu = self.gpu
        if name == "aten::copy_" and gpu.has(args[0]) != gpu.has(args[1]) and args[1].numel():
            non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            gpu.copy(args[1], args[0], non_blocking=non_blocking)
        if not on_device:
            return
        if name in WAITS and not (name == "aten::repeat_interleave" and _knows_size(args, kwargs)):
            gpu.wait(name)
        if name == "aten::_grouped_mm" and (gpu.capability < (9, 0) or args[0].dtype != torch.bfloat16):
            gpu.wait(name)  # the host reads the sizes of its groups
        # x[mask] = 0.0 is a masked_fill_.
        is_fill = name in INDEXING and len(args) > 2 and not args[2].dim() and not gpu.has(args[2])
        for index in args[1] if name in INDEXING else ():
            if index is not None and index.dtype == torch.bool and not is_fill:
                gpu.wait(f"{name} by a mask")
            if index is not None and not gpu.has(index) and index.numel():
                gpu.copy(index, args[0])

    def _run_collective(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        gpu, name = self.gpu, func._schema.name
        groups = [torch.distributed.ProcessGroup.unbox(x) for x in args if isinstance(x, torch.ScriptObject)
                  and "ProcessGroup" in str(x._type())]  # fmt: skip
        on_host = any(group.group_name in gpu.host_groups for group in groups)
        if name != "c10d::barrier" and any(t.numel() and gpu.has(t) == on_host for t in tensors):
            kind = "cuda" if on_host else "cpu"
            raise RuntimeError(f"{name}: No backend type associated with device type {kind} ({caller()})")
        if not on_host:
            gpu.launches[name] += 1
            if gpu.capture:
                gpu.capture.record(func, args, kwargs, None)
        return func(*args, **kwargs)
