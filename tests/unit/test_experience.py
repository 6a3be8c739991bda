"""The record of a PPO step: order, padding, selection, minibatches."""

import dataclasses

import pytest
import torch

from common import distributed
from common.tensor_ops import whiten
from step3_ppo.algorithms import ALGORITHMS
from step3_ppo.arguments import PPOArguments
from step3_ppo.experience import Experience, MinibatchPlan, concatenate
from step3_ppo.ppo_trainer import summarise, summarise_gap


def make(sample_ids, prompt_lengths, response_lengths, fill: int = 0, seed: int = 0) -> Experience:
    """Rows whose numbers depend on their sample id alone; padding holds `fill`."""
    num_prompt, num_response = max(prompt_lengths), max(response_lengths)
    rows = []
    for sample, p_len, r_len in zip(sample_ids, prompt_lengths, response_lengths, strict=True):
        g = torch.Generator().manual_seed(sample + 1000 * seed)
        r_mask = torch.arange(num_response) < r_len
        p_mask = torch.arange(num_prompt) >= num_prompt - p_len

        def on_response(values, mask=r_mask):
            row = torch.full((num_response,), float(fill))
            row[mask] = values
            return row

        p_ids = torch.full((num_prompt,), fill)
        p_ids[p_mask] = torch.randint(1, 50, (p_len,), generator=g)
        r_ids = torch.full((num_response,), fill)
        r_ids[r_mask] = torch.randint(1, 50, (r_len,), generator=g)
        numbers = [on_response(-torch.rand(r_len, generator=g)) for _ in range(4)]
        rows.append((torch.tensor(sample), p_ids, p_mask, r_ids, r_mask, torch.tensor(r_len < 5), *numbers))
        rows[-1] += (torch.rand((), generator=g), torch.randn((), generator=g))
    names = [f.name for f in dataclasses.fields(Experience)][:12]
    return Experience(**{n: torch.stack(c) for n, c in zip(names, zip(*rows, strict=True), strict=True)})


def real_numbers(experience: Experience) -> dict[str, list]:
    """Every field without its padding."""
    found = {}
    for name, value in experience.tensors().items():
        mask = experience.prompt_mask if name.startswith("prompt_") else experience.response_mask
        found[name] = (
            [v[m].tolist() for v, m in zip(value, mask, strict=True)] if value.dim() == 2 else value.tolist()
        )
    return found


def test_parts_of_other_widths_join_in_the_order_of_sample_ids():
    parts = [make([4, 1], [3, 2], [2, 4]), make([3, 0, 2], [5, 1, 2], [1, 5, 3])]
    whole = concatenate(parts)
    assert whole.sample_ids.tolist() == [0, 1, 2, 3, 4]
    assert whole.prompt_ids.shape == (5, 5) and whole.response_ids.shape == (5, 5)
    expected = make([0, 1, 2, 3, 4], [1, 2, 2, 5, 3], [5, 4, 3, 1, 2])
    assert real_numbers(whole) == real_numbers(expected)
    assert whole.prompt_mask[:, -1].all() and whole.response_mask[:, 0].all()


def test_a_selection_is_as_narrow_as_its_rows():
    whole = make([0, 1, 2], [1, 2, 5], [5, 4, 1])
    some = whole.select(torch.tensor([1, 0]))
    assert some.prompt_ids.shape == (2, 2) and some.response_ids.shape == (2, 5)
    assert real_numbers(some) == real_numbers(make([1, 0], [2, 1], [4, 5]))


@pytest.mark.parametrize(("rows", "accumulation", "world_size"), [(8, 1, 1), (4, 2, 1), (4, 1, 2), (2, 2, 2)])
def test_an_update_has_the_same_samples_however_they_are_dealt(rows, accumulation, world_size, monkeypatch):
    experience = make(range(24), [2] * 24, [3] * 24)

    def updates(rows, accumulation, world_size):
        monkeypatch.setattr(distributed, "world_size", lambda: world_size)
        dealt = []
        for rank in range(world_size):
            monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
            plan = MinibatchPlan(rows, accumulation, epochs=2, seed=5)
            dealt.append(
                [[m.sample_ids.tolist() for m in parts] for parts in plan.minibatches(experience, 7)]
            )
        return [sorted(i for part in update for m in part for i in m) for update in zip(*dealt, strict=True)]

    expected = updates(8, 1, 1)
    assert updates(rows, accumulation, world_size) == expected
    assert len(expected) == 6
    for epoch in (expected[:3], expected[3:]):
        assert sorted(i for update in epoch for i in update) == list(range(24)), "each sample once an epoch"
    assert expected[:3] != expected[3:], "epochs are shuffled apart"


