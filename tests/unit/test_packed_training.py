"""Any cut into micro-batches gives the same losses and gradients in steps 1 and 2; tokens are padded once."""

import sys
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from rollout_batches import make_rollout_batch
from test_global_batches import as_rank, build_batches

from common.data import packed_batch
from common.data.collators import collate_pairs, collate_sft
from common.data.global_batches import Groups, RowPlan, evaluation_batches
from common.data.micro_batches import TokenPlan
from common.models.loading import ModelOptions, load_causal_lm
from common.models.policy_model import PolicyModel, compute_nll_sum, count_targets
from common.models.value_model import load_value_model
from common.programs import single_model
from common.ranks import distributed
from common.ranks.step_costs import StepCosts
from step1_sft.arguments import SFTArguments
from step1_sft.sft_trainer import SFTTrainer
from step2_reward.answer_scores import (
    build_pair_inputs,
    compute_answer_logprobs,
    compute_pair_scores,
    shared_length,
)
from step2_reward.arguments import RewardArguments
from step2_reward.pair_trainer import DPOTrainer, RewardTrainer, compute_pair_losses, evaluate_pairs
from step3_ppo.roles import build_response_inputs

LENGTHS = [(4, 9), (1, 2), (12, 3), (2, 7), (6, 6)]  # prompt, response


def sft_rows():
    g = torch.Generator().manual_seed(0)
    rows = []
    for number, (prompt, response) in enumerate(LENGTHS):
        ids = torch.randint(3, 320, (prompt + response,), generator=g).tolist()
        rows.append(
            {"input_ids": ids, "loss_mask": [False] * prompt + [True] * response, "row_id": str(number)}
        )
    return rows


def pairs():
    g = torch.Generator().manual_seed(1)
    rows = []
    for number, (prompt, response) in enumerate(LENGTHS):
        start = torch.randint(3, 320, (prompt,), generator=g).tolist()
        sides = [torch.randint(3, 320, (n,), generator=g).tolist() for n in (response, 11 - response)]
        row = {"chosen_ids": start + sides[0], "rejected_ids": start + sides[1], "margin": 0.1 * number}
        rows.append(
            row | {f"{s}_response_start": prompt for s in ("chosen", "rejected")} | {"row_id": str(number)}
        )
    return rows


def gradients(model, losses):
    model.zero_grad()
    for loss in losses:
        loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check_same(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=1e-5, rtol=1e-4, msg=name)


CUTS = ([[0, 1, 2, 3, 4]], [[1], [0, 3], [4, 2]], [[0], [1], [2], [3], [4]])


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_sft(cut, tiny_model_folder):
    model = load_causal_lm(ModelOptions(tiny_model_folder("llama"), dropout=0.0), 320)
    policy, rows = PolicyModel(model, num_valid_tokens=320), sft_rows()
    expected_loss = sum(compute_nll_sum(policy, collate_sft([row])) for row in rows)
    expected = gradients(policy, [expected_loss])
    batches = [collate_sft([rows[i] for i in part]) for part in cut]
    assert sum(map(count_targets, batches)) == sum(response for _, response in LENGTHS)
    losses = [compute_nll_sum(policy, batch) for batch in batches]
    torch.testing.assert_close(sum(losses), expected_loss, atol=1e-4, rtol=1e-5)
    check_same(gradients(policy, losses), expected)


@torch.no_grad()
def test_only_targets_are_learned(tiny_model_folder):
    """Against transformers' own logits in float64, row by row."""
    model = load_causal_lm(ModelOptions(tiny_model_folder("llama"), dropout=0.0), 320)
    expected = 0.0
    for row, (prompt, _) in zip(sft_rows(), LENGTHS, strict=True):
        logprobs = model(torch.tensor([row["input_ids"]])).logits[0].double().log_softmax(-1)
        expected -= sum(float(logprobs[t - 1, row["input_ids"][t]]) for t in range(prompt, len(logprobs)))
    found = compute_nll_sum(PolicyModel(model, num_valid_tokens=320), collate_sft(sft_rows()))
    assert float(found) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("rank_loss", ["end_score", "token_wise"])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_pairs(cut, rank_loss, tiny_model_folder):
    model, rows = load_value_model(ModelOptions(tiny_model_folder("llama"), dropout=0.0), 320), pairs()

    def loss_of(batch):
        scores = compute_pair_scores(model, batch, with_values=rank_loss == "token_wise")
        return compute_pair_losses(batch, scores, rank_loss=rank_loss, use_margin=True).sum()

    expected_loss = sum(loss_of(collate_pairs([row])) for row in rows)
    expected = gradients(model, [expected_loss])
    losses = [loss_of(collate_pairs([rows[i] for i in part])) for part in cut]
    torch.testing.assert_close(sum(losses), expected_loss, atol=1e-5, rtol=1e-5)
    check_same(gradients(model, losses), expected)


