"""Processes and devices: start-up, rank and world size, barriers, reductions.

Every program runs the same way under `deepspeed`, `torchrun` and plain `python`; the last is a world of one.
"""

import contextlib
import functools
import os
import socket
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist

IS_CPU_ASKED_FOR = os.environ.get("DS_ACCELERATOR") == "cpu"
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would choose the same, with a warning

import deepspeed  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402

from common.ranks import deepspeed_internals, watchdog  # noqa: E402
from common.ranks.failure_detector import OTHER_RANK_FAILED, PATIENT  # noqa: E402
from common.ranks.failures import first_line, say  # noqa: E402

_IS_ON_CPU: ContextVar[bool] = ContextVar("_IS_ON_CPU", default=False)
# NCCL ends a process that has waited too long, from a separate thread and without naming the missing rank, so
# its limit is longer than the failure detector's.
NCCL_EXTRA_SECONDS = 30.0
ALLOCATOR_VARIABLES = {f"PYTORCH_{kind}ALLOC_CONF" for kind in ("", "CUDA_", "HIP_")}
EXPANDABLE = "expandable_segments:True"
# Files that exist if the NVIDIA driver is installed; the second is for WSL.
NVIDIA_DRIVER = ("/dev/nvidiactl", "/usr/lib/wsl/lib/nvidia-smi")
BAD_INPUT = 2  # exit code
JOIN_SECONDS = 45.0  # for all ranks to join on one machine; 40 times that on several
LOOPBACK = ("localhost", "127.0.0.1", "::1")
T = TypeVar("T")
_host_group: dist.ProcessGroup | None = None  # gloo group for an NCCL world; None: the world uses gloo
_store: dist.Store | None = None  # rank 0's serves the other ranks while it is referenced
# Objects with a `release()` that must not outlive the process group: NCCL does not destroy a communicator
# before the last CUDA graph with one of its collectives.
RELEASED_AT_STOP: weakref.WeakSet[Any] = weakref.WeakSet()


def start(local_rank: int = -1, collective_timeout: float = 1800.0) -> None:
    """Join the process group: nccl on GPUs, gloo on CPUs; a single process becomes a world of one.

    In addition to NCCL, a gloo group carries objects and CPU tensors: they do not use GPU memory, and waiting
    for a rank that writes a file blocks no kernel.

    A rank that keeps the others waiting for `collective_timeout` seconds stops all of them, and so does a
    rank that fails. Every rank must call this once, before any model is built. If the other ranks cannot be
    reached, prints what to change and exits with OTHER_RANK_FAILED, or BAD_INPUT if the port is in use.
    Raises ValueError for an untested version of DeepSpeed.
    """
    global _host_group
    deepspeed_internals.install()
    if "RANK" not in os.environ:  # port 0: any that is free
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        os.environ |= alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.setdefault("LOCAL_RANK", str(max(local_rank, 0)))
    if has_gpu() and not ALLOCATOR_VARIABLES & os.environ.keys():
        # Each phase requests other block sizes than the last one freed; expandable segments can be reused.
        # Pinned memory from 1 MiB on is not rounded up to powers of two (torch 2.11 always rounds).
        try:
            torch._C._accelerator_setAllocatorSettings(f"{EXPANDABLE},pinned_max_round_threshold_mb:1")
        except (ValueError, RuntimeError):
            torch._C._accelerator_setAllocatorSettings(EXPANDABLE)
    if has_gpu():
        # In captured passes NCCL would register an expandable segment as one allocation, and hang.
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    choose_device()
    if not dist.is_initialized():
        backend = "nccl" if has_gpu() else "gloo"
        # DeepSpeed would compile its shared-memory collectives at the first start on a CPU: that needs a
        # compiler, takes a while, and a killed build leaves a lock that hangs every later run. gloo does not
        # need them.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        limit = timedelta(seconds=collective_timeout + (NCCL_EXTRA_SECONDS if backend == "nccl" else 0))
        # The defaults for groups created later, including ZeRO's.
        dist.distributed_c10d.default_pg_timeout = dist.distributed_c10d.default_pg_nccl_timeout = limit
        choose_interface()
        with _joining():
            store = _join()
            if world_size() > 1:  # opens more connections to the store
                watchdog.start(store, rank(), world_size(), collective_timeout)
        group = dist.PrefixStore("world", store)
        with _joining():
            dist.init_process_group(backend, store=group, rank=rank(), world_size=world_size(), timeout=limit)
            deepspeed.init_distributed(backend, verbose=False, timeout=limit)
            if world_size() > 1 and backend == "nccl":
                _host_group = dist.new_group(backend="gloo")


