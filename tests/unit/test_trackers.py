"""--trackers: the same names and steps as metrics.jsonl, each number once, whatever is stopped or fails."""

import json
import math
import sys
from collections import defaultdict
from unittest.mock import MagicMock

import pytest
from made_runs import start_logger

from common.flags.args import Problems
from common.programs.startup import check_run
from common.runs import run_logger
from common.runs.run_logger import RunLogger, missing_trackers, start_tracker
from step1_sft.arguments import SFTArguments


class Service:
    """What a tracker's server knows: runs by id, with their configuration and every number sent.

    It is accelerate's tracker and the tracker's run as well.
    """

    def __init__(self) -> None:
        self.runs: dict[str, dict] = {}
        self.fails_from, self.offline, self.step, self.tracker = 999, False, 999, self

    def start(self, run_id, config):
        self.id = run_id or f"run-{len(self.runs)}"
        self.runs.setdefault(self.id, {"config": dict(config), "sent": []})
        return self, self.id

    def log(self, metrics, step):
        if step >= self.fails_from:
            raise RuntimeError("the server is gone")
        self.runs[self.id]["sent"] += [(step, name, value) for name, value in metrics.items()]

    def finish(self):
        pass


@pytest.fixture
def services(monkeypatch) -> dict[str, Service]:
    """The services of the trackers that are begun, by kind."""
    found: dict[str, Service] = defaultdict(Service)

    def start(kind, run_id, args, last_step):
        return found[kind].start(run_id, vars(args))

    monkeypatch.setattr(run_logger, "start_tracker", start)
    return found


def started(folder, *kinds, numbers=None, **flags) -> RunLogger:
    return start_logger(folder, numbers, trackers=kinds, **flags)


def step(logger, number, evaluates=False) -> None:
    logger.log(number, {"a/b": float(number)})
    if evaluates:
        logger.log_event(number, {"a/eval": float(number)})


def sent_of(service, run="run-0", names=("a/b", "a/eval")):
    return [(step, name) for step, name, _ in service.runs[run]["sent"] if name in names]


def test_a_tracker_has_the_names_steps_and_values_of_the_file_that_are_finite(tmp_path, services):
    logger = started(tmp_path, "wandb", seed=3)
    for number in (1, 2):
        step(logger, number, evaluates=number == 2)
    logger.log(3, {"a/norm": math.inf})
    logger.close()
    run = services["wandb"].runs["run-0"]
    assert run["config"]["seed"] == 3
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    in_file = [(r["step"], n, v) for r in rows for n, v in r.items() if n not in ("step", "seconds")]
    assert run["sent"] == [one for one in in_file if one[2] is not None] and len(in_file) == 7


@pytest.mark.parametrize("killed_in", ["a step", "an evaluation", "the next start"])
def test_a_resumed_run_sends_each_number_once_to_the_same_run(tmp_path, services, killed_in):
    """The tracker is ahead of the checkpoint: what it has is not sent again, what it lacks is."""
    first = started(tmp_path, "wandb", seed=3)
    step(first, 1, evaluates=True)
    numbers = first.json_state()
    step(first, 2, evaluates=True)
    step(first, 3, evaluates=killed_in != "a step")
    if killed_in == "the next start":  # killed again before it is as far as it was
        step(started(tmp_path, "wandb", numbers=numbers), 2)
    second = started(tmp_path, "wandb", numbers=numbers, seed=3)
    for number in (2, 3, 4):
        step(second, number, evaluates=True)
    second.close()
    service = services["wandb"]
    assert list(service.runs) == ["run-0"]
    assert sent_of(service) == [(n, name) for n in (1, 2, 3, 4) for name in ("a/b", "a/eval")]


def test_what_a_server_never_got_is_sent_again(tmp_path, services):
    """A killed process takes with it what it had handed over and not yet sent; wandb says what it has."""
    first, service = started(tmp_path, "wandb"), services["wandb"]
    step(first, 1)
    numbers = first.json_state()
    for number in (2, 3, 4):
        step(first, number, evaluates=True)
    service.runs["run-0"]["sent"] = [one for one in service.runs["run-0"]["sent"] if one[0] < 3]
    service.step = 3  # the next that it takes
    second = started(tmp_path, "wandb", numbers=numbers)
    for number in (2, 3, 4):
        step(second, number)
    assert sent_of(service, names=["a/b"]) == [(number, "a/b") for number in (1, 2, 3, 4)]


def test_a_tracker_that_joins_later_begins_there(tmp_path, services):
    first = started(tmp_path, "mlflow")
    step(first, 1)
    second = started(tmp_path, "mlflow", "trackio", numbers=first.json_state(), seed=3)
    step(second, 2)
    old, new = services["mlflow"], services["trackio"]
    assert sent_of(old) == [(1, "a/b"), (2, "a/b")] and sent_of(new) == [(2, "a/b")]
    assert new.runs["run-0"]["config"]["seed"] == 3
    step(started(tmp_path, "mlflow"), 1)
    assert sent_of(old, "run-1") == [(1, "a/b")], "a new run in the folder is a new run in the tracker"
    started(tmp_path).close()
    assert not (tmp_path / "trackers.json").exists(), "a later --trackers must not go on with an older run"


