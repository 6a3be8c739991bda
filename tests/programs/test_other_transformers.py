"""The other version of transformers that requirements.txt accepts: what depends on its internals."""

import importlib.metadata
import subprocess
import sys

import pytest
from program_runs import ROOT, environment

OTHER = "5.23.0"
NAMES = ("packed_attention", "kv_cache", "tp_plans", "export", "value_model", "generate", "chat_templates")


@pytest.mark.slow
def test_the_earlier_version_passes_the_tests_of_its_internals(tmp_path):
    assert importlib.metadata.version("transformers") != OTHER
    words = ["--quiet", "--disable-pip-version-check", "--no-deps", "--target", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", "install", *words, f"transformers=={OTHER}"], check=True)
    files = [f"tests/unit/test_{name}.py" for name in (*NAMES, "families_page")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *files]
    variables = environment()
    variables["PYTHONPATH"] = str(tmp_path)
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout and " skipped" in done.stdout, "families_page is skipped by that version"
