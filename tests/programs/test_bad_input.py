"""Bad inputs of every kind: one message each, with flag or file, value and cure; what was there stays."""

import json
import re
import shutil
import socket
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny_inputs
import torch
from program_runs import as_flags, files_in, read_metrics, run
from safetensors.torch import save_file
from tiny_inputs import step_flags

pytestmark = [pytest.mark.slow, pytest.mark.smoke]

WEIGHTS = "adapter_model.safetensors"
DONE, BAD, CANNOT_CONTINUE, KILLED = 0, 2, 3, -9
TRAIN_STEP = {
    1: "step1_sft.sft_trainer:SFTTrainer.train_step",
    2: "step2_reward.pair_trainer:RewardTrainer.train_step",
    3: "step3_ppo.ppo_trainer:PPOTrainer.train_step",
}


def good_flags(tiny, output: Path, step: int, **changes: Any) -> dict[str, Any]:
    """Return what makes a good command line for a step, with changes; None leaves a flag out."""
    good: dict[str, Any] = {"output_dir": output, "data_split": "1,1,1", "save_interval": 1}
    good |= {"max_train_steps": 3}
    if step == 3:
        good |= {"per_device_generation_batch_size": 2, "per_device_training_batch_size": 2}
        good |= {"max_answer_seq_len": 6}
    else:
        good |= {"per_device_train_batch_size": 2, "eval_iters": 1}
    return step_flags(tiny, step, **good | changes)


class Place:
    """A folder of a test's own, the tiny inputs, and stopped runs, which are kept in `shared` for several."""

    def __init__(self, folder: Path, tiny, forks, shared: Path, make_tokenizer) -> None:
        self.folder, self.tiny, self.forks, self.shared = folder, tiny, forks, shared
        self.make_tokenizer = make_tokenizer
        self.output = folder / "output"

    def file(self, flag: str, content: str | bytes, name: str = "file") -> dict[str, Any]:
        """Return a flag with the path of a file with this content."""
        data = content.encode() if isinstance(content, str) else content
        (self.folder / name).write_bytes(data)
        return {flag: self.folder / name}

    def stopped(self, step: int, **changes: Any) -> Path:
        """Put a run that was killed after its second checkpoint into the output folder, and return that."""
        template = self.shared / str(step)
        if changes or not template.exists():
            place = self.output if changes else template
            hook = {"at": TRAIN_STEP[step], "call": 3, "do": "kill"}
            flags = good_flags(self.tiny, place, step, **changes)
            done = self.forks.run(step, flags, hooks=[hook])
            assert done.code == KILLED, done.text()
        if not changes:
            shutil.copytree(template, self.output)
        return self.output


def good_rows(count: int = 50) -> str:
    """Return lines of rows that serve every step."""
    return "".join(json.dumps(row) + "\n" for row in tiny_inputs.make_rows(count))


# ---- the table

Prepare = Callable[[Place], dict[str, Any] | None]


class Row(NamedTuple):
    """A bad input; `prepare` puts it there and returns the flags that a good command line has otherwise."""

    name: str
    step: int
    prepare: Prepare
    words: list[str]
    code: int = BAD
    count: int = 1  # of problems
    may_write: bool = False  # what was there stays all the same
    gpu: dict[str, Any] | None = None  # a pretended one


def flag(**changes: Any) -> Prepare:
    """Return what changes flags alone."""
    return lambda place: changes


def rows(content: str | bytes, **more: Any) -> Prepare:
    """Return what gives a data file of its own."""
    return lambda place: place.file("data_path", content, "rows.jsonl") | more


def resume(step: int, **changes: Any) -> Prepare:
    """Return what resumes a stopped run with changed flags."""
    return lambda place: place.stopped(step) and changes


def module(content: str, **flags: Any) -> Prepare:
    """Return what puts a module called mine into the working folder."""
    return lambda place: place.file("", content, "mine.py") and flags


def adapters(**flags: Any) -> Prepare:
    """Return what puts adapters of one base for actor and critic there, as far as they are read early."""

    def prepare(place: Place) -> dict[str, Any]:
        config = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": str(place.tiny.base)}
        text = json.dumps(config | {"target_modules": ["q_proj"]})
        for role in ("actor", "critic"):
            (place.folder / role).mkdir()
            (place.folder / role / "adapter_config.json").write_text(text)
            save_file({"base_model.model.score.weight": torch.ones(1)}, place.folder / role / WEIGHTS)
        paths = {f"{role}_model_name_or_path": place.folder / role for role in ("actor", "critic")}
        return flags if "model_name_or_path" in flags else paths | flags

    return prepare


