"""The house rules that a program can check, and for each a made-up tree that breaks it and is caught.

A check is a function from a `Tree` to a list of complaints, each naming the file.
"""

import ast
import importlib.metadata
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = ("step1_sft", "step2_reward", "step3_ppo")
# The rooms of common, the lowest first, and what each may import.
ROOMS = {
    "common.flags": (),
    "common.ranks": (),
    "common.engine": ("common.flags", "common.ranks"),
    "common.data": ("common.flags", "common.ranks"),
    "common.models": ("common.data", "common.ranks"),
    "common.generation": ("common.data", "common.models", "common.ranks"),
    "common.runs": ("common.data", "common.flags", "common.models", "common.ranks"),
    "common.programs": (
        "common.data", "common.engine", "common.flags", "common.models", "common.ranks", "common.runs",
    ),
}  # fmt: skip
# Who may not import everything: entry points, pages, benchmarks and tests are not in the table.
ARROWS = ROOMS | dict.fromkeys(STEPS, tuple(ROOMS)) | {"serving": tuple(ROOMS), "tools": (*ROOMS, *STEPS)}
MAX_FILE_LINES, AIM_FILE_LINES = 420, 400
MAX_FUNCTION_LINES, AIM_FUNCTION_LINES = 90, 60
# Amounts that a change may lower. One that raises a number says why in its commit.
AMOUNTS = {
    "statements": 22_927,
    "statements that step 3 reaches": 13_368,
    "files that step 3 reaches": 129,
    "files that one file imports": 24,
    "assignments `a, b = x, y`": 125,
    "conditional expressions": 927,
    "test lines per 100 lines of code": 103,
}
PEER_ENVIRONMENTS = Path("benchmarks/make_peer_env.sh")

# What no file may name. The patterns are written so that this file does not match them itself.
FOREIGN = {
    "a path of one machine": r"(?<![\w.$~}/-])/(?:home|root|Users|work|workspace|mnt|scratch|tmp)/[\w.-]+",
    "a package registry": (
        r"\bpypi[.]|python[h]osted|artifact[o]ry|hf[-]mirror|HF_END[P]OINT|file[:]///|/simple/?(?=[\s\"'])"
        r"|-[-](?:extra-)?index-url|-[-]find-links|-[-]trusted-host|PIP_(?:EXTRA_)?INDEX[_]URL|PIP_FIND[_]LINKS"
    ),
    "a private network address": r"\b(?:10(?:[.]\d{1,3}){3}|192[.]168(?:[.]\d{1,3}){2})\b",
}


@dataclass(frozen=True)
class Tree:
    """A repository: its root and the files that git tracks or would track."""

    root: Path

    @cached_property
    def files(self) -> list[Path]:
        """Relative to the root."""
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        done = subprocess.run(command, cwd=self.root, capture_output=True, text=True, timeout=60, check=True)
        names = {Path(name) for name in done.stdout.split("\0") if name}
        return sorted(name for name in names if (self.root / name).is_file())

    def text(self, file: Path) -> str:
        data = (self.root / file).read_bytes()
        return "" if b"\0" in data else data.decode("utf-8", errors="replace")

    @cached_property
    def modules(self) -> dict[Path, ast.Module]:
        return {file: ast.parse(self.text(file)) for file in self.files if file.suffix == ".py"}

    @cached_property
    def imports(self) -> list[tuple[Path, int, str]]:
        """(file, line, dotted name) of all imports, wherever they are; `from a import b` gives a.b."""
        return list(self._find_imports())

    def _find_imports(self) -> Iterator[tuple[Path, int, str]]:
        for file, module in self.modules.items():
            for node in ast.walk(module):
                if isinstance(node, ast.Import):
                    yield from ((file, node.lineno, alias.name) for alias in node.names)
                elif isinstance(node, ast.ImportFrom):
                    base = file.parent.parts[: len(file.parts) - node.level] if node.level else ()
                    source = ".".join([*base, *([node.module] if node.module else [])])
                    yield from ((file, node.lineno, f"{source}.{alias.name}") for alias in node.names)
                elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                    if isinstance(node.args[0], ast.Constant):
                        yield file, node.lineno, str(node.args[0].value)


def room_of(parts: tuple[str, ...]) -> str:
    """Return the room of a module's dotted name: one of common, else its folder."""
    return ".".join(parts[:2]) if parts[0] == "common" else parts[0]


