"""What a reward function may see of a raw row besides its prompt: the other columns, as JSON. PURE."""

import json
import math
from collections.abc import Mapping
from typing import Any

MAX_FIELD_CHARACTERS = 4096  # of one field's JSON: answers and labels pass, whole documents do not
# An Example has them already.
CARRIED_COLUMNS = frozenset(
    (
        "prompt",
        "chosen",
        "rejected",
        "messages",
        "conversations",
        "(messages of a tree)",
        "(scored responses)",
    )
)


def build_row_fields(row: Mapping[str, Any]) -> str:
    """A JSON object of the row's columns, less CARRIED_COLUMNS, long fields and what JSON cannot hold.

    NaN and infinity become null, for other languages' JSON knows neither. Arrays become lists.
    """
    parts = []
    for name, value in row.items():
        if name in CARRIED_COLUMNS:
            continue
        try:
            text = json.dumps(_plain(value), ensure_ascii=False)
            member = f"{json.dumps(name, ensure_ascii=False)}: {text}"
            member.encode()  # half of a surrogate pair cannot be stored
        except (TypeError, ValueError):
            continue
        if len(text) <= MAX_FIELD_CHARACTERS:
            parts.append(member)
    return "{" + ", ".join(parts) + "}"


def _plain(value: Any) -> Any:
    """`value` of JSON's own types; TypeError when it holds anything else."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("JSON's keys are text")
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy's and torch's arrays and numbers
        return _plain(value.tolist())
    raise TypeError(type(value).__name__)
