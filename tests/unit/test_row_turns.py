"""Turns of a dialogue: what marks them as context, calls, tools and thoughts, parts, nulls, empty ones."""

import json
from collections import Counter

import pytest

from common.data.adapters.row_forms import read_row
from common.data.example import BadRow, EmptyRow, Message, missing_for


def user(content, **keys):
    return {"role": "user", "content": content} | keys


def reply(content, **keys):
    return {"role": "assistant", "content": content} | keys


def only(row, **more):
    (example,) = read_row(row, **more)
    return example


def said(messages):
    return [(message.role, message.content) for message in messages]


CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"b": 1, "a": None}}}
LOOKED = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"b": 1}}}
QUESTION = user("warm?")


# ---- keys of turns


@pytest.mark.parametrize(
    ("mark", "is_learned"),
    [
        *[({"weight": value}, True) for value in (1, 1.0, True, "1", None)],
        *[({"weight": value}, False) for value in (0, 0.0, False, "0", "false ")],
        *[
            ({name: False}, False)
            for name in ("train", "training", "trainable", "learn", "loss", "loss_mask")
        ],
        ({"loss_weight": 0}, False),
        ({"masked": True}, False),
        ({"masked": 0}, True),
        ({"weight": 1, "train": False}, False),
    ],
)
def test_a_mark_says_whether_a_turn_is_learnt(mark, is_learned):
    example = only({"messages": [QUESTION, reply("WRONG", **mark), user("sure?"), reply("cold")]})
    assert (example.prompt[1].is_learned, example.chosen) == (is_learned, "cold")
    unread = Counter()
    read_row({"messages": [user("warm?", **mark), reply("cold")]}, unread=unread)
    assert bool(unread) == (None not in mark.values()), "nothing of a user's turn is learnt anyhow"


@pytest.mark.parametrize(
    "mark", [{"weight": 0.5}, {"weight": -1}, {"train": "maybe"}, {"loss": []}, {"masked": 2}]
)
def test_a_mark_that_is_neither_yes_nor_no_is_bad(mark):
    (name,) = mark
    with pytest.raises(BadRow, match=rf"messages\[1\]\['{name}'\] is"):
        read_row({"messages": [QUESTION, reply("cold", **mark)]})


def test_the_last_turn_that_is_learnt_is_the_reply_and_none_is_an_empty_row():
    turns = [QUESTION, reply("cold"), user("sure?"), reply("WRONG", weight=0)]
    example = only({"messages": turns})
    assert (said(example.prompt), example.chosen) == ([("user", "warm?")], "cold")
    example = only({"messages": [QUESTION, reply("WRONG", weight=0)]})
    assert isinstance(missing_for(1, example), EmptyRow) and missing_for(3, example) is None


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "hi", "chosen": [reply("a", weight=0)], "rejected": [reply("b")]},
        {"messages": [QUESTION], "chosen": reply("a"), "rejected": reply("b", train=False)},
        {"messages": [QUESTION, reply("a", weight=0)], "label": True},
    ],
)
def test_a_masked_reply_of_a_pair_or_with_a_label_is_bad(row):
    with pytest.raises(BadRow, match="marked as context"):
        read_row(row)


def test_calls_tools_and_thoughts_go_with_the_turns():
    turns = [
        {"role": "developer", "content": "Look."},
        user([{"type": "text", "text": "warm"}, {"type": "text", "text": "?", "image": None}], name="Ann"),
        reply(None, tool_calls=[CALL], function_call=None),
        {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "look"},
        reply("cold", thinking="3 is cold", reasoning=None),
    ]
    tools = [{"name": "look", "parameters": {"z": 1, "a": None}}]
    example = only({"messages": turns, "tools": tools})
    assert said(example.prompt) == [("system", "Look."), ("user", "warm?"), ("assistant", ""), ("tool", "3")]
    extras = [json.loads(message.extras or "{}") for message in (*example.prompt, example.chosen)]
    assert extras == [
        {},
        {"name": "Ann"},
        {"tool_calls": [LOOKED]},
        {"name": "look", "tool_call_id": "c1"},
        {"reasoning_content": "3 is cold"},
    ]
    assert example.chosen.content == "cold"
    assert example.tools == '[{"type": "function", "function": {"name": "look", "parameters": {"z": 1}}}]'
    assert only({"messages": turns, "functions": json.dumps(tools)}).tools == example.tools


