"""A GPU that is not there: CPU tensors that say they live on cuda:0.

    with pretended_gpu() as gpu:
        model.to("cuda")
        ...
    gpu.waits        # [Event("item", "engine_step.py:88"), ...]

Tensors are the CPU's own, so autograd, views, `.data =`, safetensors, gloo and DeepSpeed work. Their storages
carry a mark. A function mode answers for what Python asks and moves (`device`, `to`, `cpu`, factories), a
dispatch mode sees every operation, forward and backward, in every thread that is started in the block:

- marked and unmarked tensors in one operation raise torch's own error, and so does another process's GPU;
- host waits, copies between host and device, operations that would launch a kernel, and bytes are recorded;
- a copy that does not wait is only read after a wait; it is one only from or to pinned memory;
- what a stream makes, or copies to the device, another one touches only after it has waited for that;
- a CUDA graph is a tape: what is captured runs again, with the Python numbers of the capture; what CUDA
  forbids while it captures is an error, and so is a replay after memory that it reads was freed;
- process groups are nccl's unless their maker says gloo: they refuse tensors of the CPU, gloo's the device's;
- DeepSpeed has its own accelerator for CUDA.

It does not know what streams write in place, the kernels' checks of arguments, or memory between tensors.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import deepspeed.runtime.zero.muon.original_muon  # noqa: F401  it compiles when it is imported: not in the block
import peft  # noqa: F401  with bitsandbytes, which looks for torch's CUDA build: not in the block either
import torch
import torch.distributed as dist
from deepspeed.accelerator import real_accelerator
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from pretended_streams import Graph, Stream, StreamEvent, on_stream
from pretended_tensors import Event, Operations, PretendedGpu, caller, gpus, now
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from common.models import attention

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
            Tensor.get_device: lambda t: gpu.device.index if gpu.has(t) else -1,
            Tensor.grad.__set__: self._set_grad,
            Tensor.backward: self._backward,
            Tensor.to: self._to,
            Tensor.cpu: lambda t, **_: gpu.move(t, "cpu"),
            Tensor.cuda: lambda t, device=None, **more: self._to(t, self._on(device or "cuda"), **more),
            Tensor.tolist: self._tolist,
            Tensor.type: self._type,
            Tensor.pin_memory: self._pin,
            Tensor.is_pinned: lambda t, *_: gpu.has(t, "pinned"),
            Tensor.numpy: self._numpy,
            Tensor.__array__: self._numpy,
            Tensor.__deepcopy__: self._deepcopy,
        }
        self.makers = {*_device_constructors(), torch.empty_like, torch.zeros_like, torch.ones_like}
        self.makers |= {torch.full_like, torch.rand_like, torch.randn_like, Tensor.new_empty, Tensor.new_full}
        self.makers |= {Tensor.new_ones, Tensor.new_zeros, Tensor.new_tensor}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, thread = kwargs or {}, self.gpu.thread
        if func in self.answers:
            return self.answers[func](*args, **kwargs)
        if func is Tensor.new_tensor:
            kwargs = {"device": self._device(args[0])} | kwargs
        if func in self.makers and (kwargs.get("device") is not None or kwargs.get("pin_memory")):
            return self._make(func, args, dict(kwargs))
        thread.is_inside = func not in self.makers
        try:
            return func(*args, **kwargs)
        finally:
            thread.is_inside = False

    def _on(self, device: Any) -> torch.device:
        """Return a device that is asked for."""
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if device.type == "cuda" and device.index not in (None, self.gpu.device.index):
            raise RuntimeError(f"{device} is used by the process of {self.gpu.device} ({caller()})")
        return device

    def _device(self, tensor: Tensor) -> torch.device:
        return self.gpu.device if self.gpu.has(tensor) else Tensor.device.__get__(tensor)

    def _set_grad(self, tensor: Tensor, grad: Tensor | None) -> None:
        if grad is not None and self._device(grad) != self._device(tensor):
            raise RuntimeError(f"assigned grad has data located on a different device ({caller()})")
        Tensor.grad.__set__(tensor, grad)

    def _backward(self, tensor: Tensor, gradient: Any = None, *args: Any, **kwargs: Any) -> None:
        with self:  # hooks ask, too
            torch.autograd.backward(tensor, gradient, *args, **kwargs)

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
        kind = self._on(device).type if device is not None else None
        if tensor.is_meta and kind == "cuda":
            return tensor.to("cpu")  # which refuses, as a GPU does
        if kind not in (None, "cpu", "cuda") or tensor.is_meta:
            return tensor.to(*args, **kwargs)
        moved = tensor
        if kind is not None:
            moved = self.gpu.move(tensor, kind, non_blocking=given.get("non_blocking", False))
        converted = moved if dtype is None else moved.to(dtype)
        return converted.clone() if given.get("copy") and converted is tensor else converted

    def _type(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        named = tensor.type(*args, **kwargs)
        is_name = isinstance(named, str) and self.gpu.has(tensor)
        return named.replace("torch.", "torch.cuda.") if is_name else named

    def _pin(self, tensor: Tensor, *_: Any) -> Tensor:
        if self.gpu.has(tensor):
            raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
        if self.gpu.has(tensor, "pinned"):
            return tensor
        self._check_capture()
        with self.gpu.quiet():
            return self.gpu.mark(tensor.clone(), "pinned")

    def _check_capture(self) -> None:
        """Raise RuntimeError while any thread captures: memory cannot be pinned then."""
        if self.gpu.capture:
            raise RuntimeError(f"cudaHostAlloc: not permitted when a stream is capturing ({caller()})")

    def _tolist(self, tensor: Tensor) -> Any:
        self.gpu.check_written(tensor)
        return self.gpu.move(tensor, "cpu").tolist()

    def _numpy(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.gpu.check_written(tensor)
        if self.gpu.has(tensor):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
        return tensor.numpy(*args, **kwargs)

    def _deepcopy(self, tensor: Tensor, memo: Any) -> Tensor:
        copied = tensor.__deepcopy__(memo)
        return self.gpu.mark(copied) if self.gpu.has(tensor) else copied

    def _make(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """Return a new tensor on the device that is asked for."""
        gpu, is_pinned = self.gpu, kwargs.pop("pin_memory", False)
        if is_pinned:
            self._check_capture()
        device = self._on(kwargs.pop("device", None) or "cpu")
        is_fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        if device.type == "meta" or (device.type == "cpu" and is_fake):  # a plan's
            return func(*args, device=device, **kwargs)
        if func is torch.as_tensor and isinstance(args[0], Tensor):
            return gpu.move(func(*args, **kwargs), device.type)
        with gpu.quiet():
            made = func(*args, device="cpu", **kwargs)  # also what is like a tensor of "meta"
        if device.type == "cpu":
            return gpu.mark(made, "pinned") if is_pinned else made
        name = getattr(func, "__name__", "?")
        if func in (torch.tensor, torch.as_tensor, Tensor.new_tensor):
            gpu.copy(made, made)
        elif "empty" not in name:
            gpu.launches[f"aten::{name}"] += 1
            if gpu.capture:
                gpu.capture.record(func, args, kwargs, made)
        if gpu.capture:
            gpu.capture.own(made)
        return gpu.mark(made)


# ---- graphs ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _graph(graph: Graph, pool: Any = None, stream: Stream | None = None, **_: Any) -> Iterator[None]:
    """Capture what runs in the block."""
    gpu = now()
    gpu.wait("torch.cuda.graph")
    gpu.capture, graph.stream = graph, stream or gpu.default_stream
    gpu.graphs.add(graph)
    try:
        yield
    finally:
        gpu.capture = None
        graph.end()


# ---- torch.cuda, DeepSpeed's accelerator, process groups ------------------------------------------------


class _Accelerator(CUDA_Accelerator):
    """DeepSpeed's."""

    def _init_pynvml(self) -> None:
        """There is no driver to ask."""

    def range_push(self, *_: Any, **__: Any) -> None:
        """No profiler is there."""

    range_pop = range_push


