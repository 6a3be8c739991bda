"""What needs a GPU. `bash tests/run.sh --gpu` runs it on a real one and writes gpu_figures.json.

Where there is none, what can runs on the pretended one, so that it cannot rot; no figure is kept then.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_inputs
import torch
from pretended_gpu import pretended_gpu

from benchmarks.measuring import describe_machine

HAS_GPU = torch.cuda.is_available()
FOLDER = Path(__file__).parent
FIGURES = Path(os.environ.get("GPU_FIGURES") or FOLDER.parents[1] / "gpu_figures.json")
_figures: dict[str, Any] = {}
_outcomes: dict[str, str] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what no pretended GPU can do."""
    for item in (item for item in items if FOLDER in item.path.parents):
        item.add_marker("gpu")
        if item.get_closest_marker("real_gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    """A GPU, real or pretended."""
    if HAS_GPU:
        yield
    else:
        with pretended_gpu():
            yield


@pytest.fixture
def figures() -> dict[str, Any]:
    """What is written of this machine, by name."""
    return _figures


@pytest.fixture(scope="session")
def tiny(tmp_path_factory, tiny_tokenizer) -> SimpleNamespace:
    """The tiny models and rows of the golden losses."""
    folder = tmp_path_factory.mktemp("tiny")
    return SimpleNamespace(
        base=tiny_inputs.save_causal_lm(folder / "base", tiny_tokenizer),
        reward=tiny_inputs.save_reward_model(folder / "reward", tiny_tokenizer),
        rows=tiny_inputs.write_rows(folder / "rows.jsonl", tiny_inputs.make_rows(50)),
        cache=folder / "cache",
    )


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep how each test of this folder ended."""
    if "tests/gpu/" in report.nodeid and (report.when == "call" or report.outcome != "passed"):
        _outcomes[report.nodeid.partition("tests/gpu/")[2]] = report.outcome


def pytest_sessionfinish() -> None:
    """Write what a real GPU gave."""
    if HAS_GPU and _outcomes:
        found = describe_machine() | {"name": "gpu_tests", "figures": _figures, "tests": _outcomes}
        FIGURES.write_text(json.dumps(found, indent=1) + "\n")
        print(f"\n{FIGURES}: send it in, or commit it under benchmarks/baselines/")
