"""What lasts from step to step: value normalisation, the average of the weights, what a checkpoint keeps."""

import json
import math
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from plain_logits import compute_logits
from right_or_wrong import close, forms, judge
from rollout_batches import PADDING, fill, make_rollout_batch, random_batch
from test_global_batches import as_rank

from common.data.global_batches import GlobalBatches, RowPlan
from common.data.packed_batch import PackedBatch
from common.engine.ds_config import build_config, build_engine
from common.models.loading import ModelOptions, load_causal_lm
from common.ranks import distributed
from common.runs.export import gather_state_dict
from common.runs.saved_state import TensorReader, write_slices
from step1_sft.arguments import SFTArguments
from step3_ppo.arguments import PPOArguments
from step3_ppo.evaluation import Evaluation
from step3_ppo.ppo_math import KLController
from step3_ppo.rewards.judge_reward import JudgeReward
from step3_ppo.rewards.scorer import Scorer
from step3_ppo.rollout import Rollout
from step3_ppo.trainer_state import ExponentialMovingAverage, OpenStep, TrainerState, ValueNormaliser


class Biased(ValueNormaliser):
    """The exponential average as it begins: as if there had been returns of 0 before."""

    def update(self, returns, mask):
        self.weight = self.weight or 1.0
        super().update(returns, mask)


class MeanOfMeans(ValueNormaliser):
    """Every update counts the same, however many tokens it has."""

    def update(self, returns, mask):
        self.weight *= int(mask.sum())
        super().update(returns, mask)
        self.weight /= int(mask.sum())


@forms(ValueNormaliser, biased=Biased, mean_of_means=MeanOfMeans)
def test_value_normaliser_exp_and_ma_by_hand(form, is_right):
    """R56: value_norm exp and ma."""

    def check(form):
        first = torch.tensor([[1.0, 3.0, 99.0]]), torch.tensor([[True, True, False]])
        second = torch.tensor([[6.0, 6.0, 9.0, 9.0]]), torch.tensor([[True, True, True, True]])
        after = {}
        for kind in ("exp", "ma"):
            normaliser, after[kind] = form(kind, 0.5), form(kind, 0.5)
            normaliser.update(*first)  # debiased: mean 2, variance 1, as the batch has
            close(normaliser.normalise(torch.tensor([4.0])), [2.0])
            after[kind].update(*first)
            after[kind].update(*second)  # of itself: mean 7.5, mean of squares 58.5
        # weights 1/4 and 1/2 of 3/4: mean (2 + 2 * 7.5) / 3 = 17/3, squares (5 + 2 * 58.5) / 3 = 122/3
        assert after["exp"].mean == pytest.approx(17 / 3, abs=1e-9)
        assert after["exp"].variance == pytest.approx(122 / 3 - (17 / 3) ** 2, abs=1e-9)
        # 1, 3, 6, 6, 9, 9: mean 34/6, squares 244/6
        assert after["ma"].mean == pytest.approx(34 / 6, abs=1e-9)
        assert after["ma"].variance == pytest.approx(244 / 6 - (34 / 6) ** 2, abs=1e-9)

    judge(check, form, is_right)


def test_value_normaliser_counts_the_returns_of_all_ranks(monkeypatch):
    """1 and 3 here; 5, 7 and 9 on the other rank: mean 5, squares about it 16 + 4 here, 0 + 4 + 16 there."""
    of_other_rank = iter([torch.tensor([3.0, 21.0]), torch.tensor(20.0)])
    monkeypatch.setattr(distributed, "reduce_sum", lambda x: x + next(of_other_rank))
    normaliser = ValueNormaliser("ma")
    normaliser.update(torch.tensor([1.0, 3.0, 99.0]), torch.tensor([True, True, False]))
    assert (normaliser.weight, normaliser.mean, normaliser.variance) == (5.0, 5.0, 8.0)


