"""common/data/token_cache.py and make_on_first_rank: whole or absent, written once, read by memory map."""

import threading
from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from common.data.token_cache import DataReport, TokenTable, TokenWriter, build_once
from common.ranks.distributed import make_on_first_rank


def test_two_builders_at_once_leave_one_whole_cache(tmp_path):
    folder, both_write = tmp_path / "key", threading.Barrier(2)
    won = []

    def write(temporary):
        both_write.wait(timeout=10)  # neither has renamed yet
        with closing(TokenWriter(temporary / "train.arrow", {"input_ids": "ids"})) as writer:
            writer.append([{"input_ids": [1, 2]}] * 100)
        return DataReport()

    threads = [threading.Thread(target=lambda: won.append(build_once(folder, write))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == [False, True]
    assert [p.name for p in tmp_path.iterdir()] == ["key"]
    assert len(TokenTable(folder / "train.arrow")) == 100


def test_a_failed_build_leaves_nothing(tmp_path):
    def write(temporary):
        (temporary / "train.arrow").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once(tmp_path / "key", write)
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_cache_names_the_flag(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="--data_output_path .*file.*cannot be written"):
        build_once(tmp_path / "file" / "key", lambda _: None)


def test_token_table(tmp_path):
    columns = {"input_ids": "ids", "mask": "mask", "margin": "float", "name": "text"}
    rows = [
        {"input_ids": [i] * i, "mask": [k % 2 == 0 for k in range(i)], "margin": i / 2, "name": f"é{i}"}
        for i in range(7)
    ]
    with closing(TokenWriter(tmp_path / "t.arrow", columns)) as writer:
        writer.append(rows[:3])
        writer.append([])
        writer.append(rows[3:])
    table = TokenTable(tmp_path / "t.arrow")
    assert [table[i] for i in range(len(table))] == rows
    shuffled = TokenTable(tmp_path / "t.arrow", shuffle_seed=5)
    order = [row["name"] for row in (shuffled[i] for i in range(7))]
    assert sorted(order) == [row["name"] for row in rows] and order != [row["name"] for row in rows]
    assert shuffled.lengths("input_ids").tolist() == [int(name[1:]) for name in order]
    with pytest.raises(IndexError):
        table[7]
    (tmp_path / "t.arrow").write_bytes(b"torn")
    with pytest.raises(ValueError, match="is damaged.*delete that folder"):
        TokenTable(tmp_path / "t.arrow")


def _run_rank(rank: int, folder: Path) -> None:
    def make() -> Path:
        made.append(rank)
        folder.mkdir()
        return folder

    def fail() -> Path:
        raise ValueError("rows.jsonl:4 is bad")

    made: list[int] = []
    dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=rank, world_size=2)
    assert make_on_first_rank(make) == folder and made == [0][rank:]
    with pytest.raises(ValueError, match="^rows.jsonl:4 is bad$"):
        make_on_first_rank(fail)
    dist.destroy_process_group()


@pytest.mark.slow
def test_one_rank_works_and_its_failure_is_every_ranks(tmp_path):
    torch.multiprocessing.spawn(_run_rank, (tmp_path / "made",), nprocs=2)
