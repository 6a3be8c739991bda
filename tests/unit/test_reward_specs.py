"""What --reward says, the messages about what it cannot say, and what is checked before a model is loaded."""

import math

import numpy
import pytest
import torch
import transformers

from common.flags.args import Problems
from step3_ppo.arguments import PPOArguments
from step3_ppo.build_roles import build_role_specs
from step3_ppo.checks import check_models, find_rewards
from step3_ppo.rewards.reward_specs import build_text_reward, check_rewards, parse_rewards, reward_bias
from step3_ppo.rewards.text_rewards import Answers, checked_scores

LENGTH = "function:step3_ppo.rewards.examples.length:brevity"


def make_args(*rewards: str, **changes) -> PPOArguments:
    return PPOArguments(reward=list(rewards), dtype="fp32", **changes)


def problems_of(*rewards: str, **changes) -> list[str]:
    problems = Problems()
    check_rewards(make_args(*rewards, **changes), problems)
    return problems.messages


@pytest.mark.parametrize(
    ("text", "kind", "target", "weight", "name"),
    [
        ("model:out/export", "model", "out/export", 1.0, "model"),
        ("-2*classifier:org/toxic:toxic", "classifier", "org/toxic:toxic", -2.0, "classifier"),
        ("0.5*https://host/a*b", "http", "https://host/a*b", 0.5, "http"),
        ("model:a*b:c", "model", "a*b:c", 1.0, "model"),
        ("0.2*judge:http://h:1/v1:m#t", "judge", "http://h:1/v1:m#t", 0.2, "judge"),
    ],
)
def test_an_entry_says_kind_target_and_weight(text, kind, target, weight, name):
    (spec,) = parse_rewards([text])
    assert (spec.kind, spec.target, spec.weight, spec.name) == (kind, target, weight, name)


def test_names_are_unique_even_where_a_function_is_called_like_a_second_one():
    texts = ["model:A", "0*model:A", "function:a:f", "function:a:f_2", "function:b:f", "http://a", "http://b"]
    names = [spec.name for spec in parse_rewards(texts)]
    assert names == ["model", "model_2", "function_f", "function_f_2", "function_f_3", "http", "http_2"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("modle:A", ["--reward modle:A", "'modle'", "did you mean model:PATH?"]),
        ("much*model:A", ["--reward much*model:A", "'much' is not a number", "0.5*model:PATH"]),
        ("model:", ["'' names nothing", "model:PATH"]),
        ("function:my_module", ["'my_module' names nothing", "function:MODULE:NAME"]),
        ("http://h:99999/score", ["names nothing", "http://HOST:PORT/PATH"]),
        ("judge:h:1/v1", ["'h:1/v1' is not an address", "judge:http://HOST:PORT/v1:MODEL"]),
        ("judge:http://h:1:model", ["names nothing", "judge:URL[:MODEL][#TEMPLATE_FILE]"]),
    ],
)
def test_what_an_entry_cannot_say_is_named_with_its_cure(text, words):
    with pytest.raises(ValueError) as error:
        parse_rewards([LENGTH, text])
    assert [word for word in words if word not in str(error.value)] == []


def test_weights_that_are_all_zero_are_refused():
    with pytest.raises(ValueError, match=r"0\*model:A 0\*model:B: every weight is 0"):
        parse_rewards(["0*model:A", "0*model:B"])
    assert len(parse_rewards(["0*model:A", "-1*model:B"])) == 2
    with pytest.raises(ValueError, match="every weight is 0"):
        parse_rewards(["0*model:A", "3"])


def test_a_plain_number_is_a_bias():
    """A31, R56: it is added to the sum, and is no reward of its own."""
    texts = ["0.5*model:A", "-1.5", "function:m:f", "1e-1"]
    assert [spec.name for spec in parse_rewards(texts)] == ["model", "function_f"]
    assert reward_bias(texts) == pytest.approx(-1.4)


# ---- checked_scores

