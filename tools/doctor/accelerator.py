"""GPUs and the kernels that can be made for them. torch and deepspeed come from the caller, or not at all."""

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version

from tools.findings import Finding

_GIB = 2**30
_SMI_SECONDS = 20.0
MIN_FREE_SHARE = 0.5  # of a GPU's memory; less is somebody else's


def read_driver() -> str:
    """Return what nvidia-smi says of the first GPU's name and driver, "" where there is none."""
    command = shutil.which("nvidia-smi")
    if not command:
        return ""
    words = [command, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_SMI_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout.strip().splitlines() or [""])[0] if done.returncode == 0 else ""


def check_gpus(has_torch: bool) -> Iterator[Finding]:
    """Name the GPUs that torch sees, and why it may not see one that is there."""
    driver = read_driver()
    if not has_torch:
        yield Finding("GPUs", f"torch is missing; nvidia-smi: {driver or 'not found'}")
        return
    torch = sys.modules["torch"]
    if not torch.cuda.is_available():
        if driver and not torch.version.cuda:
            text = f"nvidia-smi sees {driver}, but this torch {torch.__version__} is built without CUDA"
            yield Finding("GPUs", text, False, "install torch's CUDA build")
        elif driver:
            text = f"nvidia-smi sees {driver}, but torch (CUDA {torch.version.cuda}) does not"
            cure = "look at CUDA_VISIBLE_DEVICES; the driver may be too old for that CUDA"
            yield Finding("GPUs", text, False, cure)
        else:
            yield Finding("GPUs", "none: programs run on the CPU, in fp32 by default")
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        major, minor = torch.cuda.get_device_capability(index)
        text = (
            f"{torch.cuda.get_device_name(index)}, {free / _GIB:.1f} of {total / _GIB:.1f} GiB free, compute "
            f"capability {major}.{minor}, bf16 {'yes' if torch.cuda.is_bf16_supported() else 'no'}"
        )
        is_used = free < MIN_FREE_SHARE * total
        cure = "another process holds its memory: nvidia-smi" if is_used else ""
        yield Finding(f"GPU {index}", text, None if is_used else True, cure)
    yield Finding(
        "CUDA", f"torch's {torch.version.cuda}, driver {driver.split(',')[-1].strip() or '?'}", True
    )


def check_flash_attention(has_torch: bool) -> Iterator[Finding]:
    """Say whether --packed has flash-attn's kernels."""
    has_gpu = has_torch and sys.modules["torch"].cuda.is_available()
    if importlib.util.find_spec("flash_attn") is None:
        if has_gpu:
            cure = (
                "pip install --no-build-isolation -r requirements-gpu.txt: it is compiled, which takes long"
            )
            yield Finding("flash-attn", "not installed: --packed uses torch's own kernel", None, cure)
        else:
            yield Finding("flash-attn", "not installed, and not needed without a GPU")
        return
    import flash_attn

    yield Finding("flash-attn", getattr(flash_attn, "__version__", None) or version("flash-attn"), True)


def check_kernels(has_deepspeed: bool) -> Iterator[Finding]:
    """Say which of DeepSpeed's kernels are built or could be; the programs need none of them."""
    tools = [name for name in ("g++", "ninja", "nvcc") if shutil.which(name)]
    lacking = [name for name in ("g++", "ninja", "nvcc") if name not in tools]
    text = f"{', '.join(tools) or 'none'} found" + (f"; no {', '.join(lacking)}" if lacking else "")
    yield Finding("compilers", f"{text}; only some keys of --ds_config compile anything")
    if not has_deepspeed:
        yield Finding("DeepSpeed kernels", "deepspeed is missing")
        return
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops import __compatible_ops__ as compatible

    built = sorted(name for name, is_there in installed_ops.items() if is_there)
    can = sorted(name for name, is_so in compatible.items() if is_so and name not in built)
    text = f"built: {', '.join(built) or 'none'}; can be built when needed: {', '.join(can) or 'none'}"
    yield Finding("DeepSpeed kernels", text, True)
