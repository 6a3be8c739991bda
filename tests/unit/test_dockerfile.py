"""Dockerfile: what it copies is there, and it ends in two commands of the README. No test builds it."""

import json
import re

from page_commands import ROOT, commands_of

LINES = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]


def test_what_is_copied_is_there_and_is_not_ignored():
    copied = [word for line in LINES if line.startswith("COPY") for word in line.split()[1:-1]]
    assert "." in copied and all(list(ROOT.glob(word)) for word in copied if word != ".")
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ".git" not in ignored, "the tests ask git for the files"
    assert {".venv", "output"} <= set(ignored)


def test_the_environment_is_that_of_the_commands():
    [install] = [line for line in LINES if "setup_env.sh" in line and line.startswith("RUN")]
    [names] = re.findall(r"for file in (.+?);", install)
    for script in ("training_scripts/demo/run_demo.sh", "tests/run.sh"):
        [needed] = re.findall(
            r"^source \S*setup_env.sh (\S+).txt$", (ROOT / script).read_text(), re.MULTILINE
        )
        assert needed in names.split()


def test_it_ends_in_two_commands_of_the_readme():
    shell, _, script = json.loads(LINES[-1].removeprefix("CMD "))
    _, *two = [" ".join(command.words) for command in commands_of(ROOT / "README.md")[:3]]
    assert shell == "bash" and script.split(" && ") == two
