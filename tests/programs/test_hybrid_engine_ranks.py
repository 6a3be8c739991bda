"""The hybrid engine on 1, 2 and 4 ranks: all cases of a world run in one start of its ranks, in pytest."""

from pathlib import Path

import pytest
from program_runs import run, torchrun

pytestmark = pytest.mark.slow

CASES = Path(__file__).with_name("hybrid_engine_cases.py")
SECONDS = {1: 120, 2: 240, 4: 540}


def start_ranks(num_ranks: int) -> None:
    words = ("-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--timeout", "120", CASES)
    run(torchrun(*words, processes=num_ranks), seconds=SECONDS[num_ranks])


@pytest.fixture(scope="module", autouse=True)
def texts_of_one_rank(tmp_path_factory) -> None:
    """What one rank samples; others read it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SAMPLED_TEXTS", str(tmp_path_factory.mktemp("texts") / "texts.json"))
        start_ranks(1)
        yield


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_cases_on_ranks(num_ranks):
    start_ranks(num_ranks)
