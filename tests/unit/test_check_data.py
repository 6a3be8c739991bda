"""python -m tools.check_data: the rows of the step, as a person sees them, and a verdict."""

import importlib
import io
import json
from pathlib import Path

import pytest
from tokenizers import processors

from common.data.data_options import DataOptions
from common.data.dialogue import build_template
from common.data.registry import load_source
from common.data.stage_datasets import build_pairs, build_prompts, build_sft
from tools.check_data import CheckDataArguments, build_options, main
from tools.painter import MAX_SHOWN, Painter, Span, indent, shorten, visible
from tools.row_lengths import build_length_columns, length_lines, padding_lines
from tools.row_samples import SampleReader

ROOT = Path(__file__).parents[2]
PLAIN = Painter(has_color=False)
COLOUR = Painter(has_color=True)
BUILDERS = {1: build_sft, 2: build_pairs, 3: build_prompts}


@pytest.fixture
def write_rows(tmp_path):
    def write(rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(path)

    return write


@pytest.fixture(scope="module")
def model(tmp_path_factory, tiny_tokenizer):
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def check(model, tmp_path, capsys):
    """Runs the check in this process: its exit code and its lines."""

    def run(stage, *words):
        share = {1: "1,0,0", 2: "0,1,0", 3: "0,0,1"}[stage]
        flags = ["--stage", str(stage), "--model_name_or_path", model, "--data_split", share]
        code = 0
        try:
            main([*flags, "--data_output_path", str(tmp_path / "cache"), *map(str, words)])
        except SystemExit as leaving:
            code = leaving.code
        shown = capsys.readouterr()
        return code, shown.out.splitlines(), shown.err

    return run


@pytest.fixture
def reader(tmp_path):
    """Shows the first row of a file under a tokenizer."""

    def make(path, stage, tokenizer, painter=PLAIN, template="human_assistant", **changes):
        share = {1: "1,0,0", 2: "0,1,0", 3: "0,0,1"}[stage]
        given = {"data_split": share, "eval_fraction": 0.0, "cache_dir": str(tmp_path / "cache")} | changes
        options, template = DataOptions([path], stage, **given), build_template(template, tokenizer)
        data = BUILDERS[stage](options, tokenizer, template)
        shown = SampleReader(load_source(path), options, template, painter).lines(data.train, 1)
        return "\n".join(shown).split("\n")

    return make


# ---- the three steps


def test_step_1_shows_what_is_learned(check, write_rows):
    rows = [{"prompt": f"question {i}", "answer": f"answer {i}"} for i in range(40)] + ["{no json"]
    code, lines, _ = check(1, "--data_path", write_rows(rows), "--eval_fraction", "0.2")
    held_out = int(lines[-1].split()[-3])
    assert code == 0 and lines[-1] == f"ok: {40 - held_out} rows to train, {held_out} held out"
    assert 0 < held_out < 40
    assert lines[0] == "context [[learned]]"
    assert any("1 rows skipped: bad form" in line for line in lines)
    assert any(
        line.startswith("bad row ") and "rows.jsonl:41: the line is not JSON" in line for line in lines
    )
    starts = [i for i, line in enumerate(lines) if line.startswith("rows.jsonl:")]
    assert len(starts) == 3
    number = int(lines[starts[0]].split(":")[1].split()[0]) - 1
    assert lines[starts[0] + 1] == rf"  | \n\nHuman: question {number}"
    assert lines[starts[0] + 3] == f"  | Assistant:[[ answer {number}<|endoftext|>]]"
    assert not any("\x1b" in line for line in lines)


def test_step_2_shows_both_answers_behind_one_prompt(check, write_rows):
    rows = [{"prompt": f"q{i}", "chosen": "good", "rejected": f"bad {i}", "margin": 0.5} for i in range(5)]
    same = {"prompt": "q", "chosen": "same", "rejected": "same"}
    code, lines, _ = check(2, "--data_path", write_rows([*rows, same]), "--eval_fraction", "0")
    assert (code, lines[-1]) == (0, "ok: 5 rows to train, 0 held out")
    assert any("1 pairs skipped: both answers are the same" in line for line in lines)
    assert sum(line == "  c [[ good<|endoftext|>]]" for line in lines) == 3
    assert any(line.startswith("  r [[ bad ") for line in lines)
    assert any(line.endswith("tokens, margin 0.5") for line in lines)
    assert "5 rows do not fill one" in lines


def test_step_3_shows_prompts_and_the_fields_of_a_reward(check, write_rows):
    rows = [{"prompt": f"{i} + {i}?", "answer": str(2 * i)} for i in range(4)]
    code, lines, _ = check(
        3, "--data_path", write_rows(rows), "--num_samples", "1", "--max_prompt_seq_len", "12"
    )
    assert (code, lines[-1]) == (0, "ok: 4 rows to train, 0 held out")
    (fields,) = [line for line in lines if line.startswith("  fields ")]
    assert fields == '  fields {"answer": "4"}'
    assert not any("padding" in line or "[[" in line for line in lines)


def test_several_sources_are_told_apart_and_added_up(check, write_rows):
    first = write_rows([{"prompt": f"q{i}", "answer": "a"} for i in range(6)])
    second = write_rows([{"text": f"text {i}"} for i in range(3)], "more.jsonl")
    code, lines, _ = check(
        1, "--data_path", first, "--sft_only_data_path", second, "--eval_fraction", "0", "--num_samples", "0"
    )
    assert (code, lines[-1]) == (0, "ok: 9 rows to train, 0 held out")
    assert [line.split("  ")[0] for line in lines if "step 1, SFT" in line] == [first, second]


# ---- what is wrong


def test_a_source_that_cannot_serve_is_the_verdict_and_exit_code_1(check, write_rows, tmp_path):
    good = write_rows([{"prompt": f"q{i}", "chosen": "a", "rejected": f"b{i}"} for i in range(6)])
    answers = write_rows([{"prompt": "q", "answer": "a"}], "answers.jsonl")
    missing = str(tmp_path / "missing.jsonl")
    code, lines, _ = check(2, "--data_path", good, answers, missing, "--eval_fraction", "0")
    assert code == 1 and lines[-1].startswith(f"not ok: --data_path {answers}: the first rows cannot be used")
    assert lines[-1].endswith(f"; --data_path {missing}: there is no such file or folder")
    assert any(line.startswith("6 train and 0 eval rows") for line in lines)


def test_bad_rows_count_over_all_sources(check, write_rows):
    rows = [{"prompt": "q", "answer": "a"}, {"prompt": "r", "answer": "b"}, {"question": "x"}]
    paths = write_rows(rows), write_rows(rows, "more.jsonl")
    options = ("--eval_fraction", "0", "--max_bad_rows", "1")
    assert check(1, "--data_path", paths[0], *options)[0] == 0
    code, lines, _ = check(1, "--data_path", *paths, *options)
    assert (code, lines[-1]) == (1, "not ok: 2 rows are bad, more than --max_bad_rows 1; mend them")
    code, lines, _ = check(1, "--data_path", paths[0], "--eval_fraction", "0", "--max_bad_rows", "0")
    assert code == 1 and "mend them or raise the limit." in lines[-1]
    assert any("rows.jsonl:3: columns 'question'" in line for line in lines)


def test_wrong_flags_come_all_at_once(check, write_rows):
    code, lines, errors = check(
        1, "--data_path", write_rows([]), "--max_seq_len", "2", "--num_samples", "-1", "--plugins", "absent",
        "--per_device_train_batch_size", "0", "--template", "chat", "--los_on", "all",
    )  # fmt: skip
    assert code == 2 and lines == []
    for text in (
        "error: 6 problems, nothing was started",
        "unknown flag --los_on; did you mean --loss_on?",
        "--plugins absent: there is no module absent",
        "--per_device_train_batch_size 0 must be at least 1",
        "--num_samples -1 must be at least 0",
        "--max_seq_len 2 must be at least 4",
        "--template chat: the tokenizer has no chat template",
    ):
        assert text in errors


@pytest.mark.parametrize(
    ("stage", "step", "cls"),
    [
        (1, "step1_sft", "SFTArguments"),
        (2, "step2_reward", "RewardArguments"),
        (3, "step3_ppo", "PPOArguments"),
    ],
)
def test_the_rows_are_those_of_the_steps_own_program(stage, step, cls):
    given = {
        "data_path": ["a", "b"],
        "data_split": "1,2,3",
        "data_output_path": "cache",
        "eval_fraction": 0.1,
        "max_bad_rows": 7,
        "score_column": "quality",
        "seed": 5,
    }
    own = {1: {"sft_only_data_path": ["c"], "loss_on": "all"}, 2: {"max_pairs_per_prompt": 3}, 3: {}}[stage]
    own |= {"max_prompt_seq_len": 77} if stage == 3 else {"max_seq_len": 99}
    step_args = getattr(importlib.import_module(f"{step}.arguments"), cls)(**given, **own)
    expected = importlib.import_module(f"{step}.main").build_data_options(step_args)
    assert build_options(CheckDataArguments(stage=stage, **given, **own)) == expected


# ---- samples


def test_what_was_cut_off_stands_where_it_was(reader, write_rows, tiny_tokenizer):
    path = write_rows([{"prompt": "x" * 50, "answer": "y"}])
    _, head, *lines = reader(path, 1, tiny_tokenizer, max_seq_len=30)
    whole = tiny_tokenizer("\n\nHuman: " + "x" * 50 + "\n\nAssistant: y<|endoftext|>").input_ids
    assert head.endswith(", truncated") and lines[0].startswith(
        f"  | [... {len(whole) - 30} tokens cut ...]xx"
    )
    assert lines[-1] == "  | Assistant:[[ y<|endoftext|>]]"
    path = write_rows([{"prompt": "q", "answer": "y" * 40}], "long.jsonl")
    _, head, line = reader(path, 1, tiny_tokenizer, max_seq_len=20)
    assert head.startswith("long.jsonl:1  context 1, learned 19 tokens, truncated")
    assert line.endswith("[... 23 tokens cut ...]") and "]][..." in line
    path = write_rows([{"prompt": "q", "chosen": "good", "rejected": "r" * 60}], "pair.jsonl")
    _, head, *lines = reader(path, 2, tiny_tokenizer, max_seq_len=40)
    assert lines[-2] == "  c [[ good<|endoftext|>]]" and lines[0].startswith("  | [... ")
    assert lines[-1].startswith("  r [[ rr") and lines[-1].endswith("tokens cut ...]")


def test_the_cut_stands_behind_bos_and_all_tokens_are_shown(reader, write_rows, make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    path = write_rows([{"prompt": "z" * 30 + " é?", "answer": "naïve"}])
    _, _, *lines = reader(path, 1, tokenizer, max_seq_len=40)
    assert lines[0].startswith("  | <s>[... ") and "tokens cut ...]z" in lines[0]
    assert lines[-1] == "  | Assistant:[[ naïve<|endoftext|>]]"
    _, _, *lines = reader(path, 1, tokenizer)
    assert lines[0] == "  | <s>"  # the template's own line breaks follow
    assert lines[2] == "  | Human: " + "z" * 30 + " é?"


def test_every_learned_turn_is_marked_and_a_row_of_several_is_found(reader, write_rows, tiny_tokenizer):
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    path = write_rows([{"messages": [{"role": role, "content": text} for role, text in turns]}])
    lines = reader(path, 1, tiny_tokenizer)
    assert lines[4:] == ["  | Assistant:[[ b<|endoftext|>]]", "  |", "  | Human: c", "  |"] + [
        "  | Assistant:[[ d<|endoftext|>]]"
    ]
    path = write_rows([{"prompt": "q" * 60, "pos_answers": ["a"], "neg_answers": ["b", "c"]}], "lists.jsonl")
    lines = reader(path, 2, tiny_tokenizer, max_seq_len=30)
    assert lines[1].startswith("lists.jsonl:1#1") and lines[1].endswith("truncated")


def test_a_row_cannot_steer_the_terminal(reader, write_rows, tiny_tokenizer):
    path = write_rows([{"prompt": "red \x1b[31m\r\u202e", "answer": "a\tb"}])
    text = "\n".join(reader(path, 1, tiny_tokenizer))
    assert r"red \x1b[31m\r\u202e" in text and r"a\tb" in text and "\x1b" not in text


def test_colours(reader, write_rows, tiny_tokenizer):
    path = write_rows([{"prompt": "q", "answer": "line one\nline two"}])
    lines = reader(path, 1, tiny_tokenizer, painter=COLOUR)
    assert lines[-2] == "  | \x1b[90mAssistant:\x1b[0m\x1b[32m line one\x1b[0m"
    assert lines[-1] == "  | \x1b[32mline two\x1b[0m\x1b[30;42m<|endoftext|>\x1b[0m"


@pytest.mark.parametrize(
    ("is_terminal", "environment", "no_color", "expected"),
    [
        (True, {}, False, True),
        (True, {"NO_COLOR": ""}, False, True),
        (True, {"NO_COLOR": "1"}, False, False),
        (True, {"TERM": "dumb"}, False, False),
        (True, {}, True, False),
        (False, {}, False, False),
    ],
)
def test_when_there_are_colours(monkeypatch, is_terminal, environment, no_color, expected):
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal, raising=False)
    assert Painter.for_stream(stream, no_color=no_color).has_color is expected
    assert Painter.for_stream(stream, no_color=no_color).bar == "█"
    assert Painter.for_stream(io.TextIOWrapper(io.BytesIO(), encoding="ascii"), no_color=True).bar == "#"


def test_text_is_kept_readable():
    assert visible("a\tb\x07\u200b e\u0301\U0001f469\u200d\U0001f680\n") == (
        "a\\tb\\x07\\u200b e\u0301\U0001f469\u200d\U0001f680\n"
    )
    assert shorten("x" * MAX_SHOWN) == "x" * MAX_SHOWN
    long = shorten("a" * MAX_SHOWN + "b" * MAX_SHOWN)
    assert f"a [... {MAX_SHOWN:,} characters ...] b" in long
    spans = [Span("\n\nHuman:", "context"), Span("a", "learned"), Span("<e>", "learned special")]
    assert PLAIN.show([*spans, Span("c", "context")]) == r"\n\nHuman:[[a<e>]]c"
    assert indent("a\n\nb", "| ") == "| a\n|\n| b"


# ---- lengths and padding


def test_lengths_of_the_parts(write_rows, tmp_path, tiny_tokenizer):
    rows = [{"prompt": "q", "chosen": "a" * n, "rejected": "b"} for n in range(1, 21)]
    options = DataOptions(
        [write_rows(rows)], 2, data_split="0,1,0", eval_fraction=0.0, cache_dir=str(tmp_path / "cache")
    )
    data = build_pairs(options, tiny_tokenizer, build_template("human_assistant", tiny_tokenizer))
    columns = build_length_columns("pair", data.train)
    assert list(columns) == ["prompt", "chosen", "rejected", "longer row"]
    row = data.train[9]
    assert columns["chosen"][9] == len(row["chosen_ids"]) - row["chosen_response_start"]
    assert columns["longer row"][9] == max(len(row["chosen_ids"]), len(row["rejected_ids"]))
    lines = length_lines(columns, PLAIN)
    assert lines[0].split() == ["tokens", "min", "median", "p95", "max"]
    assert lines[3].split()[0] == "rejected" and len(set(lines[3].split()[1:])) == 1
    bars = lines[7:]
    assert sum(int(line.split()[1]) for line in bars) == 20 and all("#" in line for line in bars)


def test_padding_is_that_of_the_batches_that_would_be_made():
    lengths = [(10,), (2,)] * 32  # by twos: 20 positions or 4 where alike, 20 where mixed
    title, plain, grouped, packed = padding_lines(lengths, 2, 512, 0, PLAIN)
    assert title == "padding in batches of 2 rows"
    share = float(plain.split()[-1].rstrip("%"))
    assert 10 < share < 40
    assert grouped.split() == ["--group_by_length", "0.0%"]
    assert packed.split()[:2] == [
        "--packed",
        f"{share}%",
    ]  # a cut would cost more than 8 positions of padding
    lengths = [(500,), (2,)] * 32
    assert padding_lines(lengths, 2, 512, 0, PLAIN)[3].split()[:2] == ["--packed", "0.0%"]
    assert padding_lines(lengths, 65, 512, 0, PLAIN)[1] == "64 rows do not fill one"
