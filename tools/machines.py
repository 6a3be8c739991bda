"""Rates of the machines that plans of time are made for: of data sheets, or of this machine as measured.

Peaks are the makers' data sheets (also in common/ranks/devices.py); the shares of them that are reached, and
where those come from, are below. `python -m tools.plan --measure` measures a machine instead.
"""

from typing import NamedTuple

from common.ranks.devices import DEVICES


class Machines(NamedTuple):
    """Devices and their links: rates in FLOPs or bytes per second, one way; latencies in seconds."""

    flops: float
    memory: float
    near: float  # to a device in the same machine
    far: float  # to another machine, per device
    host: float  # to the CPU's memory
    arithmetic_share: float  # share of `flops` that a model's matrix products reach
    attention_share: float  # share of `flops` that attention kernels reach
    memory_share: float  # share of `memory` that operations without a product reach
    link_share: float  # share of `near`, `far`, `host` that collectives and copies reach
    reads: float  # bytes of weights per second that a token step reads, as reached
    layer_seconds: float  # per layer of a token step by CUDA graph, besides memory reads
    launch_seconds: float  # an operation's start, without a graph
    ring: tuple[float, float, float]  # latencies of a gather: start, hop in a machine, hop between
    tree: tuple[float, float, float]  # latencies of a small all-reduce, in the same order
    is_cpu: bool = False  # nothing overlaps: the launching thread computes too


class Card(NamedTuple):
    """Facts of a device beside those in DEVICES: bytes per second, and shares of its peak."""

    memory: float
    near: float
    far: float
    host: float
    best_share: float  # by the fastest matrix product
    attention_share: float


PCIE_3, PCIE_4, PCIE_5 = 16e9, 32e9, 64e9  # x16, one way
ETHERNET = 1.25e9  # 10 Gbit/s: assumed between machines with cards that are not of a data centre
# best_share, of bf16's peak: the fastest product by mamf-finder.py (github.com/stas00/ml-engineering,
# compute/accelerator, read 2026-11) on an A100, H100, MI300X; assumed for the others, where GeForce cards run
# above the clock of their data sheet. attention_share: FlashAttention-2 reaches .5 to .73 on an A100
# (arXiv:2307.08691), .35 on an H100 (arXiv:2407.08608), whose newer units its kernels do not use.
ASSUMED, GEFORCE = 0.8, 1.0
AMPERE, LATER = 0.6, 0.35
# memory and near: data sheets (NVLink, else PCIe). far: InfiniBand of 200 Gbit/s per GPU beside A100s, as in
# DeepSpeed-Chat's machines, of 400 beside later ones, as in a DGX.
CARDS = {
    "t4-16g": Card(0.32e12, PCIE_3, ETHERNET, PCIE_3, ASSUMED, AMPERE),
    "l4-24g": Card(0.3e12, PCIE_4, ETHERNET, PCIE_4, ASSUMED, AMPERE),
    "a10-24g": Card(0.6e12, PCIE_4, ETHERNET, PCIE_4, ASSUMED, AMPERE),
    "3090-24g": Card(0.936e12, PCIE_4, ETHERNET, PCIE_4, GEFORCE, AMPERE),
    "4090-24g": Card(1.008e12, PCIE_4, ETHERNET, PCIE_4, GEFORCE, AMPERE),
    "5090-32g": Card(1.792e12, PCIE_5, ETHERNET, PCIE_5, GEFORCE, AMPERE),
    "l40s-48g": Card(0.864e12, PCIE_4, ETHERNET, PCIE_4, ASSUMED, AMPERE),
    "a6000-48g": Card(0.768e12, PCIE_4, ETHERNET, PCIE_4, ASSUMED, AMPERE),
    "a100-40g": Card(1.555e12, 300e9, 25e9, PCIE_4, 0.869, AMPERE),
    "a100-80g": Card(2.039e12, 300e9, 25e9, PCIE_4, 0.869, AMPERE),
    "h100-80g": Card(3.35e12, 450e9, 50e9, PCIE_5, 0.803, LATER),
    "h200": Card(4.8e12, 450e9, 50e9, PCIE_5, 0.803, LATER),
    "b200": Card(8e12, 900e9, 50e9, PCIE_5, ASSUMED, LATER),
    "mi300x": Card(5.3e12, 448e9, 50e9, PCIE_5, 0.514, LATER),
}
MEMORY_SHARE = 0.82  # copies on an H200 reach 3,958 GB/s (docs/performance.md)
LINK_SHARE = 0.8  # assumed
# Of the fastest product: a model's own shapes, at the clock of a long run. OPT-1.3B's scoring pass of 6,144
# tokens on an H200 reaches .7 (docs/performance.md), torchtune's SFT of Llama-3.2-3B on an A100 as well.
SHAPES_SHARE = 0.7
# DeepSpeed's token steps of OPT-1.3B at batch 8 on an H100 (its pull request 8271): 2.8 ms by CUDA graph,
# minus memory reads, per layer (of 24). Without a graph its 451 operations take 5.2 ms there and 10 ms on the
# host of our H200 (docs/performance.md): 11.5 and 22 microseconds each.
LAYER_SECONDS = 75e-6
LAUNCH_SECONDS = 16e-6
# The latencies of NCCL's own model (src/graph/tuning.cc, LL128).
RING = (14e-6, 1.9e-6, 4.0e-6)
TREE = (14e-6, 1.25e-6, 8.5e-6)


def machines_of_kind(kind: str, dtype: str = "bf16") -> Machines | None:
    """Machines of a device of DEVICES, computing in `dtype`; None for a CPU, whose rates are not known."""
    if kind not in CARDS:
        return None
    card = CARDS[kind]
    device = DEVICES[kind]
    tflops = device.tflops_fp32 if dtype == "fp32" else device.tflops_16bit
    return Machines(
        1e12 * tflops,
        card.memory,
        card.near,
        card.far,
        card.host,
        card.best_share * SHAPES_SHARE,
        card.attention_share,
        MEMORY_SHARE,
        LINK_SHARE,
        card.memory * MEMORY_SHARE,
        LAYER_SECONDS,
        LAUNCH_SECONDS,
        RING,
        TREE,
    )
