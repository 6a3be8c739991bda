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
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = ("step1_sft", "step2_reward", "step3_ppo")
ABOVE_COMMON = (
    *STEPS, "train", "chat", "arena", "export", "serving", "tools", "benchmarks", "docs", "examples",
    "training_scripts", "tests",
)  # fmt: skip
ABOVE = ("tools", "serving")
# The rooms of common from the lowest floor to the highest, and the rooms that each may import.
ROOMS = {
    "flags": (),
    "ranks": (),
    "engine": ("flags", "ranks"),
    "models": ("data", "ranks"),
    "data": ("flags", "ranks"),
    "generation": ("data", "models", "ranks"),
    "runs": ("data", "flags", "models", "ranks"),
    "programs": ("data", "engine", "flags", "models", "ranks", "runs"),
}
MAX_FILE_LINES, AIM_FILE_LINES = 420, 400
MAX_FUNCTION_LINES, AIM_FUNCTION_LINES = 90, 60

# The patterns are written so that this file does not match them itself.
MACHINE_PATH = re.compile(r"(?<![\w.$~}/-])/(?:home|root|Users|work|workspace|mnt|scratch|tmp)/[\w.-]+")
REGISTRY = re.compile(
    r"\bpypi[.]|python[h]osted|artifact[o]ry|hf[-]mirror|HF_END[P]OINT|file[:]///|/simple/?(?=[\s\"'])"
    r"|-[-](?:extra-)?index-url|-[-]find-links|-[-]trusted-host|PIP_(?:EXTRA_)?INDEX[_]URL|PIP_FIND[_]LINKS"
)
PRIVATE_ADDRESS = re.compile(r"\b(?:10(?:[.]\d{1,3}){3}|192[.]168(?:[.]\d{1,3}){2})\b")


@dataclass(frozen=True)
class Tree:
    """A repository: its root and the files it tracks or would track."""

    root: Path
    files: list[Path]  # relative to the root

    @classmethod
    def at(cls, root: Path) -> "Tree":
        if (root / ".git").exists():
            command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
            done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)
            if done.returncode == 0:
                names = {Path(name) for name in done.stdout.split("\0") if name}
                return cls(root, sorted(name for name in names if (root / name).is_file()))
        hidden = {".git", ".venv", "__pycache__", "output"}
        paths = [path.relative_to(root) for path in root.rglob("*") if path.is_file()]
        return cls(root, sorted(path for path in paths if not hidden & set(path.parts)))

    def text(self, file: Path) -> str:
        data = (self.root / file).read_bytes()
        return "" if b"\0" in data else data.decode("utf-8", errors="replace")

    def modules(self) -> Iterator[tuple[Path, ast.Module]]:
        for file in self.files:
            if file.suffix == ".py":
                yield file, ast.parse(self.text(file), filename=str(file))


