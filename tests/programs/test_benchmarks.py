"""Every benchmark still runs: `--quick`, tiny sizes, without its peers."""

import json
import sys

import pytest
from program_runs import ROOT, run

KEYS = {"name", "device", "threads", "ours", "peer", "ratio", "runs"}  # benchmarks/README.md says so
PROGRAMS = sorted((ROOT / "benchmarks").glob("bench_*.py"))

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.stem)
def test_a_quick_run_ends_with_its_line(program):
    done = run([sys.executable, str(program), "--quick"])
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["name"] == program.stem.removeprefix("bench_")
    assert found.keys() >= KEYS
    assert found["ours"] > 0
    is_alone = "--trl_python is not given" in done.stdout
    assert is_alone == ("peer_environment" in program.read_text())
    assert all((found[key] is None) == is_alone for key in ("peer", "ratio"))