def _torch_cuda(gpu: PretendedGpu, capability: tuple[int, int]) -> dict[str, Any]:
    """Return what stands in for the functions of torch.cuda."""

    def set_device(device: Any) -> None:
        index = torch.device("cuda", device).index if isinstance(device, int) else torch.device(device).index
        gpu.has_device, gpu.device = True, torch.device("cuda", index or 0)

    def ask(name: str, answer: Callable[[], Any]) -> Callable[..., Any]:
        def asked(device: Any = None, *_: Any, **__: Any) -> Any:
            if device is None and not gpu.has_device and not gpu.peak:
                gpu.queries.append(Event(name, caller()))
            return answer()

        return asked

    def computes_bf16(including_emulation: bool = True) -> bool:
        is_made = ask("is_bf16_supported", lambda: True)  # it makes a tensor to find out
        return is_made() if including_emulation else capability >= (8, 0)

    def set_sync_debug_mode(mode: int | str) -> None:
        gpu.waits_raise = mode in (2, "error")

    properties = mock.Mock(major=capability[0], minor=capability[1], total_memory=gpu.total)
    properties.name, properties.multi_processor_count = "NVIDIA A100 (pretended)", 108
    gpu.default_stream = Stream()
    answers = {
        "current_device": lambda: gpu.device.index,
        "get_device_capability": lambda: capability,
        "get_device_name": lambda: properties.name,
        "get_device_properties": lambda: properties,
        "mem_get_info": lambda device=None: (gpu.total - gpu.allocated, gpu.total),
        "memory_allocated": lambda: gpu.allocated,
        "max_memory_allocated": lambda: gpu.peak,
        "memory_reserved": lambda: gpu.allocated,
        "max_memory_reserved": lambda: gpu.peak,
        "memory_stats": dict,
        "get_rng_state": lambda: torch.zeros(16, dtype=torch.uint8),
        "reset_peak_memory_stats": lambda: setattr(gpu, "peak", gpu.allocated),
        "synchronize": lambda: gpu.wait("synchronize", for_all=True),
        "current_stream": lambda: gpu.stream,
        "default_stream": lambda: gpu.default_stream,
    }
    nothing = ("empty_cache", "manual_seed", "manual_seed_all", "set_rng_state", "init", "ipc_collect")
    return {
        **{name: ask(name, answer) for name, answer in answers.items()},
        **dict.fromkeys(nothing, lambda *_, **__: None),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "device": contextlib.nullcontext,
        "set_device": set_device,
        "is_bf16_supported": computes_bf16,
        "set_sync_debug_mode": set_sync_debug_mode,
        "get_sync_debug_mode": lambda: 2 * gpu.waits_raise,
        "Stream": Stream,
        "Event": StreamEvent,
        "stream": on_stream,
        "is_current_stream_capturing": gpu.default_stream.is_capturing,
        "CUDAGraph": Graph,
        "graph": _graph,
        "graph_pool_handle": lambda: (0, 1),
    }


