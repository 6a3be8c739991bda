"""The loop is closed: judgements of an arena train a reward model, PPO learns from it, and wins the arena."""

import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import tiny_inputs
from program_runs import ROOT, as_flags, environment, read_curve, read_metrics, run_here

from arena import export

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("lone_process", "no_pictures")]

NUM_TRAINING_PAIRS, NUM_TEST_PAIRS = 160, 32  # drawn anew in every run, answers too
ANSWER_TOKENS = 16
LETTER = "o"  # the judge's taste: the more of them, the better. Four of the thirteen words have one


@contextmanager
def arena_of(models: dict[str, Path], **flags) -> Iterator[httpx.Client]:
    """Give a client of a running arena.py with these models."""
    words = [f"{name}={path}" for name, path in models.items()]
    more = {"port": 0, "max_new_tokens": ANSWER_TOKENS, "temperature": 1, "top_p": 1, "dtype": "fp32"}
    command = [sys.executable, "arena.py", *words, *as_flags(more | flags)]
    with subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True) as server:
        try:
            line = server.stdout.readline()
            address = re.search(r"http://[\d.:]+", line)
            assert address, line
            with httpx.Client(base_url=address[0], timeout=60) as client:
                yield client
        finally:
            server.terminate()


def judge_pairs(client: httpx.Client, count: int) -> Counter[str]:
    """Judge pairs for prompts of the data set as a person would; return how often each choice was made."""
    choices: Counter[str] = Counter()
    for _ in range(count):
        events = [httpx.Response(200, content=line).json()
                  for line in client.post("/api/pairs", json={"draw": True}).text.splitlines()]  # fmt: skip
        letters = {e["side"]: e["text"].count(LETTER) for e in events if e["event"] == "end"}
        choice = "tie" if letters["a"] == letters["b"] else max("ab", key=letters.__getitem__)
        answer = client.post("/api/judgements", json={"pair": events[0]["id"], "choice": choice})
        assert answer.status_code == 200, answer.text
        choices[choice] += 1
    return choices


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    """Questions, and answers of six words drawn at random."""
    draw, words = random.Random(5), list(tiny_inputs.WORDS)
    rows = [
        {"prompt": f"{draw.choice(words)} {number}?", "answer": " ".join(draw.choices(words, k=6))}
        for number in range(300)
    ]
    return tiny_inputs.write_rows(tmp_path_factory.mktemp("prompts") / "rows.jsonl", rows)


@pytest.fixture(scope="module")
def train(tiny, prompts, tmp_path_factory):
    """Run a step on the prompts unless other data are given; return its output folder."""

    def run_step(step: int, **changes) -> Path:
        output = tmp_path_factory.mktemp("run") / "output"
        flags = {"data_path": prompts, "data_output_path": tiny.cache, "output_dir": output, "dtype": "fp32"}
        run_here(step, flags | changes)
        return output

    return run_step


@pytest.fixture(scope="module")
def sft_model(tiny, train) -> Path:
    """A model that speaks in those words."""
    flags = {"model_name_or_path": tiny.base, "data_split": "1,0,0", "max_seq_len": 48, "num_train_epochs": 5}
    return train(1, per_device_train_batch_size=16, learning_rate=5e-3, **flags) / "export"


@pytest.fixture(scope="module")
def preferences(sft_model, prompts, tmp_path_factory) -> Path:
    """What a judge of two samples of the SFT model left, exported."""
    folder = tmp_path_factory.mktemp("judged")
    database = folder / "arena.sqlite3"
    with arena_of({"sft": sft_model, "again": sft_model}, db=database, data_path=prompts) as client:
        choices = judge_pairs(client, NUM_TRAINING_PAIRS)
        results = client.get("/api/results").json()
    assert results["num_judgements"] == NUM_TRAINING_PAIRS and results["choices"] == choices
    [duel] = results["duels"]
    # The same model under two names: no more than four standard deviations from half, once in 16,000 runs.
    assert abs(duel["first_rate"]["value"] - 0.5) < 2 / (choices["a"] + choices["b"]) ** 0.5
    target = folder / "preferences.jsonl"
    export([str(target), "--db", str(database)])
    num_decided, num_rows = choices["a"] + choices["b"], len(target.read_text().splitlines())
    assert num_decided - 10 < num_rows <= num_decided, "but for some with an empty answer"
    return target


@pytest.fixture(scope="module")
def reward_model(train, sft_model, preferences) -> Path:
    """A reward model of those preferences."""
    flags = {"model_name_or_path": sft_model, "data_path": preferences, "data_split": "0,1,0"}
    flags |= {"max_seq_len": 64, "num_train_epochs": 10, "learning_rate": 3e-3}
    output = train(2, per_device_train_batch_size=16, **flags)
    assert sum(read_curve(output, "reward/accuracy")[-5:]) / 5 > 0.8
    return output / "export"


def test_ppo_on_what_people_prefer_wins_the_arena(train, sft_model, reward_model, prompts, tmp_path):
    flags = {
        "actor_model_name_or_path": sft_model, "critic_model_name_or_path": reward_model,
        "data_split": "0,0,1", "max_prompt_seq_len": 24, "max_answer_seq_len": ANSWER_TOKENS,
        "per_device_generation_batch_size": 32, "per_device_training_batch_size": 32,
        "actor_learning_rate": 5e-3, "critic_learning_rate": 3e-3, "lr_scheduler_type": "constant",
        "num_warmup_steps": 0, "num_train_epochs": 1000, "max_train_steps": 24, "ppo_epochs": 2,
        "kl_coef": 0.05,
    }  # fmt: skip
    output = train(3, **flags)
    scores = read_curve(output, "objective/score")
    assert sum(scores[-8:]) > sum(scores[:8]), read_metrics(output)
    models = {"sft": sft_model, "ppo": output / "export"}
    with arena_of(models, db=tmp_path / "arena.sqlite3", data_path=prompts) as client:
        judge_pairs(client, NUM_TEST_PAIRS)
        results = client.get("/api/results").json()
    [duel] = results["duels"]
    assert (duel["first"], duel["second"]) == ("ppo", "sft")
    assert duel["first_rate"]["value"] > 0.5 and duel["first_rate"]["low"] > 0.5, duel
    best, worst = results["ratings"]
    assert best["model"] == "ppo" and best["low"] > worst["high"], results["ratings"]
