"""The mathematics of PPO for language models. PURE: imports torch only.

Rewards, advantages, losses and KL estimates, unreduced: the caller sums them, weighted by `loss_weights`,
over the global batch. Everything is computed in fp32 or better and returned as fp32. Values outside a mask
are ignored, NaN included, and results are 0 there. A group is identified by its id only: its rows may be
anywhere, and groups may have different sizes.

# B sequences, R response, G groups; N tokens of any layout, flat or (B, R)
# mask (B, R) bool, True for the response, its end token included; mask (N) bool, tokens that count
"""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

KLEstimator = Literal["k1", "k2", "k3"]
Aggregation = Literal["token", "sequence", "constant"]
ValueLoss = Literal["mse", "huber"]

MAX_LOG_RATIO = 60.0  # its exp exceeds any bound and is finite in fp32, also times an advantage


def kl_estimate(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: KLEstimator) -> torch.Tensor:
    """Estimate of KL(policy || reference) for each token sampled from the policy: fp32, same shape.

    With d = logprobs - ref_logprobs: k1 = d (unbiased), k2 = d^2 / 2 (biased, small variance),
    k3 = exp(-d) - 1 + d (unbiased, at least 0). J. Schulman 2020, "Approximating KL divergence".
    """
    difference = logprobs.double() - ref_logprobs.double()  # k3 loses most digits by cancellation in fp32
    if estimator == "k1":
        return difference.float()
    if estimator == "k2":
        return (0.5 * difference.square()).float()
    return (torch.expm1(-difference) + difference).float()


@torch.no_grad()
def kl_penalised_rewards(
    scores: torch.Tensor, kl: torch.Tensor, mask: torch.Tensor, *, kl_coef: float
) -> torch.Tensor:
    """-kl_coef * kl per token, plus the score at the last one: (B, R) fp32, no gradient.

    scores (B,), kl (B, R). A row without a response gets no score. InstructGPT, arXiv:2203.02155 eq. 2.
    """
    tokens_from_here = mask.flip(1).cumsum(1).flip(1)
    is_last = mask & (tokens_from_here == 1)
    penalties = torch.where(mask, -kl_coef * kl.float(), 0.0)
    return penalties + torch.where(is_last, scores.float().unsqueeze(1), 0.0)