class _Seen(Exception):
    """A pass has begun: what came before it is known."""


PAD = packed_batch.pad_sequences


@pytest.mark.parametrize("loss", ["end_score", "token_wise"])
def test_reward_trainer_has_the_loss_of_its_flag(loss, tiny_model_folder):
    model = load_value_model(ModelOptions(tiny_model_folder("llama"), dropout=0.0), 320)
    trainer = RewardTrainer(model, RewardArguments(loss=loss), is_packed=False, logger=Mock())
    batch = collate_pairs(pairs())
    scores = compute_pair_scores(model, batch, with_values=True)
    expected = compute_pair_losses(batch, scores, rank_loss=loss, use_margin=False)
    torch.testing.assert_close(trainer.compute_losses(batch).loss, expected)


@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kind", ["sft", "pairs", "dpo", "responses"])
def test_tokens_are_padded_once_from_rows_to_the_model_or_never(kind, is_packed, monkeypatch):
    class Model:
        pooling = "last"

        def __call__(self, inputs, *args, **options):
            shape = (1, num_tokens) if is_packed else (num_rows, inputs.input_ids.shape[1])
            assert inputs.input_ids.shape == shape
            raise _Seen

    if kind == "sft":
        num_rows, num_tokens = len(LENGTHS), sum(map(sum, LENGTHS))
        run = lambda: compute_nll_sum(Model(), collate_sft(sft_rows()), is_packed=is_packed)  # noqa: E731
    elif kind == "responses":
        batch = make_rollout_batch(range(5), [3, 1, 2, 6, 1], [2, 4, 1, 1, 7])
        num_rows, num_tokens = 5, 28
        run = lambda: Model()(build_response_inputs(batch, is_packed=is_packed)[0])  # noqa: E731
    else:
        num_rows, num_tokens = 2 * len(LENGTHS), sum(2 * prompt + 11 for prompt, _ in LENGTHS)
        score = compute_pair_scores if kind == "pairs" else compute_answer_logprobs
        run = lambda: score(Model(), collate_pairs(pairs()), is_packed=is_packed)  # noqa: E731
    paddings = []
    count_and_pad = lambda *args, **options: paddings.append(args) or PAD(*args, **options)  # noqa: E731
    for name, module in list(sys.modules.items()):
        if name.startswith(("common.", "step")) and getattr(module, "pad_sequences", None) is PAD:
            monkeypatch.setattr(module, "pad_sequences", count_and_pad)
    with pytest.raises(_Seen):
        run()
    assert len(paddings) == (0 if is_packed else 1)


@pytest.mark.parametrize("kind", ["sft", "reward", "dpo"])
def test_an_evaluation_does_not_count_what_fills_up_the_last_batches(kind, tiny_model_folder):
    """Two ranks with batches of 2 read 8 rows where there are 5."""
    options, logger = ModelOptions(tiny_model_folder("llama"), dropout=0.0), Mock()
    policy = PolicyModel(load_causal_lm(options, 320), num_valid_tokens=320)
    if kind == "sft":
        trainer = SFTTrainer(policy, SFTArguments(), is_packed=False, logger=logger)
        rows, collate = sft_rows(), collate_sft
    elif kind == "reward":
        model = load_value_model(options, 320)
        trainer = RewardTrainer(model, RewardArguments(), is_packed=False, logger=logger)
        rows, collate = pairs(), collate_pairs
    else:
        trainer = DPOTrainer(policy, RewardArguments(), is_packed=False, logger=logger)
        rows = [row | {"reference_logprobs": torch.tensor([-20.0, -30.0])} for row in pairs()]
        collate = collate_pairs
    ranks = []
    for rank in range(2):
        with as_rank(rank, 2):
            ranks += evaluation_batches(rows, collate, rows_per_batch=2)
    whole = trainer.evaluate(0, evaluation_batches(rows, collate, rows_per_batch=5))
    assert trainer.evaluate(0, ranks) == pytest.approx(whole, rel=1e-5)


