"""Pairs of answers and the judgements of people, in one SQLite file, and as training data. No torch in here.

What was accepted is on the disk before the call returns (WAL, synchronous=FULL): a crash loses nothing.
"""

import json
import sqlite3
import threading
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from common.data.example import Message
from common.runs.durable_files import write_file

_APPLICATION_ID = 0x54524950  # "TRIP": tells an arena's file from other programs'
_VERSION = 1
_BUSY_SECONDS = 10.0
_TABLES = """
CREATE TABLE IF NOT EXISTS pairs (
    id TEXT PRIMARY KEY,
    created_at TEXT NOT NULL,
    prompt TEXT NOT NULL,
    source TEXT NOT NULL,
    model_a TEXT NOT NULL,
    model_b TEXT NOT NULL,
    answer_a TEXT,
    answer_b TEXT,
    error_a TEXT,
    error_b TEXT,
    sampling TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS judgements (
    pair_id TEXT PRIMARY KEY REFERENCES pairs (id),
    choice TEXT NOT NULL CHECK (choice IN ('a', 'b', 'tie', 'both_bad')),
    judged_at TEXT NOT NULL
) STRICT;
"""
_SELECT = (
    "SELECT id, prompt, source, model_a, model_b, answer_a, answer_b, error_a, error_b, choice"
    " FROM pairs LEFT JOIN judgements j ON pair_id = id"
)


class Refused(Exception):  # noqa: N818  (nothing went wrong here)
    """A request that cannot be met; the message says why, and what to do, `status` is HTTP's."""

    def __init__(self, message: str, status: int = 422) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Pair:
    """Two answers to a prompt; an answer is None until it is whole, or for ever if there was an error."""

    id: str
    prompt: tuple[Message, ...]
    source: str  # "typed", "follow-up", or the file and line of --data_path
    model_a: str
    model_b: str
    answer_a: str | None = None
    answer_b: str | None = None
    error_a: str | None = None
    error_b: str | None = None
    choice: str | None = None

    @property
    def is_answered(self) -> bool:
        """Whether both answers are there."""
        return self.answer_a is not None and self.answer_b is not None