TWO = Answers(["Say yes. " * 30, "And no?"], ["yes", "no"], [{}] * 2)


def test_scores_are_floats_and_a_problem_is_short():
    good, problem = checked_scores([numpy.float32(1), torch.tensor(2)], TWO)
    assert good == [1.0, 2.0] and all(type(score) is float for score in good) and not problem
    scores, text = checked_scores([torch.zeros(2), 1.0], TWO)
    assert math.isnan(scores[0]) and scores[1] == 1.0
    assert "gave 'tensor([0., 0.])' for response 1" in text and len(text) < 500


# ---- check_rewards, build_text_reward


def test_good_rewards_have_no_problem(tmp_path):
    config = transformers.GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1, num_labels=1)
    config.architectures = ["GPT2ForSequenceClassification"]
    config.save_pretrained(tmp_path / "reward")
    problems = Problems()
    specs = check_rewards(make_args(f"model:{tmp_path}/reward", f"0*{LENGTH}", "http://h:1/s"), problems)
    assert problems.messages == [] and [spec.name for spec in specs] == ["model", "function_brevity", "http"]
    assert check_rewards(make_args(), problems) == []


def test_all_problems_are_told_at_once(tmp_path):
    config = transformers.GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path / "lm")
    found = problems_of(
        f"classifier:{tmp_path}/lm",
        f"classifier:{tmp_path}/absent:POSITIVE",
        "function:step3_ppo.rewards.examples.length:brevty",
        f"judge:http://h/v1#{tmp_path}/none.txt",
    )
    expected = [
        "is a GPT2LMHeadModel, not a sequence classifier",
        "neither a model folder nor an available hub model",
        "has no brevty; did you mean brevity?",
        "the template cannot be read",
    ]
    assert len(found) == len(expected)
    assert [words for words, message in zip(expected, found, strict=True) if words not in message] == []
    models = {f"{role}_model_name_or_path": f"{tmp_path}/lm" for role in ("actor", "critic")}
    for rewards, is_refused in (([], True), ([f"model:{tmp_path}/lm"], True), ([LENGTH], False)):
        args, problems = make_args(*rewards, **models), Problems()
        specs = build_role_specs(args, find_rewards(args, None, problems), has_critic=True)
        check_models(args, specs, problems)
        told = f"{tmp_path}/lm is not a reward model (it has no score head); give the export/ of step 2"
        assert any(told in message for message in problems.messages) == is_refused


def test_processes_without_a_function_are_refused():
    for rewards in ([], ["http://h:1/s"]):
        (found,) = problems_of(*rewards, reward_processes=2)
        assert "--reward_processes 2 is for reward functions" in found
    assert problems_of("http://h:1/s", LENGTH, reward_processes=2) == []


def test_rewards_that_read_text_are_built_from_the_flags():
    (spec,) = parse_rewards([LENGTH])
    reward = build_text_reward(spec, make_args(reward_batch_size=1))
    assert reward.score(Answers(["p", "p"], ["short", "word " * 150], [{}] * 2)) == [0.0, -0.5]
    reward.close()


def test_secrets_of_addresses_and_tokens_are_told_before_a_model_is_loaded_and_not_repeated(monkeypatch):
    for address in ("http://me:pass@host:1/s", "https://pass@host/score", "http://pass@host:x/"):
        (message,) = problems_of(address)
        assert "host" in message and "TRIPTYCH_REWARD_TOKEN" in message and "pass@" not in message
    (message,) = problems_of("judge:http://me:pass@host:1/v1")
    assert "TRIPTYCH_JUDGE_TOKEN" in message and "pass@" not in message
    for variable, reward in (
        ("TRIPTYCH_REWARD_TOKEN", "http://h:1/s"),
        ("TRIPTYCH_JUDGE_TOKEN", "judge:http://h/v1"),
    ):
        monkeypatch.setenv(variable, "two words")
        (message,) = problems_of(reward)
        assert f"{variable} holds 9 characters" in message and "two words" not in message
