"""Sources, files of every kind, names, and the usual forms of a row: rows to Examples."""

import gzip
import json
import sys

import pytest
from stage_texts import put_on_hub, write_rows

from common.data.adapters import base
from common.data.adapters.row_forms import read_row
from common.data.adapters.row_parts import parse_dialogue
from common.data.example import BadRow, EmptyRow, Message
from common.data.registry import ADAPTERS, load_source
from common.flags.args import Problems
from common.flags.plugins import import_own_module, import_plugins

ROW = {"prompt": "\n\nHuman: hi\n\nAssistant:", "chosen": " hello", "rejected": " no"}
HI = (Message("user", "hi"),)
ASKED = [{"role": "user", "content": "hi"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "a"}]
MIXED = [{"answer": "a", "rank": 1}, {"answer": "b", "score": 1}]


def only_example(source):
    (example,) = source.adapter.to_examples(source.train[0])
    return example


# ---- files


@pytest.mark.parametrize(
    ("name", "as_list"),
    [("a.jsonl", False), ("a.json", False), ("a.jsonl.gz", False), ("a.csv", False), ("a.parquet", False),
     ("a.jsonl", True), ("a.json", True), ("a.json.gz", True)],
)  # fmt: skip
def test_every_kind_of_file_gives_the_same_rows(tmp_path, name, as_list):
    path = tmp_path / name
    rows = [ROW, ROW | {"chosen": 'two\nlines, "quoted" é'}]
    if name.endswith((".csv", ".parquet")):
        frame = pytest.importorskip("pandas").DataFrame(rows)
        frame.to_csv(path, index=False) if name.endswith("csv") else frame.to_parquet(path)
    else:
        text = json.dumps(rows, indent=1) if as_list else "\n".join(map(json.dumps, rows))
        data = b"\xef\xbb\xbf" + text.encode()
        path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    source = load_source(str(path))
    assert [source.train[i] for i in range(len(source.train))] == rows
    assert source.eval is None and only_example(source).prompt == HI


