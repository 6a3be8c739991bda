"""--environment: what a class is asked and told, what becomes of its failures, what counts in no number."""

import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from rollout_batches import make_batch
from test_algorithms import NAMES, by_hand, make_args, run
from test_dialogue import CHAT_JINJA

from common.data.chat_template import build_template
from common.data.collators import collate_prompts
from common.data.example import Message
from common.ranks.failures import StepSkipped
from examples.own_environment.games import Calculator, HigherOrLower
from step3_ppo import metrics
from step3_ppo.environments import KIND, Environments, import_environment, scores_of
from step3_ppo.rewards.reward_specs import RewardSpec
from step3_ppo.rewards.scorer import PREFIX, Scorer
from step3_ppo.rollout_batch import tokens, with_tokens

MODULE = '''
import threading


class Echo:
    """Repeats what it hears, with its length for a reward; the row says how long, and what goes wrong."""

    max_turns = 3
    heard = []

    def reset(self, row):
        self.row = row
        if row.get("fails") == "interrupt":
            raise KeyboardInterrupt
        if row.get("fails") == "reset":
            raise KeyError("no such row")
        row["messages"][0]["content"] += row.get("more", "")
        return row["messages"]

    def step(self, messages):
        self.heard.append([dict(message) for message in messages])
        messages.append({"role": "user", "content": "what is changed here is not seen"})
        text = messages[-2]["content"]
        said = self.row.get("said", [{"role": "user", "content": text}])
        return said, self.row.get("reward", len(text)), False


class Random(Echo):
    def reset(self, row):
        self.heard.append(row)
        return [{"role": "user", "content": str(len(self.heard))}]


class Triple(Echo):
    def step(self, messages):
        return 1.0


NOTHING = 1


class NoReset:
    def step(self, messages):
        return [], 0.0, True


class NoStep:
    def reset(self, row, more):
        return []

    step = None


class NeedsMore(Echo):
    def __init__(self, size):
        pass


class NoTurns(Echo):
    max_turns = 0


class NoThreads(Echo):
    num_threads = 0


class Meeting(Echo):
    """Goes on once another conversation is in its step, too."""

    num_threads = 2
    barrier = threading.Barrier(2, timeout=20)

    def step(self, messages):
        self.barrier.wait()
        return super().step(messages)
'''


@pytest.fixture
def echo(tmp_path, monkeypatch):
    """The module of MODULE, imported anew."""
    (tmp_path / "echoes.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "echoes", raising=False)
    yield
    sys.modules.pop("echoes", None)


def prompts_of(template, *fields, content: str = "Hi"):
    """A batch of prompts, each of one message, with these fields of their rows."""
    chat = (Message("user", content),)
    ids = template.encode(template.segments(chat, None), 99).input_ids
    texts = {"prompt_text": template.prompt_text(chat), "messages": json.dumps([chat[0].as_dict()])}
    return collate_prompts(
        [
            texts | {"prompt_ids": ids, "row_id": f"rows:{n}", "fields": json.dumps(x)}
            for n, x in enumerate(fields)
        ]
    )


def make(template, name: str, max_prompt_tokens: int = 99) -> Environments:
    tokenizer = template.tokenizer
    decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=True)  # noqa: E731
    return Environments(f"echoes:{name}", template, decode, max_prompt_tokens)


def reply(template, text: str) -> list[int]:
    """What a model samples for a turn."""
    return template.tokenizer(text, add_special_tokens=False).input_ids + [template.eot_id]


