"""python -m tools.doctor: what is missing is named with its cure, and never a traceback."""

import json
import os
import socket
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools.doctor import __main__ as doctor
from tools.doctor import accelerator, machine, network, packages, self_test
from tools.doctor.packages import Requirement, check_import, check_requirements, read_requirements
from tools.findings import Finding

ROOT = Path(__file__).resolve().parents[2]
QUIET = ["--self_test_seconds", "0", "--hub_seconds", "0", "--no_color"]


def states(findings) -> dict[str, bool | None]:
    return {finding.name: finding.is_ok for finding in findings}


# ---------------------------------------------------------------------------------------------------------
# Packages
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operator", "release", "good", "bad"),
    [
        ("==", "2.13.0", ["2.13.0", "2.13.0+cu128", "2.13"], ["2.13.1", "2.12.0", "2.13.0.1", "x"]),
        ("~=", "0.19.8", ["0.19.8", "0.19.11"], ["0.19.7", "0.20.0", "1.19.9"]),
        ("~=", "5.2", ["5.2", "5.2.1", "5.9"], ["5.1.9", "6.0"]),
    ],
)
def test_versions_that_a_requirement_allows(operator, release, good, bad):
    requirement = Requirement("x", operator, release)
    assert [v for v in good + bad if requirement.allows(v)] == good


def test_the_requirements_of_the_repository_are_all_read():
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line.strip()]
    found = read_requirements()
    assert len(found) == len([line for line in lines if not line.startswith("#")])
    assert {r.name for r in found if r.is_optional} == {"chitchat-dataset", "vaderSentiment"}
    assert {"torch", "deepspeed", "transformers"} <= {r.name for r in found if r.reason and not r.is_optional}


def test_missing_and_other_versions_are_told_with_what_to_install(tmp_path):
    file = tmp_path / "requirements.txt"
    file.write_text(
        "# All of it\npytest~=1.0  # tests\nno-such-thing==1.0  # does it\ntorch==0.1  # tensors\n"
        "\n# Only the demo\nnor-this~=2.0\n"
    )
    found = {finding.name: finding for finding in check_requirements(file)}
    assert states(found.values()) == {
        "Python": True, "pytest": None, "no-such-thing": False, "torch": False, "nor-this": None,
        "requirements": False,
    }  # fmt: skip
    assert found["no-such-thing"].text == "not installed: does it"
    assert found["no-such-thing"].why == 'pip install "no-such-thing==1.0"'
    assert "where torch==0.1 was tested" in found["torch"].text


@pytest.mark.parametrize("error", [ImportError("no libcudart"), OSError("GLIBC"), RuntimeError("half")])
def test_a_package_that_does_not_load_is_a_problem(monkeypatch, error):
    def fail(name):
        raise error

    monkeypatch.setattr("importlib.import_module", fail)
    (finding,) = check_import("deepspeed")
    assert finding.is_ok is False and str(error) in finding.text
    assert finding.why.startswith('pip install "deepspeed~=')


# ---------------------------------------------------------------------------------------------------------
# Machine and network
# ---------------------------------------------------------------------------------------------------------


