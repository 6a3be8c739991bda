"""The hybrid engine on 1, 2 and 4 ranks: the trainer's weights, transformers' texts, and no trace left.

All cases of a world run in one start of its ranks: the imports take longer than a case.
"""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hybrid_engine_worker import ADAPTED, BY_LAYER, FEW, GREEDY, LORA, SAMPLED
from program_runs import run, selected_params, torchrun
from tiny_configs import CONFIGS

pytestmark = pytest.mark.slow

WORKER = Path(__file__).with_name("hybrid_engine_worker.py")
SECONDS = {1: 120, 2: 240, 4: 540}
WHATS = ("texts", "logprobs", "traffic", "trainer")


def cases_of(table: tuple) -> list[Any]:
    """Four ranks are the CI's with a few families only: it has all of them on two."""
    cases = [(ranks, stage, f, t) for ranks, stage, families, sizes in table for f in families for t in sizes]
    return [
        pytest.param(*case, marks=pytest.mark.long if case[0] == 4 and case[2] not in FEW else [])
        for case in cases
    ]


def left_out(request: pytest.FixtureRequest, num_ranks: int) -> list[str]:
    """The groups of greedy generation that no test of this session asks for."""
    asked = {(p["stage"], p["family"]) for p in selected_params(request) if p.get("ranks") == num_ranks}
    rows = [(stage, families) for ranks, stage, families, _ in GREEDY if ranks == num_ranks]
    return [f"greedy {f} {stage}" for stage, families in rows for f in families if (stage, f) not in asked]


@pytest.fixture(scope="module")
def results_of(request, tmp_path_factory, tiny_model_folder) -> Callable[[int, str], dict[str, Any]]:
    """What so many ranks found in a group of cases; they are started when first asked for."""
    folder = tmp_path_factory.mktemp("hybrid")
    (folder / "folders.json").write_text(
        json.dumps({family: tiny_model_folder(family) for family in CONFIGS})
    )
    worlds: dict[int, tuple[dict[str, Any], str]] = {}

    def start(num_ranks: int) -> tuple[dict[str, Any], str]:
        results = folder / f"{num_ranks}.jsonl"
        without = left_out(request, num_ranks)
        command = torchrun(WORKER, folder / "folders.json", results, *without, processes=num_ranks)
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


@pytest.mark.parametrize("what", WHATS)
@pytest.mark.parametrize(("ranks", "stage", "family", "tp_size"), cases_of(GREEDY))
def test_greedy_generation(ranks, stage, family, tp_size, what, results_of):
    """Texts are those of transformers, log-probabilities the trainer's, traffic is what was promised, and the
    trainer keeps every bit; before an update and after it.
    """
    found = results_of(ranks, f"greedy {family} {stage}")
    assert [found[f"{tp_size} {when} {what}"] for when in ("before", "after")] == ["", ""]


@pytest.mark.parametrize("what", WHATS)
@pytest.mark.parametrize(("ranks", "stage", "family", "tp_size"), cases_of(LORA))
def test_adapters_are_merged_for_generation_alone(ranks, stage, family, tp_size, what, results_of):
    assert family in ADAPTED
    assert results_of(ranks, f"lora {family} {stage}")[f"{tp_size} after {what}"] == ""


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
    expected = texts[f"1 ranks, {kind}: t 1, default slots"]
    assert len(expected) == {"once": 8, "thrice": 24}[kind]
    assert len({tuple(text) for text in expected}) > len(expected) // 2, "samples must differ"
    assert len({len(text) for text in expected}) > 1, "some must meet the stop token"
    assert len(texts) > 7
    assert {name: found for name, found in texts.items() if found != expected} == {}


@pytest.mark.parametrize("what", WHATS)
@pytest.mark.parametrize("slots", [0, 2])
@pytest.mark.parametrize("family", BY_LAYER)
def test_ranks_that_gather_layer_by_layer_keep_step(family, slots, what, results_of):
    """They have different numbers of prompts, of different lengths, that end at different times."""
    assert results_of(4, f"by layer {family}")[f"{slots} {what}"] == ""


@pytest.mark.parametrize("what", ["trainer", "memory", "tensors"])
def test_fifty_switches_change_and_keep_nothing(what, results_of):
    assert results_of(4, "switches")[what] == ""


@pytest.mark.parametrize("what", ["raised", "left", "trained", *WHATS])
def test_an_exception_inside_leaves_a_trainer_that_trains_and_generates(what, results_of):
    assert results_of(4, "exception")[what] == ""
