"""step3_ppo/evaluation.py: the numbers by hand, which prompts, when, and what a checkpoint keeps of it."""

import json
import random
import re
from contextlib import nullcontext
from types import SimpleNamespace

import numpy
import pytest
import torch
from rollout_batches import make_rollout_batch

from common.data.chat_template import build_template
from common.data.data_options import DataOptions
from common.data.packed_batch import ROW_IDS
from common.data.stage_datasets import build_data
from common.flags.args import Problems
from common.flags.value_forms import Interval
from common.ranks import watchdog
from common.ranks.step_costs import StepCosts
from step3_ppo.arguments import PPOArguments
from step3_ppo.checks import check_evaluation
from step3_ppo.evaluation import Evaluation, compare, gather_results, measure, select_eval_prompts
from step3_ppo.main import evaluate_and_export
from step3_ppo.metrics import response_rows
from step3_ppo.rewards.reward_specs import parse_rewards


def test_a_win_rate_by_hand():
    """Two wins, one loss, one tie by the score, one by the answer: 3 of 5."""
    before = {"scores": [0.0, 1.0, 2.0, 3.0, 4.0], "answers": ["a", "b", "c", "d", "e"]}
    now = {"scores": [1.0, 2.0, 1.0, 3.0, 4.5], "answers": ["A", "B", "C", "D", "e"]}
    found = compare(now, before)
    assert found["eval/win_rate"] == pytest.approx(0.6)
    # (p + z2/2n) / (1 + z2/n) -+ z sqrt(p(1 - p)/n + z2/4n2) / (1 + z2/n) with n = 5, z = 1.96
    assert found["eval/win_rate_low"] == pytest.approx(0.2307, abs=1e-4)
    assert found["eval/win_rate_high"] == pytest.approx(0.8824, abs=1e-4)
    assert compare(before, before)["eval/win_rate"] == 0.5


def scored_batch():
    batch = make_rollout_batch([0, 1, 2], [2, 3, 4], [2, 5, 1])
    batch = batch.with_numbers("scores", torch.tensor([1.0, -1.0, 3.0]))
    batch = batch.with_numbers("score/function_sum", torch.tensor([1.0, 0.0, 1.0]))
    batch = batch.with_numbers("score/function_form", torch.tensor([1.0, 1.0, -1.0]))
    batch = batch.with_key("old_logprobs", torch.full((8,), -1.0), like="response_ids")
    return batch.with_key("ref_logprobs", torch.full((8,), -1.5), like="response_ids")


def test_the_numbers_of_an_evaluation_by_hand():
    found = measure(scored_batch(), ["function_sum", "function_form"])
    assert found == {
        "eval/score": 1.0,
        "eval/score_function_sum": pytest.approx(2 / 3),
        "eval/score_function_form": pytest.approx(1 / 3),
        "eval/pass_rate": pytest.approx(1 / 3),  # the first alone is above 0 by both
        "eval/kl": pytest.approx(8 * 0.5 / 3),
        "eval/response_tokens": pytest.approx(8 / 3),
        "eval/finished_fraction": pytest.approx(2 / 3),
    }
    assert "eval/pass_rate" not in measure(scored_batch(), [])


def test_a_row_of_a_response():
    batch = scored_batch().with_texts(ROW_IDS, ["f:1", "f:2", "f:3"])
    batch = batch.with_key("advantages", torch.full((8,), 0.25), like="response_ids")
    row = list(response_rows(batch, batch.ids, lambda ids: f"{len(ids)} tokens"))[1]
    assert row == {
        "row_id": "f:2", "prompt": "3 tokens", "answer": "5 tokens", "score": -1.0,
        "score/function_sum": 0.0, "score/function_form": 1.0, "response_tokens": 5, "is_finished": False,
        "version": 0, "kl": 2.5, "advantage_sum": 1.25,
    }  # fmt: skip


# ---- which prompts


def write(path, prompts):
    path.write_text(
        "".join(json.dumps({"prompt": p, "chosen": str(i)}) + "\n" for i, p in enumerate(prompts))
    )
    return str(path)


@pytest.fixture
def choose(tmp_path, tiny_tokenizer):
    """Return (train prompts, chosen prompts) of 30 prompts, five rows each, under changed flags."""
    path = write(tmp_path / "train.jsonl", [f"question {i % 30}?" for i in range(150)])

    def run(**changes):
        args = PPOArguments(data_path=[path], data_split="0,0,1", **changes)
        template = build_template("human_assistant", tiny_tokenizer)
        options = DataOptions(
            [path], 3, "0,0,1", eval_fraction=args.eval_fraction, cache_dir=str(tmp_path / "cache")
        )
        data = build_data(options, template)
        rows, told = select_eval_prompts(args, options, data, template)
        texts = [row["prompt_text"].split("Human: ")[1].split("?")[0] for row in rows]
        return {row["prompt_text"] for row in data.train}, rows, texts, told

    return run


