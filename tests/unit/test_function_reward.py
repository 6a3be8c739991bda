"""Reward functions: plain in a thread, plain in processes, async; wrong ones, slow ones, ones that die."""

import os
import signal
import sys
import threading
import time

import psutil
import pytest

from step3_ppo.rewards.function_reward import FunctionReward, import_function
from step3_ppo.rewards.text_rewards import Answers, RewardError

MODULE = """
import asyncio, os, sys, threading, time

def length(prompts, responses, rows):
    triples = zip(prompts, responses, rows)
    return [len(prompt + response) + row.get("bonus", 0) for prompt, response, row in triples]

def batch_size(prompts, responses, rows):
    return [len(responses)] * len(responses)

def fails(prompts, responses, rows):
    raise KeyError("gold")

def leaves(prompts, responses, rows):
    sys.exit("bye")

def gives_nan(prompts, responses, rows):
    return [float("nan") if response == "bad" else 1.0 for response in responses]

def sleeps(prompts, responses, rows):
    time.sleep(max(float(response) for response in responses))
    return [1.0] * len(responses)

def process_id(prompts, responses, rows):
    if "die" in responses:
        os._exit(7)
    if "slow" in responses:
        time.sleep(60)
    if "fail" in responses:
        raise KeyError("gold")
    time.sleep(0.05)  # so that every process gets a batch
    return [os.getpid()] * len(responses)

def on_main_thread(prompts, responses, rows):
    return [float(threading.current_thread() is threading.main_thread())] * len(responses)

running = most = 0
loops = set()

async def waits(prompts, responses, rows):
    global running, most
    running, most = running + 1, max(most, running + 1)
    loops.add(id(asyncio.get_running_loop()))
    try:
        await asyncio.sleep(float(responses[0]))
    finally:
        running -= 1
    return [most] * len(responses)

async def blocks(prompts, responses, rows):
    time.sleep(float(responses[0]))
    return [1.0] * len(responses)

async def own_timeout(prompts, responses, rows):
    raise TimeoutError("the judge did not answer")

class Object:
    async def __call__(self, prompts, responses, rows):
        return [2.0] * len(responses)

an_object = Object()

def two(prompts, responses): ...
def keyword(prompts, responses, rows, *, weight): ...
def optional(prompts, responses, rows, weight=1.0): ...
number = 3
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_rewards", None)


@pytest.fixture
def reward_of():
    made = []

    def make(name: str, *, timeout_seconds: float = 10.0, **options) -> FunctionReward:
        made.append(FunctionReward(f"own_rewards:{name}", timeout_seconds=timeout_seconds, **options))
        return made[-1]

    yield make
    for reward in made:
        reward.close()


def answers_of(*responses: str) -> Answers:
    return Answers([f"prompt {index}" for index in range(len(responses))], list(responses))


# ---- the function


def test_a_function_sees_prompts_responses_and_rows_and_at_most_a_batch(reward_of):
    answers = Answers(["ab", "c"], ["d", ""], [{"bonus": 10}, {}])
    assert reward_of("length").score(answers) == [13.0, 1.0]
    assert reward_of("batch_size", batch_size=2).score(answers_of("a", "b", "c")) == [2.0, 2.0, 1.0]
    assert reward_of("length").score(answers_of()) == []


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("absent_module:f", ["--reward function:absent_module:f", "no module absent_module", "PYTHONPATH"]),
        ("own_rewards:lenght", ["has no lenght", "did you mean length?"]),
        ("own_rewards:number", ["number is no function but a int"]),
        ("own_rewards:Object", ["Object is no function but a type"]),
        ("own_rewards:two", ["two(prompts, responses) cannot be called", "two(prompts, responses, rows)"]),
        ("own_rewards:keyword", ["missing a required", "'weight'"]),
        ("broken_rewards:f", ["importing it raised ZeroDivisionError"]),
        ("needy_rewards:f", ["absent_library"]),
    ],
)
def test_what_is_no_reward_function_is_told_at_start_up(target, words, tmp_path):
    (tmp_path / "broken_rewards.py").write_text("1 / 0\n")
    (tmp_path / "needy_rewards.py").write_text("import absent_library\n")
    with pytest.raises(ValueError) as error:
        FunctionReward(target, timeout_seconds=1.0)
    assert [word for word in words if word not in str(error.value)] == []


def test_the_working_directory_is_searched(tmp_path, monkeypatch):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "nearby_rewards.py").write_text("def f(prompts, responses, rows): ...\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ValueError):
        import_function("nearby_rewards:f")
    monkeypatch.chdir(folder)
    assert import_function("nearby_rewards:f").__name__ == "f"
    sys.modules.pop("nearby_rewards")


# ---- plain, in this process


@pytest.mark.parametrize(
    ("name", "words", "num_processes"),
    [
        ("fails", ["reward function:own_rewards:fails raised KeyError: 'gold'", "prompt 'prompt 0'"], 1),
        ("fails", ["reward function:own_rewards:fails raised KeyError: 'gold'", "prompt 'prompt 0'"], 0),
        ("leaves", ["raised SystemExit: bye"], 1),
        ("gives_nan", ["gave 'nan' for response 2 of 2", "response 'bad'"], 0),
    ],
)
def test_a_function_that_fails_is_named_with_its_batch(name, words, num_processes, reward_of):
    with pytest.raises(RewardError) as error:
        reward_of(name, num_processes=num_processes).score(answers_of("good", "bad"))
    assert [word for word in words if word not in str(error.value)] == []
    if name == "fails":
        trace = str(error.value) if num_processes else repr(error.value.__cause__)
        assert ("line" in trace and "in fails" in trace) if num_processes else trace == "KeyError('gold')"


def test_a_slow_function_is_left_behind_and_the_message_says_so(reward_of):
    reward = reward_of("sleeps", timeout_seconds=0.1)
    started = time.monotonic()
    with pytest.raises(RewardError) as error:
        reward.score(answers_of("1"))
    assert time.monotonic() - started < 0.8
    for words in (
        "own_rewards:sleeps",
        "--reward_timeout_seconds 0.1",
        "goes on running",
        "--reward_processes",
    ):
        assert words in str(error.value)
    left = [thread for thread in threading.enumerate() if "own_rewards:sleeps" in thread.name]
    assert [thread.daemon for thread in left] == [True], "it must not keep the program from ending"
    assert reward.score(answers_of("0")) == [1.0], "the next batch does not wait for it"


# ---- async


def test_batches_of_an_async_function_wait_at_the_same_time_in_one_loop(reward_of):
    reward = reward_of("waits", batch_size=1)
    assert max(reward.score(answers_of(*["0.1"] * 5))) == 5.0
    reward.score(answers_of("0"))
    assert len(sys.modules["own_rewards"].loops) == 1


def test_an_object_whose_call_is_async_is_awaited(reward_of):
    assert reward_of("an_object").score(answers_of("a", "b")) == [2.0, 2.0]


def test_a_slow_async_function_is_cancelled_and_named(reward_of):
    reward = reward_of("waits", timeout_seconds=0.1, batch_size=1)
    with pytest.raises(RewardError, match="--reward_timeout_seconds 0.1 .*response '60'.*was cancelled"):
        reward.score(answers_of("0", "60"))
    assert sys.modules["own_rewards"].running == 0
    assert reward.score(answers_of("0")) != []


def test_an_async_function_that_blocks_its_loop_is_told_to_await(reward_of, monkeypatch):
    monkeypatch.setattr("step3_ppo.rewards.function_reward.LATE_SECONDS", 0.1)
    reward = reward_of("blocks", timeout_seconds=0.1)
    with pytest.raises(RewardError, match="blocks its event loop"):
        reward.score(answers_of("0.6"))
    assert reward.score(answers_of("0")) == [1.0]


# ---- plain, in processes


def workers_of(reward: FunctionReward) -> set[int]:
    """Return the ids of both processes that answer; the one that is ready first may answer many batches."""
    for _ in range(40):
        found = {int(score) for score in reward.score(answers_of(*"abcdefgh"))}
        if len(found) == 2:
            return found
    raise AssertionError("one process answers everything")


def test_processes_share_the_batches_and_are_replaced_when_they_hang_die_or_fail(reward_of):
    reward = reward_of("process_id", timeout_seconds=1.0, num_processes=2, batch_size=2)
    workers = workers_of(reward)
    assert os.getpid() not in workers

    with pytest.raises(RewardError, match="--reward_timeout_seconds 1 .*response 'slow'.*process was ended"):
        reward.score(answers_of("a", "b", "slow", "c"))
    assert len(workers & workers_of(reward)) == 1, "who hung was replaced, the other one was not"

    with pytest.raises(
        RewardError, match=r"process \d+ died with exit code 7 on a batch of 2 .*response 'die'"
    ):
        reward.score(answers_of("die", "a"))
    with pytest.raises(RewardError, match="raised KeyError: 'gold'"):
        reward.score(answers_of("fail"))
    workers = workers_of(reward)
    reward.close()
    assert not any(psutil.pid_exists(process_id) for process_id in workers)


def test_processes_that_die_between_two_calls_are_told_and_started_again(reward_of):
    reward = reward_of("process_id", num_processes=1)
    [process_id] = reward.score(answers_of("a"))
    os.kill(int(process_id), signal.SIGKILL)
    with pytest.raises(RewardError, match="its processes died while they started or waited"):
        for _ in range(100):  # until the pool has seen it
            reward.score(answers_of("a"))
    assert reward.score(answers_of("a")) != [process_id]


def test_a_worker_runs_the_function_in_its_main_thread(reward_of):
    assert reward_of("on_main_thread", num_processes=1).score(answers_of("a")) == [1.0]