def choose_interface() -> None:
    """Make gloo use the network interface that reaches MASTER_ADDR, unless GLOO_SOCKET_IFNAME is set.

    gloo would use the address of this machine's name, which on Debian and Ubuntu is 127.0.1.1.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ or num_ranks_here() == world_size():
        return
    with contextlib.suppress(OSError):  # MASTER_ADDR is unknown here: joining will say so
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        family, kind, _, _, target = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing
            own = probe.getsockname()[0]
        interfaces = psutil.net_if_addrs().items()
        names = [
            name for name, addresses in interfaces if own in {a.address.partition("%")[0] for a in addresses}
        ]
        if names and not ip_address(own).is_loopback:
            os.environ["GLOO_SOCKET_IFNAME"] = names[0]


def _join() -> dist.Store:
    """The store of the group, after all ranks have joined. Raises DistError if one does not join in time."""
    global _store
    if _store is None:
        is_one_machine = num_ranks_here() == world_size() or os.environ["MASTER_ADDR"] in LOOPBACK
        limit = timedelta(seconds=JOIN_SECONDS if is_one_machine else 40 * JOIN_SECONDS)
        _store = next(dist.rendezvous("env://", timeout=limit))[0]
        _store.set(f"rank {rank()} is here", "")
        for other in range(world_size()):
            _store.wait([f"rank {other} is here"], limit)
    return _store


@contextlib.contextmanager
def _joining() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        is_gloo = "Gloo" in str(error)
        if not (is_gloo or isinstance(error, (dist.DistNetworkError, dist.DistStoreError))):
            raise
        rank, address, port = (os.environ[name] for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
        say(
            f"error: rank {rank} cannot join the others at MASTER_ADDR={address} MASTER_PORT={port} "
            f"({first_line(error)}); check whether another rank has ended and why, choose a free port "
            "(deepspeed --master_port), and check that all machines can reach that address"
            + ", and each other by the interface GLOO_SOCKET_IFNAME"
            * is_gloo
        )
        raise SystemExit(BAD_INPUT if "EADDRINUSE" in str(error) else OTHER_RANK_FAILED) from error


def text_of_first_rank(key: str, make: Callable[[], str]) -> str:
    """Result of `make()` on rank 0, for checks that run before `start`. Every rank must call this.

    Rank 0 returns once all ranks have the text. Exits with OTHER_RANK_FAILED if they cannot be
    reached.
    """
    if world_size() == 1:
        return make()
    with _joining():
        store = _join()
        if rank() == 0:
            store.set(key, make())
        text = store.get(key).decode()
        if store.add(f"{key}: readers", 1) == world_size():
            store.set(f"{key}: is read", "")
        if rank() == 0:  # rank 0 may exit next, and the store with it
            store.wait([f"{key}: is read"])
        return text


def stop(code: int = 0, cause: BaseException | None = None) -> None:
    """Leave the process group, before this process exits with `code` because of `cause`."""
    global _store
    watchdog.shut_down(code, cause)
    for holder in list(RELEASED_AT_STOP):
        holder.release()
    if dist.is_initialized():
        dist.destroy_process_group()
    _store = None


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Context in which this rank computes on the CPU, whatever device it has."""
    token = _IS_ON_CPU.set(True)
    try:
        yield
    finally:
        _IS_ON_CPU.reset(token)


def has_gpu() -> bool:
    """Whether training runs on a CUDA device."""
    return not _IS_ON_CPU.get() and torch.cuda.is_available() and get_accelerator().device_name() == "cuda"


def has_hidden_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU that torch does not see, although the CPU was not requested."""
    is_unseen = not torch.cuda.is_available() and not IS_CPU_ASKED_FOR
    return is_unseen and any(os.path.exists(path) for path in NVIDIA_DRIVER)


def device() -> torch.device:
    """Device of this rank."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if has_gpu() else torch.device("cpu")


def choose_device() -> None:
    """Make this rank's GPU the current one; a CUDA call before that would open a context on the first GPU."""
    if has_gpu():
        torch.cuda.set_device(device())


def computes_bf16() -> bool:
    """Whether training runs on a GPU with native bf16; older GPUs emulate it, more slowly than fp32."""
    return has_gpu() and torch.cuda.is_bf16_supported(including_emulation=False)


