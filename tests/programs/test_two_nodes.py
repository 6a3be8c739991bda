"""Two machines, both played by this one over loopback, train step 1 together."""

import sys

import pytest
from program_runs import TIME_LIMIT, as_flags, free_port, read_curve, run_here, start
from tiny_inputs import step_flags

pytestmark = pytest.mark.slow

FLAGS = {"data_split": "1,0,0", "eval_fraction": 0.2, "learning_rate": 1e-3, "max_train_steps": 3}
FLAGS |= {"zero_stage": 2, "dtype": "fp32"}


def test_two_nodes_train_as_one_process_does(tiny, tmp_path, lone_process, no_pictures):
    folders = {"data_output_path": tmp_path / "cache", "output_dir": tmp_path / "two"}
    flags = step_flags(tiny, 1, **FLAGS, **folders)  # both make the cache: nodes need not share a disk
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
    place = ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    words = [*place, "step1_sft/main.py", *as_flags(flags)]
    logs = [tmp_path / f"node{node}" for node in range(2)]
    nodes = [start([*launcher, "--node_rank", str(n), *words], log) for n, log in enumerate(logs)]
    try:
        for node in nodes:
            node.wait(TIME_LIMIT)
    finally:
        for node in nodes:
            node.kill()
    texts = [log.read_text() for log in logs]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(text[-3000:] for text in texts)
    assert "    3/3  " in texts[0] and "    3/3  " not in texts[1]  # only the first process speaks

    alone = {"per_device_train_batch_size": 8, "output_dir": tmp_path / "one", "zero_stage": 0}
    run_here(1, flags | alone)
    for name in ("sft/loss", "sft/eval_loss"):
        assert read_curve(tmp_path / "two", name) == pytest.approx(
            read_curve(tmp_path / "one", name), abs=1e-5
        )
