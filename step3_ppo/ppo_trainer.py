"""The PPO loop: collect, advantages, minibatches, update, log.

# B sequences, R response
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from common import distributed
from common.engine_step import LossTerm
from common.models import compute_logits
from common.run_logger import RunLogger
from common.tensor_ops import masked_mean, masked_sum, token_logprobs
from step3_ppo.algorithms import Algorithm
from step3_ppo.arguments import PPOArguments
from step3_ppo.ema import ExponentialMovingAverage
from step3_ppo.experience import Experience, MinibatchPlan
from step3_ppo.ppo_math import KLController, explained_variance, policy_loss_terms, value_loss_terms
from step3_ppo.roles import Roles
from step3_ppo.rollout import Rollout


@dataclass
class PPOTrainer:
    """Everything a PPO step needs; `train_step` reads like the paper."""

    args: PPOArguments
    roles: Roles
    rollout: Rollout
    algorithm: Algorithm
    plan: MinibatchPlan
    kl_controller: KLController
    logger: RunLogger
    decode: Callable[[torch.Tensor], str]
    ema: ExponentialMovingAverage | None = None
    pretraining: Iterator[list[dict[str, torch.Tensor]]] | None = None
    _in_first_minibatch: bool = field(default=False, init=False)
    _first_gap_max: float = field(default=0.0, init=False)

    def train_step(self, step: int, prompt_batches: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Do PPO step `step` (from 1), log it, return its numbers. Every rank must call this."""
        started = time.monotonic()
        experience = self.rollout.collect(step - 1, prompt_batches)
        collected = time.monotonic()
        experience = self.algorithm(experience, self.args, self.kl_controller.coef)
        losses: dict[str, list[float]] = defaultdict(list)
        self._in_first_minibatch, self._first_gap_max = True, 0.0
        for micro_batches in self.plan.minibatches(experience, step):
            for name, value in (self.update_actor(micro_batches) | self.update_critic(micro_batches)).items():
                losses[name].append(value)
            self._in_first_minibatch = False
            if self.ema:
                self.ema.update()
        gaps = self._logprob_gap(experience, losses)
        metrics = summarise(experience) | {name: sum(v) / len(v) for name, v in losses.items()} | gaps
        metrics |= self.roles.actor.hybrid_engine.costs.metrics()
        metrics["objective/kl_coef"] = self.kl_controller.coef
        self.kl_controller.update(metrics["objective/kl"], len(experience.sample_ids))
        finished = time.monotonic()
        num_tokens = float(experience.response_mask.sum())
        metrics |= {
            "perf/generate_tokens_per_second": num_tokens / (collected - started),
            "perf/step_seconds": finished - started,
            "perf/collect_seconds": collected - started,
        }
        self.logger.log(step, metrics)
        advice = self.rollout.old_logprobs.judge(metrics["policy/logprob_gap"])
        if advice:
            self.logger.note(f"step {step}: {advice}")
        self._show_samples(step, experience)
        return metrics

    def _logprob_gap(self, experience: Experience, losses: dict[str, list[float]]) -> dict[str, float]:
        """Return how far the sampler's log-probabilities are from the trainer's, mean and largest.

        Where no pass was spent on the trainer's, the first minibatch tells: it was scored before the first
        update. Every rank must call this.
        """
        of_minibatches = losses.pop("policy/rollout_gap")
        if not self.rollout.old_logprobs.recomputes:
            return {
                "policy/logprob_gap": of_minibatches[0],
                "policy/logprob_gap_max": distributed.max_float(self._first_gap_max),
            }
        return summarise_gap(experience)

    def update_actor(self, micro_batches: list[Experience]) -> dict[str, float]:
        """Return the means of one optimizer step of the actor. Every rank must call this."""
        terms = [LossTerm("policy/loss", micro_batches, self._policy_sums, count_response_tokens)]
        if self.pretraining is not None:
            texts = next(self.pretraining)
            weight = self.args.unsup_coef
            terms.append(
                LossTerm("policy/unsup_loss", texts, self._pretraining_sums, count_text_targets, weight)
            )
        means = self.roles.actor.update(terms)
        means["policy/grad_norm"] = means.pop("grad_norm")
        means["policy/learning_rate"] = means.pop("learning_rate")
        return means

    def update_critic(self, micro_batches: list[Experience]) -> dict[str, float]:
        """Return the means of one optimizer step of the critic. Every rank must call this."""
        term = LossTerm("value/loss", micro_batches, self._value_sums, count_response_tokens)
        means = self.roles.critic.update([term])
        means["value/grad_norm"] = means.pop("grad_norm")
        means["value/learning_rate"] = means.pop("learning_rate")
        return means

    def _policy_sums(self, batch: Experience) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        actor, batch = self.roles.actor, batch.to(distributed.device())
        mask = batch.response_mask
        logprobs, entropy = actor.compute_logprobs(actor.engine, batch, with_entropy=True)
        terms = policy_loss_terms(
            logprobs, batch.old_logprobs, batch.advantages, mask, clip_range=self.args.clip_range
        )
        gap = (logprobs.detach() - batch.rollout_logprobs).abs()
        if self._in_first_minibatch:
            self._first_gap_max = max(self._first_gap_max, float(torch.where(mask, gap, 0.0).max()))
        entropy_sum = masked_sum(entropy, mask)
        loss_sum = terms.loss.sum() - self.args.entropy_coef * entropy_sum
        return loss_sum, {
            "policy/entropy": entropy_sum,
            "policy/clip_fraction": terms.is_clipped.sum(),
            "policy/approx_kl": terms.approx_kl.sum(),
            "policy/ratio": terms.ratio.sum(),
            "policy/rollout_gap": masked_sum(gap, mask),
        }

    def _value_sums(self, batch: Experience) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        critic, batch = self.roles.critic, batch.to(distributed.device())
        values = critic.compute_values(critic.engine, batch).values
        terms = value_loss_terms(
            values,
            batch.old_values,
            batch.returns,
            batch.response_mask,
            clip_range=self.args.value_clip_range,
        )
        return terms.loss.sum(), {"value/clip_fraction": terms.is_clipped.sum()}

    def _pretraining_sums(
        self, batch: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        actor = self.roles.actor
        input_ids = batch["input_ids"].to(distributed.device())
        logits = compute_logits(actor.engine, input_ids, batch["attention_mask"].to(input_ids.device))[:, :-1]
        logprobs = token_logprobs(logits, input_ids[:, 1:], num_valid_tokens=actor.num_valid_tokens)
        return -masked_sum(logprobs, batch["attention_mask"][:, 1:].bool().to(input_ids.device)), {}

    def _show_samples(self, step: int, experience: Experience) -> None:
        rows = range(min(2, len(experience.sample_ids)))
        for row in rows:
            prompt = self.decode(experience.prompt_ids[row][experience.prompt_mask[row]])
            answer = self.decode(experience.response_ids[row][experience.response_mask[row]])
            score = round(float(experience.scores[row]), 4)
            self.logger.sample(step, prompt=prompt, answer=answer, score=score)
            if self.args.print_answers and row == 0 and step % self.args.print_answers_interval == 0:
                self.logger.note(f"  prompt {prompt!r}\n  answer {answer!r}  score {score}")


def count_response_tokens(batch: Experience) -> float:
    """Return the response tokens of a micro-batch."""
    return float(batch.response_mask.sum())


def count_text_targets(batch: dict[str, torch.Tensor]) -> float:
    """Return the predicted tokens of a batch of text."""
    return float(batch["attention_mask"][:, 1:].sum())


def summarise_gap(experience: Experience) -> dict[str, float]:
    """Return how far the sampler's log-probabilities are from recomputed ones, mean and largest."""
    gap = (experience.rollout_logprobs - experience.old_logprobs).abs()
    mask = experience.response_mask
    return {
        "policy/logprob_gap": float(masked_mean(gap, mask)),
        "policy/logprob_gap_max": float(torch.where(mask, gap, 0.0).max()),
    }


def summarise(experience: Experience) -> dict[str, float]:
    """Return what a step's experience says of the policy; `objective/kl` is in nats a response (k1)."""
    mask = experience.response_mask
    kl_per_response = masked_sum(experience.old_logprobs - experience.ref_logprobs, mask, dim=1)
    lengths = experience.response_lengths.float()
    centred = (lengths - lengths.mean(), experience.scores - experience.scores.mean())
    spread = float(centred[0].norm() * centred[1].norm())
    return {
        "objective/score": float(experience.scores.mean()),
        "objective/kl": float(kl_per_response.mean()),
        "objective/reward": float(masked_sum(experience.rewards, mask, dim=1).mean()),
        "objective/score_length_correlation": float((centred[0] * centred[1]).sum()) / spread
        if spread
        else 0.0,
        "value/explained_variance": float(
            explained_variance(experience.old_values, experience.returns, mask)
        ),
        "rollout/response_tokens": float(lengths.mean()),
        "rollout/finished_fraction": float(experience.is_finished.float().mean()),
    }
