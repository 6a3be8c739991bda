"""python -m tools.doctor: what is missing is named with its cure, and never a traceback."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tools import doctor
from tools.doctor import NOTE, OK, PROBLEM

ROOT = Path(__file__).resolve().parents[2]


def states(lines) -> dict[str, str]:
    """Return the state of each thing that was looked at."""
    return {name: state for state, name, _ in lines}


def test_missing_and_other_versions_are_told_with_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "requirements.txt").write_text(
        "# All of it.\n\ntorch==0.1  # tensors\nnumpy~=0.1\npytest>=1\nno-such-package~=1.0\ndeepspeed==0.1\n"
    )
    (tmp_path / "requirements-demo.txt").write_text("-r requirements.txt\nno-such-toy~=2.0\n")
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    found_version = doctor.importlib.metadata.version
    local = {"deepspeed": "0.1+cu128"}  # a local part does not count
    monkeypatch.setattr("importlib.metadata.version", lambda name: local.get(name) or found_version(name))
    lines = list(doctor.check_packages())
    found = states(lines)
    assert found["torch"] == PROBLEM and found["numpy"] == NOTE
    assert "pytest" not in found and "deepspeed" not in found
    assert found["no-such-package"] == PROBLEM and found["no-such-toy"] == NOTE
    texts = {name: text for _, name, text in lines}
    assert texts["torch"].endswith('but torch==0.1 was tested; pip install "torch==0.1"')
    assert found["import torch"] == OK


@pytest.mark.parametrize(
    ("count", "free", "capability", "flash", "expected"),
    [
        (0, 0, (8, 0), None, {"GPUs": PROBLEM}),
        (1, 70, (8, 0), None, {"GPU 0": OK, "import flash_attn": NOTE}),
        (2, 10, (8, 0), None, {"GPU 0": NOTE, "GPU 1": NOTE}),
        (1, 70, (7, 5), "__version__ = '2'", {"GPU 0": NOTE, "import flash_attn": OK}),
        (1, 70, (8, 0), "raise ImportError('undefined symbol')", {"GPU 0": OK, "import flash_attn": PROBLEM}),
    ],
)
def test_what_gpus_lack_is_named(monkeypatch, tmp_path, count, free, capability, flash, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    done = subprocess.CompletedProcess([], 0, stdout="GPU 0: H")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    if flash:
        (tmp_path / "flash_attn.py").write_text(flash)
        monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    found = list(doctor.check_devices())
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    worst = dict(sorted(((name, state) for state, name, _ in found), key=lambda pair: pair[1] != OK))
    assert {name: worst[name] for name in expected} == expected


def test_without_packages_it_says_so_and_leaves_no_traceback():
    """As in an environment in which nothing was installed yet."""
    packages = ("torch", "deepspeed", "transformers", "psutil", "packaging")
    code = f"import sys\nfor name in {packages}: sys.modules[name] = None\n"
    code += "from tools.doctor import main\nraise SystemExit(main())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "Traceback" not in done.stderr + done.stdout, done.stderr
    assert "ModuleNotFoundError" in done.stdout and "problems" in done.stdout.splitlines()[-1]
