"""Classes of the user's own: of DeepSpeed-Chat's shape, unchanged, or with a length and an index."""

import sys
import textwrap
from unittest.mock import Mock

import pytest
from stage_texts import build, make_options, write_rows

from common.data.data_options import check_sources
from common.data.example import BadRow, EmptyRow, Message, missing_for
from common.data.registry import load_source

HI = (Message("user", "hi"),)

PAIR = {"prompt": "\n\nHuman: hi\n\nAssistant:", "chosen": " hello", "rejected": " no"}
METHODS = """
    def get_prompt(self, sample):
        return sample["prompt"]
    def get_prompt_and_chosen(self, sample):
        return sample["prompt"] + sample["chosen"]
    def get_rejected(self, sample):
        return sample["rejected"]
"""


@pytest.fixture
def write_module(tmp_path, monkeypatch):
    """A module of the user's in the working folder, which is not on the import path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])

    def write(text):
        (tmp_path / "my_sets.py").write_text(textwrap.dedent(text))
        sys.modules.pop("my_sets", None)
        return "my_sets"

    yield write
    sys.modules.pop("my_sets", None)


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

    load_dataset = Mock(return_value={"train": [PAIR], "test": []})
    monkeypatch.setattr(ported_sets, "load_dataset", load_dataset)
    source = load_source("ported_sets:StaticDataset")
    load_dataset.assert_not_called()  # nothing is loaded before a row is asked for
    assert first_example(source).chosen.strip() == "hello" and source.eval is None
    load_dataset.assert_called_once_with("team/static")
    load_dataset.side_effect = ConnectionError("no network\nmore")
    told = r"^--data_path ported_sets:StaticDataset: .*'team/static'.*no network; c"
    with pytest.raises(ValueError, match=told):
        len(load_source("ported_sets:StaticDataset").train)


def test_a_class_may_share_out_its_rows_by_files(saved):
    name = f"ported_sets:SharedOutDataset:{saved(train=[PAIR | {'n': n} for n in range(4)])}"
    source = load_source(name)
    assert [source.train[i]["n"] for i in range(3)] == [0, 1, 2]
    assert [source.eval[i]["n"] for i in range(len(source.eval))] == [3]
    assert source.digest() == load_source(name).digest()


def test_none_leaves_a_row_out_and_prints_are_dropped(saved, tmp_path, tiny_tokenizer, capsys):
    rows = [{"prompt": f" Human: q{i} Assistant:", "chosen": f" a{i}"} for i in range(30)]
    rows += [{"prompt": None, "chosen": "a"}] * 3 + [{"prompt": "q", "chosen": None}] * 4
    name = f"ported_sets:StaticDataset:{saved(train=rows)}"
    data = build(name, 1, tiny_tokenizer, tmp_path, max_bad_rows=0, eval_fraction=0.2)
    assert (data.report.num_bad, data.report.num_empty) == (0, 7)
    assert len(data.train) + len(data.eval) == 30 and len(data.eval) > 0
    (line,) = [line for line in data.report.lines() if "get_eval_data" in line]
    assert "raised KeyError: 'test'; --eval_fraction is held out" in line
    prompts = build(name, 3, tiny_tokenizer, tmp_path, max_bad_rows=0)
    assert len(prompts.train) == 34
    assert prompts.train[0]["prompt_text"] == "\n\nHuman: q0\n\nAssistant:"
    as_it_is = build(name, 3, tiny_tokenizer, tmp_path, max_bad_rows=0, template="one_line")
    assert [row["prompt_text"] for row in as_it_is.train][:30] == [row["prompt"] for row in rows[:30]]
    (problem,) = check_sources(make_options(name, 2, tmp_path))
    assert "no pair of a chosen and a rejected answer; step 1 can" in problem
    assert "(get_prompt_and_rejected gave None)" in problem
    assert "Warning" not in capsys.readouterr().out


# ---- usable subsets, and what each method is for


def load_plain(write_module, rows=(PAIR,), **methods):
    """A class whose methods return these expressions of a sample."""
    text = f"class Mine:\n    def get_train_data(self):\n        return {list(rows)!r}\n"
    for name, value in methods.items():
        text += f"    def get_{name}(self, sample):\n        return {value}\n"
    return load_source(f"{write_module(text)}:Mine")


@pytest.mark.parametrize(
    ("whole", "prompt", "expected"),
    [
        ("hi Assistant: hello", "hi", "hello"),
        ("\n\nHuman: hi\n\nAssistant: hello", " Human: hi", "hello"),
        (" Human: hi Assistant: Assistant: hello", " Human: hi Assistant:", "Assistant: hello"),
    ],
)
def test_a_reply_is_what_stands_behind_the_prompt(write_module, whole, prompt, expected):
    source = load_plain(write_module, prompt=repr(prompt), prompt_and_chosen=repr(whole))
    example = first_example(source)
    assert [message.content for message in example.prompt] == ["hi"] and example.chosen.strip() == expected


def test_what_deepspeed_chat_trains_on_comes_before_what_it_never_calls(write_module):
    methods = {"chosen": "1 / 0", "prompt_and_chosen": "'hi Assistant: hello'"}
    methods |= {"rejected": "' from get_rejected'", "prompt_and_rejected": "None"}
    example = first_example(load_plain(write_module, prompt="'hi'", **methods))
    assert texts(example) == ["hello", "from get_rejected"]


def test_a_prompt_alone_serves_step_3_and_a_method_that_fails_only_the_steps_that_need_it(write_module):
    example = first_example(load_plain(write_module, prompt="'hi'"))
    assert missing_for(3, example) is None and type(missing_for(1, example)) is BadRow
    methods = {"prompt": "'hi'", "chosen": "sample['answer']", "rejected": "3"}
    source = load_plain(write_module, [{"question": 1}, {"answer": "a"}, {"answer": " "}], **methods)
    for index, stage, kind, reason in (
        (0, 1, BadRow, "there is no answer to learn (get_chosen raised KeyError: 'answer')"),
        (1, 2, BadRow, "(get_rejected gave int, not text)"),
        (2, 1, EmptyRow, "(get_chosen gave ' ')"),
    ):
        example = first_example(source, index)
        assert missing_for(3, example) is None
        assert type(missing_for(stage, example)) is kind and reason in str(missing_for(stage, example))
    with pytest.raises(BadRow, match="get_prompt raised KeyError: 'question'"):
        first_example(load_plain(write_module, prompt="sample['question']"))


def test_rows_may_come_from_a_file_that_is_named(write_module, tmp_path):
    write_rows(tmp_path / "rows.jsonl", [PAIR])
    module = write_module("class Mine:\n" + METHODS)
    source = load_source(f"{module}:Mine:{tmp_path}/rows.jsonl")
    assert texts(first_example(source)) == ["hello", "no"]
    assert source.train.row_id(0, {}) == "rows.jsonl:1"
    with pytest.raises(ValueError, match=r"Mine has no rows: .*--data_path my_sets:Mine:NAME"):
        len(load_source(f"{module}:Mine").train)


def test_raw_datasets_stand_in_for_get_train_data_and_a_repeated_part_is_no_evaluation(write_module):
    text = f"class Mine:\n    raw_datasets = {{'train': [{PAIR!r}] * 3}}\n"
    text += "    def get_eval_data(self):\n        return self.raw_datasets['train']\n"
    source = load_source(f"{write_module(text + METHODS)}:Mine")
    assert len(source.train) == 3 and source.eval is None
    assert source.adapter.notes == ("get_eval_data gives the training rows; --eval_fraction is held out",)


# ---- constructors, and what cannot be used


@pytest.mark.parametrize("signature", ["self, where, seed, rank, dataset_name, chat_path", "self, *args"])
def test_constructors_of_many_forms(write_module, signature):
    keep = "dataset_name" if "dataset_name" in signature else "args[3]"
    text = f"class Mine:\n    def __init__({signature}):\n        self.kept = {keep}\n"
    text += f"    def get_train_data(self):\n        return [{PAIR!r}]\n" + METHODS
    source = load_source(f"{write_module(text)}:Mine:given")
    assert texts(first_example(source)) == ["hello", "no"]
    assert source.adapter._inner.kept == "given"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("pass", "Mine needs get_prompt, as DeepSpeed-Chat's"),
        (f"def __init__(self, words):\n        pass\n{METHODS}", "its constructor needs words"),
        (f"def __init__(self, tokenizer):\n        pass\n{METHODS}", "Mine takes a tokenizer"),
        (
            f"def get_train_data(self):\n        raise OSError('disk')\n{METHODS}",
            "get_train_data raised OSError: disk",
        ),
    ],
    ids=["no get_prompt", "constructor", "tokenizer", "no rows"],
)
def test_what_cannot_be_used_is_told_by_the_source(write_module, body, reason):
    with pytest.raises(ValueError, match=f"^--data_path my_sets:Mine: .*{reason}"):
        len(load_source(f"{write_module(f'class Mine:{chr(10)}    {body}')}:Mine").train)


# ---- names and caches


def test_an_edit_of_a_helper_beside_the_class_changes_the_digest(write_module):
    text = "def clean(text):\n    return text\nclass Mine:\n    def get_prompt(self, sample):\n"
    text += "        return clean(sample['prompt'])\n    def get_train_data(self):\n        return [{}]\n"
    before = load_source(f"{write_module(text)}:Mine").digest()
    assert before == load_source("my_sets:Mine").digest()
    assert before != load_source("my_sets:Mine:other").digest()
    edited = text.replace("return text", "return text.strip()")
    assert before != load_source(f"{write_module(edited)}:Mine").digest()


def test_an_adapter_of_ones_own_reads_the_file_that_is_named(write_module, tmp_path):
    text = "from common.data.registry import Adapter\nclass Mine(Adapter):\n" + METHODS
    text += "    def get_chosen(self, row):\n        return row['chosen']\n"
    write_rows(tmp_path / "rows.jsonl", [PAIR])
    source = load_source(f"{write_module(text)}:Mine:{tmp_path}/rows.jsonl")
    assert texts(first_example(source)) == ["hello", "no"] and not source.needs_hub
    assert load_source("my_sets:Mine:team/set").needs_hub
    with pytest.raises(ValueError, match="Mine has no load.*--data_path my_sets:Mine:NAME, a file"):
        load_source("my_sets:Mine")


# ---- a class of one's own, and what its constructor is given

OWN = """
from common.data.registry import Adapter

