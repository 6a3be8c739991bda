"""The README's commands, run as they stand there, with tiny models and files in the place of its own.

tests/unit/test_page_commands.py checks the flags of every other page's commands.
"""

import importlib
import io
import json
import shlex
import sys
from pathlib import Path

import pytest
import tiny_inputs
from page_commands import ROOT, blocks, commands_of
from program_runs import read_curve, run_here
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import chat

pytestmark = [pytest.mark.slow, pytest.mark.smoke]

README = ROOT / "README.md"
COMMANDS = [command.words for command in commands_of(README)]
STEPS = {"step1_sft/main.py": 1, "step2_reward/main.py": 2, "step3_ppo/main.py": 3}
# What makes a run one of seconds; the README's own flags stand before it.
SINGLE = "--max_seq_len 48 --max_train_steps 2 --per_device_train_batch_size 4"
PPO = "--max_prompt_seq_len 24 --max_answer_seq_len 6 --max_train_steps 2 "
PPO += "--per_device_generation_batch_size 4 --per_device_training_batch_size 4"
SHORT = {1: SINGLE, 2: SINGLE, 3: PPO}


@pytest.fixture(scope="module")
def place(tiny, tmp_path_factory, lone_process, no_pictures):
    """A working folder with the files that the README names."""
    folder = tmp_path_factory.mktemp("readme")
    rows = tiny_inputs.make_rows(40)
    answers = [{"prompt": row["prompt"], "answer": row["chosen"]} for row in rows]
    tiny_inputs.write_rows(folder / "my.jsonl", answers)
    tiny_inputs.write_rows(folder / "pairs.jsonl", rows)
    tiny_inputs.write_rows(folder / "prompts.jsonl", [{"prompt": row["prompt"]} for row in rows])
    [code] = blocks(README.read_text(), "python")
    (folder / "my_code.py").write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        yield folder
    sys.modules.pop("my_code", None)


def find(*wanted: str) -> list[str]:
    """The one command of the README with these words."""
    [words] = [words for words in COMMANDS if set(wanted) <= set(words)]
    return words


def start(words: list[str], tiny) -> Path:
    """Run a step's command of the README; return its --output_dir."""
    step = STEPS[words[1]]
    told = [str(tiny.base) if word.startswith("Qwen/") else word for word in words[2:]]
    more = [*SHORT[step].split(), "--data_output_path", str(tiny.cache)]
    run_here(step, [*told, *more])
    return Path(words[words.index("--output_dir") + 1])


@pytest.fixture(scope="module")
def exports(place, tiny) -> dict[int, Path]:
    """The three steps of "Your own data", one after the other, each with what the README says."""
    sft, reward, ppo = "step1_sft/main.py", "step2_reward/main.py", ("step3_ppo/main.py", "output/ppo")
    found = {1: start(find(sft), tiny), 2: start(find(reward), tiny), 3: start(find(*ppo), tiny)}
    return {step: folder / "export" for step, folder in found.items()}


def test_the_three_steps(exports):
    AutoModelForCausalLM.from_pretrained(exports[1])
    assert AutoModelForSequenceClassification.from_pretrained(exports[2]).config.num_labels == 1
    AutoModelForCausalLM.from_pretrained(exports[3])
    assert len(read_curve(exports[3].parent, "objective/score")) == 2


def test_chat_with_what_they_made(exports, monkeypatch, capsys):
    words = find("chat.py")
    monkeypatch.setattr(sys, "argv", [*words[1:], "--max_new_tokens", "4"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("how is the dog?\n\n"))
    chat.main()
    assert capsys.readouterr().out.startswith("bot> ")


def test_your_own_reward(exports, tiny):
    output = start(find("step3_ppo/main.py", "function:my_code:politeness"), tiny)
    scores = read_curve(output, "objective/score")
    assert len(scores) == 2 and all(0 <= score <= 1 for score in scores)
    args = json.loads((output / "args.json").read_text())
    assert args["algorithm"] == "reinforce++" and args["reward"] == ["function:my_code:politeness"]


def test_the_checks_before_a_run(exports, tiny, capsys):
    """Those of "Before a run" in docs/a_run.md, which stand in its text."""
    told = (ROOT / "docs/a_run.md").read_text()
    look = "python -m tools.check_data --stage 1 --model_name_or_path M --data_path my.jsonl"
    plan = "python -m tools.plan --stage 3 --actor_model_name_or_path A --critic_model_name_or_path B"
    more = " --gpu a100-80g --num_gpus 8"
    assert look in told and plan + more in told
    models = {"M": exports[1], "A": exports[1], "B": exports[2]}
    lengths = "--max_prompt_seq_len 24 --max_answer_seq_len 6".split()  # of a model of 128 positions
    for command, flags in ((look, ["--data_output_path", str(tiny.cache)]), (plan + more, lengths)):
        _, _, tool, *words = [str(models.get(word, word)) for word in shlex.split(command)]
        importlib.import_module(tool).main([*words, *flags])
    assert "GiB" in capsys.readouterr().out
