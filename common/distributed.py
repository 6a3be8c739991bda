"""Processes and devices: start-up, rank and world, seeds, barriers, reductions.

Every program runs alike under `deepspeed`, `torchrun` and plain `python`; the last is a world of one.
"""

import os
import random
import socket
from datetime import timedelta
from typing import Any

import numpy
import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would find out too, with a warning

import deepspeed  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402


def start(local_rank: int = -1) -> None:
    """Join the process group: nccl on GPUs, gloo on CPUs; a lone process becomes a world of one.

    Every rank must call this once, before any model is built.
    """
    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(
            RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
    os.environ.setdefault("LOCAL_RANK", str(max(local_rank, 0)))
    if has_gpu():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        backend = "nccl" if has_gpu() else "gloo"
        # DeepSpeed would compile its shared-memory collectives at the first start on a CPU: that needs a
        # compiler, takes a while, and a killed build leaves a lock that hangs every later run. gloo needs
        # none of this.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(backend, verbose=False, timeout=timedelta(minutes=30))


def stop() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def has_gpu() -> bool:
    """Whether training runs on a CUDA device."""
    return torch.cuda.is_available() and get_accelerator().device_name() == "cuda"


def device() -> torch.device:
    """Return the device of this rank."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if has_gpu() else torch.device("cpu")


def default_dtype_name() -> str:
    """Return `bf16` on a GPU that computes in it, else `fp32`."""
    return "bf16" if has_gpu() and torch.cuda.is_bf16_supported() else "fp32"


def rank() -> int:
    """Return this process's number, 0 before start-up."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return the number of processes, 1 before start-up."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def local_world_size() -> int:
    """Return the number of processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", "1")))


def is_main() -> bool:
    """Whether this is the process that prints and writes."""
    return rank() == 0


def barrier() -> None:
    """Wait for all ranks. Every rank must call this."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of `tensor` over ranks, as a new tensor. Every rank must call this."""
    if world_size() == 1:
        return tensor
    total = tensor.clone().to(device())
    dist.all_reduce(total)
    return total.to(tensor.device)


def sum_float(value: float) -> float:
    """Return the sum of a number over ranks, in float64. Every rank must call this."""
    return float(reduce_sum(torch.tensor(float(value), dtype=torch.float64)))


def max_float(value: float) -> float:
    """Return the largest of a number over ranks. Every rank must call this."""
    if world_size() == 1:
        return value
    largest = torch.tensor(value, dtype=torch.float64, device=device())
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def gather_objects(value: Any) -> list[Any]:
    """Return every rank's `value` (any picklable, tensors on the CPU), by rank. Every rank must call this."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def seed_everything(seed: int) -> None:
    """Seed python, numpy and torch alike on all ranks: new weights must be equal everywhere."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
