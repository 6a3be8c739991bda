"""What every program keeps of a run: refused steps, its starts in run.json, requests to stop."""

import json
import math
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from disk_limit import files_up_to
from made_runs import start_logger

from common.data.collators import collate_pairs, collate_sft
from common.data.packed_batch import ROW_IDS, PackedBatch
from common.data.stage_datasets import StageData
from common.data.token_cache import DataReport
from common.flags.value_forms import Interval
from common.ranks import distributed
from common.ranks.failures import StepSkipped, TooManyBadSteps
from common.runs import run as run_module
from common.runs.checkpoints import find_checkpoints
from common.runs.resume import EarlierRun
from common.runs.run import IntervalClock, Run, StopRequest
from common.runs.saved_state import Stateful, TensorReader
from step1_sft.arguments import SFTArguments


def build(
    folder, most: int = 3, earlier: EarlierRun | None = None, saves: str = "500", **parts: Stateful
) -> Run:
    """A run of five rows that keeps these parts."""
    args = SFTArguments(
        model_name_or_path="m", output_dir=str(folder), max_bad_steps=most, dtype="fp32", save_total_limit=0,
        save_interval=Interval(saves),
    )  # fmt: skip
    data = StageData(None, None, DataReport(num_train=5, notes=["n"], cache_folder="digest"))
    rows = {"--batch": 16, "--update": 8}
    return Run(args, earlier or EarlierRun(), start_logger(folder), data, rows, parts, steps_per_epoch=4)


# ---- Skipped steps


def rows_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics(folder) -> list[tuple[int, int]]:
    return [(row["step"], row["perf/bad_steps"]) for row in rows_of(folder / "metrics.jsonl")]


def test_run_counts_refused_steps_and_ends_beyond_max_bad_steps(tmp_path, capsys):
    run, errors = build(tmp_path, most=2), [StepSkipped(f"loss {i} is NaN") for i in range(3)]
    run.record_bad_step(4, errors[0])
    run.record_bad_step(7, errors[1])
    with pytest.raises(TooManyBadSteps, match="loss 2 is NaN\nskipped 3 steps, --max_bad_steps allows 2"):
        run.record_bad_step(7, errors[2])
    (saved,), _ = find_checkpoints(tmp_path)
    assert saved.folder.name == "step-000007" and saved.meta["numbers"]["progress"]["num_refused"] == 3
    assert metrics(tmp_path) == [(4, 1), (7, 2), (7, 3)]
    files = sorted(path.name for path in (tmp_path / "bad_batches").iterdir())
    assert files == [f"step-00000{step}-00{n}-rank-00000.jsonl" for n, step in enumerate((4, 7, 7), 1)]
    printed = capsys.readouterr().out
    assert "step 4 skipped: loss 0 is NaN; its batch is in" in printed and "step 7 skipped" in printed


def test_run_restores_its_counters_from_a_checkpoint(tmp_path):
    first, second = build(tmp_path, most=1), build(tmp_path, most=1)
    first.record_bad_step(1, StepSkipped("no"))
    first.step, first.num_updates = 9, 5  # several a step, but none in some
    second.load(TensorReader([]), first.json_state())
    assert second.num_updates == 5
    with pytest.raises(TooManyBadSteps, match="skipped 2 steps"):
        second.record_bad_step(2, StepSkipped("no"))


def test_run_resumed_elsewhere_saves_the_loaded_state_there(tmp_path, monkeypatch):
    monkeypatch.setattr(StopRequest, "install", lambda _: None)
    earlier = EarlierRun()
    for name in ("old", "new"):
        run = build(tmp_path / name, 0, earlier)
        run.begin()
        with pytest.raises(TooManyBadSteps):
            run.record_bad_step(0, StepSkipped("no"))
        found, _ = find_checkpoints(tmp_path / name)
        assert [checkpoint.folder.name for checkpoint in found] == ["step-000000"]
        earlier = EarlierRun(found, is_elsewhere=True)


