"""Policy losses: functions of the response tokens of a step. They do not use an engine.

A loss is called as `loss(tokens, clip_range, **options) -> (losses (N) fp32, statistics)`: one unreduced loss
per token, and numbers or bools (N) by name, whose means over the tokens that count are logged as policy/NAME.
`clip_range` is (--clip_range, --clip_range_high), below and above 1. The caller multiplies the losses by the
weights of --rollout_correction, adds the KL penalty and the entropy bonus if the flags set them, and takes
the mean. A loss is registered by name, with its defaults:

    @register_policy_loss("mine", clip_range=0.2, clip_range_high=0.28)  # --policy_loss mine:sharpness=2
    def mine(tokens, clip_range, sharpness=1.0):
        ...

# N response tokens of a micro-batch, responses end to end
"""

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from common.flags.plugins import FunctionsByName
from step3_ppo.arguments import PPOArguments
from step3_ppo.ppo_math import policy_log_ratio

ClipRange = tuple[float, float]
Losses = tuple[torch.Tensor, dict[str, torch.Tensor]]


class LossTokens(NamedTuple):
    """Inputs of a policy loss: (N) each, fp32 and 0 outside the mask, so that padding never reaches a
    gradient.

    Only log-probabilities and entropies are computed from the logits, which are never held whole
    (`common/models/output_head.py`); a loss cannot use logits.
    """

    new_logprobs: torch.Tensor  # of the trained policy, with a gradient
    prox_logprobs: torch.Tensor  # denominator of the ratio: at rollout, or before the step's updates
    old_logprobs: torch.Tensor  # at rollout
    entropies: torch.Tensor  # of the trained policy, with a gradient
    advantages: torch.Tensor
    mask: torch.Tensor  # bool, True counts
    weights: torch.Tensor  # of --rollout_correction, applied by the caller; 1 without
    rows: torch.Tensor  # int64, index of the token's response, from 0
    num_rows: int

    def log_ratio(self) -> torch.Tensor:
        """log(new / prox probability), at most `MAX_LOG_RATIO`."""
        return policy_log_ratio(self.new_logprobs, self.prox_logprobs, self.mask)

    def means_of_responses(self, x: torch.Tensor) -> torch.Tensor:
        """At each token, the mean of x (N) over the tokens of its response that count."""
        sums, counts = (x.new_zeros(self.num_rows).index_add(0, self.rows, y) for y in (x, self.mask.to(x)))
        return torch.where(self.mask, (sums / counts.clamp(min=1))[self.rows], 0.0)


