"""KTO and IPO: the losses by hand and against plain loops in float64, KTO's baseline and its rows."""

import math
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from pretended_gpu import pretended_gpu
from right_or_wrong import close, forms, judge
from test_dpo_loss import Table, sums
from test_global_batches import as_rank
from test_packed_training import CUTS, check_same, gradients, pairs

from common.data.collators import collate_pairs
from common.data.global_batches import evaluation_batches
from common.data.packed_batch import PackedBatch
from common.models.loading import ModelOptions, load_causal_lm
from common.models.policy_model import PolicyModel
from step2_reward import kto_trainer
from step2_reward.arguments import RewardArguments
from step2_reward.kto_trainer import KTOTrainer, MismatchedRows, find_others
from step2_reward.pair_math import PairLosses, ipo_loss, kto_baseline, kto_loss
from step2_reward.pair_trainer import DPOTrainer, RewardTrainer

# ---- IPO


def test_ipo_by_hand():
    # Ratios -10 + 12 = 2 and -8 + 6 = -2: h = 4, and the target is 1 / (2 * 0.25) = 2.
    chosen, rejected, *reference = sums(-10, -8, -12, -6)
    chosen.requires_grad_(), rejected.requires_grad_()
    found = ipo_loss(chosen, rejected, *reference, beta=0.25)
    assert (found.chosen.item(), found.rejected.item(), found.loss.item()) == (0.5, -0.5, 4.0)
    found.loss.backward()
    assert (chosen.grad.item(), rejected.grad.item()) == (4.0, -4.0)  # 2 (h - target)


def test_ipo_takes_means_over_the_tokens_of_an_answer():
    """Against the same sums in place of means, which is another loss."""
    rows = [row | {"reference_logprobs": torch.tensor([-20.0, -30.0 - i])} for i, row in enumerate(pairs())]
    trainer = DPOTrainer(
        torch.nn.Identity(), RewardArguments(loss="ipo", beta=0.3), is_packed=False, logger=Mock()
    )
    policy = torch.arange(10.0) - 25
    trainer.compute_logprobs = lambda batch: policy
    found = trainer.compute_losses(collate_pairs(rows))
    for i, row in enumerate(rows):
        h = 0.0
        for k, (side, sign) in enumerate((("chosen", 1), ("rejected", -1))):
            ratio = float(policy[2 * i + k]) - float(row["reference_logprobs"][k])
            h += sign * ratio / (len(row[f"{side}_ids"]) - max(row[f"{side}_response_start"], 1))
        assert found.loss[i].item() == pytest.approx((h - 1 / 0.6) ** 2, rel=1e-5)


@pytest.mark.parametrize("loss", ["dpo", "end_score"])
def test_the_pairs_of_a_prompt_weigh_as_one(loss):
    """Three pairs of one prompt and one of another: the mean of two means, in the loss and in the figures."""
    values = torch.tensor([3.0, 1.0, -2.0, 0.5])  # chosen less rejected
    kind = DPOTrainer if loss == "dpo" else RewardTrainer
    engine = SimpleNamespace(router_loss=torch.tensor(6.0), router_coefficient=0.5)  # of a mixture
    trainer = kind(engine, RewardArguments(loss=loss), is_packed=False, logger=Mock())
    trainer.compute_losses = lambda batch: PairLosses(
        values + 1, torch.ones(4), torch.nn.functional.softplus(-values)
    )
    rows = [row | {"weight": 1 / 3 if i < 3 else 1.0} for i, row in enumerate(pairs()[:4])]
    batch = collate_pairs(rows)
    total, stats = trainer.compute_sums(batch)
    of_pairs = [math.log1p(math.exp(-v)) for v in values.tolist()]
    expected = (sum(of_pairs[:3]) / 3 + of_pairs[3]) / 2
    assert trainer.count(batch) == pytest.approx(2)
    assert float(total) / 2 == pytest.approx(expected + 0.5 * 6.0, rel=1e-6)
    assert float(stats["router_loss"]) / 2 == pytest.approx(6.0)
    assert expected != pytest.approx(sum(of_pairs) / 4, rel=1e-2), "the plain mean"
    figures = {
        "margin": 2 / 3 + 0.5,
        f"chosen_{trainer.what}": 2 / 3 + 0.5 + 2,
        f"rejected_{trainer.what}": 2,
    }
    for name, number in (figures | {"accuracy": 2 / 3 + 1}).items():
        assert float(stats[name]) == pytest.approx(number, rel=1e-6), name


