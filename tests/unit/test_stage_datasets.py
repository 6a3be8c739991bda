"""Sources to token rows: shares, masks, counts, the token cache, and what stops a run."""

import json
import random
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pyarrow
import pytest

from common.data import stage_datasets
from common.data.data_options import is_held_out, parse_data_split, share_indexes
from common.data.dialogue import build_template
from common.data.pretraining import build_pretraining
from common.data.registry import load_source
from common.data.source_checks import check_sources
from common.data.stage_datasets import DataOptions, build_pairs, build_prompts, build_sft, preview_rows
from common.ranks import watchdog

ROOT = Path(__file__).parents[2]


@pytest.fixture
def template(tiny_tokenizer):
    return build_template("human_assistant", tiny_tokenizer)


@pytest.fixture
def write_rows(tmp_path):
    def write(rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(path)

    return write


@pytest.fixture
def options(tmp_path):
    def make(path, stage, **changes):
        share = {1: "1,0,0", 2: "0,1,0", 3: "0,0,1"}[stage]
        given = {"data_split": share, "eval_fraction": 0.0, "cache_dir": str(tmp_path / "cache")} | changes
        return DataOptions(data_path=[path], stage=stage, **given)

    return make


def answers(count):
    return [{"prompt": f"question {i}", "answer": f"answer {i}"} for i in range(count)]


def pairs(count):
    return [{"prompt": f"question {i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(count)]


def learnt(tokenizer, row):
    return tokenizer.decode([i for i, m in zip(row["input_ids"], row["loss_mask"], strict=True) if m])


# ---- rows


def test_sft_rows(tiny_tokenizer, template, write_rows, options):
    path = write_rows([*answers(2), {"text": "plain text"}])
    data = build_sft(options(path, 1), tiny_tokenizer, template)
    row = data.train[1]
    assert (
        tiny_tokenizer.decode(row["input_ids"]) == "\n\nHuman: question 1\n\nAssistant: answer 1<|endoftext|>"
    )
    assert learnt(tiny_tokenizer, row) == " answer 1<|endoftext|>"
    assert row["row_id"] == "rows.jsonl:2"
    assert all(type(m) is bool for m in row["loss_mask"]) and type(row["input_ids"]) is list
    assert learnt(tiny_tokenizer, data.train[2]) == tiny_tokenizer.decode(data.train[2]["input_ids"][1:])
    assert (len(data.train), len(data.eval), data.report.num_raw_rows) == (3, 0, 3)
    assert data.train.lengths("input_ids").tolist() == [len(data.train[i]["input_ids"]) for i in range(3)]


def test_loss_on_all_counts_every_token_that_something_predicts(
    tiny_tokenizer, template, write_rows, options
):
    path = write_rows(answers(1))
    row = build_sft(options(path, 1, loss_on="all"), tiny_tokenizer, template).train[0]
    assert row["loss_mask"] == [False] + [True] * (len(row["input_ids"]) - 1)


def test_messages_rows_learn_every_assistant_turn(tiny_tokenizer, template, write_rows, options):
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    path = write_rows([{"messages": [{"role": role, "content": text} for role, text in turns]}])
    row = build_sft(options(path, 1), tiny_tokenizer, template).train[0]
    assert learnt(tiny_tokenizer, row) == " b<|endoftext|> d<|endoftext|>"


def test_pair_rows(tiny_tokenizer, template, write_rows, options):
    path = write_rows([pairs(1)[0] | {"margin": 0.5}])
    row = build_pairs(options(path, 2), tiny_tokenizer, template).train[0]
    start = row["chosen_response_start"]
    assert start == row["rejected_response_start"]
    assert row["chosen_ids"][:start] == row["rejected_ids"][:start]
    assert tiny_tokenizer.decode(row["chosen_ids"][start:]) == " good 0<|endoftext|>"
    assert tiny_tokenizer.decode(row["rejected_ids"][start:]) == " bad 0<|endoftext|>"
    assert row["margin"] == 0.5


def test_both_sides_of_a_truncated_pair_keep_the_same_context(tiny_tokenizer, template, write_rows, options):
    path = write_rows([{"prompt": "x" * 50, "chosen": "a", "rejected": "b c d e f g h i"}])
    data = build_pairs(options(path, 2, max_seq_len=30), tiny_tokenizer, template)
    row = data.train[0]
    start = row["chosen_response_start"]
    assert row["rejected_response_start"] == start
    assert row["chosen_ids"][:start] == row["rejected_ids"][:start]
    assert (
        len(row["rejected_ids"]) == 30 and row["chosen_ids"][-1] == row["rejected_ids"][-1] == template.eot_id
    )
    assert data.report.num_truncated == 1


def test_identical_pairs_and_ties_are_skipped_and_counted(tiny_tokenizer, template, write_rows, options):
    same = {"prompt": "q", "chosen": "same", "rejected": " same "}
    late = {"prompt": "q", "chosen": "x" * 60 + "a", "rejected": "x" * 60 + "b"}
    path = write_rows([*pairs(3), same, late])
    report = build_pairs(options(path, 2, max_seq_len=40), tiny_tokenizer, template).report
    assert (report.num_train, report.num_identical, report.num_identical_truncated) == (3, 1, 1)
    assert any("both answers are the same" in line for line in report.lines())


def test_prompt_rows_keep_their_end(tiny_tokenizer, template, write_rows, options):
    path = write_rows([{"prompt": "abc " * 30}, {"prompt": "hi"}])
    data = build_prompts(options(path, 3, max_prompt_tokens=20), tiny_tokenizer, template)
    whole = tiny_tokenizer("\n\nHuman: " + ("abc " * 30).strip() + "\n\nAssistant:").input_ids
    assert data.train[0]["prompt_ids"] == whole[-20:]
    assert data.train[0]["prompt_text"] == tiny_tokenizer.decode(whole)
    assert data.report.num_truncated == 1


def test_prompt_rows_bring_the_other_columns_of_the_raw_row(tiny_tokenizer, template, write_rows, options):
    rows = [{"prompt": "2 + 2?", "answer": "4", "level": 1}, {"prompt": "no more", "chosen": "x"}]
    path = write_rows([*rows, {"prompt": "q", "pos_answers": ["a", "b"], "neg_answers": ["c"]}])
    data = build_prompts(options(path, 3), tiny_tokenizer, template)
    found = [json.loads(data.train[i]["fields"]) for i in range(len(data.train))]
    assert found == [{"answer": "4", "level": 1}, {}, {"pos_answers": ["a", "b"], "neg_answers": ["c"]}]
    assert "fields" not in build_sft(options(path, 1), tiny_tokenizer, template).train[0]


def test_truncated_sft_row(tiny_tokenizer, template, write_rows, options):
    path = write_rows([{"prompt": "q", "answer": "y" * 100}, {"prompt": "q", "answer": "y"}])
    data = build_sft(options(path, 1, max_seq_len=32), tiny_tokenizer, template)
    row = data.train[0]
    assert len(row["input_ids"]) == 32 and row["input_ids"][-1] != template.eot_id
    assert row["loss_mask"] == [False] + [True] * 31
    assert data.report.num_truncated == 1


def test_answer_lists_give_pairs_up_to_a_limit_and_answers_once(
    tiny_tokenizer, template, write_rows, options
):
    path = write_rows([{"prompt": "q", "pos_answers": ["a", "b", "c"], "neg_answers": ["d", "e"]}])
    data = build_pairs(options(path, 2, max_pairs_per_prompt=4), tiny_tokenizer, template)
    assert (len(data.train), data.report.num_dropped_pairs) == (4, 2)
    assert len({data.train[i]["row_id"] for i in range(4)}) == 4
    assert len(build_sft(options(path, 1), tiny_tokenizer, template).train) == 3
    assert len(build_prompts(options(path, 3), tiny_tokenizer, template).train) == 1


# ---- shares


def test_shares_are_disjoint_complete_and_those_of_every_process():
    shares = [share_indexes(1000, "2,4,4", stage, seed=1234) for stage in (1, 2, 3)]
    assert sorted(index for share in shares for index in share) == list(range(1000))
    assert [len(share) for share in shares] == [200, 400, 400]
    assert shares[0] != share_indexes(1000, "2,4,4", 1, seed=1)
    code = "print(share_indexes(1000, '2,4,4', 1, 1234), is_held_out({'a': 'é'}, 0.5, 7))"
    code = f"from common.data.data_options import is_held_out, share_indexes; {code}"
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == f"{shares[0]} {is_held_out({'a': 'é'}, 0.5, 7)}"
    assert shares[0][:5] == [9, 11, 21, 29, 40]  # frozen: another number means other shares for every user


@pytest.mark.parametrize("text", ["2,4", "a,b,c", "0,0,0", "1,-1,1", "", "1,inf,1", "nan,1,1"])
def test_a_bad_data_split_is_named(text):
    with pytest.raises(ValueError, match="--data_split .* must be three numbers"):
        parse_data_split(text)


def test_the_three_steps_share_no_row(tiny_tokenizer, template, write_rows, options):
    path = write_rows(pairs(100))
    seen = []
    for stage, build in ((1, build_sft), (2, build_pairs), (3, build_prompts)):
        data = build(options(path, stage, data_split="2,4,4", eval_fraction=0.2), tiny_tokenizer, template)
        seen += [table[i]["row_id"] for table in (data.train, data.eval) for i in range(len(table))]
        assert len(data.eval) > 0
    assert len(seen) == len(set(seen)) == 100


def test_the_held_out_part_follows_the_content(tiny_tokenizer, template, write_rows, options):
    assert 350 < sum(is_held_out({"x": i}, 0.4, 1) for i in range(1000)) < 450
    assert is_held_out({"a": 1, "b": 2}, 0.5, 3) == is_held_out({"b": 2, "a": 1}, 0.5, 3)
    path = write_rows(answers(50) * 2)
    data = build_sft(options(path, 1, eval_fraction=0.3), tiny_tokenizer, template)
    train, held_out = ({tuple(t[i]["input_ids"]) for i in range(len(t))} for t in (data.train, data.eval))
    assert train and held_out and not train & held_out


def test_a_sources_own_eval_part_is_used_whole(tmp_path, tiny_tokenizer, template, write_rows, options):
    write_rows(answers(20), "train.jsonl")
    write_rows(answers(5), "eval.jsonl")
    data = build_sft(
        options(str(tmp_path), 1, data_split="5,5,0", eval_fraction=0.5), tiny_tokenizer, template
    )
    assert (len(data.train), len(data.eval)) == (10, 5)


def test_sft_only_data_is_used_whole_by_step_1_alone(tiny_tokenizer, template, write_rows, options):
    first, second = write_rows(pairs(10)), write_rows(answers(7), "more.jsonl")
    given = options(first, 1, data_split="5,5,0", sft_only_data_path=[second])
    assert len(build_sft(given, tiny_tokenizer, template).train) == 12
    given = options(first, 2, data_split="5,5,0", sft_only_data_path=[second])
    assert len(build_pairs(given, tiny_tokenizer, template).train) == 5


# ---- what stops a run


def test_bad_rows_are_counted_and_named(tiny_tokenizer, template, write_rows, options):
    path = write_rows(
        [*answers(3), "{no json", {"question": "x"}, {"prompt": "x", "answer": "\ud83d"}, {"text": " "}]
    )
    report = build_sft(options(path, 1, max_bad_rows=3), tiny_tokenizer, template).report
    assert (report.num_train, report.num_bad, report.num_empty) == (3, 3, 1)
    places = sorted(row.split(": ")[0] for row in report.bad_rows)
    assert places == [f"{path}:{line}" for line in (4, 5, 6)]
    assert any("fit none of" in row for row in report.bad_rows) and any(
        "surrogate" in row for row in report.bad_rows
    )
    # The same rows under a stricter limit stop the run, though their tokens are in the cache.
    with pytest.raises(ValueError, match=r"(?s)--max_bad_rows 2 .*rows.jsonl:4: the line is not JSON"):
        build_sft(options(path, 1, max_bad_rows=2), tiny_tokenizer, template)


def test_more_bad_rows_than_allowed_stop_the_run_and_leave_no_cache(
    tmp_path, tiny_tokenizer, template, write_rows, options
):
    path = write_rows([*answers(3), {"question": "x"}])
    with pytest.raises(
        ValueError, match=r"(?s)more than --max_bad_rows 0 .*rows.jsonl:4: columns 'question' fit none"
    ):
        build_sft(options(path, 1, max_bad_rows=0), tiny_tokenizer, template)
    assert list((tmp_path / "cache").iterdir()) == []


def test_rows_that_cannot_serve_the_step_are_bad(tiny_tokenizer, template, write_rows, options):
    path = write_rows(answers(3))
    with pytest.raises(ValueError, match="no pair of a chosen and a rejected answer.*--sft_only_data_path"):
        build_pairs(options(path, 2, max_bad_rows=0), tiny_tokenizer, template)


def test_no_rows_left_names_source_and_cure(tiny_tokenizer, template, write_rows, options):
    path = write_rows([{"text": " "}, {"text": ""}])
    with pytest.raises(
        ValueError, match=r"rows.jsonl: none of its 2 rows is left.*use more rows.*2 rows skipped: empty"
    ):
        build_sft(options(path, 1), tiny_tokenizer, template)
    path = write_rows(pairs(1))
    with pytest.raises(ValueError, match="--data_split that gives step 1 more than 1,9,9"):
        build_sft(options(path, 1, data_split="1,9,9"), tiny_tokenizer, template)


def test_check_sources_tells_all_problems_at_once(tmp_path, write_rows, options):
    good = write_rows(pairs(10))
    wrong = write_rows([{"question": "x", "answer": "y"}], "wrong.jsonl")
    sft_only = write_rows(answers(2), "answers.jsonl")
    empty = write_rows([], "empty.jsonl")
    missing, unknown = str(tmp_path / "missing.jsonl"), write_rows(["x"], "a.txt")
    assert check_sources([good], 2, options(good, 2)) == []
    given = replace(options(good, 2), data_split="1,2")
    problems = check_sources([good, missing, unknown, empty, wrong, sft_only, "no/such/thing"], 2, given)
    expected = [
        "--data_split '1,2' must be three numbers",
        "missing.jsonl: there is no such file",
        "a.txt: the kind of file is unknown",
        "empty.jsonl: the file is empty",
        "wrong.jsonl:1: columns 'question', 'answer' fit none of",
        "answers.jsonl:1: there is no pair",
        "no/such/thing: there is no such file",
    ]
    assert len(problems) == len(expected)
    for problem, text in zip(problems, expected, strict=True):
        assert text in problem
    assert "step 2 reads prompt/chosen/rejected" in problems[5]
    few = write_rows(pairs(1), "few.jsonl")
    (problem,) = check_sources([few], 1, options(few, 1, data_split="1,9,9"))
    assert "step 1 gets no row" in problem
    (problem,) = check_sources([good], 2, options(good, 2, data_split="1,0,1"))
    assert "--data_split 1,0,1 leaves nothing to step 2" in problem


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.csv", "a.parquet"])
def test_a_large_file_is_never_in_memory_and_its_first_rows_are_enough_at_the_start(tmp_path, name, options):
    frame = pytest.importorskip("pandas").DataFrame(
        [{"prompt": f"question {i}", "answer": random.Random(i).randbytes(1500).hex()} for i in range(3000)]
    )
    path = str(tmp_path / name)
    if ".json" in name:
        frame.to_json(path, orient="records", lines="jsonl" in name)
    else:
        frame.to_csv(path, index=False) if name.endswith("csv") else frame.to_parquet(
            path, row_group_size=100
        )
    whole = load_source(path).train
    tracemalloc.start()
    assert check_sources([path], 1, options(path, 1)) == []
    probed = tracemalloc.get_traced_memory()[1]
    rows = load_source(path).train
    arrow_before = pyarrow.total_allocated_bytes()
    assert sum(len(rows[i]["answer"]) for i in range(0, len(rows), 10)) == 900_000 and len(rows) == len(whole)
    assert rows[150] == whole[150] and rows[2999]["prompt"] == "question 2999"
    assert pyarrow.total_allocated_bytes() - arrow_before < 1e6  # tracemalloc does not see pyarrow's memory
    read = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert probed < 4e6 and read < 5e6  # of 9 MB


def test_a_dry_run_reads_the_first_rows_and_shows_one(tmp_path, template, write_rows, options):
    path = write_rows([*pairs(5), {"question": "x"}, "torn", *pairs(300)])
    lines = preview_rows(options(path, 2), template)
    assert lines[0].startswith(f"{path}: its first 200 rows give 198 of step 2, ")
    assert lines[1] == "pair data: 2 rows skipped: bad form"
    assert lines[2].startswith(f"pair data: bad row {path}:6: columns 'question' fit none of prompt/chosen")
    assert lines[3:] == [
        f"pair data: bad row {path}:7: the line is not JSON (Expecting value: line 1 column 1 (char 0))",
        "rows.jsonl:1, chosen_ids: '\\n\\nHuman: question 0\\n\\nAssistant: good 0<|endoftext|>'",
        "rows.jsonl:1, rejected_ids: '\\n\\nHuman: question 0\\n\\nAssistant: bad 0<|endoftext|>'",
    ]
    with pytest.raises(ValueError, match="more than --max_bad_rows 1 of the rows are bad"):
        preview_rows(options(path, 2, max_bad_rows=1), template)


def test_a_person_sees_what_is_being_done(tiny_tokenizer, template, write_rows, options, monkeypatch, capsys):
    monkeypatch.setattr(watchdog, "_told", None)
    given = options(write_rows(answers(3)), 1)
    with watchdog.phase("the loading of the model"):
        assert capsys.readouterr().err == "", "a program asks for it"
    watchdog.tell_phases()
    monkeypatch.setattr(stage_datasets, "TELL_SECONDS", 0.0)
    for step in (1, 2):
        with watchdog.phase("the preparation of the data", step), watchdog.phase("something inside"):
            build_sft(given, tiny_tokenizer, template)
    lines = [line.split("] ")[1] for line in capsys.readouterr().err.splitlines()]
    counts = [f"tokenised {n} of at most 3 rows" for n in (1, 2, 3)]
    assert lines == ["the preparation of the data", *counts], "once, and the second time it is in the cache"
    monkeypatch.setenv("RANK", "1")
    with watchdog.phase("the export"):
        assert capsys.readouterr().err == ""


# ---- the token cache


def test_the_cache_is_reused_and_its_key_follows_what_decides_the_tokens(
    tiny_tokenizer, make_tokenizer, template, write_rows, options
):
    path = write_rows(answers(20))
    given = options(path, 1)
    first = build_sft(given, tiny_tokenizer, template)
    folder = Path(first.report.cache_folder)
    marker = (folder / "train.arrow").stat().st_mtime_ns
    again = build_sft(given, tiny_tokenizer, template)
    assert again.report.cache_folder == str(folder) and (folder / "train.arrow").stat().st_mtime_ns == marker
    assert (first.report.from_cache, again.report.from_cache) == (False, True)
    assert "new" in first.report.lines()[0] and "reused" in again.report.lines()[0]
    assert [first.train[i] for i in range(20)] == [again.train[i] for i in range(20)]

    folders = {str(folder)}
    for change in (
        {"max_seq_len": 64},
        {"seed": 1},
        {"eval_fraction": 0.2},
        {"loss_on": "all"},
        {"data_split": "9,1,0"},
    ):
        folders.add(build_sft(replace(given, **change), tiny_tokenizer, template).report.cache_folder)
    other = make_tokenizer(300)
    folders.add(build_sft(given, other, build_template("human_assistant", other)).report.cache_folder)
    folders.add(build_sft(given, tiny_tokenizer, build_template("plain", tiny_tokenizer)).report.cache_folder)
    write_rows(answers(21))
    folders.add(build_sft(given, tiny_tokenizer, template).report.cache_folder)
    assert len(folders) == 9


def test_pretraining_blocks(tmp_path, tiny_tokenizer, write_rows):
    path = write_rows([{"text": "abc def"}, {"text": ""}, {"text": "ghi"}, {"text": "j" * 40}])
    blocks = build_pretraining(path, None, 8, tiny_tokenizer, cache_dir=str(tmp_path / "cache"))
    end = "<|endoftext|>"
    whole = tiny_tokenizer(f"abc def{end}ghi{end}{'j' * 40}{end}").input_ids
    assert sum((blocks[i]["input_ids"] for i in range(len(blocks))), []) == whole[: len(whole) // 8 * 8]
    assert {len(blocks[i]["input_ids"]) for i in range(len(blocks))} == {8}
    with pytest.raises(ValueError, match="--unsupervised_dataset_name .*less than one block of 4096"):
        build_pretraining(path, None, 4096, tiny_tokenizer, cache_dir=str(tmp_path / "cache"))
