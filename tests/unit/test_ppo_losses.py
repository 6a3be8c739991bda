"""The losses of PPO and how they become one number: by hand, against float64 loops and wrong forms.

O20 and the like in a docstring are rows of the seeds.
"""

import math

import pytest
import torch
from right_or_wrong import close, forms, judge
from rollout_batches import PADDING, fill, random_batch

from step3_ppo.arguments import PPOArguments
from step3_ppo.policy_losses import (
    POLICY_LOSSES,
    LossTokens,
    PolicyLoss,
    build_policy_loss,
    clipped_surrogate,
    find_policy_loss,
)
from step3_ppo.ppo_losses import loss_tokens
from step3_ppo.ppo_math import loss_weights, policy_log_ratio, value_loss_terms
from step3_ppo.rollout_correction import FORMS, correction_weights


def policy_loss(new, old, advantages, mask, clip_range=(0.2, 0.2), dual_clip=0.0):
    """Compose the loss as PPOLosses does."""
    ratio = policy_log_ratio(new, old, mask).exp()
    return clipped_surrogate(ratio, torch.where(mask, advantages, 0.0), clip_range, dual_clip)[0]


def test_policy_loss_and_gradient_by_hand():
    """O20: clamp to 0.8 ... 1.2. O21: old against new. O22: no gradient beyond the bound."""
    ratios = torch.tensor([[1.0, 1.5, 0.5, 1.1], [1.5, 0.5, 1.0, 1.0]])
    advantages = torch.tensor([[2.0, 2.0, 2.0, -3.0], [-1.0, -1.0, 4.0, 4.0]])
    mask = torch.tensor([[True, True, True, True], [True, True, True, False]])
    old = torch.full((2, 4), -2.0)
    new = (old + ratios.log()).requires_grad_()
    loss = policy_loss(new, old, advantages, mask)
    loss.sum().backward()
    # -2 * 1; -2 * 1.2, at the bound; -2 * 0.5: worse, so not clipped; 3 * 1.1
    # 1 * 1.5: worse, so not clipped; 1 * 0.8, at the bound; -4 * 1; padding
    close(loss, [[-2.0, -2.4, -1.0, 3.3], [1.5, 0.8, -4.0, 0.0]])
    close(new.grad, [[-2.0, 0.0, -1.0, 3.3], [1.5, 0.0, -4.0, 0.0]])


def test_policy_loss_with_a_higher_upper_bound_and_a_bounded_negative_side():
    """O20, A20: two ranges and dual_clip. O22: each side's clipped tokens are told apart."""
    # 1.25 is inside a range to 1.28; 1.3 is not; -A * 4 is bounded to 3; the lower bound stays 0.8
    new = torch.tensor([1.25, 1.3, 4.0, 0.75, 4.0, 0.5]).log().requires_grad_()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0, 0.0])
    loss, sides = clipped_surrogate(new.exp(), advantages, (0.2, 0.28), 3.0)
    loss.sum().backward()
    close(loss, [-1.25, -1.28, 3.0, 0.8, 0.0, 0.0])
    close(new.grad, [-1.25, 0.0, 0.0, 0.0, 0.0, 0.0])
    expected = {"": [1, 2, 3], "_high": [1], "_dual": [2], "_low": [3]}
    found = {name.removeprefix("clip_fraction"): x.nonzero()[:, 0].tolist() for name, x in sides.items()}
    assert found == expected


def test_a_small_positive_advantage_has_no_bound_of_the_negative_side():
    """Nor is its lower side clipped, and a ratio at a bound is inside."""
    ratios = torch.tensor([1.0, 0.5, 1.2, 0.8])
    advantages = torch.tensor([0.5, 0.5, 0.5, -0.5])
    loss, sides = clipped_surrogate(ratios, advantages, (0.2, 0.2), 3.0)
    close(loss, [-0.5, -0.25, -0.6, 0.4])
    assert not any(side.any() for side in sides.values())


