"""Starts a benchmark again as several ranks of this machine."""

import os
import socket
import subprocess
import sys

import torch


def launch_ranks(script: str, num_ranks: int, words: list[str], *, limit_seconds: int) -> None:
    """Run `script words` by torchrun, one thread a rank.

    Raises CalledProcessError when a rank fails, TimeoutExpired after `limit_seconds`.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(num_ranks), "--master_port", port]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if torch.cuda.device_count() < num_ranks:
        environment["CUDA_VISIBLE_DEVICES"] = ""  # nccl wants a device for each rank: all use the CPU
    command = [sys.executable, *launcher, script, *words]
    subprocess.run(command, env=environment, check=True, timeout=limit_seconds)