LossFunction = Callable[..., Losses]
PolicyLossFunction = Callable[[LossTokens], Losses]  # with options and clip range bound


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss, and its defaults for empty flags."""

    name: str
    function: LossFunction
    clip_range: float = 0.2
    clip_range_high: float = 0.0  # 0: as clip_range
    loss_aggregation: str = ""  # empty: the algorithm's default


POLICY_LOSSES: FunctionsByName[PolicyLoss] = FunctionsByName("policy_loss", PolicyLoss)
register_policy_loss = POLICY_LOSSES.register


def find_policy_loss(text: str) -> tuple[PolicyLoss, dict[str, float]]:
    """The loss that `--policy_loss NAME[:option=value,...]` names, and its options.

    Raises ValueError if the name or an option is unknown, or an option's value is not a number.
    """
    name, options_text = re.fullmatch(r"(.*?)(?::([^:=]+=[^:]*))?", text).groups(default="")
    loss = POLICY_LOSSES.find(name)
    options = {}
    for option in filter(None, options_text.split(",")):
        key, _, value = option.partition("=")
        try:
            options[key] = float(value)
        except ValueError:
            options[key] = math.nan
        if not math.isfinite(options[key]):
            raise ValueError(f"--policy_loss {text}: {option!r} is not NAME=NUMBER, such as dual_clip=3")
    try:
        inspect.signature(loss.function).bind(None, None, **options)
    except TypeError as error:
        raise ValueError(
            f"--policy_loss {text}: {name} cannot be called as {name}(tokens, clip_range, "
            f"{', '.join(options) or 'no options'}): {error}"
        ) from error
    return loss, options


def build_policy_loss(args: PPOArguments) -> PolicyLossFunction:
    """The loss that the flags name, tested on two tokens; the empty flags of `args` are filled in.

    Raises ValueError: see `find_policy_loss`; also if the function fails on two tokens, does not return one
    loss per token, or returns losses without a gradient.
    """
    loss, options = find_policy_loss(args.policy_loss)
    bounds = (args.clip_range, args.clip_range_high or args.clip_range)

    def function(tokens: LossTokens) -> Losses:
        return loss.function(tokens, bounds, **options)

    numbers = [torch.full((2,), -1.0, requires_grad=index in (0, 3)) for index in range(5)]
    ones = torch.ones(2)
    tokens = LossTokens(*numbers, ones.bool(), ones, torch.zeros(2, dtype=torch.int64), 1)
    try:
        losses, statistics = function(tokens)
        shapes = {name: tuple(x.shape) for name, x in ({"the loss": losses} | statistics).items()}
    except Exception as error:  # a user's function may raise anything
        raise ValueError(
            f"--policy_loss {args.policy_loss}: it raised {type(error).__name__} on two tokens: {error}"
        ) from error
    for name, shape in shapes.items():
        if shape != (2,):
            raise ValueError(
                f"--policy_loss {args.policy_loss}: {name} of two tokens has the shape {shape}, not (2,): "
                "return one number per token, unreduced"
            )
    if not losses.requires_grad:
        raise ValueError(
            f"--policy_loss {args.policy_loss}: the loss has no gradient of the new log-probabilities or "
            "entropies, so that it would train nothing: remove a detach() or no_grad()"
        )
    return function


# ---------------------------------------------------------------------------------------------------------
# The losses
# ---------------------------------------------------------------------------------------------------------


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, clip_range: ClipRange, dual_clip: float = 0.0
) -> Losses:
    """max(-A ratio, -A clamp(ratio, 1 - low, 1 + high)) of each token, and where it is clipped; all (N).

    PPO, arXiv:1707.06347 eq. 7; two ranges: DAPO, arXiv:2503.14476. A ratio beyond a bound gets no gradient
    if the advantage would move it further. `dual_clip` above 1 bounds the loss of a negative advantage by
    -A `dual_clip` (arXiv:1912.09729); 0: no bound.
    """
    low = 1 - clip_range[0]
    high = 1 + clip_range[1]
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    ratio = ratio.detach()
    sides = {"high": (advantages > 0) & (ratio > high), "low": (advantages < 0) & (ratio < low)}
    if dual_clip:
        losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * dual_clip), losses)
        sides["dual"] = (advantages < 0) & (ratio > dual_clip)
    return losses, _clip_fractions(sides)


def _clip_fractions(sides: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    of_sides = {f"clip_fraction_{side}": is_clipped for side, is_clipped in sides.items()}
    return {"clip_fraction": torch.stack(list(sides.values())).any(0)} | of_sides


@register_policy_loss("ppo")
def ppo(tokens: LossTokens, clip_range: ClipRange, dual_clip: float = 0.0) -> Losses:
    """`clipped_surrogate` of the ratio of each token."""
    if dual_clip and dual_clip <= 1:
        raise ValueError(f"dual_clip={dual_clip:g} must be above 1; leave it out for no limit")
    return clipped_surrogate(tokens.log_ratio().exp(), tokens.advantages, clip_range, dual_clip)


@register_policy_loss("gspo", clip_range=3e-4, clip_range_high=4e-4, loss_aggregation="sequence")
def gspo(tokens: LossTokens, clip_range: ClipRange) -> Losses:
    """`clipped_surrogate` of the geometric mean of a response's ratios, at each of its tokens.

    A response is clipped as a whole. The gradient of its ratio reaches each token through its own
    log-probability, so tokens may have different advantages: GSPO-token, arXiv:2507.18071 eq. 13 and 14; GSPO
    if they are equal.
    """
    log_ratio = tokens.log_ratio()
    of_response = tokens.means_of_responses(log_ratio.detach())
    ratio = (of_response + log_ratio - log_ratio.detach()).exp()
    return clipped_surrogate(ratio, tokens.advantages, clip_range)


@register_policy_loss("cispo", clip_range=1.0, clip_range_high=0.2, loss_aggregation="token")
def cispo(tokens: LossTokens, clip_range: ClipRange) -> Losses:
    """-clamp(ratio, 1 - low, 1 + high) A log p of each token; no gradient flows through the ratio.

    Every token keeps its gradient, clipped or not. A lower range of 1 means no lower bound. CISPO,
    arXiv:2506.13585 eq. 4 and 5.
    """
    ratio = tokens.log_ratio().detach().exp()
    low = 1 - clip_range[0]
    high = 1 + clip_range[1]
    losses = -ratio.clamp(low, high) * tokens.advantages * tokens.new_logprobs
    return losses, _clip_fractions({"high": tokens.mask & (ratio > high), "low": tokens.mask & (ratio < low)})