def test_policy_loss_and_its_gradient_do_not_read_padding():
    """O24: log_ratio * mask. A23: where, since NaN * 0 is NaN. O9: flat tokens have the same loss."""
    new, old, advantages, mask = random_batch(3)
    leaf = new.clone().requires_grad_()
    expected = policy_loss(leaf, old, advantages, mask)
    expected.sum().backward()
    assert torch.equal(policy_loss(new[mask], old[mask], advantages[mask], mask[mask]), expected[mask])
    for padding in PADDING:
        filled = [fill(x, mask, padding) for x in (new, old, advantages)]
        filled[0].requires_grad_()
        loss = policy_loss(*filled, mask)
        loss.sum().backward()
        assert torch.equal(loss, expected)
        assert torch.equal(filled[0].grad, leaf.grad) and leaf.grad[~mask].eq(0).all()


def test_only_new_logprobs_get_a_gradient():
    """O18, O23."""
    new, old, _, mask = random_batch(3)
    leaves = [x.requires_grad_() for x in (new, old)]
    policy_log_ratio(*leaves, mask).sum().backward()
    assert new.grad is not None and old.grad is None
    assert not correction_weights(new, old, mask, FORMS["tis"]).weights.requires_grad


def test_an_overflowing_ratio_that_is_clipped_has_a_finite_gradient():
    new = torch.tensor([[200.0, 0.0]], requires_grad=True)  # exp(200) is infinite in fp32
    loss = policy_loss(new, torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2).bool())
    loss.sum().backward()
    close(loss, [[-1.2, -1.0]])
    close(new.grad, [[0.0, -1.0]])


def test_losses_of_bf16_inputs_are_fp32():
    """O27."""
    *tensors, mask = random_batch(3)
    new, old, other = (x.bfloat16() for x in tensors)
    assert policy_loss(new, old, other, mask).dtype == torch.float32
    for how in FORMS.values():
        assert correction_weights(new, old, mask, how).weights.dtype == torch.float32
    for kind in ("mse", "huber"):
        assert value_loss_terms(new, old, other, mask, clip_range=0.2, kind=kind)[0].dtype == torch.float32


# --- other policy losses ---


def make_tokens(ratios, advantages, lengths, mask=None) -> LossTokens:
    """Tokens of responses of these lengths, with these ratios of new to prox."""
    ratios, advantages = (torch.tensor(x, dtype=torch.float32) for x in (ratios, advantages))
    mask, zeros = torch.ones(len(ratios)).bool() if mask is None else mask, torch.zeros(len(ratios))
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    logs = torch.where(mask, ratios.log(), 0.0)
    return LossTokens(
        (logs - 2.0).requires_grad_(), zeros - 2.0, zeros, zeros, torch.where(mask, advantages, 0.0),
        mask, zeros + 1, rows, len(lengths),
    )  # fmt: skip


# Two responses, of 3 tokens (the last counts nothing) and of 2: ratios 2.205 * 0.5 and 1.2 * 1.2.
TOKENS = ([2.205, 0.5, 9.0, 1.2, 1.2], [1.0, 3.0, 9.0, -1.0, -2.0], [3, 2])
MASK = torch.tensor([True, True, False, True, True])


def gspo_of_a_token(tokens, clip_range):
    return clipped_surrogate(tokens.log_ratio().exp(), tokens.advantages, clip_range)


def gspo_of_a_product(tokens, clip_range):
    longer = tokens._replace(new_logprobs=2 * (tokens.new_logprobs + 2.0) - 2.0)
    return POLICY_LOSSES["gspo"].function(longer, clip_range)