class Rows:
    def __init__(self, count=2, word="hello", tokenizer=None, seed=0):
        self.count, self.word, self.tokenizer, self.seed = count, word, tokenizer, seed
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        if index == 1:
            return ["no", "row"] if self.word == "list" else {}[self.word]
        return {"prompt": "hi", "chosen": self.word, "rejected": f"{self.tokenizer} {self.seed}"}

class Plain(Rows):
    def __init__(self, count=2):
        super().__init__(count)

class Mine(Adapter):
    def __init__(self, source="", suffix="", seed=0):
        super().__init__(source)
        self.suffix, self.seed = suffix, seed
    def get_prompt(self, row):
        return row["prompt"]
    def get_chosen(self, row):
        return f"{row['chosen']}{self.suffix}{self.seed}"

class Ported:
    def __init__(self, output_path, seed, local_rank, dataset_name, tokenizer=None, suffix=""):
        self.told = f"{seed} {dataset_name} {tokenizer} {suffix}"
    def get_train_data(self):
        return [{}]
    def get_prompt(self, row):
        return self.told

class Empty:
    pass
"""


@pytest.fixture
def own(write_module, tmp_path):
    write_module(OWN)
    return tmp_path


def test_a_class_with_a_length_and_an_index_gives_rows(own):
    source = load_source("my_sets:Plain:count=3")
    assert len(source.train) == 3 and source.eval is None and not source.needs_hub
    example = first_example(source)
    assert (example.prompt, example.chosen, example.rejected) == (HI, "hello", "None 0")
    assert source.train.row_id(2, {}) == "my_sets:Plain:count=3:3"
    for name, reason in (
        ("my_sets:Plain", "the index raised KeyError: 'hello'"),
        ("my_sets:Rows:word=list", "type list"),
    ):
        with pytest.raises(BadRow, match=reason):
            load_source(name, tokenizer="T").train[1]
    before = source.digest()
    assert before == load_source("my_sets:Plain:count=3").digest()
    (own / "my_sets.py").write_text(OWN + "# edited")
    assert before != load_source("my_sets:Plain:count=3").digest()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("my_sets:Rows", ("hello", "T 7")),
        ("my_sets:Rows:word=some text,seed=3", ("some text", "T 3")),
        ('my_sets:Rows:{"word": "a, b=c", "count": 1}', ("a, b=c", "T 7")),
        ("my_sets:Mine:source={file},suffix=!", (" hello!7", None)),
        ("my_sets:Mine:{file}", (" hello7", None)),
    ],
)  # fmt: skip
def test_a_constructor_gets_its_arguments_the_seed_and_the_tokenizer(own, name, expected):
    file = write_rows(own / "a.jsonl", [PAIR])
    example = first_example(load_source(name.replace("{file}", file), seed=7, tokenizer="T"))
    assert (example.chosen, example.rejected) == expected


def test_a_ported_class_gets_arguments_and_the_tokenizer_and_keeps_its_seed(own):
    source = load_source("my_sets:Ported:suffix=!,dataset_name=team/x", seed=7, tokenizer="T")
    assert first_example(source).prompt[0].content == "1234 team/x T !"


def test_the_cache_follows_arguments_that_no_row_shows(own):
    file = write_rows(own / "a.jsonl", [PAIR])
    names = [f"my_sets:Mine:{text}source={file}" for text in ("", "suffix=a,", "suffix=b,")]
    assert len({load_source(name).digest() for name in names}) == 3
    assert load_source(names[1]).digest() == load_source(names[1]).digest()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("my_sets:Rows:count=3,oops", "'oops' is not ARGUMENT=VALUE; write MODULE:CLASS:ARGUMENT=VALUE,"),
        ("my_sets:Rows:count=3,count=4", "'count=4' is given twice"),
        ('my_sets:Rows:{"count": 3', "Expecting.*; write MODULE:CLASS"),
        ("my_sets:Rows:cuont=3", "unexpected keyword argument 'cuont'.*; give it other arguments"),
        ("my_sets:Mine:sufix=a,source=x", "unexpected keyword argument 'sufix'"),
        ("my_sets:Ported:sufix=a", "takes no sufix"),
        ("my_sets:Plain:count=0", "it has no rows"),
        ("my_sets:Plain:count=-1", "its length raised ValueError"),
        (
            "my_sets:Empty",
            "Empty needs get_prompt, as.*or __len__ and __getitem__ that give rows, or must derive",
        ),
    ],
)
def test_what_a_class_cannot_be_made_of_is_one_message(own, name, reason):
    with pytest.raises(ValueError, match=reason) as told:
        len(load_source(name, seed=7, tokenizer="T").train)
    assert str(told.value).startswith(f"--data_path {name}: ") and "\n" not in str(told.value)


def test_without_a_tokenizer_only_the_classes_that_take_none_are_checked(own, tmp_path):
    options = make_options("my_sets:Rows:count=1", 2, tmp_path)
    assert check_sources(options) == check_sources(options, "T") == []
    (problem,) = check_sources(make_options("my_sets:Rows:cuont=1", 2, tmp_path), "T")
    assert problem.startswith("--data_path my_sets:Rows:cuont=1: the constructor of Rows raised TypeError")
    with pytest.raises(ValueError, match="Rows takes a tokenizer, but there is none"):
        load_source("my_sets:Rows")
