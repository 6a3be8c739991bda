"""A GPU that is not there: CPU tensors that say they live on cuda:0.

    with pretended_gpu() as gpu:
        model.to("cuda")
        ...
    gpu.waits        # [Event("item", "engine_step.py:88"), ...]

Tensors are the CPU's own, so autograd, views, `.data =`, safetensors, gloo and DeepSpeed work. Their storages
carry a mark. A function mode answers for what Python asks and moves (`device`, `to`, `cpu`, factories), a
dispatch mode sees every operation, forward and backward:

- marked and unmarked tensors in one operation raise torch's own error;
- host waits, copies between host and device, and operations that would launch a kernel are recorded;
- a CUDA graph is a tape: what is captured runs again, with the Python numbers of the capture; what CUDA
  forbids while it captures is an error;
- collectives of a group that would be nccl's refuse tensors of the CPU.

It does not know streams' order, the kernels' own checks of arguments, or how much memory there is.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from deepspeed.accelerator import real_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from pretended_tensors import CUDA, Event, Operations, PretendedGpu, Questions, caller
from torch import Tensor
from torch.utils._pytree import tree_leaves


class Stream:
    """A stream: everything is in order here."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = CUDA

    def wait_stream(self, stream: Any) -> None:
        """Nothing runs at the side."""

    wait_event = wait_stream

    def record_event(self, event: Any = None) -> Any:
        """Nothing to wait for."""
        return event or StreamEvent()

    def synchronize(self) -> None:
        """The host waits."""
        _now().wait("Stream.synchronize")

    def query(self) -> bool:
        """All is done."""
        return True


