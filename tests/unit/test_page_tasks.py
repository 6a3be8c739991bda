"""README.md and the pages of tasks: short, with flags that plan what they say and metrics that exist."""

import re

import pytest
from page_commands import ROOT, blocks

from common.flags.args import Problems
from tools.memory_plan import MemoryPlan
from tools.planned_run import read_run
from tools.step_flags import PlanArguments, parse_step_args
from tools.translate import main

TASKS = sorted((ROOT / "docs/tasks").glob("*.md"))
OTHERS = sorted((ROOT / "docs").glob("from_*.md"))
CARD = (ROOT / "docs/tasks/one_24_gb_card.md").read_text()
ROWS = re.findall(r"^\| ([123]) \| (\S+) \| ([\d.]+) \| (.*?) ?\|$", CARD, re.MULTILINE)
[SINGLE, PPO] = re.findall(r"steps? [\d and]+ `(--[^`]+)`", CARD)
METRIC = re.compile(r"`((?:eval|objective|perf|policy|rollout|value|reward|dpo|sft|correction)/[a-z_0-9]+)`")


def test_pages_are_short_and_linked_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    assert readme.count("\n") <= 120 and len(TASKS) == 4 and len(ROWS) == 15
    assert [page.name for page in TASKS if page.read_text().count("\n") > 90] == []
    assert [page.name for page in TASKS if f"](docs/tasks/{page.name})" not in readme] == []


@pytest.mark.slow
@pytest.mark.parametrize(("step", "model", "gib", "flags"), ROWS)
def test_a_card_of_24_gb_is_planned_to_fit(step: str, model: str, gib: str, flags: str):
    roles = ["actor_", "critic_"][: 1 if "grpo" in flags else 2] if step == "3" else [""]
    words = [word for role in roles for word in (f"--{role}model_name_or_path", model)]
    words += f"--stage {step} --gpu l4-24g {PPO if step == '3' else SINGLE} {flags.strip('`')}".split()
    args = parse_step_args(PlanArguments, words, problems=(problems := Problems()))
    planned = MemoryPlan(read_run(args, problems)).peak.total / 2**30
    assert round(planned, 1) == float(gib) < 22


def test_every_metric_of_these_pages_is_logged():
    folders = ("common", "step1_sft", "step2_reward", "step3_ppo")
    code = "\n".join(file.read_text() for folder in folders for file in (ROOT / folder).rglob("*.py"))
    names = {name for page in TASKS for name in METRIC.findall(page.read_text())}
    parts = {re.sub(r"^\w+/(eval_)?(chosen_)?|_(low|high)$", "", name) for name in names}
    assert len(names) > 30 and [part for part in parts if not re.search(rf'[/"]{part}[_"{{]', code)] == []


def test_every_command_of_another_trainer_is_translated(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "".join(block for page in TASKS + OTHERS for block in blocks(page.read_text(), "shell"))
    commands = re.findall(r"^python -m tools.translate (.+)$", text, re.MULTILINE)
    whole = [command.split() for command in commands if ".yaml" not in command]
    for words in whole:
        main(words)
        assert capsys.readouterr().out
    assert len(whole) >= 6