@pytest.mark.parametrize("truncated", ["score", "bootstrap", "penalty"])
def test_what_the_padding_holds_never_matters_to_advantages(truncated):
    args = dataclasses.replace(
        PPOArguments(), truncated=truncated, length_reward_coef=1.0, length_reward_tokens=4
    )
    lengths = ([0, 1, 2, 3], [1, 2, 2, 5], [5, 4, 3, 1])
    first, second = (ALGORITHMS["ppo"](make(*lengths, fill=fill), args, 0.1) for fill in (0, 33))
    third = make(*lengths)
    spoilt = {
        name: torch.where(third.response_mask, value, torch.nan)
        for name, value in third.tensors().items()
        if value.is_floating_point() and value.dim() == 2
    }
    third = ALGORITHMS["ppo"](dataclasses.replace(third, **spoilt), args, 0.1)
    for name in ("rewards", "advantages", "returns"):
        assert getattr(first, name).equal(getattr(second, name)), name
        assert getattr(first, name).equal(getattr(third, name)), name
    assert first.advantages[~first.response_mask].eq(0).all()
    for other in (second, third):
        assert summarise(first) == pytest.approx(summarise(other), abs=1e-6)


def test_advantages_by_hand():
    # One response of two tokens, finished. gamma 1, lambda 0.5, kl_coef 0.1, no whitening.
    experience = make([0], [1], [2])
    experience = dataclasses.replace(
        experience,
        old_logprobs=torch.tensor([[-1.0, -2.0]]),
        ref_logprobs=torch.tensor([[-1.5, -1.0]]),
        old_values=torch.tensor([[0.5, 0.25]]),
        scores=torch.tensor([7.0]),
    )
    args = dataclasses.replace(PPOArguments(), gae_lambda=0.5, reward_clip=5.0, whiten_advantages=False)
    found = ALGORITHMS["ppo"](experience, args, 0.1)
    # KL k1: [0.5, -1.0] -> rewards [-0.05, 0.1 + clip(7) = 5.1]
    torch.testing.assert_close(found.rewards, torch.tensor([[-0.05, 5.1]]))
    # delta2 = 5.1 + 0 - 0.25 = 4.85; delta1 = -0.05 + 0.25 - 0.5 = -0.3; A1 = -0.3 + 0.5 * 4.85 = 2.125
    torch.testing.assert_close(found.advantages, torch.tensor([[2.125, 4.85]]))
    torch.testing.assert_close(found.returns, torch.tensor([[2.625, 5.1]]))
    whitened = ALGORITHMS["ppo"](experience, dataclasses.replace(args, whiten_advantages=True), 0.1)
    torch.testing.assert_close(whitened.advantages, whiten(found.advantages, found.response_mask))


def test_a_cut_response_is_bootstrapped_only_when_asked():
    experience = make([0], [1], [6])
    assert not experience.is_finished.any()
    plain = dataclasses.replace(PPOArguments(), whiten_advantages=False, truncated="score")
    bootstrap = dataclasses.replace(plain, truncated="bootstrap")
    a, b = (ALGORITHMS["ppo"](experience, args, 0.1) for args in (plain, bootstrap))
    difference = (b.returns - a.returns)[0, -1]
    torch.testing.assert_close(difference, experience.next_values[0])  # gamma is 1


def test_the_summary_by_hand():
    experience = make([0, 1], [1, 1], [1, 2])
    experience = dataclasses.replace(
        experience,
        old_logprobs=torch.tensor([[-1.0, 9.0], [-1.0, -2.0]]),
        ref_logprobs=torch.tensor([[-2.0, 0.0], [-1.0, -1.0]]),
        rollout_logprobs=torch.tensor([[-1.5, 0.0], [-1.0, -2.0]]),
        scores=torch.tensor([1.0, 3.0]),
    )
    experience = ALGORITHMS["ppo"](experience, PPOArguments(), 0.1)
    found = summarise(experience) | summarise_gap(experience)
    assert found["objective/kl"] == pytest.approx((1.0 + (0.0 - 1.0)) / 2)
    assert found["objective/score"] == 2.0 and found["rollout/response_tokens"] == 1.5
    assert found["policy/logprob_gap"] == pytest.approx(0.5 / 3) and found["policy/logprob_gap_max"] == 0.5
    assert found["objective/score_length_correlation"] == pytest.approx(1.0)
