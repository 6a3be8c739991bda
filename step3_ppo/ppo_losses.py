"""The losses of a minibatch, and the optimizer steps on them.

# S responses of a micro-batch, total response tokens of all
"""

from collections.abc import Callable

import torch

from common.data.global_batches import GlobalBatches
from common.data.packed_batch import PackedBatch
from common.engine.engine_step import Gradients, LossTerm, Stat, compute_gradients, take_steps
from common.models.policy_model import compute_nll_sum, count_targets
from common.ranks import distributed, watchdog
from step3_ppo.arguments import PPOArguments
from step3_ppo.ppo_math import (
    KLController,
    behaviour_weights,
    clipped_surrogate,
    dual_clip,
    kl_estimate,
    kl_loss_terms,
    policy_log_ratio,
    value_loss_terms,
)
from step3_ppo.roles import Roles

Sums = tuple[torch.Tensor, dict[str, Stat]]


class PPOLosses:
    """The losses of rollout batches that have advantages, returns and loss_weights."""

    def __init__(
        self, args: PPOArguments, roles: Roles, kl: KLController, pretraining: GlobalBatches | None = None
    ) -> None:
        """`pretraining` is the text of the actor's second loss."""
        self.args, self.roles, self.kl, self.pretraining = args, roles, kl, pretraining

    def update(self, micro_batches: list[PackedBatch]) -> dict[str, float]:
        """Return the means after the optimizer steps of the actor and, if there is one, the critic: both are
        made or neither.

        Every rank must call this. Raises StepRefused.
        """
        gradients = {"policy": self.compute_actor_gradients(micro_batches)}
        if self.roles.critic:
            gradients["value"] = self.compute_critic_gradients(micro_batches)
        means = {}
        for kind, of_engine in zip(gradients, take_steps(list(gradients.values())), strict=True):
            means |= {name if "/" in name else f"{kind}/{name}": value for name, value in of_engine.items()}
        return means

    def compute_actor_gradients(self, micro_batches: list[PackedBatch]) -> Gradients:
        """Return the gradients of an optimizer step of the actor. Every rank must call this."""
        terms = [LossTerm("policy/loss", micro_batches, self._policy_sums, sum_of("loss_counts"))]
        if self.pretraining is not None:
            texts, weight = next(self.pretraining), self.args.unsup_coef
            terms.append(LossTerm("policy/unsup_loss", texts, self._pretraining_sums, count_targets, weight))
        with watchdog.phase("the update of the actor", clock="actor_update"):
            return compute_gradients(self.roles.actor.model, terms)

    def compute_critic_gradients(self, micro_batches: list[PackedBatch]) -> Gradients:
        """Return the gradients of an optimizer step of the critic. Every rank must call this."""
        terms = [LossTerm("value/loss", micro_batches, self._value_sums, sum_of("loss_mask"))]
        with watchdog.phase("the update of the critic", clock="critic_update"):
            return compute_gradients(self.roles.critic.model, terms)

    def _policy_sums(self, batch: PackedBatch) -> Sums:
        args, actor, data = self.args, self.roles.actor, batch.to(distributed.device()).data
        logprobs, entropies = actor.compute_logprobs(batch, with_entropy=True)
        mask, old_logprobs = data["loss_mask"], data["old_logprobs"]
        advantages = torch.where(mask, data["advantages"], 0.0)
        prox_logprobs = data["prox_logprobs"] if args.use_decoupled_loss else old_logprobs

        log_ratio = policy_log_ratio(logprobs, prox_logprobs, mask)
        ratio = log_ratio.exp()
        loss = clipped_surrogate(ratio, advantages, args.clip_range, args.clip_range_high)
        if args.c_clip:
            loss = dual_clip(loss, advantages, args.c_clip)
        is_clipped = loss.detach() != -advantages * ratio.detach()  # either bound takes the gradient away
        stats: dict[str, Stat] = {}
        if args.use_decoupled_loss:
            weights, has_weight = behaviour_weights(
                prox_logprobs, old_logprobs, mask, args.behav_imp_weight_cap
            )
            loss = loss * weights
            behav_kl = torch.where(has_weight, prox_logprobs - old_logprobs, 0.0)
            stats["policy/behav_imp_weight"] = (weights.sum(), has_weight.sum())  # of tokens below the cap
            stats["policy/behav_kl"] = (behav_kl.sum(), has_weight.sum())
        if args.kl_in == "loss":
            kl = kl_loss_terms(logprobs, data["ref_logprobs"], mask, args.kl_estimator)
            loss = loss + self.kl.coef * kl
            stats["policy/kl_loss"] = (kl.sum(), mask.sum())
        if args.entropy_coef:
            loss = loss - args.entropy_coef * entropies
        with torch.no_grad():
            num_counted = mask.sum()
            sums = {
                "policy/entropy": torch.where(mask, entropies, 0.0).sum(),
                "policy/clip_fraction": is_clipped.sum(),
                "policy/approx_kl": kl_estimate(-log_ratio, torch.zeros_like(log_ratio), "k3").sum(),
                "policy/ratio": torch.where(mask, ratio, 0.0).sum(),
                "policy/logprob_gap": torch.where(mask, logprobs - data["rollout_logprobs"], 0.0).abs().sum(),
            }
        stats |= {name: (total, num_counted) for name, total in sums.items()}
        return (loss * data["loss_weights"]).sum(), stats

    def _value_sums(self, batch: PackedBatch) -> Sums:
        critic, data = self.roles.critic, batch.to(distributed.device()).data
        values, _ = critic.compute_values(batch)
        loss, is_clipped = value_loss_terms(
            values,
            data["old_values"],
            data["returns"],
            data["loss_mask"],
            clip_range=self.args.value_clip_range,
            kind=self.args.value_loss,
        )
        return loss.sum(), {"value/clip_fraction": is_clipped.sum()}

    def _pretraining_sums(self, batch: PackedBatch) -> Sums:
        actor = self.roles.actor
        return compute_nll_sum(actor.model, batch, is_packed=actor.is_packed, temperature=1.0), {}


def sum_of(key: str) -> Callable[[PackedBatch], float]:
    """Return a function that adds up a key of a micro-batch: what its loss is divided by."""
    return lambda batch: float(batch.data[key].sum())
