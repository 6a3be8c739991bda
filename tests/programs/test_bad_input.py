"""What a user may get wrong: one message with all of it, exit code 2, no model loaded, nothing written."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_inputs
from program_runs import (
    ROOT,
    STEPS,
    TIME_LIMIT,
    as_flags,
    environment,
    files_in,
    read_curve,
    read_metrics,
    run_here,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.flags.refusal import TooManyBadSteps
from common.runs.stop_request import STOPPED

MODEL_FLAG = {1: "model_name_or_path", 2: "model_name_or_path", 3: "actor_model_name_or_path"}


@pytest.fixture
def flags(tiny, tmp_path):
    """Return what makes a good command line for a step, with changes."""

    def make(step: int, **changes) -> dict:
        good = {
            "data_path": tiny.rows,
            "data_output_path": tmp_path / "cache",
            "output_dir": tmp_path / "output",
        }
        if step == 3:
            good |= {"actor_model_name_or_path": tiny.base, "critic_model_name_or_path": tiny.reward}
            good |= {"per_device_generation_batch_size": 4, "per_device_training_batch_size": 4}
            good |= {"max_prompt_seq_len": 24, "max_answer_seq_len": 6}
        else:
            good |= {"model_name_or_path": tiny.base, "max_seq_len": 48, "per_device_train_batch_size": 4}
        return good | {"max_train_steps": 1} | changes

    return make


@pytest.fixture
def refused(monkeypatch, tmp_path, capsys, lone_process):
    """Return the problems that a program names; fail if it does more than name them."""

    def load(*_, **__):
        raise AssertionError("a model was loaded")

    def start(step: int, words, *, module: str = "main") -> list[str]:
        monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", load)
        before = snapshot(tmp_path)
        with pytest.raises(SystemExit) as left:
            run_here(step, words, module=module)
        assert left.value.code == 2
        assert snapshot(tmp_path) == before
        text = capsys.readouterr().err
        assert "Traceback" not in text
        header, _, listed = text.partition(":\n")
        counted = re.fullmatch(r"error: (\d+) problems?, nothing was started", header)
        messages = re.split(r"^  - ", listed.rstrip(), flags=re.MULTILINE)[1:]
        assert counted and int(counted[1]) == len(messages), text
        return messages

    return start


def snapshot(folder: Path) -> dict[str, bytes]:
    """Return every file's content, but for the token cache."""
    return {name: (folder / name).read_bytes() for name in files_in(folder) if not name.startswith("cache/")}


# ---- one flag that cannot be: (step, changes, words that the one message must hold)