def test_held_out_prompts_are_no_training_prompts_and_come_once(choose):
    train, rows, texts, told = choose(eval_fraction=0.3)
    found = [row["prompt_text"] for row in rows]
    assert 3 <= len(found) == len(set(found)) and not train & set(found)
    assert len(train) + len(found) == 30, "all rows of a prompt fall on one side"
    assert told == f"evaluation: {len(found)} of {5 * len(found)} held-out prompts"
    assert choose(eval_fraction=0.3, eval_prompts=2)[2] == texts[:2], "the same ones, fewer"


def test_prompts_of_ones_own_are_used_whole_but_for_those_that_are_trained_on(choose, tmp_path):
    own = write(tmp_path / "own.jsonl", ["another one?", "question 3?", "a third one?"])
    _, _, texts, told = choose(eval_data_path=[own])
    assert sorted(texts) == ["a third one", "another one"]
    assert told == "evaluation: 2 of 3 prompts of --eval_data_path"
    taken = write(tmp_path / "taken.jsonl", ["question 3?"])
    with pytest.raises(ValueError, match="not trained on, but 0 of 1 prompts of --eval_data_path are left"):
        choose(eval_data_path=[taken])


def test_an_evaluation_that_is_asked_for_needs_prompts(choose):
    with pytest.raises(ValueError, match="--keep_best .* raise --eval_fraction 0.0, or use others"):
        choose(keep_best="eval/score")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"keep_best": "eval/kl"}, "eval/kl is not a .* choose from eval/score, eval/score_m"),
        ({"eval_data_path": ["none.jsonl"]}, "^--eval_data_path none.jsonl"),
        ({"eval_data_path": "FILE", "eval_fraction": 0.1}, "--eval_fraction 0.1 holds out prompts"),
        ({"keep_best": "eval/pass_rate", "save_rollouts": 3}, ""),
    ],
)  # fmt: skip
def test_wrong_flags_have_one_message(flags, message, tmp_path):
    if flags.get("eval_data_path") == "FILE":
        flags = flags | {"eval_data_path": [write(tmp_path / "own.jsonl", ["a?"])]}
    args = PPOArguments(**flags)
    problems = Problems()
    rewards = parse_rewards(["model:m", "function:m:f"])
    check_evaluation(args, DataOptions(["x"], 3, cache_dir=str(tmp_path)), rewards, problems)
    if not message:
        assert problems.messages == []
        return
    (found,) = problems.messages
    assert re.search(message, found), found


# ---- when, and what is kept


def evaluation(**flags) -> Evaluation:
    rows = [{"prompt_ids": [1, 2, i]} for i in range(5)]
    return Evaluation(PPOArguments(**flags), None, None, rows, steps_per_epoch=3)


def test_when_it_is_due():
    def due(**flags):
        return [step for step in range(11) if evaluation(**flags).is_due(step, 10)]

    assert due() == [0, 10] and due(eval_interval=Interval("4")) == [0, 4, 8, 10]
    assert due(eval_interval=Interval("epoch")) == [0, 3, 6, 9, 10]


def test_results_are_in_the_order_of_the_sample_ids():
    results = gather_results(scored_batch().select([2, 0, 1]), torch.tensor([3.0, 1.0, float("nan")]))
    assert results["scores"] == [1.0, None, 3.0] and len(set(results["answers"])) == 3


def test_what_is_the_best_so_far():
    found = evaluation(keep_best="eval/score")
    found.best = {"metric": "eval/score", "value": 1.0, "step": 10}
    assert not found.is_best({"eval/score": 1.0}) and found.is_best({"eval/score": 1.1})
    assert not found.is_best({}), "nothing was evaluated at this step"
    found.args.keep_best = "eval/pass_rate"
    assert found.is_best({"eval/pass_rate": 0.1}), "another number has no best yet"


def test_what_a_reward_samples_is_not_missing_in_the_training(monkeypatch):
    def sample_all(*_):
        raise ValueError(random.random() + numpy.random.rand() + float(torch.rand(())))

    monkeypatch.setattr(Evaluation, "_sample", sample_all)
    found = []
    for is_evaluated in (True, False):
        random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
        if is_evaluated:
            with pytest.raises(ValueError):
                evaluation().evaluate(0)
        found.append((random.random(), numpy.random.rand(), float(torch.rand(()))))
    assert found[0] == found[1]


def test_what_an_evaluation_generates_is_none_of_the_rollouts(monkeypatch):
    """Its tokens and seconds count as its own, and come with the next step's."""
    costs = StepCosts()
    monkeypatch.setattr(watchdog, "COSTS", costs)

    def evaluate(step):
        with watchdog.phase("the generation", clock="generate"):
            costs.count(tokens=7 * step, flops=0.0)
        return {}

    own = SimpleNamespace(is_due=lambda *_: True, evaluate=evaluate)
    run = SimpleNamespace(step=3, logger=SimpleNamespace(num_steps=9), stoppable=nullcontext)
    evaluate_and_export(SimpleNamespace(args=PPOArguments()), SimpleNamespace(evaluation=own), run)
    assert costs.tokens == {"evaluate": 21} and set(costs.seconds) == {"evaluate"}