def test_places_are_lines_of_the_file(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\n{"text": "a"}\n\n{"text": \n[1]\n{"text": "\xff"}\n')
    rows = load_source(str(path)).train
    assert [rows.location(i) for i in range(len(rows))] == [f"{path}:{n}" for n in (2, 4, 5, 6)]
    assert rows.row_id(1, {}) == "a.jsonl:4"
    for index, reason in ((1, "not JSON"), (2, "of type list, not an object"), (3, "'utf-8' codec")):
        with pytest.raises(BadRow, match=reason):
            rows[index]
    path = tmp_path / "a.csv"
    path.write_text('prompt,answer\n"two\nlines",x\n\ny,z\nonly one\n')
    rows = load_source(str(path)).train
    assert [rows.location(i) for i in range(len(rows))] == [f"{path}:{n}" for n in (2, 5, 6)]
    with pytest.raises(BadRow, match="1 fields, the header 2"):
        rows[2]


def test_folder_of_train_and_eval_files(tmp_path):
    write_rows(tmp_path / "train-0.jsonl", [ROW])
    write_rows(tmp_path / "train-1.jsonl", [ROW, ROW | {"chosen": "x"}])
    write_rows(tmp_path / "my-valid.json", [ROW])
    (tmp_path / "README.md").write_text("x")
    source = load_source(str(tmp_path))
    assert (len(source.train), len(source.eval)) == (3, 1)
    assert source.train[2]["chosen"] == "x" and source.train.row_id(2, ROW) == "train-1.jsonl:2"


def test_folder_saved_by_datasets_says_nothing(tmp_path, capfd):
    datasets = pytest.importorskip("datasets")
    train, held_out = datasets.Dataset.from_list([ROW, ROW]), datasets.Dataset.from_list([ROW])
    datasets.DatasetDict({"train": train, "test": held_out}).save_to_disk(str(tmp_path / "saved"))
    capfd.readouterr()
    source = load_source(str(tmp_path / "saved"))
    assert (len(source.train), len(source.eval)) == (2, 1) and source.train[0] == ROW
    assert source.digest() == load_source(str(tmp_path / "saved")).digest()
    assert capfd.readouterr() == ("", "")


def test_deepspeed_chats_local_jsonfile(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    write_rows(tmp_path / "data/train.json", [ROW, ROW])
    write_rows(tmp_path / "data/eval.json", [ROW])
    monkeypatch.chdir(tmp_path)
    source = load_source("local/jsonfile")
    assert (len(source.train), len(source.eval)) == (2, 1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, "there is no such file"),
        ("a.jsonl", b"", "the file is empty"),
        ("a.json", b"[{", "not a JSON list"),
        ("a.csv", b'a,b\n"x,y\n', "the file is not CSV"),
        ("a.parquet", b"no parquet", "cannot be read as .parquet"),
        ("other.jsonl", b"{}", r"no train\* file.*found other.jsonl"),
    ],
)
def test_an_unreadable_file_is_named(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    source = tmp_path if name == "other.jsonl" else tmp_path / name
    with pytest.raises(ValueError, match=f"--data_path .*{name.partition('.')[0]}.*{message}|{message}"):
        len(load_source(str(source)).train)


# ---- names


def test_unknown_names_get_the_nearest_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="--data_path mkqa-Chinse: .*did you mean mkqa-Chinese"):
        load_source("mkqa-Chinse")


def test_digest_follows_content_and_code_not_the_place(tmp_path, monkeypatch):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
    paths = [write_rows(tmp_path / folder / "a.jsonl", [ROW]) for folder in ("x", "y")]
    before = load_source(paths[0]).digest()
    assert before == load_source(paths[1]).digest()
    write_rows(tmp_path / "x/a.jsonl", [ROW, ROW])
    assert before != load_source(paths[0]).digest()
    names = ("mkqa-Chinese", "stanfordnlp/SHP")
    assert len({load_source(name).adapter.code_digest() for name in names}) == 2
    (tmp_path / "row_parts.py").write_text("# edited")  # code that all adapters share
    monkeypatch.setattr(base, "__file__", str(tmp_path / "base.py"))
    assert before != load_source(paths[1]).digest()


def test_an_adapter_of_ones_own_needs_no_registration(tmp_path, monkeypatch):
    (tmp_path / "my_rows.py").write_text(
        "from common.data.registry import Adapter\n"
        "class Mine(Adapter):\n"
        "    def load(self):\n        return [{'q': 'hi', 'a': 'hello'}, {'q': 'hi', 'a': None}], None\n"
        "    def get_prompt(self, row):\n        return row['q']\n"
        "    def get_chosen(self, row):\n        return row['a']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    source = load_source("my_rows:Mine")
    example = only_example(source)
    assert (example.prompt, example.chosen, example.rejected) == (HI, "hello", None)
    (example,) = source.adapter.to_examples(source.train[1])
    assert example.chosen is None and isinstance(example.absence, EmptyRow)
    assert source.train.row_id(0, {}) == "my_rows:Mine:1"
    assert source.digest() == load_source("my_rows:Mine").digest()
    sys.modules.pop("my_rows")
    with pytest.raises(
        ValueError, match=r"has no Mime; did you mean Mine\?; MODULE:CLASS must name a subclass"
    ):
        load_source("my_rows:Mime")


def test_a_local_copy_of_a_known_set_uses_its_adapter(tmp_path):
    folder = tmp_path / "stanfordnlp/SHP"
    folder.mkdir(parents=True)
    row = {"history": "hi", "human_ref_A": "a", "human_ref_B": "b", "labels": 0}
    write_rows(folder / "train.jsonl", [row])
    example = only_example(load_source(str(folder)))
    assert (example.chosen, example.rejected) == ("b", "a")


def test_an_unregistered_hub_set_is_read_by_its_columns(monkeypatch):
    put_on_hub(monkeypatch, "some/thing", [{"instruction": "hi", "input": "", "output": "hello"}])
    example = only_example(load_source("some/thing"))
    assert (example.prompt, example.chosen) == (HI, "hello")


# ---- row forms: docs/data.md has an example of each, and test_data_page.py reads it


def test_the_first_form_whose_columns_are_there_is_the_rows():
    (example,) = read_row({"prompt": "a", "response": "b", "text": "c"})
    assert (example.chosen, example.text) == ("b", None)
    assert read_row(ROW | {"margin": "1.5"})[0].margin == 1.5
    assert read_row({"messages": [*ASKED, {"role": "assistant", "content": "a"}]})[0].learn_all_turns


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"a": 1, "b": None}, "the row has `a`: no column that a form begins with; --columns names others"),
        (ROW | {"chosen": 3}, "'chosen' is of type int, not text"),
        (ROW | {"margin": "much"}, "'margin' is 'much', not a number"),
        # turns
        ({"conversations": "hi"}, "'conversations' is of type str, not a list"),
        # pairs of lists of turns
        (
            {"prompt": "x", "chosen": ANSWERED, "rejected": ANSWERED},
            "turns before the reply that are not the prompt",
        ),
        ({"chosen": ANSWERED, "rejected": ANSWERED[1:]}, "do not share the turns"),
        ({"prompt": "hi", "chosen": ASKED, "rejected": ASKED}, "chosen ends with a turn of the user"),
        # several answers
        ({"prompt": "hi", "responses": ["a", "b"], "scores": [1]}, "'scores' has 1 numbers for 2 responses"),
        ({"prompt": "hi", "answers": [{"rank": 1}]}, r"answers\[0\] has none of answer, response, text"),
        ({"prompt": "hi", "answers": MIXED}, "'answers' has objects with a rank and others with a score"),
    ],
)
def test_a_row_of_bad_form_says_why(row, reason):
    with pytest.raises(BadRow, match=reason):
        read_row(row)


