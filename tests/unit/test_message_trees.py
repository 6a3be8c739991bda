"""OpenAssistant's message trees: conversations, ranked pairs, prompts, and trees that are none."""

import pytest
from stage_texts import END, build, put_on_hub, texts, write_rows

from common.data.adapters.row_forms import TREE, tree_examples
from common.data.example import EmptyRow, Message
from common.data.raw_rows import RawRows
from common.data.registry import load_source


def said(name, parent, text, role, rank=None, **more):
    return {
        "message_id": name, "parent_id": parent, "user_id": "u", "created_date": "2023", "text": text,
        "role": role, "lang": "en", "review_count": 3, "review_result": True, "deleted": False, "rank": rank,
        "synthetic": False, "message_tree_id": "a", "tree_state": "ready_for_export",
    } | more  # fmt: skip


# a: "How warm?" -- b (rank 1), c (rank 0) -- d "And now?" -- e (alone) -- f "Thanks"; g (rank 2)
# z: "天气？" alone
TREE_ROWS = [
    said("a", None, "How warm?", "prompter"),
    said("b", "a", "No idea.", "assistant", 1),
    said("z", None, "天气？", "prompter", message_tree_id="z", lang="zh"),
    said("d", "c", "And now?", "prompter", 0),
    said("c", "a", "20 degrees.", "assistant", 0),
    said("e", "d", "暖和。\n　很暖和。", "assistant"),
    said("g", "a", "Fish.", "assistant", 2),
    said("f", "e", "Thanks", "prompter"),
]
WARM = "\n\nHuman: How warm?\n\nAssistant:"
NOW = f"{WARM} 20 degrees.\n\nHuman: And now?\n\nAssistant:"
THANKS = f"{NOW} 暖和。\n　很暖和。\n\nHuman: Thanks\n\nAssistant:"
WEATHER = "\n\nHuman: 天气？\n\nAssistant:"


def test_the_three_steps(monkeypatch, tmp_path, tiny_tokenizer):
    source = "OpenAssistant/oasst2"
    put_on_hub(monkeypatch, source, TREE_ROWS)
    data = build(source, 1, tiny_tokenizer, tmp_path)
    assert texts(data, 1, tiny_tokenizer) == [
        (WARM, f" 20 degrees.{END}"),
        (NOW, f" 暖和。\n　很暖和。{END}"),
    ]
    data = build(source, 2, tiny_tokenizer, tmp_path)
    assert texts(data, 2, tiny_tokenizer) == [
        (WARM, f" 20 degrees.{END}", f" No idea.{END}"),
        (WARM, f" 20 degrees.{END}", f" Fish.{END}"),
        (WARM, f" No idea.{END}", f" Fish.{END}"),
    ]
    assert (data.report.num_empty, data.report.num_bad, data.report.num_raw_rows) == (1, 0, 2)
    assert {row["margin"] for row in data.train} == {0}, "ranks have no distance"
    data = build(source, 3, tiny_tokenizer, tmp_path)
    assert texts(data, 3, tiny_tokenizer) == [WARM, NOW, THANKS, WEATHER]


def test_the_limit_of_pairs_is_for_every_prompt_of_a_tree(tmp_path, tiny_tokenizer):
    answers = [said(f"h{i}", "f", f"You {i}", "assistant", i) for i in range(3)]
    path = write_rows(tmp_path / "messages.jsonl", [*TREE_ROWS, *answers])
    data = build(path, 2, tiny_tokenizer, tmp_path, max_pairs_per_prompt=2, num_stored_epochs=1)
    prompts = [prompt for prompt, _, _ in texts(data, 2, tiny_tokenizer)]
    assert prompts == [WARM, WARM, THANKS, THANKS] and data.report.num_dropped_pairs == 2


