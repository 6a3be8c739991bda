"""This machine's rates, measured in seconds and kept in a file of the user's cache, for plans of time."""

import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from common.models.loading import DTYPES
from common.models.model_flops import fastest_rate
from common.ranks import distributed
from common.runs.durable_files import read_object, write_file
from tools.machines import CARDS, Machines
from tools.traced_layers import LiveBytes

VERSION = 1
SECONDS = 1.0  # of each measurement
# Tokens of a pass, inputs and outputs of its products.
CPU_SHAPES = ((1024, 576, 576), (1024, 576, 1536), (1024, 1536, 576))
GPU_SHAPES = ((8192, 4096, 4096), (8192, 4096, 14336), (8192, 14336, 4096))
CPU_ELEMENTS, GPU_ELEMENTS = 2**22, 2**28  # of a tensor that operations without a product read
CPU_ATTENTION, GPU_ATTENTION = (9, 512, 64), (32, 4096, 128)  # heads, tokens, width of a head
TINY = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 16,
}
RATES = ("fp32", "bf16", "attention_fp32", "attention_bf16", "memory", "reads", "launch_seconds")


def file_of_measures() -> Path:
    """The file of this user's machine."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "triptych/machine.json"


def describe_device(device: str, num_ranks: int) -> dict[str, Any]:
    """What a measurement holds for: "cpu", whose cores the ranks share, or the name of a GPU."""
    facts = {"version": VERSION, "machine": platform.node(), "device": device, "torch": torch.__version__}
    return facts | ({"ranks": num_ranks} if device == "cpu" else {})


def measure_machine() -> dict[str, Any]:
    """Measure the devices of all ranks at once, write the file of the first, return its content.

    Raises OSError if it cannot be written.
    """
    num_ranks = distributed.world_size()
    device = torch.cuda.get_device_name() if distributed.has_gpu() else "cpu"
    rates = {
        **{name: product_rate(DTYPES[name]) for name in ("fp32", "bf16")},
        **{f"attention_{name}": attention_rate(DTYPES[name]) for name in ("fp32", "bf16")},
        "memory": memory_rate(),
        "reads": read_rate(),
        "launch_seconds": launch_seconds(),
        "near": link_rate() if num_ranks > 1 else 0.0,
    }
    # The mean of the ranks, which are alike.
    rates = {name: float(f"{distributed.sum_float(rate) / num_ranks:.4g}") for name, rate in rates.items()}
    facts = {
        **describe_device(device, num_ranks),
        "date": time.strftime("%Y-%m-%d"),
        "threads": torch.get_num_threads(),
        **rates,
    }
    if distributed.is_main():
        path = file_of_measures()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps(facts, indent=1) + "\n")
    return facts


def read_measures(device: str, num_ranks: int) -> tuple[dict[str, Any], str]:
    """The measurement of this machine's device and "", or {} and the reason if there is no valid one."""
    path = file_of_measures()
    start = f"torchrun --nproc_per_node {num_ranks}" if device == "cpu" and num_ranks > 1 else "python"
    cure = f"{start} -m tools.plan --measure"
    try:
        measured = read_object(path, version=int, date=str, threads=int, **dict.fromkeys(RATES, float))
    except ValueError as error:
        return {}, f"{error}: ignored; {cure}"
    if not measured:
        return {}, f"this machine is not measured: {cure}"
    wrong = [
        f"is of {name} {measured.get(name)}, not {value}"
        for name, value in describe_device(device, num_ranks).items()
        if measured.get(name) != value
    ]
    wrong += [f"has no valid {name!r}" for name in ("date", "threads") if not measured.get(name)]
    wrong += [f"has no valid {name!r}" for name in RATES if not (measured.get(name) or 0) > 0]
    if wrong:
        return {}, f"{path} {wrong[0]}: ignored; {cure}"
    return measured, ""


