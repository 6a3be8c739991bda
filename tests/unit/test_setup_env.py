"""setup_env.sh in a made-up repository, with a pip that only writes down what it is asked for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAKE_PIP = """import os, sys
with open(os.environ["PIP_RECORD"], "a") as record:
    record.write(" ".join(sys.argv[1:]) + "\\n")
sys.exit(int(os.environ.get("PIP_EXIT_CODE", "0")) if "install" in sys.argv else 0)
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with setup_env.sh and two requirements files, and a .venv with the fake pip."""
    (tmp_path / "training_scripts").mkdir()
    script = tmp_path / "training_scripts/setup_env.sh"
    script.write_text((ROOT / "training_scripts/setup_env.sh").read_text())
    (tmp_path / "requirements.txt").write_text("torch==2.13.0  # exact\ntqdm~=4.70\n")
    (tmp_path / "requirements-dev.txt").write_text("-r requirements.txt\npytest~=9.2\n")
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / ".venv")], check=True, timeout=60
    )
    site_packages = next((tmp_path / ".venv/lib").glob("python3*/site-packages"))
    (site_packages / "pip").mkdir()
    (site_packages / "pip/__main__.py").write_text(FAKE_PIP)
    return tmp_path


def source(repository: Path, line: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `line` in a strict shell that starts elsewhere, without an active environment."""
    outer = ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHON", "TRIPTYCH_OFFLINE", "HF_HUB_OFFLINE")
    env = {name: value for name, value in os.environ.items() if name not in outer}
    env |= {"PIP_RECORD": str(repository / "asked"), "HERE": str(repository)} | variables
    command = ["bash", "-c", f"set -euo pipefail; {line}", "caller.sh", "--size", "smollm2"]
    return subprocess.run(command, cwd="/", env=env, capture_output=True, text=True, timeout=60)


def asked(repository: Path) -> list[str]:
    record = repository / "asked"
    lines = record.read_text().splitlines() if record.exists() else []
    return [line for line in lines if line.startswith("install")]


SOURCE_DEV = 'source "$HERE/training_scripts/setup_env.sh" requirements-dev.txt'


def test_torch_is_installed_first_and_alone_then_the_file(repository: Path):
    done = source(repository, f"{SOURCE_DEV}; command -v python")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(repository / ".venv/bin/python")
    requirements = repository / "requirements-dev.txt"
    assert asked(repository) == ["install --quiet torch==2.13.0", f"install --quiet -r {requirements}"]


def test_a_second_call_installs_nothing_until_an_included_file_changes(repository: Path):
    source(repository, SOURCE_DEV)
    assert "is installed already" in source(repository, SOURCE_DEV).stdout
    assert len(asked(repository)) == 2
    with open(repository / "requirements.txt", "a") as file:
        file.write("peft~=0.21\n")
    source(repository, SOURCE_DEV)
    assert len(asked(repository)) == 4


def test_a_failed_installation_is_an_error_and_is_tried_again(repository: Path):
    done = source(repository, f"{SOURCE_DEV}; echo went on", PIP_EXIT_CODE="1")
    assert done.returncode == 1 and "went on" not in done.stdout and "failed" in done.stderr
    assert "installed requirements-dev.txt" in source(repository, SOURCE_DEV).stdout


def test_an_active_environment_is_used_and_the_hub_shut_off_when_asked(repository: Path):
    (repository / ".venv").rename(repository / "mine")
    line = f'{SOURCE_DEV}; echo "offline=${{HF_HUB_OFFLINE-unset}}"; command -v python'
    for words, offline in (({}, "unset"), ({"TRIPTYCH_OFFLINE": "1"}, "1")):
        done = source(repository, line, VIRTUAL_ENV=str(repository / "mine"), **words)
        assert done.stdout.splitlines()[-2:] == [f"offline={offline}", str(repository / "mine/bin/python")]
    assert not (repository / ".venv").exists()


@pytest.mark.parametrize(
    ("line", "variables", "exit_code", "message"),
    [
        ('source "$HERE/training_scripts/setup_env.sh" nothing.txt', {}, 1, "name a requirements file"),
        ('bash "$HERE/training_scripts/setup_env.sh" requirements.txt', {}, 2, "source it"),
        (SOURCE_DEV, {"VIRTUAL_ENV": "/nowhere/venv"}, 1, "VIRTUAL_ENV=/nowhere/venv is no environment"),
        (f'rm -rf "$HERE/.venv"; {SOURCE_DEV}', {"PYTHON": "python-of-old"}, 1, "no Python 3.11 or newer"),
    ],
)
def test_what_cannot_work_is_named(repository, line, variables, exit_code, message):
    done = source(repository, line, **variables)
    assert done.returncode == exit_code and message in done.stderr and asked(repository) == []