@pytest.mark.parametrize(
    "row", [ROW | {"chosen": " \n"}, {"text": ""}, {"prompt": [], "answer": "x"}, {"conversations": []}]
)
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
    said = parse_dialogue("\n\nHuman: a Assistant:\n\nAssistant: I am an Assistant:")
    assert [message.content for message in said] == ["a Assistant:", "I am an Assistant:"]


# ---- --plugins finds modules, and says in one line why it cannot

REGISTERS = """
from common.data.registry import Adapter, register_dataset

@register_dataset("team/plugged")
class Plugged(Adapter):
    def load(self):
        return [{"q": "hi", "a": "hello"}], None
    def get_prompt(self, row):
        return row["q"]
    def get_chosen(self, row):
        return row["a"]
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working folder, not on the import path; what is imported from it is forgotten at the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    ADAPTERS.pop("team/plugged", None)


def problems_of(*names):
    problems = Problems()
    import_plugins(list(names), problems)
    return problems.messages


@pytest.fixture
def package(here):
    (here / "my_pkg").mkdir()
    (here / "my_pkg" / "sets.py").write_text(REGISTERS)
    return here / "my_pkg"


def test_what_a_plugin_registers_can_be_named(package):
    assert problems_of("my_pkg.sets") == []
    source = load_source("team/plugged")
    (example,) = source.adapter.to_examples(source.train[0])
    assert (example.prompt[0].content, example.chosen) == ("hi", "hello")


def test_the_same_class_may_be_registered_twice_but_not_another_one(here, package):
    assert problems_of("my_pkg.sets", "my_pkg.sets") == []
    sys.modules.pop("my_pkg.sets")  # a reload
    assert problems_of("my_pkg.sets") == []
    sys.path.append(str(package))  # the same file under another name
    assert problems_of("sets") == []
    (here / "others.py").write_text(REGISTERS)
    (problem,) = problems_of("others")
    told = "--plugins others: importing it raised ValueError: data set name 'team/plugged' is"
    assert problem.startswith(f"{told} registered twice")


def test_the_working_folder_comes_last(here):
    (here / "json.py").write_text("raise RuntimeError('hides a library')\n")
    (here / "my_module.py").write_text("import json\nVALUE = json.dumps(1)\n")
    sys.modules.pop("json.tool", None)
    module = import_own_module("my_module")
    assert module.VALUE == "1" and sys.path[-1] == str(here)
    assert "hides" not in str(import_own_module("json.tool").__file__)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("absent", None, "there is no module absent; start from the folder that holds it"),
        ("folder/my_module.py", None, "name a module without path and .py: folder.my_module"),
        ("mine", "import absent_library\n", "ModuleNotFoundError: No module named 'absent_library' ("),
        ("mine", "def f(:\n", "importing it raised SyntaxError: invalid syntax ("),
        ("mine", "import sys\nsys.exit('usage')\n", "importing it raised SystemExit: usage ("),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_problem(here, name, text, reason):
    if text is not None:
        (here / f"{name}.py").write_text(text)
    (problem,) = problems_of(name)
    assert problem.startswith(f"--plugins {name}: ") and reason in problem and "\n" not in problem
    if text is not None:
        line = text.rstrip("\n").count("\n") + 1
        assert problem.endswith(f"mine.py:{line}); fix it")
