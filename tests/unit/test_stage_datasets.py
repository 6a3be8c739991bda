"""Sources to token rows: shares, masks, counts, the token cache, and what stops a run."""

import json
import random
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import stage_texts
from stage_texts import END, make_options, texts

from common.data import stage_datasets
from common.data.chat_template import build_template
from common.data.data_options import check_sources, is_held_out, parse_data_split, share_indexes
from common.data.registry import load_source
from common.data.stage_datasets import build_data, build_pretraining, preview_rows
from common.data.stage_rows import MAX_FIELD_CHARACTERS, build_row_fields
from common.ranks import passes, watchdog

ROOT = Path(__file__).parents[2]


@pytest.fixture
def write_rows(tmp_path):
    return lambda rows, name="rows.jsonl": stage_texts.write_rows(tmp_path / name, rows)


@pytest.fixture
def options(tmp_path):
    return partial(make_options, cache=tmp_path / "cache")


@pytest.fixture
def build(tmp_path, tiny_tokenizer):
    return partial(stage_texts.build, tokenizer=tiny_tokenizer, cache=tmp_path)


def answers(count):
    return [{"prompt": f"question {i}", "answer": f"answer {i}"} for i in range(count)]


def pairs(count):
    return [{"prompt": f"question {i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(count)]


# ---- rows


def test_sft_rows(tiny_tokenizer, write_rows, build):
    path = write_rows([*answers(2), {"text": "plain text"}])
    data = build(path, 1)
    row = data.train[1]
    everything = build(path, 1, loss_on="all").train[1]
    assert everything == row | {"loss_mask": [False] + [True] * (len(row["input_ids"]) - 1)}
    assert texts(data, 1, tiny_tokenizer)[1] == ("\n\nHuman: question 1\n\nAssistant:", f" answer 1{END}")
    assert row["row_id"] == "rows.jsonl:2"
    assert all(type(m) is bool for m in row["loss_mask"]) and type(row["input_ids"]) is list
    first, *others = data.train[2]["loss_mask"]
    assert not first and all(others)
    assert (len(data.train), len(data.eval), data.report.num_raw_rows) == (3, 0, 3)
    assert data.train.lengths("input_ids").tolist() == [len(data.train[i]["input_ids"]) for i in range(3)]


def test_pair_rows(tiny_tokenizer, write_rows, build):
    data = build(write_rows([pairs(1)[0] | {"margin": 0.5}]), 2)
    prompt = "\n\nHuman: question 0\n\nAssistant:"
    assert texts(data, 2, tiny_tokenizer) == [(prompt, f" good 0{END}", f" bad 0{END}")]
    row = data.train[0]
    start = row["chosen_response_start"]
    assert start == row["rejected_response_start"] and row["margin"] == 0.5
    assert row["chosen_ids"][:start] == row["rejected_ids"][:start]


def test_both_sides_of_a_truncated_pair_keep_the_same_context(tiny_tokenizer, write_rows, build):
    path = write_rows([{"prompt": "x" * 50, "chosen": "a", "rejected": "b c d e f g h i"}])
    data = build(path, 2, max_tokens=30)
    row, eot = data.train[0], tiny_tokenizer.eos_token_id
    start = row["chosen_response_start"]
    assert row["rejected_response_start"] == start
    assert row["chosen_ids"][:start] == row["rejected_ids"][:start]
    assert len(row["rejected_ids"]) == 30 and row["chosen_ids"][-1] == row["rejected_ids"][-1] == eot
    assert data.report.num_truncated == 1


def test_identical_pairs_and_ties_are_skipped_and_counted(write_rows, build):
    same = {"prompt": "q", "chosen": "same", "rejected": " same "}
    late = {"prompt": "q", "chosen": "x" * 60 + "a", "rejected": "x" * 60 + "b"}
    report = build(write_rows([*pairs(3), same, late]), 2, max_tokens=40).report
    assert (report.num_train, report.num_identical, report.num_identical_truncated) == (3, 1, 1)
    assert any("both answers are the same" in line for line in report.lines())


def test_prompt_rows_keep_their_end(tiny_tokenizer, write_rows, build):
    data = build(write_rows([{"prompt": "abc " * 30}, {"prompt": "hi"}]), 3, max_tokens=20)
    whole = tiny_tokenizer("\n\nHuman: " + ("abc " * 30).strip() + "\n\nAssistant:").input_ids
    assert data.train[0]["prompt_ids"] == whole[-20:]
    assert data.train[0]["prompt_text"] == tiny_tokenizer.decode(whole)
    assert data.report.num_truncated == 1


def test_prompt_rows_bring_the_other_columns_of_the_raw_row(write_rows, build):
    rows = [{"prompt": "2 + 2?", "answer": "4", "level": 1}, {"prompt": "no more", "chosen": "x"}]
    path = write_rows([*rows, {"prompt": "q", "pos_answers": ["a", "b"], "neg_answers": ["c"]}])
    data = build(path, 3)
    found = [json.loads(data.train[i]["fields"]) for i in range(len(data.train))]
    assert found == [{"answer": "4", "level": 1}, {}, {"pos_answers": ["a", "b"], "neg_answers": ["c"]}]
    assert "fields" not in build(path, 1).train[0]


def test_fields_are_json_of_what_json_holds():
    fits = "x" * (MAX_FIELD_CHARACTERS - 2)  # two quotes
    row = {
        "text": "é\n\"'",
        "nested": {"tests": [["1", 1], ("2", 2)], "nan": float("nan"), "infinite": -float("inf")},
        "numpy": [np.float32(0.25), np.float64("nan"), np.arange(3)],
        "day": date(2020, 1, 1),
        "long": fits,
    }
    expected = {
        "text": "é\n\"'",
        "nested": {"tests": [["1", 1], ["2", 2]], "nan": None, "infinite": None},
        "numpy": [0.25, None, [0, 1, 2]],
        "day": "2020-01-01",
        "long": fits,
    }
    others = (b"\xff", [object()], "\ud83d", {"a": object()}, fits + "x")
    left_out = {f"other {number}": value for number, value in enumerate(others)}
    text = build_row_fields({"prompt": "q", "chosen": "a", "messages": []} | left_out | row)
    assert json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON")) == expected


@pytest.mark.parametrize(
    ("own", "name"),
    [("gsm-17", "gsm-17"), (17, "17"), (" a b ", "a b"), (0, "0")]
    + [(bad, "rows.jsonl:2") for bad in (None, "", " ", True, 1.5, ["a"], "a\nb", "\ud800", "x" * 257)],
)
def test_a_row_is_called_by_its_own_id_wherever_it_goes(own, name, write_rows, build):
    rows = [{"prompt": "p"}, {"prompt": "q", "pos_answers": ["a", "b"], "neg_answers": ["c"], "id": own}]
    path = write_rows(rows)
    assert build(path, 3).train[1]["row_id"] == name
    data = build(path, 2, max_bad_rows=1)
    assert [data.train[i]["row_id"] for i in range(2)] == [f"{name}#0", f"{name}#1"]


def test_answer_lists_give_pairs_up_to_a_limit_and_answers_once(write_rows, build, options, tiny_tokenizer):
    path = write_rows([{"prompt": "q", "pos_answers": ["a", "b", "c"], "neg_answers": ["d", "e"]}])
    data = build(path, 2, max_pairs_per_prompt=4)
    assert (len(data.train), data.report.num_dropped_pairs) == (6, 2), "epochs draw from all"
    assert len({data.train[i]["row_id"] for i in range(6)}) == 6
    assert set(data.train.numbers("prompt_index").tolist()) == {0}
    assert len(build(path, 2, max_pairs_per_prompt=4, num_stored_epochs=1).train) == 4
    assert (len(build(path, 1).train), len(build(path, 3).train)) == (3, 1)
    rows = [{"prompt": f"q{n}", "ranked_answers": list("abcd")} for n in range(12)]
    ranked = write_rows(rows, "ranked.jsonl")
    data = build(ranked, 2, max_pairs_per_prompt=4, eval_fraction=0.5)
    for table, num_pairs in ((data.train, 6), (data.eval, 4)):
        numbers = table.numbers("prompt_index").tolist()
        assert len(set(numbers)) > 1 and {numbers.count(n) for n in numbers} == {num_pairs}
    both = replace(options(path, 2), data_path=[path, ranked])
    table = build_data(both, build_template("human_assistant", tiny_tokenizer)).train
    counts = np.unique(table.numbers("prompt_index"), return_counts=True)[1]
    assert counts.tolist() == [6] * 13, "a prompt of another file is another one"


# ---- shares


def test_shares_are_disjoint_complete_and_those_of_every_process():
    shares = [share_indexes(1000, "2,4,4", stage, seed=1234) for stage in (1, 2, 3)]
    assert sorted(index for share in shares for index in share) == list(range(1000))
    assert [len(share) for share in shares] == [200, 400, 400]
    assert shares[0] != share_indexes(1000, "2,4,4", 1, seed=1)
    assert shares[0][:5] == [9, 11, 21, 29, 40]  # frozen: another number means other shares for every user
    code = "from common.data.data_options import is_held_out; print(is_held_out({'a': 'é'}, 0.5, 7))"
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == str(is_held_out({"a": "é"}, 0.5, 7))


@pytest.mark.parametrize("text", ["2,4", "a,b,c", "0,0,0", "1,-1,1", "nan,1,1"])
def test_a_bad_data_split_is_named(text):
    with pytest.raises(ValueError, match="--data_split .* must be three numbers"):
        parse_data_split(text)


def test_the_three_steps_share_no_row(write_rows, build):
    path = write_rows(pairs(100))
    seen = []
    for stage in (1, 2, 3):
        data = build(path, stage, data_split="2,4,4", eval_fraction=0.2)
        seen += [table[i]["row_id"] for table in (data.train, data.eval) for i in range(len(table))]
        assert len(data.eval) > 0
    assert len(seen) == len(set(seen)) == 100


def test_the_held_out_part_follows_the_content(write_rows, build):
    assert 350 < sum(is_held_out({"x": i}, 0.4, 1) for i in range(1000)) < 450
    assert is_held_out({"a": 1, "b": 2}, 0.5, 3) == is_held_out({"b": 2, "a": 1}, 0.5, 3)
    data = build(write_rows(answers(50) * 2), 1, eval_fraction=0.3)
    train, held_out = ({tuple(t[i]["input_ids"]) for i in range(len(t))} for t in (data.train, data.eval))
    assert train and held_out and not train & held_out


def test_a_sources_own_eval_part_is_used_whole(tmp_path, write_rows, build):
    write_rows(answers(20), "train.jsonl")
    write_rows(answers(5), "eval.jsonl")
    data = build(str(tmp_path), 1, data_split="5,5,0", eval_fraction=0.5)
    assert (len(data.train), len(data.eval)) == (10, 5)


def test_data_weights_are_of_each_path_and_keep_the_shares_apart(write_rows, build, options, tiny_tokenizer):
    paths = [write_rows(answers(number), f"{number}.jsonl") for number in (40, 100)]
    only = write_rows(answers(5), "only.jsonl")
    given = {"data_split": "1,1,0", "eval_fraction": 0.2, "sft_only_data_path": [only]}
    plain = build(paths, 1, **given)
    data = build(paths, 1, data_weights=[3.0, 0.5], **given)
    assert data.key == plain.key and plain.sources == []
    rows = [
        sum(f"{name}.jsonl" in data.train[i]["row_id"] for i in range(len(data.train)))
        for name in (40, 100, "only")
    ]
    assert data.sources == list(zip(rows, [3.0, 0.5, 1.0], strict=True)) and sum(rows) == len(data.train)
    assert any(
        f"about {3 * rows[0]} rows of {paths[0]}: 3 x its {rows[0]} training rows" in n
        for n in data.report.notes
    )
    lines = preview_rows(
        options(paths, 1, data_weights=[3.0, 0.5], data_split="1,1,0"),
        build_template("plain", tiny_tokenizer),
    )
    assert any(f"about 25 rows of {paths[1]}: 0.5 x the 50 of step 1" in line for line in lines)


def test_data_weights_of_another_number_than_paths_are_named(write_rows, options):
    paths = [write_rows(answers(9), name) for name in ("a.jsonl", "b.jsonl")]
    (problem,) = check_sources(options(paths, 1, data_weights=[1.0]))
    assert problem.startswith(
        "--data_weights has 1 weights, but --data_path has 2 entries; give one for each"
    )


def test_data_weights_refuse_a_cache_that_does_not_count_sources(write_rows, build):
    path = write_rows(answers(9))
    file = Path(build(path, 1).report.cache_folder, "report.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"source_rows": []}))
    with pytest.raises(ValueError, match="earlier version .* delete that folder"):
        build(path, 1, data_weights=[2.0])


def test_sft_only_data_is_used_whole_by_step_1_alone(write_rows, build):
    first, second = write_rows(pairs(10)), write_rows(answers(7), "more.jsonl")
    for step, expected in ((1, 12), (2, 5)):
        data = build(first, step, data_split="5,5,0", sft_only_data_path=[second])
        assert len(data.train) == expected


# ---- what stops a run


def test_bad_rows_are_counted_and_named(tmp_path, write_rows, build):
    wrong = ["{no json", {"question": "x"}, {"prompt": "x", "answer": "\ud83d"}, {"text": " "}]
    path = write_rows([*answers(3), *wrong])
    with pytest.raises(ValueError, match="more than --max_bad_rows 1 "):
        build(path, 1, max_bad_rows=1)
    assert list((tmp_path / "cache").iterdir()) == []
    report = build(path, 1, max_bad_rows=3).report
    assert (report.num_train, report.num_bad, report.num_empty) == (3, 3, 1)
    places = sorted(row.split(": ")[0] for row in report.bad_rows)
    assert places == [f"{path}:{line}" for line in (4, 5, 6)]
    told = "\n".join(report.bad_rows)
    assert "the row has `question`, but no `response`" in told and "surrogate" in told
    # The same rows under a stricter limit stop the run, though their tokens are in the cache.
    with pytest.raises(ValueError, match=r"(?s)--max_bad_rows 2 .*rows.jsonl:4: the line is not JSON"):
        build(path, 1, max_bad_rows=2)


def test_no_rows_left_names_source_and_cure(write_rows, build):
    told = r"rows.jsonl: none of its 2 rows is left.*use more rows.*2 rows skipped: empty"
    with pytest.raises(ValueError, match=told):
        build(write_rows([{"text": " "}, {"text": ""}]), 1)
    with pytest.raises(ValueError, match="--data_split that gives step 1 more than 1,9,9"):
        build(write_rows(pairs(1)), 1, data_split="1,9,9")


def test_check_sources_tells_all_problems_at_once(tmp_path, write_rows, options):
    good = write_rows(pairs(10))
    wrong = write_rows([{"frage": "x", "answer": "y"}], "wrong.jsonl")
    sft_only = write_rows(answers(2), "answers.jsonl")
    missing = str(tmp_path / "missing.jsonl")
    assert check_sources(options(good, 2)) == []
    paths = [good, wrong, sft_only, missing]
    problems = check_sources(replace(options(good, 2), data_path=paths, data_split="1,2"))
    expected = [
        "--data_split '1,2' must be three numbers",
        "wrong.jsonl:1: the row has `answer`, but no `prompt`",
        "answers.jsonl:1: there is no pair",
        "missing.jsonl: there is no such file",
    ]
    assert len(problems) == len(expected)
    for problem, text in zip(problems, expected, strict=True):
        assert text in problem
    assert ["step 2 reads prompt/chosen/rejected | " in p for p in problems] == [False, False, True, False]
    (problem,) = check_sources(options(good, 2, data_split="1,0,1"))
    assert "--data_split 1,0,1 leaves no rows for step 2" in problem


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv", "a.parquet"])
def test_a_large_file_is_never_in_memory_and_its_first_rows_are_enough_at_the_start(tmp_path, name, options):
    frame = pytest.importorskip("pandas").DataFrame(
        [{"prompt": f"question {i}", "answer": random.Random(i).randbytes(1500).hex()} for i in range(3000)]
    )
    path = str(tmp_path / name)
    if ".json" in name:
        frame.to_json(path, orient="records", lines=True)
    elif name.endswith("csv"):
        frame.to_csv(path, index=False)
    else:
        frame.to_parquet(path, row_group_size=100)
    tracemalloc.start()
    assert check_sources(options(path, 1)) == []
    probed = tracemalloc.get_traced_memory()[1]
    rows = load_source(path).train
    arrow_before = pyarrow.total_allocated_bytes()
    assert sum(len(rows[i]["answer"]) for i in range(0, len(rows), 10)) == 900_000 and len(rows) == 3000
    assert rows[150]["prompt"] == "question 150" and rows[2999]["prompt"] == "question 2999"
    assert pyarrow.total_allocated_bytes() - arrow_before < 1e6  # tracemalloc does not see pyarrow's memory
    read = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert probed < 4e6 and read < 5e6  # of 9 MB


def test_a_dry_run_reads_the_first_rows_and_shows_one(tiny_tokenizer, write_rows, options):
    path = write_rows([*pairs(5), {"question": "x"}, "torn", *pairs(300)])
    template = build_template("human_assistant", tiny_tokenizer)
    lines = preview_rows(options(path, 2), template)
    assert lines[0].startswith(f"{path}: its first 200 rows give 198 of step 2, ")
    assert lines[1] == "pair data: 2 rows skipped: bad form"
    assert lines[2].startswith(f"pair data: bad row {path}:6: there is no pair of a chosen")
    assert lines[-1] == (
        "rows.jsonl:1, rejected_ids: '\\n\\nHuman: question 0\\n\\nAssistant: bad 0<|endoftext|>'"
    )
    with pytest.raises(ValueError, match="more than --max_bad_rows 1 of the rows are bad"):
        preview_rows(options(path, 2, max_bad_rows=1), template)


def test_a_person_sees_what_is_being_done(write_rows, build, monkeypatch, capfd):
    monkeypatch.setattr(watchdog, "_printed_phases", None)
    path = write_rows(answers(3))
    with watchdog.phase("the loading of the model"):
        assert capfd.readouterr().err == "", "a program asks for it"
    watchdog.print_progress_lines()
    monkeypatch.setattr(passes, "LINE_SECONDS", 0.0)
    for step in (1, 2):
        with watchdog.phase("the preparation of the data", step), watchdog.phase("something inside"):
            build(path, 1)
    lines = [line.split("] ")[1] for line in capfd.readouterr().err.splitlines()]
    told = [f"something inside: {n} of 3 rows, left 0:00:00" for n in (1, 2, 3)]
    assert lines == ["the preparation of the data", *told], "once, and the second time it is in the cache"


# ---- the token cache


def test_the_cache_is_reused_and_its_key_follows_what_decides_the_tokens(
    tiny_tokenizer, make_tokenizer, write_rows, options
):
    given = options(write_rows(answers(20)), 1)
    template = build_template("human_assistant", tiny_tokenizer)
    first, again = build_data(given, template), build_data(given, template)
    assert again.report.cache_folder == first.report.cache_folder
    assert (first.report.from_cache, again.report.from_cache) == (False, True)
    assert "new" in first.report.lines()[0] and "reused" in again.report.lines()[0]
    assert [first.train[i] for i in range(20)] == [again.train[i] for i in range(20)]

    folders = {first.report.cache_folder}
    changes = {"max_tokens": 64, "seed": 1, "eval_fraction": 0.2, "loss_on": "all", "data_split": "9,1,0"}
    for name, value in changes.items():
        folders.add(build_data(replace(given, **{name: value}), template).report.cache_folder)
    for name, tokenizer in (("human_assistant", make_tokenizer(300)), ("plain", tiny_tokenizer)):
        folders.add(build_data(given, build_template(name, tokenizer)).report.cache_folder)
    whole = replace(given, data_path=[], sft_only_data_path=given.data_path)  # none of it for other steps
    folders.add(build_data(whole, template).report.cache_folder)
    write_rows(answers(21))
    folders.add(build_data(given, template).report.cache_folder)
    assert len(folders) == 10


def test_pretraining_blocks(tmp_path, tiny_tokenizer, write_rows, monkeypatch):
    path = write_rows([{"text": "abc def"}, {"text": ""}, {"text": "ghi"}, {"text": "j" * 40}])
    blocks = build_pretraining(path, None, 8, tiny_tokenizer, cache_dir=str(tmp_path / "cache"))
    whole = tiny_tokenizer(f"abc def{END}ghi{END}{'j' * 40}{END}").input_ids
    assert sum((blocks[i]["input_ids"] for i in range(len(blocks))), []) == whole[: len(whole) // 8 * 8]
    assert {len(blocks[i]["input_ids"]) for i in range(len(blocks))} == {8}
    monkeypatch.setattr(stage_datasets, "CHUNK_ROWS", 2)  # what is left goes before the next ones
    again = build_pretraining(path, None, 8, tiny_tokenizer, cache_dir=str(tmp_path / "other"))
    assert [again[i] for i in range(len(again))] == [blocks[i] for i in range(len(blocks))]
    with pytest.raises(ValueError, match="--unsupervised_dataset_name .*less than one block of 4096"):
        build_pretraining(path, None, 4096, tiny_tokenizer, cache_dir=str(tmp_path / "cache"))