def teacher(place: Place, **changes: Any) -> dict[str, Any]:
    """Return what makes a good distillation, with changes."""
    flags = {"algorithm": "distill", "teacher_model_name_or_path": place.tiny.gpt2}
    return flags | {"critic_model_name_or_path": None} | changes


def other_teacher(place: Place) -> dict[str, Any]:
    tiny_inputs.save_causal_lm(place.folder / "other", place.make_tokenizer(290))
    return teacher(place, teacher_model_name_or_path=place.folder / "other")


def other_vocabulary(place: Place) -> dict[str, Any]:
    tiny_inputs.save_reward_model(place.folder / "other", place.make_tokenizer(290))
    return {"critic_model_name_or_path": place.folder / "other"}


def mean_reward_model(place: Place) -> dict[str, Any]:
    """Return what begins step 2 with a reward model of --reward_pooling mean."""
    folder = shutil.copytree(place.tiny.reward, place.folder / "mean")
    config = json.loads((folder / "config.json").read_text()) | {"reward_pooling": "mean"}
    (folder / "config.json").write_text(json.dumps(config))
    return {"model_name_or_path": folder}


FLAGS = [
    Row("two shares", 1, flag(data_split="1,2"), ["--data_split", "1,2", "such as 2,4,4"]),
    Row("few rows", 1, flag(per_device_train_batch_size=500),
        ["--per_device_train_batch_size 500", "more data"]),
    Row("uneven cut", 3, flag(per_device_training_batch_size=3),
        ["--per_device_training_batch_size 3", "= 2 samples"]),
    Row("long answers", 3, flag(max_answer_seq_len=120),
        ["--max_answer_seq_len 120", "144 tokens", "128 positions"], count=2),
    Row("no such layers", 3, flag(actor_lora_dim=4, actor_lora_module_name="nothing."),
        ["--actor_lora_module_name", "'nothing.'", "q_proj"]),
    Row("a rank above the matrix", 3, flag(critic_lora_dim=400),
        ["--critic_lora_dim 400 is above", "lower it"]),
    Row("packed and trained", 3, flag(load_in_4bit=True, actor_zero_stage=3),
        ["without --actor_lora_dim or --critic_lora_dim", "--actor_zero_stage 3 exclude each other"],
        count=2 + (find_spec("bitsandbytes") is None)),
    Row("no group", 3, flag(algorithm="grpo"), ["--algorithm grpo", "--num_samples_per_prompt 1 must be 2"]),
    Row("no critic", 3, flag(algorithm="rloo", num_samples_per_prompt=2, truncated="bootstrap"),
        ["--truncated bootstrap", "--algorithm rloo does not have"]),
    Row("how it learns", 3, flag(
        policy_loss="gsop", rollout_correction="mis:2,1", kl_in="reward:k4",
        early_stop_kl="0.1:stop"),
        ["--policy_loss gsop is unknown; did you mean gspo", "--correction_low 2.0 is not below",
         "--kl_in reward:k4: choose from", "--early_stop_kl 0.1:stop: expected a number"], count=4),
    Row("a reference that cannot move", 3, flag(ref_ema_decay=0.9, actor_lora_dim=4, whiten_scores="group"),
        ["--ref_ema_decay 0.9 averages whole weights", "--whiten_scores group compares the"], count=2),
    Row("when nothing goes with it", 3, flag(
        unsup_step="apart", old_logprobs="strict", rollout_staleness=1, adv_norm="group_mean"),
        ["--unsup_step apart", "--old_logprobs strict compares", "--adv_norm group_mean"], count=3),
    Row("weights of no answer", 2, flag(loss="kot", desirable_weight=0, undesirable_weight=-1),
        ["--loss kot", "--desirable_weight 0", "--undesirable_weight -1"], count=3),
    Row("a range that is none", 3, flag(clip_range="0.2,wide"),
        ["--clip_range_high wide: expected a number"]),
    Row("no teacher", 3, lambda p: teacher(p, teacher_model_name_or_path=None),
        ["--algorithm distill", "give --teacher_model_name_or_path"]),
    Row("a teacher of nobody", 3, lambda p: {"teacher_model_name_or_path": p.tiny.gpt2},
        ["--teacher_model_name_or_path", "--algorithm ppo has no teacher", "distill"]),
    Row("no such divergence", 3, lambda p: teacher(p, distill_loss="0.5*reverse"),
        ["--distill_loss reverse: choose from reverse_kl, forward_kl"]),
    Row("distilled without scores", 3, lambda p: teacher(p, keep_best="eval/score", eval_fraction=0.2),
        ["--keep_best", "has none without --reward"]),
    Row("a GPU without bf16", 1, flag(dtype="bf16"), ["--dtype bf16", "emulates bf16", "use fp16 or fp32"],
        gpu={"capability": [7, 5]}),
    Row("no such optimizer", 3, flag(optimizer="muon:fast"),
        ["--muon_learning_rate fast: expected a number"]),
    Row("nothing for Muon", 1, flag(optimizer="muon", lora_dim=4),
        ["--optimizer muon", "--only_optimize_lora"]),
    Row("a mean of values that are trained each", 2, flag(loss="token_wise", reward_pooling="mean"),
        ["--reward_pooling mean: --loss token_wise", "use --loss end_score"]),
    Row("states in bf16 of fp32", 2, flag(optimizer_dtype="bf16", dtype="fp32"),
        ["--optimizer_dtype bf16 needs --dtype bf16"]),
    Row("how often it is saved", 1, flag(save_interval="30x", eval_interval="0h"),
        ["--save_interval 30x: expected a number of steps, epoch, or a time such as", "--eval_interval 0h: "],
        count=2),
    Row("caps for scores", 1, flag(max_tokens_per_micro_batch="64,128"),
        ["--max_tokens_per_micro_batch 64,128: expected a whole number"]),
    Row("output is a file", 1, lambda p: p.file("output_dir", "", "output"),
        ["output cannot be used (File exists)", "--output_dir"]),
    Row("all together", 1, lambda p: {
        "model_name_or_path": p.folder, "data_path": "absent.jsonl", "dtype": "fp16", "offload": "param",
        "zero_stage": 2, "learning_rate": "fast", "per_device_train_batch_size": 0, "zero_stge": 3},
        ["config.json", "absent.jsonl", "--dtype fp16", "--offload param", "--learning_rate fast",
         "--per_device_train_batch_size 0", "--zero_stge"], count=7),
]  # fmt: skip
DATA = [
    Row("other columns", 1, rows('{"question": "a", "reply": "b"}\n'),
        ["--data_path", "rows.jsonl", "`question` and `reply`, but no `response`", "step 1 reads"]),
    Row("no pairs", 2, rows('{"prompt": "a", "answer": "b"}\n'), ["rows.jsonl:1", "chosen", "rejected"]),
    Row("labels for pairs", 2, rows('{"prompt": "a", "completion": "b", "label": 1}\n'),
        ["rows.jsonl:1", "an answer with a label is not a pair", "--loss kto"]),
    Row("no labels", 2, rows('{"prompt": "a", "answer": "b"}\n', loss="kto"),
        ["rows.jsonl:1", "no pair", "prompt/response/label"]),
    Row("cache is a file", 1, lambda p: p.file("data_output_path", "mine"),
        ["--data_output_path", "cannot be written"]),
]  # fmt: skip
MODELS = [
    Row("other vocabularies", 3, other_vocabulary,
        ["--actor_model_name_or_path and --critic_model_name_or_path", "same base"]),
    Row("an adapter in step 1", 1, adapters(model_name_or_path="actor"),
        ["--model_name_or_path actor is an adapter without its base model", "give the export/"]),
    Row("an average of an adapter", 3, adapters(ref_ema_decay=0.9),
        ["--ref_ema_decay 0.9 averages whole weights, but with adapters of rank 4"]),
    Row("another rank", 3, adapters(actor_lora_dim=8), ["--actor_lora_dim 8", "has rank 4"]),
    Row("a base in shards and whole", 3, adapters(actor_zero_stage=3),
        ["base of actor; of critic, reward model", "--actor_zero_stage 3, --critic", "give both 3"]),
    Row("a shared base on the CPU", 3, adapters(offload_reward_model=True),
        ["base of actor, critic; of reward model", "--offload_reward_model", "or none"]),
    Row("an adapter of another model", 3, adapters(),
        ["actor is not an adapter of", "give the export/ folder of the run"]),
    Row("a teacher of another vocabulary", 3, other_teacher,
        ["--actor_model_name_or_path and --teacher_model_name_or_path", "one family"]),
    Row("a head of another pooling", 2, mean_reward_model,
        ["--reward_pooling last:", "trained for the mean", "give --reward_pooling mean"]),
    Row("no reward model", 3, lambda p: {"critic_model_name_or_path": p.tiny.base},
        ["--critic_model_name_or_path", "score head"]),
]  # fmt: skip
CHECKPOINTS = [
    Row("another algorithm", 3, resume(3, algorithm="rloo", num_samples_per_prompt=2),
        ["--algorithm rloo differs from the ppo", "--num_samples_per_prompt 2 differs from the 1"], count=3),
    Row("other rows a step", 1, resume(1, gradient_accumulation_steps=2),
        ["--gradient_accumulation_steps x number of ranks was 2 and is now 4", "stays 2"]),
    Row("data changed", 1, lambda p: p.stopped(1, **p.file("data_path", good_rows(), "rows.jsonl"))
        and p.file("data_path", good_rows() + good_rows(9), "rows.jsonl"),
        ["the data have changed since it was saved"]),
]  # fmt: skip

