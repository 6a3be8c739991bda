"""Steps that several algorithms take: scores, KL in the reward, what counts, normalisation.

All take args whose empty flags are filled in (`fill_defaults`).

# B sequences, R response
"""

import torch

from common.models.tensor_ops import masked_sum, whiten
from step3_ppo.arguments import PPOArguments
from step3_ppo.experience import Experience
from step3_ppo.group_math import group_whiten
from step3_ppo.ppo_math import kl_estimate, kl_penalised_rewards
from step3_ppo.rewards.score_shaping import shape_scores


def shaped_scores(experience: Experience, args: PPOArguments) -> torch.Tensor:
    """Return the scores (B,) fp32 as the flags of the score group leave them."""
    return shape_scores(
        experience.scores,
        experience.response_lengths,
        experience.is_finished,
        reward_clip=args.reward_clip,
        truncated=args.truncated,
        truncated_penalty=args.truncated_penalty,
        length_reward_coef=args.length_reward_coef,
        length_reward_tokens=args.length_reward_tokens,
        overlong_penalty=args.overlong_penalty,
        overlong_buffer_tokens=args.overlong_buffer_tokens,
        max_response_tokens=args.max_answer_seq_len,
        whiten_scores=args.whiten_scores,
    )


def counted(experience: Experience, args: PPOArguments) -> torch.Tensor:
    """Return the tokens (B, R) bool that losses and normalisation count.

    All of the response, or what `experience.loss_mask` has left of it; under `--truncated mask` none of a cut
    response, whose score still counts in its group (DAPO's overlong filtering, arXiv:2503.14476).
    """
    mask = experience.response_mask if experience.loss_mask is None else experience.loss_mask
    return mask & experience.is_finished[:, None] if args.truncated == "mask" else mask


def token_rewards(
    experience: Experience, scores: torch.Tensor, args: PPOArguments, kl_coef: float
) -> torch.Tensor:
    """Return rewards (B, R) fp32: the score (B,) at the last token, KL taken off each if it goes there."""
    kl = _kl_in_reward(experience, args)
    return kl_penalised_rewards(scores, kl, experience.response_mask, kl_coef=kl_coef, reward_clip=None)


def sequence_rewards(
    experience: Experience, scores: torch.Tensor, args: PPOArguments, kl_coef: float
) -> torch.Tensor:
    """Return rewards (B,) fp32: the score (B,), the KL of all its tokens taken off if it goes there."""
    return scores - kl_coef * masked_sum(_kl_in_reward(experience, args), experience.response_mask, dim=1)


def normalised(advantages: torch.Tensor, experience: Experience, args: PPOArguments) -> torch.Tensor:
    """Return the advantages (B, R) fp32 after `--adv_norm`, 0 where `counted` is False.

    The statistics are those of the tokens that count: of the whole step, or of each prompt's responses.
    """
    mask = counted(experience, args)
    if args.adv_norm == "batch":
        return whiten(advantages, mask)
    if args.adv_norm == "group":
        return group_whiten(advantages, mask, experience.group_ids)
    return torch.where(mask, advantages.float(), 0.0)


def on_every_token(advantages: torch.Tensor, experience: Experience) -> torch.Tensor:
    """Return the advantage (B,) of a response at each of its tokens: (B, R) fp32."""
    return torch.where(experience.response_mask, advantages.float()[:, None], 0.0)


def _kl_in_reward(experience: Experience, args: PPOArguments) -> torch.Tensor:
    """Return the KL estimate (B, R) that rewards pay for: zeros where the loss has the penalty."""
    if args.kl_in != "reward":
        return torch.zeros_like(experience.old_logprobs)
    return kl_estimate(experience.old_logprobs, experience.ref_logprobs, args.kl_estimator)