class StreamEvent:
    """An event of a stream: it has happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """It has happened."""

    wait = record

    def synchronize(self) -> None:
        """The host waits."""
        _now().wait("Event.synchronize")

    def query(self) -> bool:
        """It has happened."""
        return True

    def elapsed_time(self, other: Any) -> float:
        """No time is kept."""
        return 0.0


class Graph:
    """A captured graph: a tape of operations, with the Python numbers of its capture."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.tape: list[tuple[Any, Any, Any, Any]] = []
        self.stream: Stream | None = None
        self.written: dict[int, tuple[Any, Any]] = {}  # storage, what was in it

    def record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Take an operation on the tape."""
        self.tape.append((func, args, kwargs, out))

    def keep_written(self, func: Any, args: Any, kwargs: Any) -> None:
        """Keep what an operation is about to write: nothing is done while it is captured."""
        for argument, given in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in (x for x in tree_leaves(given) if isinstance(x, Tensor)):
                    storage = tensor.untyped_storage()
                    self.written.setdefault(storage._cdata, (storage, storage.clone()))

    def restore_written(self) -> None:
        """Put back what the operations of the capture have written."""
        for storage, before in self.written.values():
            storage.copy_(before)
        self.written = {}

    def replay(self) -> None:
        """Run the tape: results go where they went when it was captured."""
        gpu = _now()
        assert self.tape, "an empty graph, or one that was reset, is replayed"
        gpu.launches["a graph"] += 1
        with gpu.quiet():
            for func, args, kwargs, out in self.tape:
                new = func(*args, **kwargs)
                if out is None:  # a collective
                    new[-1].wait()
                    continue
                for old, value in zip(tree_leaves(out), tree_leaves(new), strict=True):
                    if isinstance(old, Tensor) and old is not value:
                        old.copy_(value)

    def reset(self) -> None:
        """Forget the tape."""
        self.tape = []
        _now().graphs.discard(self)

    def pool(self) -> Any:
        """A name for its memory."""
        return (0, id(self))


_default_capture_stream = Stream()


@contextlib.contextmanager
def _graph(graph: Graph, pool: Any = None, stream: Stream | None = None, **_: Any) -> Iterator[None]:
    """Capture what runs in the block."""
    gpu = _now()
    gpu.wait("torch.cuda.graph")
    gpu.capture, graph.stream = graph, stream or _default_capture_stream
    gpu.graphs.add(graph)
    try:
        yield
    finally:
        gpu.capture = None
        graph.restore_written()


_gpus: list[PretendedGpu] = []


def _now() -> PretendedGpu:
    return _gpus[-1]


class _Accelerator(CPU_Accelerator):
    """DeepSpeed's, for a device that calls itself cuda."""

    def device_name(self, device_index: int | None = None) -> str:
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        return CUDA

    def current_device(self) -> int:
        return 0

    def current_device_name(self) -> str:
        return "cuda:0"

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float, torch.half, torch.bfloat16]

    def synchronize(self, device_index: int | None = None) -> None:
        _now().wait("synchronize")

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def pin_memory(self, tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        return tensor.pin_memory()

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.is_pinned()

    def _maker(self, dtype: torch.dtype) -> Callable[..., Tensor]:
        def make(*args: Any) -> Tensor:
            maker = torch.tensor if args and not isinstance(args[0], int) else torch.empty
            return maker(*args, dtype=dtype, device="cuda")

        return make

    ByteTensor = property(lambda self: self._maker(torch.uint8))
    BFloat16Tensor = property(lambda self: self._maker(torch.bfloat16))
    DoubleTensor = property(lambda self: self._maker(torch.float64))
    FloatTensor = property(lambda self: self._maker(torch.float32))
    HalfTensor = property(lambda self: self._maker(torch.float16))
    IntTensor = property(lambda self: self._maker(torch.int32))
    LongTensor = property(lambda self: self._maker(torch.int64))


def _torch_cuda(gpu: PretendedGpu, capability: tuple[int, int], memory_gib: float) -> dict[str, Any]:
    """Return what stands in for the functions of torch.cuda."""
    total = int(memory_gib * 2**30)
    state = torch.zeros(16, dtype=torch.uint8)

    def set_device(device: Any) -> None:
        gpu.has_device = True

    def ask(name: str, answer: Any) -> Callable[..., Any]:
        def asked(device: Any = None, *_: Any, **__: Any) -> Any:
            if device is None and not gpu.has_device:
                gpu.queries.append(Event(name, caller()))
            return answer

        return asked

    def computes_bf16(including_emulation: bool = True) -> bool:
        return including_emulation or capability >= (8, 0)

    properties = type("Properties", (), {"major": capability[0], "minor": capability[1]})()
    properties.name, properties.total_memory, properties.multi_processor_count = "Pretended", total, 100
    answers = {
        "current_device": 0,
        "get_device_capability": capability,
        "get_device_name": "Pretended",
        "get_device_properties": properties,
        "mem_get_info": (total, total),
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "get_rng_state": state,
    }
    nothing = dict.fromkeys(
        ("empty_cache", "manual_seed", "manual_seed_all", "set_rng_state", "reset_peak_memory_stats", "init"),
        lambda *_, **__: None,
    )
    return (
        {name: ask(name, answer) for name, answer in answers.items()}
        | nothing
        | {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            "set_device": set_device,
            "is_bf16_supported": computes_bf16,
            "synchronize": lambda *_: gpu.wait("synchronize"),
            "Stream": Stream,
            "Event": StreamEvent,
            "stream": lambda stream: contextlib.nullcontext(),
            "current_stream": lambda *_: _default_capture_stream,
            "default_stream": lambda *_: _default_capture_stream,
            "is_current_stream_capturing": lambda: gpu.capture is not None,
            "CUDAGraph": Graph,
            "graph": _graph,
            "graph_pool_handle": lambda: (0, 1),
        }
    )


@contextlib.contextmanager
def pretended_gpu(capability: tuple[int, int] = (8, 0), memory_gib: float = 24.0) -> Iterator[PretendedGpu]:
    """Have a GPU in the block. The process group, if any, must have been started before it."""
    gpu = PretendedGpu()
    new_group = torch.distributed.new_group

    def note_group(*args: Any, **kwargs: Any) -> Any:
        group = new_group(*args, **kwargs)
        if kwargs.get("backend") == "gloo" and hasattr(group, "group_name"):
            gpu.host_groups.add(group.group_name)
        return group

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.cuda, **_torch_cuda(gpu, capability, memory_gib)))
        stack.enter_context(mock.patch.object(torch.distributed, "new_group", note_group))
        stack.enter_context(mock.patch.object(real_accelerator, "ds_accelerator", _Accelerator()))
        _gpus.append(gpu)
        stack.callback(_gpus.pop)
        stack.enter_context(Operations(gpu))
        stack.enter_context(Questions(gpu))
        yield gpu
