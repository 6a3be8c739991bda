"""Each program as it is started in earnest: the files it leaves, what it says, and how the next goes on."""

import json
import os
import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from program_runs import ROOT, STEPS, as_flags, files_in, read_curve, read_metrics, run, run_here, torchrun
from tiny_inputs import step_flags
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from export import main as run_export

EXPORT = {
    "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    "triptych.json", "README.md",
}  # fmt: skip
CLASSIFIER = EXPORT - {"generation_config.json"}
ALWAYS = {
    "args.json",
    "config.yaml",
    "metrics.jsonl",
    "digests.jsonl.gz",
    "finished.json",
    "report.html",
    "run.json",
    "lock.json",
}
NUM_STEPS = 3


def whole_program(test):
    return pytest.mark.slow(pytest.mark.smoke(test))


def checkpoints(*parts: str, epochs: tuple[int, ...] = (), ranks: int = 1) -> set[str]:
    """Return the files of the checkpoints: of the last step, and of those that end an epoch."""
    pieces = {f"{part}-rank-{rank:05d}.safetensors" for part in (*parts, "random") for rank in range(ranks)}
    found = [within(f"checkpoints/step-{step:06d}", pieces | {"meta.json"}) for step in (*epochs, NUM_STEPS)]
    return set().union(*found)


def within(folder: str, names: set[str]) -> set[str]:
    return {f"{folder}/{name}" for name in names}


def short_flags(tiny, step: int, **more) -> dict:
    flags = {} if step == 3 else {"num_train_epochs": 2, "learning_rate": 1e-3, "eval_fraction": 0.2}
    shared = {"max_train_steps": NUM_STEPS, "save_interval": "epoch", "data_split": "2,4,4"}
    return step_flags(tiny, step, **shared | flags | more)


def check_log(text: str, output: Path, num_steps: int, num_evaluations: int) -> None:
    """One line a step under one heading, a table an evaluation, and last where the result is."""
    lines = text.splitlines()
    steps = [line for line in lines if re.match(rf" +\d+/{num_steps}  ", line)]
    tables = [line for line in lines if re.match(rf"after step \d+/{num_steps} +value +change$", line)]
    assert len(steps) == num_steps and len(tables) == num_evaluations, text
    (heading,) = (line for line in lines if line.split()[0] == "step")
    assert {len(line) for line in steps} == {len(heading)} and len(heading) <= 110
    assert re.match(
        r"\w+ data: \d+ train and \d+ eval rows of \d+ raw rows, \d+ tokens, token cache", lines[0]
    )
    assert lines[-2].startswith(f"saved {output}/export; try it: python ")
    assert lines[-2].endswith(f"; curves: {output}/report.html")
    assert re.match(r"result: \S+ -?[\d.]+ before, -?[\d.]+ after", lines[-1])


# ---- step by step, each with what the one before left: plain python from the root


@pytest.fixture(scope="module")
def pipeline(tiny, tmp_path_factory) -> dict:
    """Run SFT, reward model, its evaluation and PPO; each starts from the exports of those before."""
    folder = tmp_path_factory.mktemp("pipeline")
    sft, reward, ppo = (folder / name for name in STEPS.values())
    done = {}

    def start(script: str, flags: dict) -> None:
        before = os.umask(0o027)
        done[script] = run([sys.executable, script, *as_flags(flags)])
        os.umask(before)

    start("step1_sft/main.py", short_flags(tiny, 1, output_dir=sft, lora_dim=4))
    of_sft = {"output_dir": reward, "model_name_or_path": sft / "export"}
    start("step2_reward/main.py", short_flags(tiny, 2, **of_sft))
    rows = {"data_path": tiny.rows, "data_output_path": tiny.cache, "max_seq_len": 48, "num_samples": 2}
    start("step2_reward/rw_eval.py", {"model_name_or_path": reward / "export"} | rows)
    models = {"actor_model_name_or_path": sft / "export", "critic_model_name_or_path": reward / "export"}
    more = {"output_dir": ppo, "enable_ema": True, "print_answers": True}
    more |= {"per_device_generation_batch_size": 8, "num_train_epochs": 2}  # of 2 steps each
    start("step3_ppo/main.py", short_flags(tiny, 3, **models, **more))
    return {"sft": sft, "reward": reward, "ppo": ppo, "done": done}


