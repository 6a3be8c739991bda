"""Judgements of an arena train a reward model that shares the judge's taste."""

import random
import re
import subprocess
import sys
from collections import Counter

import httpx
import pytest
import tiny_inputs
from program_runs import ROOT, environment, read_curve, run_here
from tiny_inputs import step_flags

from arena import export

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("lone_process", "no_pictures")]

NUM_PAIRS = 160  # drawn anew in every run, answers too
LETTER = "o"  # the judge's taste: the more of them, the better. Four of the thirteen words have one


def judge_pairs(client: httpx.Client) -> Counter[str]:
    """Judge pairs for prompts of the data set as a person would; return how often each choice was made."""
    choices: Counter[str] = Counter()
    for _ in range(NUM_PAIRS):
        events = [httpx.Response(200, content=line).json()
                  for line in client.post("/api/pairs", json={"draw": True}).text.splitlines()]  # fmt: skip
        letters = {e["side"]: e["text"].count(LETTER) for e in events if e["event"] == "end"}
        choice = "tie" if letters["a"] == letters["b"] else max("ab", key=letters.__getitem__)
        answer = client.post("/api/judgements", json={"pair": events[0]["id"], "choice": choice})
        assert answer.status_code == 200, answer.text
        choices[choice] += 1
    return choices


def test_a_reward_model_learns_what_a_judge_prefers(tiny, tmp_path):
    """The SFT model speaks in words drawn at random, and is judged against itself."""
    draw, words = random.Random(5), list(tiny_inputs.WORDS)
    rows = [
        {"prompt": f"{draw.choice(words)} {number}?", "answer": " ".join(draw.choices(words, k=6))}
        for number in range(300)
    ]
    prompts = tiny_inputs.write_rows(tmp_path / "rows.jsonl", rows)
    sft, reward = tmp_path / "sft", tmp_path / "reward"
    shared = {"per_device_train_batch_size": 16, "dtype": "fp32"}
    flags = {"data_path": prompts, "data_split": "1,0,0", "num_train_epochs": 5, "learning_rate": 5e-3}
    run_here(1, step_flags(tiny, 1, **shared, **flags, output_dir=sft))

    database, pairs = tmp_path / "arena.sqlite3", tmp_path / "preferences.jsonl"
    told = f"arena.py sft={sft}/export again={sft}/export --db {database} --data_path {prompts} --port 0"
    told += " --max_new_tokens 16 --temperature 1 --top_p 1 --dtype fp32"
    command = [sys.executable, *told.split()]
    with subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True) as server:
        try:
            address = re.search(r"http://[\d.:]+", server.stdout.readline())[0]
            with httpx.Client(base_url=address, timeout=60) as client:
                choices, results = judge_pairs(client), client.get("/api/results").json()
        finally:
            server.terminate()
    assert results["choices"] == choices
    [duel] = results["duels"]
    num_decided = choices["a"] + choices["b"]
    # The same model under two names: no more than four standard deviations from half, once in 16,000 runs.
    assert abs(duel["rate"]["value"] - 0.5) < 2 / num_decided**0.5
    export([str(pairs), "--db", str(database)])
    assert num_decided - 10 < len(pairs.read_text().splitlines()) <= num_decided, "but for empty answers"

    flags = {"data_path": pairs, "data_split": "0,1,0", "num_train_epochs": 10, "learning_rate": 3e-3}
    flags |= {"model_name_or_path": sft / "export", "max_seq_len": 64, "output_dir": reward}
    run_here(2, step_flags(tiny, 2, **shared, **flags))
    assert sum(read_curve(reward, "reward/accuracy")[-5:]) / 5 > 0.8
