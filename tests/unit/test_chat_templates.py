"""What is learned by chat templates of today: the text is committed, and transformers renders the same.

`PYTHONPATH=. python tests/unit/test_chat_templates.py` writes the texts in chat_templates/ again.
"""

import functools
import json
import re
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from common.data.adapters.row_forms import read_row
from common.data.chat_template import build_template
from common.data.data_options import DataOptions
from common.data.example import BadRow, Example, Message
from common.data.stage_rows import Item, RowBuilder
from common.data.token_cache import DataReport
from common.data.tokenizer import set_end_of_turn

FOLDER = Path(__file__).parent / "chat_templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
MARK = re.compile(r"<\|[^|<>]+\|>|</?s>|<bos>|</?think>|<(?:start|end)_of_turn>|\[/?INST\]|\[gMASK\]|<sop>")
EOS = re.compile(r"\{#- eos (\S+):")

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"day": "Monday"}}}
TURNS = [
    ("user", "Is it warm?"),
    ("assistant", "Yes."),
    ("user", "And tomorrow?"),
    ("assistant", "It snows."),
]
CONVERSATIONS = {
    "two turns": (TURNS, {}),
    "a system message": ([("system", "Be brief."), *TURNS], {}),
    "a thought in the text": ([TURNS[0], ("assistant", "<think>\nThe sun shines.\n</think>\n\nYes.")], {}),
    "a thought by itself": ([TURNS[0], ("assistant", "Yes.", {"reasoning_content": "The sun shines."})], {}),
    "white space around turns": (
        [("user", " Is it warm?\n\n"), ("assistant", "\n  Yes. "), ("user", "And\t"), ("assistant", "No.\n")],
        {},
    ),
    "a call of a tool": (
        [TURNS[0], ("assistant", "", {"tool_calls": [CALL]}), ("tool", "30 degrees"), ("assistant", "Yes.")],
        {"tools": [WEATHER]},
    ),
}


def build_tokenizer(name: str, make_tokenizer) -> PreTrainedTokenizerFast:
    text = (FOLDER / f"{name}.jinja").read_text()
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(set(MARK.findall(text)))})
    tokenizer.chat_template = text
    assert set_end_of_turn(tokenizer, EOS.search(text)[1])
    return tokenizer


def turns_of(said) -> list[dict]:
    return [{"role": turn[0], "content": turn[1]} | (turn[2] if len(turn) > 2 else {}) for turn in said]


def rows_of(tokenizer, said, tools=()) -> tuple[list[dict], DataReport]:
    """Rows of step 1 of a conversation whose replies are all learned."""
    (example,) = read_row({"messages": turns_of(said)} | ({"tools": list(tools)} if tools else {}))
    report = DataReport("sft")
    builder = RowBuilder(build_template("chat", tokenizer), DataOptions([], 1, max_tokens=10_000), report)
    return builder.build([Item(example, "row", "rows:1")]), report


def shown(tokenizer, row: dict) -> str:
    """The text of a row, what is learned in it in [brackets]."""
    text, was_learned = "", False
    for token_id, is_learned in zip(row["input_ids"], row["loss_mask"], strict=True):
        text += "⟦" * (is_learned and not was_learned) + "⟧" * (was_learned and not is_learned)
        text += tokenizer.decode([token_id])
        was_learned = is_learned
    return text + "⟧" * was_learned


def learned_text(name: str, make_tokenizer) -> str:
    tokenizer, parts = build_tokenizer(name, make_tokenizer), []
    for title, (said, columns) in CONVERSATIONS.items():
        rows, report = rows_of(tokenizer, said, **columns)
        lines = [shown(tokenizer, row) for row in rows] or [report.bad_rows[0].replace("rows:1", "bad row")]
        parts.append("\n---\n".join([f"=== {title}", *lines]))
    return "\n".join(parts) + "\n"


