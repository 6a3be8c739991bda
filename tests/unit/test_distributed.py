"""common/ranks/distributed.py on GPUs: two ranks, where gloo plays nccl's part."""

import os
import socket
import time
from pathlib import Path

import pytest
import torch
from pretended_gpu import pretended_gpu
from simple_parts import make_parts

from common.ranks import distributed
from common.ranks.failure_detector import count_collectives
from common.runs.checkpoints import save_checkpoint
from step3_ppo.trainer_state import ExponentialMovingAverage


def be_a_rank(rank: int, folder: Path, port: int) -> None:
    torch.set_num_threads(1)
    of_group = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
    of_group |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in of_group.items()}
    assert distributed.text_of_first_rank("key", lambda: f"rank {rank}") == "rank 0"
    if rank == 1:
        time.sleep(0.2)
        (folder / "late").touch()
    assert distributed.text_of_first_rank("next", lambda: "text") == "text"
    assert (folder / "late").exists(), "the first rank may leave now, and the store with it"
    with pretended_gpu() as gpu:
        distributed.start()
        check_what_stays_on_the_host(gpu, rank, folder)
        check_the_shares_of_an_average(gpu, rank)
        distributed.stop()


def check_what_stays_on_the_host(gpu, rank: int, folder: Path) -> None:
    gpu.clear()
    calls = count_collectives()
    assert len(calls) == 2
    found = distributed.gather_objects({"rank": rank, "tensor": torch.full((2,), rank)})
    assert [f["rank"] for f in found] == [0, 1] and found[1]["tensor"].tolist() == [1, 1]
    (seen,) = (name for name, number in count_collectives().items() if number > calls[name])
    assert distributed.run_together(lambda: rank) == [0, 1]
    received = distributed.all_to_all([torch.arange(to + 1) + 10 * rank for to in range(2)])
    assert [part.tolist() for part in received] == [[[0], [10]], [[0, 1], [10, 11]]][rank]
    assert distributed.sum_float(rank + 0.5) == 2.0 and distributed.max_float(rank) == 1
    distributed.barrier()
    save_checkpoint(folder, "step-000001", make_parts(1), {}, 1)
    now = count_collectives()
    assert {name for name in calls if now[name] > calls[name]} == {seen}, "the device's group is not used"
    assert not gpu.copies and not gpu.waits and not gpu.launches
    total = distributed.reduce_sum(torch.ones(3, device="cuda"))
    assert total.is_cuda and total.tolist() == [2.0, 2.0, 2.0] and count_collectives()[seen] == now[seen]


def check_the_shares_of_an_average(gpu, rank: int) -> None:
    model = torch.nn.Linear(5, 3).to("cuda")
    with torch.no_grad():
        model.weight.copy_(torch.arange(15.0).view(3, 5))
        average = ExponentialMovingAverage(model, decay=0.5)
        model.weight += 2
    average.update()
    assert {name: len(mine) for name, mine in average.averages.items()} == {
        "weight": 8 - rank,
        "bias": 2 - rank,
    }
    gpu.clear()
    with average.averaged_weights():
        assert not gpu.copies
        assert model.weight.flatten().tolist() == [n + 1.0 for n in range(15)]
    assert model.weight.flatten().tolist() == [n + 2.0 for n in range(15)]


@pytest.mark.slow
def test_what_begins_and_ends_on_the_cpu_stays_there(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    torch.multiprocessing.spawn(be_a_rank, (tmp_path, port), nprocs=2)
