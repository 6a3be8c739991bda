"""Ranks that hold parts of a model compute the logits of the whole: every family, groups of two and of four.

All of it runs in one start of four ranks: the imports take longer than the work.
"""

from pathlib import Path

import pytest
from program_runs import run, torchrun
from tensor_parallel_worker import CASES

pytestmark = pytest.mark.slow

WORKER = Path(__file__).with_name("tensor_parallel_worker.py")


@pytest.fixture(scope="module")
def verdicts() -> dict[tuple[str, int], str]:
    """What the worker says about (case, tp_size)."""
    lines = run(torchrun(WORKER, processes=4)).stdout.splitlines()
    rows = [line.split("|") for line in lines if line.count("|") == 2]
    return {(name, int(tp_size)): verdict for name, tp_size, verdict in rows}


@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_parts_compute_what_the_whole_does(case: str, tp_size: int, verdicts: dict[tuple[str, int], str]):
    assert verdicts[case, tp_size] == "ok"