def check_arrows(tree: Tree) -> list[str]:
    """Rooms, steps, tools and servers import what `ARROWS` lists, and nothing else of the repository."""
    own = {file.parts[0].removesuffix(".py") for file in tree.modules}
    complaints = []
    for file in tree.modules:
        room = room_of(file.parts)
        if room not in ARROWS and file.parts[0] == "common" and file != Path("common/__init__.py"):
            complaints.append(f"{file}: a module of common stands in a room: {', '.join(ROOMS)}")
    for file, line, name in tree.imports:
        room, target = room_of(file.parts), room_of(tuple(name.split(".")))
        is_ours = name.split(".")[0] in own
        if is_ours and room in ARROWS and target not in (room, *ARROWS[room]):
            complaints.append(f"{file}:{line}: {room} must not import {name}")
    return complaints


def check_arrows_within_a_step(tree: Tree) -> list[str]:
    """main -> build_trainer -> trainer -> roles, rollout; only the first two import a trainer."""
    complaints = []
    for file, line, name in tree.imports:
        if file.parts[0] not in STEPS or not name.startswith(f"{file.parts[0]}."):
            continue
        module = name.split(".")[1]
        if module == "main":
            complaints.append(f"{file}:{line}: {name}: nothing imports a main")
        is_builder = file.name == "build_trainer.py" or "__main__" in tree.text(file)
        if module.endswith("_trainer") and not is_builder:
            complaints.append(f"{file}:{line}: {name}: only a program imports its trainer")
    return complaints


def check_pure_files_import_torch_at_most(tree: Tree) -> list[str]:
    """A PURE file may import another one: what it can reach is still torch and the standard library."""
    pure = {
        ".".join(file.with_suffix("").parts)
        for file, module in tree.modules.items()
        if file.parts[0] != "tests" and re.search(r"\bPURE\b", ast.get_docstring(module) or "")
    }
    return [
        f"{file}:{line}: a PURE file must not import {name}"
        for file, line, name in tree.imports
        if ".".join(file.with_suffix("").parts) in pure
        and name.split(".")[0] not in (*sys.stdlib_module_names, "torch")
        and not {name, name.rpartition(".")[0]} & pure
    ]


def check_no_file_is_named_utils(tree: Tree) -> list[str]:
    return [
        f"{file}: name it by what it holds"
        for file in tree.modules
        if {"utils", "util"} & {file.stem, *file.parts[:-1]}
    ]


def check_no_file_hides_a_library(tree: Tree) -> list[str]:
    """A program has its own folder first on sys.path, pytest its tests': a file there hides its namesake."""
    usual = {"datasets", "transformers", "deepspeed", "peft", "accelerate", "torch", "evaluate", "trl"}
    libraries = usual | set(sys.stdlib_module_names) | set(importlib.metadata.packages_distributions())
    hidden = [
        file
        for file in tree.modules
        if (file.parts[0] in STEPS and file.parts[1].removesuffix(".py") in libraries)
        or (file.parts[0] == "tests" and {"common", "common.py"} & set(file.parts))
    ]
    return [f"{file}: has the name of what a program imports" for file in hidden]


