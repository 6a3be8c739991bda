"""A save that fails on one of two ranks fails on both, and both load the same checkpoint."""

import multiprocessing
import os
import socket
from pathlib import Path

import pytest
import torch
from simple_parts import SimplePart, make_parts, versions

from common.ranks import distributed
from common.runs.checkpoints import SaveFailed, find_checkpoints, load_newest, save_checkpoint


class FailingPart(SimplePart):
    """Cannot be written on one rank."""

    def __init__(self, failing_rank: int) -> None:
        super().__init__(9)
        self.failing_rank = failing_rank

    def tensor_slices(self):
        if distributed.rank() == self.failing_rank:
            raise OSError(28, "No space left on device")
        return super().tensor_slices()


def be_a_rank(rank: int, port: int, folder: str, answers) -> None:
    """Save a good one, then ones that fail on a rank, and again a good one; tell what happened."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    distributed.start()
    told = []
    broken = [{"a": SimplePart(9), "b": FailingPart(rank)} for rank in range(2)]
    for step, parts in enumerate([make_parts(1), *broken, make_parts(4)], start=1):
        try:
            save_checkpoint(Path(folder), f"step-{step:06d}", parts, {}, 2)
            told.append("saved")
        except SaveFailed as error:
            told.append(str(error))
    if rank == 0:
        damaged = Path(folder) / "checkpoints" / "step-000004" / "model-rank-00001.safetensors"
        data = bytearray(damaged.read_bytes())
        data[-1] ^= 1
        damaged.write_bytes(data)
    distributed.barrier()
    parts = make_parts(-1)
    loaded = load_newest(find_checkpoints(Path(folder))[0], parts)
    answers.put((rank, told, loaded.name, sorted(versions(parts))))
    distributed.stop()


@pytest.mark.slow
def test_two_ranks_fail_and_load_alike(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=be_a_rank, args=(r, port, str(tmp_path), answers)) for r in range(2)]
    for process in ranks:
        process.start()
    found = sorted(answers.get(timeout=240) for _ in ranks)
    for process in ranks:
        process.join(60)
    (_, told, name, loaded), (_, *others) = found
    assert others == [told, name, loaded], "both ranks say the same"
    assert told[0] == told[3] == "saved"
    assert told[1:3] == [f"rank {r}: [Errno 28] No space left on device" for r in range(2)]
    # The newest one is damaged in a file that the second rank looks through.
    assert (name, loaded) == ("step-000001", [1])
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-000001", "step-000004"]
    files = sorted(p.name for p in (tmp_path / "checkpoints" / "step-000001").glob("*.safetensors"))
    assert files == [f"{part}-rank-0000{r}.safetensors" for part in ("loop", "model") for r in range(2)]