@forms(POLICY_LOSSES["gspo"].function, of_a_token=gspo_of_a_token, of_a_product=gspo_of_a_product)
def test_gspo_by_hand(form, is_right):
    """arXiv:2507.18071: the geometric means are 1.05 and 1.2; beyond the bounds there is no gradient."""

    def check(form):
        tokens = make_tokens(*TOKENS, mask=MASK)
        losses, sides = form(tokens, (0.1, 0.1))
        close(losses, [-1.05, -3.15, 0.0, 1.2, 2.4])  # a negative advantage is not clipped above
        losses.sum().backward()
        close(tokens.new_logprobs.grad, [-1.05, -3.15, 0.0, 1.2, 2.4])  # each token's own, of the mean's size
        tokens = make_tokens(TOKENS[0], [-x for x in TOKENS[1]], TOKENS[2], mask=MASK)
        losses, sides = form(tokens, (0.1, 0.1))
        close(losses, [1.05, 3.15, 0.0, -1.1, -2.2])
        losses.sum().backward()
        close(tokens.new_logprobs.grad, [1.05, 3.15, 0.0, 0.0, 0.0])
        assert sides["clip_fraction_high"].tolist() == [False, False, False, True, True]

    judge(check, form, is_right)


def test_gspo_is_the_loss_of_whole_responses():
    """With one advantage a response: the same number and gradient as the paper's loss in a float64 loop."""
    new, old, _, mask = random_batch(3, lengths=[9, 1, 4, 2, 8], seed=4)
    advantages, weights = torch.tensor([1.0, -1.0, 2.0, -0.5, 0.3]), loss_weights(mask, "sequence", 9)[0]
    leaf = (0.1 * new).double().requires_grad_()
    loop = torch.zeros((), dtype=torch.float64)
    for row in range(5):
        length = int(mask[row].sum())
        ratio = (leaf[row, :length] - 0.1 * old[row, :length].double()).mean().exp()
        a = float(advantages[row])
        loop = loop - torch.minimum(a * ratio, a * ratio.clamp(0.97, 1.02))
    loop.backward()
    flat, rows = [x[mask] for x in (0.1 * new, 0.1 * old)], mask.nonzero()[:, 0]
    flat[0].requires_grad_()
    zeros = torch.zeros(len(rows))
    tokens = LossTokens(*flat, zeros, zeros, advantages[rows], zeros == 0, zeros + 1, rows, 5)
    losses, _ = POLICY_LOSSES["gspo"].function(tokens, (0.03, 0.02))
    total = (losses * weights[mask]).sum()
    total.backward()
    close(total, loop.detach(), atol=1e-5)
    close(flat[0].grad, leaf.grad[mask], atol=1e-6)


def test_cispo_by_hand():
    """arXiv:2506.13585: a clipped token keeps its gradient, of the size of the bound; A < 0 too."""
    tokens = make_tokens(*TOKENS, mask=MASK)
    losses, sides = POLICY_LOSSES["cispo"].function(tokens, (0.1, 0.5))
    # weights 1.5, 0.9, -, 1.2, 1.2, by the advantage and log p = log ratio - 2
    slopes = torch.tensor([-1.5, -2.7, 0.0, 1.2, 2.4])
    close(losses, slopes * tokens.new_logprobs.detach())
    losses.sum().backward()
    close(tokens.new_logprobs.grad, slopes)
    assert sides["clip_fraction_high"].tolist() == [True, False, False, False, False]
    assert sides["clip_fraction_low"].tolist() == [False, True, False, False, False]
    assert POLICY_LOSSES["cispo"].clip_range == 1.0  # no lower bound


def test_inputs_of_a_loss_are_0_where_nothing_counts():
    mask = torch.tensor([True, False])
    numbers = torch.tensor([1.5, math.nan])
    names = ("old_logprobs", "advantages", "correction_weights", "prox_logprobs")
    data = dict.fromkeys(names, numbers) | {"loss_mask": mask, "rows": torch.tensor([0, 1])}
    tokens = loss_tokens(data, 2, numbers, numbers)
    assert [x.tolist() for x in tokens[:5]] == [[1.5, 0.0]] * 5 and tokens.weights.tolist() == [1.5, 0.0]
    assert (tokens.mask is mask, tokens.rows.tolist(), tokens.num_rows) == (True, [0, 1], 2)
    assert tokens.means_of_responses(torch.tensor([4.0, 0.0])).tolist() == [4.0, 0.0]


