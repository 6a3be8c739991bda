"""common/data/adapters/ported_class.py: classes of DeepSpeed-Chat's shape, unchanged."""

import re
import sys
import textwrap

import pytest
from stage_texts import build, make_options, write_rows

from common.data.adapters.ported_class import PortedClass
from common.data.example import BadRow, EmptyRow, Message, missing_for
from common.data.plugins import import_own_module
from common.data.registry import ADAPTERS, load_source
from common.data.source_checks import check_sources

HI = (Message("user", "hi"),)

PAIR = {"prompt": "\n\nHuman: hi\n\nAssistant:", "chosen": " hello", "rejected": " no"}
FIVE = """
    def get_prompt(self, sample):
        return sample["prompt"]
    def get_chosen(self, sample):
        return sample["chosen"]
    def get_rejected(self, sample):
        return sample["rejected"]
    def get_prompt_and_chosen(self, sample):
        return sample["prompt"] + sample["chosen"]
    def get_prompt_and_rejected(self, sample):
        return sample["prompt"] + sample["rejected"]
"""


@pytest.fixture
def write_module(tmp_path, monkeypatch):
    """A module of the user's in the working folder, which is not on the import path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    names = []

    def write(text, name="my_sets"):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        sys.modules.pop(name, None)
        names.append(name)
        return name

    yield write
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def saved(tmp_path):
    """A folder that `datasets` saved, with the splits given."""
    datasets = pytest.importorskip("datasets")

    def save(**splits):
        parts = {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}
        datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
        return str(tmp_path / "saved")

    return save


def texts(example):
    return [text and text.strip() for text in (example.chosen, example.rejected)]


def first_example(source, index=0):
    (example,) = source.adapter.to_examples(source.train[index])
    return example


# ---- DeepSpeed-Chat's own shape


def test_a_class_and_its_base_run_unchanged(saved, tmp_path, tiny_tokenizer):
    rows = [PAIR | {"chosen": f" hello {i}"} for i in range(5)]
    name = f"ported_sets:StaticDataset:{saved(train=rows, test=[PAIR, PAIR])}"
    source = load_source(name)
    assert (len(source.train), len(source.eval), source.needs_hub) == (5, 2, False)
    example = first_example(source, 3)
    assert example.prompt == HI and texts(example) == ["hello 3", "no"] and example.absence is None
    assert source.digest() == load_source(name).digest()
    assert check_sources(make_options(name, 2, tmp_path)) == []
    data = build(name, 2, tiny_tokenizer, tmp_path)
    assert (len(data.train), len(data.eval), data.report.notes) == (5, 2, [])
    row = data.train[0]
    answer = tiny_tokenizer.decode(row["chosen_ids"][row["chosen_response_start"] :])
    assert answer == " hello 0<|endoftext|>"
    assert [len(build(name, step, tiny_tokenizer, tmp_path).train) for step in (1, 3)] == [5, 5]


def test_without_a_name_the_class_is_given_the_one_that_it_sets_itself(monkeypatch):
    pytest.importorskip("datasets")
    import ported_sets

    asked = []

    def load_dataset(name):
        asked.append(name)
        return {"train": [PAIR], "test": []}

    monkeypatch.setattr(ported_sets, "load_dataset", load_dataset)
    source = load_source("ported_sets:StaticDataset")
    assert asked == []  # nothing is loaded before a row is asked for
    assert first_example(source).chosen.strip() == "hello" and source.eval is None
    assert asked == ["team/static"]

    def refuse(name):
        raise ConnectionError("no network\nmore")

    monkeypatch.setattr(ported_sets, "load_dataset", refuse)
    with pytest.raises(
        ValueError, match=r"^--data_path ported_sets:StaticDataset: .*'team/static'.*no network; c"
    ):
        len(load_source("ported_sets:StaticDataset").train)


def test_a_class_may_share_out_its_rows_by_files(saved):
    name = f"ported_sets:SharedOutDataset:{saved(train=[PAIR | {'n': n} for n in range(4)])}"
    source = load_source(name)
    assert [source.train[i]["n"] for i in range(3)] == [0, 1, 2]
    assert [source.eval[i]["n"] for i in range(len(source.eval))] == [3]
    assert source.digest() == load_source(name).digest()


def test_none_leaves_a_row_out_and_prints_are_dropped(saved, tmp_path, tiny_tokenizer, capsys):
    rows = [{"prompt": f"q{i}", "chosen": f"a{i}"} for i in range(30)]
    rows += [{"prompt": None, "chosen": "a"}] * 3 + [{"prompt": "q", "chosen": None}] * 4
    name = f"ported_sets:AnswersDataset:{saved(train=rows)}"
    data = build(name, 1, tiny_tokenizer, tmp_path, max_bad_rows=0, eval_fraction=0.2)
    assert (data.report.num_bad, data.report.num_empty) == (0, 7)
    assert len(data.train) + len(data.eval) == 30 and len(data.eval) > 0
    (line,) = [line for line in data.report.lines() if "get_eval_data" in line]
    assert "raised KeyError: 'validation'; --eval_fraction is held out" in line
    prompts = build(name, 3, tiny_tokenizer, tmp_path, max_bad_rows=0)
    assert len(prompts.train) == 34
    assert prompts.train[0]["prompt_text"] == "\n\nHuman: q0\n\nAssistant:"
    (problem,) = check_sources(make_options(name, 2, tmp_path))
    assert "no pair of a chosen and a rejected answer; step 1 can" in problem
    assert "(get_prompt_and_rejected gave None)" in problem
    assert "Warning" not in capsys.readouterr().out


# ---- usable subsets, and what each method is for


def load_plain(write_module, body, rows=(PAIR,), name=""):
    text = f"ROWS = {list(rows)!r}\nclass Mine:\n    def get_train_data(self):\n        return ROWS\n"
    source = load_source(f"{write_module(text + textwrap.indent(textwrap.dedent(body), '    '))}:Mine{name}")
    return source


def test_a_plain_class_with_the_five_methods(write_module):
    source = load_plain(write_module, textwrap.dedent(FIVE))
    assert isinstance(source.adapter, PortedClass) and source.eval is None
    assert texts(first_example(source)) == ["hello", "no"] and first_example(source).prompt == HI
    assert source.train.row_id(0) == "my_sets:Mine:1"


@pytest.mark.parametrize(
    ("whole", "prompt", "expected"),
    [
        ("hi Assistant: hello", "hi", "hello"),
        ("\n\nHuman: hi\n\nAssistant: hello", " Human: hi", "hello"),
        (" Human: hi Assistant: Assistant: hello", " Human: hi Assistant:", "Assistant: hello"),
    ],
)
def test_a_reply_is_what_stands_behind_the_prompt(write_module, whole, prompt, expected):
    body = f"def get_prompt_and_chosen(self, sample):\n    return {whole!r}\n"
    body += f"def get_prompt(self, sample):\n    return {prompt!r}\n"
    example = first_example(load_plain(write_module, body))
    assert example.prompt == HI and example.chosen.strip() == expected


def test_what_deepspeed_chat_trains_on_comes_before_what_it_never_calls(write_module):
    body = """
    def get_prompt(self, sample):
        return "hi"
    def get_chosen(self, sample):
        raise IndexError("never called there")
    def get_prompt_and_chosen(self, sample):
        return "hi Assistant: hello"
    def get_rejected(self, sample):
        return " from get_rejected"
    def get_prompt_and_rejected(self, sample):
        return None
    """
    assert texts(first_example(load_plain(write_module, body))) == ["hello", "from get_rejected"]


def test_a_prompt_alone_serves_step_3_and_a_method_that_fails_only_the_steps_that_need_it(write_module):
    source = load_plain(write_module, "def get_prompt(self, sample):\n    return 'hi'\n")
    example = first_example(source)
    assert missing_for(3, example) is None and type(missing_for(1, example)) is BadRow
    body = """
    def get_prompt(self, sample):
        return "hi"
    def get_chosen(self, sample):
        return sample["answer"]
    def get_rejected(self, sample):
        return 3
    """
    source = load_plain(write_module, body, [{"question": 1}, {"answer": "a"}, {"answer": " "}])
    for index, stage, kind, reason in (
        (0, 1, BadRow, "there is no answer to learn (get_chosen raised KeyError: 'answer')"),
        (1, 2, BadRow, "(get_rejected gave int, not text)"),
        (2, 1, EmptyRow, "(get_chosen gave ' ')"),
    ):
        example = first_example(source, index)
        assert missing_for(3, example) is None
        assert type(missing_for(stage, example)) is kind and reason in str(missing_for(stage, example))
    body = "def get_prompt(self, sample):\n    return sample['question']\n"
    with pytest.raises(BadRow, match="get_prompt raised KeyError: 'question'"):
        first_example(load_plain(write_module, body))


def test_rows_need_not_be_dicts(write_module, tmp_path, tiny_tokenizer):
    body = """
    def get_prompt(self, sample):
        return sample[0]
    def get_chosen(self, sample):
        return sample[1]
    """
    source = load_plain(write_module, body, [("hi", "hello"), ("hi", "hey")])
    assert texts(first_example(source, 1))[0] == "hey"
    assert len(build(source.name, 1, tiny_tokenizer, tmp_path).train) == 2


def test_rows_may_come_from_a_file_that_is_named(write_module, tmp_path):
    write_rows(tmp_path / "rows.jsonl", [PAIR])
    module = write_module("class Mine:\n" + FIVE)
    source = load_source(f"{module}:Mine:{tmp_path}/rows.jsonl")
    assert texts(first_example(source)) == ["hello", "no"]
    assert source.train.row_id(0) == "rows.jsonl:1"
    with pytest.raises(ValueError, match=r"Mine has no rows: .*--data_path my_sets:Mine:NAME"):
        len(load_source(f"{module}:Mine").train)


def test_raw_datasets_stand_in_for_get_train_data_and_a_repeated_part_is_no_evaluation(write_module):
    body = f"""
    def __init__(self):
        self.raw_datasets = {{"train": [{PAIR!r}] * 3}}
    def get_eval_data(self):
        return self.raw_datasets["train"]
    """
    text = "class Mine:\n" + textwrap.indent(textwrap.dedent(body), "    ") + FIVE
    source = load_source(f"{write_module(text)}:Mine")
    assert len(source.train) == 3 and source.eval is None
    assert source.adapter.notes == ("get_eval_data gives the training rows; --eval_fraction is held out",)


# ---- constructors, and what cannot be used


@pytest.mark.parametrize(
    ("signature", "expected"),
    [
        ("self", ""),
        ("self, seed=0, dataset_name='own'", "given"),
        ("self, where, seed, rank, dataset_name, chat_path", "given"),
        ("self, *args", ""),
    ],
)
def test_constructors_of_many_forms(write_module, signature, expected):
    keep = "dataset_name" if "dataset_name" in signature else "''"
    text = f"class Mine:\n    def __init__({signature}):\n        self.kept = {keep}\n"
    text += f"    def get_train_data(self):\n        return [{PAIR!r}]\n" + FIVE
    source = load_source(f"{write_module(text)}:Mine:given")
    assert texts(first_example(source)) == ["hello", "no"]
    assert source.adapter._inner.kept == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("class Mine:\n    pass\n", "Mine needs get_prompt, as DeepSpeed-Chat's"),
        ("Mine = 3\n", "Mine is of type int, not a class"),
        (
            "class Mime:\n    pass\n",
            r"module my_sets has no Mine; did you mean Mime\?; MODULE:CLASS must name",
        ),
        ("import no_such_thing\n", "importing it raised ModuleNotFoundError.*no_such_thing.*my_sets.py:1"),
    ],
)
def test_what_cannot_be_used_is_told_when_it_is_named(write_module, text, reason):
    with pytest.raises(ValueError, match=f"^--data_path my_sets:Mine: .*{reason}"):
        load_source(f"{write_module(text)}:Mine")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("def __init__(self, tokenizer):\n        pass", "its constructor needs tokenizer"),
        ("def get_train_data(self):\n        raise OSError('disk')", "get_train_data raised OSError: disk"),
        ("def get_train_data(self):\n        return iter([])", "gave list_iterator, which has no length"),
        ("def get_train_data(self):\n        return []", "get_train_data is empty"),
    ],
)
def test_rows_that_cannot_be_had(write_module, body, reason):
    with pytest.raises(ValueError, match=f"^--data_path my_sets:Mine: .*{reason}"):
        len(load_source(f"{write_module(f'class Mine:{chr(10)}    {body}{chr(10)}{FIVE}')}:Mine").train)


# ---- names and caches


def test_a_ported_class_can_be_registered(write_module):
    text = "from common.data.registry import register_dataset\n@register_dataset('team/mine')\nclass Mine:\n"
    import_own_module(write_module(f"{text}    def get_train_data(self):\n        return [{PAIR!r}]\n{FIVE}"))
    assert texts(first_example(load_source("team/mine"))) == ["hello", "no"]
    ADAPTERS.pop("team/mine")


def test_an_edit_of_a_helper_beside_the_class_changes_the_digest(write_module):
    text = "def clean(text):\n    return text\nclass Mine:\n    def get_prompt(self, sample):\n"
    text += "        return clean(sample['prompt'])\n    def get_train_data(self):\n        return [{}]\n"
    before = load_source(f"{write_module(text)}:Mine").digest()
    assert before == load_source("my_sets:Mine").digest()
    assert before != load_source("my_sets:Mine:other").digest()
    edited = re.sub("return text", "return text.strip()", text)
    assert before != load_source(f"{write_module(edited)}:Mine").digest()


def test_an_adapter_of_ones_own_reads_the_file_that_is_named(write_module, tmp_path):
    text = """
    from common.data.registry import Adapter
    class Mine(Adapter):
        def get_prompt(self, row):
            return row["q"]
        def get_chosen(self, row):
            return row["a"]
    """
    write_rows(tmp_path / "rows.jsonl", [{"q": "hi", "a": "hello"}])
    source = load_source(f"{write_module(text)}:Mine:{tmp_path}/rows.jsonl")
    assert texts(first_example(source)) == ["hello", None] and not source.needs_hub
    assert load_source("my_sets:Mine:team/set").needs_hub
    with pytest.raises(ValueError, match="Mine has no load.*--data_path my_sets:Mine:NAME, a file"):
        load_source("my_sets:Mine")