# ---- KTO's loss


def plain_kto(policy, reference, labels, mismatched, *, beta, weights):
    """Return the losses and the baseline as TRL's KTOTrainer computes them, in float64 and in Python."""
    kl = max(sum(mismatched) / len(mismatched), 0.0)
    losses = []
    for logprob, ref, label in zip(policy, reference, labels, strict=True):
        ratio = logprob - ref
        inner = ratio - kl if label else kl - ratio
        losses.append(weights[0 if label else 1] * (1 - 1 / (1 + math.exp(-beta * inner))))
    return losses, kl


def test_kto_by_hand():
    # Gains 0.5 (3 - 1) = 1 of the good one, 0.5 (1 - 3) = -1 and 0.5 (1 + 1) = 1 of the bad ones.
    ratios = torch.tensor([3.0, 3.0, -1.0], requires_grad=True)
    options = {"beta": 0.5, "desirable_weight": 2.0, "undesirable_weight": 3.0}
    losses = kto_loss(ratios, torch.tensor([1, 0, 0]), torch.tensor(1.0), **options)
    low, high = 1 / (1 + math.e), 1 / (1 + 1 / math.e)
    close(losses, [2 * low, 3 * high, 3 * low])
    losses.sum().backward()
    close(ratios.grad, [-2 * 0.5 * low * high, 3 * 0.5 * low * high, 3 * 0.5 * low * high])


def _wrong_sign(ratios, labels, kl, **options):
    return kto_loss(ratios, 1 - labels, kl, **options)


def _without_kl(ratios, labels, kl, **options):
    return kto_loss(ratios, labels, torch.zeros(()), **options)


def _swapped_weights(ratios, labels, kl, *, desirable_weight, undesirable_weight, **options):
    return kto_loss(
        ratios,
        labels,
        kl,
        desirable_weight=undesirable_weight,
        undesirable_weight=desirable_weight,
        **options,
    )


@forms(kto_loss, wrong_sign=_wrong_sign, without_kl=_without_kl, swapped_weights=_swapped_weights)
def test_kto_against_the_plain_loop(form, is_right):
    generator = torch.Generator().manual_seed(3)
    policy, reference, mismatched = (-20 * torch.rand(40, generator=generator) for _ in range(3))
    mismatched = mismatched + 15
    labels = (torch.rand(40, generator=generator) < 0.3).long()
    expected, kl = plain_kto(*(t.tolist() for t in (policy, reference, labels, mismatched)),
                             beta=0.2, weights=(1.0, 1.33))  # fmt: skip
    assert kl > 1

    def check(form):
        found = form(policy - reference, labels, kto_baseline(mismatched), beta=0.2,
                     desirable_weight=1.0, undesirable_weight=1.33)  # fmt: skip
        close(found, expected, atol=1e-5)

    judge(check, form, is_right)


def test_the_baseline_is_a_mean_that_is_never_below_0():
    assert kto_baseline(torch.tensor([3.0, -1.0, 4.0])) == 2  # single ones may be below 0
    assert kto_baseline(torch.tensor([1.0, -5.0])) == 0


