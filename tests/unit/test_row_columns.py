"""No column is left out in silence: other names, what stands before a dialogue, the report, numbers."""

import json
from collections import Counter

import pytest
from stage_texts import build, make_options, texts, write_rows
from test_row_turns import only, reply, said, user

from common.data.adapters.row_forms import read_row
from common.data.data_options import check_sources
from common.data.example import BadRow, EmptyRow, Message, missing_for
from common.data.registry import load_source
from common.data.stage_datasets import unpair

QUESTION = user("warm?")


# ---- columns


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "warm?", "output": "cold"},
        {"prompt": "warm?", "chosen": "cold", "rejected": "no"},
        {"messages": [QUESTION, reply("cold")]},
        {"conversations": [{"from": "human", "value": "warm?"}], "chosen": "cold", "rejected": "no"},
        {"prompt": "warm?", "responses": ["cold", "no"], "scores": [2, 1]},
        {"chosen": [QUESTION, reply("cold")], "rejected": [QUESTION, reply("no")]},
        {"prompt": "warm?", "completion": [reply("cold")]},
        {"prompt": "warm?", "response": "cold", "label": True},
    ],
)
def test_system_history_and_tools_stand_before_every_form(row):
    more = {"system": "Be brief.", "history": [["hi", "hello"]], "tools": [{"name": "look"}]}
    example = only(row | more)
    assert said(example.prompt) == [
        ("system", "Be brief."), ("user", "hi"), ("assistant", "hello"), ("user", "warm?")
    ]  # fmt: skip
    assert example.chosen == "cold" and '"look"' in example.tools
    assert only(row | {"system": " ", "history": [], "tools": "", "images": []}).prompt[0].role == "user"


@pytest.mark.parametrize(
    ("columns", "first", "learnt"),
    [
        ({"prompt": "p", "chosen": "a", "rejected": "b"}, "p", "a"),
        ({"prompt": "p", "answer": "a"}, "p", "a"),
        ({"instruction": "p", "output": "a"}, "p", "a"),
        ({"prompt": "p", "response": "a", "label": 1}, "p", "a"),
        ({"prompt": "p"}, "warm?", "cold"),
        ({"question": "p", "answer": "a"}, "warm?", "cold"),
        ({"query": "p", "context": "a"}, "warm?", "cold"),
        ({"response": "a", "label": True}, "warm?", "cold"),
    ],
)
def test_which_columns_are_read_where_a_dialogue_stands_beside(columns, first, learnt):
    example = only(columns | {"messages": [QUESTION, reply("cold")]})
    assert (example.prompt[0].content, example.chosen) == (first, learnt)


@pytest.mark.parametrize("task", ["instruction", "question", "query"])
@pytest.mark.parametrize("more", ["input", "context"])
def test_what_goes_with_a_request_follows_it(task, more):
    example = only({task: "warm?", more: "Here.", "response": "cold"})
    assert (said(example.prompt), example.chosen) == ([("user", "warm?\n\nHere.")], "cold")
    assert only({"prompt": "warm?", more: "Here.", "response": "cold"}).prompt == (Message("user", "warm?"),)


def test_a_response_of_turns_follows_the_prompt_or_is_the_whole_conversation():
    before = [user("hi"), reply("hello"), QUESTION]
    after = [reply("I look"), {"role": "tool", "content": "3"}, reply("cold")]
    for response in (after, [*before, *after]):
        example = only({"prompt": before, "response": response})
        assert [m.content for m in example.prompt] == ["hi", "hello", "warm?", "I look", "3"]
        learned = [m.content for m in example.prompt if m.role == "assistant" and m.is_learned]
        assert (learned, example.chosen, example.learn_all_turns) == (["I look"], "cold", True)


def test_rated_answers_keep_their_tools(tmp_path):
    pair = {"prompt": "q", "chosen": "a", "rejected": "b", "tools": [{"name": "look"}]}
    examples = unpair(read_row(pair))
    assert [bool(example.tools) for example in examples] == [True, True]