def lengths(tree: Tree) -> tuple[dict[str, int], dict[str, int]]:
    """Return the lines of the files and of the functions."""
    files = {str(file): len(tree.text(file).splitlines()) for file in tree.modules}
    functions = {
        f"{file}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
        for file, module in tree.modules.items()
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    return files, functions


def too_long(tree: Tree, file_lines: int, function_lines: int) -> list[str]:
    files, functions = lengths(tree)
    complaints = [f"{f}: {n} lines, at most {file_lines}" for f, n in files.items() if n > file_lines]
    return complaints + [
        f"{f}: {n} lines, at most {function_lines}" for f, n in functions.items() if n > function_lines
    ]


def check_lengths(tree: Tree) -> list[str]:
    return too_long(tree, MAX_FILE_LINES, MAX_FUNCTION_LINES)


def check_no_machine_and_no_registry_is_named(tree: Tree) -> list[str]:
    return [
        f"{file}: {match.group()!r} is {what}"
        for file in tree.files
        for what, pattern in FOREIGN.items()
        for match in re.finditer(pattern, tree.text(file))
    ]


def check_imported_libraries_are_required(tree: Tree) -> list[str]:
    """What is imported is named in a requirements file, not merely pulled in by a library that is.

    A benchmark's peer may also import what its environment is made of.
    """
    texts = "\n".join(tree.text(file) for file in tree.files if file.match("requirements*.txt"))
    required = {name.lower().replace("-", "_") for name in re.findall(r"^[\w-]+", texts, re.MULTILINE)}
    required |= {name.removesuffix("_py").removeprefix("py") for name in required}  # harper-py, PyYAML
    known = (
        required | set(sys.stdlib_module_names) | {file.parts[0].removesuffix(".py") for file in tree.modules}
    )
    beside = {(file.parent, file.stem) for file in tree.modules}  # pytest puts a test's folders on sys.path,
    shared = [Path("tests"), Path("tests/programs"), Path("tests/unit")]  # and pyproject.toml these
    complaints = []
    for file, line, name in tree.imports:
        top = name.split(".")[0]
        is_known = top.lower() in known
        if file.parts[0] in ("tests", "benchmarks"):  # traffic is counted on the tests' pretended GPU
            is_known |= any((folder, top) in beside for folder in (file.parent, *shared))
        if file.match("benchmarks/*_peer.py") or file.match("tests/judges/ask.py"):
            is_known |= f'"{top.replace("_", "-")}' in tree.text(PEER_ENVIRONMENTS)
        if not is_known:
            complaints.append(f"{file}:{line}: {top} is in no requirements file")
    return complaints


def is_statement(node: ast.AST) -> bool:
    """Whether the node is a statement other than a docstring."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return isinstance(node, ast.stmt) and not (is_text and isinstance(node.value.value, str))


def is_double_assignment(node: ast.AST) -> bool:
    sides = (node.targets[0], node.value) if isinstance(node, ast.Assign) else (None,)
    return all(isinstance(side, ast.Tuple) for side in sides)


def count_amounts(tree: Tree) -> dict[str, int]:
    """The numbers of `AMOUNTS`, of all Python files that are no tests."""
    code = {file: list(ast.walk(module)) for file, module in tree.modules.items() if file.parts[0] != "tests"}
    file_of = {".".join(file.with_suffix("").parts).removesuffix(".__init__"): file for file in code}
    imported: dict[Path, set[Path]] = {file: set() for file in code}
    for file, _, name in tree.imports:
        targets = {file_of.get(name), file_of.get(name.rpartition(".")[0])} - {None, file}
        if file in imported:
            imported[file] |= targets
    reached, waiting = set(), {Path("step3_ppo/main.py")} & code.keys()
    while waiting:
        reached |= waiting
        waiting = set().union(*(imported[file] for file in waiting)) - reached
    statements = {file: sum(map(is_statement, nodes)) for file, nodes in code.items()}
    nodes = [node for nodes in code.values() for node in nodes]
    lines = {file: tree.text(file).count("\n") for file in tree.modules}
    code_lines = sum(lines[file] for file in code)
    counts = (
        sum(statements.values()),
        sum(statements[file] for file in reached),
        len(reached),
        max(map(len, imported.values())),
        sum(map(is_double_assignment, nodes)),
        sum(isinstance(node, ast.IfExp) for node in nodes),
        round(100 * (sum(lines.values()) - code_lines) / max(code_lines, 1)),
    )
    return dict(zip(AMOUNTS, counts, strict=True))


CHECKS = [value for name, value in sorted(globals().items()) if name.startswith("check_")]
SOUND = {
    "requirements.txt": "torch>=2.13.0,<2.15\ntransformers~=5.23\n",
    "README.md": "Run `bash tests/run.sh`; 127.0.0.1. Packages come from PyPI. See a/work/b and $HOME/x.\n",
    "common/__init__.py": "",
    "common/models/tensor_ops.py": '"""Sums. PURE."""\nimport math\nimport torch.nn.functional as F\n',
    "common/models/loading.py": "import torch\nimport transformers\n\nfrom common.models import tensor_ops\n",
    "step1_sft/main.py": 'from step1_sft.sft_trainer import T\n\nif __name__ == "__main__":\n    T()\n',
    "step1_sft/sft_trainer.py": "from common.models import load\n\nfrom .arguments import SFTArguments\n",
    "step1_sft/arguments.py": "from dataclasses import dataclass\n",
    "step2_reward/pair_math.py": "",
    "step3_ppo/ppo_math.py": '"""PURE: PPO."""\nfrom common.models.tensor_ops import masked_sum\n',
    "step3_ppo/rewards/http.py": "import urllib.request\n",
    "serving/arena.py": "from common.generation.generate import generate\n",
    "tools/report.py": "import step3_ppo.arguments\n",
    "benchmarks/make_peer_env.sh": 'pip install "trl==1.16.0"\n',
    "benchmarks/trl_train_peer.py": "import trl\n",
    "tests/unit/test_models.py": "import torch\nfrom tiny_models import tiny\n",
    "tests/unit/tiny_models.py": "from common.models import load\n",
}
PURE = check_pure_files_import_torch_at_most
FOREIGN_NAMES = check_no_machine_and_no_registry_is_named
UNSOUND: list[tuple[Callable[[Tree], list[str]], str, str]] = [
    (check_arrows, "common/models/loading.py", "from step1_sft.arguments import SFTArguments\n"),
    (check_arrows, "common/models/loading.py", "def f():\n    import step3_ppo.main\n"),
    (check_arrows, "common/data/x.py", "from ...step2_reward import losses\n"),
    (check_arrows, "common/data/x.py", "import importlib\nimportlib.import_module('tools')\n"),
    (check_arrows, "common/x.py", ""),
    (check_arrows, "common/drawer/x.py", ""),
    (check_arrows, "common/ranks/x.py", "from common.models import tensor_ops\n"),
    (check_arrows, "common/models/x.py", "import common.generation.generate\n"),
    (check_arrows, "common/runs/x.py", "from tools.report import main\n"),
    (check_arrows, "step3_ppo/x.py", "import serving.arena\n"),
    (check_arrows, "tools/x.py", "import serving.arena\n"),
    (check_arrows, "step3_ppo/roles.py", "from ..step1_sft import arguments\n"),
    (check_arrows_within_a_step, "step1_sft/export.py", "from step1_sft import main\n"),
    (check_arrows_within_a_step, "step3_ppo/rollout.py", "from .ppo_trainer import PPOTrainer\n"),
    (PURE, "common/data/x.py", '"""PURE: sums."""\nimport torchvision as np\n'),
    (PURE, "common/models/x.py", '"""Sums. PURE."""\nfrom common.models import load\n'),
    (PURE, "common/data/x.py", '"""PURE"""\ndef f():\n    import transformers\n'),
    (check_no_file_is_named_utils, "step1_sft/utils.py", ""),
    (check_no_file_is_named_utils, "common/data/utils/text.py", ""),
    (check_no_file_hides_a_library, "step1_sft/datasets.py", ""),
    (check_no_file_hides_a_library, "step3_ppo/torch/__init__.py", ""),
    (check_no_file_hides_a_library, "tests/common/test_args.py", ""),
    (check_lengths, "common/data/x.py", "a = 1\n" * (MAX_FILE_LINES + 1)),
    (check_lengths, "tests/x.py", "class A:\n    async def f():\n" + "        a = 1\n" * MAX_FUNCTION_LINES),
    (FOREIGN_NAMES, "README.md", f"see `/{'home'}/ann/models`\n"),
    (FOREIGN_NAMES, "requirements.txt", f"-{'-'}index-url https://a.b\n"),
    (FOREIGN_NAMES, "run.sh", f"curl https://{'pypi'}.org/simple/torch\n"),
    (FOREIGN_NAMES, "run.sh", f"export PIP_FIND_{'LINKS'}=wheels\n"),
    (FOREIGN_NAMES, "run.sh", f"MASTER_ADDR={10}.0.3.4\n"),
    (check_imported_libraries_are_required, "common/data/x.py", "import pandas\n"),
    (check_imported_libraries_are_required, "step1_sft/x.py", "import sft_trainer\n"),
    (check_imported_libraries_are_required, "benchmarks/bench_x.py", "import trl\n"),
    (check_imported_libraries_are_required, "benchmarks/x_peer.py", "import verl\n"),
]


REPOSITORY = Tree(ROOT)


def make_tree(root: Path, files: dict[str, str]) -> Tree:
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return Tree(root)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_repository_keeps_the_rule(check: Callable[[Tree], list[str]]):
    assert check(REPOSITORY) == []


def test_a_sound_tree_passes(tmp_path: Path):
    tree = make_tree(tmp_path, SOUND | {".gitignore": "output/\n", "output/utils.py": ""})
    assert [complaint for check in CHECKS for complaint in check(tree)] == []


@pytest.mark.parametrize(
    ("check", "name", "text"), UNSOUND, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_violation_is_caught(check: Callable[[Tree], list[str]], name: str, text: str, tmp_path: Path):
    complaints = check(make_tree(tmp_path, SOUND | {name: text}))
    assert len(complaints) == 1 and name.removesuffix("/__init__.py").removesuffix(".py") in complaints[0]


def test_every_check_has_a_violation():
    assert {check for check, _, _ in UNSOUND} == set(CHECKS)


def test_report_what_is_above_the_aim():
    long = too_long(REPOSITORY, AIM_FILE_LINES, AIM_FUNCTION_LINES)
    if long:
        warnings.warn("above the aim, within the limit:\n  " + "\n  ".join(long), stacklevel=1)


def test_amounts_do_not_grow():
    counts = count_amounts(REPOSITORY)
    assert {name: count for name, count in counts.items() if count > AMOUNTS[name]} == {}


def test_amounts_by_hand(tmp_path: Path):
    files = {
        "step3_ppo/main.py": '"""Text."""\nfrom common import a\nif a.b:\n    c, d = 1, 2\n',
        "common/a.py": "b = 1 if True else 0\n",
        "step1_sft/main.py": "import common.a\nx, y = b\n",
        "tests/test_a.py": "a, b = 1, 2\n" * 4,
    }
    counts = count_amounts(make_tree(tmp_path, files))
    assert list(counts.values()) == [6, 4, 2, 1, 1, 1, round(100 * 4 / 7)]