def test_losses_are_finite_far_away():
    options = {"beta": 1.0, "desirable_weight": 1.0, "undesirable_weight": 1.0}
    ratios = torch.tensor([1e5, -1e5, 1e5, -1e5], requires_grad=True)
    losses = kto_loss(ratios, torch.tensor([1, 1, 0, 0]), torch.tensor(0.0), **options)
    losses.sum().backward()
    close(losses, [0.0, 1.0, 1.0, 0.0])
    assert ratios.grad.isfinite().all()


# ---- KTO's rows


def rated(prompt: list[int], answer: list[int], label: int) -> dict:
    name = f"{prompt} {answer}"
    return {
        "answer_ids": prompt + answer,
        "answer_response_start": len(prompt),
        "label": label,
        "row_id": name,
    }


ROWS = Table(
    [
        rated([1, 2], [3, 4, 5], 1),
        rated([1, 2], [6], 0),
        rated([7, 8, 9], [10, 11], 1),
        rated([12], [13, 14, 15, 16], 0),
        rated([1, 2], [17, 18], 1),
    ]
)


def test_a_mismatched_answer_is_of_the_next_other_prompt():
    rows = MismatchedRows(ROWS, max_tokens=5)
    found = [(rows[i]["mismatched_ids"], rows[i]["mismatched_response_start"]) for i in range(5)]
    # The prompts of rows 0, 1 and 4 are alike, so the last one's answer is the first of row 2, round the end.
    # Row 2 keeps the end of its prompt: 4 tokens of the answer leave room for one.
    assert found == [
        ([1, 2, 10, 11], 2),
        ([1, 2, 10, 11], 2),
        ([9, 13, 14, 15, 16], 1),
        ([12, 17, 18], 1),
        ([1, 2, 10, 11], 2),
    ]
    assert rows[3] == ROWS[3] | {"mismatched_ids": [12, 17, 18], "mismatched_response_start": 1}
    assert rows.lengths("answer_ids") == [5, 3, 5, 5, 4] and len(rows) == 5


def test_where_all_prompts_are_alike_the_next_answer_is_taken():
    assert find_others([5, 5, 5]) == [1, 2, 0] and find_others([]) == [] and find_others([5]) == [0]


# ---- KTO's trainer


@pytest.fixture
def trainer(tiny_model_folder):
    model = load_causal_lm(ModelOptions(tiny_model_folder("llama"), dropout=0.0), 320)
    policy = PolicyModel(model, num_valid_tokens=320)
    args = RewardArguments(loss="kto", beta=0.3, desirable_weight=1.5)
    return KTOTrainer(policy, args, is_packed=False, logger=Mock())


def known_rows() -> list[dict]:
    """Rows whose answers are likelier now than they were to the reference: the baseline is above 0."""
    rows = MismatchedRows(ROWS, max_tokens=64)
    return [rows[i] | {"reference_logprobs": torch.tensor([-20.0 - i, -24.0 - 3 * i])} for i in range(5)]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_any_cut_gives_the_same_loss_gradient_and_baseline(cut, trainer):
    rows = known_rows()

    def run(parts):
        batches = [collate_pairs([rows[i] for i in part]) for part in parts]
        trainer.prepare(batches)
        sums = [trainer.compute_sums(batch) for batch in batches]
        parts_of = {name: [stats[name] for _, stats in sums] for name in sums[0][1]}
        stats = {
            n: float(sum(s[0] if isinstance(s, tuple) else s for s in some)) for n, some in parts_of.items()
        }
        return gradients(trainer.engine, [loss for loss, _ in sums]), stats, float(trainer.baseline)

    expected, stats, kl = run([[0, 1, 2, 3, 4]])
    assert kl > 0
    found, found_stats, found_kl = run(cut)
    check_same(found, expected)
    assert found_stats == pytest.approx(stats, rel=1e-5) and found_kl == pytest.approx(kl, rel=1e-6)


