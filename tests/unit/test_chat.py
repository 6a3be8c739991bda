"""chat.py: commands, two models, scores, Ctrl-C, adapters; what a terminal is given to show."""

import io
import json
import os
import shutil
import signal

import pytest
from rich.console import Console

import chat
from chat import SideBySide, printable
from common.data.tokenizer import load_tokenizer
from serving.answering import Answerer


@pytest.fixture
def talk(monkeypatch, capsys):
    """Run chat.py on lines of input; return what it printed and what it said beside."""

    def run(lines: str, *words: str) -> tuple[str, str]:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines.encode("latin-1"))))
        monkeypatch.setattr("sys.argv", ["chat.py", *words, "--max_new_tokens", "8"])
        chat.main()
        return tuple(capsys.readouterr())

    return run


@pytest.fixture
def folder(tiny_model_folder) -> str:
    return tiny_model_folder("llama")


@pytest.fixture
def asked(monkeypatch) -> list[list[tuple[str, str]]]:
    """The conversations that models were asked to answer."""
    found, answer = [], Answerer.answer

    def spy(self, messages, **more):
        found.append([message[:2] for message in messages])
        return answer(self, messages, **more)

    monkeypatch.setattr(Answerer, "answer", spy)
    return found


def test_commands_change_what_is_asked(talk, folder, asked):
    lines = "/system Be kind.\nHi\n/reset\nHo\n/system\n//x\xff\n/nope\n/temperature -1\n/quit\nunasked\n"
    out, said = talk(lines, folder)
    first, second, third = asked
    assert first == [("system", "Be kind."), ("user", "Hi")] and second == [first[0], ("user", "Ho")]
    assert third[0] == ("user", "Ho") and third[-1] == ("user", "/x\ufffd")
    assert out.count("bot> ") == 3
    assert "/nope is not a command; /help" in said and "/temperature -1: expected a number from 0" in said


def test_temperature_0_gives_one_answer_each_time(talk, folder):
    out, _ = talk("/temperature 0\nHi\n/reset\nHi\n/temperature 5\n/reset\nHi\n", folder)
    first, second, third = out.split("bot> ")[1:]
    assert first == second != third


def test_a_saved_conversation_is_a_row_of_messages_and_no_file_is_written_over(talk, folder, tmp_path):
    name = tmp_path / "said.jsonl"
    lines = f"/save {name}\n/system Be kind.\nHi\n/save {name}\n/save {name}\n/save {tmp_path}/no/x\n/save\n"
    lines += f"/save {'x' * 300}\n/save ~nobody-of-that-name/x\n"
    out, said = talk(lines, folder)
    row = json.loads(name.read_text())
    assert [m["role"] for m in row["messages"]] == ["system", "user", "assistant"]
    assert row["messages"][2]["content"] == out.removeprefix("bot> ").strip() and row["model"] == folder
    for words in (
        "the conversation is empty", "saved to", "(File exists); give the name of a new file", "No such file",
        "/save : cannot", "File name too long", "not determine home directory",
    ):  # fmt: skip
        assert words in said, words
    assert set(tmp_path.iterdir()) == {name}


def test_two_models_answer_the_same_and_keep_their_own_thread(talk, folder, tiny_model_folder, asked):
    other = tiny_model_folder("gpt2")
    out, _ = talk("Hi\nWho?\n", folder, "--compare", other, "--temperature", "0")
    labels = [name for line in out.splitlines() for name in (folder, other) if line.startswith(f"{name}> ")]
    assert labels == [folder, other] * 2
    assert asked[0] == asked[1] == [("user", "Hi")]
    assert asked[2][1] != asked[3][1], "each goes on from its own answer"
    alone, _ = talk("Hi\nWho?\n", other, "--temperature", "0")
    assert out.split(f"{other}> ")[1].split(f"\n{folder}> ")[0].strip() == alone.split("bot> ")[1].strip()


def test_scores_are_those_of_the_reward_server(talk, folder, reward_export):
    out, _ = talk("Hi\n", folder, "--reward", reward_export, "--temperature", "0")
    answer, score = out.removeprefix("bot> ").rsplit("score ", 1)
    tokenizer = load_tokenizer(reward_export)
    model = chat.load_frozen_value_model(reward_export, tokenizer, chat.ChatArguments())
    scorer = chat.RewardScorer(model, tokenizer, batch_size=1)
    [expected] = scorer.score(["\n\nHuman: Hi\n\nAssistant:"], [f" {answer.strip()}"])
    assert float(score) == pytest.approx(expected, abs=1e-3) and abs(expected) > 1e-2


def test_a_dialogue_that_the_rewards_form_refuses_has_no_score(talk, folder, reward_export, tmp_path):
    shutil.copytree(reward_export, tmp_path / "reward")
    (tmp_path / "reward/triptych.json").write_text('{"template": "chat"}')
    tokenizer = load_tokenizer(reward_export)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    tokenizer.save_pretrained(tmp_path / "reward")
    out, _ = talk("/system Be kind.\nHi\n", folder, "--reward", str(tmp_path / "reward"))
    assert "no score: the chat template rejects this dialogue: no system" in out


def test_ctrl_c_ends_the_answer_and_not_the_program(talk, folder, monkeypatch):
    before, add = signal.getsignal(signal.SIGINT), chat.OneAfterAnother.add
    calls = []

    def press(self, number, text):
        add(self, number, text)
        calls.append(text)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(chat.OneAfterAnother, "add", press)
    out, _ = talk("Hi\nHo\n", folder)
    cut, whole = out.split("bot> ")[1:]
    assert calls[0] == calls[4] == "bot> " and cut == "".join(calls[1:4]) and calls[3] == "\n"
    assert len(calls) > 7 and whole == "".join(calls[5:])
    assert signal.getsignal(signal.SIGINT) is before


def test_a_terminal_is_never_given_orders_by_a_model():
    shown = printable("a\x1b[2Jb\r\x07\x9bc\u202ed\n\te\u200d😀")
    assert shown == r"a\x1b[2Jb\r\x07\x9bc\u202ed" + "\n\te\u200d😀"


def test_side_by_side_keeps_markup_as_text():
    file = io.StringIO()
    with SideBySide(Console(file=file, width=60, force_terminal=False)) as display:
        for number, text in enumerate(("[red]left[/red] \x1b[31m", "right")):
            display.add(number, f"{text}\n")
            display.add(number, f"score {number}")
    lines = file.getvalue().splitlines()
    assert r"[red]left[/red] \x1b[31m" in file.getvalue()
    [row] = [line for line in lines if "[red]left" in line]
    assert row.index("right") > 29 and any("score 0" in line and "score 1" in line for line in lines)
