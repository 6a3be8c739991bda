"""The hybrid engine on 1, 2 and 4 ranks: the trainer's weights, transformers' texts, and no trace left.

All cases of a world run in one start of its ranks: the imports take longer than a case.
"""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hybrid_engine_worker import BY_LAYER, GREEDY, LORA, SAMPLED, SLICES
from program_runs import run, torchrun
from tiny_configs import CONFIGS, VARIANTS

pytestmark = pytest.mark.slow

WORKER = Path(__file__).with_name("hybrid_engine_worker.py")
SECONDS = {1: 120, 2: 240, 4: 540}


def cases_of(table: tuple) -> list[tuple[int, int, str]]:
    """Return (ranks, stage, family); what is checked of the sizes is in the group's findings."""
    return [(ranks, stage, family) for ranks, stage, families, _ in table for family in families]


@pytest.fixture(scope="module")
def results_of(tmp_path_factory, tiny_model_folder) -> Callable[[int, str], dict[str, Any]]:
    """What so many ranks found in a group of cases; they are started when first asked for."""
    folder = tmp_path_factory.mktemp("hybrid")
    folders = {family: tiny_model_folder(family) for family in (*CONFIGS, *VARIANTS)}
    (folder / "folders.json").write_text(json.dumps(folders))
    worlds: dict[int, tuple[dict[str, Any], str]] = {}

    def start(num_ranks: int) -> tuple[dict[str, Any], str]:
        results = folder / f"{num_ranks}.jsonl"
        command = torchrun(WORKER, folder / "folders.json", results, processes=num_ranks)
        try:
            stderr = run(command, may_fail=True, seconds=SECONDS[num_ranks]).stderr
        except subprocess.TimeoutExpired as error:
            stderr = f"not done after {SECONDS[num_ranks]} s: {(error.stderr or b'').decode()}"
        lines = [json.loads(line) for line in results.read_text().splitlines()]
        return {line["group"]: line for line in lines}, stderr

    def get(num_ranks: int, group: str) -> dict[str, Any]:
        if num_ranks not in worlds:
            worlds[num_ranks] = start(num_ranks)
        groups, stderr = worlds[num_ranks]
        assert group in groups, f"{num_ranks} ranks did not come to the end of {group!r}:\n{stderr[-6000:]}"
        assert not groups[group]["error"], groups[group]["error"]
        return groups[group]["found"]

    return get


def complaints(found: dict[str, str]) -> dict[str, str]:
    assert found
    return {what: complaint for what, complaint in found.items() if complaint}


@pytest.mark.parametrize(("ranks", "stage", "family"), cases_of(GREEDY))
def test_greedy_generation(ranks, stage, family, results_of):
    """Texts are those of transformers, log-probabilities the trainer's, bytes came only to shards, and the
    trainer keeps every bit; before an update and after it.
    """
    assert complaints(results_of(ranks, f"greedy {family} {stage}")) == {}


@pytest.mark.parametrize(("ranks", "stage", "family"), cases_of(LORA))
def test_adapters_are_merged_for_generation_alone(ranks, stage, family, results_of):
    assert complaints(results_of(ranks, f"lora {family} {stage}")) == {}


@pytest.mark.parametrize("case", SLICES)
def test_slices_are_those_of_the_gathered_weights(case, results_of):
    """Received bytes are those that a meter counts, and little memory is held besides the slices."""
    assert complaints(results_of(4, f"slices {case}")) == {}


@pytest.mark.parametrize("kind", ["once", "thrice"])
@pytest.mark.parametrize("family", SAMPLED[1])
def test_sampled_texts_depend_on_nothing_but_sample_and_weights(kind, family, results_of):
    """Not on slots, order, ranks or tensor-parallel size, and three samples of a prompt share only that."""
    texts = {
        f"{ranks} ranks, {variant}": found
        for ranks, families in SAMPLED.items()
        if family in families
        for variant, found in results_of(ranks, f"sampled {family}").items()
        if variant.startswith(kind)
    }
    expected = texts[f"1 ranks, {kind}: t 1, 0 slots"]
    assert len(expected) == {"once": 8, "thrice": 24}[kind]
    assert len({tuple(text) for text in expected}) > len(expected) // 2, "samples must differ"
    assert len({len(text) for text in expected}) > 1, "some must meet the stop token"
    assert len(texts) > 7
    assert {name: found for name, found in texts.items() if found != expected} == {}


@pytest.mark.parametrize("family", BY_LAYER)
def test_ranks_that_gather_layer_by_layer_keep_step(family, results_of):
    """They have different numbers of prompts, of different lengths, that end at different times."""
    assert complaints(results_of(4, f"by layer {family}")) == {}