def imports(file: Path, module: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of all imports, wherever they stand; `from a import b` gives a.b."""
    package = file.parent.parts
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            if ast.unparse(node.func) in ("importlib.import_module", "import_module", "__import__"):
                yield node.lineno, str(node.args[0].value)


def is_program(module: ast.Module) -> bool:
    return any(isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in module.body)


def is_pure(module: ast.Module) -> bool:
    return re.search(r"\bPURE\b", ast.get_docstring(module) or "") is not None


def check_common_imports_nothing_above_it(tree: Tree) -> list[str]:
    return [
        f"{file}:{line}: common must not import {name}: it never knows which step is running"
        for file, module in tree.modules()
        if file.parts[0] == "common"
        for line, name in imports(file, module)
        if name.split(".")[0] in ABOVE_COMMON
    ]


def check_rooms_and_arrows_of_common(tree: Tree) -> list[str]:
    """Every module of common stands in a room, and a room imports only what `ROOMS` lists."""
    complaints = []
    for file, module in tree.modules():
        if file.parts[0] != "common":
            continue
        room = file.parts[1]
        if len(file.parts) > 2 and room not in ROOMS:
            complaints.append(f"{file}: {room} is no room of common: {', '.join(ROOMS)}")
        elif len(file.parts) == 2 and room != "__init__.py":
            complaints.append(f"{file}: a module of common stands in a room")
        for line, name in imports(file, module):
            target = (name.split(".") + [""])[1]
            if (
                name.startswith("common.")
                and target in ROOMS
                and target not in (room, *ROOMS.get(room, ROOMS))
            ):
                complaints.append(f"{file}:{line}: {room} must not import {target}")
    return complaints


def check_nothing_imports_tools_and_serving(tree: Tree) -> list[str]:
    return [
        f"{file}:{line}: {name}: only the entry points import {name.split('.')[0]}"
        for file, module in tree.modules()
        if file.parts[0] in ("common", *STEPS, *ABOVE)
        for line, name in imports(file, module)
        if name.split(".")[0] in ABOVE and name.split(".")[0] != file.parts[0]
    ]


def check_steps_never_import_one_another(tree: Tree) -> list[str]:
    return [
        f"{file}:{line}: a step must not import {name} of another step; what both need belongs into common"
        for file, module in tree.modules()
        if file.parts[0] in STEPS
        for line, name in imports(file, module)
        if name.split(".")[0] in STEPS and name.split(".")[0] != file.parts[0]
    ]


def check_arrows_point_down_within_a_step(tree: Tree) -> list[str]:
    """main -> trainer -> roles, rollout: nothing imports a main, only a program imports its trainer."""
    complaints = []
    for file, module in tree.modules():
        if file.parts[0] not in STEPS:
            continue
        for line, name in imports(file, module):
            parts = name.split(".")
            if parts[0] == file.parts[0] and "main" in parts[1:2]:
                complaints.append(f"{file}:{line}: {name}: nothing imports a main")
            if any(part.endswith("_trainer") for part in parts[1:2]) and not is_program(module):
                complaints.append(f"{file}:{line}: {name}: only a program imports its trainer")
    return complaints


def check_pure_files_import_torch_at_most(tree: Tree) -> list[str]:
    """A PURE file may import another one: what it can reach is still torch and the standard library."""
    modules = dict(tree.modules())
    pure = {".".join(file.with_suffix("").parts) for file, module in modules.items() if is_pure(module)}
    complaints = []
    for file, module in modules.items():
        if not is_pure(module) or file.parts[0] == "tests":
            continue
        for line, name in imports(file, module):
            is_pure_module = name in pure or name.rpartition(".")[0] in pure
            if name.split(".")[0] not in (*sys.stdlib_module_names, "torch") and not is_pure_module:
                complaints.append(f"{file}:{line}: a PURE file must not import {name}")
    return complaints


def check_no_file_is_named_utils(tree: Tree) -> list[str]:
    return [
        f"{file}: name it by what it holds"
        for file in tree.files
        if {"utils", "util"} & {file.stem, *file.parts[:-1]} and file.suffix == ".py"
    ]


def check_no_step_file_hides_a_library(tree: Tree) -> list[str]:
    """A program starts with its own folder first on sys.path: a file there hides its namesake."""
    usual = {"datasets", "transformers", "deepspeed", "peft", "accelerate", "torch", "evaluate", "trl"}
    libraries = usual | set(sys.stdlib_module_names) | set(importlib.metadata.packages_distributions())
    names = {
        (file.parts[0], file.parts[1].removesuffix(".py"))
        for file in tree.files
        if file.suffix == ".py" and file.parts[0] in STEPS
    }
    return [
        f"{step}/{name}: has the name of an importable library"
        for step, name in sorted(names)
        if name in libraries
    ]


def check_no_tests_common(tree: Tree) -> list[str]:
    hiding = [
        file for file in tree.files if file.parts[0] == "tests" and {"common", "common.py"} & set(file.parts)
    ]
    return [
        f"{file}: pytest puts the test folders first on sys.path, so it hides the package" for file in hiding
    ]


def function_lengths(tree: Tree) -> Iterator[tuple[str, int]]:
    for file, module in tree.modules():
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{file}:{node.lineno} {node.name}", (node.end_lineno or node.lineno) - node.lineno + 1


def file_lengths(tree: Tree) -> Iterator[tuple[str, int]]:
    for file in tree.files:
        if file.suffix == ".py":
            yield str(file), len(tree.text(file).splitlines())


def check_lengths(tree: Tree) -> list[str]:
    files = [f"{f}: {n} lines, at most {MAX_FILE_LINES}" for f, n in file_lengths(tree) if n > MAX_FILE_LINES]
    functions = [(f, n) for f, n in function_lengths(tree) if n > MAX_FUNCTION_LINES]
    return files + [f"{f}: {n} lines, at most {MAX_FUNCTION_LINES}" for f, n in functions]


def check_no_machine_and_no_registry_is_named(tree: Tree) -> list[str]:
    kinds = (
        (MACHINE_PATH, "a path of one machine"),
        (REGISTRY, "a package registry"),
        (PRIVATE_ADDRESS, "a private network address"),
    )
    return [
        f"{file}:{number}: {match.group()!r} is {what}"
        for file in tree.files
        for number, line in enumerate(tree.text(file).splitlines(keepends=True), start=1)
        for pattern, what in kinds
        for match in pattern.finditer(line)
    ]


PEER_ENVIRONMENTS = Path("benchmarks/make_peer_env.sh")


def check_imported_libraries_are_required(tree: Tree) -> list[str]:
    """What is imported is named in a requirements file, not merely pulled in by a library that is.

    A benchmark's peer may also import what its environment is made of.
    """
    lines = [
        line
        for file in tree.files
        if file.match("requirements*.txt")
        for line in tree.text(file).splitlines()
    ]
    required = {m[0].lower().replace("-", "_") for line in lines if (m := re.match(r"[\w-]+", line))}
    own = {file.parts[0].removesuffix(".py") for file in tree.files if file.suffix == ".py"}
    beside = {(file.parent, file.stem) for file in tree.files}  # pytest puts a test's folders on sys.path
    complaints = []
    for file, module in tree.modules():
        for line, name in imports(file, module):
            top = name.split(".")[0]
            folders = (file.parent, Path("tests")) if file.parts[0] == "tests" else ()
            is_ours = top in own or any((folder, top) in beside for folder in folders)
            is_ours |= file.match("benchmarks/*_peer.py") and f'"{top}==' in tree.text(PEER_ENVIRONMENTS)
            if top not in sys.stdlib_module_names and top.lower() not in required and not is_ours:
                complaints.append(f"{file}:{line}: {top} is in no requirements file")
    return complaints


CHECKS = [value for name, value in sorted(globals().items()) if name.startswith("check_")]
SOUND = {
    "requirements.txt": "torch==2.13.0\ntransformers~=5.23\n",
    "README.md": "Run `bash tests/run.sh`; 127.0.0.1. Packages come from PyPI. See a/work/b and $HOME/x.\n",
    "common/__init__.py": "",
    "common/models/tensor_ops.py": '"""Sums. PURE."""\nimport math\nimport torch.nn.functional as F\n',
    "common/models/loading.py": "import torch\nimport transformers\n\nfrom common.models import tensor_ops\n",
    "step1_sft/__init__.py": "",
    "step1_sft/main.py": 'from step1_sft.sft_trainer import T\n\nif __name__ == "__main__":\n    T()\n',
    "step1_sft/sft_trainer.py": "from common.models import load\n\nfrom .arguments import SFTArguments\n",
    "step1_sft/arguments.py": "from dataclasses import dataclass\n",
    "step3_ppo/ppo_math.py": '"""PURE: PPO."""\nfrom common.models.tensor_ops import masked_sum\n',
    "step3_ppo/rewards/http.py": "import urllib.request\n",
    "benchmarks/make_peer_env.sh": 'pip install "trl==1.16.0"\n',
    "benchmarks/trl_train_peer.py": "import trl\n",
    "tests/unit/test_models.py": "import torch\nfrom tiny_models import tiny\n",
    "tests/unit/tiny_models.py": "from common.models import load\n",
}
UNSOUND: list[tuple[Callable[[Tree], list[str]], str, str]] = [
    (
        check_common_imports_nothing_above_it,
        "common/models/loading.py",
        "from step1_sft.arguments import SFTArguments\n",
    ),
    (
        check_common_imports_nothing_above_it,
        "common/models/loading.py",
        "def f():\n    import step3_ppo.main\n",
    ),
    (check_common_imports_nothing_above_it, "common/data/x.py", "from ...step2_reward import ranking_loss\n"),
    (
        check_common_imports_nothing_above_it,
        "common/data/x.py",
        "import importlib\nimportlib.import_module('chat')\n",
    ),
    (check_rooms_and_arrows_of_common, "common/x.py", ""),
    (check_rooms_and_arrows_of_common, "common/drawer/x.py", ""),
    (check_rooms_and_arrows_of_common, "common/ranks/x.py", "from common.models import tensor_ops\n"),
    (check_rooms_and_arrows_of_common, "common/models/x.py", "import common.generation.generate\n"),
    (check_nothing_imports_tools_and_serving, "common/runs/x.py", "from tools.report import main\n"),
    (check_nothing_imports_tools_and_serving, "step3_ppo/x.py", "import serving.arena_app\n"),
    (check_nothing_imports_tools_and_serving, "tools/x.py", "import serving.arena_app\n"),
    (check_steps_never_import_one_another, "step3_ppo/roles.py", "import step2_reward.losses\n"),
    (check_steps_never_import_one_another, "step3_ppo/roles.py", "from ..step1_sft import arguments\n"),
    (check_arrows_point_down_within_a_step, "step1_sft/export.py", "from step1_sft import main\n"),
    (check_arrows_point_down_within_a_step, "step3_ppo/rollout.py", "from .ppo_trainer import PPOTrainer\n"),
    (check_pure_files_import_torch_at_most, "common/data/x.py", '"""PURE: sums."""\nimport numpy as np\n'),
    (
        check_pure_files_import_torch_at_most,
        "common/data/x.py",
        '"""Sums. PURE."""\nfrom common.models import load\n',
    ),
    (
        check_pure_files_import_torch_at_most,
        "common/data/x.py",
        '"""PURE"""\ndef f():\n    import transformers\n',
    ),
    (check_no_file_is_named_utils, "step1_sft/utils.py", ""),
    (check_no_file_is_named_utils, "common/utils/text.py", ""),
    (check_no_step_file_hides_a_library, "step1_sft/datasets.py", ""),
    (check_no_step_file_hides_a_library, "step2_reward/transformers.py", ""),
    (check_no_step_file_hides_a_library, "step3_ppo/queue.py", ""),
    (check_no_step_file_hides_a_library, "step3_ppo/torch/__init__.py", ""),
    (check_no_tests_common, "tests/common/test_args.py", ""),
    (check_no_tests_common, "tests/unit/common.py", ""),
    (check_lengths, "common/data/x.py", "a = 1\n" * (MAX_FILE_LINES + 1)),
    (check_lengths, "common/data/x.py", "def f():\n" + "    a = 1\n" * MAX_FUNCTION_LINES),
    (check_lengths, "tests/x.py", "class A:\n    async def f():\n" + "        a = 1\n" * MAX_FUNCTION_LINES),
    (check_no_machine_and_no_registry_is_named, "README.md", f"see `/{'home'}/ann/models`\n"),
    (check_no_machine_and_no_registry_is_named, "run.sh", f'OUT="/{"tmp"}/out"\n'),
    (check_no_machine_and_no_registry_is_named, "requirements.txt", f"-{'-'}index-url https://a.b\n"),
    (check_no_machine_and_no_registry_is_named, "run.sh", f"curl https://{'pypi'}.org/simple/torch\n"),
    (check_no_machine_and_no_registry_is_named, "run.sh", f"export PIP_FIND_{'LINKS'}=wheels\n"),
    (check_no_machine_and_no_registry_is_named, "run.sh", f"MASTER_ADDR={10}.0.3.4\n"),
    (check_imported_libraries_are_required, "common/data/x.py", "import pandas\n"),
    (check_imported_libraries_are_required, "step1_sft/x.py", "import sft_trainer\n"),
    (check_imported_libraries_are_required, "benchmarks/bench_x.py", "import trl\n"),
    (check_imported_libraries_are_required, "benchmarks/x_peer.py", "import verl\n"),
]


def make_tree(root: Path, files: dict[str, str]) -> Tree:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return Tree.at(root)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_repository_keeps_the_rule(check: Callable[[Tree], list[str]]):
    assert check(Tree.at(ROOT)) == []


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_sound_tree_passes(check: Callable[[Tree], list[str]], tmp_path: Path):
    assert check(make_tree(tmp_path, SOUND)) == []


@pytest.mark.parametrize(
    ("check", "name", "text"), UNSOUND, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_violation_is_caught(check: Callable[[Tree], list[str]], name: str, text: str, tmp_path: Path):
    complaints = check(make_tree(tmp_path, SOUND | {name: text}))
    assert len(complaints) == 1 and name.removesuffix("/__init__.py").removesuffix(".py") in complaints[0]


def test_every_check_has_a_violation():
    assert {check for check, _, _ in UNSOUND} == set(CHECKS)


def test_ignored_files_are_not_looked_at(tmp_path: Path):
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    tree = make_tree(tmp_path, {".gitignore": "output/\n", "output/utils.py": "", "common/utils.py": ""})
    assert tree.files == [Path(".gitignore"), Path("common/utils.py")]


def test_report_what_is_above_the_aim():
    tree = Tree.at(ROOT)
    long = [
        f"{name}: {count} lines (aim {AIM_FILE_LINES})"
        for name, count in file_lengths(tree)
        if count > AIM_FILE_LINES
    ]
    long += [
        f"{name}: {count} lines (aim {AIM_FUNCTION_LINES})"
        for name, count in function_lengths(tree)
        if count > AIM_FUNCTION_LINES
    ]
    if long:
        warnings.warn("above the aim, within the limit:\n  " + "\n  ".join(long), stacklevel=1)
