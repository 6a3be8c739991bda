"""A judge: what it is asked, how its reply is read, what is asked once, which answer is preferred."""

import json
import math

import pytest
from reward_http_server import chat_completion, judgement, running_server

from serving.openai_api import ChatRequest
from step3_ppo.arguments import PPOArguments
from step3_ppo.rewards import http_reward
from step3_ppo.rewards.judge_reward import JudgeReward, fill, read_template, read_verdict, split_target
from step3_ppo.rewards.reward_specs import parse_rewards
from step3_ppo.rewards.scorer import Scorer
from step3_ppo.rewards.text_rewards import Answers, RewardError

ANSWERS = Answers(["p0", "p1", "p0", "p1"], ["a", "bb", "a", "x" * 12], [{}] * 4)
HEAD = "range: -2 2\n"
BODY = "--- score\nQ {prompt} A {answer}\n"


@pytest.fixture
def server():
    with running_server() as server:
        yield server


@pytest.fixture
def judge_of(request, server):
    def make(behind: str = "", **flags) -> JudgeReward:
        flags = {name if name == "seed" else f"reward_{name}": value for name, value in flags.items()}
        judge = JudgeReward(server.judge_url + behind, PPOArguments(**flags))
        request.addfinalizer(judge.close)
        return judge

    return make


# ---- the template


def test_a_template_is_filled_in_once():
    """What an answer holds is no place for another text."""
    assert (
        fill("Q {prompt} A {answer} {x} {{", prompt="{answer}", answer="{prompt}")
        == "Q {answer} A {prompt} {x} {{"
    )


def write(tmp_path, text: str) -> str:
    (tmp_path / "judge.txt").write_text(text)
    return str(tmp_path / "judge.txt")


@pytest.mark.parametrize(
    ("head", "reply", "score"),
    [
        ("range: 0 10", "Perhaps 3, no: 7.5", 7.5),  # the last number
        ("range: 0 10", "8 of 10", 10),  # which is not always what was meant
        ("range: 0 10\npattern: (\\d+) of", "8 of 10", 8),
        ("range: -2 2", "-11", -2),
        ("range: -2 2", "1e9", 2),
    ],
)
def test_a_reply_is_read_by_the_rule_of_the_template_and_clipped(head, reply, score, tmp_path):
    assert read_template(write(tmp_path, f"{head}\n{BODY}")).read_score(reply) == score


def test_a_reply_without_a_score_is_shown(tmp_path):
    template = read_template(write(tmp_path, HEAD + BODY))
    with pytest.raises(RewardError, match="no score matches .* in the reply 'I will not say'; ask for it"):
        template.read_score("I will not say")


def test_the_last_verdict_counts():
    assert [read_verdict(f"not [[C]] but [[{x}]]") for x in "ABC"] == [1, -1, 0]
    with pytest.raises(RewardError, match=r"no \[\[A\]\]"):
        read_verdict("A")


def test_own_parts_take_the_place_of_the_projects(tmp_path):
    own, plain = read_template(write(tmp_path, HEAD + BODY)), read_template("")
    assert (own.score, own.pair, own.max_tokens) == ("Q {prompt} A {answer}", plain.pair, 0)
    pair = read_template(write(tmp_path, HEAD + BODY + "--- pair\n{prompt} {first} {second}\n"))
    assert pair.pair == "{prompt} {first} {second}"
    assert (plain.low, plain.high) == (1, 10) and plain.read_score("8/10, so Score: 7 of 10") == 7
    assert judgement(fill(plain.score, prompt="p", answer="four")).endswith("Score: 4")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (HEAD + "Q {prompt} A {answer}", "its parts are none; write the question after a line '--- score'"),
        (HEAD + BODY + "--- pears\n", "its parts are score, pears"),
        (HEAD + "--- score\n{prompt}", "the part '--- score' lacks {answer}"),
        (HEAD + BODY + "--- pair\n{prompt} {first}", "the part '--- pair' lacks {second}"),
        (BODY, "'range: ' of its head must be two numbers, as in range: 1 10"),
        ("range: 2 1\n" + BODY, "'range: 2 1' of its head"),
        (HEAD + "patern: x\n" + BODY, "its head has unknown lines patern; known: range, pattern, max_tokens"),
        (HEAD + "pattern: (\n" + BODY, "'pattern: (' is not a regular expression"),
        (HEAD + "pattern: \\d\n" + BODY, "must have one group, the score"),
        (HEAD + "max_tokens: many\n" + BODY, "'max_tokens: many' must be a whole number"),
    ],
)
def test_what_is_wrong_with_a_template_is_named(text, words, tmp_path):
    path = write(tmp_path, text)
    with pytest.raises(ValueError) as error:
        read_template(path)
    assert f"--reward judge:...#{path}" in str(error.value) and words in str(error.value)
    with pytest.raises(ValueError, match="the template cannot be read"):
        read_template(str(tmp_path / "none.txt"))


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        ("http://h:8000/v1", ("http://h:8000/v1", "", "")),
        ("https://h/v1/:org/model:7b#a/b.txt", ("https://h/v1", "org/model:7b", "a/b.txt")),
        ("http://h#t", ("http://h", "", "t")),
    ],
)
def test_a_target_is_address_model_and_template(target, parts):
    assert split_target(target) == parts


# ---- what is asked


