"""docs/data.md: every data set and form that there is, each example read as the steps read it; wrong rows."""

import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from stage_texts import build, make_options, put_on_hub

from common.data import hub_data
from common.data.adapters.base import ADAPTERS, AnyForm
from common.data.adapters.public_sets import OWN_NAMES
from common.data.adapters.row_columns import COLUMN_NAMES
from common.data.adapters.row_forms import _LABELS, ROW_FORMS
from common.data.adapters.row_parts import _MARKS, _TURN_KEYS, MEDIA, SPEAKERS
from common.data.example import BadRow, EmptyRow, Message, missing_for
from common.data.raw_rows import RawRows
from common.data.registry import load_source

PAGE = (Path(__file__).parents[2] / "docs/data.md").read_text()
ENTRY = re.compile(
    r"### (?P<names>`.+`)(?: \(.+\))?\n\n```json\n(?P<rows>(?:\{.+\}\n)+)```\nSteps? (?P<steps>\d(?:, \d)*)\."
)
QUESTIONS = {"How warm is it?", "20", "有多暖和？", "どのくらい暖かい？", "How warm is it?\n\nHere, today."}
BEST = {"20 degrees.", "２０度。", "２０度", "今日は２０度です。", "朝は寒い。今日は２０度です。"}
WORSE = {"No.", "Warm.", "Mild.", "As always.", "鱼在水里。"}


class Entry(NamedTuple):
    names: tuple[str, ...]
    rows: list[dict]
    steps: set[int]


def entries(section: str) -> list[Entry]:
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    found = [
        Entry(
            tuple(re.findall(r"`([^`]+)`", match["names"])),
            [json.loads(line) for line in match["rows"].splitlines()],
            {int(step) for step in match["steps"].split(", ")},
        )
        for match in ENTRY.finditer(text)
    ]
    assert len(found) == text.count("\n### "), "an entry has another form than the rest"
    return found


NAMED, FORMS = entries("Data sets by name"), entries("Forms")
OTHERS = entries("Forms of other programs")
ROWS = {name: entry.rows[0] for entry in NAMED for name in entry.names}


def check_entry(adapter, entry: Entry) -> None:
    """The example serves the steps that the page says, and every text of it is where it belongs."""
    arranged = adapter.arrange(RawRows(entry.rows, "page"))
    found = [example for i in range(len(arranged)) for example in adapter.to_examples(arranged[i])]
    is_unpaired = any(example.is_rated for example in found)
    steps = {
        step
        for step in (1, 2, 3)
        if any(missing_for(step, example, is_unpaired=is_unpaired) is None for example in found)
    }
    assert steps == entry.steps
    (best, *_) = found
    if best.text is None:
        assert best.prompt[-1].content in QUESTIONS
    if 1 in steps and best.text is None:
        assert best.chosen.strip() in BEST
    if 2 in steps:
        assert {(example.rejected or "No.").strip() for example in found} <= WORSE


def test_the_page_has_every_name_and_every_form_in_the_order_of_the_program():
    own = {name for name, kind in ADAPTERS.items() if kind.__module__.startswith("common.")}
    told = [name for entry in NAMED for name in entry.names]
    assert len(told) == len(set(told)) and set(told) == own
    assert [entry.names for entry in FORMS] == [form.columns for form in ROW_FORMS]
    assert [entry.steps for entry in FORMS] == [set(form.stages) for form in ROW_FORMS]


@pytest.mark.parametrize("entry", NAMED, ids=lambda e: e.names[0])
def test_an_example_of_a_data_set_serves_the_steps_that_it_says(entry):
    for name in entry.names:
        check_entry(load_source(name).adapter, entry)


@pytest.mark.parametrize("entry", [*FORMS, *OTHERS], ids=lambda entry: "/".join(entry.names))
def test_an_example_of_a_form_serves_the_steps_that_it_says(entry):
    assert set(entry.names) <= {*entry.rows[0], "text"}
    check_entry(AnyForm(), entry)


def test_the_page_has_every_name_of_a_column_and_every_mark():
    table = PAGE.split("| column | names |")[1].split("\n\n")[0]
    for name, names in COLUMN_NAMES.items():
        (line,) = [line for line in table.splitlines() if f"`{name}`" in line.split(" | ")[0]]
        assert set(names) <= set(re.findall(r"`(\w+)`", line)), name
    for name in (*_MARKS, *_TURN_KEYS, *MEDIA):
        assert f"`{name}`" in PAGE, name
    for name in (*SPEAKERS, *_LABELS):
        assert re.search(rf"\b{name}\b" if name.isalpha() else re.escape(name), PAGE) or name in "yn", name


