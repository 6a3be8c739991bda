"""Direct preference optimization: the loss by hand, its sums against a plain loop, the reference."""

import math
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from test_global_batches import as_rank
from test_packed_training import CUTS, check_same, gradients, pairs

from common.data.collators import collate_pairs
from common.data.global_batches import EpochOrder, RowPlan
from common.models.loading import ModelOptions, load_causal_lm
from common.models.policy_model import PolicyModel
from common.ranks import passes
from common.runs.saved_state import TensorReader, write_slices
from step2_reward import reference
from step2_reward.answer_scores import SIDES, compute_answer_logprobs
from step2_reward.arguments import RewardArguments
from step2_reward.pair_math import dpo_loss
from step2_reward.pair_trainer import DPOTrainer


def sums(*values):
    return [torch.tensor([value], dtype=torch.float32) for value in values]


# ---- The loss


def test_loss_by_hand():
    # Rewards 0.5 (-10 + 12) = 1 and 0.5 (-8 + 7) = -0.5, so z = 1.5.
    found = dpo_loss(*sums(-10, -8, -12, -7), beta=0.5)
    assert found.chosen.item() == 1 and found.rejected.item() == -0.5
    assert found.loss.item() == pytest.approx(math.log(1 + math.exp(-1.5)), abs=1e-7)  # 0.2014133
    smooth = dpo_loss(*sums(-10, -8, -12, -7), beta=0.5, label_smoothing=0.1)
    assert smooth.loss.item() == pytest.approx(0.9 * 0.2014133 + 0.1 * 1.7014133, abs=1e-6)


def test_gradient_by_hand():
    """d loss / d log-probability is -beta sigmoid(-z) for the chosen answer, the opposite for the other."""
    chosen, rejected, *reference = sums(-10, -8, -12, -7)
    chosen.requires_grad_(), rejected.requires_grad_()
    dpo_loss(chosen, rejected, *reference, beta=0.5).loss.backward()
    assert chosen.grad.item() == pytest.approx(-0.5 / (1 + math.exp(1.5)), abs=1e-7)
    assert rejected.grad.item() == -chosen.grad.item()


def test_losses_are_finite_far_away():
    for z in (1e4, -1e4):
        assert dpo_loss(*sums(z, 0, 0, 0), beta=1.0, label_smoothing=0.1).loss.isfinite()


def test_dpo_trainer_takes_its_flags_and_each_answers_reference():
    rows = [row | {"reference_logprobs": torch.tensor([-20.0, -30.0 - i])} for i, row in enumerate(pairs())]
    args = RewardArguments(loss="dpo", beta=0.3, label_smoothing=0.2)
    trainer = DPOTrainer(torch.nn.Identity(), args, is_packed=False, logger=Mock())
    policy = torch.arange(10.0) - 25
    trainer.compute_logprobs = lambda batch: policy
    z = 0.3 * ((policy[0::2] + 20) - (policy[1::2] + 30 + torch.arange(5)))
    expected = 0.8 * torch.nn.functional.softplus(-z) + 0.2 * torch.nn.functional.softplus(z)
    torch.testing.assert_close(trainer.compute_losses(collate_pairs(rows)).loss, expected)


# ---- Sums over answers


@pytest.fixture
def policy(tiny_model_folder):
    model = load_causal_lm(ModelOptions(tiny_model_folder("llama"), dropout=0.0), 320)
    return PolicyModel(model, num_valid_tokens=320)


def plain_logprob(model, ids: list[int], start: int) -> float:
    """Return the sum in float64 by transformers' own logits."""
    logits = model(torch.tensor([ids])).logits[0].double()
    return sum(float(logits[t - 1].log_softmax(-1)[ids[t]]) for t in range(max(start, 1), len(ids)))


@torch.no_grad()
def test_answers_against_the_plain_loop(policy):
    rows = pairs()
    rows[1] |= {"chosen_response_start": 0, "rejected_response_start": 0}  # an empty prompt
    sides = ("chosen", "rejected")
    expected = [
        plain_logprob(policy.causal_lm, row[f"{side}_ids"], row[f"{side}_response_start"])
        for row in rows
        for side in sides
    ]
    found = compute_answer_logprobs(policy, collate_pairs(rows))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), torch.tensor(expected).double(), atol=1e-4, rtol=1e-6)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_any_cut_gives_the_same_gradient(cut, policy):
    rows = [row | {"reference_logprobs": torch.tensor([-20.0, -30.0 - i])} for i, row in enumerate(pairs())]

    def loss_of(batch):
        reference = batch.data["reference_logprobs"].view(-1, 2)
        found = compute_answer_logprobs(policy, batch).view(-1, 2)
        return dpo_loss(*found.T, *reference.T, beta=0.3).loss.sum()

    expected = gradients(policy, [loss_of(collate_pairs(rows))])
    check_same(gradients(policy, [loss_of(collate_pairs([rows[i] for i in part])) for part in cut]), expected)