def test_each_answer_is_a_question_at_temperature_0_that_our_own_server_understands(server, judge_of):
    judge = judge_of(":the/model", seed=5)
    assert judge.score(ANSWERS) == [1, 2, 1, 10], "the last is clipped"
    bodies = {body["messages"][0]["content"]: body for body in server.requests}
    assert len(bodies) == len(server.requests) == 3, "equal answers to a prompt are one question"
    for body in bodies.values():
        request = ChatRequest.model_validate(body)
        assert (request.model, request.temperature, request.seed, request.max_tokens) == (
            "the/model",
            0,
            5,
            256,
        )


def test_what_was_judged_is_not_asked_again_and_the_rest_costs(server, judge_of):
    judge = judge_of()
    judge.score(ANSWERS)
    costs = judge.costs
    assert costs.pop("seconds") > 0
    assert costs == {"calls": 3, "cached": 1, "prompt_tokens": 21, "completion_tokens": 9}
    assert judge.score(ANSWERS) == [1, 2, 1, 10] and len(server.requests) == 3
    assert costs["calls"] == 3 and costs["cached"] == 5
    assert judge.score(Answers(["p2"], ["bb"], [{}])) == [2] and len(server.requests) == 4, "another prompt"


def test_costs_are_gathered_and_logged_once(judge_of):
    judge = judge_of()
    scores = Scorer(parse_rewards([judge.name]), {"judge": judge})
    judge.score(ANSWERS)
    scores.gather_costs()
    judge.score(ANSWERS)
    scores.gather_costs()
    logged = scores.pop_costs("reward")
    assert logged.pop("reward/judge_seconds") > 0
    assert logged == {
        "reward/judge_calls": 3, "reward/judge_cached": 5,
        "reward/judge_prompt_tokens": 21, "reward/judge_completion_tokens": 9,
    }  # fmt: skip
    assert scores.pop_costs("reward") == {}


def test_answers_are_judged_side_by_side(server, judge_of):
    server.behaviours = ["waits for another", "waits for another", "works"]
    assert judge_of(batch_size=2).score(ANSWERS) == [1, 2, 1, 10]
    assert len(server.requests) == 3


def test_the_only_model_of_a_server_is_found(server, judge_of):
    judge_of().score(ANSWERS)
    assert {body["model"] for body in server.requests} == {"tiny"}
    server.models = ["one", "two"]
    with pytest.raises(RewardError, match="it serves 2 models, 'one, two'; name one after the address"):
        judge_of().score(ANSWERS)


def test_the_token_is_of_a_variable_of_its_own(server, judge_of, monkeypatch):
    monkeypatch.setenv("TRIPTYCH_REWARD_TOKEN", "of-another-server")
    monkeypatch.setenv("TRIPTYCH_TOKEN", "of-another-server")
    judge_of().score(ANSWERS)
    assert all("authorization" not in headers for headers in server.headers)
    monkeypatch.setenv("TRIPTYCH_JUDGE_TOKEN", "the-secret")
    server.behaviours = [(401, "who are you?")]
    with pytest.raises(RewardError, match="it requires a token: set TRIPTYCH_JUDGE_TOKEN") as error:
        judge_of().score(ANSWERS)
    assert server.headers[-1]["authorization"] == "Bearer the-secret" and "the-secret" not in str(error.value)


# ---- failures


def test_a_reply_that_cannot_be_read_fails_its_answer_alone_and_is_asked_again(server, judge_of, monkeypatch):
    monkeypatch.setattr(http_reward, "BACKOFF_SECONDS", 0.0)
    silent = (200, json.dumps(chat_completion("I will not say")))
    server.behaviours = [silent, (500, "oops"), "works"]
    judge = judge_of(batch_size=1, on_error="mask")
    first, *rest = judge.score(ANSWERS)
    assert math.isnan(first) and rest[0] == 2 and math.isnan(rest[1]) and rest[2] == 10
    assert "no score matches" in judge.first_failure and "response 'a'" in judge.first_failure
    assert judge.score(ANSWERS) == [1, 2, 1, 10]


@pytest.mark.parametrize("answer", ["[]", '{"choices": []}', json.dumps(chat_completion(None)), "<html>"])
def test_what_is_no_completion_is_named(answer, server, judge_of):
    server.behaviours = [(200, answer)]
    with pytest.raises(RewardError, match="no text in the chat completion: .* the root of OpenAI's API"):
        judge_of().score(ANSWERS)


# ---- pairs


def test_pairs_are_judged_in_both_orders(server, judge_of):
    """Longer, shorter, as long, the same."""
    prompts, mine, others = ["p"] * 4, ["aa", "a", "ab", "a"], ["b", "bb", "ba", "a"]
    judge = judge_of()
    assert judge.prefer(prompts, mine, others) == [1, 0, 0.5, 0.5]
    assert len(server.requests) == judge.costs["calls"] == 6, "the same answer ties unasked"
    assert judge.prefer(prompts, mine, others) == [1, 0, 0.5, 0.5] and len(server.requests) == 6


def test_who_always_prefers_the_first_prefers_nobody(server, judge_of):
    server.behaviours = [(200, json.dumps(chat_completion("[[A]]")))]
    assert judge_of().prefer(["p"], ["aaa"], ["b"]) == [0.5]


def test_a_pair_that_fails_is_borne_or_not(server, judge_of):
    server.behaviours = [(200, json.dumps(chat_completion("both")))]
    judge = judge_of(on_error="default")
    assert math.isnan(judge.prefer(["p"], ["a"], ["b"])[0]) and "two answers to 'p'" in judge.first_failure
    with pytest.raises(RewardError, match="two answers to 'p': no "):
        judge_of().prefer(["p"], ["a"], ["b"])