def test_the_commands_of_the_page_name_what_is_there(tmp_path):
    (columns,) = set(re.findall(r"`--data_path mkqa.jsonl.gz --columns (\S+)`", PAGE))
    path = tmp_path / "mkqa.jsonl"
    path.write_text(json.dumps(ROWS["mkqa-Chinese"]))
    source = make_options(str(path), 1, tmp_path, columns=columns).load_source(str(path), None)
    (example,) = source.adapter.to_examples(source.train[0])
    assert (example.prompt[0].content, example.chosen) == ("有多暖和？", "２０度")


# ---- what each set alone has


def example_of(name, **change):
    (example,) = load_source(name).adapter.to_examples(ROWS[name] | change)
    return example


def test_hh_rlhf_prompt_ends_at_the_last_assistant_that_both_share():
    start = "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: bad?\n\nAssistant:"
    hi, answered = Message("user", "hi"), Message("assistant", "hello")
    example = example_of("Anthropic/hh-rlhf", chosen=start + " No.", rejected=start + " Yes.")
    assert example.prompt == (hi, answered, Message("user", "bad?"))
    assert (example.chosen, example.rejected) == (" No.", " Yes.")
    example = example_of("Anthropic/hh-rlhf", chosen=start, rejected="\n\nHuman: hi\n\nAssistant: hey")
    assert example.prompt == (hi,) and example.rejected == " hey"
    with pytest.raises(BadRow, match="but no `prompt`"):
        example_of("Anthropic/hh-rlhf", chosen="x", rejected="y")
    with pytest.raises(EmptyRow):
        example_of("Anthropic/hh-rlhf", chosen=start + " ", rejected=start + " Yes.")


def test_webgpt_takes_the_higher_score_and_marks_a_tie():
    change = {"answer_0": "Cold [1].", "answer_1": "Warm [1, 2]. See [a].", "score_0": -0.5, "score_1": 0.5}
    example = example_of("openai/webgpt_comparisons", **change)
    assert (example.chosen, example.rejected, example.is_tie) == ("Warm. See [a].", "Cold.", False)
    example = example_of("openai/webgpt_comparisons", **change | {"score_1": -0.5})
    assert (example.chosen, example.is_tie, example.margin) == ("Cold.", True, 0.0)


def test_shp_follows_its_label():
    for label, expected in ((1, ("20 degrees.", "No.")), ("0", ("No.", "20 degrees."))):
        example = example_of("stanfordnlp/SHP", labels=label)
        assert (example.chosen, example.rejected) == expected


def test_vicuna_text_without_marks_with_a_preface_and_with_ends_of_turns():
    name, hi = "pvduy/sharegpt_alpaca_oa_vicuna_format", [("user", "Hi")]
    for prompt, expected in (
        ("Hi", hi),
        (
            "Be kind. USER: Hi ASSISTANT: Fine.</s>USER: And\nnow? It says USER ASSISTANT:",
            [("system", "Be kind."), *hi, ("assistant", "Fine."), ("user", "And\nnow? It says USER")],
        ),
    ):
        example = example_of(name, prompt=prompt, label="Warm.\nVery.</s>")
        assert [message[:2] for message in example.prompt] == expected and example.chosen == "Warm.\nVery."


# ---- rows that are wrong, and rows that lack a text


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("pvduy/sharegpt_alpaca_oa_vicuna_format", {"label": 3}, "'label' is of type int, not text"),
        ("wangrui6/Zhihu-KOL", {"RESPONSE": ["a"]}, r"RESPONSE\[0\] is of type str, not an object"),
        (
            "Hello-SimpleAI/HC3-Chinese",
            {"human_answers": "a"},
            "no `human_answers.0`, which should hold its `response`",
        ),
        (
            "mkqa-Chinese",
            {"queries": {"en": "how warm is it"}},
            "no `queries.zh_cn`, which should hold its `prompt`",
        ),
        ("stanfordnlp/SHP", {"labels": "x"}, "'labels' is 'x'"),
    ],
)
def test_a_wrong_field_is_a_bad_row(name, change, reason):
    with pytest.raises(BadRow, match=reason) as raised:
        example_of(name, **change)
    assert not isinstance(raised.value, EmptyRow)


