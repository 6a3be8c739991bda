"""Arbitrary rows in every data set: a row is used, counted as bad, or refused by a message that names it."""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.data.adapters.base import ADAPTERS
from common.data.adapters.public_sets import OWN_NAMES
from common.data.adapters.row_columns import COLUMN_NAMES
from common.data.adapters.row_forms import FORM_COLUMNS, ROW_FORMS
from common.data.adapters.row_parts import MEDIA
from common.data.chat_template import build_template
from common.data.data_options import DataOptions, check_sources
from common.data.example import BadRow
from common.data.raw_rows import RawRows
from common.data.stage_datasets import build_data

NUM_CASES = 700  # of each of three: 2,100
OTHER_NAMES = {name for names in COLUMN_NAMES.values() for name in names}
COLUMNS = sorted(FORM_COLUMNS | OTHER_NAMES | {*MEDIA, "labels", "other"})
ROLES = ["system", "user", "assistant", "tool", "function_call", "", None, 3]

# Text that breaks readers: halves of surrogate pairs, NUL, marks of order, joined emoji, very long.
odd_text = st.sampled_from(
    ["", " ", "\n\nHuman:", "\n\nAssistant:", "Human: a\n\nAssistant: b", "\ud800", "a\udc00b", "\x00",
     "\u202e", "\u2028", "\ufeff", "\U0001f468\u200d\U0001f469", "<|endoftext|>", "<|endoftext|>" * 3,
     "x" * 5000, "e\u0301" * 99]
)  # fmt: skip
text = st.one_of(
    odd_text, st.text(max_size=30), st.sampled_from(["How are you?", "I am fine.", "It is warm."])
)
number = st.one_of(st.integers(), st.floats(), st.sampled_from([10**400, -(10**400), 1e308, float("nan")]))
scalar = st.one_of(st.none(), st.booleans(), number, text)
anything = st.recursive(
    scalar,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(text, inner, max_size=4)),
    max_leaves=12,
)
message = st.one_of(
    st.fixed_dictionaries(
        {"role": st.sampled_from(ROLES), "content": st.one_of(text, anything)},
        optional={name: st.one_of(scalar, anything) for name in ("weight", "tool_calls", "name", "thinking")},
    ),
    anything,
)
value = st.one_of(text, st.lists(text, max_size=3), st.lists(message, max_size=4), anything)
more_columns = {"margin": st.one_of(number, text), "input": value, "other": value}
more_columns |= {name: st.one_of(number, text) for name in ("parent_id", "rank", "helpfulness", "deleted")}
more_columns |= {name: value for name in ("system", "history", "tools", "weight", "label", "score_chosen")}
row_of_a_form = st.sampled_from(ROW_FORMS).flatmap(
    lambda form: st.fixed_dictionaries(
        {column: value for column in form.columns},
        optional={name: kind for name, kind in more_columns.items() if name not in form.columns},
    )
)
# Right in all but one column: what is read after the others is reached too.
one_odd_column = st.tuples(
    st.fixed_dictionaries({}, optional=more_columns),
    st.sampled_from(["margin", "chosen", "prompt", ""]),
    value,
).map(lambda parts: {"prompt": "a", "chosen": "b", "rejected": "c"} | parts[0] | {parts[1]: parts[2]})
any_row = st.one_of(
    row_of_a_form, one_odd_column, st.dictionaries(st.sampled_from(COLUMNS), value, max_size=5), anything
)
raw_line = st.one_of(
    st.text(max_size=40).map(lambda line: line.encode("utf-8", "surrogatepass")),
    st.binary(max_size=40),
    st.just(b"[" * 100_000),
    st.just(b'{"prompt":' * 4_000),
    st.just(b'{"prompt": "a", "prompt": 3, "chosen": "b"}'),
    st.just(b'{"prompt": 1e999999, "answer": -0.0}'),
    st.just(b'{"prompt": ' + b"9" * 6000 + b"}"),
)
line = st.one_of(any_row.map(lambda row: json.dumps(row).encode()), raw_line)
good_rows = [
    {"prompt": f"How warm is day {n}?", "chosen": f"It is {n} fine.", "rejected": "No."} for n in range(6)
]


@pytest.fixture(scope="module")
def template(tiny_tokenizer):
    return build_template("plain", tiny_tokenizer)


def build(step: int, content: bytes, name: str, template: Any, max_bad_rows: int) -> None:
    """Do with a file what main() does before a model is loaded; ValueError with a message for the user."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(content)
        options = DataOptions(
            [str(path)], step, data_split="1,1,1", max_tokens=16,
            max_bad_rows=max_bad_rows, cache_dir=folder, eval_fraction=0.2,
        )  # fmt: skip
        problems = check_sources(options)
        if problems:
            raise ValueError("\n".join(problems))
        data = build_data(options, template)
        for table in (data.train, data.eval):
            for index in range(len(table)):
                json.dumps(table[index], allow_nan=False)  # plain numbers and text, for a collator
        assert len(data.train) and data.report.num_bad <= max_bad_rows
        "\n".join(data.report.lines()).encode()


def assert_named(error: ValueError, name: str) -> None:
    """Fail unless a message names what the user gave."""
    text = str(error)
    text.encode("utf-8", "backslashreplace")
    assert re.search(rf"{re.escape(name)}|--max_bad_rows", text), text
    assert len(text) < 20_000


def fuzz(num_cases: int) -> settings:
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    return settings(max_examples=num_cases, deadline=None, suppress_health_check=slow, derandomize=True)


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("num_cases", [40, pytest.param(NUM_CASES, marks=pytest.mark.slow)])
def test_arbitrary_files(template, step, num_cases):
    outcomes = {"built": 0, "refused": 0}

    @fuzz(num_cases)
    @given(
        lines=st.lists(line, max_size=4),
        with_good=st.booleans(),
        max_bad_rows=st.sampled_from([0, 1, 100]),
        as_list=st.booleans(),
    )
    def check(lines, with_good, max_bad_rows, as_list):
        lines = [*lines, *(json.dumps(row).encode() for row in good_rows)] if with_good else lines
        content = b"[" + b",".join(lines) + b"]" if as_list else b"\n".join(lines)
        try:
            build(step, content, "rows.jsonl", template, max_bad_rows)
            outcomes["built"] += 1
        except ValueError as error:
            assert_named(error, "rows.jsonl")
            outcomes["refused"] += 1

    check()
    assert min(outcomes.values()) > num_cases // 50, outcomes  # both ways were walked


ADAPTER_COLUMNS = {path.partition(".")[0] for names in OWN_NAMES.values() for path in names.values()}
ADAPTER_COLUMNS |= {"prompt", "label", "chosen", "rejected", "answer_0", "answer_1", "score_0", "score_1"}
ADAPTER_COLUMNS |= {"history", "human_ref_A", "human_ref_B", "labels"}


@fuzz(300)
@given(
    name=st.sampled_from(sorted(ADAPTERS)),
    row=st.dictionaries(st.sampled_from(sorted(ADAPTER_COLUMNS)), st.one_of(value, number)),
)
def test_rows_of_known_data_sets(name, row):
    rows = RawRows([dict.fromkeys(ADAPTER_COLUMNS, "a\n\nAssistant: b") | row], "rows")
    try:
        for example in ADAPTERS[name](name).to_examples(rows[0]):
            assert example.prompt or example.text
    except BadRow as error:
        assert 0 < len(str(error)) < 500
