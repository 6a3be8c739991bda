"""Standard streams that are closed, full, narrow or without a reader end no program."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
from common.flags.streams import harden_streams
harden_streams()
import os, sys
file = open({path!r}, "w")
print("out \\xfc \\u2603")
print("err \\xfc", file=sys.stderr)
try:
    os.write(2, b"written to 2\\n")
except OSError:
    pass
try:
    input()
except EOFError:
    pass
print("more", flush=True)
file.write("kept")
file.close()
"""


def run(redirection: str, tmp_path: Path, **environment: str) -> subprocess.CompletedProcess:
    (tmp_path / "program.py").write_text(PROGRAM.format(path=str(tmp_path / "file")))
    command = f"{sys.executable} {tmp_path / 'program.py'} {redirection}"
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)} | environment
    done = subprocess.run(["bash", "-c", command], capture_output=True, env=environment)
    assert (tmp_path / "file").read_text() == "kept", "another file has got a closed stream's number"
    return done


@pytest.mark.parametrize(
    "redirection", ["<&-", ">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-", "</dev/null | true", "2>/dev/full"]
)
def test_streams_survive_closed_output(redirection, tmp_path):
    done = run(redirection, tmp_path)
    assert done.returncode == 0 and b"Traceback" not in done.stderr + done.stdout


def test_streams_report_a_full_disk_once(tmp_path):
    done = run(">/dev/full </dev/null", tmp_path)
    assert done.returncode == 0
    assert done.stderr.count(b"standard output cannot be written: No space left on device") == 1


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_streams_escape_characters_missing_from_the_encoding(encoding, tmp_path):
    done = run("</dev/null", tmp_path, PYTHONIOENCODING=encoding)
    spelled = "out ü ☃".encode(encoding, "backslashreplace")
    assert done.returncode == 0 and done.stdout.splitlines() == [spelled, b"more"]
    assert done.stderr.splitlines() == ["err ü".encode(encoding, "backslashreplace"), b"written to 2"]


def test_every_program_begins_by_settling_its_streams():
    programs = {
        path: path.read_text().partition('if __name__ == "__main__":')[2]
        for name in ("*.py", "serving/*.py", "step?_*/*.py", "tools/**/*.py")
        for path in ROOT.glob(name)
    }
    programs = {path: end for path, end in programs.items() if end}
    assert len(programs) > 12
    for path, end in programs.items():
        assert re.search(
            r"run_tool\(main\)|run_program\(main(, shows_progress=False)?\)|^\s+run\(\)$", end, re.MULTILINE
        ), path
        assert end.strip() != "run()" or "run_program(main)" in path.read_text(), path