TIGHT = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"
SILENT = "class E:\n def reset(self, row): return []\n def step(self, messages): return [], 0, False"
SURROUNDINGS = [
    Row("broken plug-in", 1, module("1 / 0", plugins="mine"),
        ["--plugins mine", "ZeroDivisionError", "mine.py:1"]),
    Row("a reward that fails", 3, module("def f(prompts, responses, rows): return 1 / 0",
        reward="function:mine:f", max_bad_steps=0),
        ["function:mine:f", "ZeroDivisionError"], CANNOT_CONTINUE, may_write=True),
    Row("a judge without an address", 3, flag(reward="judge:h:1/v1"),
        ["--reward judge:h:1/v1", "is not an address; write judge:http://HOST:PORT/v1"]),
    Row("a judge that is asked nothing", 3, lambda p: p.file("", "range: 1 10\n--- score\nGood? {answer}\n",
        "judge.txt") and {"reward": "judge:http://127.0.0.1:1/v1#judge.txt"},
        ["--reward judge:...#judge.txt", "'--- score' lacks {prompt}"]),
    Row("a judge that is not there", 3, flag(reward="judge:http://127.0.0.1:1/v1:m", max_bad_steps=0),
        ["judge:http://127.0.0.1:1/v1:m", "failed 4 times", "check that the server runs there"],
        CANNOT_CONTINUE, may_write=True),
    Row("an environment without reset", 3, module("class E:\n def step(self, messages): return [], 0, True",
        environment="mine:E"), ["--environment mine:E", "E has no such reset", "define reset(self, row)"]),
    Row("what is said has no sampling mask", 3, module(SILENT, environment="mine:E", top_k=3,
        replay_sampling_support=True), ["--environment and --replay_sampling_support exclude each other"]),
    Row("an environment that says nothing", 3, module(SILENT, environment="mine:E", max_bad_steps=0),
        ["environment mine:E, row rows.jsonl:", "returned '[]' for"], CANNOT_CONTINUE, may_write=True),
    Row("no room for the token cache", 1, lambda p: p.file("", TIGHT, "mine.py")
        and p.file("data_path", good_rows(900), "rows.jsonl")
        | {"plugins": "mine", "data_output_path": p.folder / "cache"}, ["--data_output_path", "make room"]),
]  # fmt: skip
TABLE = FLAGS + DATA + MODELS + CHECKPOINTS + SURROUNDINGS


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("stopped")


