"""Sources, files of every kind, and adapters: rows to Examples."""

import gzip
import json
import sys

import pytest

from common.data import hub_data, registry
from common.data.adapters import base
from common.data.adapters.row_forms import read_row
from common.data.adapters.row_parts import parse_dialogue
from common.data.example import BadRow, EmptyRow, Message
from common.data.raw_rows import FrozenRows
from common.data.registry import Adapter, load_source, register_dataset

ROW = {"prompt": "\n\nHuman: hi\n\nAssistant:", "chosen": " hello", "rejected": " no"}
HI = (Message("user", "hi"),)


def examples(source, rows):
    return [source.adapter.to_examples(rows[i]) for i in range(len(rows))]


def write(path, rows, as_list=False):
    text = json.dumps(rows) if as_list else "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return str(path)


@pytest.fixture
def hub(monkeypatch):
    """Stands for the hub: rows by name."""
    rows = {}

    def load_hub(name, place=None):
        return FrozenRows(rows[name], name, name), None

    monkeypatch.setattr(hub_data, "load_hub", load_hub)
    return rows


# ---- files


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.json.gz", "a.csv", "a.parquet"])
@pytest.mark.parametrize("as_list", [False, True])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, name, as_list):
    path = tmp_path / name
    rows = [ROW, ROW | {"chosen": 'two\nlines, "quoted" é'}]
    if name.endswith((".csv", ".parquet")):
        frame = pytest.importorskip("pandas").DataFrame(rows)
        frame.to_csv(path, index=False) if name.endswith("csv") else frame.to_parquet(path)
    else:
        write(path, rows, as_list)
    source = load_source(str(path))
    assert [source.train[i] for i in range(len(source.train))] == rows
    assert source.eval is None
    found = examples(source, source.train)
    assert found[0][0].prompt == HI and found[0][0].chosen.strip() == "hello"


def test_places_are_lines_of_the_file(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\n{"text": "a"}\n\n{"text": \n[1]\n{"text": "\xff"}\n')
    rows = load_source(str(path)).train
    assert [rows.line(i) for i in range(len(rows))] == [2, 4, 5, 6]
    assert rows.location(1) == f"{path}:4" and rows.row_id(1) == "a.jsonl:4"
    for index, reason in ((1, "not JSON"), (2, "a JSON list, not an object"), (3, "not UTF-8")):
        with pytest.raises(BadRow, match=reason):
            rows[index]
    path = tmp_path / "a.csv"
    path.write_text('prompt,answer\n"two\nlines",x\n\ny,z\nonly one\n')
    rows = load_source(str(path)).train
    assert [rows.line(i) for i in range(len(rows))] == [2, 5, 6]
    with pytest.raises(BadRow, match="1 fields, the header 2"):
        rows[2]


def test_folder_of_train_and_eval_files(tmp_path):
    write(tmp_path / "train-0.jsonl", [ROW])
    write(tmp_path / "train-1.jsonl", [ROW, ROW | {"chosen": "x"}])
    write(tmp_path / "my-valid.json", [ROW], as_list=True)
    (tmp_path / "README.md").write_text("x")
    source = load_source(str(tmp_path))
    assert (len(source.train), len(source.eval)) == (3, 1)
    assert source.train[2]["chosen"] == "x" and source.train.row_id(2) == "train-1.jsonl:2"


def test_folder_saved_by_datasets_says_nothing(tmp_path, capfd):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    train, held_out = datasets.Dataset.from_list([ROW, ROW]), datasets.Dataset.from_list([ROW])
    datasets.DatasetDict({"train": train, "test": held_out}).save_to_disk(str(tmp_path / "saved"))
    datasets.enable_progress_bars()
    capfd.readouterr()
    source = load_source(str(tmp_path / "saved"))
    assert (len(source.train), len(source.eval)) == (2, 1) and source.train[0] == ROW
    assert source.digest() == load_source(str(tmp_path / "saved")).digest()
    assert capfd.readouterr() == ("", "")
    assert not datasets.are_progress_bars_disabled()


def test_deepspeed_chats_local_jsonfile(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    write(tmp_path / "data/train.json", [ROW, ROW])
    write(tmp_path / "data/eval.json", [ROW])
    monkeypatch.chdir(tmp_path)
    source = load_source("local/jsonfile")
    assert (len(source.train), len(source.eval)) == (2, 1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, "there is no such file"),
        ("a.txt", b"x", "its extension must be one of .json, .jsonl"),
        ("a.jsonl", b"", "the file is empty"),
        ("a.json", b"[]", "the file is empty"),
        ("a.json", b"[{", "not a JSON list"),
        ("a.csv", b"prompt,answer\n", "the file is empty"),
        ("a.csv", b'a,b\n"x,y\n', "the file is not CSV"),
        ("a.jsonl.gz", b"no gzip", "cannot be read as .jsonl.gz"),
        ("a.parquet", b"no parquet", "cannot be read as .parquet"),
        ("a.csv", b"a,b\n\xff,x\n", "cannot be read as .csv"),
    ],
)
def test_an_unreadable_file_is_named(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"--data_path .*{name}.*{message}"):
        len(load_source(str(tmp_path / name)).train)


def test_a_folder_without_training_files_says_what_it_holds(tmp_path):
    write(tmp_path / "other.jsonl", [ROW])
    with pytest.raises(ValueError, match=r"no train\* file.*found other.jsonl"):
        len(load_source(str(tmp_path)).train)


# ---- names


def test_unknown_names_get_the_nearest_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="--data_path chitchut: .*did you mean chitchat"):
        load_source("chitchut")