def test_steps_of_several_conversations_run_together_and_stay_in_order(echo, make_tokenizer):
    template = build_template("plain", make_tokenizer())
    environments = make(template, "Meeting")
    _, talks = environments.begin(prompts_of(template, {}, {}, {}, {}), 1)
    ended = [(number, reply(template, "a" * (number + 1))) for number in (2, 0, 3, 1)]
    answers = environments.answer(talks, ended)
    assert [talk.score for talk in talks] == [1.0, 2.0, 3.0, 4.0] and not environments.first_failure
    said = [template.tokenizer.decode(ids, skip_special_tokens=True) for ids in answers]
    assert said == ["aaa", "a", "aaaa", "aa"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("human_assistant", "\n\nHuman: Hm\n\nAssistant:"),
        ("one_line", " Human: Hm Assistant:"),
        ("plain", "Hm"),
        ("chat", "\n<|user|>\nHm<|endoftext|>\n<|assistant|>\n"),
    ],
)
def test_a_conversation_of_three_turns(name, said, echo, make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_JINJA
    template = build_template(name, tokenizer)
    environments = make(template, "Echo")
    prompts, (talk,) = environments.begin(prompts_of(template, {}), 1)
    assert prompts.data["prompt_ids"].equal(prompts_of(template, {}).data["prompt_ids"])
    lead = {"human_assistant": " ", "one_line": " ", "plain": "", "chat": ""}[name]
    response = reply(template, f"{lead}Hm")
    (answer,) = environments.answer([talk], [(0, list(response))])
    assert tokenizer.decode(answer) == said
    # The model's ids stay as they were: those of a tokenisation that no tokenizer gives too.
    response += answer + [tokenizer.convert_tokens_to_ids(c) for c in "fi"] + [template.eot_id]
    (answer,) = environments.answer([talk], [(0, list(response))])
    assert tokenizer.decode(answer) == said.replace("Hm", "fi")
    response += answer + reply(template, f"{lead}ox")
    assert environments.answer([talk], [(0, list(response))]) == [None], "max_turns 3"
    assert (talk.score, talk.num_turns) == (6.0, 3) and scores_of([talk]).tolist() == [6.0]
    contents = ["Hi", "Hm", "Hm", "fi", "fi", "ox"]
    heard = sys.modules["echoes"].Echo.heard
    assert [[message["content"] for message in turn] for turn in heard] == [
        contents[:2],
        contents[:4],
        contents,
    ]
    assert [message["role"] for message in heard[2]] == ["user", "assistant"] * 3
    assert environments.first_failure == ""


def test_said_text_is_tokenised_as_it_stands_behind_a_reply(make_tokenizer):
    """One tokenisation of the whole dialogue has the same ids, a tool's role in a chat included."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_JINJA
    for name, role in (("human_assistant", "user"), ("chat", "user"), ("chat", "tool")):
        template = build_template(name, tokenizer)
        start = (Message("user", "How are you?"), Message("assistant", "Fine."))
        more = (Message(role, "The weather is fine."), Message("user", "And you?"))
        segments = template.segments((*start, *more), None, learn_all_turns=True)
        whole = template.encode(segments, 999).input_ids
        before = template.encode(template.segments(start[:1], "Fine."), 999).input_ids
        assert whole == before + template.continue_ids(more)
        assert name != "chat" or f"<|{role}|>" in tokenizer.decode(template.continue_ids(more))


def test_reset_may_begin_otherwise_than_the_row(echo, tiny_tokenizer):
    template = build_template("human_assistant", tiny_tokenizer)
    prompts, talks = make(template, "Echo", 12).begin(
        prompts_of(template, {"more": " you"}, {"more": " x" * 40}), 2
    )
    first, second = prompts.sequences("prompt_ids")
    assert (
        tiny_tokenizer.decode(first) == "\n\nHuman: Hi you\n\nAssistant:" == prompts.texts("prompt_texts")[0]
    )
    assert len(second) == 12 and tiny_tokenizer.decode(second).endswith(" x x\n\nAssistant:")
    assert [len(talk.messages[0]["content"]) for talk in talks] == [6, 6, 82, 82]
    assert not scores_of(talks).isnan().any()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"fails": "reset"}, ["row rows:1, turn 0: reset raised KeyError: 'no such row'"]),
        ({"fails": "interrupt"}, ["turn 0: reset raised KeyboardInterrupt"]),
        ({"said": []}, ["row rows:1, turn 1: step returned '[]' for messages", "or is over = True"]),
        ({"said": None}, ["step returned 'None' for messages"]),
        (
            {"said": ["Hi"]},
            ["step returned the message 'Hi'", "a content and a role of system, user, assistant"],
        ),
        ({"said": [{"role": "tool", "content": ""}]}, ["'tool'"]),
        ({"said": [{"role": "user"}]}, ["it needs a content"]),
        ({"reward": None}, ["step returned the reward 'None', not a finite number"]),
        ({"reward": math.inf}, ["not a finite number"]),
        ({"reward": "1.5"}, ["not a finite number"]),
    ],
    ids=str,
)
def test_a_failure_is_named_and_ends_its_conversation_alone(fields, words, echo, tiny_tokenizer):
    template = build_template("human_assistant", tiny_tokenizer)
    environments = make(template, "Echo")
    prompts, talks = environments.begin(prompts_of(template, {}, fields), 1)
    assert len(prompts.sequences("prompt_ids")) == 2, "the row's own prompt is answered"
    said = environments.answer(talks, [(n, reply(template, " Hm")) for n in (1, 0)])
    assert said[0] is None and said[1] is not None
    assert scores_of(talks).isnan().tolist() == [False, True]
    assert all(word in environments.first_failure for word in ["environment echoes:Echo, ", *words])


def test_conversations_of_a_group_must_begin_alike(echo, tiny_tokenizer):
    template = build_template("plain", tiny_tokenizer)
    environments = make(template, "Random")
    prompts, talks = environments.begin(prompts_of(template, {}), 3)
    assert tiny_tokenizer.decode(prompts.data["prompt_ids"]) == "1"
    assert scores_of(talks).isnan().tolist() == [False, True, True]
    assert "reset returned different messages within the group" in environments.first_failure


def test_a_step_that_gives_no_triple_is_a_failure(echo, tiny_tokenizer):
    template = build_template("plain", tiny_tokenizer)
    environments = make(template, "Triple")
    _, talks = environments.begin(prompts_of(template, {}), 1)
    assert environments.answer(talks, [(0, reply(template, "Hm"))]) == [None]
    assert "step returned '1.0'; return (messages, reward, is over)" in environments.first_failure


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("echoes", "names no class; write MODULE:CLASS"),
        ("echoes:", "names no class"),
        ("absent_module:Echo", "there is no module absent_module"),
        ("echoes:Ecco", "did you mean Echo"),
        ("echoes:NOTHING", "is of type int; name a class"),
        ("echoes:NoReset", r"has no such reset \(.*\); define reset\(self, row\) and step\(self, messages\)"),
        ("echoes:NoStep", "has no such reset"),
        ("echoes:NeedsMore", r"NeedsMore\(\) must not require arguments"),
        ("echoes:NoTurns", "max_turns 0 must be a whole number of at least 1"),
        ("echoes:NoThreads", "num_threads 0 must be a whole number of at least 1"),
    ],
)
def test_what_is_no_environment_is_named(target, words, echo):
    with pytest.raises(ValueError, match=f"--environment {target}.*{words}"):
        import_environment(target)


# ---- scores


@pytest.mark.parametrize("on_error", ["refuse", "mask", "default"])
def test_scores_add_up_and_failures_are_handled_as_those_of_other_rewards(on_error):
    specs = [RewardSpec("model", "x", 0.5, "model"), RewardSpec(KIND, "m:C", 1.0, KIND)]
    environments = SimpleNamespace(first_failure="")
    scores = Scorer(specs, {}, None, environments, on_error=on_error, default_score=-1.0)
    batch = make_batch([2, 1, 1]).with_numbers(PREFIX + KIND, torch.tensor([1.0, 2.0, 3.0]))
    models = {"model": SimpleNamespace(score=lambda batches: [torch.full((3,), 4.0)])}
    assert scores.start([batch], {}).wait(models)["scores"][0].tolist() == [3.0, 4.0, 5.0]
    environments.first_failure = "environment m:C, row rows:7, turn 1: step raised ValueError"
    batch = batch.with_numbers(PREFIX + KIND, torch.tensor([1.0, math.nan, 3.0]))
    if on_error == "refuse":
        with pytest.raises(StepSkipped, match="row rows:7, turn 1: step raised ValueError"):
            scores.start([batch], {}).wait(models)
        return
    found = scores.start([batch], {}).wait(models)
    for name, values in found.items():
        batch = batch.with_numbers(name, values[0])
    assert found["scores"][0].tolist() == [3.0, 2.0 if on_error == "mask" else 1.0, 5.0]
    assert scores.counts(batch).tolist() == [True, on_error != "mask", True]
    assert scores.first_failure == environments.first_failure
    batch = batch.with_numbers("num_turns", torch.tensor([2, 1, 3]))
    assert metrics.summarise_turns(batch) == {"rollout/turns": 2.0, "rollout/environment_failures": 1.0}
    assert metrics.summarise_turns(make_batch([1])) == {}


# ---- what was said counts nowhere

SAMPLED = torch.tensor([[1, 0, 0, 1], [1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 1, 0]]).bool()  # of `interrupted`
LENGTHS = [4, 1, 1, 3]


def interrupted(noise: float):
    """`by_hand` with two said tokens between those of its first response, and one in its last."""
    plain, columns = by_hand(), {}
    for factor, name in enumerate(("rollout_logprobs", "old_logprobs", "ref_logprobs", "old_values")):
        values = torch.full((4, 4), noise * factor)
        for row, numbers in enumerate(plain.sequences(name)):
            values[row, SAMPLED[row].nonzero()[:, 0]] = numbers
        columns[name] = values
    columns |= {name: plain.numbers(name) for name in NUMBERS}
    return make_batch(LENGTHS, **columns, loss_mask=SAMPLED, sampled_mask=SAMPLED)


NUMBERS = ("group_ids", "scores", "is_finished", "next_values")
NUMBERS += ("greedy_scores", "greedy_is_finished", "greedy_lengths")  # of remax


def kept(padded: torch.Tensor) -> list[list[float]]:
    """The numbers of the sampled tokens alone."""
    return [row[is_sampled].tolist() for row, is_sampled in zip(padded, SAMPLED, strict=True)]


@pytest.mark.parametrize("adv_norm", ["none", "batch", "group"])
@pytest.mark.parametrize("kl_in", ["reward", "loss"])
@pytest.mark.parametrize("name", NAMES)
def test_advantages_are_those_of_the_sampled_tokens_end_to_end(name, kl_in, adv_norm):
    args = make_args(gamma=0.5, kl_in=kl_in, adv_norm=adv_norm)
    expected, found = run(name, by_hand(), args), run(name, interrupted(5.0), args)
    for column in ("rewards", "advantages", "returns"):
        wanted, padded = getattr(expected, column), getattr(found, column)
        if padded is not None:
            rows = [row[:n].tolist() for row, n in zip(wanted, (2, 1, 1, 2), strict=True)]
            assert kept(padded) == [pytest.approx(row, abs=1e-6) for row in rows], column
            assert padded[~SAMPLED].eq(0).all(), column
    assert found.loss_mask.equal(SAMPLED)


def test_a_steps_numbers_are_those_of_the_sampled_tokens():
    """By hand: KL 0.5 - 1, 2, 1, 0 + 1."""
    batch = interrupted(5.0)
    everyone = metrics.gather_responses(batch)
    assert everyone["kl"].tolist() == [-0.5, 2.0, 1.0, 1.0] and everyone["lengths"].tolist() == LENGTHS
    returns = torch.where(
        SAMPLED, torch.tensor([[2.0, 9, 9, 4], [1.0, 9, 9, 9], [3.0, 9, 9, 9], [0, 9, 2.0, 9]]), 0
    )
    batch = with_tokens(batch, rewards=torch.zeros(4, 4), returns=returns)
    batch = with_tokens(batch, old_values=torch.where(SAMPLED, 0.5, 100.0))
    assert metrics.summarise(batch)["value/explained_variance"] == 0.0, "a constant explains nothing"
    rows = [row | {} for row in metrics.response_rows(batch.with_texts("row_ids", ["a"] * 4), batch.ids, str)]
    assert [row["kl"] for row in rows] == [-0.5, 2.0, 1.0, 1.0]
    assert tokens(batch, "sampled_mask").equal(SAMPLED)


# ---- the examples


def say(environment, *texts: str) -> list:
    """What an environment gives for each of these replies."""
    messages, told = [], []
    for text in texts:
        messages.append({"role": "assistant", "content": text})
        told.append(environment.step(messages))
        messages += told[-1][0]
    return told


def test_the_calculator_answers_a_sum_and_judges_anything_else():
    environment = Calculator()
    assert environment.reset({"answer": 42, "messages": ["chat"]}) == ["chat"]
    call, right = say(environment, " 12+30 ", "42")
    assert call == ([{"role": "user", "content": "42"}], 0.0, False) and right == ([], 1.0, True)
    assert [told[1:] for told in say(environment, "12+", "41")] == [(0.0, True)] * 2


def test_a_number_is_worth_the_more_the_earlier_it_is_hit():
    environment = HigherOrLower()
    environment.reset({"number": 3, "messages": []})
    low, high, hit = say(environment, "It is 2.", "5", "3!")
    assert [low[0][0]["content"], high[0][0]["content"]] == ["higher", "lower"]
    assert hit == ([], pytest.approx(1 / 3), True)
    environment.reset({"number": 3, "messages": []})
    assert say(environment, "3") == [([], 1.0, True)]