def test_figures_of_an_evaluation_by_hand():
    """Answers of 9, 2, 3, 7 and 6 tokens against 2, 9, 8, 4 and 5; the row that fills up counts nowhere."""
    chosen, rejected = torch.tensor([4.0, 1.0, 5.0, -1.0, 0.5]), torch.tensor([1.0, 3.0, 6.0, -3.0, 0.5])
    said = iter([(chosen, rejected, torch.arange(5.0)), (*torch.full((2, 1), 9.0), torch.ones(1))])
    batches = [
        (collate_pairs(pairs()), torch.ones(5).bool()),
        (collate_pairs(pairs()[:1]), torch.zeros(1).bool()),
    ]
    found = evaluate_pairs(lambda batch: next(said), batches)
    expected = {
        "loss": 2.0,
        "accuracy": 0.5,
        "pairs": 5,
        "margin": 0.4,
        "chosen_score": 1.9,
        "rejected_score": 1.5,
    }
    expected |= {"prefers_longer": 0.9, "longer_is_chosen": 0.6}
    scores, lengths = torch.cat([chosen, rejected]), torch.tensor([9.0, 2, 3, 7, 6, 2, 9, 8, 4, 5])
    expected["length_correlation"] = float(torch.corrcoef(torch.stack([scores, lengths]))[0, 1])
    expected["score_std"] = float(scores.square().mean() - scores.mean().square()) ** 0.5
    for name, number in expected.items():
        assert found[name] == pytest.approx(number, abs=1e-6), name