def machines_here(measured: dict[str, Any], dtype: str) -> Machines:
    """The machines of a measurement; links that were not measured are assumed: PCIe, Ethernet."""
    precision = "fp32" if dtype == "fp32" else "bf16"
    flops = measured[precision]
    of_attention = measured[f"attention_{precision}"] / flops
    return CARDS["l4-24g"]._replace(
        flops=flops,
        arithmetic_share=1.0,
        attention_share=of_attention,
        memory=measured["memory"],
        memory_share=1.0,
        near=measured.get("near", 0.0) / CARDS["l4-24g"].link_share or CARDS["l4-24g"].near,
        reads=measured["reads"],
        launch_seconds=measured["launch_seconds"],
        is_cpu=measured["device"] == "cpu",
    )


# ---- measuring ------------------------------------------------------------------------------------------


def seconds_of(run: Callable[[], Any]) -> float:
    """Seconds of the fastest call of those that fit into SECONDS, and of at least three after the first."""
    return 1 / fastest_rate([(1.0, run)], SECONDS, min_calls=4)


def on_device(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers of which gradients are taken."""
    return torch.randn(*shape, dtype=dtype, device=distributed.device(), requires_grad=True)


def product_rate(dtype: torch.dtype) -> float:
    """FLOP/s of linear layers of a training pass, forward and backward."""
    shapes = GPU_SHAPES if distributed.has_gpu() else CPU_SHAPES
    layers = [(on_device(n, i, dtype=dtype), on_device(o, i, dtype=dtype)) for n, i, o in shapes]

    def run() -> None:
        for inputs, weight in layers:
            outputs = F.linear(inputs, weight)
            torch.autograd.grad(outputs, (inputs, weight), outputs.detach())

    return sum(6 * n * i * o for n, i, o in shapes) / seconds_of(run)


def attention_rate(dtype: torch.dtype) -> float:
    """FLOP/s of causal attention, forward and backward, of the pairs that it needs."""
    heads, length, width = GPU_ATTENTION if distributed.has_gpu() else CPU_ATTENTION
    states = [on_device(1, heads, length, width, dtype=dtype) for _ in range(3)]

    def run() -> None:
        outputs = F.scaled_dot_product_attention(*states, is_causal=True)
        torch.autograd.grad(outputs, states, outputs.detach())

    return 6 * heads * length**2 * width / seconds_of(run)


@torch.no_grad()
def memory_rate() -> float:
    """Bytes per second that operations without a product read and write."""
    num_elements = GPU_ELEMENTS if distributed.has_gpu() else CPU_ELEMENTS
    one = on_device(num_elements)
    two = on_device(num_elements)
    # Three tensors of a sum and of a product, two of a function.
    return 4 * num_elements * 8 / seconds_of(lambda: (one + two, one * two, F.silu(one)))


@torch.no_grad()
def read_rate() -> float:
    """Bytes of fp32 weights per second that products of one token read, too many for a cache."""
    inner = 4096 if distributed.has_gpu() else 576
    weights = [on_device(4 * inner, inner) for _ in range(16)]
    inputs = on_device(1, inner)
    return 16 * 4 * 4 * inner**2 / seconds_of(lambda: [F.linear(inputs, weight) for weight in weights])


@torch.no_grad()
def launch_seconds() -> float:
    """Seconds of an operation of transformers' layers on one token, whose work is negligible."""
    model = LlamaForCausalLM(LlamaConfig(**TINY)).to(distributed.device())
    ids = torch.zeros(1, 1, dtype=torch.int64, device=distributed.device())
    with LiveBytes(nn.Module()) as live:
        model(input_ids=ids, use_cache=False)
    return seconds_of(lambda: model(input_ids=ids, use_cache=False)) / live.moved.launches


def link_rate() -> float:
    """Bytes per second that a rank receives from the others of its machine while gradients are summed."""
    gradients = torch.ones(2**22, device=distributed.device())
    num_ranks = distributed.world_size()
    took = []
    for _ in range(6):  # the ranks must make the same number of calls
        started = time.perf_counter()
        dist.all_reduce(gradients)
        gradients[0].item()  # waits for a GPU
        took.append(time.perf_counter() - started)
    return 2 * (num_ranks - 1) / num_ranks * 4 * gradients.numel() / min(took)
