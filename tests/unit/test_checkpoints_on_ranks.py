"""A save that fails on one of two ranks fails on both, and both load the same checkpoint."""

import multiprocessing
import os
import socket
from pathlib import Path

import pytest
import torch
from simple_parts import SimplePart, make_parts, versions

from common.ranks import distributed
from common.runs.checkpoints import CheckpointWriter, SaveFailed, find_checkpoints, load_newest
from common.runs.saved_state import TensorSlice


class FailingPart(SimplePart):
    """Cannot be written on one rank."""

    def __init__(self, failing_rank: int) -> None:
        super().__init__(9)
        self.failing_rank = failing_rank

    def tensor_slices(self):
        if distributed.rank() == self.failing_rank:
            raise OSError(28, "No space left on device")
        return super().tensor_slices()


class BrokenPlace(SimplePart):
    """Gives a piece that safetensors cannot take, on the last rank."""

    def tensor_slices(self):
        tensor = torch.zeros(2).to_sparse() if distributed.rank() else torch.zeros(2)
        yield TensorSlice("tensor", 0, tensor)


def be_a_rank(rank: int, port: int, folder: str, answers) -> None:
    """Save a good one, then ones that fail on a rank, and again a good one; tell what happened."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    distributed.start()
    writer, told = CheckpointWriter(Path(folder), 2), []
    broken = [{"a": SimplePart(9), "b": FailingPart(0)}, {"a": SimplePart(9), "b": FailingPart(1)}]
    for step, parts in enumerate([make_parts(1), *broken, {"a": BrokenPlace(9)}, make_parts(5)], start=1):
        try:
            writer.save(f"step-{step:06d}", parts)
            told.append("saved")
        except SaveFailed as error:
            told.append(str(error))
    if rank == 0:
        damaged = Path(folder) / "checkpoints" / "step-000005" / "model-rank-00001.safetensors"
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
    assert told[0] == told[4] == "saved"
    assert told[1:3] == [f"rank {r}: [Errno 28] No space left on device" for r in range(2)]
    assert told[3].startswith("rank 1: ") and "memory format" in told[3]
    # The newest one is damaged in a file that the second rank looks through.
    assert (name, loaded) == ("step-000001", [1])
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-000001", "step-000005"]
    files = sorted(p.name for p in (tmp_path / "checkpoints" / "step-000001").glob("*.safetensors"))
    assert files == [f"{part}-rank-0000{r}.safetensors" for part in ("loop", "model") for r in range(2)]
