"""Bad inputs of every kind: one message each, with flag or file, value and cure; what was there stays."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_inputs
from bad_inputs import (
    BAD,
    CANNOT_CONTINUE,
    DONE,
    TRAIN_STEP,
    Place,
    Row,
    change_format,
    cut,
    drop_half,
    flag,
    flip_bit,
    good_flags,
    good_rows,
    model,
    module,
    no_eos,
    other_vocabulary,
    resume,
    rows,
    weights_file,
    without_head,
)
from program_runs import ROOT, TIME_LIMIT, as_flags, environment, files_in, read_metrics, run_here
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.runs.stop_request import STOPPED

pytestmark = [pytest.mark.slow, pytest.mark.smoke]

FLAGS = [
    Row("absent file", 1, flag(data_path="absent.jsonl"), ["--data_path", "absent.jsonl", "no such file"]),
    Row("absent model", 1, flag(model_name_or_path="no/such-model"), ["--model_name_or_path no/such-model"]),
    Row("two shares", 1, flag(data_split="1,2"), ["--data_split", "1,2", "such as 2,4,4"]),
    Row("no share", 2, flag(data_split="1,0,1"), ["--data_split 1,0,1", "step 2"]),
    Row("fp16", 1, flag(dtype="fp16"), ["--dtype fp16", "GPU", "use fp32 or bf16"]),
    Row("offloaded parameters", 3, flag(offload="param", actor_zero_stage=3),
        ["--offload param", "--critic_zero_stage 3", "not 0"]),
    Row("offloaded optimizer", 1, flag(offload="optimizer", dtype="fp32"),
        ["--offload optimizer", "--zero_stage 1, 2 or 3"]),
    Row("few rows", 1, flag(per_device_train_batch_size=500),
        ["--per_device_train_batch_size 500", "more data"]),
    Row("few prompts", 3, flag(per_device_generation_batch_size=500),
        ["--per_device_generation_batch_size 500", "more data"]),
    Row("uneven cut", 3, flag(per_device_training_batch_size=3),
        ["--per_device_training_batch_size 3", "= 2 samples"]),
    Row("long rows", 1, flag(max_seq_len=500), ["--max_seq_len 500", "128 positions"]),
    Row("long answers", 3, flag(max_answer_seq_len=120),
        ["--max_answer_seq_len 120", "144 tokens", "128 positions"], count=2),
    Row("no such layers", 1, flag(lora_dim=4, lora_module_name="nothing."),
        ["--lora_module_name", "'nothing.'", "q_proj"]),
    Row("no such layers of the actor", 3, flag(actor_lora_dim=4, actor_lora_module_name="nothing."),
        ["--actor_lora_module_name", "q_proj"]),
    Row("no group", 3, flag(algorithm="grpo"), ["--algorithm grpo", "--num_samples_per_prompt 1 must be 2"]),
    Row("no group to compare", 3, flag(dynamic_sampling_rounds=2), ["--dynamic_sampling_rounds 2"]),
    Row("no critic", 3, flag(algorithm="rloo", num_samples_per_prompt=2, truncated="bootstrap"),
        ["--truncated bootstrap", "--algorithm rloo has none"]),
    Row("no such word", 3, flag(truncated="penalty"), ["--truncated penalty: choose score"]),
    Row("small micro-batches", 3, flag(max_tokens_per_micro_batch=20),
        ["--max_tokens_per_micro_batch 20", "at least 30"]),
    Row("no text to mix in", 3, flag(unsupervised_dataset_name="no.jsonl"),
        ["--unsupervised_dataset_name no.jsonl", "no such file"]),
    Row("long name", 1, flag(output_dir="x" * 300), ["--output_dir xxx", "255 bytes at most"]),
    Row("configuration torn", 1, lambda p: p.file("ds_config", "{"),
        ["--ds_config", "cannot be read as JSON"]),
    Row("configuration a list", 1, lambda p: p.file("ds_config", "[]"), ["--ds_config", "JSON object"]),
    Row("several at once", 3, flag(kl_coef="nan", clip_range="1e300", seed=2**63, packed="maybe"),
        ["--kl_coef nan", "fp32", "--seed", "--packed maybe"], count=4),
    Row("all together", 1, lambda p: p.file("", "", "output") and flag(
        model_name_or_path=p.folder, data_path="absent.jsonl", dtype="fp16", offload="param", zero_stage=2,
        learning_rate="fast", per_device_train_batch_size=0, zero_stge=3)(p),
        ["config.json", "absent.jsonl", "--dtype fp16", "--offload param", "--learning_rate fast",
         "--per_device_train_batch_size 0", "--zero_stge", "output is not a folder"], count=8),
]  # fmt: skip

DATA = [
    Row("UTF-16", 1, rows(good_rows().encode("utf-16")), ["--data_path", "rows.jsonl:1", "not UTF-8"]),
    Row("other columns", 1, rows('{"question": "a", "reply": "b"}\n'),
        ["--data_path", "rows.jsonl", "'question', 'reply'", "prompt"]),
    Row("empty", 1, rows(""), ["--data_path", "rows.jsonl", "empty"]),
    Row("no pairs", 2, rows('{"prompt": "a", "answer": "b"}\n'), ["rows.jsonl:1", "chosen", "rejected"]),
    Row("half a character", 1,
        rows(json.dumps({"prompt": "\ud800", "answer": "b"}) + "\n", data_split="1,0,0", max_bad_rows=0),
        ["--max_bad_rows 0", "rows.jsonl:1", "surrogate pair"]),
    Row("text for step 3", 3, rows('{"text": "a"}\n' * 9), ["rows.jsonl:1", "no prompt"]),
    Row("all alike", 2, rows('{"prompt": "a", "chosen": "b", "rejected": "b"}\n' * 9),
        ["none of its 9 rows"]),
    Row("cache is a file", 1, lambda p: p.file("data_output_path", "mine"),
        ["--data_output_path", "cannot be written"]),
]  # fmt: skip

MODELS = [
    Row("no model", 3, lambda p: {"actor_model_name_or_path": p.folder},
        ["--actor_model_name_or_path", "config.json"]),
    Row("no tokenizer", 1, model(1, lambda m: (m / "tokenizer.json").unlink()),
        ["no tokenizer could be loaded"]),
    Row("no end of turn", 1, no_eos, ["no eos token", "--eot_token", "--add_eot_token"]),
    Row("other vocabularies", 3, other_vocabulary,
        ["--actor_model_name_or_path and --critic_model_name_or_path", "same base"]),
    Row("no reward model", 3, lambda p: {"critic_model_name_or_path": p.tiny.base},
        ["--critic_model_name_or_path", "score head"]),
    Row("no reward model to evaluate", 2, without_head,
        ["--model_name_or_path", "export/ folder of step 2"], module="rw_eval"),
    Row("weights cut", 1, model(1, lambda m: cut(m / "model.safetensors")), ["model", "cannot be loaded"]),
    Row("half the weights", 1, model(1, drop_half), ["its weights lack", "LlamaForCausalLM"]),
    Row("more layers", 2, model(2, num_hidden_layers=3), ["its weights lack", "layers.2"]),
    Row("runs code", 1, lambda p: {"model_name_or_path": p.pickled(p.tiny.base)},
        ["a pickle that holds more than tensors", "nothing of it was run", "safetensors"]),
    Row("a classifier that runs code", 3, lambda p: {"reward": f"classifier:{p.pickled(p.tiny.reward)}"},
        ["a pickle"]),
    Row("code of its own", 1, model(1, model_type="mine", auto_map={"AutoConfig": "mine.C"}),
        ["--model_name_or_path", "custom code"]),
    Row("unknown type", 3, model(3, model_type="lama"), ["--actor_model_name_or_path", "`lama`"]),
]  # fmt: skip

CHECKPOINTS = [
    Row("all cut", 1, resume(1, lambda c: cut(weights_file(c))),
        ["has 500 bytes, not", "--resume overwrite"]),
    Row("a bit in all", 3, resume(3, lambda c: flip_bit(weights_file(c))),
        ["actor-rank-00000.safetensors has changed"]),
    Row("another format", 1, resume(1, change_format), ["its format is 99, this program reads"]),
    Row("another rate", 2, resume(2, learning_rate=0.5), ["--learning_rate 0.5 differs from the 5e-05"]),
    Row("another algorithm", 3, resume(3, algorithm="rloo", num_samples_per_prompt=2),
        ["--algorithm rloo differs from the ppo", "--num_samples_per_prompt 2 differs from the 1"], count=3),
    Row("other rows a step", 1, resume(1, gradient_accumulation_steps=2),
        ["--gradient_accumulation_steps x number of ranks was 2, now it is 4", "stays 2"]),
    Row("other rows an update", 3, resume(3, per_device_training_batch_size=1),
        ["--per_device_training_batch_size x", "x number of ranks was 2, now it is 1", "stays 2"]),
    Row("other prompts a step", 3, resume(3, generation_batches=2),
        ["--generation_batches x number of ranks was 2, now it is 4", "stays 2"]),
    Row("data changed", 1, lambda p: p.stopped(1, **p.file("data_path", good_rows(), "rows.jsonl"))
        and p.file("data_path", good_rows() + good_rows(9), "rows.jsonl"),
        ["the data have changed since it was saved"]),
    Row("model changed", 1, lambda p: p.stopped(1, model_name_or_path=p.model())
        and tiny_inputs.save_causal_lm(p.folder / "model", None, family="gpt2")
        and {"model_name_or_path": p.folder / "model"}, ["step-000002", "it holds 0 elements"]),
    Row("an export", 1, lambda p: {"resume": p.finished(1) / "export", "output_dir": p.folder / "new"},
        ["--resume", "export is no checkpoint"]),
    Row("into a used folder", 1,
        lambda p: {"resume": p.stopped(1) / "checkpoints/step-000002", "output_dir": p.tiny.base},
        ["--output_dir", "of an earlier run"]),
    Row("finished", 1, lambda p: p.finished(1) and {}, ["has finished: 3 steps", "--resume overwrite"], DONE),
]  # fmt: skip

SCORES = "def f(prompts, responses, rows): return"
TIGHT = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"
ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
SURROUNDINGS = [
    Row("broken plug-in", 1, module("1 / 0", plugins="mine"),
        ["--plugins mine", "ZeroDivisionError", "mine.py:1"]),
    Row("no function", 3, module("", reward="function:mine:score"), ["--reward", "mine has no score"]),
    Row("no class", 1, module("Mine = 3", data_path="mine:Mine"), ["--data_path mine:Mine", "not a class"]),
    Row("a reward that fails", 3, module(f"{SCORES} 1 / 0", reward="function:mine:f", max_bad_steps=0),
        ["function:mine:f", "ZeroDivisionError"], CANNOT_CONTINUE, may_write=True),
    Row("a reward of NaN", 3,
        module(f"{SCORES} [float('nan')] * len(prompts)", reward="function:mine:f", max_bad_steps=1),
        ["function:mine:f", "'nan'", "--max_bad_steps allows 1"], CANNOT_CONTINUE, may_write=True),
    Row("rank too high", 1, flag(), ["RANK=3 is not below WORLD_SIZE=1"],
        env=lambda p: ONE_RANK | {"RANK": "3"}),
    Row("port in use", 1, flag(), ["MASTER_PORT=", "address already in use", "choose a port"],
        count=0, env=lambda p: ONE_RANK | {"MASTER_PORT": p.used_port()}),
    Row("no home", 1, flag(data_output_path=None), ["--data_output_path", "cannot be written"],
        env=lambda p: {"HOME": "/dev/null"}),
    Row("no room for the token cache", 1, lambda p: p.file("", TIGHT, "mine.py")
        and p.file("data_path", good_rows(900), "rows.jsonl")
        | {"plugins": "mine", "data_output_path": p.folder / "cache"}, ["--data_output_path", "make room"]),
    Row("no room for an export", 1, module(TIGHT, plugins="mine", save_interval=0),
        ["export could not be written", "Make room"], CANNOT_CONTINUE, may_write=True),
    Row("stopped by a signal", 1, flag(), ["saved in", "the same command resumes"], STOPPED, may_write=True,
        hooks=({"at": TRAIN_STEP[1], "call": 2, "do": "term"},)),
]  # fmt: skip
TABLE = FLAGS + DATA + MODELS + CHECKPOINTS + SURROUNDINGS


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("stopped")


@pytest.fixture
def place(tmp_path, tiny, forks, shared, make_tokenizer) -> Iterator[Place]:
    made = Place(tmp_path, tiny, forks, shared, make_tokenizer)
    yield made
    for listener in made.listening:
        listener.close()


def snapshot(*folders: Path) -> dict[Path, bytes]:
    """Return every file's content, but for the token cache and what Python compiles."""
    found = [folder / name for folder in folders for name in files_in(folder)]
    return {path: path.read_bytes() for path in found if not {"cache", "__pycache__"} & set(path.parts)}


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_bad_input(place, row):
    flags = place.flags(row.step, **(row.prepare(place) or {}))
    before = snapshot(place.folder, place.tiny.folder)
    done = place.forks.run(
        row.step, flags, env=row.env(place), hooks=list(row.hooks), cwd=str(place.folder), seconds=60,
        module=row.module,
    )  # fmt: skip
    text = done.text()
    assert done.code == row.code, text
    assert "Traceback" not in text
    assert [word for word in row.words if word not in text] == [], text
    if row.code == BAD and row.count:
        listed = r"^error: (\d+) problems?, nothing was started:\n((  - .*\n?)+)"
        counted = re.search(listed, text, re.MULTILINE)
        assert int(counted[1]) == row.count == counted[2].count("  - "), text
    after = snapshot(place.folder, place.tiny.folder)
    if row.may_write:
        after = {path: content for path, content in after.items() if path in before}
    assert after == before
    assert not (place.folder / "proof").exists()