@torch.no_grad()
def generalized_advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    bootstrap_values: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages, returns), both (B, R) fp32 without gradient, 0 outside the mask; returns = A + V.

    rewards, values (B, R); values[:, t] is the value of the state in which token t is chosen. The state
    after the last real token is terminal with value 0, or has `bootstrap_values` (B,) for truncated
    responses. GAE, arXiv:1506.02438 eq. 16: A_t = delta_t + gamma lambda A_t+1, delta_t = r_t + gamma
    V_t+1 - V_t.
    """
    rewards = rewards.double()
    values = values.double()
    advantages = torch.zeros_like(values)
    next_value = values.new_zeros(len(values)) if bootstrap_values is None else bootstrap_values.double()
    next_advantage = torch.zeros_like(next_value)
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * gae_lambda * next_advantage
        # A masked token is skipped: the token before it continues with the one after it.
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = torch.where(mask[:, t], advantage, 0.0)
    returns = torch.where(mask, advantages + values, 0.0)
    return advantages.float(), returns.float()


@torch.no_grad()
def discounted_returns(rewards: torch.Tensor, mask: torch.Tensor, *, gamma: float) -> torch.Tensor:
    """Reward to go G_t = r_t + gamma G_t+1 of each token: (B, R) fp32, 0 outside the mask.

    rewards (B, R). REINFORCE, and the advantage of REINFORCE++ before its normalisation.
    """
    # GAE with lambda 1 and values of 0.
    no_values = torch.zeros_like(rewards)
    return generalized_advantages(rewards, no_values, mask, gamma=gamma, gae_lambda=1.0)[0]


def policy_log_ratio(
    new_logprobs: torch.Tensor, old_logprobs: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """log(new / old probability) of each token: (N) fp32, 0 outside the mask, at most MAX_LOG_RATIO.

    All (N); only `new_logprobs` gets a gradient. With an infinite ratio, the gradient of a clipped token
    would be 0 * inf.
    """
    log_ratio = torch.where(mask, new_logprobs.float() - old_logprobs.detach().float(), 0.0)
    return log_ratio.clamp(max=MAX_LOG_RATIO)


def kl_loss_terms(
    new_logprobs: torch.Tensor, ref_logprobs: torch.Tensor, mask: torch.Tensor, estimator: KLEstimator
) -> torch.Tensor:
    """`kl_estimate` of each token as a loss: (N) fp32, 0 outside the mask.

    All (N). Only `new_logprobs` gets a gradient: that of the value, with the sampled token held fixed. For
    tokens sampled from the policy: the gradient of k1 has mean 0, so k1 regularises nothing; that of k2 is
    the gradient of KL(policy || reference); that of k3, which GRPO uses, is the gradient of
    KL(reference || policy), the same to first order. Liu et al. 2025, arXiv:2510.01555.
    """
    # Masked entries are zeroed first, so that a NaN among them cannot reach a gradient.
    new, ref = (torch.where(mask, x.double(), 0.0) for x in (new_logprobs, ref_logprobs.detach()))
    return kl_estimate(new, ref, estimator)


def value_loss_terms(
    new_values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_range: float,
    kind: ValueLoss = "mse",
) -> tuple[torch.Tensor, torch.Tensor]:
    """(max(h(V - G), h(clamp(V, V_old - clip, V_old + clip) - G)) fp32, is_clipped bool), both (N).

    All (N), V new_values, G returns. h(e) = e^2 / 2; with `kind` "huber" |e| - 1 / 2 from |e| = 1 on. A
    `clip_range` of 0 leaves the second error out. Only `new_values` gets a gradient, none where `is_clipped`.
    As in OpenAI baselines and InstructGPT.
    """
    # Masked entries are zeroed first, so that a NaN among them cannot reach a gradient.
    new, old, target = (
        torch.where(mask, x.float(), 0.0) for x in (new_values, old_values.detach(), returns.detach())
    )

    def loss_of(values: torch.Tensor) -> torch.Tensor:
        if kind == "huber":
            return F.huber_loss(values, target, reduction="none")
        return 0.5 * (values - target).square()

    loss = loss_of(new)
    if not clip_range:
        return loss, torch.zeros_like(mask)
    clipped_loss = loss_of(new.detach().clamp(old - clip_range, old + clip_range))
    is_clipped = clipped_loss > loss.detach()
    return torch.where(is_clipped, clipped_loss, loss), is_clipped


def loss_weights(
    loss_mask: torch.Tensor, aggregation: Aggregation, max_response_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights (B, R) fp32, counts (B,) fp64): a loss is sum(weights * terms) / sum(counts).

    loss_mask (B, R) bool, the tokens that count; weights are 0 elsewhere. Both sums are over micro-batches
    and ranks, so that the loss is that of the global batch for any split of it. "token": the mean over
    tokens. "sequence": the mean over responses of the mean over their tokens (GRPO, arXiv:2402.03300 eq. 3).
    "constant": the sum over tokens divided by the number of responses times `max_response_tokens` (Dr. GRPO,
    arXiv:2503.20783). A response without a counting token has weights of 0; its count is 0 for the first two,
    and `max_response_tokens` for "constant", whose divisor must not depend on the sampled responses.
    """
    lengths = loss_mask.sum(1, dtype=torch.float64)  # (B,)
    if aggregation == "token":
        return loss_mask.float(), lengths
    if aggregation == "sequence":
        return (loss_mask / lengths.clamp(min=1)[:, None]).float(), (lengths > 0).double()
    return loss_mask.float(), torch.full_like(lengths, max_response_tokens)


class GroupBaselines(NamedTuple):
    """Statistics of each row's group: (B,) float64, so that score - mean is exact."""

    mean: torch.Tensor
    std: torch.Tensor  # with Bessel's correction, 0 for a group of one
    leave_one_out_mean: torch.Tensor  # of the others; its own score in a group of one


