"""setup_env.sh in a made-up repository, with a pip that only writes down what it is asked for."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
FAKE_UV = """#!/bin/sh
echo "uv for torch $UV_TORCH_BACKEND: $@" >> "$PIP_RECORD"; exit ${UV_EXIT_CODE:-0}
"""
FAKE_PIP = f"""import os, pathlib, sys, time
if sys.argv[1:] == ["config", "list"]:
    print(os.environ.get("PIP_CONFIG", "global.index-url='https://index.example'"))
if "--target" in sys.argv and "UV_EXIT_CODE" in os.environ:
    uv = pathlib.Path(sys.argv[-2], "bin/uv")
    uv.parent.mkdir(parents=True)
    uv.write_text({FAKE_UV!r})
    uv.chmod(0o755)
with open(os.environ["PIP_RECORD"], "a") as record:
    record.write(" ".join(sys.argv[1:]) + "\\n")
time.sleep(float(os.environ.get("PIP_SECONDS", "0")) if "install" in sys.argv else 0)
sys.exit(int(os.environ.get("PIP_EXIT_CODE", "0")) if "install" in sys.argv else 0)
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with setup_env.sh and two requirements files, and a .venv with the fake pip."""
    (tmp_path / "training_scripts").mkdir()
    script = tmp_path / "training_scripts/setup_env.sh"
    script.write_text((ROOT / "training_scripts/setup_env.sh").read_text())
    (tmp_path / "constraints.txt").write_text("tqdm==4.70.1\n")
    (tmp_path / "requirements.txt").write_text("torch>=2.13.0,<2.15  # a range\ntqdm~=4.70\n")
    (tmp_path / "requirements-dev.txt").write_text("-r requirements.txt\npytest~=9.2\n")
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / ".venv")], check=True, timeout=60
    )
    (site_packages(tmp_path) / "pip").mkdir()
    (site_packages(tmp_path) / "pip/__main__.py").write_text(FAKE_PIP)
    return tmp_path


def site_packages(repository: Path) -> Path:
    return next((repository / ".venv/lib").glob("python3*/site-packages"))


def add_package(repository: Path, name: str, version: str, *, whole: bool = True) -> Path:
    """Make the metadata of an installed package; one that is not whole is what a killed installer leaves."""
    info = site_packages(repository) / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if whole:
        (info / "INSTALLER").write_text("pip\n")
    return info


def add_command(repository: Path, name: str, text: str) -> None:
    """Put a shell script before all others on the path of the environment."""
    path = repository / ".venv/bin" / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def start(repository: Path, line: str, **variables: str) -> subprocess.Popen[str]:
    """Start `line` in a strict shell of a session of its own, elsewhere, without an active environment."""
    outer = ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHON", "TRIPTYCH_OFFLINE", "HF_HUB_OFFLINE")
    env = {name: value for name, value in os.environ.items() if name not in outer}
    env |= {"PIP_RECORD": str(repository / "asked"), "HERE": str(repository)} | variables
    command = ["bash", "-c", f"set -euo pipefail; {line}", "caller.sh", "--size", "smollm2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd="/", env=env, start_new_session=True, **pipes)


def end(shell: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """Wait for what `start` started, a minute at most."""
    try:
        out, err = shell.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(shell.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(shell.args, shell.returncode, out, err)


def source(repository: Path, line: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `line` as `start` does, to its end."""
    return end(start(repository, line, **variables))


def asked(repository: Path) -> list[str]:
    record = repository / "asked"
    lines = record.read_text().splitlines() if record.exists() else []
    return [line for line in lines if line.startswith("install")]


INSTALL = "install --quiet --retries 2"
SOURCE_DEV = 'source "$HERE/training_scripts/setup_env.sh" requirements-dev.txt'


def test_torch_is_installed_first_and_alone_then_the_file(repository: Path):
    done = source(repository, f"{SOURCE_DEV}; command -v python")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(repository / ".venv/bin/python")
    requirements = repository / "requirements-dev.txt"
    constraints = repository / "constraints.txt"
    assert asked(repository) == [f"{INSTALL} torch==2.13.0", f"{INSTALL} -r {requirements} -c {constraints}"]


def test_a_second_call_installs_nothing_until_an_included_file_changes(repository: Path):
    source(repository, SOURCE_DEV)
    assert "is installed already" in source(repository, SOURCE_DEV).stdout
    assert len(asked(repository)) == 2
    with open(repository / "requirements.txt", "a") as file:
        file.write("peft~=0.21\n")
    source(repository, SOURCE_DEV)
    assert len(asked(repository)) == 4
    (repository / "constraints.txt").write_text("tqdm==4.70.2\n")
    source(repository, SOURCE_DEV)
    assert len(asked(repository)) == 6


@pytest.mark.parametrize("version", ["2.13.0+cu128", "2.14.1"])
def test_a_torch_that_is_there_is_kept(repository: Path, version: str):
    add_package(repository, "torch", version)
    done = source(repository, SOURCE_DEV)
    assert f"keeps torch {version}; downloads about" in done.stdout and "CUDA" not in done.stdout
    assert [line.split(" -c ")[0] for line in asked(repository)] == [
        f"{INSTALL} -r {repository / 'requirements-dev.txt'}"
    ]


