"""The commands that `pip install -e .` makes of pyproject.toml."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CODE = """import sys
from importlib.metadata import EntryPoint
commands = {name: EntryPoint(name, target, "").load() for name, target in %r.items()}
assert all(callable(command) for command in commands.values())
sys.argv = sys.argv[1:]
commands[sys.argv[0]]()
"""


def test_commands_run_from_another_folder_with_the_installed_packages_alone(tmp_path: Path):
    installed = PROJECT["tool"]["setuptools"]
    (tmp_path / "site").mkdir()
    for name in [*installed["packages"], *(f"{module}.py" for module in installed["py-modules"])]:
        (tmp_path / "site" / name).symlink_to(ROOT / name)
    commands = PROJECT["project"]["scripts"]
    assert set(commands) == {f"triptych-{name}" for name in ("sft", "reward", "ppo", "chat", "arena")}
    env = os.environ | {"PYTHONPATH": str(tmp_path / "site")}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        python = [sys.executable, "-c", CODE % commands, *words]
        return subprocess.run(python, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)

    told = run("triptych-sft", "--help")
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith("usage: triptych-sft") and "--model_name_or_path" in told.stdout
    bad = run("triptych-ppo", "--actor_model_name_or_pat", "x")
    assert bad.returncode == 2 and "did you mean --actor_model_name_or_path?" in bad.stderr
    assert "Traceback" not in bad.stderr
