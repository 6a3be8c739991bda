"""A reward behind an address: a real server on a loopback port that answers well, badly, late or never."""

import gzip
import math
import time
from unittest.mock import Mock

import pytest
from reward_http_server import ENDLESS, running_server

from step3_ppo.arguments import PPOArguments
from step3_ppo.rewards import http_reward
from step3_ppo.rewards.http_reward import HttpReward
from step3_ppo.rewards.text_rewards import Answers, RewardError

# NaN is no JSON, and half of an emoji no UTF-8: a row of data may hold both.
ANSWERS = Answers(["p0", "p1", "p2"], ["a", "bb", "ccc"], [{"n": 1}, {"n": math.nan}, {"n": "\ud83d"}])
LENGTHS = [1.0, 2.0, 3.0]


@pytest.fixture(autouse=True)
def pauses(monkeypatch) -> list[float]:
    """The pauses before new tries, which are not made."""
    found = []
    monkeypatch.setattr(http_reward, "time", Mock(wraps=time, sleep=found.append))  # other threads sleep
    return found


@pytest.fixture
def server():
    with running_server() as server:
        yield server


@pytest.fixture
def reward_of(request):
    def make(url: str, **flags) -> HttpReward:
        args = PPOArguments(**{f"reward_{flag}": value for flag, value in flags.items()})
        reward = HttpReward(url, args)
        request.addfinalizer(reward.close)
        return reward

    return make


def failure_of(reward: HttpReward) -> str:
    with pytest.raises(RewardError) as error:
        reward.score(ANSWERS)
    return str(error.value)


def test_a_request_holds_prompts_responses_and_rows(server, reward_of, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # which knows no way to this machine
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert reward_of(server.url).score(ANSWERS) == LENGTHS
    expected = {"prompts": ANSWERS.prompts, "responses": ANSWERS.responses, "rows": ANSWERS.rows}
    assert str(server.requests) == str([expected])
    assert reward_of(server.url).score(Answers([], [], [])) == [] and len(server.requests) == 1


def test_batches_are_sent_at_the_same_time_and_come_back_in_order(server, reward_of):
    server.behaviours = ["waits for another", "waits for another", "works"]
    assert reward_of(server.url, batch_size=1).score(ANSWERS) == LENGTHS
    assert sorted(len(request["rows"]) for request in server.requests) == [1, 1, 1]


def test_what_passes_by_itself_is_tried_again(server, reward_of):
    server.behaviours = [(500, "oops"), "dies", (429, "too many"), "works"]
    assert reward_of(server.url).score(ANSWERS) == LENGTHS and len(server.requests) == 4
    server.behaviours[4:] = ["hangs", "works"]
    assert reward_of(server.url, timeout_seconds=0.2).score(ANSWERS) == LENGTHS and len(server.requests) == 6


def test_a_server_that_never_answers_is_named(server, reward_of, pauses):
    server.behaviours = [(500, "out of order")]
    text = failure_of(reward_of(server.url))
    words = [server.url, "prompt 'p0'", "failed 4 times", "check that the server runs", "status 500: 'out of"]
    assert [word for word in words if word not in text] == []
    assert len(server.requests) == 4 and pauses == [1.0, 2.0, 4.0], "the pause doubles"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((422, '{"detail": "no prompts"}'), ["status 422", "no prompts", "correct the address"]),
        (
            (200, "<html>hello</html>" * 100),
            ['no JSON object with "scores"', "<html>hello", 'must answer {"scores": [...]}'],
        ),
        ((200, "[1, 2, 3]"), ["no JSON object", "'[1, 2, 3]'"]),
        ((200, '{"score": [1, 2, 3]}'), ["no JSON object"]),
        ((200, '{"scores": [1, NaN, 3]}'), ["gave 'nan' for response 2 of 3", "response 'bb'"]),
        # what a server may do to us
        ((200, b'{"scores": [1, 2, 3], "more": "' + b"x" * 2_000_000 + b'"}'), ["more than 1049344 bytes"]),
        ((200, b"[" * 500_000), ["no JSON"]),
        ((200, gzip.compress(b" " * 10_000_000), (("content-encoding", "gzip"),)), ["no JSON"]),
        ((302, "", (("location", "http://h:9/else"),)), ["status 302", "redirects to 'http://h:9/else'"]),
    ],
)
def test_what_is_no_answer_is_told_at_once_with_its_beginning(answer, words, server, reward_of):
    server.behaviours = [answer]
    text = failure_of(reward_of(server.url))
    assert [word for word in [server.url, *words] if word not in text] == []
    assert len(server.requests) == 1 and len(text) < 600
    assert server.headers[0]["accept-encoding"] == "identity"


@pytest.mark.parametrize("behaviour", ENDLESS)
def test_an_endless_answer_ends_with_the_time_limit(behaviour, server, reward_of, monkeypatch):
    monkeypatch.setattr(http_reward, "NUM_TRIES", 1)
    server.behaviours = [behaviour]
    started = time.monotonic()
    text = failure_of(reward_of(server.url, timeout_seconds=0.3))
    assert "no complete response within 0.3 s" in text and time.monotonic() - started < 5


def test_the_token_of_the_environment_goes_with_every_request(server, reward_of, monkeypatch):
    for name in ("TRIPTYCH_REWARD_TOKEN", "TRIPTYCH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    reward_of(server.url).score(ANSWERS)
    assert "authorization" not in server.headers.pop()
    monkeypatch.setenv("TRIPTYCH_REWARD_TOKEN", "the-secret")
    server.behaviours = ["works", (500, "oops"), "works", (401, "who are you?")]
    assert reward_of(server.url).score(ANSWERS) == LENGTHS
    text = failure_of(reward_of(server.url))
    assert "status 401" in text and "set TRIPTYCH_REWARD_TOKEN" in text and "the-secret" not in text
    assert [headers["authorization"] for headers in server.headers] == ["Bearer the-secret"] * 3


def test_a_batch_that_fails_is_borne(server, reward_of):
    """A server may answer null for one answer, or fail for a batch."""
    server.behaviours = [(200, '{"scores": [1, null, {"error": "?"}]}'), (422, "no")]
    reward = reward_of(server.url, on_error="mask")
    assert [score == 1.0 for score in reward.score(ANSWERS)] == [True, False, False]
    assert "gave 'None' for response 2" in reward.first_failure
    assert not any(score == score for score in reward.score(ANSWERS))