def test_run_writes_the_batch_of_a_refused_step(tmp_path, monkeypatch):
    monkeypatch.setattr("common.ranks.distributed.rank", lambda: 3)
    columns = {
        "ids": [torch.tensor([1, 2]), torch.tensor([], dtype=torch.int64)],
        "logprobs": [torch.tensor([-0.5, math.nan]), torch.tensor([math.inf])],
    }
    first = PackedBatch.build(("a", "b"), columns).with_texts(ROW_IDS, ["f:1", "ä:2"])
    second = PackedBatch.build(("c",), {"ids": [torch.tensor([5, 6])]})
    build(tmp_path).record_bad_step(12, StepSkipped("why", [first, second]))
    (file,) = (tmp_path / "bad_batches").iterdir()
    assert file.name == "step-000012-001-rank-00003.jsonl"
    head, a, b, c = rows_of(file)
    assert head == {"step": 12, "reason": "why"}
    assert a["id"] == "a" and a["ids"] == [1, 2] and a["logprobs"] == [-0.5, None]
    assert b["ids"] == [] and b["logprobs"] == [None]
    assert a["row_ids"] == "f:1" and b["row_ids"] == "ä:2"
    assert c == {"id": "c", "ids": [5, 6]}


def test_run_writes_refused_batches_of_every_kind_with_row_ids(tmp_path):
    row = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "row_id": "r"}
    pair = {"chosen_response_start": 1, "rejected_response_start": 1, "margin": 1.5, "row_id": "p"}
    pair |= {"chosen_ids": [1, 2, 3], "rejected_ids": [1, 4]}
    build(tmp_path).record_bad_step(1, StepSkipped("no", [collate_sft([row]), collate_pairs([pair])]))
    (file,) = (tmp_path / "bad_batches").iterdir()
    assert [written["id"] for written in rows_of(file)[1:]] == ["(0, 'r')", "(0, 'p')"]


def test_run_reports_a_refused_batch_that_cannot_be_written(tmp_path, capsys):
    run = build(tmp_path)
    batch = PackedBatch.build(range(50), {"ids": list(torch.arange(5000).view(50, 100))})
    with files_up_to(6000):
        run.record_bad_step(1, StepSkipped("no", [batch]))
    assert "its batch could not be written to" in capsys.readouterr().out


# ---- When the state is saved


@pytest.mark.parametrize(
    ("saves", "steps"),  # of 9, each of which takes 1,000 seconds
    [
        ("0", []),
        ("2", [2, 4, 6, 8, 9]),
        ("epoch", [4, 8, 9]),
        ("2000s", [2, 4, 6, 8, 9]),
        ("2001s", [3, 6, 9]),
        ("30m", [2, 4, 6, 8, 9]),
        ("2h", [8, 9]),
    ],
)
def test_save_interval_by_steps_epochs_and_time(saves, steps, tmp_path, monkeypatch):
    clock = [50.0]
    monkeypatch.setattr(run_module.time, "monotonic", lambda: clock[0])
    run = build(tmp_path, saves=saves)
    for step in range(10):
        run.step = step
        run.checkpoint_if_due(step)
        run.checkpoint_if_due(step + 1, "update-0001")  # in the middle of the next one
        clock[0] += 1000
    assert [int(c.folder.name[5:]) for c in reversed(find_checkpoints(tmp_path)[0])] == steps


def test_interval_clock_follows_the_first_rank(monkeypatch):
    """Each rank answers as the largest of what they give, which is the first one's."""
    given, answer = [], [0.0]
    monkeypatch.setattr(distributed, "max_float", lambda value: given.append(value) or answer[0])
    for rank in (0, 1):
        monkeypatch.setattr(distributed, "is_main", lambda rank=rank: rank == 0)
        clock = IntervalClock(Interval("1s"), 1)
        for seconds, own, of_all in ((0.5, 0.0, 0.0), (0.6, 1.0, 1.0), (0.9, 0.0, 0.0), (0.2, 1.0, 1.0)):
            clock._last -= seconds
            answer[0] = of_all
            assert clock.is_due(1) == bool(of_all) and given.pop() == (own if rank == 0 else 0.0)
    IntervalClock(Interval("3"), 1).is_due(3)
    assert not given, "steps need no other rank"


# ---- run.json


class EnginePart(Stateful):
    """A part of a checkpoint that has an engine: itself."""

    def __init__(self) -> None:
        self.engine = self
        self.module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2, bias=False))
        self.module[0].requires_grad_(False)


def describe(folder, step: int, last_saved: str = "") -> dict:
    run = build(folder, actor=EnginePart())
    run.step, run.last_saved = step, last_saved
    found = run.describe()
    (folder / "run.json").write_text(json.dumps(found))
    return found


