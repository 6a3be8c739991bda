"""Losses of a minibatch, and the optimizer steps on them.

# S responses of a micro-batch, total response tokens of all
"""

import math
from collections.abc import Callable, Mapping

import torch

from common.data.global_batches import GlobalBatches
from common.data.packed_batch import PackedBatch
from common.engine.engine_step import Gradients, LossTerm, Stat, compute_gradients, skip_step, take_steps
from common.models.policy_model import compute_nll_sum, count_targets
from common.models.router_loss import add_router_loss
from common.ranks import distributed, watchdog
from step3_ppo.algorithms import divergence_beta
from step3_ppo.arguments import PPOArguments
from step3_ppo.policy_losses import LossTokens, PolicyLossFunction
from step3_ppo.ppo_math import (
    KLController,
    kl_estimate,
    kl_loss_terms,
    value_loss_terms,
)
from step3_ppo.roles import Roles, has_text_steps
from step3_ppo.rollout_correction import find_correction, mean_weights, weigh_tokens
from step3_ppo.trainer_state import NUM_TOKENS

Sums = tuple[torch.Tensor | float, dict[str, Stat]]


class PPOLosses:
    """The losses of rollout batches with advantages, returns and loss_weights."""

    def __init__(
        self,
        args: PPOArguments,
        roles: Roles,
        kl: KLController,
        policy_loss: PolicyLossFunction,
        pretraining: GlobalBatches | None = None,
    ) -> None:
        """`policy_loss` comes from `build_policy_loss`; `pretraining` is text for the unsupervised loss."""
        self.args = args
        self.roles = roles
        self.kl = kl
        self.pretraining = pretraining
        self.policy_loss = policy_loss
        self.correction = find_correction(args)

    def update(self, micro_batches: list[PackedBatch], max_gap: float = math.inf) -> dict[str, float]:
        """Take an optimizer step of the actor and, if there is one, the critic; return their metrics.

        Both steps are taken or neither: neither if sampler and trainer differ by more than `max_gap` nats per
        token. The metric `NUM_TOKENS` is the number of tokens that the actor was trained on. Returns {} if
        there are none, or if --early_stop_action skips the update. Every rank must call this. Raises
        StepSkipped.
        """
        num_tokens = distributed.sum_float(sum(map(sum_of("loss_mask"), micro_batches)))
        if not num_tokens:
            return {}
        gradients = {"policy": self.compute_actor_gradients(micro_batches)}
        if self.args.early_stop_action == "skip" and self.args.exceeds_kl(
            gradients["policy"].means["policy/approx_kl"]
        ):
            skip_step(self.roles.actor.model)
            return {}
        if self.roles.critic:
            gradients["value"] = self.compute_critic_gradients(micro_batches)
        means = {NUM_TOKENS: num_tokens}
        gap = gradients["policy"].means["policy/logprob_gap"]
        reason_to_skip = (
            f"sampler and trainer differ by {gap:.2g} nats per token, but --old_logprobs strict allows "
            f"{max_gap}; --old_logprobs auto recomputes the sampler's log-probabilities"
        )
        steps = take_steps(list(gradients.values()), reason_to_skip if gap > max_gap else "")
        for kind, engine_means in zip(gradients, steps, strict=True):
            means |= _named(kind, engine_means)
        return means

    def update_on_text(self) -> dict[str, float]:
        """Take an optimizer step of the actor on pretraining text only (--unsup_step own); return its
        metrics.

        Every rank must call this. Raises StepSkipped.
        """
        with watchdog.phase("the unsupervised update of the actor", clock="actor_update"):
            gradients = compute_gradients(self.roles.actor.model, [self._text_term()])
        return _named("unsup", take_steps([gradients])[0])

    def compute_actor_gradients(self, micro_batches: list[PackedBatch]) -> Gradients:
        """Gradients of an optimizer step of the actor. Every rank must call this."""
        terms = [LossTerm("policy/loss", micro_batches, self._policy_sums, sum_of("loss_counts"))]
        if self.pretraining is not None and not has_text_steps(self.args):
            terms.append(self._text_term())
        with watchdog.phase("the update of the actor", clock="actor_update"):
            return compute_gradients(self.roles.actor.model, terms)

    def compute_critic_gradients(self, micro_batches: list[PackedBatch]) -> Gradients:
        """Gradients of an optimizer step of the critic. Every rank must call this."""
        terms = [LossTerm("value/loss", micro_batches, self._value_sums, sum_of("loss_mask"))]
        with watchdog.phase("the update of the critic", clock="critic_update"):
            return compute_gradients(self.roles.critic.model, terms)

    def _text_term(self) -> LossTerm:
        texts = next(self.pretraining)
        weight = self.args.unsup_coef
        return LossTerm("policy/unsup_loss", texts, self._pretraining_sums, count_targets, weight)

    def _policy_sums(self, batch: PackedBatch) -> Sums:
        args = self.args
        actor = self.roles.actor
        on_device = with_rows(batch).to(distributed.device())
        data = on_device.data
        stats: dict[str, Stat] = {}
        logprobs, entropies, (divergence, teacher_stats) = self._compute_scores(batch, data)
        if "prox_share" in data:
            prox = torch.lerp(data["old_logprobs"], logprobs.detach().float(), data["prox_share"])
            on_device, weights = weigh_tokens(on_device, prox, self.correction)
            data = on_device.data
            stats = mean_weights(weights)
        tokens = loss_tokens(data, len(batch), logprobs, entropies)
        losses, loss_stats = self.policy_loss(tokens)
        mask = tokens.mask
        losses = losses * tokens.weights
        if args.kl_in == "loss":
            kl = kl_loss_terms(logprobs, data["ref_logprobs"], mask, args.kl_estimator)
            losses = losses + self.kl.coef * kl
            stats["policy/kl_loss"] = (kl.sum(), mask.sum())
        if args.entropy_coef:
            losses = losses - args.entropy_coef * tokens.entropies
        with torch.no_grad():
            num_counted = mask.sum()
            log_ratio = tokens.log_ratio()
            token_stats = loss_stats | {
                "entropy": entropies,
                "approx_kl": kl_estimate(-log_ratio, torch.zeros_like(log_ratio), "k3"),
                "ratio": log_ratio.exp(),
                "logprob_gap": (logprobs - data["rollout_logprobs"]).abs(),
            }
            for name, numbers in token_stats.items():
                stats[f"policy/{name}"] = (torch.where(mask, numbers, 0).sum(), num_counted)
        loss_sum = (losses * data["loss_weights"]).sum() + divergence
        loss, more = add_router_loss(actor.model, loss_sum, batch, sum_of("loss_counts"))
        return loss, stats | teacher_stats | {f"policy/{name}": stat for name, stat in more.items()}

    def _compute_scores(
        self, batch: PackedBatch, data: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, Sums]:
        """Log-probabilities and entropies of the response tokens, and a teacher's terms of the sums."""
        actor = self.roles.actor
        args = self.args
        if not args.teacher_model_name_or_path:
            return *actor.compute_logprobs(batch, with_entropy=True), (0.0, {})
        mask = data["loss_mask"]
        weights = data["loss_weights"]
        ref_logprobs = data["ref_logprobs"]
        beta = divergence_beta(args)
        if beta is None:
            logprobs, entropies = actor.compute_logprobs(batch, with_entropy=True)
            divergences = logprobs.detach() - ref_logprobs
            total = (divergences * weights).sum()
            added = 0.0  # already in the advantages
        else:
            logprobs, entropies, total, divergences = actor.compute_divergence(
                batch, self.roles.reference, beta, weights
            )
            added = args.distill_weight * total
            if "scores" not in data:
                logprobs = logprobs.detach()  # advantages are 0: saves a backward pass of zeros
        stats = {
            "distill/loss": args.distill_weight * total.detach(),
            "distill/divergence": (torch.where(mask, divergences, 0.0).sum(), mask.sum()),
            "distill/teacher_logprob": (torch.where(mask, ref_logprobs, 0.0).sum(), mask.sum()),
        }
        return logprobs, entropies, (added, stats)

    def _value_sums(self, batch: PackedBatch) -> Sums:
        critic = self.roles.critic
        data = batch.to(distributed.device()).data
        values, _ = critic.compute_values(batch)
        loss, is_clipped = value_loss_terms(
            values,
            data["old_values"],
            data["returns"],
            data["loss_mask"],
            clip_range=self.args.value_clip_range,
            kind=self.args.value_loss,
        )
        stats: dict[str, Stat] = {"value/clip_fraction": (is_clipped.sum(), data["loss_mask"].sum())}
        loss_sum, more = add_router_loss(critic.model, loss.sum(), batch, sum_of("loss_mask"))
        return loss_sum, stats | {f"value/{name}": stat for name, stat in more.items()}

    def _pretraining_sums(self, batch: PackedBatch) -> Sums:
        actor = self.roles.actor
        nll = compute_nll_sum(actor.model, batch, is_packed=actor.is_packed, temperature=1.0)
        loss, stats = add_router_loss(actor.model, nll, batch, count_targets)
        return loss, {f"policy/unsup_{name}": stat for name, stat in stats.items()}


