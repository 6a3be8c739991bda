"""Two models asked the same, side by side."""

import json

import pytest

from common.data.example import Message
from common.flags.args import Problems
from serving import prompt_eval
from serving.answering import Sampling, load_answerer, load_template
from serving.prompt_eval import PromptEvalArguments

QUESTIONS = ("How are you today?", "What is the weather like?", "Who are you?")


def ask(monkeypatch, before: str, after: str, *flags: str) -> None:
    models = ["--model_name_or_path_baseline", before, "--model_name_or_path_finetune", after]
    monkeypatch.setattr("sys.argv", ["prompt_eval.py", *models, *flags])
    prompt_eval.main()


@pytest.fixture
def folders(tiny_model_folder) -> dict[str, str]:
    return {"baseline": tiny_model_folder("gpt2"), "finetune": tiny_model_folder("llama")}


@pytest.fixture
def rows_path(tmp_path) -> str:
    rows = [
        {"prompt": f"\n\nHuman: {q}\n\nAssistant:", "chosen": " Fine.", "rejected": " No."} for q in QUESTIONS
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_all_models_answers_stand_below_each_prompt(folders, rows_path, monkeypatch, capsys):
    flags = ["--data_path", rows_path, "--num_prompts", "2", "--max_new_tokens", "8"]
    ask(monkeypatch, *folders.values(), *flags, "--num_return_sequences", "2")
    args, expected = PromptEvalArguments(), ""
    sampling = Sampling(8, top_k=4, num_answers=2)
    answers = {}
    for kind, folder in folders.items():
        template = load_template("--path", folder, args, Problems())
        answerer = load_answerer(folder, template, args, sampling, seed=args.seed)
        answers[kind] = [answerer.answer((Message("user", q),)) for q in QUESTIONS[:2]]
    for index, question in enumerate(QUESTIONS[:2]):
        expected += f"\n{question}\n"
        for kind in folders:
            assert len(set(answers[kind][index])) == 2
            expected += "".join(f"  {kind}: {text}\n" for text in answers[kind][index])
    assert capsys.readouterr().out == expected


def test_built_in_questions_and_flags_that_do_nothing(folders, monkeypatch, capsys):
    flags = ["--language", "Japanese", "--max_new_tokens", "4", "--num_beams", "4"]
    ask(monkeypatch, *folders.values(), *flags)
    out, err = capsys.readouterr()
    assert all(question in out for question in prompt_eval.QUESTIONS["Japanese"])
    assert out.count("  baseline: ") == out.count("  finetune: ") == 2
    assert err.startswith("note: --num_beams has no effect: ")