@pytest.mark.parametrize("version", ["2.9.1", "2.15.0"])
def test_a_torch_that_nobody_tried_is_neither_used_nor_replaced(repository: Path, version: str):
    add_package(repository, "torch", version)
    done = source(repository, f"{SOURCE_DEV}; echo went on")
    assert done.returncode == 1 and "went on" not in done.stdout and asked(repository) == []
    assert done.stderr.count("\n") == 1 and f"torch {version} is here" in done.stderr
    assert 'pip install "torch>=2.13.0,<2.15"' in done.stderr


def test_the_ci_runs_versions_that_setup_accepts():
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    tried = re.findall(r'\{python: "([\d.]+)", torch: "([\d.]+)"\}', workflow)
    line = next(x for x in (ROOT / "requirements.txt").read_text().splitlines() if x.startswith("torch"))
    accepted = SpecifierSet(line.partition("#")[0].strip().removeprefix("torch"))
    assert {python for python, _ in tried} >= {"3.11", "3.13"}
    assert all(Version(torch) in accepted for _, torch in tried)
    assert {Version(torch).minor for _, torch in tried} == {11, 12, 13, 14}, "each minor version of the range"


def test_uv_installs_where_it_is_present(repository: Path):
    add_command(repository, "uv", FAKE_UV.partition("\n")[2])
    assert "uv installs requirements-dev.txt" in source(repository, SOURCE_DEV).stdout
    calls = (repository / "asked").read_text().splitlines()
    to = f"pip install --quiet --python {repository / '.venv'}/bin/python"
    files = f"-r {repository / 'requirements-dev.txt'} -c {repository / 'constraints.txt'}"
    assert calls == [f"uv for torch auto: {to} torch==2.13.0", f"uv for torch : {to} {files}"]


DRIVER = "| NVIDIA-SMI 580.65.06    Driver Version: 580.65.06    CUDA Version: 13.0     |"


def test_torchs_build_is_the_one_for_the_driver(repository: Path):
    add_command(repository, "nvidia-smi", f"echo '{DRIVER}'")
    done = source(repository, SOURCE_DEV, PIP_CONFIG="", UV_EXIT_CODE="0")
    assert done.returncode == 0 and "; driver 580.65.06, CUDA 13.0" in done.stdout, done.stderr
    calls = (repository / "asked").read_text().splitlines()
    to = f"pip install --quiet --python {repository / '.venv'}/bin/python"
    assert f"uv for torch auto: {to} torch==2.13.0" in calls
    assert not [line for line in asked(repository) if "torch==" in line]
    assert not (repository / ".venv/.triptych-uv").exists()
    (repository / "asked").unlink()
    (repository / "constraints.txt").write_text("# another\n")
    source(repository, SOURCE_DEV, PIP_CONFIG="", UV_EXIT_CODE="0", UV_TORCH_BACKEND="cu128")
    assert f"uv for torch cu128: {to} torch==2.13.0" in (repository / "asked").read_text().splitlines()


@pytest.mark.parametrize("uv", [{"UV_EXIT_CODE": "1"}, {}], ids=["no route to torch's index", "no uv"])
def test_without_torchs_own_index_its_build_is_that_of_the_package_index(repository: Path, uv):
    add_command(repository, "nvidia-smi", "exit 9")  # no driver
    done = source(repository, SOURCE_DEV, PIP_CONFIG="", **uv)
    assert done.returncode == 0 and "; no NVIDIA driver" in done.stdout, done.stderr
    assert f"{INSTALL} torch==2.13.0" in asked(repository)


def test_every_requirement_has_a_tested_version_in_its_range():
    pins = dict(line.split("==") for line in lines_of("constraints.txt"))
    names = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    files = ("requirements.txt", "requirements-demo.txt", "requirements-dev.txt")
    needed = [Requirement(line) for file in files for line in lines_of(file)]
    assert len(needed) > 30 and "torch" not in names, "the machine's build is chosen"
    for package in needed:
        if package.name != "torch":
            assert names[package.name.lower().replace("_", "-")] in package.specifier, package


def lines_of(file: str) -> list[str]:
    lines = [line.partition("#")[0].strip() for line in (ROOT / file).read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("-")]


def test_without_room_nothing_is_downloaded(repository: Path):
    add_command(repository, "df", "echo Filesystem; echo disk 9000000 7000000 2000000 80% /")
    done = source(repository, f"{SOURCE_DEV}; echo went on")
    assert done.returncode == 1 and "has 1 GB free, 3 are needed" in done.stderr and asked(repository) == []
    add_package(repository, "torch", "2.13.0")  # what is most of it is there
    assert source(repository, SOURCE_DEV).returncode == 0


def test_after_control_c_the_same_command_goes_on(repository: Path):
    old = add_package(repository, "mine", "1.0", whole=False)  # not ours: it was there before
    shell = start(repository, f"{SOURCE_DEV}; echo went on", PIP_SECONDS="60")
    for _ in range(600):
        if asked(repository):
            break
        time.sleep(0.05)
    half = add_package(repository, "torch", "2.13.0", whole=False)
    done = add_package(repository, "jinja2", "3.1")
    os.killpg(shell.pid, signal.SIGINT)
    stopped = end(shell)
    assert stopped.returncode and "went on" not in stopped.stdout
    assert "setup_env.sh: stopped; the same command goes on from here" in stopped.stderr
    (repository / "asked").unlink()
    assert source(repository, SOURCE_DEV).returncode == 0
    assert asked(repository)[0] == f"{INSTALL} torch==2.13.0", "half a torch is none"
    assert not half.exists() and done.exists() and old.exists()


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