def test_bad_and_long_rows_are_counted(tiny, tmp_path, tiny_tokenizer, capsys, lone_process):
    made, limit = tiny_inputs.make_rows(20), 24
    path = tiny_inputs.write_rows(tmp_path / "rows.jsonl", [*made, "no JSON", {"prompt": 3}])
    texts = [f"\n\nHuman: {r['prompt']}\n\nAssistant: {r['chosen']}<|endoftext|>" for r in made]
    num_long = sum(len(tiny_tokenizer(text).input_ids) > limit for text in texts)
    assert 0 < num_long < 20
    changes = {"data_path": path, "data_split": "1,0,0", "eval_fraction": 0, "max_seq_len": limit}
    run_here(1, good_flags(tiny, "", 1, **changes, max_train_steps=1))
    text = capsys.readouterr().out
    assert f"sft data: {num_long} rows truncated to the length limit" in text
    assert "20 train and 0 eval rows of 22 raw rows" in text and "2 rows skipped: bad form" in text
    assert "rows.jsonl:21" in text and "rows.jsonl:22" in text


def test_a_new_eot_token(tiny, make_tokenizer, tmp_path, output, lone_process, no_pictures):
    """The cure that the message names; it also has no pad token."""
    base = tiny_inputs.save_causal_lm(tmp_path / "endless", make_tokenizer(eos=None))
    changes = {"model_name_or_path": base, "eot_token": "<|end|>", "add_eot_token": True}
    run_here(1, good_flags(tiny, output, 1, **changes, max_train_steps=1))
    tokenizer = AutoTokenizer.from_pretrained(output / "export")
    assert tokenizer.eos_token == "<|end|>" == tokenizer.pad_token
    model = AutoModelForCausalLM.from_pretrained(output / "export")
    assert model.get_input_embeddings().num_embeddings >= len(tokenizer) > tokenizer.eos_token_id


