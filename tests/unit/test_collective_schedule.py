"""Collectives as they are recorded, and the first in which ranks differ."""

import random

import deepspeed.comm
import pytest
import torch
import torch.distributed as dist

from common.ranks.watch.collective_schedule import KEPT_CALLS, CollectiveRecorder, Schedules, describe

WORLD = "0,1,2@world"


@pytest.fixture
def recorded(process_group):
    """Return the calls that are recorded while a test runs, as (group, what, where)."""
    calls: list[tuple[str, str, str]] = []
    recorder = CollectiveRecorder()
    recorder.tell = lambda *call: calls.append(call)
    recorder.install()
    yield calls
    recorder.uninstall()


def test_calls_are_told_before_they_are_made(recorded):
    tensor = torch.ones(2, 3)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    dist.broadcast(torch.ones(4, dtype=torch.bfloat16), src=0)
    dist.all_gather_into_tensor(torch.empty(5), torch.ones(5))
    dist.barrier()
    assert [what for _, what, _ in recorded] == [
        "all_reduce op=MAX float32[2, 3]",
        "broadcast src=0 bfloat16[4]",
        "all_gather_into_tensor float32[5] float32[5]",
        "barrier",
    ]
    assert {group.split("@")[0] for group, _, _ in recorded} == {"0"}
    assert all("test_collective_schedule" in where for _, _, where in recorded)


def test_what_a_call_is_made_of_is_not_told(recorded):
    dist.all_gather_object([None], {"any": "size"})
    assert [what for _, what, _ in recorded] == ["all_gather_object"]


def test_calls_of_deepspeed_are_told(recorded):
    deepspeed.comm.all_reduce(torch.ones(3), op=deepspeed.comm.ReduceOp.SUM)
    assert [what for _, what, _ in recorded] == ["all_reduce op=SUM float32[3]"]


def test_a_call_that_fails_is_told_and_the_next_one_too(recorded):
    with pytest.raises(ValueError, match="Must specify"):
        dist.broadcast(torch.ones(1))
    dist.barrier()
    assert [what.split()[0] for _, what, _ in recorded] == ["broadcast", "barrier"]


def test_nothing_is_left_behind(process_group):
    before = {name: getattr(dist, name) for name in ("all_reduce", "barrier", "all_gather_object")}
    recorder = CollectiveRecorder()
    recorder.install()
    assert dist.all_reduce is not before["all_reduce"]
    recorder.uninstall()
    assert {name: getattr(dist, name) for name in before} == before
    assert dist.distributed_c10d.all_reduce is before["all_reduce"]


def test_sizes_that_may_differ_are_not_compared():
    tensors = {"output": torch.empty(3), "input": torch.empty(5)}
    assert describe("all_to_all_single", tensors) == "all_to_all_single float32 float32"


def schedules(*of_ranks: list[str], group: str = WORLD) -> Schedules:
    """Return what ranks have begun, each call in words."""
    made = Schedules(len(of_ranks))
    for rank, calls in enumerate(of_ranks):
        for call in calls:
            made.add(rank, group, call, f"in module:{rank}")
    return made


def test_equal_ranks():
    made = schedules(["a", "b"], ["a", "b"], ["a", "b"])
    assert made.are_equal() and made.first_difference({0, 1, 2}) is None


def test_another_kind():
    made = schedules(["a", "b", "c"], ["a", "x", "c"], ["a", "b", "c"])
    assert not made.are_equal()
    assert made.first_difference(set()) == (
        "collective 2 of all ranks differs: rank 0: b in module:0; rank 1: x in module:1; "
        "rank 2: b in module:2"
    )


def test_one_call_more():
    """It is a difference only where the others will make no more: they wait at the end of the step."""
    made = schedules(["a"], ["a", "b"], ["a"])
    assert not made.are_equal()
    assert made.first_difference({1}) is None
    assert "rank 0: no such call; rank 1: b in module:1" in made.first_difference({0})


def test_ranks_that_said_nothing_yet():
    made = Schedules(3)
    assert made.are_equal()
    made.add(1, WORLD, "a", "in module:1")
    assert made.first_difference(set()) is None


def test_groups_are_compared_by_themselves():
    """Members of other groups do other things, and in another order between the groups."""
    made = Schedules(4)
    for rank, group in ((0, "0,1@a"), (1, "0,1@a"), (2, "2,3@b"), (3, "2,3@b")):
        made.add(rank, group, group[-1], "")
    for rank in range(4):
        made.add(rank, "0,1,2,3@world", "w", "")
    assert made.are_equal()
    made.add(2, "2,3@b", "x", "in module:2")
    made.add(3, "2,3@b", "y", "in module:3")
    assert made.first_difference(set()) == (
        "collective 2 of ranks 2,3 differs: rank 2: x in module:2; rank 3: y in module:3"
    )


def test_more_calls_than_are_kept():
    """What is older than the words is still in the hash."""
    calls = [f"call {i}" for i in range(3 * KEPT_CALLS)]
    other = ["another", *calls[1:]]
    made = schedules(calls, other, group="0,1@world")
    assert not made.are_equal()
    assert f"collective {2 * KEPT_CALLS + 1} or one before it" in made.first_difference(set())
    assert schedules(calls, calls, group="0,1@world").are_equal()


def test_the_first_of_many_differences_is_found():
    """Against plain lists, for random schedules."""
    draw = random.Random(0)
    for _ in range(200):
        lists = [[draw.choice("ab") for _ in range(draw.randrange(6))] for _ in range(3)]
        for calls in lists[1:]:
            calls[:4] = lists[0][: draw.randrange(5)]
        waiting = {rank for rank in range(3) if draw.random() < 0.5}
        expected = None
        for index in range(max(map(len, lists))):
            there = {calls[index] for calls in lists if len(calls) > index}
            if len(there) > 1 or any(len(lists[rank]) <= index for rank in waiting):
                expected = index + 1
                break
        # A rank that has said nothing is not known to take part.
        made = schedules(*lists)
        for rank in range(3):
            made.records.setdefault(rank, {})
        found = made.first_difference(waiting)
        assert (None if found is None else int(found.split()[1])) == expected