def with_rows(batch: PackedBatch) -> PackedBatch:
    """The batch with "rows", the index of the response, from 0, at each response token."""
    rows = torch.arange(len(batch)).repeat_interleave(batch.lengths["response_ids"])
    return batch.with_key("rows", rows, like="response_ids")


def loss_tokens(
    data: Mapping[str, torch.Tensor], num_rows: int, logprobs: torch.Tensor, entropies: torch.Tensor
) -> LossTokens:
    """Inputs of a policy loss, from the columns of a micro-batch of `num_rows` responses."""
    mask, old_logprobs = data["loss_mask"], data["old_logprobs"]
    columns = {
        "new_logprobs": logprobs,
        "prox_logprobs": data.get("prox_logprobs", old_logprobs),
        "old_logprobs": old_logprobs,
        "entropies": entropies,
        "advantages": data["advantages"],
        "weights": data.get("correction_weights", torch.ones_like(old_logprobs)),
    }
    # Masked entries are zeroed first, so that a NaN among them cannot reach a gradient.
    columns = {name: torch.where(mask, x.float(), 0.0) for name, x in columns.items()}
    return LossTokens(**columns, mask=mask, rows=data["rows"], num_rows=num_rows)


def _named(kind: str, means: dict[str, float]) -> dict[str, float]:
    """Metrics of an engine under their log names."""
    return {name if "/" in name else f"{kind}/{name}": value for name, value in means.items()}


def sum_of(key: str) -> Callable[[PackedBatch], float]:
    """Function that sums a key of a micro-batch: the divisor of its loss."""
    return lambda batch: float(batch.data[key].sum())
