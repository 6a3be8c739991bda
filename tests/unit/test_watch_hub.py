"""The hub of the watch and its members, all as threads of this process."""

import json
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from common.ranks.failures import CLOSED, RankDidNotCome
from common.ranks.watch import hub as watch_hub
from common.ranks.watch import member as watch_member
from common.ranks.watch.collective_schedule import Schedules
from common.ranks.watch.hub import Hub
from common.ranks.watch.member import Member


class World:
    """A hub and members, all threads of this process; a member that leaves is noted, not ended."""

    def __init__(self, size: int, *, timeout: float = 30.0, checks: bool = False) -> None:
        self.places = [("at step 5 in the rollout", 1)] * size
        self.hub = Hub("127.0.0.1", size, timeout, lambda: self.places[0][0], checks_collectives=checks)
        self.hub.start()
        self.left: dict[int, int] = {}
        address = {"hosts": ["127.0.0.1"], "port": self.hub.port, "token": self.hub.token}
        self.members = [
            Member(
                rank,
                address,
                timeout,
                lambda rank=rank: self.places[rank],
                None,
                Schedules(size) if checks else None,
            )
            for rank in range(size)
        ]
        for member in self.members:
            member.start()
        for member in self.members:
            member.wait_until_connected()
        wait_for(
            lambda: len(self.hub.members) == size and all(len(m.processes) == size for m in self.members)
        )

    def cut(self, rank: int) -> None:
        """End a member's connection without a word, as the death of its process does."""
        self.members[rank].left_code = 0  # it is dead: it does not judge
        self.members[rank].line.connection.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        for member in self.members:
            member.left_code = 0
            if member.line:
                member.line.end_sending()
        self.hub.close(0, "")


