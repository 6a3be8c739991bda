"""Locks of killed builds of DeepSpeed's kernels: found, never touched, told before a run waits for them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from common.flags.args import Problems
from common.programs import build_locks, startup
from common.programs.build_locks import find_locks, find_stale_locks, lock_note, lock_problems, needed_ops
from step1_sft.arguments import SFTArguments
from step3_ppo.arguments import PPOArguments

HOUR = 3600.0


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """Return the folder that kernels are compiled under."""
    folder = tmp_path / "kernels"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
    return folder


def leave_lock(root: Path, op: str, *, age: float = HOUR) -> Path:
    """Return the lock that a killed build has left so many seconds ago, with what else it wrote."""
    folder = root / op
    folder.mkdir(parents=True)
    for name in ("build.ninja", "lock"):
        (folder / name).write_text("")
        os.utime(folder / name, (time.time() - age,) * 2)
    return folder / "lock"


def test_old_lock_is_stale(root):
    lock = leave_lock(root, "fused_adam")
    assert find_stale_locks(frozenset(["fused_adam", "cpu_adam"])) == [lock]
    assert find_stale_locks(frozenset(["cpu_adam"])) == []
    assert lock.exists()


def test_young_lock_may_be_in_use_elsewhere(root):
    lock = leave_lock(root, "fused_adam", age=60)
    (found,) = find_locks(frozenset(["fused_adam"]))
    assert found.path == lock and not found.is_stale and 55 < found.silent_seconds < 90


def test_lock_beside_a_fresh_file_is_in_use(root):
    lock = leave_lock(root, "fused_adam")
    (lock.parent / "kernel.o").write_text("the compiler has just written this")
    assert find_stale_locks(frozenset(["fused_adam"])) == []


def test_lock_that_a_process_holds_is_in_use(root):
    """However long a compiler is silent, torch holds the file open meanwhile."""
    lock = leave_lock(root, "fused_adam")
    code = "import os, sys, time; os.open(sys.argv[1], os.O_RDONLY); print(flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code, str(lock)], stdout=subprocess.PIPE)
    try:
        holder.stdout.readline()
        assert find_locks(frozenset(["fused_adam"])) == []
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    assert find_stale_locks(frozenset(["fused_adam"])) == [lock]


def test_torch_leaves_and_holds_such_a_lock(root):
    """What is looked for is what torch does: where the file is, that it is held open and outlives a kill."""
    code = """
import os, sys
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton
folder = cpp_extension._get_build_directory("fused_adam", False)
baton = FileBaton(os.path.join(folder, "lock"))
assert baton.try_acquire()
print(flush=True)
sys.stdin.read()
"""
    builder = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(os.environ)
    )
    try:
        builder.stdout.readline()
        assert (root / "fused_adam/lock").is_file()
        assert find_locks(frozenset(["fused_adam"])) == []
    finally:
        builder.send_signal(signal.SIGKILL)
        builder.communicate()
    assert [lock.path for lock in find_locks(frozenset(["fused_adam"]))] == [root / "fused_adam/lock"]


def test_default_folder_is_torchs(tmp_path, monkeypatch):
    from torch.utils import cpp_extension

    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    made = Path(cpp_extension._get_build_directory("fused_adam", False))
    monkeypatch.setenv("XDG_CACHE_HOME", str(made.parents[2]))
    assert made.parent in build_locks.build_folders()


@pytest.mark.parametrize(
    ("ds_config", "op"),
    [
        ({"optimizer": {"type": "AdamW"}}, "fused_adam"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "async_io"),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "cpu_adam"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "quantizer"),
        ({"compile": {"deepcompile": True}}, "dc"),
    ],
)
def test_keys_that_compile(root, ds_config, op):
    needed = needed_ops(ds_config, frozen_is_sharded=True)
    assert op in needed
    lock = leave_lock(root, op)
    (problem,) = lock_problems(needed)
    assert str(lock) in problem and "delete that file" in problem
    assert lock_note(needed, frozenset([op])) == ""


@pytest.mark.parametrize(
    "ds_config",
    [
        {},
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
        {"zero_optimization": {"zero_quantized_weights": False}},
        {"zero_optimization": "none", "compile": []},
        {"optimizer": {"type": "AdamW"}},  # the trained engines have torch's
    ],
)
def test_keys_that_compile_nothing(root, ds_config):
    lock = leave_lock(root, "fused_adam")
    assert needed_ops(ds_config) == frozenset() and lock_problems(needed_ops(ds_config)) == []
    assert str(lock) in lock_note(needed_ops(ds_config), frozenset(["fused_adam"]))


def test_note_on_a_young_lock_that_is_waited_for(root):
    lock = leave_lock(root, "fused_adam", age=10)
    needed = frozenset(["fused_adam"])
    assert lock_problems(needed) == []
    assert f"waits for {lock}" in lock_note(needed, needed)


def check_run(args: Any) -> list[str]:
    problems = Problems()
    startup.check_run(args, {}, problems)
    return problems.messages


@pytest.mark.parametrize(("stage", "is_refused"), [(0, False), (3, True)])
def test_a_run_is_refused_before_it_waits(root, tmp_path, capsys, stage, is_refused):
    """An optimizer section: step 3 has frozen models, and under ZeRO 3 DeepSpeed gives them one."""
    lock = leave_lock(root, "fused_adam")
    ds_config = str(tmp_path / "ds.json")
    (tmp_path / "ds.json").write_text(json.dumps({"optimizer": {"type": "AdamW"}}))
    roles = {"actor_model_name_or_path": "m", "critic_zero_stage": stage}
    messages = check_run(PPOArguments(**roles, ds_config=ds_config))
    assert [str(lock) in message and "--ds_config" in message for message in messages] == [True] * is_refused
    assert check_run(PPOArguments(**roles)) == []
    assert check_run(SFTArguments(model_name_or_path="m", zero_stage=stage, ds_config=ds_config)) == []
    assert capsys.readouterr().err == ""


def test_the_stage_may_stand_in_the_configuration_itself(root, tmp_path):
    leave_lock(root, "fused_adam")
    sections = {"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}
    (tmp_path / "ds.json").write_text(json.dumps(sections))
    args = {"actor_model_name_or_path": "m", "ds_config": str(tmp_path / "ds.json")}
    assert len(check_run(PPOArguments(**args))) == 1


def test_a_run_that_does_not_need_it_says_so_once(root, capsys):
    lock = leave_lock(root, "fused_adam")
    startup.print_notes(SFTArguments(model_name_or_path="m"))
    assert capsys.readouterr().err.count(str(lock)) == 1
    lock.unlink()
    startup.print_notes(SFTArguments(model_name_or_path="m"))
    assert capsys.readouterr().err == ""