def test_digest_follows_the_content_not_the_place(tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
    here, there = write(tmp_path / "x/a.jsonl", [ROW]), write(tmp_path / "y/a.jsonl", [ROW])
    before = load_source(here).digest()
    assert before == load_source(there).digest()
    write(tmp_path / "x/a.jsonl", [ROW, ROW])
    assert before != load_source(here).digest()


def test_digest_follows_the_code_that_adapters_share(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", [ROW])
    names = (path, "mkqa-Chinese", "stanfordnlp/SHP")
    before = [load_source(name).adapter.code_digest() for name in names]
    assert before == [load_source(name).adapter.code_digest() for name in names] and len(set(before)) == 3
    monkeypatch.setattr(base, "_digest_shared_code", lambda: "row_parts.py was edited")
    after = [load_source(name).adapter.code_digest() for name in names]
    assert all(one != other for one, other in zip(before, after, strict=True))


def test_an_adapter_of_ones_own_needs_no_registration(tmp_path, monkeypatch):
    (tmp_path / "my_rows.py").write_text(
        "from common.data.registry import Adapter\n"
        "class Mine(Adapter):\n"
        "    def load(self):\n        return [{'q': 'hi', 'a': 'hello'}], None\n"
        "    def get_prompt(self, row):\n        return row['q']\n"
        "    def get_chosen(self, row):\n        return row['a']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    source = load_source("my_rows:Mine")
    ((example,),) = examples(source, source.train)
    assert (example.prompt, example.chosen, example.rejected) == (HI, "hello", None)
    assert source.train.row_id(0) == "my_rows:Mine:1"
    assert source.digest() == load_source("my_rows:Mine").digest()
    sys.modules.pop("my_rows")
    with pytest.raises(ValueError, match="MODULE:CLASS must name a subclass"):
        load_source("my_rows:Other")


def test_register_dataset_and_a_name_taken_twice(monkeypatch):
    monkeypatch.setattr(registry, "ADAPTERS", registry.ADAPTERS)

    @register_dataset("test/own")
    class Own(Adapter):
        pass

    assert type(load_source("test/own").adapter) is Own
    with pytest.raises(ValueError, match="'test/own' is registered twice"):
        register_dataset("test/own")(type("Other", (Adapter,), {}))
    registry.ADAPTERS.pop("test/own")


@pytest.mark.parametrize(
    "name",
    [
        "Dahoas/rm-static",
        "Dahoas/full-hh-rlhf",
        "Dahoas/synthetic-instruct-gptj-pairwise",
        "yitingxie/rlhf-reward-datasets",
    ],
)
def test_prompt_chosen_rejected_sets(hub, name):
    hub[name] = [ROW, ROW | {"prompt": "hi"}, {"prompt": "hi", "chosen": "x"}]
    source = load_source(name)
    for i in range(2):
        (example,) = source.adapter.to_examples(source.train[i])
        assert (example.prompt, example.chosen.strip(), example.rejected.strip()) == (HI, "hello", "no")
    (example,) = source.adapter.to_examples(source.train[2])  # no pair, but good for the other steps
    assert (example.chosen, example.rejected) == ("x", None)


def test_hh_rlhf_prompt_ends_at_the_last_assistant_that_both_share(hub):
    start = "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: bad?\n\nAssistant:"
    hub["Anthropic/hh-rlhf"] = [
        {"chosen": start + " No.", "rejected": start + " Yes."},
        {"chosen": start + " No.", "rejected": "\n\nHuman: hi\n\nAssistant: hey"},
        {"chosen": "x", "rejected": "y"},
        {"chosen": start + " ", "rejected": start + " Yes."},
    ]
    source = load_source("Anthropic/hh-rlhf")
    (example,) = source.adapter.to_examples(source.train[0])
    assert example.prompt == (*HI, Message("assistant", "hello"), Message("user", "bad?"))
    assert (example.chosen, example.rejected) == (" No.", " Yes.")
    (example,) = source.adapter.to_examples(source.train[1])
    assert example.prompt == HI and example.rejected == " hey"
    with pytest.raises(BadRow, match="share no 'Assistant:'"):
        source.adapter.to_examples(source.train[2])
    with pytest.raises(EmptyRow):
        source.adapter.to_examples(source.train[3])


def test_webgpt_takes_the_higher_score_and_marks_a_tie(hub):
    row = {"question": {"full_text": "hi"}, "answer_0": "a", "answer_1": "b", "score_0": -0.5, "score_1": 0.5}
    hub["openai/webgpt_comparisons"] = [row, row | {"score_1": -0.5}]
    source = load_source("openai/webgpt_comparisons")
    (first,), (second,) = examples(source, source.train)
    assert (first.prompt, first.chosen, first.rejected, first.is_tie) == (HI, "b", "a", False)
    assert (second.chosen, second.rejected, second.is_tie) == ("a", "b", True)
    with pytest.raises(BadRow, match="'score_0' is None, not a number"):
        source.adapter.to_examples(row | {"score_0": None})


def test_shp_follows_its_label(hub):
    row = {"history": "hi", "human_ref_A": "a", "human_ref_B": "b", "labels": 1}
    hub["stanfordnlp/SHP"] = [row, row | {"labels": 0}]
    source = load_source("stanfordnlp/SHP")
    (first,), (second,) = examples(source, source.train)
    assert [(e.chosen, e.rejected) for e in (first, second)] == [("a", "b"), ("b", "a")]
    with pytest.raises(BadRow, match="'labels' is 'x'"):
        source.adapter.to_examples(row | {"labels": "x"})


def test_a_local_copy_of_a_known_set_uses_its_adapter(tmp_path):
    folder = tmp_path / "stanfordnlp/SHP"
    folder.mkdir(parents=True)
    write(folder / "train.jsonl", [{"history": "hi", "human_ref_A": "a", "human_ref_B": "b", "labels": 0}])
    source = load_source(str(folder))
    ((example,),) = examples(source, source.train)
    assert (example.chosen, example.rejected) == ("b", "a")


def test_an_unregistered_hub_set_is_read_by_its_columns(hub):
    hub["some/thing"] = [{"instruction": "hi", "input": "", "output": "hello"}]
    source = load_source("some/thing")
    ((example,),) = examples(source, source.train)
    assert (example.prompt, example.chosen) == (HI, "hello")


def test_the_hub_being_out_of_reach_is_one_sentence(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def refuse(*_):
        raise ConnectionError("no network\nmore")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(
        ValueError, match=r"^--data_path Dahoas/rm-static: .*no network\); check the name.*local"
    ):
        len(load_source("Dahoas/rm-static").train)


def test_chitchat_replies_with_an_odd_number_of_turns_before_them():
    adapter = load_source("chitchat").adapter
    turns = ["t0", " t1", "t2", "t3", "t4", "", "t6"]
    found = adapter.to_examples({"id": "x", "turns": turns})
    assert [e.chosen for e in found] == ["t1", "t2", "t3", "t4"]
    assert [[m.content for m in e.prompt] for e in found] == [
        ["t0"],
        ["t1"],
        ["t0", "t1", "t2"],
        ["t1", "t2", "t3"],
    ]
    assert [m.role for m in found[2].prompt] == ["user", "assistant", "user"]
    with pytest.raises(EmptyRow, match="without a reply"):
        adapter.to_examples({"id": "x", "turns": ["alone"]})


# ---- row forms


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (ROW, [(HI, " hello", " no")]),
        ({"prompt": "hi", "answer": "hello"}, [(HI, "hello", None)]),
        ({"prompt": "hi", "response": "hello", "rejected": None}, [(HI, "hello", None)]),
        ({"prompt": [{"role": "user", "content": "hi"}], "answer": "hello"}, [(HI, "hello", None)]),
        ({"prompt": " Human: hi Assistant:", "answer": "hello"}, [(HI, "hello", None)]),
        ({"prompt": "hi"}, [(HI, None, None)]),
        ({"instruction": "hi", "input": "x", "output": "y"}, [((Message("user", "hi\n\nx"),), "y", None)]),
        (
            {"prompt": "hi", "pos_answers": ["a", "b"], "neg_answers": ["c", "d"]},
            [(HI, "a", "c"), (HI, "a", "d"), (HI, "b", "c"), (HI, "b", "d")],
        ),
        (
            {
                "chosen": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a"}],
                "rejected": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "b"}],
            },
            [(HI, "a", "b")],
        ),
        (
            {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a"}]},
            [(HI, "a", None)],
        ),
    ],
)
def test_row_forms(row, expected):
    assert [(e.prompt, e.chosen, e.rejected) for e in read_row(row)] == expected


def test_text_messages_and_margin():
    assert read_row({"text": "abc"})[0].text == "abc"
    assert read_row({"messages": [{"role": "user", "content": "hi"}]})[0].chosen is None
    assert read_row(ROW | {"margin": "1.5"})[0].margin == 1.5
    turn = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a"}]
    assert read_row({"messages": turn})[0].learn_all_turns


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"a": 1, "b": None}, "columns 'a' fit none of prompt/chosen/rejected"),
        (ROW | {"chosen": 3}, "'chosen' is of type int, not text"),
        (ROW | {"margin": "much"}, "'margin' is 'much', not a number"),
        ({"prompt": "hi", "pos_answers": "a", "neg_answers": ["b"]}, "'pos_answers' is of type str"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "role 'bot'; roles are system, user, assistant"),
        ({"messages": [{"content": "a"}]}, "no 'role' and 'content'"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "only the assistant's turn"),
    ],
)
def test_a_row_of_bad_form_says_why(row, reason):
    with pytest.raises(BadRow, match=reason):
        read_row(row)


@pytest.mark.parametrize("row", [ROW | {"chosen": " \n"}, {"text": ""}, {"prompt": "", "answer": "x"}])
def test_an_empty_row_is_no_bad_row(row):
    with pytest.raises(EmptyRow):
        read_row(row)


def test_parse_dialogue():
    assert parse_dialogue("no dialogue, though Human: stands in it") is None
    assert parse_dialogue("Be kind.\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:") == (
        Message("system", "Be kind."),
        Message("user", "a"),
        Message("assistant", "b"),
        Message("user", "c"),
    )