@pytest.mark.parametrize("name", NAMES)
def test_the_text_that_is_learned_is_the_committed_one(name, make_tokenizer):
    assert learned_text(name, make_tokenizer) == (FOLDER / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_byte_for_byte_what_transformers_renders(name, make_tokenizer):
    """Of the whole conversation, or up to each reply where the template rewrites earlier turns."""
    tokenizer, num_rows = build_tokenizer(name, make_tokenizer), 0
    end = "" if tokenizer.eos_token != "<|user|>" else "<|user|>"  # a template that ends no turn
    for said, columns in CONVERSATIONS.values():
        turns = turns_of(said)
        if name == "gpt_oss":  # as its own users spell a thought
            turns = [{"thinking": t.get("reasoning_content"), **t} for t in turns]
        replies = [i + 1 for i, turn in enumerate(turns) if turn["role"] == "assistant"]
        rows, _ = rows_of(tokenizer, said, **columns)
        ends = replies if len(rows) > 1 else [len(turns)]
        for row, length in zip(rows, ends, strict=bool(rows)):
            text = tokenizer.apply_chat_template(turns[:length], tokenize=False, **columns)
            assert tokenizer.decode(row["input_ids"]) == text + end
            asked = tokenizer.apply_chat_template(
                turns[: length - 1], tokenize=False, add_generation_prompt=True, **columns
            )
            context, mark, _ = shown(tokenizer, row).rpartition("⟦")
            assert mark and re.sub("[⟦⟧]", "", context) == asked, "asked for as when generating"
            num_rows += 1
    assert (num_rows > 0) == (name != "deepseek_r1"), "R1's shows no reply where it asks for one"


def bad_row(tokenizer, said, **columns) -> str:
    rows, report = rows_of(tokenizer, said, **columns)
    assert not rows
    return report.bad_rows[0]


def test_the_cures_of_a_reply_that_is_not_asked_for_help(make_tokenizer):
    """The variable that is named makes the row usable, and so does the thought that is asked for."""
    tokenizer = build_tokenizer("nemotron_3", make_tokenizer)
    reason = bad_row(tokenizer, TURNS[:2])
    variables = re.search(r"--chat_template_kwargs '(.+)'", reason)[1]
    template = build_template("chat", tokenizer, variables)
    *context, reply = template.segments([Message("user", "Is it warm?")], "Yes.")
    assert context[0].text.endswith("<think></think>") and reply.text == "Yes.<|im_end|>"
    tokenizer.chat_template = tokenizer.chat_template.replace("enable_thinking", "other_name")
    assert "give the thought" in bad_row(tokenizer, TURNS[:2])
    (row,), _ = rows_of(tokenizer, [TURNS[0], ("assistant", "<think>\nSun.\n</think>\nYes.")])
    assert shown(tokenizer, row).count("<think>") == 1
    tokenizer = build_tokenizer("deepseek_r1", make_tokenizer)
    assert "use another --template" in bad_row(tokenizer, TURNS[:2])
    assert "give the thought" not in bad_row(tokenizer, TURNS[:2])


def test_other_programs_render_an_export_with_the_variables_of_training(make_tokenizer):
    tokenizer = build_tokenizer("nemotron_3", make_tokenizer)
    template = build_template("chat", tokenizer, '{"enable_thinking": false}')
    expected = template.prompt_text([Message("user", "Is it warm?")])
    tokenizer.chat_template = template.chat_template
    ask = functools.partial(tokenizer.apply_chat_template, turns_of(TURNS[:1]), tokenize=False)
    assert ask(add_generation_prompt=True) == expected and expected.endswith("<think></think>")
    assert ask(add_generation_prompt=True, enable_thinking=True).endswith("<think>\n")


def test_templates_by_name_have_the_variables_of_training_too(make_tokenizer):
    tokenizer = build_tokenizer("chatml", make_tokenizer)
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": "{{ thinks }}"}
    by_name = build_template("chat", tokenizer, '{"thinks": true}').chat_template
    assert by_name.keys() == tokenizer.chat_template.keys()
    tokenizer.chat_template = by_name
    assert tokenizer.apply_chat_template(turns_of(TURNS), tools=[WEATHER], tokenize=False) == "True"


@pytest.mark.parametrize("name", ["chatml", "qwen3"])
def test_a_turn_that_is_not_to_be_learned_stays_context(name, make_tokenizer):
    tokenizer = build_tokenizer(name, make_tokenizer)
    prompt = [Message(*turn, is_learned=False) for turn in TURNS[:3]]
    example = Example(prompt=tuple(prompt), chosen="It snows.", learn_all_turns=True)
    builder = RowBuilder(build_template("chat", tokenizer), DataOptions([], 1), DataReport("sft"))
    (row,) = builder.build([Item(example, "row", "rows:1")])
    context, mark, reply = shown(tokenizer, row).partition("⟦")
    assert mark and "Yes.<|im_end|>" in context and "⟦" not in reply


def test_rows_of_a_conversation_have_its_number_and_are_counted(make_tokenizer):
    tokenizer = build_tokenizer("qwen3", make_tokenizer)
    rows, report = rows_of(tokenizer, TURNS)
    assert [row["row_id"] for row in rows] == ["row#0", "row#1"]
    assert len({row["conversation"] for row in rows}) == 1 and report.num_split == 1
    assert any("1 conversations split into a row per reply" in line for line in report.lines())


@pytest.mark.parametrize(
    ("template", "word"),
    [
        (" ", "leaves out the text"),
        ("{% for m in messages if m.role == 'human' %}{{ m.content }}{% endfor %}", "leaves out the text"),
        ("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}", "--eot_token"),
        ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}", "--eot_token '<|user|>'"),
        ("{% if %}", "rejects"),
    ],
)
def test_a_template_that_cannot_serve_is_named_at_the_start(template, word, make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|end|>"]})
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=re.escape(word)):
        build_template("chat", tokenizer)