@pytest.fixture
def place(tmp_path, tiny, forks, shared, make_tokenizer) -> Place:
    return Place(tmp_path, tiny, forks, shared, make_tokenizer)


def snapshot(*folders: Path) -> dict[Path, bytes]:
    """Return every file's content, but for the token cache and what Python compiles."""
    found = [folder / name for folder in folders for name in files_in(folder)]
    return {path: path.read_bytes() for path in found if not {"cache", "__pycache__"} & set(path.parts)}


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_bad_input(place, row):
    flags = good_flags(place.tiny, place.output, row.step, **(row.prepare(place) or {}))
    before = snapshot(place.folder, place.tiny.folder)
    more = {"gpu": row.gpu} if row.gpu else {}
    done = place.forks.run(row.step, flags, cwd=str(place.folder), seconds=60, **more)
    text = done.text()
    assert done.code == row.code, text
    assert "Traceback" not in text
    assert [word for word in row.words if word not in text] == [], text
    if row.code == BAD:
        listed = r"^error: (\d+) problems?, nothing was started:\n((  - .*\n?)+)"
        counted = re.search(listed, text, re.MULTILINE)
        assert int(counted[1]) == row.count == counted[2].count("  - "), text
    after = snapshot(place.folder, place.tiny.folder)
    if row.may_write:
        after = {path: content for path, content in after.items() if path in before}
    assert after == before