def test_a_tracker_that_fails_is_given_up_with_a_word_and_others_go_on(tmp_path, services, capsys):
    bad, good = services["wandb"], services["mlflow"]
    bad.fails_from = 2
    logger = started(tmp_path, "wandb", "mlflow")
    for number in (1, 2, 3):
        step(logger, number)
    logger.close()
    assert sent_of(bad) == [(1, "a/b")] and sent_of(good) == [(1, "a/b"), (2, "a/b"), (3, "a/b")]
    assert capsys.readouterr().out.count("wandb accepts no more metrics (the server is gone)") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_tracker_that_cannot_begin_ends_the_start_before_anything_is_replaced(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text("kept\n")

    def refuse(*_):
        raise RuntimeError("\nno API key\nmore")

    monkeypatch.setattr(run_logger, "start_tracker", refuse)
    told = r"--trackers wandb cannot start \(RuntimeError: no API key\); log in"
    with pytest.raises(ValueError, match=told):
        started(tmp_path, "wandb")
    assert (tmp_path / "metrics.jsonl").read_text() == "kept\n"


def test_a_torn_file_of_positions_means_a_new_run(tmp_path, services):
    logger = started(tmp_path, "wandb")
    step(logger, 1)
    (tmp_path / "trackers.json").write_text('{"wandb": {"run')
    step(started(tmp_path, "wandb", numbers=logger.json_state()), 2)
    assert sent_of(services["wandb"], "run-1") == [(2, "a/b")]


def test_tensorboard_hides_what_comes_again_and_is_sent_it_all(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = started(tmp_path, "tensorboard")
    step(first, 1)
    numbers = first.json_state()
    step(first, 2)
    first.trackers.close()
    second = started(tmp_path, "tensorboard", numbers=numbers)
    for number in (2, 3):
        step(second, number)
    second.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("a/b")] == [1, 2, 3]


# ---- what is built of the flags


def test_a_package_that_is_missing_is_a_problem_of_the_start(monkeypatch):
    real = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda n: None if n in ("wandb", "mlflow") else real(n))
    found = missing_trackers(["wandb", "tensorboard", "mlflow", "wandb"])
    assert found == [
        f"--trackers {n}: the package {n} is not installed; pip install {n}, or leave it out"
        for n in ("wandb", "mlflow")
    ]
    problems = Problems()
    check_run(SFTArguments(model_name_or_path="m", trackers=["wandb"]), problems)
    assert problems.messages == found[:1]


@pytest.fixture
def packages(monkeypatch):
    """Stand-ins for the three packages, as far as accelerate's classes use them; gives the calls."""
    package = MagicMock()
    package.wandb.init.return_value = package.wandb
    package.wandb.configure_mock(id="w1", step=7, offline=False)
    package.mlflow.search_experiments.return_value = []
    package.mlflow.start_run.return_value.info.run_id = "m1"
    package.mlflow.utils.validation.configure_mock(MAX_PARAM_VAL_LENGTH=500, MAX_PARAMS_TAGS_PER_BATCH=100)
    package.trackio.init.return_value = package.trackio
    package.trackio.name = "t1"
    for name in STARTS:
        monkeypatch.setitem(sys.modules, name, getattr(package, name))
        for variable in ("WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME", "TRACKIO_PROJECT", "MLFLOW_RUN_ID"):
            monkeypatch.delenv(variable, raising=False)
    return lambda: {name: (args, options) for name, args, options in package.mock_calls}


STARTS = {"wandb": "wandb.init", "mlflow": "mlflow.start_run", "trackio": "trackio.init"}
IDS = {"wandb": "w1", "mlflow": "m1", "trackio": "t1"}
CONFIG_CALLS = ("wandb.config.update", "mlflow.log_params", "trackio.config.update")


@pytest.mark.parametrize("is_resumed", [False, True])
@pytest.mark.parametrize("kind", STARTS)
def test_accelerates_classes_are_told_the_run_its_flags_and_its_numbers(tmp_path, packages, kind, is_resumed):
    flags = SFTArguments(model_name_or_path="m", data_path=["a", "b"], output_dir=str(tmp_path / "my-run"))
    tracker, found_id = start_tracker(kind, IDS[kind] if is_resumed else "", flags, None)
    assert found_id == IDS[kind]
    tracker.log({"a/b": 1.0}, step=7)
    tracker.finish()
    found = packages()
    options = found[STARTS[kind]][1]
    config = [found[name][0][0] for name in CONFIG_CALLS if name in found]
    if is_resumed:
        assert IDS[kind] in (options.get("id"), options.get("run_id"), options.get("name"))
        assert options.get("resume") == {"wandb": "allow", "trackio": "allow"}.get(kind) and not config
    else:
        assert str(options.get("name") or options["run_name"]).startswith("my-run")
        assert not options.get("id") and not options.get("run_id")
        assert [told["data_path"] for told in config] == ["a b"]
    args, options = found["mlflow.log_metrics" if kind == "mlflow" else f"{kind}.log"]
    assert (args[0], options["step"]) == ({"a/b": 1.0}, 7)
    assert ("mlflow.end_run" if kind == "mlflow" else f"{kind}.finish") in found
