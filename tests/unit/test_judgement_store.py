"""The arena's database: nothing accepted is lost, nothing is judged twice, other files are left alone; and
what its judgements amount to, by hand.
"""

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
from common.models.tensor_ops import wilson_interval
from serving.judgement_store import JudgementStore, Pair, export_pairs, win_rates
from serving.web_server import RejectedRequest

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
            except RejectedRequest:
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
    assert export_pairs(store, target, as_labels=True) == {
        "written": 3, "ties": 1, "with an empty answer": 1, "with two equal answers": 1
    }  # fmt: skip
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    labels = [(row["completion"], row["label"], row["model"]) for row in rows]
    decided = [("yes", True, "m1"), ("no", False, "m2"), ("no", True, "m2"), ("yes", False, "m1")]
    assert labels == [*decided, ("yes", False, "m1"), ("no", False, "m2")], "both bad"
    found = [read_row(row)[0] for row in rows]
    assert [(e.chosen, e.rejected, e.is_rated) for e in found[2:4]] == [
        ("no", None, True),
        (None, "yes", True),
    ]
    assert found[2].prompt == multi


# ---- win rates


def pairs_of(first: str, second: str, choices: str) -> list[Pair]:
    """Judged pairs of two models: a, b, or t for a tie, x for both bad."""
    names = {"t": "tie", "x": "both_bad"}
    return [Pair("", (), "typed", first, second, choice=names.get(c, c)) for c in choices]


@pytest.mark.parametrize(
    ("wins", "total", "low", "high"),
    [
        # z = 1.96: centre (0.8 + 0.19208) / 1.38415, half 1.96 / 1.38415 x sqrt(0.016 + 0.0096037); the plain
        # normal interval ends at 1.048
        (8, 10, 0.4901625, 0.9433178),
        (0, 10, 0.0, 0.27753),
        (10, 10, 0.72247, 1.0),
    ],
)
def test_wilson_by_hand(wins, total, low, high):
    expected = (wins / total, pytest.approx(low, abs=1e-5), pytest.approx(high, abs=1e-5))
    assert wilson_interval(wins, total) == expected
    assert wilson_interval(0, 0) == (None, 0.0, 1.0), "nothing counted is no share"


def test_a_pair_counts_in_either_order_and_ties_are_not_decided():
    found = win_rates(pairs_of("m", "n", "at") + pairs_of("n", "m", "abx") + pairs_of("o", "n", "aa"))
    rates = {"m": (2, 3), "n": (1, 5), "o": (2, 2), "m against n": (2, 3), "n against o": (0, 2)}
    rows = [
        {"name": name, "won": won, "lost": decided - won, "neither": neither}
        | {"rate": wilson_interval(won, decided)._asdict()}
        for (name, (won, decided)), neither in zip(rates.items(), (2, 2, 0, 2, 0), strict=True)
    ]
    m, n, o, *of_two = rows
    assert found == {"models": [o, m, n], "duels": of_two}
    assert win_rates([]) == {"models": [], "duels": []}
