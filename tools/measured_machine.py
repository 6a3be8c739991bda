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
from common.ranks import distributed
from common.runs.durable_files import read_object, write_file
from tools.machines import CARDS, LAYER_SECONDS, LINK_SHARE, PCIE_4, RING, TREE, Machines
from tools.traced_layers import LiveBytes

VERSION = 1
SECONDS = 1.0  # of each measurement
# Tokens of a pass, inputs and outputs of its products.
CPU_SHAPES = ((1024, 576, 576), (1024, 576, 1536), (1024, 1536, 576))
GPU_SHAPES = ((8192, 4096, 4096), (8192, 4096, 14336), (8192, 14336, 4096))
CPU_ELEMENTS, GPU_ELEMENTS = 2**22, 2**28  # of a tensor that operations without a product read
TINY = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
TINY |= {"num_hidden_layers": 16}
RATES = ("fp32", "bf16", "attention_fp32", "attention_bf16", "memory", "reads", "launch_seconds")


def file_of_measures() -> Path:
    """The file of this user's machine."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "triptych/machine.json"


def describe_device(num_ranks: int) -> dict[str, Any]:
    """What a measurement holds for; on a CPU the ranks share the cores."""
    name = torch.cuda.get_device_name() if distributed.has_gpu() else "cpu"
    facts = {"version": VERSION, "machine": platform.node(), "device": name, "torch": torch.__version__}
    return facts | ({} if distributed.has_gpu() else {"ranks": num_ranks})


def measure_machine() -> dict[str, Any]:
    """Measure the devices of all ranks at once, write the file of the first, return its content.

    Raises OSError if it cannot be written.
    """
    num_ranks = distributed.world_size()
    facts: dict[str, Any] = describe_device(num_ranks) | {"date": time.strftime("%Y-%m-%d")}
    facts["threads"] = torch.get_num_threads()
    rates = {}
    for name in ("fp32", "bf16"):
        rates[name] = product_rate(DTYPES[name])
        rates[f"attention_{name}"] = attention_rate(DTYPES[name])
    rates["memory"] = memory_rate()
    rates["reads"] = read_rate()
    rates["launch_seconds"] = launch_seconds()
    rates["near"] = link_rate() if num_ranks > 1 else 0.0
    for name in rates:  # of the slowest rank
        sign = 1 if name == "launch_seconds" else -1
        facts[name] = float(f"{sign * distributed.max_float(sign * rates[name]):.4g}")
    if distributed.is_main():
        path = file_of_measures()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps(facts, indent=1) + "\n")
    return facts


def read_measures(num_ranks: int) -> tuple[dict[str, Any], str]:
    """The measurement of this machine; {} with a reason if there is none, or none that holds."""
    path = file_of_measures()
    cure = "python -m tools.plan --measure"
    try:
        measured = read_object(path, version=int, **dict.fromkeys(RATES, float))
    except ValueError as error:
        return {}, f"{error}: ignored; {cure}"
    if not measured:
        return {}, f"this machine is not measured: {cure}"
    for name, value in describe_device(num_ranks).items():
        if measured.get(name) != value:
            return {}, f"{path} is of {name} {measured.get(name)}, not {value}: ignored; {cure}"
    wrong = next((name for name in RATES if not measured.get(name, 0) > 0), None)
    if wrong:
        return {}, f"{path} has no positive {wrong!r}: ignored; {cure}"
    return measured, ""


def machines_here(measured: dict[str, Any], dtype: str) -> Machines:
    """The machines of a measurement; links that were not measured are assumed: PCIe, Ethernet."""
    precision = "fp32" if dtype == "fp32" else "bf16"
    flops = measured[precision]
    card = CARDS["l4-24g"]
    return Machines(
        flops,
        measured["memory"],
        measured.get("near", 0.0) / LINK_SHARE or card.near,
        card.far,
        PCIE_4,
        1.0,
        measured[f"attention_{precision}"] / flops,
        1.0,
        LINK_SHARE,
        measured["reads"],
        LAYER_SECONDS,
        measured["launch_seconds"],
        RING,
        TREE,
        is_cpu=measured["device"] == "cpu",
    )


# ---- measuring ------------------------------------------------------------------------------------------


def seconds_of(run: Callable[[], Any]) -> float:
    """Seconds of a call, the median of those that fit into SECONDS, and at least three after the first."""
    wait = torch.cuda.synchronize if distributed.has_gpu() else lambda: None
    run()
    wait()
    end = time.perf_counter() + SECONDS
    took: list[float] = []
    while len(took) < 3 or time.perf_counter() < end:
        started = time.perf_counter()
        run()
        wait()
        took.append(time.perf_counter() - started)
    return sorted(took)[len(took) // 2]


def product_rate(dtype: torch.dtype) -> float:
    """FLOP/s of linear layers of a training pass, forward and backward."""
    where = {"dtype": dtype, "device": distributed.device()}
    layers = []
    flops = 0
    for rows, inner, columns in GPU_SHAPES if distributed.has_gpu() else CPU_SHAPES:
        inputs = torch.randn(rows, inner, **where, requires_grad=True)
        layers.append((inputs, torch.randn(columns, inner, **where, requires_grad=True)))
        flops += 6 * rows * inner * columns

    def run() -> None:
        for inputs, weight in layers:
            outputs = F.linear(inputs, weight)
            torch.autograd.grad(outputs, (inputs, weight), outputs.detach())

    return flops / seconds_of(run)


def attention_rate(dtype: torch.dtype) -> float:
    """FLOP/s of causal attention, forward and backward, of the pairs that it needs."""
    heads, length, width = (32, 4096, 128) if distributed.has_gpu() else (9, 512, 64)
    where = {"dtype": dtype, "device": distributed.device(), "requires_grad": True}
    states = [torch.randn(1, heads, length, width, **where) for _ in range(3)]

    def run() -> None:
        outputs = F.scaled_dot_product_attention(*states, is_causal=True)
        torch.autograd.grad(outputs, states, outputs.detach())

    return 6 * heads * length**2 * width / seconds_of(run)


def memory_rate() -> float:
    """Bytes per second that operations without a product read and write."""
    num_elements = GPU_ELEMENTS if distributed.has_gpu() else CPU_ELEMENTS
    one, two = (torch.randn(num_elements, device=distributed.device()) for _ in range(2))
    num_bytes = 4 * num_elements * 8  # three tensors of a sum and of a product, two of a function

    def run() -> None:
        torch.add(one, two)
        torch.mul(one, two)
        F.silu(one)

    return num_bytes / seconds_of(run)


def read_rate() -> float:
    """Bytes of fp32 weights per second that products of one token read, in sizes that no cache holds."""
    inner = 4096 if distributed.has_gpu() else 576
    where = {"device": distributed.device()}
    weights = [torch.randn(4 * inner, inner, **where) for _ in range(16)]
    inputs = torch.randn(1, inner, **where)

    def run() -> None:
        for weight in weights:
            F.linear(inputs, weight)

    with torch.no_grad():
        return sum(4 * weight.numel() for weight in weights) / seconds_of(run)


def launch_seconds() -> float:
    """Seconds of an operation of transformers' layers on one token, whose work is negligible."""
    model = LlamaForCausalLM(LlamaConfig(**TINY)).to(distributed.device())
    ids = torch.zeros(1, 1, dtype=torch.int64, device=distributed.device())
    with torch.no_grad():
        with LiveBytes(nn.Module()) as live:
            model(input_ids=ids, use_cache=False)
        return seconds_of(lambda: model(input_ids=ids, use_cache=False)) / live.moved.launches


def link_rate() -> float:
    """Bytes per second that a rank receives from the others of its machine in a gather."""
    part = torch.ones(2**22, device=distributed.device())
    parts = [torch.empty_like(part) for _ in range(distributed.world_size())]
    # The ranks must make the same number of calls.
    dist.all_gather(parts, part)
    distributed.barrier()
    started = time.perf_counter()
    for _ in range(5):
        dist.all_gather(parts, part)
    parts[0].sum().item()
    return 5 * 4 * part.numel() * (len(parts) - 1) / (time.perf_counter() - started)
