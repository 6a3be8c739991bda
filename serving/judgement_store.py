"""Pairs of responses and people's judgements in one SQLite file; win rates, and export as training data.

Everything accepted is on the disk before the call returns (WAL, synchronous=FULL): a crash loses nothing.
"""

import contextlib
import json
import sqlite3
import threading
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from common.data.example import Message
from common.models.tensor_ops import wilson_interval
from common.runs.durable_files import json_line, write_file
from serving.web_server import RejectedRequest

_APPLICATION_ID = 0x54524950  # "TRIP": identifies an arena's file
_VERSION = 1
_BUSY_SECONDS = 10.0
_SETTINGS = f"""
PRAGMA synchronous = FULL;
PRAGMA foreign_keys = ON;
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {_VERSION};
"""
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
_NEITHER = ("neither", "neither")
_OUTCOMES = {"a": ("won", "lost"), "b": ("lost", "won"), "tie": _NEITHER, "both_bad": _NEITHER}
_SELECT = (
    "SELECT id, prompt, source, model_a, model_b, answer_a, answer_b, error_a, error_b, choice"
    " FROM pairs LEFT JOIN judgements j ON pair_id = id"
)


@dataclass(frozen=True)
class Pair:
    """Two responses to a prompt; None until complete, and after an error."""

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
        """Whether both responses are complete."""
        return self.answer_a is not None and self.answer_b is not None


class JudgementStore:
    """The file of an arena, shared by threads and by other processes.

    Every statement is a separate transaction. All methods raise RejectedRequest if the file cannot be used.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises ValueError if it is another program's, damaged or not writable."""
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
        # In this order: another arena may be creating the file, and it creates the tables last.
        [num_tables] = run("SELECT count(*) FROM sqlite_master").fetchone()
        [owner] = run("PRAGMA application_id").fetchone()
        [version] = run("PRAGMA user_version").fetchone()
        if num_tables and (owner != _APPLICATION_ID or version > _VERSION):
            raise sqlite3.DatabaseError("it belongs to another program, or to a later version of this one")
        [state] = run("PRAGMA quick_check(1)").fetchone()
        if state != "ok":
            raise sqlite3.DatabaseError(f"it is damaged: {state}")
        with contextlib.suppress(sqlite3.OperationalError):  # locked: another arena is setting it
            run("PRAGMA journal_mode = WAL")
        self._connection.executescript(_SETTINGS + _TABLES)

    def _run(self, statement: str, *values: str | None) -> list[tuple]:
        with self._lock:
            try:
                return self._connection.execute(statement, values).fetchall()
            except sqlite3.Error as error:
                message = f"{self.path}: nothing was written ({error}); make room and try again"
                raise RejectedRequest(507, message) from error

    def add_pair(
        self, prompt: Sequence[Message], source: str, model_a: str, model_b: str, sampling: dict
    ) -> Pair:
        """Add a pair, without responses yet."""
        pair = Pair(uuid.uuid4().hex, tuple(prompt), source, model_a, model_b)
        messages = json.dumps([message.as_dict() for message in prompt], ensure_ascii=False)
        columns = "id, created_at, prompt, source, model_a, model_b, sampling"
        statement = f"INSERT INTO pairs ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)"
        self._run(statement, pair.id, _now(), messages, source, model_a, model_b, json.dumps(sampling))
        return pair

    def set_answer(self, pair_id: str, side: str, text: str | None, error: str | None = None) -> None:
        """Store the complete response of side "a" or "b", or its error."""
        assert side in ("a", "b")
        statement = f"UPDATE pairs SET answer_{side} = ?, error_{side} = ? WHERE id = ?"
        self._run(statement, text, error, pair_id)

    def judge(self, pair_id: str, choice: str) -> Pair:
        """Store a judgement ("a", "b", "tie", "both_bad"), unless there is one; return the judged pair."""
        if not self.get(pair_id).is_answered:
            raise RejectedRequest(409, "one of its answers is missing; ask again")
        statement = "INSERT INTO judgements VALUES (?, ?, ?) ON CONFLICT (pair_id) DO NOTHING"
        self._run(statement, pair_id, choice, _now())
        pair = self.get(pair_id)
        if pair.choice != choice:
            raise RejectedRequest(409, f"it was already judged {pair.choice!r}; that judgement is kept")
        return pair

    def get(self, pair_id: str) -> Pair:
        """A pair. Raises RejectedRequest if there is none."""
        rows = self._run(f"{_SELECT} WHERE id = ?", pair_id)
        if not rows:
            raise RejectedRequest(
                404, "there is no such pair in the database; was the server given another --db?"
            )
        return _pair(rows[0])

    def judged(self) -> list[Pair]:
        """All judged pairs, in the order of their judgements."""
        return [_pair(row) for row in self._run(f"{_SELECT} WHERE choice IS NOT NULL ORDER BY j.rowid")]

    def num_answered_by_models(self) -> Counter[frozenset[str]]:
        """Number of pairs with complete responses, by their two models."""
        answered = "answer_a IS NOT NULL AND answer_b IS NOT NULL"
        return Counter(map(frozenset, self._run(f"SELECT model_a, model_b FROM pairs WHERE {answered}")))


