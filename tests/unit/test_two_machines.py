"""Start-up of ranks on two machines: network namespaces, whose own names resolve to a loopback address."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.ranks import distributed

ROOT = Path(__file__).parents[2]
ADDRESSES = ("192.0.2.1", "192.0.2.2")
RANK = """
from common.programs.running import run_program
from common.ranks import distributed

def join():
    distributed.start(collective_timeout=20)
    print(distributed.sum_float(distributed.rank() + 1.0))

run_program(join)
"""


def ip(*words: str) -> None:
    subprocess.run(("ip", *words), check=True, capture_output=True)


@pytest.fixture
def machines():
    """Two machines, by the names of their namespaces, joined by a cable."""
    if not shutil.which("ip") or os.geteuid() != 0:
        pytest.skip("network namespaces need `ip` and root")
    names = [f"triptych{os.getpid()}{letter}" for letter in "ab"]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces: {error.stderr.decode().strip()}")
        cable = ("link", "add", "cable", "netns", names[0], "type", "veth")
        ip(*cable, "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(("ip", "netns", "del", name), capture_output=True, check=False)


def start_rank(machine: str, rank: int, **more: str) -> subprocess.Popen:
    of_group = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    of_group |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": 29500}
    env = os.environ | {name: str(value) for name, value in of_group.items()} | more
    command = ("ip", "netns", "exec", machine, sys.executable, "-c", RANK)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=env, **pipes)


def test_ranks_of_two_machines_meet_by_the_interface_that_reaches_the_first(machines):
    ranks = [start_rank(machine, rank) for rank, machine in enumerate(machines)]
    for rank in ranks:
        out, errors = rank.communicate(timeout=100)
        assert rank.returncode == 0 and out.strip() == "3.0", errors


@pytest.mark.slow
def test_an_interface_that_does_not_reach_is_named(machines):
    ranks = [start_rank(machine, rank, GLOO_SOCKET_IFNAME="lo") for rank, machine in enumerate(machines)]
    errors = [rank.communicate(timeout=100)[1] for rank in ranks]
    assert all(rank.returncode for rank in ranks)
    assert any("GLOO_SOCKET_IFNAME" in text and "Traceback" not in text for text in errors), errors


@pytest.mark.parametrize(
    ("variables", "chosen"),
    [
        ({"GLOO_SOCKET_IFNAME": "mine"}, "mine"),
        ({"LOCAL_WORLD_SIZE": "2"}, None),  # one machine
        ({"MASTER_ADDR": "127.0.0.1"}, None),
        ({"MASTER_ADDR": "no.such.host.invalid"}, None),
    ],
)
def test_no_interface_is_chosen_where_none_is_needed_or_known(variables, chosen, monkeypatch):
    of_group = {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500"}
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # what is chosen goes with the test
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    for name, value in (of_group | variables).items():
        monkeypatch.setenv(name, value)
    distributed.choose_interface()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == chosen
