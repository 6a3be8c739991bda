"""Flags of the programs beside the steps: two values of one say two things. See test_flags_act.py."""

import dataclasses
import io
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import tiny_inputs
import torch
from fastapi.testclient import TestClient
from program_runs import as_flags, run_here

import chat
from arena import ArenaArguments, serve
from serving import prompt_eval, reward_server
from serving.prompt_eval import PromptEvalArguments
from serving.reward_server import ServeArguments
from step2_reward.arguments import RewardEvalArguments

pytestmark = pytest.mark.slow

MESSAGES = {"model": "a", "seed": 7, "messages": [{"role": "user", "content": "How are you?"}]}
TEXTS = {"prompts": ["How are you?"] * 2, "responses": ["fine", "the quick brown fox"]}


def said(main: Callable[[], None], capsys: pytest.CaptureFixture) -> str:
    """What a program prints, or the code that it leaves with."""
    capsys.readouterr()
    try:
        main()
    except SystemExit as left:
        return f"left with {left.code}: {capsys.readouterr().err}"
    lines = capsys.readouterr().out.splitlines()
    return "\n".join(line for line in lines if "token cache" not in line)  # made or reused


def run_top(program: Any, words: list[str]) -> None:
    """Run a program that trains nothing."""
    with mock.patch.object(sys, "stdin", io.StringIO("How are you?\n")):
        program.main(words)


def answers(start: Callable[[], None], path: str, body: dict[str, Any]) -> None:
    """Print what the application of a server answers, in place of serving it."""

    def ask(server: Any, sockets: Any = None) -> None:
        client = TestClient(server.config.app, base_url="http://localhost:8080")
        found = client.post(path, json=body)
        data = found.json()
        print(found.status_code, data.get("scores") or [c["message"] for c in data.get("choices", [])])

    with mock.patch("uvicorn.Server.run", ask), mock.patch("builtins.print", wraps=_without_places):
        start()


def _without_places(*words: Any, **more: Any) -> None:
    if str(words[0]).isdigit():  # a status; the rest names ports
        sys.stdout.write(" ".join(map(str, words)) + "\n")