# ---- The reference's numbers


class Table(list):
    """Rows that know their lengths, as the token cache's tables do."""

    def lengths(self, column):
        return [len(row[column]) for row in self]


class KnownScores:
    """In place of a trainer: an answer's log-probability is its last token."""

    sides, num_passes = SIDES, 0

    def __init__(self, rows_per_batch: int) -> None:
        self.args = RewardArguments(per_device_eval_batch_size=rows_per_batch)
        self.engine = torch.nn.Identity()

    def compute_logprobs(self, batch):
        self.num_passes += 1
        token_ids, lengths = batch.interleave("chosen_ids", "rejected_ids")
        return token_ids[lengths.flatten().cumsum(0) - 1].float()


@pytest.mark.parametrize("rows_per_batch", [1, 2, 7])
def test_rows_get_their_own_numbers_and_a_checkpoint_brings_them_back(rows_per_batch, tmp_path):
    table = Table(pairs())
    held_out = Table(pairs()[2:4])
    before, after = (reference.Reference(table, held_out) for _ in range(2))
    before.compute(KnownScores(rows_per_batch), [0, 3, 4], is_begun=False)
    write_slices(tmp_path / "file", before.tensor_slices())
    after.load(TensorReader([tmp_path / "file"]), before.json_state())
    for index, row in enumerate(table):
        last = [row["chosen_ids"][-1], row["rejected_ids"][-1]]
        for one in (before, after):
            found = one.pairs["train"][index]["reference_logprobs"]
            assert found.tolist() == last if index in (0, 3, 4) else found.isnan().all()
            if index in (2, 3):
                found = one.pairs["eval"][index - 2]["reference_logprobs"]
                assert found.tolist() == last, "all that are held out"
    after.compute(KnownScores(1), [0, 3], is_begun=True)  # a longer run that needs no more of them
    with pytest.raises(ValueError, match="1 more rows need the reference's log-probabilities"):
        after.compute(KnownScores(1), [0, 1], is_begun=True)


@pytest.mark.parametrize("rows_per_batch", [1, 2, 7])
def test_two_ranks_ask_about_each_row_once_in_as_many_passes(rows_per_batch, monkeypatch):
    table, found, num_passes = Table(pairs()), [], set()
    monkeypatch.setattr(reference.distributed, "reduce_sum", lambda own: own)
    for rank in range(2):
        scores, rows = KnownScores(rows_per_batch), reference.ReferencePairs(table)
        with as_rank(rank, 2):
            reference.compute_reference(scores, rows, [0, 2, 3, 4])
        num_passes.add(scores.num_passes)
        assert rows.logprobs[1].isnan().all()
        found.append(rows.logprobs.nan_to_num())
    expected = [[row["chosen_ids"][-1], row["rejected_ids"][-1]] for row in table]
    expected[1] = [0, 0]
    assert sum(found).tolist() == expected and len(num_passes) == 1
    assert not (found[0] * found[1]).any(), "no row is asked about twice"


def test_a_pass_that_was_stopped_is_not_made_again(monkeypatch):
    scores, rows, answers = (
        KnownScores(1),
        reference.ReferencePairs(Table(pairs())),
        iter([False, False, True]),
    )
    monkeypatch.setattr(passes, "must_stop", lambda: next(answers))
    with pytest.raises(passes.Interrupted):
        reference.compute_reference(scores, rows, [0, 3, 4])
    assert scores.num_passes == 2 and int(rows.logprobs.isnan().any(1).sum()) == len(rows) - 2
    monkeypatch.undo()
    reference.compute_reference(scores, rows, [0, 3, 4])
    assert scores.num_passes == 3 and not rows.logprobs[[0, 3, 4]].isnan().any()


def test_rows_of_the_first_steps():
    longest = np.array([5, 1, 4, 2, 3, 6, 9])
    order = EpochOrder(7, RowPlan(1, 3), 5, longest=longest)
    assert order.rows_until(1) == sorted(order.rows_of(0)) and order.rows_until(0) == []
    assert order.rows_until(2) == order.rows_until(9) == list(range(7))