def test_tokens_a_second_are_those_of_all_ranks(monkeypatch):
    """All sequences of a row count, whatever is learned of them; passes of this rank count once for each."""
    clock, logged = iter([0.0, 0.0, 1.0, 3.0, 4.0]), {}
    costs = StepCosts(lambda: next(clock))
    monkeypatch.setattr(single_model, "COSTS", costs)
    monkeypatch.setattr(single_model, "take_steps", lambda of: of)

    def compute_gradients(engine, terms):
        with costs.clock("forward_backward"):
            costs.count(tokens=30, flops=0.0)
        return {"loss": 2.0}

    monkeypatch.setattr(single_model, "compute_gradients", compute_gradients)
    monkeypatch.setattr(distributed, "sum_float", lambda of_this_rank: of_this_rank + 48.0)
    logger = SimpleNamespace(log=lambda step, numbers: logged.update(numbers))
    trainer = RewardTrainer(None, RewardArguments(), is_packed=False, logger=logger)
    with as_rank(0, 2):
        trainer.train_step(1, [collate_pairs(pairs()[:1]), collate_pairs(pairs()[1:])])
    assert logged["reward/loss"] == 2.0
    assert logged["perf/tokens_per_second"] == (sum(2 * prompt + 11 for prompt, _ in LENGTHS) + 48) / 4
    assert logged["perf/forward_backward_tokens_per_second"] == 2 * 30 / 2


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_budget_cuts_the_same_global_batches(world_size):
    rows, lengths = sft_rows() * 4, [(p + r,) for p, r in LENGTHS] * 4
    for number, row in enumerate(rows):
        rows[number] = row | {"row_id": str(number)}

    def steps(max_tokens, rows_per_micro_batch, world_size):
        of_ranks = []
        for rank in range(world_size):
            with as_rank(rank, world_size):
                batches = build_batches(rows, RowPlan(rows_per_micro_batch), lengths, max_tokens=max_tokens)
                steps = [next(batches) for _ in range(len(batches))]
            of_ranks.append([[[row["row_id"] for row in part] for part in step] for step in steps])
        assert len({tuple(map(len, steps)) for steps in of_ranks}) == 1, "as many on each rank"
        return [[m for part in step for m in part] for step in zip(*of_ranks, strict=True)]

    plain = [sorted(sum(step, [])) for step in steps(0, 10, 1)]
    found = steps(30, 10 // world_size, world_size)
    assert [sorted(sum(step, [])) for step in found] == plain
    for micro_batch in (m for step in found for m in step):
        of_rows = [lengths[int(row)][0] for row in micro_batch]
        assert len(of_rows) * max(of_rows) <= 30


@pytest.mark.parametrize(("is_packed", "cap", "sizes"), [(False, 60, [40, 40, 52]), (True, 43, [40, 40])])
def test_a_pass_of_pairs_computes_no_more_tokens_than_its_cap(is_packed, cap, sizes):
    """Counted in what the model is given: padded twice 13, 10, 20, 9 and 12; packed 15, 12, 23, 13 and 17."""
    rows = pairs()
    plan = TokenPlan(
        np.array([(len(row["chosen_ids"]), len(row["rejected_ids"])) for row in rows]),
        cap,
        is_packed,
        shared_lengths=np.array([shared_length(row) for row in rows]),
    )
    parts = [collate_pairs([rows[i] for i in items]) for items in plan.cut(list(range(5)))]
    made = [build_pair_inputs(part, is_packed=is_packed, shares_prompts=is_packed) for part in parts]
    assert sorted(inputs.input_ids.numel() for _, _, inputs in made) == sizes


@pytest.mark.parametrize(
    ("is_packed", "has_gpu", "flag", "rows", "expected"),
    [
        (True, False, 0, 5, [[0, 1], [2], [3, 4]]),  # of 13, 3, 15, 9 and 12 tokens, at most 24
        (True, False, 30, 5, [[0, 4], [1, 2, 3]]),
        (True, True, 0, 5, [[0, 1, 2, 3, 4]]),
        (False, False, 0, 5, [[0], [1], [2], [3, 4]]),  # 9 and 12 are 24 with padding
        (False, True, 0, 5, [[0, 1, 2, 3, 4]]),
        (True, False, 0, 1, [[0], [1], [2], [3], [4]]),  # small ones stay as the flags have them
    ],
    ids=["cpu", "flag", "gpu", "padded", "padded on a gpu", "small"],
)
def test_a_cpu_cuts_large_steps_by_itself(is_packed, has_gpu, flag, rows, expected, monkeypatch):
    monkeypatch.setattr(single_model, "CPU_PASS_TOKENS", 24)
    monkeypatch.setattr(distributed, "has_gpu", lambda: has_gpu)
    args = SFTArguments(
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=5 // rows,
        max_tokens_per_micro_batch=flag,
    )
    lengths = [[sum(of_row) for of_row in LENGTHS]]
    batches = single_model.TrainingRows(args, range(5), list, lengths).batches(is_packed)
    assert sorted(map(sorted, next(batches))) == expected


def test_a_pair_that_is_longer_than_a_pass_with_padding_has_its_own(monkeypatch):
    monkeypatch.setattr(single_model, "CPU_PASS_TOKENS", 24)
    monkeypatch.setattr(distributed, "has_gpu", lambda: False)
    args = SFTArguments(per_device_train_batch_size=3, gradient_accumulation_steps=1)
    lengths = [[20, 5, 6], [3, 6, 5]]  # chosen and rejected: 40, 12 and 12 tokens with padding
    batches = single_model.TrainingRows(args, range(3), list, lengths).batches(is_packed=False)
    assert sorted(map(sorted, next(batches))) == [[0], [1, 2]]


@pytest.mark.parametrize("max_tokens", [0, 40])
def test_what_rows_of_a_conversation_begin_with_is_computed_once(max_tokens, tiny_model_folder, monkeypatch):
    """And losses and gradients are those of each row by itself; another conversation shares nothing."""
    begin, ends = list(range(10, 30)), [[40, 41], [42, 43, 44], [45]]
    rows = [
        {
            "input_ids": begin[:length] + end,
            "loss_mask": [False] * length + [True] * len(end),
            "conversation": number,
            "row_id": f"{number}#{len(end)}",
        }
        for number, length in ((0, 8), (1, 14))
        for end in ends
    ]
    model = PolicyModel(
        load_causal_lm(ModelOptions(tiny_model_folder("llama"), dropout=0.0), 320), num_valid_tokens=320
    )
    alone = [compute_nll_sum(model, collate_sft([row]), is_packed=True) for row in rows]
    expected = gradients(model, alone)

    computed, forward = [], PolicyModel.forward

    def spy(self, inputs, *args, **kwargs):
        computed.append(inputs.num_tokens)
        return forward(self, inputs, *args, **kwargs)

    monkeypatch.setattr(PolicyModel, "forward", spy)
    groups = Groups([row["conversation"] for row in rows])
    args = SFTArguments(per_device_train_batch_size=6, max_tokens_per_micro_batch=max_tokens)
    lengths = [[len(row["input_ids"]) for row in rows]]
    training_rows = single_model.TrainingRows(args, rows, collate_sft, lengths, groups)
    micro_batches = next(training_rows.batches(is_packed=True))
    assert len(micro_batches) == (1 if not max_tokens else 2 + (max_tokens < 48))
    losses = [compute_nll_sum(model, batch, is_packed=True) for batch in micro_batches]
    torch.testing.assert_close(sum(losses), sum(alone), rtol=1e-5, atol=1e-5)
    for name, gradient in gradients(model, losses).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)
    whole = sum(len(row["input_ids"]) for row in rows)
    if not max_tokens:
        assert sum(computed) == whole - 2 * 8 - 2 * 14
    assert sum(computed) < whole
