"""The mathematics of PPO for language models. PURE: imports torch only.

Rewards, advantages, losses and KL estimates, unreduced: the caller sums them, weighed by `loss_weights`, over
the global batch. Everything is computed in fp32 or better and returned as fp32. What stands outside a mask is
never read, NaN included, and comes out as 0. `group_math.py` has what compares the responses to one prompt.

# B sequences, R response; N tokens of any layout, flat or (B, R)
# response_mask (B, R) bool, True for the response, its end token included; mask (N) bool, tokens that count
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

KLEstimator = Literal["k1", "k2", "k3"]
Aggregation = Literal["token", "sequence", "constant"]
ValueLoss = Literal["mse", "huber"]

MAX_LOG_RATIO = 60.0  # exp of it is beyond any bound, and finite in fp32, times an advantage too


class ValueLossTerms(NamedTuple):
    """One entry a token, 0 or False outside the mask; only `loss` has a gradient."""

    loss: torch.Tensor  # (N) fp32
    is_clipped: torch.Tensor  # (N) bool, True where the clipping takes the gradient away


def kl_estimate(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: KLEstimator) -> torch.Tensor:
    """Return an estimate of KL(policy || reference) for each token drawn from the policy: fp32, same shape.

    With d = logprobs - ref_logprobs: k1 = d (unbiased), k2 = d^2 / 2 (biased, small variance),
    k3 = exp(-d) - 1 + d (unbiased, at least 0). J. Schulman 2020, "Approximating KL divergence".

    Raises ValueError for another name.
    """
    difference = logprobs.double() - ref_logprobs.double()  # k3 cancels all but the last digits of an fp32
    if estimator == "k1":
        return difference.float()
    if estimator == "k2":
        return (0.5 * difference.square()).float()
    if estimator == "k3":
        return (torch.expm1(-difference) + difference).float()
    raise ValueError(f"KL estimator {estimator!r} is unknown; use k1, k2 or k3")


@torch.no_grad()
def kl_penalised_rewards(
    scores: torch.Tensor,
    kl: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    kl_coef: float,
    reward_clip: float | None,
) -> torch.Tensor:
    """Return -kl_coef * kl per token, the clipped score added at the last one: (B, R) fp32, no gradient.

    scores (B,), kl (B, R). Scores are clamped to [-reward_clip, reward_clip]; 0 or None leaves them. A row
    without a response gets no score. InstructGPT, arXiv:2203.02155 eq. 2.
    """
    mask = response_mask.bool()
    scores = scores.float().clamp(-reward_clip, reward_clip) if reward_clip else scores.float()
    tokens_from_here = mask.flip(1).cumsum(1).flip(1)
    is_last = mask & (tokens_from_here == 1)
    penalties = torch.where(mask, -kl_coef * kl.float(), 0.0)
    return penalties + torch.where(is_last, scores.unsqueeze(1), 0.0)


@torch.no_grad()
def generalized_advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    bootstrap_values: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantages, returns), both (B, R) fp32 without gradient, 0 outside the mask; returns = A + V.

    rewards, values (B, R); values[:, t] is the value of the state in which token t is chosen. After the
    last real token stands a terminal state of value 0, or of `bootstrap_values` (B,) for responses that
    were cut short. GAE, arXiv:1506.02438 eq. 16: A_t = delta_t + gamma lambda A_t+1, delta_t = r_t + gamma
    V_t+1 - V_t.
    """
    mask = response_mask.bool()
    rewards, values = rewards.double(), values.double()
    advantages = torch.zeros_like(values)
    next_value = values.new_zeros(len(values)) if bootstrap_values is None else bootstrap_values.double()
    next_advantage = torch.zeros_like(next_value)
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * gae_lambda * next_advantage
        # A masked token is stepped over: what comes before it continues with what comes after it.
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = torch.where(mask[:, t], advantage, 0.0)
    returns = torch.where(mask, advantages + values, 0.0)
    return advantages.float(), returns.float()


@torch.no_grad()
def discounted_returns(rewards: torch.Tensor, response_mask: torch.Tensor, *, gamma: float) -> torch.Tensor:
    """Return the reward to go G_t = r_t + gamma G_t+1 of each token: (B, R) fp32, 0 outside the mask.

    rewards (B, R). REINFORCE, and the advantage of REINFORCE++ before its normalisation.
    """
    # GAE with lambda 1 and a critic that knows nothing.
    no_values = torch.zeros_like(rewards)
    return generalized_advantages(rewards, no_values, response_mask, gamma=gamma, gae_lambda=1.0)[0]


