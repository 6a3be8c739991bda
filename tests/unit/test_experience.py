"""The record of a PPO step: packed and padded, gathered, cut into minibatches; its summary."""

import dataclasses

import pytest
import torch
from records import make_record

from common.data.packed_batch import PackedBatch
from common.models.tensor_ops import correlation, whiten
from common.ranks import distributed
from step3_ppo.algorithms import ALGORITHMS, fill_defaults
from step3_ppo.arguments import PPOArguments
from step3_ppo.experience import (
    Experience,
    MinibatchPlan,
    TokenCap,
    add_results,
    gather_records,
    read_experience,
    sequence_lengths,
)
from step3_ppo.response_inputs import build_response_inputs
from step3_ppo.step_metrics import distinct_ngrams, summarise, summarise_gap, summarise_scores


def ppo(experience: Experience, kl_coef: float = 0.1, **flags) -> Experience:
    algorithm = ALGORITHMS["ppo"]
    args = fill_defaults(dataclasses.replace(PPOArguments(), **flags), algorithm)
    return algorithm.add_advantages(experience, args, kl_coef)


def test_an_experience_is_the_padded_record():
    record = make_record([3, 5], [2, 1], [2, 6])
    experience = read_experience(record)
    assert experience.sample_ids.tolist() == [3, 5] and experience.response_mask.sum(1).tolist() == [2, 6]
    assert experience.response_ids.shape == (2, 6) and experience.is_finished.tolist() == [True, False]
    for name in ("response_ids", "old_logprobs", "old_values", "versions"):
        found = getattr(experience, name)[experience.response_mask]
        assert found.equal(record.data[name]), name
    assert experience.prox_logprobs is None and experience.advantages is None


def test_results_go_back_into_the_record_without_their_padding():
    record = make_record([0, 1], [1, 1], [2, 3])
    experience = ppo(read_experience(record))
    found = add_results(record, experience)
    assert found.data["advantages"].equal(experience.advantages[experience.response_mask])
    assert found.data["loss_mask"].tolist() == [True] * 5
    assert found.lengths["returns"].tolist() == [2, 3]


def test_records_of_ranks_come_together_by_sample_id(monkeypatch):
    parts = [make_record([4, 1], [3, 2], [2, 4]), make_record([3, 0, 2], [5, 1, 2], [1, 5, 3])]
    monkeypatch.setattr(distributed, "gather_objects", lambda local: parts)
    whole = gather_records(parts[0])
    expected = make_record([0, 1, 2, 3, 4], [1, 2, 2, 5, 3], [5, 4, 3, 1, 2])
    assert whole.ids == (0, 1, 2, 3, 4)
    for key, data in expected.data.items():
        assert whole.data[key].equal(data) and whole.lengths[key].equal(expected.lengths[key]), key


def test_responses_stand_behind_their_prompts():
    record = make_record([0, 1, 2], [3, 1, 2], [2, 4, 1])
    batch = build_response_inputs(record, is_packed=False)
    for row, (prompt, response) in enumerate(
        zip(record.sequences("prompt_ids"), record.sequences("response_ids"), strict=True)
    ):
        whole = torch.cat([prompt, response])
        assert batch.inputs.input_ids[row, : len(whole)].equal(whole)
        assert batch.inputs.is_token[row].sum() == len(whole)
    assert batch.inputs.input_ids.flatten()[batch.slots].equal(record.data["response_ids"])
    flat = build_response_inputs(record, is_packed=True)
    assert flat.inputs.input_ids.shape == (1, 13) and flat.inputs.cu_seqlens.tolist() == [0, 5, 10, 13]
    assert flat.inputs.input_ids[0, flat.slots].equal(record.data["response_ids"])


def dealt(plan: MinibatchPlan, record: PackedBatch, world_size: int, monkeypatch) -> list[list[list[int]]]:
    """The sample ids of every update, micro-batch by micro-batch, all ranks' together."""
    monkeypatch.setattr(distributed, "world_size", lambda: world_size)
    of_ranks = []
    for rank in range(world_size):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        of_ranks.append([[list(m.ids) for m in parts] for parts in plan.minibatches(record, 7)])
    assert len({tuple(len(parts) for parts in of_rank) for of_rank in of_ranks}) == 1, "as many on each rank"
    return [[m for parts in update for m in parts] for update in zip(*of_ranks, strict=True)]


@pytest.mark.parametrize("cap", [None, TokenCap(24), TokenCap(24, is_packed=True)])
@pytest.mark.parametrize(("rows", "accumulation", "world_size"), [(8, 1, 1), (4, 2, 1), (4, 1, 2), (2, 2, 2)])
def test_an_update_has_the_same_samples_however_they_are_dealt(
    rows, accumulation, world_size, cap, monkeypatch
):
    record = make_record(range(24), [2, 5, 9, 3] * 6, [3, 1, 2, 8] * 6)
    expected = [sorted(sum(u, [])) for u in dealt(MinibatchPlan(8, 1, 2, 5), record, 1, monkeypatch)]
    plan = MinibatchPlan(rows, accumulation, epochs=2, seed=5, cap=cap)
    found = dealt(plan, record, world_size, monkeypatch)
    assert [sorted(sum(update, [])) for update in found] == expected
    for epoch in (expected[:3], expected[3:]):
        assert sorted(sum(epoch, [])) == list(range(24)), "each sample once an epoch"
    assert expected[:3] != expected[3:], "epochs are shuffled apart"
    if cap:
        lengths = {i: n for i, (n,) in zip(record.ids, sequence_lengths(record), strict=True)}
        for micro_batch in (m for update in found for m in update):
            of_rows = [lengths[i] for i in micro_batch]
            assert (sum(of_rows) if cap.is_packed else len(of_rows) * max(of_rows)) <= 24


