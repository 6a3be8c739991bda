"""Every command that a page shows names a program that exists, with flags that it takes.

tests/programs/test_readme_commands.py runs those of the README.
"""

import re
import subprocess
from pathlib import Path

import pytest
from page_commands import ROOT, Command, blocks, commands_of, pages

import train
from common.flags.args import Problems, parse_args
from docs.make_configuration import find_programs, own_flags
from tools.step_flags import StageArguments, parse_step_args, with_step_flags
from training_scripts.launch_table import FOLDER_OF_STEP, find_row, step_flags

COMMANDS = [command for page in pages() for command in commands_of(page)]
PROGRAMS = {program.command: program.flags for program in find_programs()}
STEP_PROGRAMS = ("step1_sft", "step2_reward", "step3_ppo")
# Tools of others, with what they are asked to do.
OTHERS = {"pre-commit": {"install"}, "source": set(), "pip": {"install"}, "lm_eval": {"--model"}}
LAUNCHERS = ("deepspeed", "torchrun")


def problems_of(command: Command) -> list[str]:
    """What is wrong with a command; [] for a good one."""
    first, *rest = command.words
    if first in ("python", *LAUNCHERS) and "-m" in rest:
        _, name, *words = rest[rest.index("-m") :]
        return flag_problems(f"python -m {name}", words)
    if first == "python":
        return program_problems(rest[0], rest[1:])
    if first in LAUNCHERS:
        [place] = [i for i, word in enumerate(rest) if word.endswith(".py")]
        return program_problems(rest[place], rest[place + 1 :])
    if first == "bash":
        return script_problems(rest[0], rest[1:])
    if first == "sbatch":
        place, *words = [word for word in rest if not word.startswith("--")]
        return script_problems(place, words)
    if first in OTHERS:
        known = OTHERS[first]
        return [] if (rest[0] in known if known else (ROOT / rest[0]).is_file()) else [f"{first} {rest[0]}"]
    return [f"{first} is no program"]


def program_problems(place: str, words: list[str]) -> list[str]:
    if f"{place} {' '.join(words[:1])}" in PROGRAMS:
        return flag_problems(f"{place} {words[0]}", words[1:])
    if place in PROGRAMS:
        return flag_problems(place, words)
    if not (ROOT / place).is_file():
        return [f"{place} does not exist"]
    text = (ROOT / place).read_text()
    flags = [word.split("=")[0] for word in words if word.startswith("--")]
    known = [flag for flag in flags if f'"{flag}"' in text or f"args.{flag[2:]}" in text]
    return [f"{place} has no {flag}" for flag in flags if flag not in known]


def flag_problems(program: str, words: list[str]) -> list[str]:
    if program not in PROGRAMS:
        return [f"{program} does not exist"]
    if program == "train.py":
        words = [train._with_underscores(word) for word in words]
    takes_words = not program.startswith(("step", "train"))
    if takes_words and words and not words[0].startswith("-"):
        words = [f"--{own_flags(PROGRAMS[program])[0].name}", *words]
    problems, flags = Problems(), PROGRAMS[program]
    if issubclass(flags, StageArguments) and "--stage" not in words:
        parse_step_args(flags, words, problems=problems)
        return problems.messages
    if issubclass(flags, StageArguments):
        flags = with_step_flags(flags, int(words[words.index("--stage") + 1]))
    parse_args(flags, [word for word in words if word != "..."], problems=problems)
    is_shortened = "..." in words
    return [p for p in problems.messages if not (is_shortened and "is required: " in p)]


def script_problems(place: str, words: list[str]) -> list[str]:
    if not (ROOT / place).is_file():
        return [f"{place} does not exist"]
    step = next((step for step in STEP_PROGRAMS if f"/{step}/" in place), None)
    if place == "training_scripts/run.sh":
        short, model, machine, *words = words
        step = FOLDER_OF_STEP[short]
        words = [*step_flags(short, find_row(model, machine)), *words]
    if step is None:
        return []
    positions = re.search(r"^POSITIONS=\((.*)\)$", (ROOT / place).read_text(), re.MULTILINE)
    for _ in positions[1].split() if positions else ():
        words = words[1:] if words and not words[0].startswith("-") else words
    # The script itself gives the models.
    return [p for p in flag_problems(f"{step}/main.py", words) if "is required: " not in p]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: f"{c.page}: {' '.join(c.words)[:60]}")
def test_a_command_of_a_page_is_taken(command):
    assert problems_of(command) == []


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("python step1_sft/main.py --model_name_or_path M --data_pathh x", "unknown flag --data_pathh"),
        ("python step1_sft/main.py --data_path x", "--model_name_or_path is required"),
        ("python -m tools.check_date --stage 1", "does not exist"),
        ("python step1_sft/main.py ... --nope 1", "unknown flag --nope"),
        ("bash training_scripts/step1_sft/opt/single_node/run_1.3b.sh --nope 1", "unknown flag --nope"),
        (
            "bash training_scripts/step1_sft/opt/single_node/run_1.3b.sh out 2 more",
            "unexpected argument 'more'",
        ),
        ("python benchmarks/bench_train.py --nope", "has no --nope"),
        ("rm x", "rm is no program"),
    ],
)
def test_a_wrong_command_is_found(line, problem):
    assert any(problem in found for found in problems_of(Command("page.md", line.split())))


def test_a_block_is_read_as_a_shell_does(tmp_path, monkeypatch):
    monkeypatch.setattr("page_commands.ROOT", tmp_path)
    page = Path(tmp_path / "page.md")
    page.write_text('```bash\nA=1 python x.py --a "b c" \\\n    --d   # why\n\n```\n```python\nno\n```\n')
    assert commands_of(page) == [Command("page.md", ["python", "x.py", "--a", "b c", "--d"])]


@pytest.mark.parametrize(
    ("codes", "num_starts"), [([1, 137, 0], 3), ([2, 0], 1), ([3, 0], 1), ([1, 75, 0], 2)], ids=str
)
def test_the_restart_loop(codes, num_starts, tmp_path):
    """docs/resume.md: a crashed run is started again, and neither bad flags nor a stop."""
    [loop] = blocks((ROOT / "docs/resume.md").read_text(), "sh")
    stand_in = "echo >> starts; set -- CODES; shift $(wc -l < starts); return $1"
    stand_in = stand_in.replace("CODES", " ".join(map(str, [0, *codes])))
    script = f"sleep() {{ :; }}\ncommand() {{ {stand_in}; }}\n" + loop.replace("COMMAND", "command")
    subprocess.run(["bash", "-c", script], cwd=tmp_path, timeout=60, check=True)
    assert (tmp_path / "starts").read_text() == "\n" * num_starts