@torch.no_grad()
def test_the_trainers_figures_against_the_plain_loop(trainer):
    rows = known_rows()
    policy, mismatched = [], []
    for row in rows:
        for name, into in (("answer", policy), ("mismatched", mismatched)):
            ids, start = row[f"{name}_ids"], row[f"{name}_response_start"]
            logits = trainer.engine.causal_lm(torch.tensor([ids])).logits[0].double().log_softmax(-1)
            into.append(sum(float(logits[t - 1, ids[t]]) for t in range(start, len(ids))))
    reference = [row["reference_logprobs"].tolist() for row in rows]
    losses, kl = plain_kto(
        policy,
        [ref for ref, _ in reference],
        [row["label"] for row in rows],
        [m - ref for m, (_, ref) in zip(mismatched, reference, strict=True)],
        beta=0.3,
        weights=(1.5, 1.0),
    )
    batch = collate_pairs(rows)
    trainer.engine.train()
    trainer.prepare([batch])
    assert not trainer.engine.training, "the baseline is asked as the reference was"
    loss, stats = trainer.compute_sums(batch)
    assert float(loss) == pytest.approx(sum(losses), rel=1e-5)
    assert float(stats["kl"]) == pytest.approx(5 * kl, rel=1e-5)
    rewards = [0.3 * (p - ref) for p, (ref, _) in zip(policy, reference, strict=True)]
    good, count = stats["desirable_reward"]
    assert float(good) == pytest.approx(rewards[0] + rewards[2] + rewards[4], rel=1e-5) and count == 3
    bad, count = stats["undesirable_reward"]
    assert float(bad) == pytest.approx(rewards[1] + rewards[3], rel=1e-5) and count == 2
    figures = trainer.evaluate_batches([(batch, torch.tensor([True] * 5))])
    assert figures["loss"] == pytest.approx(sum(losses) / 5, rel=1e-5)
    assert figures["kl"] == pytest.approx(kl, rel=1e-5)
    assert figures["desirable_reward"] == pytest.approx(float(good) / 3, rel=1e-5)
    is_right = [(r > 0.3 * kl) == bool(row["label"]) for r, row in zip(rewards, rows, strict=True)]
    assert figures["accuracy"] == pytest.approx(sum(is_right) / 5) == float(stats["accuracy"]) / 5
    without_kl = [(r > 0) == bool(row["label"]) for r, row in zip(rewards, rows, strict=True)]
    assert sum(is_right) != sum(without_kl), "the baseline must matter"
    ranks = []
    for rank in range(2):  # each reads 4 rows where there are 5
        with as_rank(rank, 2):
            ranks += evaluation_batches(rows, collate_pairs, rows_per_batch=2)
    assert trainer.evaluate_batches(ranks) == pytest.approx(figures, rel=1e-5)


def test_the_statistics_of_a_micro_batch_are_not_waited_for(monkeypatch):
    """Rewards of good and of bad responses apart, without reading from the device how many there are."""
    monkeypatch.setattr(kto_trainer, "add_router_loss", lambda engine, loss, batch, count: (loss, {}))
    batch = PackedBatch.build("abc", {"label": [torch.tensor([label]) for label in (1, 0, 1)]})
    with pretended_gpu() as gpu:
        ratios = torch.tensor([0.5, -0.25, 2.0], device="cuda")
        trainer = SimpleNamespace(
            args=SimpleNamespace(beta=0.1),
            baseline=torch.tensor(0.25, device="cuda"),
            engine=None,
            count=None,
            compute_log_ratios=lambda *_: ratios,
            compute_losses=lambda log_ratios, *_: log_ratios,
        )
        gpu.clear()
        loss, stats = KTOTrainer.compute_sums(trainer, batch)
        assert not gpu.waits
        assert loss.item() == 2.25 and stats["accuracy"].item() == 3.0
        for name, total, number in (("desirable", 0.25, 2), ("undesirable", -0.025, 1)):
            numbers = [x.item() for x in stats[f"{name}_reward"]]
            assert numbers == pytest.approx([total, number])