def test_returns_far_from_0_keep_their_digits():
    """The difference of the means of x^2 and x in fp32 has none left."""
    normaliser, returns = ValueNormaliser("exp", 0.5), torch.tensor([5000.0, 5000.25, 5000.5])
    for _ in range(3):
        normaliser.update(returns, torch.ones(3).bool())
    close(normaliser.normalise(returns), [-math.sqrt(1.5), 0.0, math.sqrt(1.5)])


@pytest.mark.parametrize("kind", ["exp", "ma"])
def test_before_an_update_nothing_changes_and_afterwards_both_ways_are_inverse(kind):
    normaliser = ValueNormaliser(kind)
    values, mask = random_batch(1)
    assert torch.equal(normaliser.normalise(values), values)
    assert torch.equal(normaliser.denormalise(values), values)
    normaliser.update(values, torch.zeros_like(mask))  # nothing counts
    assert normaliser.weight == 0
    for padding in PADDING:  # is not read
        normaliser = ValueNormaliser(kind)
        normaliser.update(fill(3 + 7 * values, mask, padding), mask)
        close(normaliser.denormalise(normaliser.normalise(values)), values)
        normalised = normaliser.normalise(3 + 7 * values)
        assert normalised.dtype == normaliser.denormalise(values.bfloat16()).dtype == torch.float32
        assert abs(float(normalised[mask].mean())) < 1e-6
        assert abs(float(normalised[mask].std(correction=0)) - 1) < 1e-6


def test_equal_returns_have_the_smallest_variance():
    normaliser = ValueNormaliser("ma")
    normaliser.update(torch.full((7,), 0.1), torch.ones(7).bool())
    assert normaliser.std == pytest.approx(math.sqrt(1e-5))
    close(normaliser.normalise(torch.tensor([0.1, 0.3])), [0.0, 0.2 / math.sqrt(1e-5)], atol=1e-5)


# --- the average of the weights ---


def test_the_average_by_hand_and_the_swap(tmp_path):
    model = torch.nn.Linear(1, 1)
    model.bias.requires_grad = False
    with torch.no_grad():
        model.weight.fill_(1.0)
    ema = ExponentialMovingAverage(model, decay=0.75)
    for value in (2.0, 4.0):
        with torch.no_grad():
            model.weight.fill_(value)
        ema.update()
    # 0.75 * 1 + 0.25 * 2 = 1.25; 0.75 * 1.25 + 0.25 * 4 = 1.9375
    assert set(ema.averages) == {"weight"} and float(ema.averages["weight"]) == 1.9375
    with ema.averaged_weights():
        assert float(model.weight) == 1.9375
    assert float(model.weight) == 4.0
    with pytest.raises(RuntimeError), ema.averaged_weights():
        raise RuntimeError
    assert float(model.weight) == 1.9375, "no collective after an error, to which others may not come"
    write_slices(tmp_path / "file", ema.tensor_slices())
    resumed = ExponentialMovingAverage(model, decay=0.75)
    resumed.load(TensorReader([tmp_path / "file"]), {})
    assert float(resumed.averages["weight"]) == 1.9375


