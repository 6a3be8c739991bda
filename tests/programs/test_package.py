"""The wheel in a separate environment: one name in site-packages, and every command works."""

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from program_runs import ROOT, as_flags, environment, files_in, read_metrics
from tiny_inputs import step_flags

import triptych


def build(folder: Path, *words: str) -> Path:
    """Build what `words` say into the folder; return the wheel."""
    command = [sys.executable, "-m", *words]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True, env=environment())
    [wheel] = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of this repository."""
    folder = tmp_path_factory.mktemp("wheel")
    return build(folder, "hatchling", "build", "-t", "sdist", "-t", "wheel", "-d", str(folder))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The folder of the commands of an environment with the wheel, and with the libraries of this one."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    [site] = folder.glob("lib/python3*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    command = [sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "--no-deps", wheel]
    subprocess.run(command, check=True, capture_output=True)
    names = {path.name for path in site.iterdir()} - {"libraries.pth", "__pycache__"}
    assert names == {"triptych", wheel.name.split("-py3")[0] + ".dist-info"}
    return folder / "bin"


def call(installed: Path, folder: Path, *words: object, text: str = "") -> subprocess.CompletedProcess:
    """Run the command in a folder outside the repository, with `text` as its input."""
    variables = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    command = [str(installed / "triptych"), *map(str, words)]
    more = {"cwd": folder, "env": variables, "input": text}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **more)


@pytest.mark.slow
def test_wheel_and_sdist(wheel, tmp_path):
    [sdist] = wheel.parent.glob("*.tar.gz")
    again = build(tmp_path, *f"pip wheel --no-deps --no-build-isolation -w {tmp_path} {sdist}".split())
    names = set(zipfile.ZipFile(wheel).namelist())
    assert set(zipfile.ZipFile(again).namelist()) == names
    command = [sys.executable, "-m", "twine", "check", "--strict", wheel, sdist]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0 and checked.stdout.count("PASSED") == 2, checked.stdout
    files = [path.relative_to(ROOT) for path in (ROOT / "common").rglob("*") if path.is_file()]
    assert {f"triptych/{file}" for file in files if "__pycache__" not in file.parts} <= names


@pytest.mark.slow
def test_three_steps_chat_and_report_from_another_folder(installed, tiny, tmp_path):
    metrics = {"sft": "sft/loss", "reward": "reward/loss", "ppo": "objective/score"}
    for step, (name, metric) in enumerate(metrics.items(), start=1):
        flags = step_flags(tiny, step, output_dir=name, max_train_steps=1, data_output_path="cache")
        done = call(installed, tmp_path, name, *as_flags(flags))
        assert done.returncode == 0, done.stderr
        assert len(read_metrics(tmp_path / name, metric)) == 1
        assert "export/config.json" in files_in(tmp_path / name)
    chat = call(installed, tmp_path, "chat", "ppo/export", "--max_new_tokens", "4", text="hello\n")
    assert chat.returncode == 0, chat.stderr
    report = call(installed, tmp_path, "report", "sft", "ppo", "--output", "r.html")
    assert report.returncode == 0 and (tmp_path / "r.html").exists(), report.stderr


@pytest.mark.slow
def test_commands_of_the_wheel(installed, tmp_path):
    for name in triptych.COMMANDS:
        path = call(installed, tmp_path, "path", name).stdout.strip()
        assert Path(path).is_file() and "site-packages/triptych" in path
    for name in ("plan", "export", "serve-reward"):
        shown = call(installed, tmp_path, name, "--help")
        assert shown.returncode == 0 and "usage:" in shown.stdout, shown.stderr


def test_command_names(capsys, monkeypatch):
    for words, shown in ((["--help"], "check-data"), (["path", "ppo"], "step3_ppo/main.py"), ([], "usage:")):
        monkeypatch.setattr(sys, "argv", ["triptych", *words])
        triptych.main()
        assert shown in capsys.readouterr().out
    cures = {"repot": "did you mean report?", "path": "choose from sft", "path x": "no command 'x'"}
    for words, cure in cures.items():
        monkeypatch.setattr(sys, "argv", ["triptych", *words.split()])
        with pytest.raises(SystemExit, match="2"):
            triptych.main()
        assert cure in capsys.readouterr().err
