"""Whole programs on a pretended GPU: what would crash there, and whether the numbers are a CPU's."""

import pytest
from pretended_gpu import pretended_gpu
from test_golden_losses import RUNS, check_losses

pytestmark = [pytest.mark.slow]


@pytest.mark.parametrize("name", RUNS)
def test_losses_are_those_of_a_cpu(name, tiny, tmp_path, lone_process, no_pictures):
    with pretended_gpu() as gpu:
        check_losses(name, tiny, tmp_path / "output")
    assert not gpu.queries