def test_each_rank_averages_a_share_and_other_ranks_go_on_with_it(tmp_path):
    """On every GPU it was 4 bytes a parameter below ZeRO 3."""

    def average(rank: int, world_size: int) -> ExponentialMovingAverage:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(37, 11), torch.nn.LayerNorm(11)).bfloat16()
        with as_rank(rank, world_size), torch.no_grad():
            ema = ExponentialMovingAverage(model, decay=0.9)
            for _ in range(3):
                for parameter in model.parameters():
                    parameter.add_(torch.randn(parameter.shape))
                ema.update()
            write_slices(tmp_path / f"{rank}-of-{world_size}", ema.tensor_slices())
        return ema

    whole, shares = average(0, 1).averages, [average(rank, 3).averages for rank in range(3)]
    for name, values in whole.items():
        assert max(len(of_rank[name]) for of_rank in shares) == -(-len(values) // 3)
        assert torch.cat([of_rank[name] for of_rank in shares]).equal(values)
    for rank in range(2):
        resumed = average(rank, 2)
        expected = {name: values.clone() for name, values in resumed.averages.items()}
        for values in resumed.averages.values():
            values.zero_()
        with as_rank(rank, 2):
            resumed.load(TensorReader([tmp_path / f"{saved}-of-3" for saved in range(3)]), {})
        assert all(values.equal(expected[name]) for name, values in resumed.averages.items())


def test_a_bf16_weight_is_averaged_in_fp32():
    model = torch.nn.Linear(1, 1, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
    ema = ExponentialMovingAverage(model, decay=0.999)
    with torch.no_grad():
        model.weight.fill_(2.0)
    ema.update()
    assert float(ema.averages["weight"]) == pytest.approx(1.001, abs=1e-6)  # bf16 would still say 1


def build(stage: int, folder: str):
    """A tiny model's engine; under stage 3 its small weights stay whole between uses, the others do not."""
    overrides = {"zero_optimization": {"stage3_param_persistence_threshold": 100}} if stage == 3 else {}
    ds_config = build_config(zero_stage=stage, overrides=overrides)
    model = load_causal_lm(ModelOptions(folder, dropout=0.0, ds_config=ds_config), 320)
    return build_engine(model, ds_config, SFTArguments(learning_rate=1e-2, lr_scheduler_type="constant"), 10)


@pytest.mark.usefixtures("process_group")
def test_a_step_averages_over_the_tokens_of_its_updates_and_losses_over_updates():
    """What is of text alone, or of a checkpoint of an earlier version, has no number of tokens."""
    means = {"policy/num_tokens": [3.0, 1.0], "policy/ratio": [1.0, 2.0], "policy/loss": [0.5, 1.5]}
    means |= {"policy/grad_norm": [1.0, 3.0], "value/clip_fraction": [0.0, 1.0], "policy/unsup_loss": [4.0]}
    averages = OpenStep(1, None, {}, means).averages()
    assert averages == {
        "policy/ratio": 5 / 4, "policy/loss": 1.0, "policy/grad_norm": 2.0, "value/clip_fraction": 1 / 4,
        "policy/unsup_loss": 4.0,
    }  # fmt: skip
    assert list(averages) == [name for name in means if name != "policy/num_tokens"], "the log's order"
    assert OpenStep(1, None, {}, {"policy/ratio": [1.0, 2.0]}).averages() == {"policy/ratio": 1.5}
    assert OpenStep(1, None, {}).averages() == {}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_engine_computes_and_exports_with_the_average_and_trains_on_without_it(stage, tiny_model_folder):
    engine = build(stage, tiny_model_folder("gpt2"))
    ids = torch.arange(1, 13).view(2, 6)

    def logits(train: bool = False) -> torch.Tensor:
        engine.train(train)
        with torch.set_grad_enabled(train):
            return compute_logits(engine, ids, torch.ones_like(ids))

    ema = ExponentialMovingAverage(engine.module, decay=0.5)
    weights = [gather_state_dict(engine.module)]
    for _ in range(2):
        engine.backward(logits(train=True).square().mean())
        engine.step()
        ema.update()
        weights.append(gather_state_dict(engine.module))
    last = logits()
    with ema.averaged_weights():
        found, averaged = gather_state_dict(engine.module), logits()
    for name in found:
        expected = 0.25 * weights[0][name] + 0.25 * weights[1][name] + 0.5 * weights[2][name]
        torch.testing.assert_close(found[name], expected, atol=1e-6, rtol=1e-5)
    assert not averaged.allclose(last, atol=1e-3), "the engine must compute with the average"
    assert logits().equal(last)
    assert all(weight.equal(weights[2][n]) for n, weight in gather_state_dict(engine.module).items())
    engine.backward(logits(train=True).square().mean())
    engine.step()
    assert not logits().allclose(last, atol=1e-3)


# --- what a checkpoint keeps ---


def make_trainer(rows=5):
    """The parts of a trainer that a checkpoint keeps, as they begin."""
    evaluation = Evaluation(PPOArguments(), None, None, [{"prompt_ids": [1, i]} for i in range(rows)], 1)
    roles = SimpleNamespace(actor=SimpleNamespace(is_packed=False, shares_prompts=False))
    scores = Scorer([], {"judge": object.__new__(JudgeReward)})
    return SimpleNamespace(
        rollout=Rollout(PPOArguments(), roles, scores),
        prompts=GlobalBatches.by_rows(range(99), list, RowPlan(1)),
        losses=SimpleNamespace(pretraining=GlobalBatches.by_rows(range(99), list, RowPlan(1), seed=1)),
        kl_controller=KLController(0.1, 6.0),
        value_normaliser=ValueNormaliser("ma"),
        evaluation=evaluation,
        waiting=deque(),
        open_step=None,
    )


def test_a_resumed_run_has_everything_that_moves():
    """R56: every stateful part is checkpointed."""
    first, second = make_trainer(), make_trainer()
    first.rollout.refilled_fraction, first.rollout.recomputes, first.kl_controller.coef = 0.5, False, 0.3
    first.value_normaliser.update(torch.tensor([1.0, 3.0]), torch.ones(2).bool())
    first.evaluation.step, first.evaluation.best = 20, {"metric": "eval/score", "value": 1.0, "step": 10}
    first.evaluation.before = {"scores": [1.0, None], "answers": ["a", "b"]}
    first.evaluation.metrics = {"eval/score": 1.0}
    first.rollout.scores.costs = {"judge_calls": 3.0}
    next(first.prompts)
    for _ in range(3):
        next(first.losses.pretraining)
    state = json.loads(json.dumps(TrainerState(first).json_state()))
    TrainerState(second).load(None, state)
    assert TrainerState(second).json_state() == state and next(second.prompts) == next(first.prompts)
    assert next(second.losses.pretraining) == next(first.losses.pretraining)
    assert second.kl_controller.coef == 0.3 and not second.rollout.recomputes
    assert second.rollout.scores.costs == {"judge_calls": 3.0}, "of a rollout that is not logged yet"
    assert second.value_normaliser.denormalise(torch.zeros(1)).tolist() == [2.0]
    assert second.evaluation.before == first.evaluation.before and not second.evaluation.is_due(20, 20)
    assert second.evaluation.best == first.evaluation.best and second.evaluation.metrics == {
        "eval/score": 1.0
    }
    assert second.rollout.refilled_fraction == 0.5
    assert second.value_normaliser.weight == 2.0 and second.value_normaliser.variance == 1.0
    with pytest.raises(ValueError, match="held-out prompts have changed"):
        TrainerState(make_trainer(rows=4)).load(None, state)


@pytest.mark.parametrize(("saved", "resumed"), [(2, 1), (1, 2), (2, 2)])
def test_rows_that_wait_are_shared_by_the_ranks_that_resume(saved, resumed, tmp_path, monkeypatch):
    rows = make_rollout_batch(range(4), [1, 2, 3, 4], [2, 1, 5, 3], num_samples=2)

    def trainer_of(rank, num_ranks):
        monkeypatch.setattr(distributed, "rank", lambda: rank)
        monkeypatch.setattr(distributed, "world_size", lambda: num_ranks)
        return make_trainer()

    files, found = [tmp_path / str(rank) for rank in range(saved)], []
    for rank, file in enumerate(files):
        trainer = trainer_of(rank, saved)
        trainer.waiting.append(rows.select(torch.arange(4).chunk(saved)[rank]))
        write_slices(file, TrainerState(trainer).tensor_slices())
    state = TrainerState(trainer).json_state()
    for rank in range(resumed):
        trainer = trainer_of(rank, resumed)
        TrainerState(trainer).load(TensorReader(files), state)
        found.extend(trainer.waiting)
    assert [len(batch) for batch in found] == [4 // resumed] * resumed
    whole = PackedBatch.concat(found)
    assert whole.ids == rows.ids and all(whole.data[key].equal(data) for key, data in rows.data.items())