RUNS: dict[type, Callable[[list[str]], None]] = {
    RewardEvalArguments: lambda words: run_here(2, words, module="rw_eval"),
    PromptEvalArguments: lambda words: run_top(prompt_eval, words),
    chat.ChatArguments: lambda words: run_top(chat, words),
    ServeArguments: lambda words: answers(lambda: run_top(reward_server, words), "/score", TEXTS),
    ArenaArguments: lambda words: answers(lambda: serve(words), "/v1/chat/completions", MESSAGES),
}
BASE: dict[type, dict[str, Any]] = {
    RewardEvalArguments: {
        "model_name_or_path": "{reward}", "data_path": "{rows}", "data_output_path": "{cache}",
        "dtype": "fp32",
    },
    PromptEvalArguments: {
        "model_name_or_path_baseline": "{base}", "model_name_or_path_finetune": "{gpt2}", "dtype": "fp32",
        "max_new_tokens": 8, "num_prompts": 3,
    },
    chat.ChatArguments: {"path": "{base}", "dtype": "fp32", "max_new_tokens": 8},
    ServeArguments: {"model_name_or_path": "{reward}", "dtype": "fp32", "port": 0},
    ArenaArguments: {
        "models": "a={base}", "dtype": "fp32", "max_new_tokens": 8, "port": 0, "db": "{folder}/db",
    },
}  # fmt: skip
TOKENS = {"eot_token": "a", "add_eot_token": (True, {"eot_token": "<|eot|>"})}
SAMPLED = {"temperature": 2.0, "top_k": 1, "top_p": 0.1, "max_new_tokens": 3}
ANSWERING = TOKENS | {"template": "plain", "dtype": "bf16"}
ACTS: dict[type, dict[str, Any]] = {
    RewardEvalArguments: TOKENS
    | {
        "max_pairs_per_prompt": (1, {"data_path": "{ranked}"}),
        "data_path": "{ranked}",
        "template": "plain",
        "score_column": ("quality", {"data_path": "{scored}"}),
        "columns": ("prompt=response,response=prompt", {"data_path": "{scored}"}),
        "model_name_or_path": "{reward2}",
        "max_seq_len": 12,
        "dtype": "bf16",
        "num_samples": 1,
        "seed": (5, {"data_path": "{parts}"}),
    },
    PromptEvalArguments: ANSWERING
    | {
        "seed": (5, {"num_return_sequences": 2}),
        "model_name_or_path_baseline": "{gpt2}",
        "model_name_or_path_finetune": "{base}",
        "model_name_or_path_rlhf": "{base}",
        "data_path": "{rows}",
        "num_prompts": 2,
        "language": "Chinese",
        "max_new_tokens": 3,
        "num_return_sequences": 2,
        "top_k": (1, {"num_return_sequences": 2}),
    },
    chat.ChatArguments: ANSWERING
    | SAMPLED
    | {"chat_template_kwargs": ('{{"brief": "a"}}', {"path": "{chatty}"})}
    | {"seed": 5, "path": "{gpt2}", "compare": "{gpt2}", "reward": "{reward}", "system": "Be brief."},
    ServeArguments: TOKENS
    | {
        "model_name_or_path": "{reward2}",
        "token_file": "{token}",
        "max_request_bytes": 10,
        "max_request_rows": 1,
        "max_text_characters": 5,
        "max_seq_len": 3,
        "dtype": "bf16",
    },
    ArenaArguments: ANSWERING
    | SAMPLED
    | {"models": "a={gpt2}", "token_file": "{token}", "max_request_bytes": 9, "max_seq_len": 3},
}  # fmt: skip
ELSEWHERE = {
    "places": "data_output_path plugins host port db",
    "of hub names": "trust_remote_code",
    "limits, time alone": "no_cuda_graphs max_bad_rows per_device_eval_batch_size batch_size",
    "memory and time alone": "generation_slots",
    "drawn by people": "data_path",
    "of chat templates, by the same code as chat.py's": "chat_template_kwargs",
}
CASES = [
    pytest.param(cls, flag, *(case if isinstance(case, tuple) else (case, {})), id=f"{cls.__name__}-{flag}")
    for cls, flags in ACTS.items()
    for flag, case in flags.items()
]


@pytest.mark.parametrize("cls", RUNS)
def test_every_flag_is_in_a_table(cls):
    fields = {field.name for field in dataclasses.fields(cls)}
    known = {name for names in ELSEWHERE.values() for name in names.split()}
    assert fields - set(ACTS[cls]) - known == set() and set(ACTS[cls]) - fields == set()


@pytest.fixture(scope="module")
def inputs(more_inputs, tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("tools")
    (folder / "token").write_text("a-token-of-a-test-that-nobody-guesses\n")
    rows = tiny_inputs.make_rows(12, seed=3)
    (folder / "parts").mkdir()
    for name in ("rows", "parts/train", "parts/eval"):
        tiny_inputs.write_rows(folder / f"{name}.jsonl", rows)
    own = {"rows": folder / "rows.jsonl", "parts": folder / "parts", "token": folder / "token"}
    return more_inputs | {name: str(path) for name, path in own.items()} | {"folder": str(folder)}


def outcome(cls: type, flags: dict[str, Any], inputs: dict[str, str], capsys: pytest.CaptureFixture) -> str:
    """What a program prints that is started with these flags."""
    values = {k: v.format(**inputs) if isinstance(v, str) else v for k, v in flags.items()}
    torch.manual_seed(0)
    return said(lambda: RUNS[cls](as_flags(values)), capsys)


@pytest.mark.parametrize(("cls", "flag", "value", "beside"), CASES)
def test_a_flag_acts(cls, flag, value, beside, inputs, lone_process, capsys):
    flags = BASE[cls] | beside
    base = outcome(cls, flags, inputs, capsys)
    assert base and base == outcome(cls, flags, inputs, capsys)
    assert base != outcome(cls, flags | {flag: value}, inputs, capsys)
