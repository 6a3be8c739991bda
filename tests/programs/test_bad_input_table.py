"""Bad inputs of every kind, each with its message and exit code: no traceback, and nothing is overwritten."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny_inputs
from bad_inputs import (
    MODEL_FLAG,
    Place,
    RunsCode,
    change_meta,
    cut,
    drop_half,
    flip_bit,
    good_rows,
    open_place,
    weights_file,
)
from program_runs import ROOT, STEPS, as_flags, environment, files_in

from common.runs.stop_request import STOPPED

pytestmark = pytest.mark.slow

DONE, BAD, CANNOT_GO_ON = 0, 2, 3
Prepare = Callable[[Place], dict[str, Any] | None]


class Row(NamedTuple):
    """A bad input; `prepare` puts it there and returns the flags that a good command line has otherwise."""

    name: str
    step: int
    prepare: Prepare
    words: list[str]
    code: int = BAD
    env: Callable[[Place], dict[str, str]] = lambda place: {}
    hooks: tuple = ()
    may_write: bool = False  # what was there stays all the same


def flag(**changes: Any) -> Prepare:
    """Return what changes flags alone."""
    return lambda place: changes


def rows(content: str | bytes, name: str = "rows.jsonl", **more: Any) -> Prepare:
    """Return what gives a data file of its own."""
    return lambda place: place.rows(content, name) | more


def model(step: int, damage: Callable[[Path], Any] = lambda folder: None, **config: Any) -> Prepare:
    """Return what gives a damaged model, or one with another config.json."""

    def prepare(place: Place) -> dict[str, Any]:
        folder = place.model(**config)
        damage(folder)
        return {MODEL_FLAG[step]: folder}

    return prepare


def resume(step: int, damage: Callable[[Path], Any] = lambda folder: None, **changes: Any) -> Prepare:
    """Return what goes on with a stopped run, each of whose checkpoints is damaged."""

    def prepare(place: Place) -> dict[str, Any]:
        place.stopped(step)
        place.for_all_checkpoints(damage)
        return changes

    return prepare


def module(content: str, **flags: Any) -> Prepare:
    """Return what puts a module called mine into the working folder."""
    return lambda place: place.module(content) or flags


def pickled(place: Place) -> dict[str, Any]:
    return {"model_name_or_path": place.pickled(place.tiny.base, RunsCode(place.folder / "proof"))}


ALL_BAD = {"data_split": "1,0,0", "max_bad_rows": 0}
DATA = [
    Row("UTF-16", 1, rows(good_rows().encode("utf-16")), ["rows.jsonl:1", "not UTF-8"]),
    Row("binary", 1, rows(bytes(range(256)) * 40), ["--data_path", "rows.jsonl:1", "not"]),
    Row("torn parquet", 2, rows(b"PAR1 and no more", "rows.parquet"), ["rows.parquet", "cannot be read"]),
    Row("torn list", 2, rows(f"[{good_rows(1)}", "rows.json"), ["rows.json", "not a JSON list"]),
    Row("open quote", 1, rows('prompt,answer\n"a,b\n', "rows.csv"), ["rows.csv:", "not CSV"]),
    Row("no object", 1, rows("[1, 2]\n3\n"), ["rows.jsonl:1", "JSON list"]),
    Row("nested", 1, rows('{"prompt":' + "[" * 9000 + "\n"), ["rows.jsonl:1", "nested too deeply"]),
    Row("half a character", 1, rows(json.dumps({"prompt": "\ud800", "answer": "b"}) + "\n", **ALL_BAD),
        ["--max_bad_rows 0", "rows.jsonl:1", "surrogate pair"]),
    Row("margin", 2, rows(good_rows(margin=float("nan"))), ["'margin' is nan", "not a finite number"]),
    Row("text for step 3", 3, rows('{"text": "a"}\n' * 9), ["rows.jsonl:1", "no prompt"]),
    Row("all alike", 2, rows('{"prompt": "a", "chosen": "b", "rejected": "b"}\n' * 9),
        ["none of its 9 rows"]),
    Row("no train file", 1, lambda p: p.rows(good_rows(), "notes.jsonl") | {"data_path": p.folder},
        ["no train* file", "notes.jsonl"]),
    Row("torn saved data set", 1, lambda p: p.file("x", "{", "dataset_dict.json") and {"data_path": p.folder},
        ["--data_path", "cannot be read"]),
    Row("no data at all", 1, flag(data_path=""), ["--data_path"]),
    Row("cache is a file", 1, lambda p: p.file("data_output_path", "mine"),
        ["--data_output_path", "cannot be written"]),
    Row("text without columns", 3,
        lambda p: p.file("unsupervised_dataset_name", '{"a": 1}\n' * 200, "text.jsonl"),
        ["--max_bad_rows 100", "text.jsonl:1", "no text"]),
]  # fmt: skip

FLAGS = [
    Row("long name", 1, flag(output_dir="x" * 300), ["--output_dir xxx", "255 bytes at most"]),
    Row("no file name", 1, flag(output_dir="a\udc80"), ["--output_dir", "UTF-8"]),
    Row("configuration torn", 1, lambda p: p.file("ds_config", "{"),
        ["--ds_config", "cannot be read as JSON"]),
    Row("configuration a list", 1, lambda p: p.file("ds_config", "[]"), ["--ds_config", "JSON object"]),
    Row("configuration nested", 1, lambda p: p.file("ds_config", "[" * 10**5),
        ["--ds_config", "cannot be read"]),
    Row("hybrid section", 3, lambda p: p.file("ds_config", '{"hybrid_engine": {"tp": 2}}'), ["no key 'tp'"]),
    Row("several at once", 3, flag(kl_coef="nan", clip_range="1e300", seed=2**63, packed="maybe"),
        ["4 problems", "--kl_coef nan", "fp32", "--seed", "--packed maybe"]),
    Row("used folder", 1, lambda p: p.finished(2) and {"resume": "never"},
        ["--output_dir", "of an earlier run"]),
]  # fmt: skip

MODELS = [
    Row("weights cut", 1, model(1, lambda m: cut(m / "model.safetensors")), ["model", "cannot be loaded"]),
    Row("weights empty", 3, model(3, lambda m: cut(m / "model.safetensors", 0)),
        ["model", "cannot be loaded"]),
    Row("no weights", 2, model(2, lambda m: (m / "model.safetensors").unlink()),
        ["no file named model.safetensors"]),
    Row("half the weights", 1, model(1, drop_half), ["its weights lack", "LlamaForCausalLM"]),
    Row("other sizes", 1, model(1, intermediate_size=96), ["other sizes than are needed for", "mlp"]),
    Row("more layers", 2, model(2, num_hidden_layers=3), ["its weights lack", "layers.2"]),
    Row("other family", 1, lambda p: shutil.copy(p.tiny.gpt2 / "model.safetensors", p.model())
        and {"model_name_or_path": p.folder / "model"}, ["its weights lack 21 of 21"]),
    Row("runs code", 1, pickled,
        ["a pickle that holds more than tensors", "nothing of it was run", "safetensors"]),
    Row("a reward that runs code", 3, lambda p: {
        "critic_model_name_or_path": p.pickled(p.tiny.reward, RunsCode(p.folder / "proof"))}, ["a pickle"]),
    Row("a classifier that runs code", 3, lambda p: {
        "reward": f"classifier:{p.pickled(p.tiny.reward, RunsCode(p.folder / 'proof'))}"}, ["a pickle"]),
    Row("code of its own", 1, model(1, model_type="mine", auto_map={"AutoConfig": "mine.C"}),
        ["--model_name_or_path", "custom code"]),
    Row("torn config", 1, model(1, lambda m: cut(m / "config.json", 20)),
        ["config.json", "not a valid JSON"]),
    Row("unknown type", 3, model(3, model_type="lama"), ["--actor_model_name_or_path", "`lama`"]),
    Row("torn tokenizer", 1, model(1, lambda m: cut(m / "tokenizer.json")), ["no tokenizer could be loaded"]),
    Row("no tokenizer", 1, model(1, lambda m: (m / "tokenizer.json").unlink()),
        ["no tokenizer could be loaded"]),
    Row("not a model", 1, lambda p: {"model_name_or_path": p.tiny.rows},
        ["--model_name_or_path", "rows.jsonl"]),
]  # fmt: skip

GO_ON = "--resume never"
CHECKPOINTS = [
    Row("all cut", 1, resume(1, lambda c: cut(weights_file(c))), ["has 500 bytes, not", GO_ON]),
    Row("a bit in all", 3, resume(3, lambda c: flip_bit(weights_file(c))),
        ["actor-rank-00000.safetensors has changed"]),
    Row("meta.json torn", 1, resume(1, lambda c: cut(c / "meta.json")),
        ["meta.json is not one of ours, or torn", GO_ON]),
    Row("meta.json a list", 2, resume(2, lambda c: (c / "meta.json").write_text("[]")), ["not one of ours"]),
    Row("meta.json edited", 1, resume(1, lambda c: flip_bit(c / "meta.json", -20)), ["meta.json"]),
    Row("meta.json gone", 1, resume(1, lambda c: (c / "meta.json").unlink()), ["meta.json cannot be read"]),
    Row("another format", 1, resume(1, lambda c: change_meta(c, format=99)),
        ["its format is 99, this program reads"]),
    Row("a file gone", 3, resume(3, lambda c: weights_file(c).unlink()),
        ["actor-rank-00000.safetensors is missing"]),
    Row("another seed", 1, resume(1, seed=5), ["--seed 5 differs from the 1234", "give 1234"]),
    Row("another rate", 2, resume(2, learning_rate=0.5), ["--learning_rate 0.5 differs from the 5e-05"]),
    Row("another algorithm", 3, resume(3, algorithm="rloo", num_samples_per_prompt=2),
        ["--algorithm rloo differs from the ppo", "--num_samples_per_prompt 2 differs from the 1"]),
    Row("another dtype", 1, resume(1, dtype="bf16"), ["--dtype bf16 differs from the fp32"]),
    Row("another data set", 1, lambda p: p.stopped(1) and p.rows(good_rows()),
        ["--data_path", "differs from"]),
    Row("another model", 1, lambda p: p.stopped(1) and {"model_name_or_path": p.tiny.gpt2},
        ["--model_name_or_path", "gpt2 differs from"]),
    Row("another program", 1, lambda p: p.stopped(2) and {}, ["differs from"]),
    Row("other rows a step", 1, resume(1, gradient_accumulation_steps=2),
        ["--gradient_accumulation_steps x number of ranks was 2, now it is 4", "stays 2"]),
    Row("other rows an update", 3, resume(3, per_device_training_batch_size=1),
        ["--per_device_training_batch_size x", "x number of ranks was 2, now it is 1", "stays 2"]),
    Row("other prompts a step", 3, resume(3, generation_batches=2),
        ["--generation_batches x number of ranks was 2, now it is 4", "stays 2"]),
    Row("data changed", 1,
        lambda p: p.stopped_here(1, **p.rows(good_rows())) and p.rows(good_rows() + good_rows(9)),
        ["the data have changed since it was saved"]),
    Row("model changed", 1, lambda p: p.stopped_here(1, model_name_or_path=p.model())
        and tiny_inputs.save_causal_lm(p.folder / "model", None, family="gpt2")
        and {"model_name_or_path": p.folder / "model"}, ["step-000002", "it holds 0 elements"]),
    Row("nothing there", 1, flag(resume="absent"), ["--resume absent", "is no checkpoint"]),
    Row("a file", 1, lambda p: p.file("resume", "x"), ["--resume", "is no checkpoint"]),
    Row("an export", 1, lambda p: {"resume": p.finished(1) / "export", "output_dir": p.folder / "new"},
        ["--resume", "export is no checkpoint"]),
    Row("a checkpoint of another step", 1, lambda p: {"resume": p.stopped(2), "output_dir": p.folder / "new"},
        ["differs from"]),
    Row("into a used folder", 1, lambda p: p.stopped(1) and {"resume": p.newest, "output_dir": p.tiny.base},
        ["--output_dir", "of an earlier run"]),
    Row("never into a used one", 1, lambda p: p.stopped(1) and {"resume": "never"},
        ["of an earlier run", GO_ON]),
    Row("finished", 1, lambda p: p.finished(1) and {}, ["has finished: 3 steps", GO_ON], DONE),
]  # fmt: skip

SCORES = "def f(prompts, responses, rows): return"
PLUG_INS = [
    Row("broken", 1, module("1 / 0", plugins="mine"), ["--plugins mine", "ZeroDivisionError", "mine.py:1"]),
    Row("no Python", 1, module("def", plugins="mine"), ["--plugins mine", "SyntaxError", "mine.py:1"]),
    Row("by its path", 1, module("", plugins="mine.py"), ["--plugins mine.py", "use mine"]),
    Row("leaves", 3, module("raise SystemExit(7)", plugins="mine"), ["--plugins mine", "SystemExit"]),
    Row("no function", 3, module("", reward="function:mine:score"), ["--reward", "mine has no score"]),
    Row("not a function", 3, module("score = 3", reward="function:mine:score"), ["--reward", "mine:score"]),
    Row("no algorithm", 3, module("", algorithm="mine:f"), ["--algorithm mine:f", "has no f"]),
    Row("no class", 1, module("Mine = 3", data_path="mine:Mine"), ["--data_path mine:Mine", "not a class"]),
    Row("no methods", 1, module("class Mine: pass", data_path="mine:Mine"),
        ["--data_path mine:Mine", "get_prompt"]),
    Row("a reward that fails", 3, module(f"{SCORES} 1 / 0", reward="function:mine:f", max_bad_steps=0),
        ["function:mine:f", "ZeroDivisionError"], CANNOT_GO_ON, may_write=True),
    Row("a reward of NaN", 3,
        module(f"{SCORES} [float('nan')] * len(prompts)", reward="function:mine:f", max_bad_steps=1),
        ["function:mine:f", "'nan'", "finite", "--max_bad_steps allows 1"], CANNOT_GO_ON, may_write=True),
]  # fmt: skip

TIGHT = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"
ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
ENVIRONMENT = [
    Row("ranks without a number", 1, flag(),
        ["WORLD_SIZE=2", "RANK is not"], env=lambda p: {"WORLD_SIZE": "2"}),
    Row("no number", 1, flag(), ["RANK=one", "no whole number"], env=lambda p: {"RANK": "one"}),
    Row("no address", 3, flag(),
        ["MASTER_ADDR, MASTER_PORT not"], env=lambda p: {"RANK": "0", "WORLD_SIZE": "1"}),
    Row("rank too high", 1, flag(), ["RANK=3 is not below WORLD_SIZE=1"],
        env=lambda p: ONE_RANK | {"RANK": "3"}),
    Row("port in use", 1, flag(), ["MASTER_PORT=", "address already in use", "choose a port"],
        env=lambda p: ONE_RANK | {"MASTER_PORT": p.used_port()}),
    Row("no home", 1, flag(data_output_path=None), ["--data_output_path", "cannot be written"],
        env=lambda p: {"HOME": "/dev/null"}),
    Row("output in no real folder", 1, flag(output_dir="/proc/output"), ["/proc/output cannot be used"]),
    Row("no room for the token cache", 1, lambda p: p.module(TIGHT) or p.rows(good_rows(900))
        | {"plugins": "mine", "data_output_path": p.folder / "cache"}, ["--data_output_path", "make room"]),
    Row("output is a file", 1, lambda p: p.file("output_dir", "mine"), ["--output_dir", "not a folder"]),
    Row("no room for an export", 1, module(TIGHT, plugins="mine", save_interval=0),
        ["export could not be written", "Make room"], CANNOT_GO_ON, may_write=True),
    Row("stopped by a signal", 1, flag(), ["saved in", "the same command resumes"], STOPPED, may_write=True,
        hooks=({"at": "step1_sft.sft_trainer:SFTTrainer.train_step", "call": 2, "do": "term"},)),
]  # fmt: skip

TABLE = {
    "data": DATA,
    "flags": FLAGS,
    "models": MODELS,
    "checkpoints": CHECKPOINTS,
    "plug-ins": PLUG_INS,
    "environment": ENVIRONMENT,
}
CASES = [pytest.param(row, id=f"{kind}, {row.name}") for kind, found in TABLE.items() for row in found]


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("stopped")


@pytest.fixture
def place(tmp_path, tiny, forks, shared):
    with open_place(tmp_path, tiny, forks, shared) as made:
        yield made


def snapshot(*folders: Path) -> dict[Path, bytes]:
    """Return every file's content, but for the token cache and what Python compiles."""
    found = [folder / name for folder in folders for name in files_in(folder)]
    return {path: path.read_bytes() for path in found if not {"cache", "__pycache__"} & set(path.parts)}


