"""The PPO loop: collect, advantages, minibatches, update, log.

# S responses of a micro-batch, total response tokens of all, B responses of a step, R tokens of the longest
"""

import dataclasses
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

import torch

from common.data.global_batches import BatchStream
from common.data.packed_batch import PackedBatch
from common.flags.refusal import StepRefused
from common.ranks import distributed, watchdog
from common.ranks.step_costs import COSTS
from common.runs.run_logger import RunLogger
from step3_ppo.algorithms import Algorithm
from step3_ppo.arguments import PPOArguments
from step3_ppo.ema import ExponentialMovingAverage
from step3_ppo.evaluation import Evaluation
from step3_ppo.experience import (
    Experience,
    MinibatchPlan,
    add_results,
    gather_records,
    put_back,
    read_experience,
)
from step3_ppo.ppo_losses import PPOLosses
from step3_ppo.ppo_math import KLController, loss_weights
from step3_ppo.roles import Roles
from step3_ppo.rollout import Rollout
from step3_ppo.step_metrics import (
    response_rows,
    summarise,
    summarise_failures,
    summarise_gap,
    summarise_scores,
)
from step3_ppo.trainer_state import OpenStep
from step3_ppo.value_norm import ValueNormaliser


def no_pause(step: int, place: str) -> None:
    """Go on: nobody saves this run."""


def raise_refused(step: int, error: StepRefused, place: str) -> None:
    """Raise the error: nobody counts the minibatches of this run that are refused."""
    raise error


