"""The hybrid engine on 1, 2 and 4 ranks: all cases of a world run in one start of its ranks, in pytest."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CASES = Path(__file__).with_name("hybrid_engine_cases.py")
SECONDS = {1: 120, 2: 240, 4: 540}


@pytest.fixture(scope="module")
def start_ranks(forks, tmp_path_factory):
    """Run all cases of a world; one rank has sampled the texts that the others compare theirs with."""
    environment = {"SAMPLED_TEXTS": str(tmp_path_factory.mktemp("texts") / "texts.json")}
    words = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--timeout", "120", CASES]

    def start(num_ranks: int) -> None:
        done = forks.run("pytest", words, ranks=num_ranks, env=environment, seconds=SECONDS[num_ranks])
        assert done.codes == [0] * num_ranks, done.text()

    start(1)
    return start


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_cases_on_ranks(num_ranks, start_ranks):
    start_ranks(num_ranks)