def test_one_system_message_is_enough():
    turns = [{"role": "system", "content": "Be brief."}, QUESTION, reply("cold")]
    assert len(only({"messages": turns, "system": "Be brief. "}).prompt) == 2
    with pytest.raises(BadRow, match="'system' differs from the system message"):
        read_row({"messages": turns, "system": "Be long."})


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "a", "system": "b"}, "'system' cannot be used: it cannot be combined"),
        ({"text": "a", "tools": [{"name": "look"}]}, "'tools' cannot be used"),
        ({"prompt": "a", "answer": "b", "images": ["x.png"]}, "'images' cannot be used: only text"),
        ({"prompt": "a", "answer": "b", "history": "c"}, "'history' is of type str"),
        ({"prompt": "a", "answer": "b", "history": [["c"]]}, r"history\[0\] is of type list, not a question"),
        ({"prompt": "a", "answer": "b", "tools": [{"parameters": {}}]}, "without the name of a function"),
        ({"prompt": "a", "answer": "b", "tools": "look"}, "'?tools'?: the text is not JSON"),
        ({"instruction": "a", "question": "b", "output": "c"}, "`instruction` and `question`; name the one"),
        ({"prompt": "a", "completions": ["b", "c"], "labels": [True, False]}, "0\\] is of type str"),
        ({"chosen": "a", "rejected": "b"}, "`chosen` and `rejected`, but no `prompt`"),
        ({"prompt": "a", "response": [user("b"), reply("c")]}, "turns before the reply"),
        ({"prompt": "a", "chosen": [user("b"), reply("c")], "rejected": "d"}, "turns before the reply"),
        ({"answer": "a", "id": 3}, "the row has `answer`, but no `prompt`"),
        ({"a": 1, "b": None}, "the row has `a`: no column that a form begins with"),
        ({"a": None}, "nulls alone"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_row_is_one_sentence(row, reason):
    with pytest.raises(BadRow, match=reason):
        read_row(row)


def test_a_pair_without_its_other_half_says_what_is_missing():
    for half, more in (("chosen", ", but no `rejected`"), ("rejected", "")):
        problem = missing_for(2, only({"question": "a", half: "b"}))
        assert f"the row has `question` and `{half}`{more}" in str(problem)


def test_a_weight_of_a_row_is_1_or_0():
    row = {"prompt": "a", "answer": "b"}
    assert only(row | {"weight": 1}).chosen == "b"
    for weight, kind in ((0, EmptyRow), (0.5, BadRow), ("heavy", BadRow)):
        example = only(row | {"weight": weight})
        assert type(missing_for(1, example)) is kind and missing_for(3, example) is None


def test_the_report_counts_what_is_not_read(tmp_path, tiny_tokenizer):
    rows = [
        {"messages": [user("warm?", ts=3), reply("cold", weight=1)], "source": "web", "id": n, "lang": "en"}
        for n in range(3)
    ]
    rows[2]["lang"] = None
    path = write_rows(tmp_path / "rows.jsonl", rows)
    notes = build(path, 1, tiny_tokenizer, tmp_path).report.notes
    assert notes == [
        f"{path}: column `lang` is not read: 2 rows",
        f"{path}: column `source` is not read: 3 rows",
        f"{path}: key `ts` of turns is not read: 3 rows",
    ]
    rows = [{"messages": row["messages"][:1], "source": "web"} for row in rows]
    path = write_rows(tmp_path / "prompts.jsonl", rows)
    data = build(path, 3, tiny_tokenizer, tmp_path)
    assert data.report.notes == [f"{path}: key `ts` of turns is not read: 3 rows"]
    assert json.loads(data.train[0]["fields"]) == {"source": "web"}


def test_the_report_counts_columns_of_rows_that_are_joined(tmp_path, tiny_tokenizer):
    rows = [{"prompt": "q", "response": f"a{n}", "helpfulness": n, "coherence": 4} for n in range(3)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    assert build(path, 2, tiny_tokenizer, tmp_path).report.notes == [
        f"{path}: joined column `coherence` is not read: 3 rows"
    ]
    assert build(path, 3, tiny_tokenizer, tmp_path).report.notes, "no reward sees it either"
    path = write_rows(
        tmp_path / "system.jsonl", [row | {"system": f"be {i // 2}"} for i, row in enumerate(rows)]
    )
    data = build(path, 2, tiny_tokenizer, tmp_path, max_bad_rows=1)
    assert [prompt for prompt, _, _ in texts(data, 2, tiny_tokenizer)] == ["be 0\n\nHuman: q\n\nAssistant:"]


def test_a_name_of_a_column_cannot_write_on_the_screen():
    unread = Counter()
    read_row({"text": "a", "\x1b[2J\ud800" + "x" * 99: 1, "名": 2}, unread=unread)
    assert set(unread) == {"column `\\x1b[2J\\ud800" + "x" * 59 + "`", "column `名`"}


def test_many_columns_are_a_few_lines(tmp_path, tiny_tokenizer):
    row = {"prompt": "a", "answer": "b"} | {f"column {n}": n for n in range(50)}
    notes = build(write_rows(tmp_path / "rows.jsonl", [row]), 1, tiny_tokenizer, tmp_path).report.notes
    assert len(notes) == 21 and notes[-1].endswith("30 more are not read")


def test_a_null_in_a_list_of_answers_is_an_empty_one():
    for answers in ({"pos_answers": ["a", None], "neg_answers": ["b"]}, {"ranked_answers": ["a", None]}):
        with pytest.raises(EmptyRow):
            read_row({"prompt": "hi"} | answers)


# ---- numbers


@pytest.mark.parametrize(
    "value", [[], {}, "", " ", False, True, "1_0", "١", "1e39", 1e300, float("nan"), "nan", "inf", -5, "-0.1"]
)
def test_a_margin_is_a_number_of_at_least_0_or_the_row_is_bad(value):
    with pytest.raises(BadRow, match="'margin' is"):
        read_row({"prompt": "hi", "chosen": "a", "rejected": "b", "margin": value})


@pytest.mark.parametrize(
    ("value", "number"), [(0, 0), (1.5, 1.5), ("2", 2), (" 2.5e1 ", 25), (3e38, 3e38), (".5", 0.5)]
)
def test_a_margin_is_what_it_says(value, number):
    assert only({"prompt": "hi", "chosen": "a", "rejected": "b", "margin": value}).margin == number


@pytest.mark.parametrize("value", [True, "1_0", None, float("nan"), float("inf"), "٣", [1], 1e300])
def test_a_score_is_a_number_or_the_row_is_bad(value):
    with pytest.raises(BadRow, match=r"scores\[0\]"):
        read_row({"prompt": "hi", "responses": ["a", "b"], "scores": [value, 1]})
    if value is not None:
        with pytest.raises(BadRow, match="score_chosen"):
            read_row(
                {"prompt": "hi", "chosen": "a", "rejected": "b", "score_chosen": value, "score_rejected": 0}
            )


def test_scores_that_prefer_the_rejected_answer_are_bad():
    row = {"prompt": "hi", "chosen": "a", "rejected": "b", "score_chosen": 2, "score_rejected": 3.5}
    with pytest.raises(BadRow, match="'score_chosen - score_rejected' is -1.5, so the rejected"):
        read_row(row)


# ---- --columns


def test_columns_by_any_name(tmp_path, tiny_tokenizer):
    path = write_rows(tmp_path / "rows.jsonl", [{"frage": "warm?", "prompt": "no", "antwort": "cold"}])
    given = {"columns": "prompt=frage,response=antwort"}
    ((context, learnt),) = texts(build(path, 1, tiny_tokenizer, tmp_path, **given), 1, tiny_tokenizer)
    assert "warm?" in context and "cold" in learnt
    data = build(path, 3, tiny_tokenizer, tmp_path, **given)
    assert json.loads(data.train[0]["fields"]) == {"frage": "warm?", "antwort": "cold"}, "as the row has them"
    other = build(path, 1, tiny_tokenizer, tmp_path, columns="prompt=prompt,response=antwort")
    assert other.key != build(path, 1, tiny_tokenizer, tmp_path, **given).key
    scored = [{"q": "q", "a": f"a{n}", "s": n} for n in range(2)]
    path = write_rows(tmp_path / "scored.jsonl", scored)
    data = build(path, 2, tiny_tokenizer, tmp_path, columns="prompt=q,response=a", score_column="s")
    assert len(data.train) == 1


def test_wrong_columns_are_named(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [{"frage": "warm?", "antwort": "cold"}])
    for columns, reason in (
        ("prompt=question,response=antwort", "the row has no `question`, which should hold its `prompt`"),
        ("promt=frage", "--columns promt=frage: give NAME=COLUMN"),
        ("prompt=frage,promt=x", "--columns promt=x: give NAME=COLUMN"),
        ("prompt", "--columns prompt: give NAME=COLUMN"),
    ):
        (problem, *_) = check_sources(make_options(path, 1, tmp_path, columns=columns))
        assert reason in problem
    assert check_sources(make_options(path, 1, tmp_path, columns="prompt=frage,response=antwort")) == []
    (problem,) = check_sources(make_options("stanfordnlp/SHP", 1, tmp_path, columns="prompt=frage"))
    assert "are named by its adapter" in problem
    with pytest.raises(ValueError, match="leave --columns out"):
        load_source("stanfordnlp/SHP", own_names={"prompt": "frage"})