def test_a_row_that_a_template_shows_in_part_is_bad_by_name(make_tokenizer):
    tokenizer = build_tokenizer("chatml", make_tokenizer)
    tokenizer.chat_template = tokenizer.chat_template.replace("m.content", "m.content[:20]")
    assert "omits a message of the user" in bad_row(tokenizer, [("user", "x" * 21), TURNS[1]])
    assert "omits the reply" in bad_row(tokenizer, [TURNS[0], ("assistant", "y" * 21)])
    with pytest.raises(BadRow, match="a message of the user"):
        build_template("chat", tokenizer).segments([Message("user", "x" * 21)], None)


@pytest.mark.parametrize("name", ["human_assistant", "one_line", "plain"])
def test_forms_of_text_refuse_what_they_cannot_show(name, tiny_tokenizer):
    call = Message("assistant", "", json.dumps({"tool_calls": [CALL]}))
    template = build_template(name, tiny_tokenizer)
    for prompt, reply, tools, word in (
        ([Message("user", "Hi"), call, Message("user", "Ho")], "Yes.", "", "tool_calls"),
        ([Message("user", "Hi")], call, "", "tool_calls"),
        ([Message("user", "Hi")], "Yes.", json.dumps([WEATHER]), "tools"),
        ([Message("user", "Hi"), Message("tool", "30")], "Yes.", "", "turns of tool"),
    ):
        with pytest.raises(BadRow, match=f"{name} cannot render {word}; --template chat may"):
            template.segments(prompt, reply, tools=tools)


def test_prompts_of_step_3_ask_with_the_tools_of_their_row(make_tokenizer):
    tokenizer = build_tokenizer("qwen3", make_tokenizer)
    example = Example(prompt=(Message("user", "Is it warm?"),), tools=json.dumps([WEATHER]))
    builder = RowBuilder(build_template("chat", tokenizer), DataOptions([], 3), DataReport("prompt"))
    (row,) = builder.build([Item(example, "row", "rows:1")])
    asked = tokenizer.apply_chat_template(
        turns_of(TURNS[:1]), tools=[WEATHER], tokenize=False, add_generation_prompt=True
    )
    assert row["prompt_text"] == tokenizer.decode(row["prompt_ids"]) == asked


@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama_3", "mistral", "glm_4"])
def test_a_conversation_continues_behind_a_reply_as_the_template_shows_it(name, make_tokenizer):
    tokenizer = build_tokenizer(name, make_tokenizer)
    ids = build_template("chat", tokenizer).continue_ids([Message("user", "And tomorrow?")])
    whole = tokenizer.apply_chat_template(turns_of(TURNS[:3]), tokenize=False, add_generation_prompt=True)
    assert whole.endswith("Yes." + tokenizer.eos_token + tokenizer.decode(ids))


def test_a_conversation_that_a_template_ends_otherwise_in_the_middle_cannot_continue(make_tokenizer):
    template = build_template("chat", build_tokenizer("gpt_oss", make_tokenizer))
    with pytest.raises(BadRow, match="does not end an earlier reply"):
        template.continue_ids([Message("user", "And tomorrow?")])


if __name__ == "__main__":
    import sys

    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
    from conftest import train_tiny_tokenizer

    for template_name in NAMES:
        (FOLDER / f"{template_name}.txt").write_text(learned_text(template_name, train_tiny_tokenizer))
