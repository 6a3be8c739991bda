"""Checks before any model is loaded. The programs' own tests show each message as a user sees it."""

import contextlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from pretended_gpu import pretended_gpu

from common.data.example import Message
from common.flags.args import Problems
from common.models import model_flops
from common.models.transformers_internals import TRANSFORMERS
from common.programs import model_checks
from common.programs.conversation_form import describe_form, find_template
from common.programs.startup import (
    GROUP_VARIABLES,
    check_device,
    check_environment,
    check_run,
    choose_tf32,
)
from common.ranks import distributed
from common.ranks.deepspeed_internals import DEEPSPEED
from common.runs.resume import resolve_dtype
from step1_sft.arguments import SFTArguments


@pytest.mark.parametrize(
    ("given", "default", "stage", "is_good"),
    [
        ("fp32", "bf16", 0, False),
        ("bf16", "fp32", 0, True),
        ("", "fp32", 0, False),
        ("", "bf16", 0, True),  # bf16 runs at stage 1 at least, also where it is the machine's default
        ("", "fp32", 1, True),
    ],
)
def test_optimizer_offload_is_judged_by_the_stage_that_is_run(given, default, stage, is_good, monkeypatch):
    monkeypatch.setattr(distributed, "dtype_name", lambda flag: flag or default)
    problems = Problems()
    check_run(SFTArguments(offload="optimizer", dtype=given, zero_stage=stage), problems)
    assert (problems.messages == []) == is_good


@pytest.mark.parametrize(
    ("stage", "offload", "is_good"),
    [(1, "none", False), (2, "none", True), (2, "optimizer", False), (3, "optimizer", True)],
)
def test_gradients_are_summed_in_fp32_where_a_step_can_still_be_refused(stage, offload, is_good, tmp_path):
    (tmp_path / "ds.json").write_text('{"data_types": {"grad_accum_dtype": "fp32"}}')
    flags = {"dtype": "bf16", "zero_stage": stage, "offload": offload}
    problems = Problems()
    check_run(SFTArguments(ds_config=str(tmp_path / "ds.json"), **flags), problems)
    assert is_good or "grad_accum_dtype fp32 needs --zero_stage 3, or 2 without --off" in problems.messages[0]
    assert len(problems.messages) == (not is_good)


def test_the_template_that_a_model_was_trained_with_is_the_default(tmp_path, make_tokenizer):
    """Another one is named; without a record a chat template is used."""
    tokenizer = make_tokenizer()

    def found(given: str = "") -> tuple[str, str]:
        args, problems = SFTArguments(template=given), Problems()
        _, notes = find_template("--model_name_or_path", str(tmp_path), args, tokenizer, problems)
        assert problems.messages == []
        return args.template, " ".join(notes)

    assert found() == ("human_assistant", "")
    (tmp_path / "triptych.json").write_text('{"template": "plain"}')
    assert found() == ("plain", "")
    name, said = found("human_assistant")
    assert name == "human_assistant" and f"{tmp_path} was trained with --template plain; leave the" in said
    (tmp_path / "triptych.json").write_text("{}")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    name, said = found()
    assert name == "chat" and "has a chat template, which is used; --template human_assistant" in said
    assert found("chat") == ("chat", "") and found("human_assistant") == ("human_assistant", "")
    (tmp_path / "triptych.json").write_text('{"template": "human_assistant"}')
    assert found() == ("human_assistant", "")


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("given", ["", "<|endoftext|>"])
def test_the_token_that_a_chat_template_ends_turns_with_becomes_eos_unless_another_is_given(
    given, tmp_path, make_tokenizer
):
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    args, problems = SFTArguments(eot_token=given), Problems()
    template, notes = find_template("--model_name_or_path", str(tmp_path), args, tokenizer, problems)
    if given:
        assert template is None and "pass that token as --eot_token" in problems.messages[0]
    else:
        assert tokenizer.eos_token == template.eot_token == "<|im_end|>" and not problems.messages
        assert "turns end with '<|im_end|>'" in notes[0]


