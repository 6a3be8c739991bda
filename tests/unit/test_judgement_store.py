"""The arena's database: nothing accepted is lost, nothing is judged twice, other files are left alone."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.data.adapters.row_forms import read_row
from common.data.example import Message
from serving.judgement_store import JudgementStore, export_pairs
from serving.web_server import Refused

ROOT = Path(__file__).resolve().parents[2]
PROMPT = (Message("user", "Hi\n\nHuman: <b>?"),)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "deep" / "arena.sqlite3"


def answered(store: JudgementStore, a: str = "yes", b: str = "no", prompt: tuple = PROMPT) -> str:
    pair = store.add_pair(prompt, "typed", "m1", "m2", {"temperature": 1})
    store.set_answer(pair.id, "a", a)
    store.set_answer(pair.id, "b", b)
    return pair.id


def test_a_judgement_is_there_when_the_file_is_opened_again(path):
    store = JudgementStore(path)
    assert store._connection.execute("PRAGMA synchronous").fetchone() == (2,), "FULL"
    assert store._connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    pair_id = answered(store)
    assert store.get(pair_id).choice is None
    assert store.judge(pair_id, "b").choice == "b"
    [pair] = JudgementStore(path).judged()
    assert (pair.id, pair.choice, pair.answer_b, pair.model_b) == (pair_id, "b", "no", "m2")
    assert pair.prompt == PROMPT


def test_a_killed_process_loses_nothing_that_it_was_told_is_kept(path):
    program = (
        "import sys; from pathlib import Path; from serving.judgement_store import JudgementStore\n"
        "store = JudgementStore(Path(sys.argv[1]))\n"
        "while True:\n"
        "    pair = store.add_pair((), 'typed', 'm1', 'm2', {})\n"
        "    store.set_answer(pair.id, 'a', 'x'); store.set_answer(pair.id, 'b', 'y')\n"
        "    store.judge(pair.id, 'a'); print(pair.id, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, path], cwd=ROOT, stdout=subprocess.PIPE) as process:
        told = {process.stdout.readline().decode().strip() for _ in range(20)}
        os.kill(process.pid, signal.SIGKILL)
        told |= {line.decode().strip() for line in process.stdout if line.endswith(b"\n")}
    kept = {pair.id for pair in JudgementStore(path).judged()}
    assert len(told) >= 20 and told <= kept


def test_of_judges_at_once_one_is_taken(path):
    stores = [JudgementStore(path) for _ in range(2)]  # as of two processes
    ids, taken = [answered(stores[0]) for _ in range(10)], []

    def judge(number: int) -> None:
        for pair_id in ids:
            try:
                stores[number % 2].judge(pair_id, ("a", "b")[number % 2])
                taken.append((pair_id, ("a", "b")[number % 2]))
            except Refused:
                pass

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(judge, range(4)))
    kept = {pair.id: pair.choice for pair in stores[0].judged()}
    assert set(taken) == set(kept.items()) and len(kept) == 10


def test_arenas_that_begin_at_once_share_a_new_file(tmp_path):
    together = threading.Barrier(8)

    def begin(turn: int) -> None:
        together.wait()
        JudgementStore(tmp_path / str(turn))

    with ThreadPoolExecutor(8) as pool:
        for turn in range(10):
            list(pool.map(begin, [turn] * 8))


def other_database(path: Path) -> None:
    sqlite3.connect(path).executescript("CREATE TABLE theirs (x); INSERT INTO theirs VALUES (1)")


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda path: path.write_text("my notes, which are no database at all " * 9), "not a database"),
        (other_database, "belongs to another program"),
        (lambda path: path.mkdir(), "unable to open"),
    ],
)
def test_files_of_others_and_damaged_ones_are_named_and_not_touched(tmp_path, prepare, words):
    path = tmp_path / "file"
    prepare(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(ValueError, match=f"--db {path} cannot be used .*({words})"):
        JudgementStore(path)
    assert before is None or path.read_bytes() == before


def test_decided_pairs_are_rows_that_step_2_reads_to_the_letter(path, tmp_path):
    store, target = JudgementStore(path), tmp_path / "out.jsonl"
    multi = (*PROMPT, Message("assistant", "So?"), Message("user", "Go on 😀"))
    plain, empty, equal = {}, {"b": " "}, {"a": "no "}
    for choice, more in (("a", plain), ("b", {"prompt": multi}), ("tie", plain), ("both_bad", plain)):
        store.judge(answered(store, **more), choice)
    for choice, more in (("a", empty), ("b", equal)):
        store.judge(answered(store, **more), choice)
    answered(store)
    assert export_pairs(store, target) == {
        "written": 2, "ties": 1, "both bad": 1, "with an empty answer": 1, "with two equal answers": 1
    }  # fmt: skip
    first, second = (read_row(json.loads(line))[0] for line in target.read_text().splitlines())
    assert (first.prompt, first.chosen, first.rejected) == (PROMPT, "yes", "no")
    assert (second.prompt, second.chosen, second.rejected) == (multi, "no", "yes")
    assert json.loads(target.read_text().splitlines()[1])["chosen_model"] == "m2"