def policy_log_ratio(
    new_logprobs: torch.Tensor, old_logprobs: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Return log(new / old probability) of each token: (N) fp32, 0 outside the mask, at most MAX_LOG_RATIO.

    All (N); only `new_logprobs` gets a gradient. Were the ratio infinite, the gradient of a clipped token
    would be 0 * inf.
    """
    log_ratio = torch.where(mask, new_logprobs.float() - old_logprobs.detach().float(), 0.0)
    return log_ratio.clamp(max=MAX_LOG_RATIO)


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, clip_range: float, clip_range_high: float = 0.0
) -> torch.Tensor:
    """Return max(-A ratio, -A clamp(ratio, 1 - clip, 1 + clip)) of each token: (N) fp32.

    All (N). PPO, arXiv:1707.06347 eq. 7. `clip_range_high` is another range above 1, 0: the same (DAPO,
    arXiv:2503.14476). A ratio beyond its bound, where the advantage rewards that, gets no gradient.
    """
    clipped = ratio.clamp(1 - clip_range, 1 + (clip_range_high or clip_range))
    return torch.maximum(-advantages * ratio, -advantages * clipped)


def dual_clip(loss: torch.Tensor, advantages: torch.Tensor, bound: float) -> torch.Tensor:
    """Return the loss of each token, that of a negative advantage at most -A bound: (N), bound > 1.

    arXiv:1912.09729.
    """
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * bound), loss)


@torch.no_grad()
def behaviour_weights(
    prox_logprobs: torch.Tensor, old_logprobs: torch.Tensor, mask: torch.Tensor, cap: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (weights (N) fp32, has_weight (N) bool): prox / old probability, 0 where it exceeds `cap`.

    All (N). Decoupled PPO (AReaL, arXiv:2505.24298): old is the policy that sampled, prox the one before the
    updates, which the ratio is taken to. Weights are 0 outside the mask too. cap 0: none.
    """
    weights = torch.where(mask, prox_logprobs.float() - old_logprobs.float(), 0.0).exp()
    has_weight = mask & ~(weights > (cap or math.inf))  # NaN passes: it must show in the loss
    return torch.where(has_weight, weights, 0.0), has_weight


def kl_loss_terms(
    new_logprobs: torch.Tensor, ref_logprobs: torch.Tensor, mask: torch.Tensor, estimator: KLEstimator
) -> torch.Tensor:
    """Return `kl_estimate` of each token as a loss: (N) fp32, 0 outside the mask.

    All (N). Only `new_logprobs` gets a gradient: that of the value, the draw of the token held fixed. So, for
    tokens drawn from the policy: the gradient of k1 has mean 0, it regularises nothing; that of k2 is the
    gradient of KL(policy || reference); that of k3, which GRPO uses, is the gradient of
    KL(reference || policy), the same to first order. Liu et al. 2025, arXiv:2510.01555.

    Raises ValueError for another name.
    """
    mask = mask.bool()
    # A masked entry becomes 0 before anything is computed from it, so that its NaN reaches no gradient.
    new, ref = (torch.where(mask, x.double(), 0.0) for x in (new_logprobs, ref_logprobs.detach()))
    return kl_estimate(new, ref, estimator)


def value_loss_terms(
    new_values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_range: float | None,
    kind: ValueLoss = "mse",
    huber_delta: float = 1.0,
) -> ValueLossTerms:
    """Return max(h(V - G), h(clamp(V, V_old - clip, V_old + clip) - G)) for each token.

    All (N), V new_values, G returns. h(e) = e^2 / 2; with `kind` "huber" only up to |e| = huber_delta, and
    huber_delta (|e| - huber_delta / 2) from there on. `clip_range` 0 or None leaves the second error out.
    Only `new_values` gets a gradient. As in OpenAI baselines and InstructGPT.

    Raises ValueError for another kind.
    """
    if kind not in ("mse", "huber"):
        raise ValueError(f"--value_loss {kind} is unknown; use mse or huber")
    mask = mask.bool()
    # A masked entry becomes 0 before anything is computed from it, so that its NaN reaches no gradient.
    new, old, target = (
        torch.where(mask, x.float(), 0.0) for x in (new_values, old_values.detach(), returns.detach())
    )

    def loss_of(errors: torch.Tensor) -> torch.Tensor:
        if kind == "mse":
            return 0.5 * errors.square()
        return torch.nn.functional.huber_loss(
            errors, torch.zeros_like(errors), reduction="none", delta=huber_delta
        )

    loss = loss_of(new - target)
    if not clip_range:
        return ValueLossTerms(loss, torch.zeros_like(mask))
    clipped_loss = loss_of(new.detach().clamp(old - clip_range, old + clip_range) - target)
    is_clipped = clipped_loss > loss.detach()
    return ValueLossTerms(torch.where(is_clipped, clipped_loss, loss), is_clipped)


def loss_weights(
    loss_mask: torch.Tensor, aggregation: Aggregation, max_response_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (weights (B, R) fp32, counts (B,) fp64): a loss is sum(weights * terms) / sum(counts).

    loss_mask (B, R) bool, the tokens that count; weights are 0 elsewhere. Both sums run over micro-batches
    and ranks, so that the loss is that of the global batch however it is cut. "token": the mean over tokens.
    "sequence": the mean over responses of the mean over their tokens (GRPO, arXiv:2402.03300 eq. 3).
    "constant": the sum over tokens by the number of responses times `max_response_tokens` (Dr. GRPO,
    arXiv:2503.20783). A response without a counting token has weights of 0; it counts 0 for the first two,
    and `max_response_tokens` for "constant", whose divisor must not depend on what was sampled.

    Raises ValueError for another name, and for "constant" without a positive number of tokens.
    """
    mask = loss_mask.bool()
    lengths = mask.sum(1, dtype=torch.float64)  # (B,)
    if aggregation == "token":
        return mask.float(), lengths
    if aggregation == "sequence":
        return (mask / lengths.clamp(min=1)[:, None]).float(), (lengths > 0).double()
    if aggregation != "constant":
        raise ValueError(f"--loss_aggregation {aggregation} is unknown; use token, sequence or constant")
    if max_response_tokens <= 0:
        raise ValueError(f"--max_answer_seq_len {max_response_tokens} must be above 0 to divide a loss by it")
    return mask.float(), torch.full_like(lengths, max_response_tokens)


@torch.no_grad()
def explained_variance(
    values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    reduce_sum: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return 1 - Var(returns - values) / Var(returns) over the masked entries: fp32 scalar, at most 1.

    1 is a perfect critic, 0 one that knows only the mean; 0 also where the returns do not vary. All inputs
    have one shape. `reduce_sum` adds a float64 vector up over ranks; with it every rank must call this.
    """
    reduce_sum = reduce_sum or (lambda total: total)
    mask = mask.bool()
    targets = torch.where(mask, returns.double(), 0.0)
    errors = torch.where(mask, returns.double() - values.double(), 0.0)
    count, *totals = reduce_sum(torch.stack([mask.sum().double(), targets.sum(), errors.sum()])).unbind()
    squares = [
        torch.where(mask, x - total / count.clamp(min=1), 0.0).square().sum()
        for x, total in zip((targets, errors), totals, strict=True)
    ]
    target_squares, error_squares = reduce_sum(torch.stack(squares)).unbind()
    return torch.where(target_squares > 0, 1 - error_squares / target_squares, 0.0).float()


KL_HORIZON = 10_000  # samples over which --kl_target steers the coefficient


class KLController:
    """The coefficient of the KL penalty: fixed, or steered towards a target KL.

    With a target, each update multiplies it by 1 + clamp(kl / target - 1, -0.2, 0.2) num_samples / horizon
    (Ziegler et al. 2019, arXiv:1909.08593 section 2.2). More samples than the horizon are several updates of
    a horizon each and one of the rest: the factor of 5 horizons at once would be 0, of more it is negative.
    """

    def __init__(self, init_coef: float, *, target: float | None = None, horizon: int = KL_HORIZON) -> None:
        for name, value in (("target", target), ("horizon", horizon)):
            if value is not None and not value > 0:
                raise ValueError(f"the KL controller's {name} {value} must be above 0")
        if not init_coef >= 0:
            raise ValueError(f"the KL coefficient {init_coef} must be at least 0")
        self.coef = float(init_coef)
        self.target = target
        self.horizon = horizon

    def update(self, mean_kl: float, num_samples: int) -> None:
        """Move `coef` after a batch of `num_samples` responses whose KL, summed over tokens, has this mean.

        Every rank must give the mean over all ranks. With a target, a KL that
        is not finite raises ValueError.
        """
        if self.target is None:
            return
        if not math.isfinite(mean_kl):
            raise ValueError(f"the mean KL {mean_kl} must be finite to steer the KL coefficient")
        error = min(max(mean_kl / self.target - 1, -0.2), 0.2)
        num_horizons, rest = divmod(num_samples, self.horizon)
        self.coef *= (1 + error) ** num_horizons * (1 + error * rest / self.horizon)

    def state_dict(self) -> dict[str, float]:
        """Return what moves: the coefficient. Target and horizon are options of the run."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue with the coefficient of `state_dict`."""
        self.coef = float(state["coef"])