def test_variables_of_a_chat_template_are_recorded_and_taken_up(tmp_path, make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{{ brief }}{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    )
    args = SFTArguments(chat_template_kwargs='{"brief": "Be brief."}')
    template, _ = find_template("--model_name_or_path", str(tmp_path), args, tokenizer, Problems())
    assert template.prompt_text([Message("user", "Hi")]).startswith("Be brief.Hi")
    (tmp_path / "triptych.json").write_text(json.dumps(describe_form(args)))
    later = SFTArguments()
    again, _ = find_template("--model_name_or_path", str(tmp_path), later, tokenizer, Problems())
    assert again.digest() == template.digest() and later.template == "chat"
    for wrong, word in (("[1]", "give a JSON object"), ("{brief", "property name")):
        problems = Problems()
        args = SFTArguments(chat_template_kwargs=wrong, template="chat")
        find_template("--model_name_or_path", str(tmp_path), args, tokenizer, problems)
        assert word in problems.messages[0]


def problems_in(monkeypatch, **environment: str) -> list[str]:
    """Return what is wrong with an environment that has these variables of a launcher and no others."""
    for name in (*GROUP_VARIABLES, "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    problems = Problems()
    assert check_environment(problems) == (problems.messages == [])
    return problems.messages


GOOD = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("environment", [{}, GOOD, {"WORLD_SIZE": "1"}])
def test_good_surroundings(monkeypatch, environment):
    assert problems_in(monkeypatch, **environment) == []


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 in the environment"),
        ({"LOCAL_RANK": "one"}, "LOCAL_RANK=one in the environment"),
        (GOOD | {"RANK": "2"}, "RANK=2 WORLD_SIZE=2 "),
        (GOOD | {"MASTER_PORT": "65536"}, "MASTER_PORT=65536 "),
        (GOOD | {"MASTER_ADDR": ""}, "MASTER_ADDR= "),
    ],
)
def test_bad_surroundings_are_named_with_a_cure(monkeypatch, environment, words):
    (message,) = problems_in(monkeypatch, **environment)
    assert words in message and ";" in message


@pytest.mark.parametrize(
    ("rank", "local_rank", "by_all", "is_told"),
    [
        ("one", "", False, True),  # nobody may be the first process then
        ("3", "3", False, False),
        ("3", "3", True, True),
        ("8", "0", False, True),  # its machine may lack a file that the first one has
    ],
)
def test_who_tells_the_problems(monkeypatch, capsys, rank, local_rank, by_all, is_told):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    problems = Problems()
    problems.add("something")
    with pytest.raises(SystemExit):
        problems.exit_if_any(on_every_rank=by_all)
    assert ("something" in capsys.readouterr().err) == is_told


@pytest.mark.usefixtures("process_group")
@pytest.mark.skipif(not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="torch 2.11")
@pytest.mark.parametrize(
    ("variable", "found"),
    [("", "expandable_segments:True,pinned_max_round_threshold_mb:1"), ("PYTORCH_CUDA_ALLOC_CONF", "")],
)
def test_blocks_of_gpu_memory_grow_unless_the_user_says_how(monkeypatch, variable, found):
    for name in {*distributed.ALLOCATOR_VARIABLES, "NCCL_GRAPH_REGISTER"}:
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "max_split_size_mb:64")
    torch._C._accelerator_setAllocatorSettings("")
    distributed.start()  # without a GPU nothing is set
    assert torch._C._accelerator_getAllocatorSettings() == "" and "NCCL_GRAPH_REGISTER" not in os.environ
    with pretended_gpu():
        distributed.start()
    assert os.environ["NCCL_GRAPH_REGISTER"] == "0"
    assert torch._C._accelerator_getAllocatorSettings() == found
    torch._C._accelerator_setAllocatorSettings("")


@pytest.mark.usefixtures("process_group")
def test_a_torch_that_always_rounds_pinned_memory_gets_the_other_setting(monkeypatch):
    def set_settings(text: str) -> None:
        if "pinned" in text:
            raise ValueError("Unrecognized key 'pinned_max_round_threshold_mb'")
        known.append(text)

    for name in distributed.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    known: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", set_settings)
    with pretended_gpu():
        distributed.start()
    assert known == ["expandable_segments:True"]


TURING, AMPERE = (7, 5), (8, 0)