@dataclass
class PPOTrainer:
    """Everything a PPO step needs; `train_step` reads like the paper."""

    args: PPOArguments
    roles: Roles
    prompts: BatchStream
    rollout: Rollout
    algorithm: Algorithm
    losses: PPOLosses
    plan: MinibatchPlan
    kl_controller: KLController
    logger: RunLogger
    decode: Callable[[torch.Tensor], str]
    value_normaliser: ValueNormaliser | None = None
    ema: ExponentialMovingAverage | None = None
    evaluation: Evaluation | None = None
    # Called between the rollouts and the minibatches of a step, with the name of the place: a checkpoint can
    # be written there. Called with a minibatch that was refused.
    pause: Callable[[int, str], None] = no_pause
    refuse: Callable[[int, StepRefused, str], None] = raise_refused
    # Records that wait to be used, the oldest first: --rollout_staleness of them between steps.
    waiting: deque[PackedBatch] = field(default_factory=deque, init=False)
    open_step: OpenStep | None = field(default=None, init=False)

    def train_step(self, step: int) -> dict[str, float]:
        """Do PPO step `step` (from 1), or what is left of it, log it, return its numbers.

        Every rank must call this.

        Raises StepRefused when nothing can be learned from its rollout.
        """
        COSTS.begin_step()
        if self.open_step is None:
            while len(self.waiting) <= self.args.rollout_staleness:
                with watchdog.phase("the rollout", step):
                    self.waiting.append(self._collect(step))
                self.pause(step, "rollout")
            with watchdog.phase("the advantages", step, clock="advantages"):
                self.open_step = self._begin_step(step, self.waiting.popleft())
        current, record = self.open_step, self.open_step.record
        self._update(current)
        metrics = current.summary | self._means(current) | self.roles.actor.hybrid_engine.costs.metrics()
        if "policy/logprob_gap" not in metrics:
            metrics |= {
                "policy/logprob_gap": self.losses.first_gap,
                "policy/logprob_gap_max": distributed.max_float(self.losses.first_gap_max),
            }
        metrics["objective/kl_coef"] = self.kl_controller.coef
        self.kl_controller.update(metrics["objective/kl"], len(record))
        if self.args.dynamic_sampling_rounds:
            metrics["rollout/refilled_fraction"] = self.rollout.refilled_fraction
        metrics |= COSTS.end_step(distributed.world_size())
        self.logger.log(step, metrics)
        advice = self.rollout.old_logprobs.judge(metrics["policy/logprob_gap"])
        if advice:
            self.logger.note(f"step {step}: {advice}")
        self._write_responses(step, record)
        self.open_step = None
        return metrics

    def _collect(self, step: int) -> PackedBatch:
        """Return a record whose values are in real units: statistics may move before it is learned from."""
        record = self.rollout.collect(self.prompts, version=step - 1)
        for name in ("old_values", "next_values") if self.value_normaliser else ():
            record = record.with_key(name, self.value_normaliser.denormalise(record.data[name]), like=name)
        return record

    def _begin_step(self, step: int, record: PackedBatch) -> OpenStep:
        """Return the step with advantages, and with the numbers that are known before its updates."""
        record, experience = self._add_advantages(record)
        summary = summarise(experience) | summarise_scores(record)
        scores = self.rollout.scores
        if scores.failures.are_borne:
            summary |= summarise_failures(record)
        share = summary.get("objective/failed_fraction")
        if share and step % self.logger.log_interval == 0:
            told = f"{share:.1%} of the responses have no score, the first failure: {scores.first_failure}"
            self.logger.note(f"step {step}: {told}")
        if self.rollout.old_logprobs.recomputes:
            summary |= summarise_gap(experience)
        if self.args.rollout_staleness:
            summary["rollout/staleness"] = step - 1 - float(record.data["versions"].double().mean())
        self.losses.begin_step(self.kl_controller.coef)
        return OpenStep(step, record, summary)

    def _add_advantages(self, whole: PackedBatch) -> tuple[PackedBatch, Experience]:
        """Return the record with all that the losses read, and the experience in real units.

        The losses compare values and returns in the units of the critic. Responses without a score under
        --reward_on_error mask are not in the experience: no algorithm, mean or normaliser sees them. In the
        record their loss_mask is empty, and their score NaN.
        """
        args, normaliser = self.args, self.value_normaliser
        is_counted = self.rollout.scores.counts(whole)
        record = whole if bool(is_counted.all()) else whole.select(is_counted.nonzero()[:, 0])
        experience = self.algorithm.add_advantages(read_experience(record), args, self.kl_controller.coef)
        results = experience
        mask = experience.response_mask if experience.loss_mask is None else experience.loss_mask
        if normaliser:
            old_values = normaliser.normalise(record.data["old_values"])  # of the critic before its update
            record = record.with_key("old_values", old_values, like="old_values")
            normaliser.update(experience.returns, mask)
            results = dataclasses.replace(experience, returns=normaliser.normalise(experience.returns))
        record = add_results(record, results)
        weights, counts = loss_weights(mask, args.loss_aggregation, args.max_answer_seq_len)
        record = record.with_key("loss_weights", weights[experience.response_mask], like="response_ids")
        record = record.with_numbers("loss_counts", counts)
        if len(record) < len(whole):
            shown = torch.where(is_counted, whole.numbers("scores"), torch.nan)
            record = put_back(record, whole).with_numbers("scores", shown)
        if args.use_decoupled_loss:
            record = self._add_prox(record)
        return record, experience

    def _add_prox(self, record: PackedBatch) -> PackedBatch:
        """Return the record with the log-probabilities of the policy before the updates."""
        if self.rollout.old_logprobs.recomputes and not self.args.rollout_staleness:
            return record.with_key("prox_logprobs", record.data["old_logprobs"], like="response_ids")
        mine = self.rollout.cap.cut(record)
        scored = zip(mine, self.roles.actor.score(mine), strict=True)
        return gather_records(
            PackedBatch.concat([r.with_key("prox_logprobs", x.cpu(), like="response_ids") for r, x in scored])
        )

    def _update(self, current: OpenStep) -> None:
        """Make the optimizer steps that a PPO step still has before it."""
        args, step = self.args, current.step
        minibatches = self.plan.minibatches(current.record, step)
        left = islice(minibatches, current.num_minibatches, None)
        while not current.is_done:
            with watchdog.phase("the cut into minibatches", clock="actor_update"):
                micro_batches = next(left, None)
            if micro_batches is None:
                return
            current.num_minibatches += 1
            place = f"update-{current.num_minibatches:04d}"
            try:
                self._learn(current, micro_batches)
            except StepRefused as error:
                self.refuse(step, error, place)
            else:
                means = current.means
                current.is_done = 0 < args.early_stop_kl < means["policy/approx_kl"][-1]
            self.pause(step, place)

    def _learn(self, current: OpenStep, micro_batches: list[PackedBatch]) -> None:
        with watchdog.phase("the updates", current.step):
            gradients = [self.losses.compute_actor_gradients(micro_batches)]
            if self.roles.critic:
                gradients.append(self.losses.compute_critic_gradients(micro_batches))
            found = self.losses.take_steps(gradients)
        for name, value in found.items():
            current.means.setdefault(name, []).append(value)
        if self.ema:
            self.ema.update()

    def _means(self, current: OpenStep) -> dict[str, float]:
        """Return the means over the optimizer steps of a PPO step."""
        result = {name: sum(values) / len(values) for name, values in current.means.items()}
        result.pop("policy/rollout_gap", None)  # only the first minibatch's tells the sampler's: logprob_gap
        if self.args.early_stop_kl:
            result["policy/num_updates"] = current.num_minibatches
        return result

    def _write_responses(self, step: int, record: PackedBatch) -> None:
        if not distributed.is_main():
            return
        shown = list(response_rows(record.select(range(min(2, len(record)))), self.decode))
        for row in shown:
            self.logger.sample(step, **row)
        if self.args.print_answers_interval and step % self.args.print_answers_interval == 0:
            text = "  prompt {prompt!r}\n  answer {answer!r}  score {score:.4f}"
            self.logger.note(text.format(**shown[0]))
        if self.args.save_rollouts and step % self.args.save_rollouts == 0:
            self.logger.rollout(step, response_rows(record, self.decode))
