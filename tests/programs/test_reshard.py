"""From ZeRO 3 shards to tensor-parallel slices on 2 and 4 ranks: exact, and with no byte more than needed."""

from pathlib import Path

import pytest
from program_runs import run, torchrun

pytestmark = pytest.mark.slow

WORKER = Path(__file__).with_name("reshard_worker.py")


@pytest.mark.parametrize(("processes", "sizes"), [(2, "[1, 2]"), (4, "[1, 2, 4]")])
def test_slices_are_those_of_the_gathered_weights(tiny, processes, sizes):
    done = run(torchrun(WORKER, tiny.base, tiny.gpt2, processes=processes))
    found = [line for line in done.stdout.splitlines() if line.startswith("ok ")]
    assert len(found) == 8 and all(f"sizes {sizes}" in line for line in found), done.stdout
    small = [int(line.split()[-1]) for line in found if "small-whole" in line]
    assert small[1] > 0, "after an update small weights are whole on every rank"