def wait_for(is_so, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def worlds(monkeypatch) -> Iterator[SimpleNamespace]:
    """Give what makes worlds; `said` are the messages, `left` the ranks that were made to leave."""
    said: list[str] = []
    left: list[int] = []

    def leave(member: Member, verdict, *, speaks: bool) -> None:
        member._heard_verdict.set()
        left.append(member.rank)
        if speaks:
            said.append(verdict.text)

    monkeypatch.setattr(Member, "_leave", leave)
    monkeypatch.setattr(watch_member, "SETTLE_SECONDS", 0.6)
    monkeypatch.setattr("common.ranks.watch.referee.SETTLE_SECONDS", 0.6)
    monkeypatch.setattr(watch_hub, "DRAIN_SECONDS", 0.2)
    monkeypatch.setattr(watch_hub, "COMPARE_SECONDS", 0.2)
    made: list[World] = []

    def make(size: int, **more) -> World:
        made.append(World(size, **more))
        return made[-1]

    yield SimpleNamespace(make=make, said=said, left=left)
    for world in made:
        world.end()


def test_a_healthy_world_says_nothing(worlds):
    world = worlds.make(3)
    time.sleep(1.2)
    for rank in (1, 2, 0):
        world.members[rank].say_goodbye(0, "")
        time.sleep(0.4)
    assert worlds.said == [] and worlds.left == []


def test_a_death_is_noticed(worlds):
    world = worlds.make(3)
    world.places[1] = ("at step 7 in the update of the actor", 2)
    world.members[1].tell_place()
    world.cut(1)
    wait_for(lambda: len(worlds.left) == 2)
    assert sorted(worlds.left) == [0, 2]
    assert len(worlds.said) == 1 and worlds.said[0].startswith(
        "rank 1 died at step 7 in the update of the actor"
    )


def test_the_death_of_the_first_rank_is_noticed(worlds):
    world = worlds.make(3)
    world.hub.tell_place()
    world.members[0].left_code = 0
    for member in list(world.hub.members.values()):
        member.connection.shutdown(socket.SHUT_RDWR)
    wait_for(lambda: len(worlds.left) == 2)
    # All of them are this one process, so rank 1 is alive for rank 2, which keeps quiet.
    assert len(worlds.said) == 1 and worlds.said[0].startswith("rank 0 died at step 5 in the rollout")


def test_a_failure_is_told(worlds):
    world = worlds.make(2)
    assert world.members[1].report_failure("at step 3 in the update", "ValueError: no")
    wait_for(lambda: len(worlds.left) == 2)
    assert worlds.said == ["rank 1 failed first, at step 3 in the update: ValueError: no"]


def test_a_connection_that_two_have_lost(worlds):
    """Nobody is dead or silent: the one that says so is named, with its words."""
    world = worlds.make(2)
    world.members[1].suspect(CLOSED, "RuntimeError: connection reset")
    wait_for(lambda: len(worlds.left) == 2)
    assert len(worlds.said) == 1
    assert worlds.said[0].startswith(
        "rank 1 failed first, at step 5 in the rollout: RuntimeError: connection"
    )


def test_a_goodbye_gives_its_reason(worlds):
    """Here to one that waits for the rank that has left; the hub's own rank does the same."""
    world = worlds.make(2)
    world.members[1].say_goodbye(2, "no such file")
    world.members[0].suspect(CLOSED, "RuntimeError: connection closed")
    wait_for(lambda: worlds.left == [0])
    assert worlds.said == [
        "rank 1 left before the others, with exit code 2, at step 5 in the rollout: no such file"
    ]


def test_the_first_rank_leaves_and_is_missed(worlds):
    world = worlds.make(2)
    world.members[0].say_goodbye(2, "no such file")
    world.hub.close(2, "no such file")
    world.members[1].suspect(CLOSED, "RuntimeError: connection closed")
    wait_for(lambda: worlds.left == [1])
    assert worlds.said == [
        "rank 0 left before the others, with exit code 2, at step 5 in the rollout: no such file"
    ]


def test_strangers_are_shown_out(worlds):
    """Whatever they say; the ranks do not notice."""
    world = worlds.make(2)
    for words in (b"GET / HTTP/1.0\r\n\r\n", b'{"token": "a guess", "rank": 1}\n', b"7\n", b"\xff\xfe\n"):
        with socket.create_connection(("127.0.0.1", world.hub.port)) as stranger:
            stranger.settimeout(10)
            stranger.sendall(words)
            assert stranger.recv(100) == b""
    assert len(world.hub.members) == 2 and worlds.left == []
    world.members[1].report_failure("in the rollout", "the hub still hears")
    wait_for(lambda: len(worlds.left) == 2)


def test_schedules_are_compared_at_the_end_of_a_step(worlds):
    world = worlds.make(2, checks=True)
    for step in (1, 2):
        for member in world.members:
            member.tell_call("0,1@world", "all_reduce float32[3]", "in module:1")
            member.line.send(kind="step end", step=step)
        for member in world.members:
            assert member._checked.acquire(timeout=10)
    world.members[0].tell_call("0,1@world", "all_reduce float32[3]", "in module:1")
    world.members[1].tell_call("0,1@world", "barrier", "in module:2")
    for member in world.members:
        member.line.send(kind="step end", step=3)
    wait_for(lambda: len(worlds.left) == 2)
    assert worlds.said == [
        "the ranks' collectives differ at step 3: collective 3 of all ranks differs: "
        "rank 0: all_reduce float32[3] in module:1; rank 1: barrier in module:2"
    ]


def test_a_rank_that_waits_in_one_collective_more(worlds):
    """It never comes to the end of the step, where the other one waits."""
    world = worlds.make(2, checks=True)
    for member in world.members:
        member.tell_call("0,1@world", "barrier", "in module:1")
    world.members[1].tell_call("0,1@world", "barrier", "in module:2")
    world.members[0].line.send(kind="step end", step=4)
    wait_for(lambda: len(worlds.left) == 2)
    assert worlds.said == [
        "the ranks' collectives differ at step 4: collective 2 of all ranks differs: "
        "rank 0: no such call; rank 1: barrier in module:2"
    ]


def test_a_rank_is_slow_to_the_end_of_a_step(worlds):
    world = worlds.make(2, checks=True)
    for member in world.members:
        member.tell_call("0,1@world", "barrier", "in module:1")
    world.members[1].line.send(kind="step end", step=4)
    time.sleep(1.0)
    assert worlds.left == []
    world.members[0].line.send(kind="step end", step=4)
    assert world.members[1]._checked.acquire(timeout=10) and worlds.left == []


def test_a_rank_that_does_not_come_to_the_end_of_a_step(worlds):
    world = worlds.make(2, timeout=1.0, checks=True)
    with pytest.raises(RankDidNotCome, match="step 6"):
        world.members[0].check_schedule(6)


def test_a_hub_that_cannot_be_reached(capfd, monkeypatch):
    """The rank says so and goes on without."""
    monkeypatch.setattr(watch_member, "CONNECT_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    address = json.loads(json.dumps({"hosts": ["127.0.0.1"], "port": port, "token": "t"}))
    member = Member(1, address, 5.0, lambda: ("in the rollout", 1), None, None)
    member.start()
    member.join(10)
    assert f"rank 1 cannot reach rank 0 on port {port} of 127.0.0.1" in capfd.readouterr().err
    member.suspect(CLOSED, "no")
    member.say_goodbye(0, "")