@functools.cache  # asked at every product
def is_for_onednn(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies weights of this dtype on this machine's CPU; bf16 needs AVX-512."""
    return torch.backends.mkldnn.is_available() and (
        dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def dtype_name(flag: str = "") -> str:
    """Name of the dtype selected by --dtype: by default bf16 on a GPU with native bf16, else fp32.

    `auto`, which the start of a run replaces, is treated as the default.
    """
    return flag if flag not in ("", "auto") else ("bf16" if computes_bf16() else "fp32")


def rank() -> int:
    """Rank of this process; before `start` the launcher's, or 0."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Number of processes; before `start` the launcher's, or 1."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def num_ranks_here() -> int:
    """Number of processes on this machine, from torchrun or DeepSpeed's launcher; else 1."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)


def is_main() -> bool:
    """Whether this is the process that prints and writes."""
    return rank() == 0


@functools.cache
def print_once(text: str) -> None:
    """Print a line to standard error, on the first process, unless it was printed before."""
    if is_main():
        say(text)


def barrier() -> None:
    """Wait for all ranks. Every rank must call this."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier(_host_group)


def reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of `tensor` over ranks, as a new tensor on its device. Every rank must call this."""
    if world_size() == 1:
        return tensor
    total = tensor.clone()
    dist.all_reduce(total, group=None if total.is_cuda else _host_group)
    return total


def sum_float(value: float) -> float:
    """Sum of a number over ranks, in float64. Every rank must call this."""
    return float(reduce_sum(torch.tensor(float(value), dtype=torch.float64)))


def max_float(value: float, group: dist.ProcessGroup | None = None) -> float:
    """Maximum of a number over ranks. Every rank of the group (None: all ranks) must call this."""
    if world_size() == 1:
        return value
    largest = torch.tensor(value, dtype=torch.float64, device=device() if group else "cpu")
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group or _host_group)
    return float(largest)


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's `value` (picklable, tensors on the CPU), by rank. Every rank must call this."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value, group=group or _host_group)
    return values


def run_together(
    work: Callable[[], T], failure: type[Exception] | None = None, group: dist.ProcessGroup | None = None
) -> list[T]:
    """Results of `work()` of all ranks, by rank; no rank waits for one that has failed.

    Every rank must call this; one that has nothing to do passes `lambda: None`.

    Raises, if `work` fails on any rank: on such a rank its own error; on the others `failure`, with the rank
    and the text of the first error. Without `failure`: a ValueError with that text if the error was one, else
    a RuntimeError.
    """
    result, error = None, None
    try:
        result = work()
    except Exception as raised:  # of any kind: the other ranks wait for this one
        error = raised
    outcomes = gather_objects((result, error and (isinstance(error, ValueError), str(error))), group)
    if error is not None:
        raise error
    for failed_rank, (_, rank_failure) in enumerate(outcomes):
        if rank_failure:
            is_value_error, text = rank_failure
            if is_value_error and not failure:
                raise ValueError(text)
            raise (failure or RuntimeError)(f"rank {failed_rank} failed: {text}")
    return [result for result, _ in outcomes]


def make_on_first_rank(make: Callable[[], Path]) -> Path:
    """The folder that `make()` filled on rank 0; the other ranks wait for it. Every rank must call this.

    A machine that does not share rank 0's disk fills its own, on its first process. Raises as `run_together`.
    """
    if world_size() == 1:
        return make()
    # A separate group: tokenising millions of rows takes longer than a collective's usual time limit.
    group = dist.new_group(backend="gloo", timeout=timedelta(hours=24), group_desc=PATIENT)
    try:
        folder = run_together(make if is_main() else lambda: None, group=group)[0]
        fills_own = not folder.exists() and int(os.environ["LOCAL_RANK"]) == 0
        return run_together(make if fills_own else lambda: None, group=group)[rank()] or folder
    finally:
        dist.destroy_process_group(group)


def all_to_all(parts: list[torch.Tensor], group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
    """Tensors sent to this rank, by sender; parts[rank] (n,) are sent to `rank`. CPU tensors of one dtype.

    Every rank of the group (None: all ranks) must call this. A group's tensors pass through its device.
    """
    if len(parts) == 1:
        return parts
    where = device() if group else torch.device("cpu")
    group = group or _host_group
    sizes = torch.tensor([len(part) for part in parts], device=where)
    received_sizes = torch.empty_like(sizes)
    dist.all_to_all_single(received_sizes, sizes, group=group)
    counts = received_sizes.tolist()
    received = torch.empty(sum(counts), dtype=parts[0].dtype, device=where)
    dist.all_to_all_single(received, torch.cat(parts).to(where), counts, sizes.tolist(), group=group)
    return list(received.cpu().split(counts))
