"""Reward functions in a thread or in processes; wrong ones, slow ones, ones that die."""

import math
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from step3_ppo.arguments import PPOArguments
from step3_ppo.rewards.function_reward import FunctionReward, Worker, import_function
from step3_ppo.rewards.text_rewards import Answers, RewardError

MODULE = """
import asyncio, math, os, sys, threading, time

def length(prompts, responses, rows):
    triples = zip(prompts, responses, rows)
    return [len(prompt + response) + row.get("bonus", 0) for prompt, response, row in triples]

def batch_size(prompts, responses, rows):
    return [len(responses)] * len(responses)

def behave(responses):
    if "raise" in responses:
        raise KeyError("gold")
    if "leave" in responses:
        sys.exit("bye")
    if "interrupt" in responses:
        raise KeyboardInterrupt
    if "fail" in responses:
        import pytest
        pytest.fail("not polite")
    if "mute" in responses:
        raise Mute
    if "die" in responses:
        os._exit(7)
    return [float("nan") if r == "nan" else None if r == "none" else 1.0 for r in responses]

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("I say nothing")

class NoNumber:
    def __float__(self):
        raise GeneratorExit

def no_numbers(prompts, responses, rows):
    return [NoNumber()] * len(responses)

def emptier(prompts, responses, rows):
    number = len(responses)
    rows[0].clear()
    rows[-1].setdefault("facts", []).clear()
    prompts.clear(), responses.clear(), rows.clear()
    return [math.nan] * number

def closer(prompts, responses, rows):
    sys.stdout.close()
    return [1.0] * len(responses)

def plain(prompts, responses, rows):
    if "late" in responses:
        time.sleep(30)
    return behave(responses)

async def judge(prompts, responses, rows):
    await asyncio.sleep(0)
    if "cancel" in responses:
        raise asyncio.CancelledError
    return behave(responses)

def lazy(prompts, responses, rows):
    for response in responses:
        yield behave([response])[0]

def process_id(prompts, responses, rows):
    plain(prompts, responses, rows)
    time.sleep(0.05)  # so that every process gets a batch
    return [os.getpid()] * len(responses)

def on_main_thread(prompts, responses, rows):
    light = "torch" not in sys.modules
    return [float(threading.current_thread() is threading.main_thread() and light)] * len(responses)

class Object:
    async def __call__(self, prompts, responses, rows):
        return [2.0] * len(responses)

an_object = Object()

def two(prompts, responses): ...
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_rewards", None)


@pytest.fixture
def reward_of(request):
    def make(name: str, **flags) -> FunctionReward:
        args = PPOArguments(**{f"reward_{flag}": value for flag, value in flags.items()})
        reward = FunctionReward(f"own_rewards:{name}", args)
        request.addfinalizer(reward.close)
        return reward

    return make


def answers_of(*responses: str) -> Answers:
    prompts = [f"prompt {index}" for index in range(len(responses))]
    return Answers(prompts, list(responses), [{} for _ in responses])


# ---- the function


def test_a_function_sees_prompts_responses_and_rows_and_at_most_a_batch(reward_of):
    answers = Answers(["ab", "c"], ["d", ""], [{"bonus": 10}, {}])
    assert reward_of("length").score(answers) == [13.0, 1.0]
    assert reward_of("batch_size", batch_size=2).score(answers_of("a", "b", "c")) == [2.0, 2.0, 1.0]
    for processes in (0, 1):
        reward = reward_of("an_object", processes=processes)
        assert reward.score(answers_of("a", "b")) == [2.0, 2.0], "its call is async"


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("absent_module:f", ["--reward function:absent_module:f", "no module absent_module", "PYTHONPATH"]),
        ("own_rewards:lenght", ["has no lenght", "did you mean length?"]),
        ("own_rewards:two", ["two cannot be called with three lists", "two(prompts, responses, rows)"]),
    ],
)
def test_what_is_no_reward_function_is_told_at_start_up(target, words):
    with pytest.raises(ValueError) as error:
        import_function(target)
    assert [word for word in words if word not in str(error.value)] == []


# ---- failures


@pytest.mark.parametrize(
    ("bad", "words", "num_processes"),
    [
        ("raise", ["raised KeyError: 'gold'", "prompt 'prompt 0'", "in behave"], 1),
        ("leave", ["raised SystemExit: bye"], 1),
        ("leave", ["raised SystemExit: bye"], 0),
        ("interrupt", ["raised KeyboardInterrupt"], 0),
        ("interrupt", ["raised KeyboardInterrupt"], 1),
        ("fail", ["raised Failed: not polite"], 0),
        ("mute", ["raised own_rewards.Mute: <exception str() failed>"], 0),
        ("mute", ["raised own_rewards.Mute: <exception str() failed>"], 1),
        ("nan", ["gave 'nan' for response 2 of 2", "response 'nan'"], 0),
    ],
)
def test_a_function_that_fails_is_named_with_its_batch(bad, words, num_processes, reward_of):
    with pytest.raises(RewardError) as error:
        reward_of("plain", processes=num_processes).score(answers_of("good", bad))
    words = ["reward function:own_rewards:plain, for a batch of 2", *words]
    assert [word for word in words if word not in str(error.value)] == []


def test_a_function_may_close_our_output(reward_of, tmp_path):
    code = "from common.flags.streams import harden_streams; harden_streams(); import own_rewards; "
    code += "own_rewards.closer([], ['r'], []); print('heard')"
    path = os.pathsep.join([str(tmp_path), os.getcwd()])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.stdout == "heard\n", done.stderr


def test_a_function_cannot_change_what_it_gets(reward_of):
    answers = Answers(["p", "q"], ["r", "s"], [{"a": 1}, {"facts": [1]}])
    with pytest.raises(RewardError, match="gave 'nan' for response 1 of 2, prompt 'p', response 'r'"):
        reward_of("emptier").score(answers)
    assert answers == Answers(["p", "q"], ["r", "s"], [{"a": 1}, {"facts": [1]}])
    with pytest.raises(RewardError, match="raised GeneratorExit; return 0.0"):
        reward_of("no_numbers").score(answers)


@pytest.mark.parametrize(
    ("name", "bad", "num_processes"),
    [("plain", "raise", 0), ("judge", "none", 0), ("judge", "cancel", 0), ("lazy", "raise", 1)],
)
def test_only_the_answers_that_fail_have_no_score(name, bad, num_processes, reward_of):
    """Where --reward_on_error bears it; a batch that raised is tried one by one."""
    reward = reward_of(name, processes=num_processes, on_error="mask")
    found = reward.score(answers_of("a", bad, "b", bad))
    assert [score == 1.0 for score in found] == [True, False, True, False] and math.isnan(found[1])
    assert ("gold" if bad == "raise" else bad) in reward.first_failure.lower()


@pytest.mark.parametrize(
    ("bad", "num_processes", "words"),
    [
        ("late", 0, "is still running; --reward_processes 1"),
        ("late", 1, "its process was stopped"),
        ("die", 1, "died with exit code 7"),
    ],
)
def test_a_batch_that_is_late_or_dies_fails_and_no_other(bad, num_processes, words, reward_of):
    options = {"timeout_seconds": 0.5, "processes": num_processes, "batch_size": 1}
    reward = reward_of("plain", on_error="mask", **options)
    started = time.monotonic()
    assert [score == 1.0 for score in reward.score(answers_of("a", bad, "b"))] == [True, False, True]
    assert time.monotonic() - started < 15
    assert words in reward.first_failure and f"response '{bad}'" in reward.first_failure
    assert reward.score(answers_of("a")) == [1.0], "the next batch does not wait for it"
    left = [thread.daemon for thread in threading.enumerate() if thread.name == f"reward {reward.name}"]
    assert all(left), "it must not keep the program from ending"
    with pytest.raises(RewardError, match=words):
        reward_of("plain", **options).score(answers_of(bad))


# ---- processes


def workers_of(reward: FunctionReward) -> set[int]:
    """Return the ids of both processes that answer; the one that is ready first may answer many batches."""
    for _ in range(40):
        found = {int(score) for score in reward.score(answers_of(*"abcdefgh"))}
        if len(found) == 2:
            return found
    raise AssertionError("one process answers everything")


def test_processes_share_the_batches_and_are_replaced_when_they_hang_or_die(reward_of):
    reward = reward_of("process_id", timeout_seconds=1.0, processes=2, batch_size=2)
    workers = workers_of(reward)
    assert os.getpid() not in workers
    with pytest.raises(RewardError, match="response 'late'.*timeout_seconds 1; its process was stopped"):
        reward.score(answers_of("a", "b", "late", "c"))
    after = workers_of(reward)
    assert len(workers & after) == 1, "who hung was replaced, the other one was not"
    for worker in after:  # between two calls
        os.kill(worker, signal.SIGKILL)
        psutil.wait_procs([psutil.Process(worker)], timeout=10)
    workers = workers_of(reward)
    assert not workers & after
    reward.close()
    assert not any(psutil.pid_exists(worker) for worker in workers)


def test_a_process_runs_the_function_in_its_main_thread_and_nothing_else(reward_of):
    assert reward_of("on_main_thread", processes=1).score(answers_of("a")) == [1.0], "and no torch"


def test_a_process_that_hangs_ends_with_the_program():
    worker = Worker("own_rewards:plain")
    assert worker._connection.recv() == "ready"
    worker._connection.send(answers_of("late"))
    with pytest.raises(subprocess.TimeoutExpired):
        worker._process.wait(0.5)
    worker._connection.close()  # as when the program is killed
    assert worker._process.wait(10) == 1
