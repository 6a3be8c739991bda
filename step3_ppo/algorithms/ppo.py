"""PPO with a critic: KL-penalised rewards, generalised advantages, whitened over the whole step."""

import dataclasses

import torch

from common.tensor_ops import whiten
from step3_ppo.algorithms import register_algorithm
from step3_ppo.arguments import PPOArguments
from step3_ppo.experience import Experience
from step3_ppo.ppo_math import generalized_advantages, kl_estimate, kl_penalised_rewards
from step3_ppo.rewards.score_shaping import shape_scores


@register_algorithm("ppo")
@torch.no_grad()
def add_advantages(experience: Experience, args: PPOArguments, kl_coef: float) -> Experience:
    """Return the experience with rewards, advantages and returns (all (B, R) fp32)."""
    mask = experience.response_mask
    scores = shape_scores(
        experience.scores,
        experience.response_lengths,
        experience.is_finished,
        reward_clip=args.reward_clip,
        truncated=args.truncated,
        truncated_penalty=args.truncated_penalty,
        length_reward_coef=args.length_reward_coef,
        length_reward_tokens=args.length_reward_tokens,
        whiten_scores=args.whiten_scores,
    )
    kl = kl_estimate(experience.old_logprobs, experience.ref_logprobs, args.kl_estimator)
    rewards = kl_penalised_rewards(scores, kl, mask, kl_coef=kl_coef, reward_clip=None)
    # A finished response ends in a terminal state of value 0; a cut one may go on, as far as the critic
    # knows.
    is_bootstrapped = ~experience.is_finished & (args.truncated == "bootstrap")
    advantages, returns = generalized_advantages(
        rewards,
        experience.old_values,
        mask,
        gamma=args.gamma,
        gae_lambda=args.gae_lambda,
        bootstrap_values=torch.where(is_bootstrapped, experience.next_values, 0.0),
    )
    if args.whiten_advantages:
        advantages = whiten(advantages, mask)
    return dataclasses.replace(experience, rewards=rewards, advantages=advantages, returns=returns)
