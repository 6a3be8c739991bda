"""python -m tools.check_data: the rows of the step, as a person sees them, and a verdict."""

import pytest
import stage_texts
from rich.console import Console
from stage_texts import SHARES, make_options
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from common.data.chat_template import build_template
from common.data.stage_datasets import build_data
from tools.check_data import (
    CONTEXT,
    LEARNED,
    MAX_SHOWN,
    SPECIAL,
    length_lines,
    main,
    part_lengths,
    sample_lines,
    shorten,
    show,
    spans_of,
)
from tools.terminal import visible


@pytest.fixture
def write_rows(tmp_path):
    return lambda rows, name="rows.jsonl": stage_texts.write_rows(tmp_path / name, rows)


@pytest.fixture(scope="module")
def model(tmp_path_factory, tiny_tokenizer):
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def check(model, tmp_path, capsys):
    """Runs the check in this process: its exit code and its lines."""

    def run(stage, *words):
        name = "--actor_model_name_or_path" if stage == 3 else "--model_name_or_path"
        flags = ["--stage", str(stage), name, model, "--data_split", SHARES[stage]]
        code = 0
        try:
            main([*flags, "--data_output_path", str(tmp_path / "cache"), *map(str, words)])
        except SystemExit as leaving:
            code = leaving.code
        shown = capsys.readouterr()
        return code, shown.out.splitlines(), shown.err

    return run


@pytest.fixture
def first_row(tmp_path):
    """The first row of a file as lines, under a tokenizer."""

    def read(path, tokenizer, **changes):
        options = make_options(path, 1, tmp_path / "cache", **{"max_tokens": 512} | changes)
        template = build_template("human_assistant", tokenizer)
        return sample_lines(build_data(options, template).train[0], options, template)

    return read


# ---- the three steps


def test_step_1_shows_what_is_learned(check, write_rows):
    rows = [{"prompt": f"question {i}", "answer": f"answer {i}"} for i in range(40)] + ["{no json"]
    # A flag of the step that nothing here reads is taken: the step's own command line will do.
    code, lines, _ = check(1, "--data_path", write_rows(rows), "--eval_fraction", "0.2", "--zero_stage", "3")
    held_out = int(lines[-1].split()[-3])
    assert code == 0 and lines[-1] == f"ok: {40 - held_out} rows to train, {held_out} held out"
    assert 0 < held_out < 40
    assert lines[0] == "context [[learned end of turn]]"
    assert "1 rows skipped: bad form" in lines
    assert any(
        line.startswith("bad row ") and "rows.jsonl:41: the line is not JSON" in line for line in lines
    )
    starts = [i for i, line in enumerate(lines) if line.startswith("rows.jsonl:")]
    assert len(starts) == 3
    number = int(lines[starts[0]].split(":")[1].split()[0]) - 1
    shown = ["  | ", "  | ", f"  | Human: question {number}", "  | "]
    assert lines[starts[0] + 1 :][:5] == [*shown, f"  | Assistant:[[ answer {number}<|endoftext|>]]"]
    assert not any("\x1b" in line for line in lines)


def test_step_2_shows_both_answers_behind_one_prompt(check, write_rows):
    rows = [{"prompt": f"q{i}", "chosen": "good", "rejected": f"bad {i}", "margin": 0.5} for i in range(5)]
    same = {"prompt": "q", "chosen": "same", "rejected": "same"}
    code, lines, _ = check(2, "--data_path", write_rows([*rows, same]), "--eval_fraction", "0")
    assert (code, lines[-1]) == (0, "ok: 5 rows to train, 0 held out")
    assert "1 pairs skipped: both answers are the same" in lines
    assert sum(line == "  c [[ good<|endoftext|>]]" for line in lines) == 3
    assert any(line.startswith("  r [[ bad ") for line in lines)
    assert any(line.endswith("tokens, margin 0.5") for line in lines)


def test_step_2_shows_rated_answers(check, write_rows):
    rows = [{"prompt": f"q{i}", "completion": f"answer {i}", "label": i % 2} for i in range(4)]
    code, lines, _ = check(
        2, "--loss", "kto", "--data_path", write_rows(rows), "--eval_fraction", "0", "--num_samples", "4"
    )
    assert (code, lines[-1]) == (0, "ok: 4 rows to train, 0 held out")
    assert "2 answers are good, by their label or their pairs" in lines
    assert "  + [[ answer 1<|endoftext|>]]" in lines and "  - [[ answer 2<|endoftext|>]]" in lines
    assert sum("prompt " in line and "answer " in line and "whole row" in line for line in lines) == 4


def test_step_3_shows_prompts_and_the_fields_of_a_reward(check, write_rows):
    rows = [{"prompt": f"{i} + {i}?", "answer": str(2 * i)} for i in range(4)]
    flags = ("--num_samples", "1", "--max_prompt_seq_len", "12")
    code, lines, _ = check(3, "--data_path", write_rows(rows), *flags)
    assert (code, lines[-1]) == (0, "ok: 4 rows to train, 0 held out")  # step 3 holds nothing out by default
    (fields,) = [line for line in lines if line.startswith("  fields ")]
    assert fields == '  fields {"answer":"4"}'
    assert not any("[[" in line for line in lines)


# ---- what is wrong


