"""The rollout batch: what algorithms see, its cut into minibatches, and who holds what on four ranks."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rollout_batches import make_batch, make_rollout_batch

from common.data.packed_batch import PackedBatch
from common.models.tensor_ops import correlation
from common.ranks import distributed
from step3_ppo import metrics
from step3_ppo.algorithms import ALGORITHMS, fill_defaults, step_mean
from step3_ppo.arguments import PPOArguments
from step3_ppo.rewards.scorer import Scorer
from step3_ppo.roles import build_response_inputs
from step3_ppo.rollout_batch import (
    TokenCap,
    cut_minibatches,
    exchange_rows,
    gather_ids,
    merge_columns,
    num_tokens,
    plan_minibatches,
    replace_rows,
    response_mask,
    sampled_positions,
    tokens,
    with_tokens,
)

LENGTHS = ([2, 5, 9, 3] * 6, [3, 1, 2, 8] * 6)  # of 24 prompts and responses


def test_tokens_are_padded_and_packed_again():
    batch = make_rollout_batch([3, 5], [2, 1], [2, 6])
    assert response_mask(batch).sum(1).tolist() == [2, 6] and tokens(batch, "versions").shape == (2, 6)
    changed = with_tokens(batch, old_logprobs=tokens(batch, "old_logprobs") * 2)
    assert changed.data["old_logprobs"].equal(batch.data["old_logprobs"] * 2)
    assert changed.lengths["old_logprobs"].tolist() == [2, 6]


def test_what_the_model_sampled_stands_behind_the_prompts():
    batch = make_rollout_batch([0, 1], [2, 1], [3, 2])
    lengths, is_sampled = sampled_positions(batch)
    assert lengths.tolist() == [5, 3] and is_sampled.tolist() == [False] * 2 + [True] * 3 + [
        False,
        True,
        True,
    ]
    batch = batch.with_key("sampled_mask", torch.tensor([1, 0, 1, 0, 1]).bool(), like="response_ids")
    assert sampled_positions(batch)[1].int().tolist() == [0, 0, 1, 0, 1, 0, 0, 1]


def test_rows_that_no_algorithm_saw_count_in_no_loss():
    batch = make_rollout_batch([0, 1, 2], [1, 1, 1], [2, 3, 1])
    kept = batch.select([2, 0])
    kept = with_tokens(kept, advantages=torch.ones(2, 2))
    whole = merge_columns(kept, batch)
    assert whole.ids == (0, 1, 2)
    assert tokens(whole, "advantages").tolist() == [[1, 1, 0], [0, 0, 0], [1, 0, 0]]
    assert tokens(whole, "loss_mask").sum(1).tolist() == [2, 0, 1]


def test_responses_stand_behind_their_prompts():
    batch = make_rollout_batch([0, 1, 2], [3, 1, 2], [2, 4, 1])
    (padded, slots), (packed, packed_slots) = (
        build_response_inputs(batch, is_packed=is_packed) for is_packed in (False, True)
    )
    pairs = zip(batch.sequences("prompt_ids"), batch.sequences("response_ids"), strict=True)
    wholes = [torch.cat(pair) for pair in pairs]
    for row, whole in enumerate(wholes):
        assert padded.input_ids[row, : len(whole)].equal(whole)
    assert len(padded.token_slots) == sum(map(len, wholes))
    assert padded.input_ids.flatten()[slots + 1].equal(batch.data["response_ids"])
    assert packed.input_ids.equal(torch.cat(wholes)[None])
    assert packed.packing.starts.tolist() == [0, 5, 10, 13]
    assert packed.input_ids[0, packed_slots + 1].equal(batch.data["response_ids"])


def make_args(rows, accumulation=1, max_tokens=0) -> PPOArguments:
    """Two epochs of minibatches."""
    args = PPOArguments(per_device_training_batch_size=rows, gradient_accumulation_steps=accumulation)
    return dataclasses.replace(args, max_tokens_per_micro_batch=max_tokens, ppo_epochs=2, seed=5)


SIZES = {name: torch.tensor(of) for name, of in zip(("prompt", "response"), LENGTHS, strict=True)}
CAPS = [TokenCap(0), TokenCap(24), TokenCap(24, is_packed=True), TokenCap(24, True, shares_prompts=True)]


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("group_size", [1, 4])
@pytest.mark.parametrize(("rows", "accumulation", "world_size"), [(4, 2, 1), (4, 1, 2), (2, 2, 2)])
def test_an_update_has_the_same_samples_however_they_are_dealt(
    rows, accumulation, world_size, group_size, cap, monkeypatch
):
    groups = torch.arange(24) // group_size
    sizes = SIZES | {"group": groups, "prompt": SIZES["prompt"][groups % 4]}
    lengths = sizes["prompt"] + sizes["response"]
    expected = [sorted(sum(u[0], [])) for u in plan_minibatches(sizes, make_args(8), cap, 7)]
    next_step = [sorted(sum(u[0], [])) for u in plan_minibatches(sizes, make_args(8), cap, 8)]
    monkeypatch.setattr(distributed, "world_size", lambda: world_size)
    plans = list(plan_minibatches(sizes, make_args(rows, accumulation, cap.max_tokens), cap, 7))
    assert [sorted(sum(sum(update, []), [])) for update in plans] == expected
    for epoch in (expected[:3], expected[3:]):
        assert sorted(sum(epoch, [])) == list(range(24)), "each sample once an epoch"
    assert expected[:3] != expected[3:] and expected != next_step, "epochs and steps are shuffled apart"
    for update in plans:
        of_update = groups[sum(sum(update, []), [])]
        assert (of_update.bincount() % group_size == 0).all(), "groups stay whole"
        assert len({len(of_rank) for of_rank in update}) == 1, "as many micro-batches on each rank"
        for micro_batch in (m for of_rank in update for m in of_rank):
            of_rows = lengths[micro_batch].tolist()
            cost = sum(of_rows) if cap.is_packed else len(of_rows) * max(of_rows)
            together = groups[micro_batch].unique_consecutive()
            if cap.shares_prompts:
                assert len(together.unique()) == len(together), "a group's rows stand together"
                cost -= sum(of_rows) - int(sizes["response"][micro_batch].sum())
                cost += int(SIZES["prompt"][together % 4].sum())
            assert cost <= 24 or not cap.max_tokens


@pytest.mark.parametrize(
    ("is_packed", "shares_prompts", "sizes"),
    [(False, False, [8, 14, 16, 18]), (True, False, [16, 19, 19]), (True, True, [10, 11, 20])],
)
def test_a_pass_computes_no_more_tokens_than_its_cap(is_packed, shares_prompts, sizes):
    """Counted in what the model is given: rows of 7, 9, 4, 9, 7, 7, 8, 3, or groups of 11, 10, 10 and 10."""
    prompts = [5, 5, 3, 3, 4, 4, 1, 1]
    batch = make_rollout_batch(range(8), prompts, [2, 4, 1, 6, 3, 3, 7, 2], num_samples=2)
    alike = [batch.sequences("prompt_ids")[row // 2 * 2] for row in range(8)]
    batch = batch.with_key("prompt_ids", torch.cat(alike), lengths=torch.tensor(prompts))
    how = {"is_packed": is_packed, "shares_prompts": shares_prompts}
    parts = TokenCap(20, **how).cut(batch)
    assert sorted(build_response_inputs(part, **how)[0].input_ids.numel() for part in parts) == sizes


# --- four ranks ---


def share_of(world_size: int, rank: int) -> PackedBatch:
    """The rows that a rank has sampled: every so-manieth group of two."""
    ids = [i for i in range(24) if (i // 2) % world_size == rank]
    prompts, responses = ([of_all[i] for i in ids] for of_all in LENGTHS)
    return make_rollout_batch(ids, prompts, responses, num_samples=2)


def look(rank: int, world_size: int) -> dict:
    """What a rank sees of the steps that ranks take together."""
    batch, sent = share_of(world_size, rank), []
    if world_size > 1:
        plain = dist.all_gather_object
        dist.all_gather_object = lambda values, value, group=None: (
            sent.append(value),
            plain(values, value, group=group),
        )
    found = {"micro_batches": [], "received": 0, "trained": 0}
    own = set(batch.ids)
    for (micro_batch,) in cut_minibatches(batch, make_args(8 // world_size), TokenCap(0), 7):
        expected = make_rollout_batch(
            micro_batch.ids, *([of[i] for i in micro_batch.ids] for of in LENGTHS), num_samples=2
        )
        assert all(micro_batch.data[key].equal(data) for key, data in expected.data.items())
        of_rows = dict(zip(micro_batch.ids, num_tokens(micro_batch).tolist(), strict=True))
        found["received"] += sum(n for i, n in of_rows.items() if i not in own)
        found["trained"] += sum(of_rows.values())
        found["micro_batches"].append(micro_batch.ids)
    found["advantages"] = {}
    for adv_norm in ("batch", "group_mean_batch_std"):
        args = fill_defaults(PPOArguments(whiten_scores="batch", adv_norm=adv_norm), ALGORITHMS["ppo"])
        done = ALGORITHMS["ppo"].add_advantages(batch, args, 0.1)
        for sample, advantages in zip(done.ids, done.sequences("advantages"), strict=True):
            found["advantages"][adv_norm, sample] = advantages
    found["summary"] = metrics.summarise(done)
    found["mean"] = float(step_mean(batch.numbers("scores")))
    # Rows 0 to 7 are dropped, of all ranks, and fresh ones taken that the last rank has most of.
    fresh = share_of(world_size, rank)
    fresh = PackedBatch(tuple(i + 24 for i in fresh.ids), fresh.data, fresh.lengths)
    taken = gather_ids(fresh, torch.tensor([i % 8 > 3 for i in fresh.ids]))[:8]
    changed = replace_rows(batch, range(8), fresh, taken)
    found["changed"] = changed.ids
    found["shown"] = exchange_rows(changed, [[31, 8]] + [[]] * (world_size - 1)).ids
    found["objects"] = [
        value
        for value in sent
        if isinstance(value, PackedBatch) or "_ids'" in str(getattr(value, "keys", list)())
    ]
    return found


def be_a_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    torch.save(look(rank, 4), folder / f"rank-{rank}")
    dist.destroy_process_group()


@pytest.mark.slow
def test_four_ranks_hold_what_they_sampled_and_receive_what_they_train_on(tmp_path):
    alone = look(0, 1)
    torch.multiprocessing.spawn(be_a_rank, (tmp_path,), nprocs=4)
    found = [torch.load(tmp_path / f"rank-{rank}", weights_only=False) for rank in range(4)]
    for update, expected in enumerate(alone["micro_batches"]):
        assert sum((f["micro_batches"][update] for f in found), ()) == expected
    for f in found:
        assert 0 < f["received"] <= f["trained"]
        assert not f["objects"], "no pickle carries tokens"
        assert f["summary"] == pytest.approx(alone["summary"], abs=1e-6) and f["mean"] == alone["mean"]
        for sample, advantages in f["advantages"].items():
            torch.testing.assert_close(advantages, alone["advantages"][sample], rtol=0, atol=1e-6)
    assert sorted(sum((f["changed"] for f in found), ())) == sorted(alone["changed"])
    assert {len(f["changed"]) for f in found} == {6}, "as many on each rank"
    for f in found:
        assert all(f["changed"].count(i ^ 1) == 1 for i in f["changed"]), "groups stay whole"
    assert found[0]["shown"] == (31, 8) == alone["shown"] and not any(f["shown"] for f in found[1:])


# --- metrics ---


def test_the_summary_by_hand():
    batch = make_batch(
        [1, 2],
        old_logprobs=torch.tensor([[-1.0, 9.0], [-1.0, -2.0]]),
        ref_logprobs=torch.tensor([[-2.0, 0.0], [-1.0, -2.5]]),
        rewards=torch.tensor([[1.0, 0.0], [1.0, 2.0]]),
        scores=torch.tensor([1.0, 3.0]),
    )
    found = metrics.summarise(batch)
    assert found["objective/kl"] == pytest.approx((1.0 + (0.0 + 0.5)) / 2)
    assert found["objective/score"] == 2.0 and found["objective/score_std"] == 1.0
    assert found["objective/reward"] == 2.0 and found["rollout/response_tokens"] == 1.5
    assert found["objective/score_length_correlation"] == pytest.approx(1.0)
    assert "objective/clipped_fraction" not in found
    shares = [metrics.summarise(batch, clip)["objective/clipped_fraction"] for clip in (0.5, 1.0, 2.5, 3.0)]
    assert shares == [1.0, 0.5, 0.5, 0.0], "a score at the clip is not beyond it"


def test_explained_variance_by_hand():
    # returns 1 3 5 7: variance 5; errors 1 1 1 3: mean 1.5, variance (3 * 0.25 + 2.25) / 4 = 0.75
    returns, values = 10007 + torch.tensor([[1.0, 3.0, 5.0, 7.0], [0.0, 2.0, 4.0, 4.0]])
    assert metrics.explained_variance(values, returns) == pytest.approx(1 - 0.75 / 5)
    assert metrics.explained_variance(returns, returns) == 1.0
    assert metrics.explained_variance(torch.ones(4), returns) == 0.0
    assert metrics.explained_variance(values, torch.full((4,), 0.1)) == 0.0
    assert metrics.explained_variance(values[:0], returns[:0]) == 0.0


def test_distinct_ngrams_by_hand():
    responses = [torch.tensor([1, 2, 1, 2]), torch.tensor([1, 2])]
    assert metrics.distinct_ngrams(responses, 1) == pytest.approx(2 / 6)
    assert metrics.distinct_ngrams(responses, 2) == pytest.approx(2 / 4)  # 12 21 12 | 12
    assert metrics.distinct_ngrams(responses, 5) == 0.0


def test_each_reward_is_told_apart_with_how_it_agrees():
    scores = torch.tensor([0.0, 1.0, 2.0])
    batch = make_batch([2] * 3, scores=scores).with_numbers("score/a", scores)
    assert metrics.summarise_scores(batch, Scorer([])) == {}  # one is what objective/score says already
    found = metrics.summarise_scores(batch.with_numbers("score/b", -2 * scores), Scorer([]))
    assert found["objective/score_b"] == -2.0 and found["objective/agreement_b"] == pytest.approx(-1.0)
    assert found["objective/agreement_a"] == pytest.approx(1.0)
    assert correlation(scores, torch.ones(3)) == 0.0
