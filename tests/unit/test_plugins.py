"""common/data/registry.py: --plugins finds modules, and says in one line why it cannot."""

import sys

import pytest

from common.data.registry import ADAPTERS, import_own_module, import_plugins, load_source
from common.flags.args import Problems

REGISTERS = """
from common.data.registry import Adapter, register_dataset

@register_dataset("team/plugged")
class Plugged(Adapter):
    def load(self):
        return [{"q": "hi", "a": "hello"}], None
    def get_prompt(self, row):
        return row["q"]
    def get_chosen(self, row):
        return row["a"]
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working folder, not on the import path; what is imported from it is forgotten at the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    ADAPTERS.pop("team/plugged", None)


def problems_of(*names):
    problems = Problems()
    import_plugins(list(names), problems)
    return problems.messages


@pytest.fixture
def package(here):
    (here / "my_pkg").mkdir()
    (here / "my_pkg" / "sets.py").write_text(REGISTERS)
    return here / "my_pkg"


def test_what_a_plugin_registers_can_be_named(package):
    assert problems_of("my_pkg.sets") == []
    source = load_source("team/plugged")
    (example,) = source.adapter.to_examples(source.train[0])
    assert (example.prompt[0].content, example.chosen) == ("hi", "hello")


def test_the_same_class_may_be_registered_twice_but_not_another_one(here, package):
    assert problems_of("my_pkg.sets", "my_pkg.sets") == []
    sys.modules.pop("my_pkg.sets")  # a reload
    assert problems_of("my_pkg.sets") == []
    sys.path.append(str(package))  # the same file under another name
    assert problems_of("sets") == []
    (here / "others.py").write_text(REGISTERS)
    (problem,) = problems_of("others")
    told = "--plugins others: importing it raised ValueError: data set name 'team/plugged' is"
    assert problem.startswith(f"{told} registered twice")


def test_the_working_folder_comes_last(here):
    (here / "json.py").write_text("raise RuntimeError('hides a library')\n")
    (here / "my_module.py").write_text("import json\nVALUE = json.dumps(1)\n")
    sys.modules.pop("json.tool", None)
    module = import_own_module("my_module")
    assert module.VALUE == "1" and sys.path[-1] == str(here)
    assert "hides" not in str(import_own_module("json.tool").__file__)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("absent", None, "there is no module absent; start from the folder that holds it"),
        ("folder/my_module.py", None, "named without path and .py; use folder.my_module"),
        ("mine", "import absent_library\n", "ModuleNotFoundError: No module named 'absent_library' ("),
        ("mine", "def f(:\n", "importing it raised SyntaxError: invalid syntax ("),
        ("mine", "import sys\nsys.exit('usage')\n", "importing it raised SystemExit: usage ("),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_problem(here, name, text, reason):
    if text is not None:
        (here / f"{name}.py").write_text(text)
    (problem,) = problems_of(name)
    assert problem.startswith(f"--plugins {name}: ") and reason in problem and "\n" not in problem
    if text is not None:
        line = text.rstrip("\n").count("\n") + 1
        assert problem.endswith(f"mine.py:{line}); mend it")