def test_each_source_is_judged_and_the_bad_ones_are_the_verdict(check, write_rows, tmp_path):
    good = write_rows([{"prompt": f"q{i}", "chosen": "a", "rejected": f"b{i}"} for i in range(6)])
    answers = write_rows([{"prompt": "q", "answer": "a"}], "answers.jsonl")
    missing = str(tmp_path / "missing.jsonl")
    code, lines, _ = check(2, "--data_path", good, answers, missing, "--eval_fraction", "0")
    assert code == 1 and lines[-1].startswith(f"not ok: --data_path {answers}: the first rows cannot be used")
    assert f"; --data_path {missing}: there is no such file or folder" in lines[-1]
    assert any(line.startswith("6 train and 0 eval rows") for line in lines)


def test_bad_rows_count_over_all_sources(check, write_rows):
    rows = [{"prompt": "q", "answer": "a"}, {"prompt": "r", "answer": "b"}, {"question": "x"}]
    paths = write_rows(rows), write_rows(rows, "more.jsonl")
    options = ("--eval_fraction", "0", "--max_bad_rows", "1")
    code, lines, _ = check(1, "--data_path", paths[0], "--sft_only_data_path", paths[1], *options)
    assert (code, lines[-1]) == (1, "not ok: 2 rows are bad, more than --max_bad_rows 1; fix them")
    assert any("rows.jsonl:3: there is no answer to learn (the row has `question`" in line for line in lines)


def test_wrong_flags_come_all_at_once(check, write_rows):
    flags = ("--num_samples", "-1", "--max_seq_len", "2", "--template", "chat", "--critic_zero_stage", "3")
    code, lines, errors = check(1, "--data_path", write_rows([]), *flags)
    assert code == 2 and lines == []
    for text in (
        "error: 4 problems, nothing was started",
        "unknown flag --critic_zero_stage",  # one of step 3
        "--max_seq_len 2 must be at least 4",
        "--template chat: the tokenizer has no chat template",
    ):
        assert text in errors


def test_the_step_must_be_named(capsys):
    with pytest.raises(SystemExit):
        main(["--data_path", "x"])
    assert "--stage is required" in capsys.readouterr().err


# ---- samples


def test_a_row_that_fills_its_limit_says_so(first_row, write_rows, tiny_tokenizer):
    path = write_rows([{"prompt": "q", "answer": "y" * 40}])
    head, line = (line.plain for line in first_row(path, tiny_tokenizer, max_tokens=20))
    assert head == "rows.jsonl:1  context 1, learned 19, whole row 20 tokens, which fill the 20 allowed"
    assert line == "  | :[[ " + "y" * 18 + "]]"
    assert "allowed" not in first_row(path, tiny_tokenizer)[0].plain


def test_a_row_cannot_steer_the_terminal_and_colours_end_with_the_line(
    first_row, write_rows, tiny_tokenizer, monkeypatch, capsys
):
    path = write_rows([{"prompt": "red [bold] \x1b[31m\r\u202e", "answer": "a\tb\nline two"}])
    text = "\n".join(line.plain for line in first_row(path, tiny_tokenizer))
    assert r"red [bold] \x1b[31m\r\u202e" in text and r"a\tb" in text and "\x1b" not in text
    colored = Console(force_terminal=True, color_system="standard", markup=False, soft_wrap=True)
    monkeypatch.setattr("tools.check_data.CONSOLE", colored)
    for line in first_row(path, tiny_tokenizer)[-2:]:
        colored.print(line)
    assert capsys.readouterr().out.splitlines() == [
        "  | \x1b[90mAssistant:\x1b[0m\x1b[32m a\\tb\x1b[0m",
        "  | \x1b[32mline two\x1b[0m\x1b[7;32m<|endoftext|>\x1b[0m",
    ]


def test_a_span_keeps_the_space_that_its_tokens_alone_would_lose():
    core = Tokenizer(models.WordLevel({"\u2581a": 0, "\u2581b": 1, "</s>": 2}, "</s>"))
    core.decoder = decoders.Metaspace()
    template = build_template("plain", PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>"))
    assert spans_of([0, 1], [False, True], template) == [("a", CONTEXT), (" b", LEARNED)]


def test_text_is_kept_readable():
    assert visible("a\tb\x07\u200b e\u0301\U0001f469\u200d\U0001f680\n") == (
        "a\\tb\\x07\\u200b e\u0301\U0001f469\u200d\U0001f680\n"
    )
    assert shorten("x" * MAX_SHOWN) == "x" * MAX_SHOWN
    assert f"a [... {MAX_SHOWN:,} characters ...] b" in shorten("a" * MAX_SHOWN + "b" * MAX_SHOWN)
    spans = [("Human:", CONTEXT), ("a", LEARNED), ("<e>", LEARNED + SPECIAL), ("c", CONTEXT)]
    assert show(spans).plain == "Human:[[a<e>]]c"


# ---- lengths


def test_lengths_of_the_parts(write_rows, tmp_path, tiny_tokenizer):
    rows = [{"prompt": "q", "chosen": "a" * n, "rejected": "b"} for n in range(1, 21)]
    data = stage_texts.build(write_rows(rows), 2, tiny_tokenizer, tmp_path)
    row = data.train[9]
    parts = part_lengths(row)
    assert list(parts) == ["prompt", "chosen", "rejected", "longer row"]
    assert parts["chosen"] == len(row["chosen_ids"]) - row["chosen_response_start"]
    assert parts["rejected"] == len(row["rejected_ids"]) - row["rejected_response_start"]
    assert parts["longer row"] == max(len(row["chosen_ids"]), len(row["rejected_ids"]))
    lines = length_lines(data.train)
    assert lines[0].split() == ["tokens", "min", "median", "p95", "max"]
    assert lines[3].split()[0] == "rejected" and len(set(lines[3].split()[1:])) == 1
    assert sum(int(line.split()[1]) for line in lines[7:]) == 20 and all("#" in line for line in lines[7:])