@pytest.mark.parametrize(
    ("capability", "dtype", "resolved", "problem", "note"),
    [
        (AMPERE, "", "bf16", "", ""),
        (AMPERE, "bf16", "bf16", "", ""),
        (TURING, "", "fp32", "", " emulates bf16, slower than fp32: this runs in fp32; --dtype fp16"),
        (TURING, "fp16", "fp16", "", ""),
        (TURING, "bf16", "bf16", " emulates bf16, slower than fp32; use fp16 or fp32", ""),
        (None, "fp16", "fp16", "--dtype fp16 needs a GPU; use fp32", ""),
    ],
)
def test_bf16_is_for_gpus_that_compute_in_it(capability, dtype, resolved, problem, note):
    problems = Problems()
    with pretended_gpu(capability=capability) if capability else contextlib.nullcontext():
        notes = check_device(dtype, problems)
        assert distributed.dtype_name(dtype) == resolved
    assert [problem in text for text in problems.messages] == [True] * bool(problem)
    assert problem or [note in text for text in notes] == [True] * bool(note)


@pytest.mark.parametrize("is_fast", [True, False])
@pytest.mark.parametrize("dtype", ["", "fp32", "bf16"])
def test_bf16_on_a_cpu_without_such_products_is_said(dtype, is_fast, monkeypatch):
    monkeypatch.setattr(distributed, "is_for_onednn", lambda of: is_fast or of == torch.float32)
    notes = check_device(dtype, Problems())
    assert ["bf16 can take many times as long" in note for note in notes] == [True] * (
        dtype == "bf16" and not is_fast
    )


@pytest.mark.parametrize(
    ("tf32", "dtype", "capability", "is_used", "is_said"),
    [
        ("auto", "bf16", (8, 0), True, True),
        ("auto", "fp32", (8, 0), False, False),
        ("true", "fp32", (9, 0), True, True),
        ("false", "bf16", (8, 0), False, False),
        ("auto", "fp16", (7, 5), True, False),  # a T4 has none
    ],
)
def test_tf32_is_for_runs_that_are_not_in_fp32(
    tf32, dtype, capability, is_used, is_said, monkeypatch, capsys
):
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace())
    with pretended_gpu(capability):
        choose_tf32(tf32, dtype)
    assert torch.backends.cuda.matmul.allow_tf32 == is_used
    assert ("TF32" in capsys.readouterr().err) == is_said


def test_dtype_auto_is_the_faster_on_a_cpu_and_the_usual_on_a_gpu(monkeypatch):
    for bf16 in (1e9, 3e9):
        monkeypatch.setattr(model_flops, "measure_flops", {torch.float32: 2e9, torch.bfloat16: bf16}.get)
        args = SFTArguments(dtype="auto")
        (note,) = resolve_dtype(args)
        assert args.dtype == ("bf16" if bf16 > 2e9 else "fp32")
        assert note == f"--dtype auto is {args.dtype}: fp32 2.0 GFLOP/s, bf16 {bf16 / 1e9} GFLOP/s"
        assert resolve_dtype(args) == []
    with pretended_gpu(capability=AMPERE):
        args = SFTArguments(dtype="auto")
        assert resolve_dtype(args) == [] and args.dtype == ""


