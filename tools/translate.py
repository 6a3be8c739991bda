"""Translates a command or YAML file of TRL, OpenRLHF or LLaMA-Factory into ours.

    python -m tools.translate llama3_lora_ppo.yaml
    python -m tools.translate accelerate launch --num_processes 2 ppo.py --sft_model_path M ...

Prints our command, which also sets what they do by default and we do not. Lines that begin with # have each
of their flags without a counterpart, and what to set by hand. The exit code is 2 for a flag, value or file
that is not understood. The tables of flags are in their_flags/.
"""

import difflib
import re
import shlex
import sys
from collections.abc import Sequence
from fractions import Fraction
from math import ceil, prod
from pathlib import Path
from typing import Any

import yaml

from common.flags.args import Problems, default_of, field_type, parse_args
from common.flags.streams import run_tool
from tools.step_flags import STEPS

FILES = [
    yaml.safe_load(p.read_text(encoding="utf-8")) for p in sorted(Path(__file__).parent.glob("their_flags/*"))
]
PROGRAMS = {name: program for file in FILES for name, program in file["programs"].items()}
TABLES = {name: table for file in FILES for name, table in file["tables"].items()}
# Numbers of processes, and of machines, in launchers and the environment.
PROCESSES = ["num_processes", "nproc_per_node", "num_gpus", "NPROC_PER_NODE", "num_nodes", "nnodes"]
# Two words of a command, with the program that they start.
SCRIPTS = {
    r"(?:\S*/)?trl (\w+)": r"trl \1",
    r"(?:\S*/)?(sft|dpo|kto|grpo|rloo|ppo|reward)(?:_tldr|_modeling)?\.py .*": r"trl \1",
    r"(?:\S*/)?openrlhf[./]cli[./](train_[a-z_]+)(?:\.py)? .*": r"openrlhf \1",
    r"(?:\S*/)?(?:llamafactory-cli|lmf|llamafactory\.cli|src/train\.py) .*": "llamafactory",
}
FILE = re.compile(r".+[.](ya?ml|json)")
START = ("--", "-m", "python", "python3")  # words that are no values of a launcher's flags
Given = dict[str, list[str]]


