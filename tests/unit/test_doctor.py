"""python -m tools.doctor: what is missing is named with its cure, and never a traceback."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools import doctor
from tools.doctor import NOTE, OK, PROBLEM

ROOT = Path(__file__).resolve().parents[2]


def states(lines) -> dict[str, str]:
    """Return the state of each thing that was looked at."""
    return {name: state for state, name, _ in lines}


def test_missing_and_other_versions_are_told_with_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "requirements.txt").write_text(
        "# All of it.\n\ntorch==0.1  # tensors\nnumpy~=0.1\npytest>=1\nno-such-package~=1.0\n\n"
        "# Only the demo uses it.\nno-such-toy~=2.0\n"
    )
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    lines = list(doctor.check_packages())
    found = states(lines)
    assert found["torch"] == PROBLEM and found["numpy"] == NOTE and "pytest" not in found
    assert found["no-such-package"] == PROBLEM and found["no-such-toy"] == NOTE
    texts = {name: text for _, name, text in lines}
    assert texts["torch"].endswith('where torch==0.1 was tested; pip install "torch==0.1"')
    assert texts["requirements"] == "1 packages as asked for" and found["import torch"] == OK


def test_a_local_part_of_a_version_does_not_count(tmp_path, monkeypatch):
    (tmp_path / "requirements.txt").write_text("torch==2.13.0\n")
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+cu128")
    assert "torch" not in states(doctor.check_packages())


def fake_torch(*, count: int = 0, free: float = 1.0, cuda: str | None = None) -> SimpleNamespace:
    """Return what is asked of torch, with some GPUs."""
    gpus = SimpleNamespace(
        is_available=lambda: count > 0,
        device_count=lambda: count,
        mem_get_info=lambda index: (free * 2**30, 80 * 2**30),
        get_device_name=lambda index: "H",
    )
    return SimpleNamespace(cuda=gpus, version=SimpleNamespace(cuda=cuda))


@pytest.mark.parametrize(
    ("torch", "driver", "expected"),
    [
        (fake_torch(), "", {"GPUs": NOTE}),
        (fake_torch(), "GPU 0: H", {"GPUs": PROBLEM}),
        (fake_torch(count=1, free=70.0), "GPU 0: H", {"GPU 0": OK}),
        (fake_torch(count=2, free=10.0), "GPU 0: H", {"GPU 0": NOTE, "GPU 1": NOTE}),
    ],
)
def test_gpus_that_are_there_and_not_seen_are_a_problem(monkeypatch, torch, driver, expected):
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: name if driver else None)
    done = SimpleNamespace(returncode=0, stdout=driver)
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: done)
    found = states(doctor.check_devices())
    assert {name: found[name] for name in expected} == expected


def test_environment_and_room(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "x")
    assert [state for state, *_ in doctor.check_environment()] == [PROBLEM]
    usage = SimpleNamespace(free=2.5 * 2**30)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    output = str(tmp_path / "absent" / "output")
    assert states(doctor.check_room(output))[f"disk: {output}"] == NOTE
    usage.free = 0.5 * 2**30
    assert states(doctor.check_room(output))[f"disk: {output}"] == PROBLEM


@pytest.mark.parametrize(
    ("program", "state", "said"),
    [
        ("print('loss falls')", OK, "loss falls"),
        ("raise ValueError('half installed')", PROBLEM, "ValueError: half installed"),
        ("import time; time.sleep(60)", PROBLEM, "took longer than 5 s"),
        ("import os; os.abort()", PROBLEM, "it said nothing"),
    ],
)
def test_the_self_test_is_a_line_whatever_comes(monkeypatch, program, state, said):
    monkeypatch.setattr(doctor, "SELF_TEST", program)
    [(found, _, text)] = doctor.check_training(5.0)
    assert found == state and said in text


@pytest.mark.slow
def test_all_is_well_here(capsys):
    """A step is trained, too."""
    assert doctor.main(["--output_dir", str(ROOT)]) in (0, 1)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("ok ")]
    assert any("self-test" in line and "after a step" in line for line in lines), lines
    assert any("import deepspeed" in line for line in lines)


def test_without_packages_it_says_so_and_leaves_no_traceback():
    """As in an environment in which nothing was installed yet."""
    packages = ("torch", "deepspeed", "transformers", "psutil", "packaging")
    code = f"import sys\nfor name in {packages}: sys.modules[name] = None\n"
    code += "from tools.doctor import main\nraise SystemExit(main(['--self_test_seconds', '0']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "Traceback" not in done.stderr + done.stdout, done.stderr
    assert "check_packages" in done.stdout and "problems" in done.stdout.splitlines()[-1]