@pytest.mark.parametrize("name", ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"])
def test_more_ranks_than_gpus_are_told_before_any_of_them_waits(name, monkeypatch, capsys):
    monkeypatch.setenv(name, str(3 - (name == "LOCAL_RANK")))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    problems, has_none = Problems(), name == "LOCAL_RANK"
    is_left = pytest.raises(SystemExit) if has_none else contextlib.nullcontext()
    with pretended_gpu(), mock.patch.object(torch.cuda, "device_count", lambda: 2), is_left:
        check_device("", problems)
    told = "3 ranks on a machine with 2 visible GPUs (CUDA_VISIBLE_DEVICES 4,5); each needs its own; start 2"
    assert told in problems.messages[0] and (told in capsys.readouterr().err) == has_none


def test_the_ranks_gpu_is_chosen_before_cuda_is_asked_anything(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pretended_gpu(capability=TURING) as gpu:
        check_device("", Problems())
        assert gpu.device == torch.device("cuda:1") and not gpu.queries


@pytest.mark.parametrize(
    ("visible", "wants_cpu", "problem", "note"),
    [
        ("0", False, "does not see this machine's GPU (CUDA_VISIBLE_DEVICES 0); update its driver", ""),
        (None, False, "does not see this machine's GPU (CUDA_VISIBLE_DEVICES unset); update", ""),
        ("0", True, "", ""),
        ("", False, "", "CUDA_VISIBLE_DEVICES= in the environment hides the GPUs: this runs on the CPUs"),
        ("-1", False, "", "CUDA_VISIBLE_DEVICES=-1 in the environment hides"),
    ],
)
def test_a_gpu_that_torch_does_not_see_is_a_problem_unless_it_is_hidden(
    visible, wants_cpu, problem, note, tmp_path, monkeypatch
):
    """As with a driver that is too old for the installed torch: the CPUs would train, without a word."""
    problems = Problems()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(distributed, "NVIDIA_DRIVER", (str(tmp_path / "absent"),))
    assert check_device("", problems) == problems.messages == []
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(distributed, "NVIDIA_DRIVER", (str(tmp_path),))
    monkeypatch.setattr(distributed, "IS_CPU_ASKED_FOR", wants_cpu)
    notes = check_device("", problems)
    assert [problem in text for text in problems.messages] == [True] * bool(problem)
    assert [note in text for text in notes] == [True] * bool(note)
    assert not problem or "DS_ACCELERATOR=cpu" in problems.messages[0]


# ---- the folder of a model


@pytest.mark.parametrize(
    "text", ["[]", "{", "5", '{"template": 5}', '{"chat_template_kwargs": {}}', "[" * 100_000, "\xff"]
)
def test_a_record_of_another_form_is_named(text, tmp_path):
    (tmp_path / "triptych.json").write_text(text, encoding="latin-1")
    problems = Problems()
    assert model_checks.check_model("--model_name_or_path", str(tmp_path), SFTArguments(), problems) is None
    (problem,) = problems.messages
    assert str(tmp_path / "triptych.json") in problem and "remove the file" in problem


@pytest.mark.parametrize("closed", ["model.safetensors", ""])
def test_what_may_not_be_read_is_named_with_its_path(closed, tiny_model_folder, tmp_path, monkeypatch):
    """The tests may run as root, who may read everything."""
    folder = Path(shutil.copytree(tiny_model_folder("llama"), tmp_path / "model"))
    access, listing = os.access, Path.iterdir

    def refuse(path: Path):
        if path == folder and not closed:
            raise PermissionError(13, "Permission denied", str(path))
        return listing(path)

    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != closed and access(path, mode))
    monkeypatch.setattr(Path, "iterdir", refuse)
    problems = Problems()
    assert model_checks.check_model("--model_name_or_path", str(folder), SFTArguments(), problems) is None
    assert problems.messages == [
        f"--model_name_or_path {folder / closed} cannot be read by this user; "
        f"its owner can run chmod -R a+rX {folder}"
    ]


@pytest.mark.parametrize(("library", "version"), [("deepspeed", "0.18.9"), ("transformers", "4.57.6")])
def test_untested_versions_of_libraries_are_rejected_with_the_cure(library, version, monkeypatch):
    installed = importlib.metadata.version
    args = SFTArguments()
    problems = Problems()
    check_run(args, problems)
    assert not [text for text in problems.messages if library in text]
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: version if name == library else installed(name)
    )
    check_run(args, problems)
    assert any(f"{library} {version}" in text and "pip install" in text for text in problems.messages)


def test_versions_that_are_required_are_those_that_were_tested():
    lines = Path("requirements.txt").read_text()
    assert f"deepspeed{DEEPSPEED} " in lines and f"transformers{TRANSFORMERS} " in lines


def test_freed_memory_is_kept():
    """Pages that are touched again need no fault of the system; each tensor of 64 MiB has 16,384."""
    code = (
        "import resource, torch; from common.programs.startup import keep_freed_memory; {}\n"
        "for _ in range(2): torch.ones(2**24)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "for _ in range(4): torch.ones(2**24)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)"
    )
    root = Path(__file__).resolve().parents[2]
    faults = [
        int(subprocess.check_output([sys.executable, "-c", code.format(call)], cwd=root))
        for call in ("", "keep_freed_memory()")
    ]
    assert faults[1] < faults[0] / 4