class JudgementStore:
    """The file of an arena; threads share it, and other processes may read and write beside it."""

    def __init__(self, path: Path) -> None:
        """Open or make the file. Raises ValueError when it is another program's, damaged or not writable."""
        self.path = path
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(
                path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            self._prepare()
        except (OSError, sqlite3.Error) as error:
            raise ValueError(
                f"--db {path} cannot be used ({error}); give a file of the arena's own, or a new name"
            ) from error

    def _prepare(self) -> None:
        run = self._connection.execute
        [owner], [version] = run("PRAGMA application_id").fetchone(), run("PRAGMA user_version").fetchone()
        is_new = not run("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if not is_new and (owner != _APPLICATION_ID or version > _VERSION):
            raise sqlite3.DatabaseError("it belongs to another program, or to a later version of this one")
        [found] = run("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(f"it is damaged: {found}")
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = FULL")
        run("PRAGMA foreign_keys = ON")
        if is_new:
            run(f"PRAGMA application_id = {_APPLICATION_ID}")
            run(f"PRAGMA user_version = {_VERSION}")
        self._connection.executescript(_TABLES)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Give the connection in a transaction. Raises Refused when the disk takes nothing."""
        with self._lock:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                with self._connection:  # commits, or rolls back what raised
                    yield self._connection
            except sqlite3.Error as error:
                message = f"{self.path}: not written ({error}); make room and try again"
                raise Refused(message, 507) from error

    def add_pair(
        self, prompt: Sequence[Message], source: str, model_a: str, model_b: str, sampling: dict
    ) -> Pair:
        """Return a new pair, whose answers follow. Raises Refused."""
        pair = Pair(uuid.uuid4().hex, tuple(prompt), source, model_a, model_b)
        messages = json.dumps([message._asdict() for message in prompt], ensure_ascii=False)
        row = (pair.id, _now(), messages, source, model_a, model_b, json.dumps(sampling))
        columns = "id, created_at, prompt, source, model_a, model_b, sampling"
        with self._writing() as connection:
            connection.execute(f"INSERT INTO pairs ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        return pair

    def set_answer(self, pair_id: str, side: str, text: str | None, error: str | None = None) -> None:
        """Keep the whole answer of side "a" or "b", or why there is none. Raises Refused."""
        assert side in ("a", "b")
        columns = f"answer_{side} = ?, error_{side} = ?"
        with self._writing() as connection:
            connection.execute(f"UPDATE pairs SET {columns} WHERE id = ?", (text, error, pair_id))

    def judge(self, pair_id: str, choice: str) -> Pair:
        """Keep a judgement ("a", "b", "tie", "both_bad") and return the judged pair. Raises Refused.

        The same judgement again changes nothing.
        """
        with self._writing() as connection:
            pair = self._read(pair_id)
            if not pair.is_answered:
                raise Refused("one of its answers is missing, ask again", 409)
            if pair.choice not in (None, choice):
                raise Refused(f"it was judged {pair.choice!r} before, which stays", 409)
            connection.execute(
                "INSERT INTO judgements (pair_id, choice, judged_at) VALUES (?, ?, ?)"
                " ON CONFLICT (pair_id) DO NOTHING",
                (pair_id, choice, _now()),
            )
            return self._read(pair_id)

    def get(self, pair_id: str) -> Pair:
        """Return a pair. Raises Refused."""
        with self._lock:
            return self._read(pair_id)

    def judged(self) -> list[Pair]:
        """Return all judged pairs, in the order of their judgements."""
        with self._lock:
            rows = self._connection.execute(f"{_SELECT} WHERE choice IS NOT NULL ORDER BY j.rowid").fetchall()
        return [_pair(row) for row in rows]

    def num_answered_by_models(self) -> Counter[frozenset[str]]:
        """Return how many pairs each two models have answered."""
        with self._lock:
            rows = self._connection.execute(
                "SELECT model_a, model_b FROM pairs WHERE answer_a IS NOT NULL AND answer_b IS NOT NULL"
            ).fetchall()
        return Counter(map(frozenset, rows))

    def _read(self, pair_id: str) -> Pair:
        row = self._connection.execute(f"{_SELECT} WHERE id = ?", (pair_id,)).fetchone()
        if row is None:
            message = "there is no such pair in the database; was the server given another --db?"
            raise Refused(message, 404)
        return _pair(row)


def _pair(row: tuple) -> Pair:
    prompt = tuple(Message(m["role"], m["content"]) for m in json.loads(row[1]))
    return Pair(row[0], prompt, *row[2:])


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def export_pairs(store: JudgementStore, target: Path) -> Counter[str]:
    """Write a line of JSON for each decided pair; return how many were "written" and left out, by reason.

    The prompt is a list of role and content, so no text in it can be taken for a turn. A tie and "both bad"
    say nothing of which answer is better, and step 2's row form has no place for them: they are left out,
    as are pairs with an empty answer or two equal ones. Raises OSError when the file cannot be written.
    """
    counts: Counter[str] = Counter()
    lines = []
    for pair in store.judged():
        (chosen, chosen_model), (rejected, rejected_model) = sides = [
            (pair.answer_a or "", pair.model_a), (pair.answer_b or "", pair.model_b)
        ]  # fmt: skip
        if pair.choice == "b":
            (chosen, chosen_model), (rejected, rejected_model) = reversed(sides)
        if pair.choice in ("tie", "both_bad"):
            reason = {"tie": "ties", "both_bad": "both bad"}[pair.choice]
        elif not chosen.strip() or not rejected.strip():
            reason = "with an empty answer"
        else:
            reason = "with two equal answers" if chosen.strip() == rejected.strip() else "written"
        counts[reason] += 1
        if reason == "written":
            row = {"prompt": [message._asdict() for message in pair.prompt], "chosen": chosen}
            row |= {"rejected": rejected, "chosen_model": chosen_model, "rejected_model": rejected_model}
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    write_file(target, "".join(lines))
    return counts