def _process_groups(gpu: PretendedGpu) -> dict[str, Any]:
    """Return what stands in for functions of torch.distributed: gloo, which says it is nccl."""
    start, new_group, kind_of = dist.init_process_group, dist.new_group, dist.get_backend
    destroy = dist.destroy_process_group

    def on_gloo(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            backend = kwargs.get("backend", args[0] if make is start and args else None)
            if backend == "nccl":
                args, kwargs = args[1:] if make is start and args else args, kwargs | {"backend": "gloo"}
            kwargs.pop("device_id", None)
            group = make(*args, **kwargs)
            if backend == "gloo":
                gpu.host_groups.add((group or dist.group.WORLD).group_name)
            return group

        return made

    def get_backend(group: Any = None) -> str:
        name = getattr(group or dist.group.WORLD, "group_name", "")
        return kind_of(group) if name in gpu.host_groups else "nccl"

    def destroy_process_group(group: Any = None) -> None:
        if get_backend(group) == "nccl" and any(graph.has_collectives() for graph in gpu.graphs):
            raise RuntimeError("nccl waits for ever for the graphs that have captured its collectives")
        destroy(group)

    return {
        "destroy_process_group": destroy_process_group,
        "init_process_group": on_gloo(start),
        "new_group": on_gloo(new_group),
        "get_backend": get_backend,
        "_get_object_coll_device": lambda group=None: "cuda" if get_backend(group) == "nccl" else "cpu",
    }


def _varlen_kernel(gpu: PretendedGpu) -> Callable[..., tuple[Tensor]]:
    """Return torch's kernel for sequences end to end, one attention a sequence: (N, H, D), as a CPU sums."""
    known = {argument.name for argument in attention.varlen_kernel.default._schema.arguments}

    def attend_to_slots(
        query: Tensor, key: Tensor, value: Tensor, starts: Tensor, key_starts: Tensor, longest: int,
        longest_key: int, options: dict[str, Any],
    ) -> tuple[Tensor]:  # fmt: skip
        used, left = options["seqused_k"], options["window_size_left"]
        is_int32 = {used.dtype, starts.dtype, key_starts.dtype} == {torch.int32}
        assert (
            is_int32 and gpu.has(used) and used.is_contiguous() and len(used) == len(query) and longest == 1
        )
        assert longest == 1 and not options["is_causal"]
        with gpu.quiet():
            assert starts.tolist() == list(range(len(query) + 1)) and int(used.max()) <= longest_key
            slots = [x.unflatten(0, (len(query), -1)) for x in (key, value)]
            assert key_starts.tolist() == [n * slots[0].shape[1] for n in range(len(query) + 1)]
        keys, values = (x.unflatten(0, (len(query), -1)).transpose(1, 2).float() for x in (key, value))
        back = used.unsqueeze(1) - 1 - torch.arange(keys.shape[2], device=query.device)
        seen = (back >= 0) if left < 0 else (back >= 0) & (back <= left)
        how = {"scale": options["scale"], "enable_gqa": query.shape[1] != key.shape[1]}
        states = query.unsqueeze(2).float(), keys, values, seen[:, None, None]
        output = torch.nn.functional.scaled_dot_product_attention(*states, **how)
        return (output.squeeze(2).to(query.dtype),)

    def attend(
        query: Tensor, key: Tensor, value: Tensor, starts: Tensor, key_starts: Tensor, longest: int,
        longest_key: int, **options: Any,
    ) -> tuple[Tensor]:  # fmt: skip
        assert options.keys() <= known  # the installed torch takes these arguments
        assert query.shape[-1] % 8 == 0, "the kernel does not pad heads"
        assert options["window_size_right"] == (-1 if options["window_size_left"] < 0 else 0)
        if options["seqused_k"] is not None:
            return attend_to_slots(query, key, value, starts, key_starts, longest, longest_key, options)
        window, is_causal = options["window_size_left"], options["is_causal"]
        assert is_causal == (window < 0) and not options["dropout_p"]
        is_grouped = query.shape[1] != key.shape[1]
        with gpu.quiet():
            lengths, key_lengths = starts.diff().tolist(), key_starts.diff().tolist()
        assert (longest, longest_key) == (max(lengths), max(key_lengths)), "rubbish, or too much memory"
        states = [x.transpose(0, 1).unsqueeze(0).float() for x in (query, key, value)]  # as it sums
        pieces = (x.split(n, 2) for x, n in zip(states, (lengths, key_lengths, key_lengths), strict=True))
        outputs, left = [], max(key_lengths) if is_causal else window
        for q, k, v in zip(*pieces, strict=True):
            positions = torch.arange(k.shape[2], device=query.device)
            back = positions[k.shape[2] - q.shape[2] :].unsqueeze(1) - positions
            is_plain = q.shape[2] == k.shape[2] and left + 1 >= k.shape[2]
            mask = None if is_plain else (back >= 0) & (back <= left)
            how = {"is_causal": is_plain, "scale": options["scale"], "enable_gqa": is_grouped}
            outputs.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, **how))
        return (torch.cat(outputs, 2)[0].transpose(0, 1).to(query.dtype),)

    return attend