@pytest.mark.parametrize(
    "call",
    [
        {"tool_calls": [CALL]},
        {"tool_calls": [CALL | {"function": {"name": "look", "arguments": '{"b": 1}'}}]},
        {"tool_calls": json.dumps([LOOKED])},
        {"function_call": {"name": "look", "arguments": '{"b": 1}'}},
        {"tool_calls": [{"name": "look", "arguments": {"b": 1}}]},
    ],
)
def test_a_call_has_one_form_whatever_its_row_has(call):
    example = only({"messages": [QUESTION, reply(None, **call)]})
    (found,) = json.loads(example.chosen.extras)["tool_calls"]
    assert found["function"] == {"name": "look", "arguments": {"b": 1}} and found["type"] == "function"


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"tool_calls": [{"function": {"arguments": {}}}]}, "without the name of a function"),
        ({"tool_calls": [3]}, "without the name of a function"),
        ({"tool_calls": "look()"}, "is not JSON"),
        ({"tool_calls": [{"name": "look", "arguments": "[1]"}]}, "not an object"),
        ({"tool_calls": [{"name": "look", "arguments": "b=1"}]}, "arguments: the text is not JSON"),
        ({"reasoning_content": ["t"]}, "reasoning_content is of type list"),
        ({"reasoning_content": "a", "thought": "b"}, "'reasoning_content' and 'thought', which differ"),
        ({"value": "other"}, "'content' and 'value', which differ"),
        ({"content": {"text": "a"}}, "is of type dict, not text"),
        ({"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "part 'image_url'"),
        ({"content": ["a", {"type": "text", "text": "b", "weight": 0}]}, "is not text; give text only"),
        ({"images": ["a.png"]}, "'images'.*only text"),
        ({"audio": {"id": "x"}}, "'audio'.*only text"),
        ({"tools": "[]"}, "'tools'.*a column `tools`"),
        ({"train_detail": [{"begin_offset": 0}]}, "'train_detail'.*`weight` 0"),
    ],
)
def test_a_turn_that_nothing_can_learn_as_it_is_is_bad(keys, reason):
    with pytest.raises(BadRow, match=reason) as raised:
        read_row({"messages": [QUESTION, reply("a") | keys]})
    assert not isinstance(raised.value, EmptyRow)


# ---- nulls and empty turns


def with_nulls(turn):
    names = ("role", "content", "from", "value", "tool_calls", "weight", "images", "name", "function_call")
    return dict.fromkeys(names) | turn


@pytest.mark.parametrize(
    "turns",
    [[QUESTION, reply("cold")], [{"from": "human", "value": "warm?"}, {"from": "gpt", "value": "cold"}]],
)
def test_a_null_is_an_absent_key_of_a_turn(turns):
    unread = Counter()
    row = {"messages": [with_nulls(turn) for turn in turns], "system": None, "tools": None, "history": None}
    example = only(row | {"images": None, "label": None, "chosen": None}, unread=unread)
    assert (said(example.prompt), example.chosen, unread) == ([("user", "warm?")], "cold", {})


def test_a_null_is_an_absent_key_of_an_answer_and_of_a_number():
    answers = [
        {"answer": None, "text": "b", "rank": None, "score": 1},
        {"answer": "a", "text": None, "score": 2},
    ]
    example = only({"prompt": "hi", "answers": answers, "margin": None})
    assert (example.chosen, example.rejected) == ("a", "b")
    row = {"prompt": "hi", "chosen": "a", "rejected": "b", "score_chosen": 1, "score_rejected": None}
    assert not only(row | {"margin": None}).is_tie


@pytest.mark.parametrize("blank", ["", " \n", None, [], [{"type": "text", "text": ""}]])
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_an_empty_turn_makes_the_row_empty(blank, place):
    turns = [QUESTION, reply("cold"), user("sure?"), reply("yes")]
    turns[place] = turns[place] | {"content": blank}
    for row in (
        {"messages": turns},
        {"prompt": turns[:3], "completion": turns[3:]},
        {"prompt": "hi", "history": turns, "output": "x"},
    ):
        with pytest.raises(EmptyRow):
            read_row(row)
    pair = {"messages": turns[:3], "chosen": turns[3], "rejected": reply("no")}
    with pytest.raises(EmptyRow):
        read_row(pair)


def test_an_empty_turn_of_a_transcript_makes_the_row_empty_and_a_silent_tool_does_not():
    with pytest.raises(EmptyRow):
        read_row({"prompt": "\n\nHuman: hi\n\nAssistant:\n\nHuman: hello?\n\nAssistant:", "chosen": "a"})
    turns = [QUESTION, reply(None, tool_calls=[CALL]), {"role": "tool", "content": ""}, reply("cold")]
    assert only({"messages": turns}).prompt[2] == Message("tool", "")
