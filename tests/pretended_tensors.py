"""Tensors that say they live on cuda:0, and what is seen of them: see `pretended_gpu`."""

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_

ROOT = Path(__file__).resolve().parents[1]
HARNESS = {__file__, str(Path(__file__).with_name("pretended_gpu.py"))}
# Operations that may take tensors of both kinds.
MIXES = {"aten::copy_", "aten::_to_copy", "aten::set_", "aten::_foreach_copy_"}
INDEXING = {"aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put"}
# The host reads what the device has made: a number, or how large a result is.
WAITS = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::repeat_interleave",
    "aten::unique_dim",
    "aten::_unique2",
}
NO_KERNEL = {
    *("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"),
    *("aten::lift_fresh", "aten::set_", "aten::_unsafe_view", "aten::resize_", "aten::_local_scalar_dense"),
}
CUDA = torch.device("cuda:0")
Tensor = torch.Tensor


class Event(NamedTuple):
    """Something that the host or the bus feels, and the line of this project that asked for it."""

    name: str
    where: str
    num_bytes: int = 0


class PretendedGpu:
    """What happened: `waits` of the host, `copies` to and from it, kernel `launches` by operation.

    `graphs` are those that hold something; `queries` what torch.cuda was asked without a device before
    `set_device`: a real one would open a context on GPU 0 for it.
    """

    def __init__(self) -> None:
        self.waits: list[Event] = []
        self.copies: list[Event] = []
        self.queries: list[Event] = []
        self.launches: Counter[str] = Counter()
        self.graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self.capture: Any = None  # what is captured now
        self.host_groups: set[str] = set()  # names of process groups that are gloo's by their maker's wish
        self.has_device = False  # set_device was called
        self.is_quiet = False  # the harness's own operations are nobody's
        self._marks: dict[int, str] = {}  # a storage's address -> device, pinned, or neutral

    def clear(self) -> None:
        """Forget what happened."""
        for record in (self.waits, self.copies, self.queries, self.launches):
            record.clear()

    def mark(self, tensor: Any, mark: str = "device") -> Any:
        """Return the tensor, whose storage now carries the mark; one that has a mark keeps it."""
        if isinstance(tensor, Tensor) and _has_storage(tensor):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._marks:
                self._marks[storage._cdata] = mark
                weakref.finalize(storage, self._marks.pop, storage._cdata, None)
        return tensor

    def has(self, tensor: Any, mark: str = "device") -> bool:
        """Whether a tensor's storage carries the mark."""
        if not isinstance(tensor, Tensor) or not _has_storage(tensor):
            return False
        return self._marks.get(tensor.untyped_storage()._cdata) == mark

    def wait(self, name: str) -> None:
        """Take note that the host waits for the device."""
        if self.capture:
            raise RuntimeError(f"{name}: operation not permitted when stream is capturing")
        self.waits.append(Event(name, caller()))

    def copy(self, source: Tensor, *, to_device: bool, non_blocking: bool = False) -> None:
        """Take note of a copy between host and device; the host waits for it unless told not to."""
        is_pinned = self.has(source, "pinned")
        if self.capture and not (to_device and is_pinned):
            raise RuntimeError(
                "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is "
                "pinned"
            )
        name = "copy to the device" if to_device else "copy to the host"
        self.copies.append(Event(name, caller(), source.numel() * source.element_size()))
        if not non_blocking:
            self.wait(name)

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Let operations be: neither checked nor recorded."""
        was_quiet, self.is_quiet = self.is_quiet, True
        try:
            yield
        finally:
            self.is_quiet = was_quiet

    def move(self, source: Tensor, kind: str, *, non_blocking: bool = False) -> Tensor:
        """Return the tensor on "cuda" or "cpu": itself where it is there."""
        to_device = kind == "cuda"
        if self.has(source) == to_device:
            return source
        self.copy(source, to_device=to_device, non_blocking=non_blocking)
        with self.quiet():
            moved = source.clone()
            if self.capture:  # from pinned memory
                self.capture.record(torch.ops.aten.clone.default, (source.detach(),), {}, moved)
        return self.mark(moved) if to_device else moved


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta


def _knows_size(args: Any, kwargs: Any) -> bool:
    """Whether repeat_interleave repeats by a number, or is told how long its result is."""
    is_number = len(args) > 1 and isinstance(args[1], int)
    return is_number or kwargs.get("output_size") is not None


def _shares_storage(found: Any, tensors: list[Tensor]) -> bool:
    known = {t.untyped_storage()._cdata for t in tensors if _has_storage(t)}
    leaves = [t for t in tree_leaves(found) if isinstance(t, Tensor) and _has_storage(t)]
    return any(t.untyped_storage()._cdata in known for t in leaves)


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
        if gpu.is_quiet:
            return func(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if name.startswith("c10d::"):
            self._check_collective(name, args, tensors)
            out = func(*args, **kwargs)
            if gpu.capture:
                gpu.capture.record(func, args, kwargs, None)
            return out
        looked_at = tensors[:1] if name in INDEXING else tensors
        on_device = any(gpu.has(t) for t in looked_at)
        if on_device and name not in MIXES:
            others = [t for t in looked_at if t.dim() and not gpu.has(t) and not gpu.has(t, "neutral")]
            if others:
                raise RuntimeError(
                    f"{name}: Expected all tensors to be on the same device, but found at least two devices, "
                    f"cuda:0 and cpu! ({caller()})"
                )
        self._note_waits(name, args, kwargs, on_device)
        if gpu.capture:
            gpu.capture.keep_written(func, args, kwargs)
        out = func(*args, **kwargs)
        # By what it gives back: reshape, contiguous and to may copy, or not.
        is_view = not func._schema.is_mutable and _shares_storage(out, tensors)
        if on_device and not is_view and name not in NO_KERNEL:
            gpu.launches[name] += 1
            if gpu.capture:
                gpu.capture.record(func, args, kwargs, out)
        if not tensors and torch._C._current_graph_task_id() != -1:  # made by C++ in a backward pass
            gpu.mark(out, "neutral")
        elif on_device and name not in ("aten::copy_", "aten::_local_scalar_dense"):
            tree_map_(gpu.mark, out)
        return out

    def _note_waits(self, name: str, args: Any, kwargs: Any, on_device: bool) -> None:
        gpu = self.gpu
        if name == "aten::copy_" and gpu.has(args[0]) != gpu.has(args[1]) and args[1].numel():
            non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            gpu.copy(args[1], to_device=gpu.has(args[0]), non_blocking=non_blocking)
        if not on_device:
            return
        if name in WAITS and not (name == "aten::repeat_interleave" and _knows_size(args, kwargs)):
            gpu.wait(name)
        if name in INDEXING:
            for index in args[1]:
                if index is not None and index.dtype == torch.bool:
                    gpu.wait(f"{name} by a mask")
                if index is not None and not gpu.has(index) and index.numel():
                    gpu.copy(index, to_device=True)

    def _check_collective(self, name: str, args: Any, tensors: list[Tensor]) -> None:
        groups = [torch.distributed.ProcessGroup.unbox(x) for x in args if isinstance(x, torch.ScriptObject)
                  and "ProcessGroup" in str(x._type())]  # fmt: skip
        if any(group.group_name in self.gpu.host_groups for group in groups):
            return
        if any(t.numel() and not self.gpu.has(t) for t in tensors):
            raise RuntimeError(f"{name}: No backend type associated with device type cpu ({caller()})")


# ---- what Python asks and moves -------------------------------------------------------------------------


class Questions(TorchFunctionMode):
    """Answers for marked tensors where torch would tell the truth."""

    def __init__(self, gpu: PretendedGpu) -> None:
        super().__init__()
        self.gpu = gpu
        self.answers: dict[Any, Callable[..., Any]] = {
            Tensor.device.__get__: self._device,
            Tensor.is_cuda.__get__: gpu.has,
            Tensor.is_cpu.__get__: lambda t: not gpu.has(t),
            Tensor.get_device: lambda t: 0 if gpu.has(t) else -1,
            Tensor.to: self._to,
            Tensor.cpu: lambda t, **_: gpu.move(t, "cpu"),
            Tensor.cuda: lambda t, device=None, non_blocking=False, **_: gpu.move(
                t, "cuda", non_blocking=non_blocking
            ),
            Tensor.tolist: lambda t: gpu.move(t, "cpu").tolist(),
            Tensor.pin_memory: self._pin,
            Tensor.is_pinned: lambda t, *_: gpu.has(t, "pinned"),
            Tensor.numpy: self._numpy,
            Tensor.__array__: self._numpy,
        }
        self.makers = {*_device_constructors(), torch.empty_like, torch.zeros_like, torch.ones_like}
        self.makers |= {torch.full_like, torch.rand_like, torch.randn_like}
        self.makers |= {
            Tensor.new_empty,
            Tensor.new_full,
            Tensor.new_ones,
            Tensor.new_tensor,
            Tensor.new_zeros,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.gpu.is_quiet:
            return func(*args, **kwargs)
        if func in self.answers:
            return self.answers[func](*args, **kwargs)
        if func in self.makers and (kwargs.get("device") is not None or kwargs.get("pin_memory")):
            return self._make(func, args, dict(kwargs))
        return func(*args, **kwargs)

    def _device(self, tensor: Tensor) -> torch.device:
        return CUDA if self.gpu.has(tensor) else Tensor.device.__get__(tensor)

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        names = ("device", "dtype", "non_blocking", "copy")
        if args and isinstance(args[0], torch.dtype):
            names = names[1:]
        elif args and isinstance(args[0], Tensor):
            names = ("other", *names[2:])
        given = dict(zip(names, args, strict=False)) | kwargs
        other, device, dtype = given.get("other"), given.get("device"), given.get("dtype")
        if other is not None:
            device, dtype = self._device(other), other.dtype
        kind = torch.device(device).type if device is not None else None
        if kind not in (None, "cpu", "cuda") or tensor.is_meta:
            return tensor.to(*args, **kwargs)
        moved = tensor
        if kind is not None:
            moved = self.gpu.move(tensor, kind, non_blocking=given.get("non_blocking", False))
        converted = moved if dtype is None else moved.to(dtype)
        return converted.clone() if given.get("copy") and converted is tensor else converted

    def _pin(self, tensor: Tensor, *_: Any) -> Tensor:
        with self.gpu.quiet():
            return self.gpu.mark(tensor.clone(), "pinned")

    def _numpy(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.gpu.has(tensor):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
        return tensor.numpy(*args, **kwargs)

    def _make(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """Return a new tensor on the device that is asked for."""
        gpu, is_pinned = self.gpu, kwargs.pop("pin_memory", False)
        device = torch.device(kwargs.pop("device") or "cpu")
        if device.type == "meta":
            return func(*args, device=device, **kwargs)
        if isinstance(device, torch.device) and func is torch.as_tensor and isinstance(args[0], Tensor):
            return gpu.move(func(*args, **kwargs), device.type)
        with gpu.quiet():
            made = func(*args, **kwargs)
        if device.type == "cpu":
            return gpu.mark(made, "pinned") if is_pinned else made
        name = getattr(func, "__name__", "?")
        if func in (torch.tensor, torch.as_tensor, Tensor.new_tensor):
            gpu.copy(made, to_device=True)
        elif "empty" not in name:
            gpu.launches[f"aten::{name}"] += 1
            if gpu.capture:
                gpu.capture.record(func, args, kwargs, made)
        return gpu.mark(made)