def _pair(row: tuple) -> Pair:
    prompt = tuple(map(Message.from_dict, json.loads(row[1])))
    return Pair(row[0], prompt, *row[2:])


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def win_rates(pairs: Iterable[Pair]) -> dict[str, list[dict[str, Any]]]:
    """Win rates by name: rows of `models`, the best first, and of `duels` between two.

    A row has its name, how often the (first) model won, lost or tied, and `rate`: its share of the decided
    pairs with Wilson's 95 % interval. Pairs are spread evenly, so a model's overall rate is fair too.
    """
    models: defaultdict[str, Counter[str]] = defaultdict(Counter)
    duels: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for pair in pairs:
        a, b = pair.model_a, pair.model_b
        outcome_a, outcome_b = _OUTCOMES[pair.choice or ""]
        models[a][outcome_a] += 1
        models[b][outcome_b] += 1
        duels[f"{min(a, b)} against {max(a, b)}"][outcome_a if a < b else outcome_b] += 1

    def row(name: str, counts: Counter[str]) -> dict[str, Any]:
        rate = wilson_interval(counts["won"], counts["won"] + counts["lost"])
        return {"name": name, "rate": rate._asdict()} | {
            key: counts[key] for key in ("won", "lost", "neither")
        }

    ranked = sorted((row(*item) for item in models.items()), key=lambda row: -(row["rate"]["value"] or 0))
    return {"models": ranked, "duels": [row(*item) for item in sorted(duels.items())]}


def export_pairs(store: JudgementStore, target: Path, *, as_labels: bool = False) -> Counter[str]:
    """Write a line of JSON for each decided pair; return how many were "written" and left out, by reason.

    The prompt is a list of role and content, so no text in it can be mistaken for a turn. Ties and "both bad"
    have no preferred response and are left out, as are pairs with an empty response or two equal ones.
    `as_labels` writes a line for each response instead, labelled true if it was preferred, else false; for
    "both bad" both are false. Raises OSError if the file cannot be written.
    """
    counts: Counter[str] = Counter()
    lines = []
    for pair in store.judged():
        reason = _exclusion_reason(pair, as_labels)
        counts[reason or "written"] += 1
        if reason:
            continue
        answers = [(pair.answer_a, pair.model_a), (pair.answer_b, pair.model_b)]
        if pair.choice == "b":
            answers.reverse()
        (chosen, chosen_model), (rejected, rejected_model) = answers
        rows: list[dict[str, Any]] = [
            {"chosen": chosen, "rejected": rejected}
            | {"chosen_model": chosen_model, "rejected_model": rejected_model}
        ]
        if as_labels:
            rows = [
                {"completion": chosen, "label": pair.choice != "both_bad", "model": chosen_model},
                {"completion": rejected, "label": False, "model": rejected_model},
            ]
        prompt = [message.as_dict() for message in pair.prompt]
        lines += [json_line({"prompt": prompt} | row) for row in rows]
    write_file(target, "".join(lines))
    return counts


def _exclusion_reason(pair: Pair, as_labels: bool) -> str:
    """Why a judged pair is not exported; "" if it is."""
    texts = {(pair.answer_a or "").strip(), (pair.answer_b or "").strip()}
    if pair.choice == "tie":
        return "ties"
    if pair.choice == "both_bad" and not as_labels:
        return "both bad"
    if "" in texts:
        return "with an empty answer"
    return "with two equal answers" if len(texts) == 1 else ""