def read_rules(program: str) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Their flags with templates by the pattern of a value, and ours that are products of theirs."""
    rules: dict[str, dict[str, str]] = {}
    products: dict[str, str] = {}
    for table in (TABLES[name] for name in PROGRAMS[program]["tables"]):
        renamed = {name: name for name in table.get("same", ())} | table.get("flags", {})
        rules |= {
            n: {".*": " ".join(f"--{flag} {{}}" for flag in ours.split())} for n, ours in renamed.items()
        }
        for kind in ("not needed", "no counterpart"):
            for reason, names in table.get(kind, {}).items():
                rules |= dict.fromkeys(names, {".*": f"# {kind}: {reason}"})
        rules |= table.get("values", {})
        products |= table.get("products", {})
    return rules, products


class Translation:
    """Our flags for a command of theirs, and remarks about the rest."""

    def __init__(self, program: str, given: Given, problems: Problems) -> None:
        spec = PROGRAMS[program]
        self.problems = problems
        self.rules, self.products = read_rules(program)
        self.given = {spec.get("older", {}).get(name, name): words for name, words in given.items()}
        self.theirs = {name: to_words(value) for name, value in spec["defaults"].items()} | self.given
        sizes = [self.theirs[name][0] for name in spec.get("processes", PROCESSES) if name in self.theirs]
        self.theirs["ranks"] = [str(prod(int(size) for size in sizes if size.isdigit()))]
        self.ours = spec["ours"]
        self.arguments = STEPS[int(self.ours[4])]
        self.flags: Given = {}
        self.remarks: list[str] = []
        self.add("", spec["always"], [])
        for flag, formula in self.products.items():
            self.multiply(flag, formula)
        for name in sorted(self.theirs, key=[*self.rules, *self.theirs].index):
            self.translate(name, self.theirs[name])
        self.remarks += spec.get("notes", [])

    def translate(self, name: str, words: list[str]) -> None:
        """Translate a flag by the first pattern that matches its value."""
        if name in self.rules:
            for form, template in self.rules[name].items():
                if match := re.fullmatch(form, " ".join(words), re.DOTALL):
                    return self.add(name, template, words, **match.groupdict())
            self.problems.add(f"--{name} {' '.join(words)}: expected {' or '.join(self.rules[name])}")
        elif name in self.given and name not in " ".join(self.products.values()).split():
            near = difflib.get_close_matches(name, self.rules, n=1)
            self.problems.add(f"unknown flag --{name}" + "".join(f"; did you mean --{n}?" for n in near))

    def add(self, name: str, template: str, values: list[str], /, **parts: str) -> None:
        """Set the flags of a template such as "--loss dpo # remark" for a flag of theirs.

        `{}` is the value, {each} each part of a list, {any} a pattern of them, {NAME} another flag of theirs.
        """
        words, _, remark = template.partition("# ")
        items = [item for value in values for item in value.split(",")]
        named = {name.replace(".", "_"): " ".join(self.theirs.get(name, [])) for name in self.rules}
        parts = named | parts | {"any": "|".join(items)}
        for flag, *forms in (part.split() for part in f" {words}".split(" --")[1:]):
            texts = [
                word.format(value, **parts | {"each": value})
                for word in forms
                for value in (items if "{each}" in word else values if word == "{}" else [" ".join(values)])
            ]
            self.set(flag, [text for text in texts or ["true"] if text], name in self.given or not name)
        if remark and (name in self.given or words):
            shown = "" if re.search("token$|api_key|secret", name) else " ".join(["", *values])
            self.remarks.append(f"--{name}{shown}: {remark.format(' '.join(values))}")

    def set(self, flag: str, words: list[str], is_given: bool) -> None:
        """Set a flag of ours, unless the value is only their default, and ours too."""
        field = self.arguments.__dataclass_fields__[flag]
        if field_type(field)[0] is int:
            words = [str(int(float(word))) if re.fullmatch(r"[\d.]+\.0*", word) else word for word in words]
        if flag in ("columns", "reward") and flag in self.flags:
            words = [",".join(self.flags[flag] + words)] if flag == "columns" else self.flags[flag] + words
        is_default = words in ([str(default_of(field)).lower()], []) or number(words) == default_of(field)
        if words and (is_given or not (is_default or flag in self.flags)):
            self.flags[flag] = words

    def multiply(self, flag: str, formula: str) -> None:
        """Set a flag to a product of theirs; a number of steps is rounded up."""
        words = [self.theirs.get(word, [word])[0] for word in formula.split()]
        factors = [number([word]) for word in words[::2]]
        if not all(factors):
            self.remarks += [f"set by hand: --{flag} = {' '.join(words)}"] * bool(factors[0])
            return
        value = prod(
            n if sign == "*" else 1 / n for n, sign in zip(factors, ["*", *words[1::2]], strict=True)
        )
        value = Fraction(ceil(value)) if flag.endswith("steps") and "acc" not in flag else value
        self.problems.add_if(value.denominator > 1, f"--{flag} = {formula} = {value}: make it a whole number")
        self.set(flag, [str(int(value))], any(name in self.given for name in formula.split()))

    def lines(self) -> list[str]:
        """Our command, a flag per line, and the remarks."""
        flags = [
            shlex.join([f"--{name}", *(word for word in self.flags[name] if word != "true")])
            for name in sorted(self.flags, key=lambda name: not re.search("_path$|columns|output_dir", name))
        ]
        [ranks] = self.theirs["ranks"]
        start = f"{'python' if ranks == '1' else f'deepspeed --num_gpus {ranks}'} {self.ours}"
        return [" \\\n    ".join([start, *flags]), *(f"# {line}" for line in self.remarks)]


def to_words(value: Any) -> list[str]:
    """A value of a YAML file as words of a command."""
    return [
        str(v).lower() if isinstance(v, bool) else str(v)
        for v in (value if isinstance(value, list) else [value])
    ]


def number(words: list[str]) -> Fraction | None:
    """The number that a single word is; None for anything else."""
    return Fraction(words[0]) if re.fullmatch(r"-?\d*[.]?\d+(e[-+]?\d+)?", " ".join(words)) else None


def read_flags(words: Sequence[str]) -> Given:
    """Values by flag, of --flag VALUE, --flag=VALUE or flag=VALUE; those of "" stand before any flag."""
    given: Given = {"": []}
    for word in words:
        if match := re.fullmatch(r"(?:--|(?=\w+=))([A-Za-z][\w.-]*)(?:=(.*))?", word, re.DOTALL):
            given[match[1].replace("-", "_")] = [] if match[2] is None else [match[2]]
        else:
            given[list(given)[-1]].append(word)
    return {name: values or ["true"] for name, values in given.items() if name or values}


def read_file(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON file. Raises ValueError if it has none."""
    try:
        return dict(yaml.safe_load(Path(path).read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is not a readable file of names and values: {' '.join(str(error).split())}"
        ) from error


def read_command(words: list[str]) -> tuple[str, Given]:
    """Their program, and its flags and those of its launcher. Raises ValueError if it is not known."""
    words = shlex.split(" ".join(words)) if len(words) == 1 else words
    starts = [
        (place, match.expand(program))
        for place in range(len(words))
        for form, program in SCRIPTS.items()
        if (
            match := re.fullmatch(form, f"{words[place]} {' '.join(words[place + 1 : place + 2])}", re.DOTALL)
        )
    ]
    place, program = starts[0] if starts else (-1, "")
    given = read_flags(words[place + 1 :])
    for path in [*filter(FILE.fullmatch, given.pop("", [])), *given.pop("config", [])]:
        given = {n: to_words(value) for n, value in read_file(path).items() if value is not None} | given
    if program == "llamafactory" or (not program and FILE.fullmatch(" ".join(words[:1]))):
        able = [name for name in PROGRAMS if given.keys() <= read_rules(name)[0].keys()]
        program = able[0] if len(able) == 1 else f"llamafactory {given.pop('stage', ['sft'])[0]}"
    if program not in PROGRAMS:
        name = program or " ".join(words) or "no command"
        raise ValueError(f"{name} has no counterpart; those of {', '.join(PROGRAMS)} have one")
    given = read_flags([word for word in words[: max(place, 0)] if word not in START]) | given
    return program, name_sets({name: values for name, values in given.items() if name})


def name_sets(given: Given) -> Given:
    """Flags of LLaMA-Factory with paths for the names of sets, and the facts of dataset_info.json as flags
    set.NAME. Raises ValueError for a set that is not in it.
    """
    file = Path(*given.get("dataset_dir", ["data"])) / "dataset_info.json"
    if "dataset" not in given or not file.exists():
        return given | ({"set.file": [str(file)]} if "dataset" in given else {})
    info = read_file(file)
    facts: Given = {"dataset": []}
    for name in ",".join(given["dataset"]).split(","):
        entry = info.get(name.strip())
        if not isinstance(entry, dict):
            raise ValueError(f"dataset {name} is not in {file}, which has {', '.join(info)}")
        facts["dataset"].append(entry.get("hf_hub_url", str(file.parent / entry.get("file_name", ""))))
        for key, value in (entry | entry.get("columns", {}) | entry.get("tags", {})).items():
            facts[f"set.{key}"] = sorted({*facts.get(f"set.{key}", []), *to_words(value)})
    return given | facts


def main(argv: Sequence[str] | None = None) -> None:
    """Print our command for theirs; exit with 2 for what is not understood."""
    problems = Problems()
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] in (["-h"], ["--help"]):  # later in a command it is a flag of theirs
        return print(__doc__)
    with problems.catch():
        translation = Translation(*read_command(given), problems)
        print("\n".join(translation.lines()), flush=True)
        words = [word for name, values in translation.flags.items() for word in (f"--{name}", *values)]
        parse_args(translation.arguments, words, problems=problems)
    problems.exit_if_any()


if __name__ == "__main__":
    run_tool(main)