@contextlib.contextmanager
def pretended_gpu(capability: tuple[int, int] = (8, 0), memory_gib: float = 24.0) -> Iterator[PretendedGpu]:
    """Have a GPU in the block."""
    gpu, run_thread = (
        PretendedGpu(int(memory_gib * 2**30), tuple(capability)),
        threading.Thread._bootstrap_inner,
    )

    def run_in_modes(thread: threading.Thread) -> None:
        with Operations(gpu), Questions(gpu):
            run_thread(thread)

    def refuse_pickle(tensor: Tensor, protocol: Any) -> Any:
        if gpu.has(tensor):
            raise RuntimeError("a pickled tensor comes back on the GPU of who pickled it: move it to the CPU")
        return pickle_it(tensor, protocol)

    pickle_it = Tensor._reduce_ex_internal
    groups = _process_groups(gpu)
    public = {name: function for name, function in groups.items() if hasattr(dist, name)}
    with contextlib.ExitStack() as stack:
        gpus.append(gpu)
        stack.callback(gpus.pop)
        stack.enter_context(mock.patch.multiple(torch.cuda, **_torch_cuda(gpu, tuple(capability))))
        # Not available, as in a build without CUDA: in one with it, torch asks its module `cpu` for streams.
        of_any_device = {"current_stream": lambda *_: gpu.stream, "is_available": lambda: False}
        stack.enter_context(mock.patch.multiple(torch.accelerator, **of_any_device))
        stack.enter_context(mock.patch.object(torch.cuda.nccl, "version", lambda: (2, 27, 3)))  # logged
        stack.enter_context(mock.patch.multiple(dist, **public))
        stack.enter_context(mock.patch.multiple(dist.distributed_c10d, **groups))
        stack.enter_context(mock.patch.object(real_accelerator, "ds_accelerator", _Accelerator()))
        stack.enter_context(mock.patch.object(threading.Thread, "_bootstrap_inner", run_in_modes))
        stack.enter_context(mock.patch.object(torch.autograd, "has_torch_function", lambda _: False))
        stack.enter_context(mock.patch.object(Tensor, "_reduce_ex_internal", refuse_pickle))
        # Autograd saves tensors where no mode answers for their devices.
        kinds = torch.utils.checkpoint._allowed_determinism_checks_to_fns
        stack.enter_context(mock.patch.dict(kinds, default=lambda tensor: (tensor.shape, tensor.dtype)))
        stack.enter_context(mock.patch.object(attention, "varlen_kernel", _varlen_kernel(gpu)))
        stack.enter_context(Operations(gpu))
        # Not one of the answers: it looks at the stream first.
        stack.enter_context(mock.patch.object(Tensor, "record_stream", lambda *_: None))
        stack.enter_context(Questions(gpu))
        yield gpu