def test_every_column_that_is_needed_is_named_when_it_is_missing():
    needed = {name: columns_of(columns.values()) for name, columns in OWN_NAMES.items()}
    needed["stanfordnlp/SHP"] = {"history", "human_ref_A", "human_ref_B", "labels"}
    needed["openai/webgpt_comparisons"] = {"question", "answer_0", "answer_1", "score_0", "score_1"}
    for name, columns in needed.items():
        for column in columns:
            with pytest.raises(BadRow, match=f"no (column ')?`?{column}"):
                row = {key: value for key, value in ROWS[name].items() if key != column}
                load_source(name).adapter.to_examples(row)


def columns_of(paths):
    return {path.partition(".")[0] for path in paths}


@pytest.mark.parametrize(
    ("name", "change", "steps"),  # the steps that can still use it
    [
        ("wangrui6/Zhihu-KOL", {"INSTRUCTION": " \n"}, ()),
        ("wangrui6/Zhihu-KOL", {"RESPONSE": None}, (3,)),
        ("pvduy/sharegpt_alpaca_oa_vicuna_format", {"label": "</s>"}, ()),
        ("Cohere/miracl-ja-queries-22-12", {"negative_passages": []}, (1, 3)),
        ("Hello-SimpleAI/HC3-Chinese", {"human_answers": [None]}, (3,)),
        ("mkqa-Chinese", {"answers": {"zh_cn": [{"type": 8, "text": None}]}}, (3,)),
    ],
)
def test_a_row_with_a_gap_is_left_out_of_the_steps_that_need_the_text(
    monkeypatch, tmp_path, tiny_tokenizer, name, change, steps
):
    put_on_hub(monkeypatch, name, [ROWS[name], ROWS[name] | change])
    for step in (1, 2, 3) if "miracl" in name else (1, 3):
        data = build(name, step, tiny_tokenizer, tmp_path, max_bad_rows=0)
        assert (len(data.train), data.report.num_empty) == ((2, 0) if step in steps else (1, 1)), step


# ---- places on the hub


class FakeSplit(list):
    _fingerprint = "f"

    def with_format(self, _):
        return self


@pytest.mark.parametrize(
    ("name", "asked", "parts"),
    [
        ("mkqa-Japanese", ("apple/mkqa", None), ("train", "test", "validation")),  # validation before test
        ("nvidia/HelpSteer3", ("nvidia/HelpSteer3", "preference"), ("train", "test", "validation")),
        ("nvidia/HelpSteer3:edit", ("nvidia/HelpSteer3", "edit"), ("train", "test", "validation")),
        ("owner/name:main", ("owner/name", "main"), ("train", "test", "validation")),
        (
            "HuggingFaceH4/ultrafeedback_binarized",
            ("HuggingFaceH4/ultrafeedback_binarized", None),
            ("train_prefs", "train_sft", "test_prefs"),
        ),
    ],
)
def test_where_a_name_lies(monkeypatch, name, asked, parts):
    calls = []

    def load_dataset(*given):
        calls.append(given)
        return {part: FakeSplit(range(size)) for size, part in enumerate(parts, 1)}

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    adapter = load_source(name).adapter
    train, held_out = adapter.load()
    assert calls == [asked] and (len(train), len(held_out)) == (1, 3)


def test_a_set_that_is_a_program_is_read_from_the_hubs_copy(monkeypatch):
    calls = []

    def load_dataset(*given, **more):
        calls.append((given, more))
        if not more:
            raise RuntimeError("Dataset scripts are no longer supported, but found qg_jaquad.py")
        return {"train": FakeSplit([{"question": "q"}])}

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    train, held_out = hub_data.load_hub("lmqg/qg_jaquad")
    assert (len(train), held_out) == (1, None)
    assert calls[1] == (("lmqg/qg_jaquad",), {"data_dir": "qg_jaquad", "revision": "refs/convert/parquet"})


def test_the_hub_being_out_of_reach_is_one_sentence(monkeypatch):
    def refuse(*_):
        raise ConnectionError("no network\nmore")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    reason = r"^--data_path Dahoas/rm-static: .*no network\); check the name.*local"
    with pytest.raises(ValueError, match=reason):
        len(load_source("Dahoas/rm-static").train)