SIMPLE = [
    (1, {"data_path": "absent.jsonl"}, ["--data_path", "absent.jsonl", "no such file"]),
    (2, {"data_path": "somewhere/or-other"}, ["--data_path somewhere/or-other"]),
    (1, {"model_name_or_path": "no/such-model"}, ["--model_name_or_path no/such-model"]),
    (1, {"data_split": "1,2"}, ["--data_split", "1,2", "such as 2,4,4"]),
    (2, {"data_split": "1,0,1"}, ["--data_split 1,0,1", "step 2"]),
    (1, {"dtype": "fp16"}, ["--dtype fp16", "GPU", "use fp32 or bf16"]),
    (1, {"offload": "param", "zero_stage": 2}, ["--offload param", "--zero_stage 3", "not 2"]),
    (3, {"offload": "param", "actor_zero_stage": 3}, ["--offload param", "--critic_zero_stage 3", "not 0"]),
    (1, {"offload": "optimizer", "dtype": "fp32"}, ["--offload optimizer", "--zero_stage 1, 2 or 3"]),
    (1, {"per_device_train_batch_size": 500}, ["--per_device_train_batch_size 500", "10 rows", "more data"]),
    (3, {"per_device_generation_batch_size": 500, "per_device_training_batch_size": 500},
        ["--per_device_generation_batch_size 500", "20 rows", "more data"]),
    (3, {"per_device_training_batch_size": 3}, ["--per_device_training_batch_size 3", "= 4 samples"]),
    (1, {"max_seq_len": 500}, ["--max_seq_len 500", "128 positions"]),
    (3, {"max_answer_seq_len": 120}, ["--max_answer_seq_len 120", "144 tokens", "128 positions"]),
    (1, {"ds_config": "absent.json"}, ["--ds_config absent.json"]),
    (1, {"lora_dim": 4, "lora_module_name": "nothing."}, ["--lora_module_name", "'nothing.'", "q_proj"]),
    (3, {"actor_lora_dim": 4, "actor_lora_module_name": "nothing."}, ["--actor_lora_module_name", "q_proj"]),
    (3, {"algorithm": "grpo"}, ["--algorithm grpo", "--num_samples_per_prompt 1 must be 2"]),
    (3, {"num_samples_per_prompt": 3, "per_device_training_batch_size": 8},
        ["--num_samples_per_prompt 3 = 12 samples", "--per_device_training_batch_size 8"]),
    (3, {"dynamic_sampling_rounds": 2}, ["--dynamic_sampling_rounds 2", "--num_samples_per_prompt 1"]),
    (3, {"algorithm": "rloo", "num_samples_per_prompt": 2, "truncated": "bootstrap"},
        ["--truncated bootstrap", "--algorithm rloo has none"]),
    (3, {"max_tokens_per_micro_batch": 20}, ["--max_tokens_per_micro_batch 20", "at least 30"]),
    (1, {"max_tokens_per_micro_batch": 20}, ["--max_tokens_per_micro_batch 20", "raise it to at least"]),
    (3, {"plugins": "no_module"}, ["--plugins no_module", "PYTHONPATH"]),
    (3, {"reward": "function:no_module:f"}, ["--reward function:no_module:f", "PYTHONPATH"]),
    (3, {"reward": "0*function:step3_ppo.rewards.examples.vader:sentiment"}, ["--reward", "weight is 0"]),
    (3, {"unsupervised_dataset_name": "no.jsonl"}, ["--unsupervised_dataset_name no.jsonl", "no such file"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("step", "changes", "words"), SIMPLE, ids=lambda value: str(value) if type(value) is dict else ""
)
def test_one_flag(flags, refused, tmp_path, step, changes, words):
    expected = 2 if "max_answer_seq_len" in changes else 1  # actor and critic both are too short
    messages = refused(step, flags(step, **changes))
    assert len(messages) == expected
    for word in words:
        assert word in messages[0]
    assert not (tmp_path / "output").exists()


# ---- data


DATA = [
    (1, "rows.jsonl", '{"question": "a", "reply": "b"}\n', ["rows.jsonl", "'question', 'reply'", "prompt"]),
    (2, "rows.jsonl", '{"prompt": "a", "answer": "b"}\n', ["rows.jsonl:1", "chosen", "rejected"]),
    (1, "rows.jsonl", "", ["rows.jsonl", "empty"]),
    (1, "rows.json", "[]", ["rows.json", "empty"]),
    (1, "rows.csv", "prompt,answer\n", ["rows.csv", "empty"]),
    (1, "rows.jsonl", '{"prompt": "a", "answer"\n', ["rows.jsonl:1"]),
    (1, "rows.txt", "hello\n", ["rows.txt", ".jsonl"]),
    (1, "rows.jsonl.gz", "not gzip", ["rows.jsonl.gz", "cannot be read"]),
    (1, "rows.jsonl", '{"prompt": "a", "answer": "b"}\n', ["rows.jsonl", "--data_split 2,4,4", "more rows"]),
]  # fmt: skip


@pytest.mark.parametrize(("step", "name", "content", "words"), DATA)
def test_data(flags, refused, tmp_path, step, name, content, words):
    (tmp_path / name).write_text(content)
    (message,) = refused(step, flags(step, data_path=tmp_path / name))
    for word in ["--data_path", *words]:
        assert word in message


def test_too_many_bad_rows_are_named(flags, refused, tmp_path):
    rows = [*tiny_inputs.make_rows(4), "no JSON", {"prompt": 3}, *tiny_inputs.make_rows(4)]
    path = tiny_inputs.write_rows(tmp_path / "rows.jsonl", rows)
    (message,) = refused(1, flags(1, data_path=path, data_split="1,0,0", max_bad_rows=1))
    assert "--max_bad_rows 1" in message and "rows.jsonl:5" in message and "rows.jsonl:6" in message


def test_a_few_bad_rows_are_counted(flags, tmp_path, capsys, lone_process):
    rows = [*tiny_inputs.make_rows(8), "no JSON", {"prompt": 3}]
    path = tiny_inputs.write_rows(tmp_path / "rows.jsonl", rows)
    run_here(1, flags(1, data_path=path, data_split="1,0,0", eval_fraction=0, output_dir=""))
    text = capsys.readouterr().out
    assert "8 train and 0 eval rows of 10 raw rows" in text and "2 rows skipped: bad form" in text
    assert "rows.jsonl:9" in text and "rows.jsonl:10" in text


def test_long_rows_are_counted(flags, tiny_tokenizer, tmp_path, capsys, lone_process):
    limit = 24
    rows = tiny_inputs.make_rows(20)
    path = tiny_inputs.write_rows(tmp_path / "rows.jsonl", rows)
    texts = [f"\n\nHuman: {r['prompt']}\n\nAssistant: {r['chosen']}<|endoftext|>" for r in rows]
    num_long = sum(len(tiny_tokenizer(text).input_ids) > limit for text in texts)
    assert 0 < num_long < 20
    run_here(
        1, flags(1, data_path=path, data_split="1,0,0", eval_fraction=0, max_seq_len=limit, output_dir="")
    )
    assert f"sft data: {num_long} rows truncated to the length limit" in capsys.readouterr().out


# ---- models and tokenizers


def test_a_folder_that_is_no_model(flags, refused, tmp_path, tiny):
    for step, flag in MODEL_FLAG.items():
        (tmp_path / "empty").mkdir(exist_ok=True)
        (message,) = refused(step, flags(step, **{flag: tmp_path / "empty"}))
        assert f"--{flag} {tmp_path}/empty" in message and "config.json" in message
    (tmp_path / "run").mkdir()
    (tmp_path / "run/export").symlink_to(tiny.base)
    (message,) = refused(1, flags(1, model_name_or_path=tmp_path / "run"))
    assert f"did you mean {tmp_path}/run/export?" in message


def test_a_model_without_tokenizer(flags, refused, tmp_path):
    tiny_inputs.save_causal_lm(tmp_path / "bare", None)
    (message,) = refused(1, flags(1, model_name_or_path=tmp_path / "bare"))
    assert "--model_name_or_path" in message and "no tokenizer" in message


def test_reward_model_without_head(flags, refused, tiny):
    (message,) = refused(3, flags(3, critic_model_name_or_path=tiny.base))
    assert f"--critic_model_name_or_path {tiny.base}" in message and "score head" in message
    (message,) = refused(3, flags(3, reward=f"model:{tiny.base}"))
    assert f"--reward model:{tiny.base}" in message and "export/ of step 2" in message
    words = {"model_name_or_path": tiny.base, "data_path": tiny.rows}
    (message,) = refused(2, words, module="rw_eval")
    assert f"--model_name_or_path {tiny.base}" in message and "export/ folder of step 2" in message


def test_other_vocabularies(flags, refused, make_tokenizer, tmp_path):
    tiny_inputs.save_reward_model(tmp_path / "other", make_tokenizer(290))
    (message,) = refused(3, flags(3, critic_model_name_or_path=tmp_path / "other"))
    assert "--actor_model_name_or_path and --critic_model_name_or_path" in message and "same base" in message


def test_tokenizer_without_eos(flags, refused, make_tokenizer, tmp_path):
    tiny_inputs.save_causal_lm(tmp_path / "endless", make_tokenizer(eos=None))
    (message,) = refused(1, flags(1, model_name_or_path=tmp_path / "endless"))
    assert "no eos token" in message and "--eot_token" in message and "--add_eot_token" in message
    (message,) = refused(1, flags(1, model_name_or_path=tmp_path / "endless", eot_token="<|end|>"))
    assert "--eot_token <|end|>" in message and "--add_eot_token" in message


def test_tokenizer_with_a_new_eot_token(flags, make_tokenizer, tmp_path, output, lone_process, no_pictures):
    """The cure that the message names; it also has no pad token."""
    base = tiny_inputs.save_causal_lm(tmp_path / "endless", make_tokenizer(eos=None))
    run_here(1, flags(1, model_name_or_path=base, eot_token="<|end|>", add_eot_token=True))
    tokenizer = AutoTokenizer.from_pretrained(output / "export")
    assert tokenizer.eos_token == "<|end|>" == tokenizer.pad_token
    model = AutoModelForCausalLM.from_pretrained(output / "export")
    assert model.get_input_embeddings().num_embeddings >= len(tokenizer) > tokenizer.eos_token_id


@pytest.mark.parametrize("step", STEPS)
def test_tokenizer_without_pad_works(flags, tiny, output, step, lone_process, no_pictures):
    assert AutoTokenizer.from_pretrained(tiny.base).pad_token is None
    run_here(step, flags(step))
    assert (output / "export/model.safetensors").is_file()


# ---- output


def test_output_of_an_earlier_run(flags, refused, output, lone_process, no_pictures, capsys, monkeypatch):
    output.mkdir()
    (output / "metrics.jsonl").write_text('{"step": 1, "sft/loss": 2.0}\n')
    (output / "train.log").write_text("tee made this before the program began\n")
    for step in STEPS:
        (message,) = refused(step, flags(step))
        assert f"--output_dir {output} holds metrics.jsonl" in message and "--resume never" in message
    monkeypatch.undo()
    run_here(1, flags(1, overwrite_output_dir=True, eval_fraction=0))
    assert len(read_metrics(output)) == 1 and read_curve(output, "sft/loss") != [2.0]


def test_output_that_cannot_be_written(flags, refused, tmp_path):
    (tmp_path / "file").write_text("")
    (message,) = refused(1, flags(1, output_dir=tmp_path / "file/output"))
    assert f"--output_dir {tmp_path}/file/output" in message and "choose another" in message
    if os.geteuid() != 0:  # nothing is closed to root
        (tmp_path / "closed").mkdir(mode=0o500)
        (message,) = refused(1, flags(1, output_dir=tmp_path / "closed/output"))
        assert f"--output_dir {tmp_path}/closed/output" in message


def test_a_refused_run_leaves_an_earlier_one_alone(flags, refused, output):
    output.mkdir()
    (output / "metrics.jsonl").write_text('{"step": 1, "sft/loss": 2.0}\n')
    # found late: when the data are built
    messages = refused(1, flags(1, overwrite_output_dir=True, per_device_train_batch_size=500))
    assert len(messages) == 1 and "--per_device_train_batch_size 500" in messages[0]


# ---- all together


def test_all_problems_in_one_message(flags, refused, tmp_path):
    output = tmp_path / "output"
    output.mkdir()
    (output / "metrics.jsonl").write_text("")
    (tmp_path / "empty").mkdir()
    wrong = {
        "model_name_or_path": tmp_path / "empty",
        "data_path": tmp_path / "absent.jsonl",
        "dtype": "fp16",
        "offload": "param",
        "zero_stage": 2,
        "learning_rate": "fast",
        "per_device_train_batch_size": 0,
        "zero_stge": 3,
    }
    messages = refused(1, flags(1, **wrong))
    for word in (
        f"--output_dir {output}", "config.json", "absent.jsonl", "--dtype fp16", "--offload param",
        "--learning_rate fast", "--per_device_train_batch_size 0", "--zero_stge",
    ):  # fmt: skip
        assert sum(word in message for message in messages) == 1, word
    assert len(messages) == 8


@pytest.mark.slow
def test_the_real_command_line(flags, tmp_path):
    """Exit code, stderr and silence elsewhere, as a shell sees them; two ranks say it once."""
    wrong = as_flags(flags(3, critic_model_name_or_path=tmp_path / "absent", zero_stage=2))
    command = [sys.executable, "step3_ppo/main.py", *wrong]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=TIME_LIMIT
    )
    assert done.returncode == 2 and done.stdout == ""
    assert "Traceback" not in done.stderr and done.stderr.startswith(
        "error: 2 problems, nothing was started:\n"
    )
    assert f"--critic_model_name_or_path {tmp_path}/absent" in done.stderr
    assert (
        "unknown flag --zero_stage; did you mean --actor_zero_stage?" in done.stderr
        or "--critic_zero" in done.stderr
    )
    assert list(tmp_path.iterdir()) == []


# ---- while it runs


@pytest.mark.slow
def test_ctrl_c_saves_and_leaves(flags, output):
    words = as_flags(flags(1, max_train_steps=100_000, num_train_epochs=100_000))
    log = output.with_suffix(".log")
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "step1_sft/main.py", *words],
            cwd=ROOT,
            env=environment(),
            stdout=file,
            stderr=file,
        )
    try:
        give_up = time.monotonic() + TIME_LIMIT
        while "step     5/" not in log.read_text() and process.poll() is None and time.monotonic() < give_up:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        started = time.monotonic()
        code = process.wait(timeout=30)
    finally:
        process.kill()
    assert code == STOPPED, log.read_text()[-3000:]
    assert time.monotonic() - started < 10
    last = log.read_text().splitlines()[-1]
    assert "Traceback" not in log.read_text() and last.startswith("stopped after step-") and "resumes" in last
    assert "export" not in {path.name for path in output.iterdir()}
    assert [row["step"] for row in read_metrics(output)][:2] == [1, 2]  # whole lines, written as they came


def test_a_loss_that_is_not_finite_is_refused(flags, output, lone_process, no_pictures):
    bad = flags(1, learning_rate=1e30, gradient_clipping=0, max_train_steps=20, num_train_epochs=20)
    with pytest.raises(TooManyBadSteps, match=r"not finite: sft/loss.*learning rate.*\nskipped 4 steps"):
        run_here(1, bad)
    assert not (output / "export").exists()
    assert len(list((output / "bad_batches").iterdir())) == 4