def test_output_of_an_earlier_run(place, output):
    output.mkdir()
    (output / "metrics.jsonl").write_text('{"step": 1, "sft/loss": 2.0}\n')
    (output / "train.log").write_text("tee made this before the program began\n")
    before = snapshot(output)
    # The last is found late: when the data are built.
    late = {"overwrite_output_dir": True, "per_device_train_batch_size": 500}
    for step, changes in ((1, {}), (2, {}), (3, {}), (1, late)):
        done = place.forks.run(step, place.flags(step, **changes))
        assert done.code == BAD and snapshot(output) == before
        assert changes or f"--output_dir {output} holds metrics.jsonl" in done.text()
        assert changes or "--resume overwrite" in done.text()
    done = place.forks.run(1, place.flags(1, overwrite_output_dir=True, eval_fraction=0, max_train_steps=1))
    assert done.code == DONE and len(read_metrics(output)) == 1


def test_the_real_command_line(tiny, tmp_path):
    """Exit code, stderr and silence elsewhere, as a shell sees them."""
    flags = good_flags(
        tiny, tmp_path / "output", 3, critic_model_name_or_path=tmp_path / "absent", zero_stage=2
    )
    command = [sys.executable, "step3_ppo/main.py", *as_flags(flags)]
    surroundings = environment(OMP_NUM_THREADS="1")
    done = subprocess.run(
        command, cwd=ROOT, env=surroundings, capture_output=True, text=True, timeout=TIME_LIMIT
    )
    assert done.returncode == BAD and done.stdout == "" and "Traceback" not in done.stderr
    assert done.stderr.startswith("error: 2 problems, nothing was started:\n")
    assert f"--critic_model_name_or_path {tmp_path}/absent" in done.stderr
    assert "unknown flag --zero_stage; did you mean --" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_number_of_threads_that_is_none(tiny, tmp_path):
    """In a process of its own: the libraries read it as they are imported."""
    command = [sys.executable, "step1_sft/main.py", *as_flags(good_flags(tiny, tmp_path / "output", 1))]
    surroundings = environment(OMP_NUM_THREADS="abc", TMPDIR=str(tmp_path / "absent"))
    done = subprocess.run(command, cwd=ROOT, env=surroundings, capture_output=True, text=True, timeout=240)
    assert done.returncode == BAD and "Traceback" not in done.stderr
    assert "OMP_NUM_THREADS=abc in the environment is no number of threads" in done.stderr
    assert not (tmp_path / "output").exists()