@whole_program
def test_the_files_of_a_run_have_the_rights_that_umask_leaves(pipeline):
    rights = {path: path.stat().st_mode & 0o777 for path in pipeline["sft"].parent.rglob("*")}
    assert {p: oct(r) for p, r in rights.items() if r != (0o750 if p.is_dir() else 0o640)} == {}


@whole_program
def test_step1_leaves(pipeline):
    output, done = pipeline["sft"], pipeline["done"]["step1_sft/main.py"]
    adapter = {"adapter_config.json", "adapter_model.safetensors"}
    adapter |= {"tokenizer.json", "tokenizer_config.json", "triptych.json", "README.md"}
    expected = within("export", EXPORT) | within("adapter", adapter) | checkpoints("model", epochs=(2,))
    assert files_in(output) == ALWAYS | expected
    # 10 rows make 2 steps of 4 at most: the third step is in the second epoch
    assert len(read_metrics(output, "sft/loss")) == NUM_STEPS
    evaluations = read_metrics(output, "sft/eval_loss")
    assert [row["step"] for row in evaluations] == [0, 2, 3]
    assert len(read_metrics(output)) == NUM_STEPS + len(evaluations)
    check_log(done.stdout, output, NUM_STEPS, len(evaluations))
    arguments = json.loads((output / "args.json").read_text())
    assert arguments["max_train_steps"] == NUM_STEPS and arguments["resolved_dtype"] in ("fp32", "bf16")
    about = json.loads((output / "run.json").read_text())
    assert about["num_steps"] == NUM_STEPS and about["defaults"]["max_train_steps"] == 0
    (start,) = about["starts"]
    assert start["from_step"] == 0 and start["data_key"] and start["versions"]["torch"] == version("torch")
    report = (output / "report.html").read_text()
    assert f"finished, {NUM_STEPS} steps" in report and "sft/eval_perplexity" in report
    assert start["data_key"] in report and "--max_train_steps" in report
    metadata = json.loads((output / "export/triptych.json").read_text())
    assert metadata["template"] == "human_assistant" and metadata["eval_perplexity"] > 1
    model = AutoModelForCausalLM.from_pretrained(output / "export")
    tokenizer = AutoTokenizer.from_pretrained(output / "export")
    ids = tokenizer("the quick brown fox", return_tensors="pt").input_ids
    assert model(ids).logits.isfinite().all()
    assert not [name for name, _ in model.named_parameters() if "lora" in name]


@whole_program
def test_step2_leaves(pipeline):
    output, done = pipeline["reward"], pipeline["done"]["step2_reward/main.py"]
    assert files_in(output) == ALWAYS | within("export", CLASSIFIER) | checkpoints("model")
    assert len(read_metrics(output, "reward/loss")) == NUM_STEPS
    evaluations = read_metrics(output, "reward/eval_accuracy")
    check_log(done.stdout, output, NUM_STEPS, len(evaluations))
    model = AutoModelForSequenceClassification.from_pretrained(output / "export")
    assert model.config.num_labels == 1 and model.config.architectures == ["LlamaForSequenceClassification"]


@whole_program
def test_plain_transformers_gives_the_printed_scores(pipeline):
    """The samples that rw_eval prints, scored by nothing but `from_pretrained`."""
    text = pipeline["done"]["step2_reward/rw_eval.py"].stdout
    export = pipeline["reward"] / "export"
    model = AutoModelForSequenceClassification.from_pretrained(export).eval()
    tokenizer = AutoTokenizer.from_pretrained(export)
    found = re.findall(r"^('.*')\n +chosen +(\S+)  ('.*')\n +rejected +(\S+)  ('.*')$", text, re.MULTILINE)
    assert len(found) == 2
    for prompt, *answers in found:
        for score, answer in (answers[:2], answers[2:]):
            whole = tokenizer(eval(prompt) + eval(answer), return_tensors="pt")
            with torch.no_grad():
                assert float(model(**whole).logits) == pytest.approx(
                    float(score), abs=6e-4
                )  # printed to .001


