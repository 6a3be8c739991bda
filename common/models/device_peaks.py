"""What devices can do at most: presets by kind, from the makers' data sheets, and this process's own."""

import time
from typing import NamedTuple

import torch

MEASURED_SECONDS = 0.1


class Device(NamedTuple):
    """One GPU, or one CPU process."""

    memory_gib: float
    tflops_16bit: float
    tflops_fp32: float  # without TF32, torch's default
    bandwidth_gb_s: float
    intra_node_gb_s: float  # NVLink, or PCIe where there is none
    inter_node_gb_s: float  # the usual network card of such a machine, for each GPU
    host_link_gb_s: float  # PCIe to the CPU's memory
    reserved_gib: float  # CUDA context, NCCL, fragments; on a CPU the libraries of a process


DEVICES = {
    "a6000-48g": Device(48, 154.8, 38.7, 768, 25, 12.5, 25, 2.0),
    "a100-40g": Device(40, 312, 19.5, 1555, 300, 25, 25, 2.0),
    "a100-80g": Device(80, 312, 19.5, 2039, 300, 25, 25, 2.0),
    "h100-80g": Device(80, 989, 67, 3350, 450, 50, 50, 2.0),
    "h200": Device(140, 989, 67, 4800, 450, 50, 50, 2.0),
    "cpu": Device(16, 0.1, 0.1, 20, 5, 1, 20, 0.7),
}


def own_peak_flops(dtype: torch.dtype) -> float:
    """Return the FLOPs a second that this process's device could do at most in `dtype`.

    A GPU of DEVICES has its data sheet's; any other device is asked for matrix products, for
    MEASURED_SECONDS: on a CPU with the threads that this process has, while all its other ranks do the same.
    """
    is_gpu = torch.cuda.is_available()
    name = torch.cuda.get_device_name().lower() if is_gpu else "cpu"
    for kind, device in DEVICES.items():
        if is_gpu and kind.partition("-")[0] in name:
            return 1e12 * (device.tflops_fp32 if dtype == torch.float32 else device.tflops_16bit)
    size = 4096 if is_gpu else 512
    a = torch.ones(size, size, dtype=dtype, device="cuda" if is_gpu else "cpu")
    best, end = 0.0, time.monotonic() + MEASURED_SECONDS
    torch.mm(a, a)  # the first product sets the library up
    while best == 0.0 or time.monotonic() < end:
        if is_gpu:
            torch.cuda.synchronize()
        started = time.perf_counter()
        torch.mm(a, a)
        if is_gpu:
            torch.cuda.synchronize()
        best = max(best, 2 * size**3 / (time.perf_counter() - started))
    return best
