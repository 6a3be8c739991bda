"""Types of devices: memory, and rates from the makers' data sheets, of dense products with fp32 accumulation.
Does not import torch.
"""

import re
from typing import NamedTuple


class Device(NamedTuple):
    """One GPU, or one CPU process."""

    memory_gib: float  # usable by torch: less than the nominal size
    tflops_16bit: float
    tflops_fp32: float  # without TF32, torch's default


DEVICES = {
    "t4-16g": Device(14.6, 65, 8.1),
    "l4-24g": Device(22, 121, 30.3),
    "a10-24g": Device(22, 125, 31.2),
    "3090-24g": Device(23.6, 71, 35.6),
    "4090-24g": Device(23.6, 165.2, 82.6),
    "5090-32g": Device(31.3, 209.5, 104.8),
    "l40s-48g": Device(44.4, 362, 91.6),
    "a6000-48g": Device(47.4, 154.8, 38.7),
    "a100-40g": Device(39.4, 312, 19.5),
    "a100-80g": Device(79.1, 312, 19.5),
    "h100-80g": Device(79.1, 989, 67),
    "h200": Device(139.7, 989, 67),
    "b200": Device(178, 2250, 80),
    "mi300x": Device(191, 1307.4, 163.4),
    "cpu": Device(16, 0.1, 0.1),
}


def kind_of(name: str) -> str | None:
    """The key in DEVICES of a GPU's name, by its whole words: an "NVIDIA A100-SXM4-80GB" is not an A10. None
    for other devices, and for a part of one (MIG).
    """
    words = re.findall(r"\w+", name.lower())
    kinds = [kind for kind in DEVICES if kind.partition("-")[0] in words and "mig" not in words]
    of_size = [kind for kind in kinds if f"{kind.partition('-')[2]}b" in words]  # 40g, 80g
    return next(iter(of_size + kinds), None)