def test_a_port_in_use(place):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        env |= {"MASTER_PORT": str(listener.getsockname()[1])}
        done = place.forks.run(1, good_flags(place.tiny, place.output, 1), env=env)
    assert done.code == BAD and "Traceback" not in done.text() and not place.output.exists()
    assert all(
        word in done.text() for word in ("MASTER_PORT=", "address already in use", "choose a free port")
    )


@pytest.mark.parametrize("step", [1, 3])
def test_a_gpu_that_is_too_small(place, step):
    """The first rank's plan says so, and no rank loads a model; the planner is pretended."""
    planner = place.folder / "planner"
    says = 'echo "$@" > words\necho does not fit\necho error: too small >&2\nexit 2\n'
    planner.write_text(f"#!/bin/bash\n{says}")
    planner.chmod(0o755)
    do = f"exec:import sys; sys.executable = {str(planner)!r}"
    hook = {"at": "common.programs.startup:finish_checks", "do": do}
    more = {"env": {"NO_PLAN": ""}, "cwd": str(place.folder), "gpu": {}, "hooks": [hook], "seconds": 60}
    done = place.forks.run(step, good_flags(place.tiny, place.output, step), ranks=2, **more)
    assert done.codes == [BAD, BAD] and not place.output.exists()
    assert done.text(0).endswith("the memory plan\ndoes not fit\nerror: too small\n")
    assert "the preparation of the data" in done.text(0) and "the loading of the model" not in done.text(0)
    assert "does not fit" not in done.text(1) and "Traceback" not in done.text(1)
    assert not done.seen(0)["launches"] and not done.seen(1)["launches"]
    words = (place.folder / "words").read_text()
    assert f"-m tools.plan --gpu here --num_gpus 2 --num_nodes 1 --stage {step} --" in words


def test_output_of_an_earlier_run(place, output):
    output.mkdir()
    (output / "metrics.jsonl").write_text('{"step": 1, "sft/loss": 2.0}\n')
    (output / "train.log").write_text("tee made this before the program began\n")
    before = snapshot(output)
    # The last is found late: when the data are built.
    late = {"overwrite_output_dir": True, "per_device_train_batch_size": 500}
    for step, changes in ((1, {}), (2, {}), (3, {}), (1, late)):
        done = place.forks.run(step, good_flags(place.tiny, output, step, **changes))
        assert done.code == BAD and snapshot(output) == before
        assert changes or f"--output_dir {output} contains metrics.jsonl" in done.text()
        assert changes or "--resume overwrite" in done.text()
    fresh = {"overwrite_output_dir": True, "eval_fraction": 0, "max_train_steps": 1}
    done = place.forks.run(1, good_flags(place.tiny, output, 1, **fresh))
    assert done.code == DONE and len(read_metrics(output)) == 1


def test_the_real_command_line(tiny, tmp_path):
    """Exit code, stderr and silence elsewhere, as a shell sees them."""
    flags = good_flags(
        tiny, tmp_path / "output", 3, critic_model_name_or_path=tmp_path / "absent", offload="param"
    )
    command = [sys.executable, "step3_ppo/main.py", *as_flags(flags)]
    done = run(command, may_fail=True)
    assert done.returncode == BAD and done.stdout == "" and "Traceback" not in done.stderr
    first, problems = done.stderr.split("\n", 1)
    assert first == "[   0 s] loading torch, transformers and deepspeed"
    assert problems.startswith("error: 3 problems, nothing was started:\n")
    assert f"--critic_model_name_or_path {tmp_path}/absent" in done.stderr
    assert "--offload param needs --actor_zero_stage 3" in done.stderr
    assert list(tmp_path.iterdir()) == []
