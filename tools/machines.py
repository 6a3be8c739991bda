"""Rates of the machines that plans of time are made for: of data sheets, or of this machine as measured.

Peaks are the makers' data sheets (also in common/ranks/devices.py); the shares of them that are reached, and
where those come from, are below. `python -m tools.plan --measure` measures a machine instead.
"""

from typing import NamedTuple

from common.ranks.devices import DEVICES


class Machines(NamedTuple):
    """Devices and their links: rates in FLOPs or bytes per second, one way; latencies in seconds.

    link_share is assumed. memory_share: copies on an H200 reach 3,958 GB/s (docs/performance.md).
    layer_seconds: DeepSpeed's token steps of OPT-1.3B at batch 8 on an H100 (its pull request 8271), 2.8 ms
    by CUDA graph, minus memory reads, per layer (of 24). launch_seconds: without a graph their 451 operations
    take 5.2 ms there and 10 ms on the host of our H200, 11.5 and 22 microseconds each. ring, tree: the
    latencies of NCCL's own model (src/graph/tuning.cc, LL128).
    """

    flops: float
    memory: float
    near: float  # to a device in the same machine
    far: float  # to another machine, per device
    host: float  # to the CPU's memory
    arithmetic_share: float  # share of `flops` that a model's matrix products reach
    attention_share: float  # share of `flops` that attention kernels reach
    memory_share: float = 0.82  # share of `memory` that operations without a product reach
    link_share: float = 0.8  # share of `near`, `far`, `host` that collectives and copies reach
    reads: float = 0.0  # bytes of weights per second that a token step reads, as reached
    layer_seconds: float = 75e-6  # per layer of a token step by CUDA graph, besides memory reads
    launch_seconds: float = 16e-6  # an operation's start, without a graph
    # Of a gather: start, hop inside a machine, hop between machines.
    ring: tuple[float, float, float] = (14e-6, 1.9e-6, 4.0e-6)
    tree: tuple[float, float, float] = (14e-6, 1.25e-6, 8.5e-6)  # of a small all-reduce, in the same order
    is_cpu: bool = False  # nothing overlaps: the launching thread computes too


# memory, and links in a machine and to its CPU: data sheets (NVLink, else PCIe x16). Between machines:
# InfiniBand of 200 Gbit/s per GPU beside A100s, as in DeepSpeed-Chat's machines, of 400 beside later ones, as
# in a DGX; of cards that are not for data centres, Ethernet of 10 Gbit/s (assumed).
#
# Share of products: first the fastest one, of bf16's peak, by mamf-finder.py
# (github.com/stas00/ml-engineering, compute/accelerator, read 2026-11) on an A100, H100, MI300X; assumed .8
# for the others, and 1 for GeForce cards, which run above the clock of their data sheet. Of that, a model's
# own shapes at the clock of a long run reach SHAPES_SHARE: .7 in OPT-1.3B's scoring pass of 6,144 tokens on
# an H200 (docs/performance.md), and in torchtune's SFT of Llama-3.2-3B on an A100.
#
# Share of attention: FlashAttention-2 reaches .5 to .73 on an A100 (arXiv:2307.08691), .35 on an H100
# (arXiv:2407.08608), whose newer units its kernels do not use.
SHAPES_SHARE = 0.7
CARDS = {
    "t4-16g": Machines(0, 0.32e12, 16e9, 1.25e9, 16e9, 0.8, 0.6),
    "l4-24g": Machines(0, 0.3e12, 32e9, 1.25e9, 32e9, 0.8, 0.6),
    "a10-24g": Machines(0, 0.6e12, 32e9, 1.25e9, 32e9, 0.8, 0.6),
    "3090-24g": Machines(0, 0.936e12, 32e9, 1.25e9, 32e9, 1.0, 0.6),
    "4090-24g": Machines(0, 1.008e12, 32e9, 1.25e9, 32e9, 1.0, 0.6),
    "5090-32g": Machines(0, 1.792e12, 64e9, 1.25e9, 64e9, 1.0, 0.6),
    "l40s-48g": Machines(0, 0.864e12, 32e9, 1.25e9, 32e9, 0.8, 0.6),
    "a6000-48g": Machines(0, 0.768e12, 32e9, 1.25e9, 32e9, 0.8, 0.6),
    "a100-40g": Machines(0, 1.555e12, 300e9, 25e9, 32e9, 0.869, 0.6),
    "a100-80g": Machines(0, 2.039e12, 300e9, 25e9, 32e9, 0.869, 0.6),
    "h100-80g": Machines(0, 3.35e12, 450e9, 50e9, 64e9, 0.803, 0.35),
    "h200": Machines(0, 4.8e12, 450e9, 50e9, 64e9, 0.803, 0.35),
    "b200": Machines(0, 8e12, 900e9, 50e9, 64e9, 0.8, 0.35),
    "mi300x": Machines(0, 5.3e12, 448e9, 50e9, 64e9, 0.514, 0.35),
}  # without FLOP/s: those of DEVICES in a run's dtype


def machines_of_kind(kind: str, dtype: str = "bf16") -> Machines | None:
    """Machines of a device of DEVICES, computing in `dtype`; None for a CPU, whose rates are not known."""
    if kind not in CARDS:
        return None
    card = CARDS[kind]
    tflops = DEVICES[kind].tflops_fp32 if dtype == "fp32" else DEVICES[kind].tflops_16bit
    share = card.arithmetic_share * SHAPES_SHARE
    reads = card.memory * card.memory_share
    return card._replace(flops=1e12 * tflops, arithmetic_share=share, reads=reads)


# A process on two cores of a CPU that is not measured: near enough to compare flags, not to tell seconds.
CPU = CARDS["l4-24g"]._replace(
    flops=1e11,
    arithmetic_share=0.7,
    attention_share=0.3,
    memory=2e10,
    reads=2e10,
    launch_seconds=8e-6,
    is_cpu=True,
)