@whole_program
def test_rw_eval_ends_in_one_line_of_json(pipeline):
    figures = json.loads(pipeline["done"]["step2_reward/rw_eval.py"].stdout.splitlines()[-1])
    assert figures["pairs"] == 50 and 0 <= figures["accuracy"] <= 1
    assert figures.keys() >= {"accuracy", "margin", "calibration_error", "length_correlation"}
    assert figures["margin"] == pytest.approx(figures["chosen_score"] - figures["rejected_score"], abs=1e-4)


@whole_program
def test_step3_leaves(pipeline):
    output, done = pipeline["ppo"], pipeline["done"]["step3_ppo/main.py"]
    assert files_in(output) == (
        ALWAYS
        | {"samples.jsonl"}
        | checkpoints("actor", "critic", "ema", epochs=(2,))
        | within("export", EXPORT)
        | within("export_ema", EXPORT)
    )
    rows = read_metrics(output)
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    not_all = ("perf/actor_score_", "perf/save_")  # --old_logprobs auto: in the first step; after an epoch
    names = [{name for name in row if not name.startswith(not_all)} for row in rows]
    names[0].add("perf/digests_seconds")  # those of a step are known after it
    assert names == names[:1] * NUM_STEPS
    assert "perf/actor_score_seconds" in rows[0] and "perf/actor_score_seconds" not in rows[1]
    check_log(done.stdout, output, NUM_STEPS, 0)
    samples = [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]
    assert [row["step"] for row in samples] == [1, 1, 2, 2, 3, 3]
    assert all(row["prompt"].endswith("Assistant:") for row in samples)
    assert done.stdout.count("  prompt '") == NUM_STEPS  # --print_answers
    assert json.loads((output / "export/triptych.json").read_text())["template"] == "human_assistant"
    for name in ("export", "export_ema"):
        model = AutoModelForCausalLM.from_pretrained(output / name)
        assert model.config.architectures == ["LlamaForCausalLM"] and model.config.use_cache
    critic = output.parent / "critic"
    run_export([str(output), "--what", "critic", "--output", str(critic)])
    assert files_in(critic) == CLASSIFIER
    AutoModelForSequenceClassification.from_pretrained(critic)


@whole_program
def test_nothing_noisy_is_printed(pipeline):
    for script, done in pipeline["done"].items():
        assert "Traceback" not in done.stderr and "Warning" not in done.stderr, f"{script}\n{done.stderr}"
        assert ("adapter" in done.stderr) is ("step1" in script), "only that one has LoRA"


# ---- other ways to start


@pytest.mark.slow
def test_torchrun_prints_once(tiny, output):
    flags = {"output_dir": output, "data_split": "0,1,0", "per_device_train_batch_size": 2, "dtype": "auto"}
    flags = short_flags(tiny, 2, **flags)
    done = run(torchrun("main.py", *as_flags(flags)), cwd=ROOT / "step2_reward")  # from its own folder
    assert files_in(output) == ALWAYS | within("export", CLASSIFIER) | checkpoints("model", ranks=2)
    check_log(done.stdout, output, NUM_STEPS, len(read_metrics(output, "reward/eval_accuracy")))
    assert len(read_curve(output, "reward/loss")) == NUM_STEPS
    chosen = json.loads((output / "args.json").read_text())["resolved_dtype"]
    assert done.stderr.count("--dtype auto") == done.stderr.count(f"--dtype auto is {chosen}: fp32 ") == 1


# ---- in this process: what needs no run of its own


@pytest.mark.parametrize("step", STEPS)
def test_dry_run_prints_json_and_writes_nothing(tiny, tmp_path, capsys, monkeypatch, step):
    folders = {"output_dir": tmp_path / "output", "data_output_path": tmp_path / "cache"}

    def refuse(*_, **__):
        raise AssertionError("a dry run loads no model")

    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", refuse)
    run_here(step, short_flags(tiny, step, dry_run=True, **folders))
    resolved = json.loads(capsys.readouterr().out)
    assert resolved["max_train_steps"] == NUM_STEPS and resolved["resolved_dtype"] in ("fp32", "bf16")
    assert resolved["data_path"] == [str(tiny.rows)]
    assert list(tmp_path.iterdir()) == []