def test_a_loss_is_found_with_its_options_and_tried(tmp_path, monkeypatch):
    """A4, R41: a loss of one's own gets what ours get."""
    (tmp_path / "losses_of_a_test.py").write_text(
        "def plain(tokens, bounds, sharpness=1.0):\n"
        "    return -sharpness * tokens.advantages * tokens.log_ratio(), {'mean': tokens.entropies}\n\n\n"
        "def reduced(tokens, bounds):\n    return plain(tokens, bounds)[0].mean(), {}\n\n\n"
        "def bare(tokens, bounds):\n    return tokens.logits\n\n\n"
        "def halting(tokens, bounds, up=1.0, down=1.0):\n"
        "    return up * tokens.new_logprobs.detach() + down, {}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    loss, options = find_policy_loss("losses_of_a_test:plain:sharpness=2")
    assert loss == PolicyLoss("losses_of_a_test:plain", loss.function) and options == {"sharpness": 2.0}
    args = PPOArguments(policy_loss="losses_of_a_test:plain:sharpness=2", clip_range=0.2)
    losses, _ = build_policy_loss(args)(make_tokens(*TOKENS))
    close(losses[:2], [-2 * math.log(2.205), 6 * math.log(2)])
    assert find_policy_loss("gspo") == (POLICY_LOSSES["gspo"], {})
    assert find_policy_loss("losses_of_a_test:halting:up=2,down=3")[1] == {"up": 2.0, "down": 3.0}
    for name in POLICY_LOSSES:
        build_policy_loss(PPOArguments(policy_loss=name, clip_range=0.2))
    for text, message in {
        "losses_of_a_test:reduced": r"the loss of two tokens has the shape \(\), not \(2,\): return one",
        "losses_of_a_test:bare": "it raised AttributeError on two tokens: .*logits",
        "losses_of_a_test:halting": "it would train nothing: remove a detach",
        "ppo:dual_clip=3=4": "'dual_clip=3=4' is not NAME=NUMBER",
        "gspo:up=1,down=2": r"gspo\(tokens, clip_range, up, down\)",
        "losses_of_a_test:plane": "has no plane; did you mean plain",
        "gsp": r"--policy_loss gsp is unknown; did you mean gspo\? \(known: cispo, gspo, ppo; or MODULE:",
        "ppo:dual_clip=1": "dual_clip=1 must be above 1",
        "ppo:dual_clip=x": "'dual_clip=x' is not NAME=NUMBER, such as dual_clip=3",
        "gspo:dual_clip=3": r"gspo cannot be called as gspo\(tokens, clip_range, dual_clip\)",
    }.items():
        with pytest.raises(ValueError, match=f"(?s).*{message}"):
            build_policy_loss(PPOArguments(policy_loss=text, clip_range=0.2))


@pytest.mark.parametrize(("high", "expected"), [(0.0, 1.25), (0.5, 1.5)])
def test_a_clip_range_has_a_side_of_its_own_above_1(high, expected):
    """0: the range below. A ratio of 9 with an advantage of 2 is clipped."""
    function = build_policy_loss(PPOArguments(clip_range=0.25, clip_range_high=high))
    tokens = make_tokens([9.0], [2.0], [1])
    assert float(function(tokens)[0]) == pytest.approx(-2 * expected)


# --- the critic's loss ---


VALUES = (
    torch.tensor([1.0, 2.0, 2.0, 0.0, 2.5, 5.0]),
    torch.tensor([1.1, 1.0, 1.0, 1.0, 2.5, 0.0]),
    torch.tensor([3.0, 3.0, 0.0, 3.0, 3.0, 0.0]),
)
VALUE_MASK = torch.tensor([True, True, True, True, True, False])


def check_value_loss(form, kind, expected, slopes):
    """Check losses and gradients, whatever stands in the padding: only the new values get any."""
    for padding in PADDING:
        leaves = [fill(x, VALUE_MASK, padding).requires_grad_() for x in VALUES]
        loss, is_clipped = form(*leaves, VALUE_MASK, clip_range=0.2, kind=kind)
        close(loss, expected)
        assert is_clipped.tolist() == [False, True, False, False, False, False]
        loss.sum().backward()
        close(leaves[0].grad, slopes)
        assert leaves[1].grad is None and leaves[2].grad is None


@forms(
    value_loss_terms,
    around_the_return=lambda new, old, *rest, **o: value_loss_terms(new, rest[0], *rest, **o),
    reads_padding=lambda *x, **o: value_loss_terms(*x[:3], torch.ones(6).bool(), **o),
)
def test_value_loss_by_hand(form, is_right):
    """O25, O26: half the larger square, cliprange_value 0.2. O28: the new value against the old return."""

    def check(form):
        # inside: (1 - 3)^2 / 2; towards the return too far: (1.2 - 3)^2 / 2, without a gradient;
        # away from it: 2^2 / 2 and (0 - 3)^2 / 2; inside: 0.5^2 / 2
        check_value_loss(form, "mse", [2.0, 1.62, 2.0, 4.5, 0.125, 0.0], [-2.0, 0.0, 2.0, -3.0, -0.5, 0.0])

    judge(check, form, is_right)


def test_huber_value_loss_by_hand():
    """O25: value_loss mse or huber."""
    # |e| - 1/2 above 1: 2 -> 1.5; 1 and, clipped to 1.2, 1.8 -> 1.3; 2 -> 1.5; 3 -> 2.5; 0.5 -> 0.25 / 2
    losses, slopes = [1.5, 1.3, 1.5, 2.5, 0.125, 0.0], [-1.0, 0.0, 1.0, -1.0, -0.5, 0.0]
    check_value_loss(value_loss_terms, "huber", losses, slopes)


def test_a_value_below_its_range_is_clipped_too():
    """From 1 to 0.5 towards a return of 0: the loss is that of 0.8, and has no gradient."""
    new = torch.tensor([0.5], requires_grad=True)
    is_real = torch.tensor([True])
    loss, is_clipped = value_loss_terms(new, torch.ones(1), torch.zeros(1), is_real, clip_range=0.2)
    loss.sum().backward()
    close(loss, [0.8**2 / 2])
    assert is_clipped.tolist() == [True] and new.grad.tolist() == [0.0]


def test_a_value_inside_its_range_is_not_counted_as_clipped_by_rounding():
    old = torch.linspace(1, 1000, 5000)[None]
    new = old + 0.01 * torch.randn(old.shape, generator=torch.Generator().manual_seed(0))
    everything = torch.ones_like(old).bool()
    assert not value_loss_terms(new, old, torch.zeros_like(old), everything, clip_range=0.2)[1].any()


# --- weights: how token losses become one number ---


def test_weights_by_hand():
    """O24: the seed's sum over mask by mask.sum() is "token"; A18: of each response alone, so for any cut."""
    mask = torch.arange(4) < torch.tensor([3, 1, 0])[:, None]
    ones, thirds = mask.float().tolist(), [[1 / 3] * 3 + [0], [1, 0, 0, 0], [0] * 4]
    expected = {"token": (ones, [3, 1, 0]), "sequence": (thirds, [1, 1, 0]), "constant": (ones, [5, 5, 5])}
    for aggregation, (of_tokens, of_responses) in expected.items():
        weights, counts = loss_weights(mask, aggregation, 5)
        close(weights, of_tokens)
        assert counts.tolist() == of_responses
        assert weights.dtype == torch.float32 and counts.dtype == torch.float64
        weights, counts = loss_weights(torch.zeros(2, 3).bool(), aggregation, 7)  # A24: nothing counts
        assert weights.eq(0).all() and float(counts.sum()) == (14 if aggregation == "constant" else 0)