@pytest.mark.parametrize("truncated", ["score", "bootstrap", "penalty", "mask"])
def test_what_the_padding_holds_never_matters_to_advantages(truncated):
    flags = {"truncated": truncated, "length_reward_coef": 1.0, "length_reward_tokens": 4}
    first = read_experience(make_record([0, 1, 2, 3], [1, 2, 2, 5], [5, 4, 3, 1]))
    spoilt = {
        field.name: torch.where(first.response_mask, value, torch.nan)
        for field in dataclasses.fields(first)
        if (value := getattr(first, field.name)) is not None
        and value.is_floating_point()
        and value.dim() == 2
    }
    found, other = ppo(first, **flags), ppo(dataclasses.replace(first, **spoilt), **flags)
    for name in ("rewards", "advantages", "returns"):
        assert getattr(found, name).equal(getattr(other, name)), name
    assert found.advantages[~found.response_mask].eq(0).all()
    assert summarise(found) == pytest.approx(summarise(other), abs=1e-6)


def test_advantages_by_hand():
    # One response of two tokens, finished. gamma 1, lambda 0.5, kl_coef 0.1, no whitening.
    experience = dataclasses.replace(
        read_experience(make_record([0], [1], [2])),
        old_logprobs=torch.tensor([[-1.0, -2.0]]),
        ref_logprobs=torch.tensor([[-1.5, -1.0]]),
        old_values=torch.tensor([[0.5, 0.25]]),
        scores=torch.tensor([7.0]),
    )
    found = ppo(experience, gae_lambda=0.5, reward_clip=5.0, adv_norm="none")
    # KL k1: [0.5, -1.0] -> rewards [-0.05, 0.1 + clip(7) = 5.1]
    torch.testing.assert_close(found.rewards, torch.tensor([[-0.05, 5.1]]))
    # delta2 = 5.1 + 0 - 0.25 = 4.85; delta1 = -0.05 + 0.25 - 0.5 = -0.3; A1 = -0.3 + 0.5 * 4.85 = 2.125
    torch.testing.assert_close(found.advantages, torch.tensor([[2.125, 4.85]]))
    torch.testing.assert_close(found.returns, torch.tensor([[2.625, 5.1]]))
    whitened = ppo(experience, gae_lambda=0.5, reward_clip=5.0)
    torch.testing.assert_close(whitened.advantages, whiten(found.advantages, found.response_mask))


def test_a_cut_response_is_bootstrapped_only_when_asked():
    experience = read_experience(make_record([0], [1], [6]))
    assert not experience.is_finished.any()
    plain, bootstrap = (ppo(experience, adv_norm="none", truncated=t) for t in ("score", "bootstrap"))
    difference = (bootstrap.returns - plain.returns)[0, -1]
    torch.testing.assert_close(difference, experience.next_values[0])  # gamma is 1


def test_the_summary_by_hand():
    experience = dataclasses.replace(
        read_experience(make_record([0, 1], [1, 1], [1, 2])),
        old_logprobs=torch.tensor([[-1.0, 9.0], [-1.0, -2.0]]),
        ref_logprobs=torch.tensor([[-2.0, 0.0], [-1.0, -1.0]]),
        rollout_logprobs=torch.tensor([[-1.5, 0.0], [-1.0, -2.0]]),
        scores=torch.tensor([1.0, 3.0]),
    )
    experience = ppo(experience)
    found = summarise(experience) | summarise_gap(experience)
    assert found["objective/kl"] == pytest.approx((1.0 + (0.0 - 1.0)) / 2)
    assert found["objective/score"] == 2.0 and found["objective/score_std"] == 1.0
    assert found["rollout/response_tokens"] == 1.5
    assert found["policy/logprob_gap"] == pytest.approx(0.5 / 3) and found["policy/logprob_gap_max"] == 0.5
    assert found["objective/score_length_correlation"] == pytest.approx(1.0)


def test_distinct_ngrams_by_hand():
    ids = torch.tensor([[1, 2, 1, 2], [1, 2, 9, 9]])
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    assert distinct_ngrams(ids, mask, 1) == pytest.approx(2 / 6)
    assert distinct_ngrams(ids, mask, 2) == pytest.approx(2 / 4)  # 12 21 12 | 12
    assert distinct_ngrams(ids, mask, 5) == 0.0


def test_each_reward_is_told_apart_with_how_it_agrees():
    record = make_record([0, 1, 2], [1] * 3, [2] * 3)
    scores = torch.tensor([0.0, 1.0, 2.0])
    record = record.with_numbers("scores", scores).with_numbers("score/a", scores)
    assert summarise_scores(record) == {}  # one reward is what objective/score says already
    found = summarise_scores(record.with_numbers("score/b", -2 * scores))
    assert found["objective/score_b"] == -2.0 and found["objective/agreement_b"] == pytest.approx(-1.0)
    assert found["objective/agreement_a"] == pytest.approx(1.0)
    assert correlation(scores, torch.ones(3)) == 0.0
