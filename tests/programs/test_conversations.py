"""--environment in whole runs: ranks, slots, kept and computed keys, resume."""

import gzip
import json
import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from program_runs import largest_difference, read_curve, read_metrics, read_weights
from test_resume import PPO_POINTS, assert_same_run, stop_and_resume
from tiny_inputs import step_flags, write_rows

from training_scripts.verifiable.build_inputs import CHARACTERS, SEED, build_tokenizer, save_base_model, sums

pytestmark = pytest.mark.slow

MODULE = '''
from examples.own_environment.games import HigherOrLower


class Talk:
    """Asks back twice; each turn is worth the letters of the reply, modulo 4."""

    max_turns = 3

    def reset(self, row):
        assert row["number"] != 5 or not row["fails"], "no such dog"
        return row["messages"]

    def step(self, messages):
        letters = len(messages[-1]["content"])
        return [{"role": "user", "content": f"the dog is {letters} and you?"}], letters % 4, False


class Signs(HigherOrLower):
    higher, lower = "+", "="
'''
GRPO = {
    "algorithm": "grpo", "critic_model_name_or_path": None, "num_samples_per_prompt": 2,
    "per_device_generation_batch_size": 4, "per_device_training_batch_size": 8,
}  # fmt: skip
TWO = {"per_device_generation_batch_size": 2, "per_device_training_batch_size": 4}
PLAIN = {"no_share_prompts": True}  # every prompt for itself, by transformers' generate
RUNS = {  # name: (ranks, flags, the run that it is compared with)
    "grpo, plain": (1, GRPO | PLAIN, ""),
    "grpo, slots, packed": (
        1, GRPO | {"enable_hybrid_engine": True, "generation_slots": 3, "packed": True}, "grpo, plain",
    ),
    "grpo, two ranks, ZeRO 3, cut": (
        2, GRPO | TWO | {"enable_hybrid_engine": True, "inference_tp_size": 2, "actor_zero_stage": 3},
        "grpo, plain",
    ),
    "ppo, plain": (1, PLAIN, ""),
    "ppo, two ranks, ZeRO 2": (
        2, TWO | {"per_device_training_batch_size": 2, "actor_zero_stage": 2, "enable_hybrid_engine": True},
        "ppo, plain",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A working folder with the module `talks` and rows for it."""
    folder = tmp_path_factory.mktemp("talks")
    (folder / "talks.py").write_text(MODULE)
    for name, fails in (("rows", False), ("failing", True)):
        rows = [{"prompt": f"how is dog {n}?", "number": n, "fails": fails} for n in range(24)]
        write_rows(folder / f"{name}.jsonl", rows)
    return folder


@pytest.fixture(scope="module")
def here(forks, folder):
    """The fork server, in that folder."""
    return SimpleNamespace(
        run=partial(forks.run, cwd=str(folder)), run_all=partial(forks.run_all, cwd=str(folder))
    )


@pytest.fixture(scope="module")
def flags_of(tiny, folder):
    """Return the flags of a short run of conversations."""

    def make(**more):
        flags = {
            "data_path": folder / "rows.jsonl", "data_split": "0,0,1", "environment": "talks:Talk",
            "max_answer_seq_len": 48, "max_train_steps": 2, "actor_learning_rate": 1e-3,
            "num_warmup_steps": 0, "save_rollouts": 1, "eval_fraction": 0.2, "save_interval": 0, "top_k": 40,
        }  # fmt: skip
        return step_flags(tiny, 3, **flags | more)

    return make


def rollouts(output: Path) -> list[dict]:
    """The responses of all steps, without numbers that are rounded."""
    with gzip.open(output / "rollouts.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    names = ("prompt", "answer", "score", "num_turns", "is_finished", "response_tokens")
    return [{name: row[name] for name in names} for row in rows]


@pytest.fixture(scope="module")
def finished(here, flags_of, tmp_path_factory):
    outputs = {}

    def make(name: str) -> Path:
        if name not in outputs:
            ranks, flags, _ = RUNS[name]
            outputs[name] = tmp_path_factory.mktemp("run") / "output"
            done = here.run(3, flags_of(**flags, output_dir=outputs[name]), ranks=ranks, seconds=300)
            assert done.codes == [0] * ranks, done.text()
            (outputs[name] / "said.txt").write_text(done.text())
        return outputs[name]

    return make


@pytest.mark.parametrize("name", [name for name, (_, _, other) in RUNS.items() if other])
def test_ranks_slots_and_kept_keys_change_no_text_and_no_weight(name, finished):
    output, plain = finished(name), finished(RUNS[name][2])
    mine, others = rollouts(output), rollouts(plain)
    assert mine == others and len({row["answer"] for row in mine}) == len(mine) >= 8
    assert largest_difference(read_weights(output / "export"), read_weights(plain / "export")) < 1e-5


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("ppo, plain", None),
        ("grpo, two ranks, ZeRO 3, cut", "(actor 3); generation by replica 0 of ranks 0, 1"),
        (
            "ppo, two ranks, ZeRO 2",
            "(actor 2, critic 0); generation by replica 0 of rank 0; replica 1 of rank 1",
        ),
    ],
)
def test_step3_on_two_ranks_says_which_hold_a_replica(name, told, finished):
    lines = (finished(name) / "said.txt").read_text().splitlines()
    expected = [f"2 ranks share every batch and the ZeRO stages {told}"] if told else []
    assert [line for line in lines if "replica" in line or " ranks " in line] == expected


@pytest.mark.parametrize("name", RUNS)
def test_sampler_and_trainer_agree_on_all_that_was_sampled(name, finished):
    output = finished(name)
    assert max(read_curve(output, "policy/logprob_gap")) < 1e-5
    turns, failures = (read_curve(output, f"rollout/{key}") for key in ("turns", "environment_failures"))
    assert failures == [0, 0] and min(read_curve(output, "perf/environment_seconds")) > 0
    told = [row["num_turns"] for row in rollouts(output)]
    assert sum(told) / len(told) == pytest.approx(sum(turns) / 2) and max(told) > 1
    assert min(read_curve(output, "eval/turns")) > 0 < min(read_curve(output, "eval/score"))


def test_a_failure_is_counted_and_masked(here, flags_of, folder, output):
    flags = flags_of(**GRPO, data_path=folder / "failing.jsonl", reward_on_error="mask", output_dir=output)
    done = here.run(
        3, flags | {"per_device_generation_batch_size": 16, "eval_fraction": 0, "max_train_steps": 1}
    )
    assert done.code == 0, done.text()
    [row] = read_metrics(output, "rollout/turns")
    assert row["rollout/environment_failures"] == 2 and row["objective/failed_fraction"] == 2 / 32


def test_a_stopped_run_ends_as_one_that_was_not(here, flags_of, tmp_path):
    """In the middle of a step, whose conversations are over."""
    flags = flags_of(**GRPO, enable_hybrid_engine=True, rollout_staleness=1, ppo_epochs=2)
    flags |= {"save_interval": 1}
    done = here.run(3, flags | {"output_dir": tmp_path / "whole"})
    assert done.code == 0, done.text()
    at, _ = PPO_POINTS["between two minibatches"]
    stop_and_resume(here, (3, 1, flags), tmp_path / "output", {"at": at, "call": 2, "do": "term"})
    assert_same_run(tmp_path / "output", tmp_path / "whole")


# ---- games are learned


def careless_call(draw: random.Random) -> dict[str, str]:
    """A sum that the model asks the calculator for, and its repetition: three in five times rightly, each."""
    prompt, _ = draw.choice(sums())
    first, second = prompt[0], prompt[2] if draw.random() < 0.6 else draw.choice("0123456789")
    value = int(first) + int(second)
    answer = value if draw.random() < 0.6 else draw.randint(0, 18)
    return {"prompt": prompt, "chosen": f"{first}+{second}<eos>{value}{answer}"}


def careless_guesses(draw: random.Random) -> dict[str, str]:
    """Three guesses, or a hit before, that do not heed the hints."""
    number, said = draw.randint(1, 7), ""
    for _ in range(3):
        said += str(guess := draw.randint(1, 7))
        if guess == number:
            break
        said += "<eos>" + ("+" if guess < number else "=")
    return {"prompt": "0", "chosen": said}


def play(here, folder, taught, prompts, num_steps, **flags) -> list[float]:
    """Return the mean scores of the steps of a random model that has learned `taught` before."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    save_base_model(folder / "base", build_tokenizer([CHARACTERS], "."), **shape)
    shared = {"template": "plain", "save_interval": 0, "data_output_path": folder / "cache"}
    sft = shared | {
        "model_name_or_path": folder / "base", "data_path": write_rows(folder / "sft.jsonl", taught),
        "data_split": "1,0,0", "max_seq_len": 16, "per_device_train_batch_size": 64, "learning_rate": 5e-3,
        "num_train_epochs": 4, "eval_iters": 1, "output_dir": folder / "sft",
    }  # fmt: skip
    ppo = shared | {
        "actor_model_name_or_path": folder / "sft/export", "data_split": "0,0,1",
        "data_path": write_rows(folder / "prompts.jsonl", prompts * 2), "enable_hybrid_engine": True,
        "packed": True, "max_prompt_seq_len": 8, "max_answer_seq_len": 12, "num_samples_per_prompt": 4,
        "per_device_generation_batch_size": 49, "per_device_training_batch_size": 98, "kl_coef": 0.01,
        "num_warmup_steps": 0, "lr_scheduler_type": "constant", "num_train_epochs": 100,
        "max_train_steps": num_steps, "output_dir": folder / "ppo",
    }  # fmt: skip
    done = here.run_all([(1, sft), (3, ppo | flags)], seconds=500)
    assert done.code == 0, done.text()
    return read_curve(folder / "ppo", "objective/score")


def test_a_calculator_is_learned_to_be_asked(here, tmp_path):
    draw = random.Random(SEED)
    taught = [careless_call(draw) for _ in range(4000)]
    prompts = [{"prompt": prompt, "answer": str(value)} for prompt, value in sums()]
    flags = {"algorithm": "grpo", "actor_learning_rate": 1e-3}
    games = "examples.own_environment.games:Calculator"
    scores = play(here, tmp_path, taught, prompts, 12, environment=games, **flags)
    assert 0.1 < scores[0] < 0.6 and sum(scores[-3:]) / 3 > scores[0] + 0.2, scores


def test_a_number_is_learned_to_be_guessed(here, tmp_path):
    """With a critic, which sees the hints: answers to a prompt differ most by the luck of the first guess."""
    draw = random.Random(SEED)
    taught = [careless_guesses(draw) for _ in range(2000)]
    prompts = [{"prompt": "0", "number": 1 + n % 7} for n in range(98)]
    flags = {"algorithm": "ppo", "actor_learning_rate": 4e-3, "critic_learning_rate": 2e-3, "kl_coef": 0.0}
    flags |= {"per_device_generation_batch_size": 98, "per_device_training_batch_size": 196}
    scores = play(here, tmp_path, taught, prompts, 60, environment="talks:Signs", **flags)
    assert sum(scores[-5:]) / 5 > sum(scores[:5]) / 5 + 0.06, scores