def test_a_lock_of_a_killed_build_is_named_and_a_young_one_is_a_note(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert states(machine.check_build_locks()) == {"build locks": True}
    lock = tmp_path / "some_op" / "lock"
    lock.parent.mkdir()
    lock.write_text("")
    (found,) = machine.check_build_locks()
    assert found.is_ok is None and str(lock) in found.text
    long_ago = time.time() - 3600
    os.utime(lock, (long_ago, long_ago))
    (found,) = machine.check_build_locks()
    assert found.is_ok is False and found.why == "delete that file" and "60 minutes" in found.text


def test_little_room_is_a_note_and_no_room_a_problem(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    for gib, expected in ((0.5, False), (5, None), (50, True)):
        monkeypatch.setattr("shutil.disk_usage", lambda _, gib=gib: usage(0, 0, gib * 2**30))
        assert next(machine.check_disk(str(tmp_path / "not" / "there"))).is_ok is expected
    monkeypatch.setattr("os.access", lambda *_: False)
    assert "cannot be written" in next(machine.check_disk(str(tmp_path))).text


def test_memory_is_known_without_psutil(monkeypatch):
    with_it = machine.free_memory_gib()
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert machine.free_memory_gib() == pytest.approx(with_it, rel=0.5)


def test_a_launchers_variables_are_looked_at(monkeypatch):
    assert states(machine.check_environment_variables()) == {"environment": True}
    monkeypatch.setenv("WORLD_SIZE", "two")
    (found,) = machine.check_environment_variables()
    assert found.is_ok is False and "WORLD_SIZE=two" in found.text


def test_a_port_in_use_is_a_note():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = next(network.check_ports(port))
        assert found.is_ok is None and f"port {port} is in use" in found.text
    assert next(network.check_ports(port)).is_ok is True


def test_launchers_are_those_of_this_python(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "other"))
    assert [f.text for f in network.check_launchers()] == ["not found"] * 2
    (tmp_path / "torchrun").write_text("")
    assert "torchrun is not on PATH" in list(network.check_launchers())[1].text


def test_the_hub_is_asked_only_where_it_may_be(monkeypatch):
    asked = []
    monkeypatch.setattr("urllib.request.urlopen", lambda *a, **_: asked.append(a) or 1 / 0)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert next(network.check_hub(3.0)).is_ok is True
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    assert next(network.check_hub(0.0)).is_ok is None
    assert asked == []

    def refuse(*_, **__):
        raise OSError("no route")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    found = next(network.check_hub(0.1))
    assert (
        found.is_ok is None and "does not answer (no route)" in found.text and "HF_HUB_OFFLINE=1" in found.why
    )


def fake_torch(*, count: int = 0, free: float = 0.0, cuda: str | None = None) -> SimpleNamespace:
    gpus = SimpleNamespace(
        is_available=lambda: count > 0,
        device_count=lambda: count,
        mem_get_info=lambda _: (free * 2**30, 80 * 2**30),
        get_device_capability=lambda _: (9, 0),
        get_device_name=lambda _: "GPU X",
        is_bf16_supported=lambda: True,
    )
    return SimpleNamespace(cuda=gpus, version=SimpleNamespace(cuda=cuda), __version__="9.9")


@pytest.mark.parametrize(
    ("torch", "driver", "expected"),
    [
        (fake_torch(), "", (None, "none: programs run on the CPU")),
        (fake_torch(), "GPU X, 555.1", (False, "built without CUDA")),
        (fake_torch(cuda="12.8"), "GPU X, 555.1", (False, "torch (CUDA 12.8) does not")),
        (fake_torch(count=1, free=79, cuda="12.8"), "GPU X, 555.1", (True, "79.0 of 80.0 GiB free")),
        (fake_torch(count=1, free=3, cuda="12.8"), "GPU X, 555.1", (None, "3.0 of 80.0 GiB free")),
    ],
)
def test_gpus_that_are_there_and_not_seen_are_a_problem(monkeypatch, torch, driver, expected):
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(accelerator, "read_driver", lambda: driver)
    found = next(accelerator.check_gpus(True))
    assert found.is_ok is expected[0] and expected[1] in found.text


def test_without_torch_and_deepspeed_the_rest_is_still_looked_at(monkeypatch):
    monkeypatch.setattr(accelerator, "read_driver", lambda: "GPU X, 555.1")
    found = [*accelerator.check_gpus(False), *accelerator.check_kernels(False)]
    assert "nvidia-smi: GPU X" in found[0].text and found[-1].text == "deepspeed is missing"


# ---------------------------------------------------------------------------------------------------------
# The self-test
# ---------------------------------------------------------------------------------------------------------

GOOD = {"losses": [2.0, 1.0], "num_tokens": 8, "device": "cpu", "dtype": "fp32", "train_seconds": 1.0,
        "generate_seconds": 0.5}  # fmt: skip


def watched(program: str, seconds: float = 5.0, import_seconds: float = 5.0) -> list[Finding]:
    return list(self_test.watch([sys.executable, "-c", program], seconds, import_seconds))


def test_what_the_process_found_is_told():
    found = watched(f"print('noise\\n{self_test.READY}\\n{self_test.DONE}', {json.dumps(json.dumps(GOOD))})")
    assert [f.is_ok for f in found] == [True, True] and "loss 2.000, after a step 1.000" in found[0].text


@pytest.mark.parametrize(
    ("change", "expected"), [({"losses": [1.0, 1.0]}, [False, True]), ({"num_tokens": 7}, [True, False])]
)
def test_a_step_that_learns_nothing_and_a_text_that_is_cut_are_problems(change, expected):
    assert [f.is_ok for f in self_test.judge(GOOD | change, 1.0)] == expected


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("raise SystemExit('no kernel image')", "the imports ended with code 1: no kernel image"),
        (
            f"print('{self_test.READY}', flush=True); raise MemoryError",
            "a text ended with code 1: MemoryError",
        ),
        (f"print('{self_test.READY}', flush=True); import os; os.abort()", "a text ended with code -6"),
    ],
)
def test_a_process_that_fails_is_told_with_its_last_line(program, said):
    (found,) = watched(program)
    assert found.is_ok is False and said in found.text


