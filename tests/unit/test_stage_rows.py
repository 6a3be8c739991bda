"""common/data/stage_rows.py: what of a raw row reaches a reward function."""

import json
from datetime import date

import numpy as np
import pytest

from common.data.stage_rows import MAX_FIELD_CHARACTERS, build_row_fields


def fields(row):
    text = build_row_fields(row)
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_the_columns_of_an_example_are_left_out():
    row = {"prompt": "q", "chosen": "a", "rejected": "b", "messages": [], "answer": "42", "level": 3}
    assert fields(row) == {"answer": "42", "level": 3}
    assert build_row_fields({"prompt": "q"}) == "{}" and build_row_fields({}) == "{}"


def test_values_of_every_kind():
    row = {
        "text": "é\n\"'",
        "number": 0.5,
        "nothing": None,
        "flag": True,
        "nested": {"tests": [["1", 1], ("2", 2)], "nan": float("nan")},
        "nan": float("nan"),
        "infinite": [-float("inf"), 1.0],
        "numpy": np.float32(0.25),
        "numpy_nan": np.float64("nan"),
        "array": np.arange(3),
    }
    expected = row | {
        "nested": {"tests": [["1", 1], ["2", 2]], "nan": None},
        "nan": None,
        "infinite": [None, 1.0],
        "numpy": 0.25,
        "numpy_nan": None,
        "array": [0, 1, 2],
    }
    assert fields(row) == expected and list(fields(row)) == list(row)


@pytest.mark.parametrize("value", [date(2020, 1, 1), b"bytes", {1: "a"}, [object()], "\ud83d", {"a": {2}}])
def test_what_json_cannot_hold_is_left_out(value):
    assert fields({"a": value, "b": 1}) == {"b": 1}


def test_long_fields_are_left_out_by_their_own_length():
    fits = "x" * (MAX_FIELD_CHARACTERS - 2)  # two quotes
    assert fields({"a": fits, "b": fits + "x", "c": "é" * 4000}) == {"a": fits, "c": "é" * 4000}