def test_run_json_describes_a_start(tmp_path):
    about = describe(tmp_path, 7)
    defaults, (start,) = about["defaults"], about["starts"]
    assert about["num_steps"] == 9 and defaults["seed"] == 1234 and defaults["trackers"] == []
    told = {"from_step": 7, "data_key": "digest", "global_rows": 16, "dtype": "fp32", "world_size": 1}
    assert start.items() >= told.items() and start["device"]
    assert start["versions"]["torch"] == version("torch")
    assert start["data"]["num_train"] == 5 and "notes" not in start["data"]
    assert start["parameters"] == {"actor": {"all": 24, "trained": 8}}


def test_run_json_keeps_earlier_starts_on_resume(tmp_path):
    describe(tmp_path, 0)
    found = describe(tmp_path, 4, "step-000004")
    assert [start["from_step"] for start in found["starts"]] == [0, 4]
    assert len(describe(tmp_path, 0)["starts"]) == 1
    (tmp_path / "run.json").write_text('{"sta')  # torn: it decides nothing
    assert [start["from_step"] for start in describe(tmp_path, 4, "step-000004")["starts"]] == [4]


# ---- Requests to stop


ROOT = Path(__file__).resolve().parents[2]
# A program that says what it knows. "wait" puts its main thread where no handler is ever called: in C
# code, as in a collective that waits for another rank.
PROGRAM = """
import ctypes, signal, sys
from common.runs.run import StopRequest
{before}
request = StopRequest()
request.install()
print("ready", flush=True)
for line in sys.stdin:
    if line == "wait\\n":
        print("waiting", flush=True)
        library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_lock(mutex)
    print(request.name or "nothing", request.is_asked_anywhere(), flush=True)
"""


@pytest.fixture
def start():
    """Start such a program, and end it."""
    started = []

    def begin(before: str = "") -> subprocess.Popen:
        text = PROGRAM.format(before=before)
        process = subprocess.Popen(
            [sys.executable, "-c", text], cwd=ROOT, text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        started.append(process)
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()


def ask(process: subprocess.Popen) -> str:
    process.stdin.write("say\n")
    return process.stdout.readline().strip()


def ask_until(process: subprocess.Popen, expected: str) -> None:
    """The signal is taken in by another thread, a moment later."""
    until = time.monotonic() + 20
    while (found := ask(process)) != expected:
        assert time.monotonic() < until, found
        time.sleep(0.02)


@pytest.mark.slow
def test_stop_request_second_signal_exits_even_inside_c_code(start):
    process = start("import common.runs.run as s; s.SAME_REQUEST_SECONDS = 0.1")
    process.stdin.write("wait\n")
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 128 + signal.SIGINT
    assert "SIGINT again: exiting at once" in process.stderr.read()


@pytest.mark.slow
def test_stop_request_respects_ignored_signals_and_a_closed_stderr(start):
    """As nohup has it; and a launch script pipes into tee, which a signal for the whole group ends first."""
    process = start("signal.signal(signal.SIGINT, signal.SIG_IGN)")
    process.stderr.close()
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert ask(process) == "nothing False"
    process.send_signal(signal.SIGTERM)
    ask_until(process, "SIGTERM True")


def test_stop_request_counts_signals_close_together_as_one(monkeypatch):
    clock, left = [100.0], []
    monkeypatch.setattr(run_module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(run_module.os, "_exit", left.append)
    monkeypatch.setattr(run_module.os, "write", lambda *_: None)
    request = StopRequest()
    for now, expected in ((100.0, []), (101.9, []), (102.0, []), (102.1, [130])):
        clock[0] = now
        request._handle(signal.SIGINT)
        assert left == expected, now
    assert request.name == "SIGINT"


def test_stop_request_on_any_rank_stops_all(monkeypatch):
    """The answer is the largest over ranks, so that all leave after the same step."""
    request, given = StopRequest(), []
    monkeypatch.setattr(distributed, "max_float", lambda value: given.append(value) or 1.0)
    assert request.is_asked_anywhere() and given == [0.0]
    request.name = "SIGTERM"
    monkeypatch.setattr(distributed, "max_float", lambda value: value)
    assert request.is_asked_anywhere()
