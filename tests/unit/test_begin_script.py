"""The first line and the help of a program, which wait for no library."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = ("step1_sft/main.py", "step2_reward/main.py", "step3_ppo/main.py", "step2_reward/rw_eval.py")
PROGRAMS = (*STEPS, "chat.py", "arena.py", "export.py")
OTHERS = ("train.py", "serving/prompt_eval.py", "serving/reward_server.py")
TOOLS = ("check_data", "check_model", "doctor", "plan", "replay", "report", "translate")
COMMANDS = [*((name,) for name in (*PROGRAMS, *OTHERS)), *(("-m", f"tools.{name}") for name in TOOLS)]
WORDS = {
    "step3_ppo/main.py": ("--actor_model_name_or_path", "m"),
    "chat.py": ("m",),
    "arena.py": ("m",),
    "export.py": ("m", "--output", "x"),
}
LIMIT = 1.0  # seconds of the processor; it takes 0.15, and 6 with torch and transformers


@pytest.fixture
def call(tmp_path):
    """Run a program where importing torch fails."""
    for name in ("torch", "transformers", "matplotlib"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} is imported')\n")

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess:
        env = os.environ | {"PYTHONPATH": str(tmp_path)} | variables
        command = [sys.executable, *words]
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)

    return run


@pytest.mark.parametrize("program", [*STEPS, "step2_reward/dpo/main.py"])
def test_help_loads_no_library(call, program):
    short, whole = call(program, "--help"), call(program, "--help_all")
    assert (short.returncode, short.stderr) == (whole.returncode, whole.stderr) == (0, "")
    assert short.stdout.startswith(f"usage: {program.replace('/dpo', '')} [--flag value ...]\n")
    assert "model_name_or_path" in short.stdout and len(whole.stdout) >= len(short.stdout) > 1000


def seconds_of(call, *words: str, **variables: str) -> tuple[subprocess.CompletedProcess, float]:
    """The ended program, and the time that it took of the processor."""
    before = os.times()
    done = call(*words, **variables)
    now = os.times()
    return done, now.children_user + now.children_system - before.children_user - before.children_system


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[-1])
def test_flags_wait_for_no_library(call, command):
    """The help, the version, an unknown flag beside a missing one: no library, and no second."""
    texts = {}
    for word, code in {"--help": 0, "--version": 0, "--mistaken": 2}.items():
        done, seconds = seconds_of(call, *command, word)
        texts[word] = done.stdout + done.stderr
        has_flag = word != "--version" or command[-1] not in ("tools.doctor", "tools.translate")
        assert (done.returncode, seconds < LIMIT) == (code if has_flag else 2, True), (seconds, texts)
        assert "is imported" not in texts[word] and "loading torch" not in texts[word]
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert command[-1] in ("tools.doctor", "tools.translate") or texts["--version"] == f"triptych {version}\n"
    is_of_step = command[-1] in ("tools.check_data", "tools.plan")  # whose flags are not known without it
    assert ("--stage is required" if is_of_step else "--mistaken") in texts["--mistaken"]


def test_the_flags_of_a_tool_are_those_of_its_step(call):
    words = ("-m", "tools.plan", "--stage", "1", "--model_name_or_path", "m")
    done, seconds = seconds_of(call, *words, "--actor_zero_stage", "1")
    assert done.returncode == 2 and "unknown flag --actor_zero_stage" in done.stderr and seconds < LIMIT
    assert "torch is imported" in call(*words).stderr


def test_a_file_of_flags_is_read_before_the_libraries_and_a_pipe_only_once(call, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model_name_or_path: m\nmax_seq_lne: 4\n")
    done = call("step1_sft/main.py", "--config", str(file))
    assert done.returncode == 2 and "line 2: unknown flag --max_seq_lne; did you mean" in done.stderr
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for words in (["--config", str(pipe)], [f"--config={pipe}"]):  # read here, it would wait for a writer
        assert "torch is imported" in call("step1_sft/main.py", *words).stderr


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_loaded_is_said_first_and_by_one_rank(call, program):
    words = WORDS.get(program, ("--model_name_or_path", "m"))
    done = call(program, *words)
    assert done.stderr.startswith("[   0 s] loading torch, transformers and deepspeed\nTraceback")
    assert "torch is imported" in done.stderr
    assert call(program, *words, RANK="1").stderr.startswith("Traceback")


@pytest.mark.parametrize(
    ("given", "seen"),
    [({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "unset")],
)
def test_waiting_threads_leave_the_cores_to_others_unless_told(call, tmp_path, monkeypatch, given, seen):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    (tmp_path / "torch.py").write_text(
        "import os; raise ImportError(os.environ.get('GOMP_SPINCOUNT', 'unset'))\n"
    )
    for program in PROGRAMS:
        words = WORDS.get(program, ("--model_name_or_path", "m"))
        assert call(program, *words, **given).stderr.endswith(f"ImportError: {seen}\n")


INTERRUPT = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"


@pytest.mark.parametrize("words", [("step1_sft/main.py", "--model_name_or_path", "m"), ("chat.py", "m")])
def test_ctrl_c_while_libraries_are_loaded_ends_without_a_traceback(tmp_path, words):
    (tmp_path / "torch.py").write_text(f"{INTERRUPT}raise ImportError\n")
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 130 and "Traceback" not in done.stderr, done.stderr


def test_ctrl_c_in_a_tool_runs_its_cleanup_and_leaves_a_line():
    code = f"""
from common.flags.streams import exit_at_ctrl_c, run_tool
def main():
    try:
        exec({INTERRUPT!r})
    finally:
        print("cleaned up")
exit_at_ctrl_c()
run_tool(main)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "cleaned up\n", "stopped by Ctrl-C\n")