def test_a_process_that_hangs_is_ended():
    started = time.monotonic()
    (found,) = watched(f"print('{self_test.READY}', flush=True); import time; time.sleep(60)", seconds=0.3)
    assert found.is_ok is False and "took longer than 0.3 s" in found.text
    (found,) = watched("import time; time.sleep(60)", import_seconds=0.3)
    assert "the imports took longer than 0.3 s" in found.text and time.monotonic() - started < 30


def test_the_self_test_needs_its_packages():
    assert next(self_test.check(10.0, 10.0, ["deepspeed"])).text == "cannot be made without deepspeed"
    assert next(self_test.check(0.0, 10.0)).text == "not asked for"


@pytest.mark.slow
def test_a_step_is_trained_and_a_text_is_written():
    found = list(self_test.check(120.0, 300.0))
    assert [f.is_ok for f in found] == [True, True], [f.text for f in found]


# ---------------------------------------------------------------------------------------------------------
# The program
# ---------------------------------------------------------------------------------------------------------


def test_all_is_well_here(capsys, monkeypatch):
    monkeypatch.setattr(packages, "check_requirements", lambda: iter([Finding("requirements", "all", True)]))
    monkeypatch.setattr(machine, "check_build_locks", lambda: iter([Finding("build locks", "none", True)]))
    doctor.main([*QUIET, "--json"])
    lines = capsys.readouterr().out.splitlines()
    told = json.loads(lines[-1])
    assert told["ok"] is True and lines[-2] == "ok: this machine can run the programs"
    assert [line.split()[0] for line in lines[:-3]] == [f["state"] for f in told["findings"]]
    assert set(told["findings"][0]) == {"state", "name", "text", "why"}


@pytest.mark.parametrize(
    "lacking", [("torch", "transformers", "deepspeed"), ("torch", "psutil", "accelerate")]
)
def test_without_packages_it_says_so_and_leaves_no_traceback(lacking):
    program = (
        f"import sys\nfor name in {lacking!r}: sys.modules[name] = None\n"
        "from tools.doctor.__main__ import main\nmain(sys.argv[1:])"
    )
    command = [sys.executable, "-c", program, *QUIET, "--self_test_seconds", "5", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "Traceback" not in done.stderr + done.stdout
    told = {f["name"]: f for f in json.loads(done.stdout.splitlines()[-1])["findings"]}
    assert told["import torch"]["state"] == told["import deepspeed"]["state"] == "problem"
    assert told["import torch"]["why"] == 'pip install "torch==2.13.0"'
    assert "cannot be made without torch" in told["self-test"]["text"]
    assert {"memory", "disk: output", "ports", "build locks", "GPUs"} <= set(told)


def test_a_check_that_fails_is_a_problem_and_the_others_go_on(capsys, monkeypatch):
    def fail():
        raise PermissionError(13, "Permission denied", "somewhere")

    monkeypatch.setattr(machine, "check_memory", fail)
    with pytest.raises(SystemExit) as left:
        doctor.main(QUIET)
    printed = capsys.readouterr().out
    assert left.value.code == 1 and "problem memory" in printed and "Permission denied" in printed
    assert "self-test" in printed and "memory" in printed.splitlines()[-1]


@pytest.mark.parametrize("words", [["--jsno"], ["--self_test_seconds", "-1"], ["--hub_seconds", "x"]])
def test_bad_flags_are_told(capsys, words):
    with pytest.raises(SystemExit) as left:
        doctor.main(words)
    assert left.value.code == 2 and words[0] in capsys.readouterr().err


def test_a_line_has_state_name_text_and_cure():
    line = Finding("disk", "1 GiB free\x1b", False, "make room").line(False, "problem")
    assert line == f"problem {'disk':<25}1 GiB free\\x1b  (make room)"