@pytest.mark.parametrize("row", CASES)
def test_bad_input(place, row):
    flags = place.flags(row.step, **(row.prepare(place) or {}))
    before = snapshot(place.folder, place.tiny.folder)
    done = place.forks.run(
        row.step, flags, env=row.env(place), hooks=list(row.hooks), cwd=str(place.folder), seconds=60
    )
    text = done.text()
    assert done.code == row.code, text
    assert "Traceback" not in text
    assert [word for word in row.words if word not in text] == [], text
    if row.code == BAD:
        assert re.search(r"^error: ", text, flags=re.MULTILINE), text
    after = snapshot(place.folder, place.tiny.folder)
    if row.may_write:
        after = {path: content for path, content in after.items() if path in before}
    assert after == before
    assert not (place.folder / "proof").exists()


def test_the_table_is_long():
    """At least 60 rows, of all kinds and all programs."""
    assert len(CASES) >= 60 and all(len(found) >= 8 for found in TABLE.values())
    assert {row.step for found in TABLE.values() for row in found} == set(STEPS)
    assert all(row.words for found in TABLE.values() for row in found)


def test_a_number_of_threads_that_is_none(place):
    """In a process of its own: the libraries read it as they are imported."""
    command = [sys.executable, "step1_sft/main.py", *as_flags(place.flags(1))]
    surroundings = environment(OMP_NUM_THREADS="abc", TMPDIR=str(place.folder / "absent"))
    done = subprocess.run(command, cwd=ROOT, env=surroundings, capture_output=True, text=True, timeout=240)
    assert done.returncode == BAD and "Traceback" not in done.stderr
    assert "OMP_NUM_THREADS=abc in the environment is no number of threads" in done.stderr
    assert not place.output.exists()