def test_equal_ranks_are_a_tie_and_replies_without_ranks_are_all_learnt(tmp_path, tiny_tokenizer):
    rows = [
        said("a", None, "How warm?", "prompter"),
        said("b", "a", "Warm.", "assistant", 0),
        said("c", "a", "Hot.", "assistant", 0),
        said("x", None, "Why?", "prompter"),
        said("y", "x", "So.", "assistant"),
        said("w", "x", "Thus.", "assistant"),
    ]
    path = write_rows(tmp_path / "messages.jsonl", rows)
    learnt = [text for _, text in texts(build(path, 1, tiny_tokenizer, tmp_path), 1, tiny_tokenizer)]
    assert learnt == [f" {word}{END}" for word in ("Warm.", "So.", "Thus.")]
    rows[1]["rank"] = 1
    data = build(write_rows(tmp_path / "messages.jsonl", rows), 2, tiny_tokenizer, tmp_path)
    assert (len(data.train), data.report.num_ties, data.report.num_empty) == (1, 0, 1)
    rows[2]["rank"] = 1
    (tie,) = (e for e in tree_examples({TREE: rows[:3]}) if e.is_tie)
    assert (tie.chosen, tie.rejected) == ("Warm.", "Hot.")


@pytest.mark.parametrize("change", [{"deleted": True}, {"review_result": False}, {"deleted": "True"}])
def test_deleted_and_refused_messages_go_with_all_below_them(change):
    rows = [
        row | change if row["message_id"] == "d" else row for row in TREE_ROWS if row["message_id"] != "z"
    ]
    assert {e.prompt for e in tree_examples({TREE: rows})} == {(Message("user", "How warm?"),)}
    with pytest.raises(EmptyRow, match="deleted or rejected"):
        tree_examples({TREE: [rows[0] | change]})


def test_a_wrong_message_makes_its_tree_bad_and_no_other(tmp_path, tiny_tokenizer):
    for change, reason in (({"text": 3}, "'text of message b' is of type int, not text"),
                           ({"message_id": "c"}, "message 'c' occurs twice")):  # fmt: skip
        rows = [row | change if row["message_id"] == "b" else row for row in TREE_ROWS]
        path = write_rows(tmp_path / "messages.jsonl", rows)
        data = build(path, 3, tiny_tokenizer, tmp_path)
        assert texts(data, 3, tiny_tokenizer) == [WEATHER]
        assert data.report.bad_rows == [f"{path}:1: {reason}"]


def test_messages_that_lead_nowhere_are_counted_and_named(tmp_path, tiny_tokenizer):
    orphans = [said("o", "gone", "x", "assistant"), said("p", "o", "y", "prompter")]
    ring = [said("r", "s", "x", "assistant"), said("s", "r", "y", "prompter")]
    no_role = {key: value for key, value in said("n", "a", "x", "assistant").items() if key != "message_id"}
    rows = [*TREE_ROWS, *orphans, *ring, no_role]
    path = write_rows(tmp_path / "messages.jsonl", rows)
    data = build(path, 3, tiny_tokenizer, tmp_path)
    assert len(data.train) == 4 and data.report.num_bad == 3
    assert [row.removeprefix(f"{path}:") for row in data.report.bad_rows] == [
        "9: message 'o': its parent 'gone' is not in the data",
        "11: message 'r': its parents do not lead to a first message",
        "13: message_id is null, not text",
    ]


def test_a_tree_stays_in_one_share(tmp_path, tiny_tokenizer):
    rows = []
    for n in range(30):
        rows += [said(f"{n}", None, f"q{n}", "prompter")]
        rows += [said(f"{n}.{i}", f"{n}", f"a{n}.{i}", "assistant", i) for i in range(3)]
    path = write_rows(tmp_path / "messages.jsonl", rows)
    seen = []
    for step in (1, 2, 3):
        data = build(path, step, tiny_tokenizer, tmp_path, data_split="1,1,1", eval_fraction=0.3)
        for table in (data.train, data.eval):
            seen.append({table[i]["row_id"].partition("#")[0] for i in range(len(table))})
    assert len(set().union(*seen)) == sum(map(len, seen)) == 30


def test_a_long_chain_of_messages_is_put_together_quickly():
    count = 20_000
    roles = ("prompter", "assistant")
    rows = [said(f"{i}", f"{i - 1}" if i else None, "x", roles[i % 2]) for i in range(count)]
    adapter = load_source("OpenAssistant/oasst1").adapter
    grouped = adapter.arrange(RawRows(rows[::-1], "rows"))
    assert len(grouped) == 1 and len(grouped[0][TREE]) == count