@torch.no_grad()
def group_baselines(scores: torch.Tensor, group_ids: torch.Tensor) -> GroupBaselines:
    """Mean, standard deviation and leave-one-out mean of each row's group, without gradient.

    The deviation divides by n - 1, as TRL, OpenRLHF and verl do for GRPO (arXiv:2402.03300 says only
    "std"). In a group of equal scores, or of one, score - mean and score - leave_one_out_mean are exactly 0.
    Leave-one-out: Ahmadian et al. 2024, arXiv:2402.14740.
    """
    _, rows, sizes = group_ids.unique(return_inverse=True, return_counts=True)  # (B,), (G,)
    size = sizes[rows]
    # In float64 the sum of equal fp32 scores is exact, and so is their mean: the differences are 0. Two
    # passes, because E[x^2] - E[x]^2 can be negative for equal scores even in float64.
    scores = scores.float().double()
    sums = _sums(scores, rows, len(sizes))[rows]
    mean = sums / size
    squares = _sums((scores - mean).square(), rows, len(sizes))[rows]
    others = (size - 1).clamp(min=1)
    leave_one_out = torch.where(size > 1, (sums - scores) / others, scores)
    return GroupBaselines(mean, (squares / others).sqrt(), leave_one_out)


@torch.no_grad()
def constant_groups(scores: torch.Tensor, group_ids: torch.Tensor, is_scored: torch.Tensor) -> torch.Tensor:
    """Whether each row's group has at most one distinct score, such as a group of one: (B,) bool.

    Rows that are not `is_scored` (B,) bool do not count. Such a group gives a group-relative algorithm no
    gradient (dynamic sampling, DAPO, arXiv:2503.14476).
    """
    _, rows, sizes = group_ids.unique(return_inverse=True, return_counts=True)  # (B,), (G,)
    lowest = scores.new_full((len(sizes),), torch.inf)
    highest = scores.new_full((len(sizes),), -torch.inf)
    lowest.scatter_reduce_(0, rows, torch.where(is_scored, scores, torch.inf), "amin")
    highest.scatter_reduce_(0, rows, torch.where(is_scored, scores, -torch.inf), "amax")
    return (lowest >= highest)[rows]


@torch.no_grad()
def group_whiten(x: torch.Tensor, mask: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """(x - mean) / sqrt(variance + 1e-8) over the counting tokens of each group: (B, R) fp32, else 0.

    x (B, R), mask (B, R) bool, True = counts. The same as `whiten` for the rows of each group separately; the
    variance divides by the count. AReaL's `group_adv_norm`. Constant entries give exactly 0.
    """
    centred = group_centre(x, mask, group_ids)
    return (centred * torch.rsqrt(_group_means(centred.square(), mask, group_ids) + 1e-8)).float()


@torch.no_grad()
def group_centre(x: torch.Tensor, mask: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """x minus the mean over the counting tokens of each group: (B, R) float64, else 0."""
    x = x.float().double()
    return torch.where(mask, x - _group_means(x, mask, group_ids), 0.0)


def _group_means(x: torch.Tensor, mask: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """Mean of x (B, R) over the counting tokens of each row's group: (B, 1)."""
    _, rows, sizes = group_ids.unique(return_inverse=True, return_counts=True)  # (B,), (G,)
    counts = _sums(mask.sum(1).double(), rows, len(sizes)).clamp(min=1)  # (G,)
    sums = _sums(torch.where(mask, x, 0.0).sum(1), rows, len(sizes))
    return (sums / counts)[rows, None]


def _sums(x: torch.Tensor, rows: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Sum (G,) of each group's entries of x (B,), float64."""
    return x.new_zeros(num_groups).index_add_(0, rows, x)


class KLController:
    """The coefficient of the KL penalty: fixed, or adapted to a target KL.

    With a target, each update multiplies it by 1 + clamp(kl / target - 1, -0.2, 0.2) num_samples / horizon
    (Ziegler et al. 2019, arXiv:1909.08593 section 2.2). More samples than the horizon are several updates of
    one horizon each and one of the rest: the factor of 5 horizons at once could be 0, of more negative.
    """

    def __init__(self, init_coef: float, target: float = 0.0, horizon: int = 10_000) -> None:
        """`target` is in nats per response; 0: a fixed coefficient. `horizon` is a number of responses."""
        self.coef = init_coef
        self.target = target
        self.horizon = horizon

    def state_dict(self) -> dict[str, float]:
        """State for a resumed run."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore a saved state."""
        self.coef = state["coef"]

    def update(self, mean_kl: float, num_samples: int) -> None:
        """Adapt `coef` after a batch of `num_samples` responses with this mean KL, summed over tokens.

        Every rank must pass the mean over all ranks.
        """
        if self.target:
            error = min(max(mean_kl / self.target - 1, -0.2), 0.2)
            num_horizons, rest = divmod(num_samples, self.horizon)
            self.coef *= (1 + error) ** num_horizons * (1 + error * rest / self.horizon)
