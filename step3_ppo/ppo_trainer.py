"""The PPO loop: collect, advantages, minibatches, update, log.

# S responses of a micro-batch, total response tokens of all, B responses of a step, R tokens of the longest
"""

import dataclasses
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from common import distributed
from common.data.packed_batch import PackedBatch
from common.run_logger import RunLogger
from step3_ppo.algorithms import Algorithm
from step3_ppo.arguments import PPOArguments
from step3_ppo.ema import ExponentialMovingAverage
from step3_ppo.experience import Experience, MinibatchPlan, add_results, gather_records, read_experience
from step3_ppo.ppo_losses import PPOLosses
from step3_ppo.ppo_math import KLController, loss_weights
from step3_ppo.roles import Roles
from step3_ppo.rollout import PromptBatches, Rollout
from step3_ppo.step_metrics import summarise, summarise_gap, summarise_scores
from step3_ppo.value_norm import ValueNormaliser


@dataclass
class PPOTrainer:
    """Everything a PPO step needs; `train_step` reads like the paper."""

    args: PPOArguments
    roles: Roles
    rollout: Rollout
    algorithm: Algorithm
    losses: PPOLosses
    plan: MinibatchPlan
    kl_controller: KLController
    logger: RunLogger
    decode: Callable[[torch.Tensor], str]
    value_normaliser: ValueNormaliser | None = None
    ema: ExponentialMovingAverage | None = None
    # Records that wait to be used, the oldest first: --rollout_staleness of them between steps.
    waiting: deque[PackedBatch] = field(default_factory=deque, init=False)

    def train_step(self, step: int, prompts: Iterator[PromptBatches]) -> dict[str, float]:
        """Do PPO step `step` (from 1), log it, return its numbers. Every rank must call this."""
        started = time.monotonic()
        while len(self.waiting) <= self.args.rollout_staleness:
            self.waiting.append(self.rollout.collect(prompts, version=step - 1))
        record = self.waiting.popleft()
        collected = time.monotonic()
        record, experience = self._add_advantages(record)
        means = self._update(record, step)
        metrics = summarise(experience) | summarise_scores(record) | means
        metrics |= self._logprob_gap(experience) | self.roles.actor.hybrid_engine.costs.metrics()
        metrics["objective/kl_coef"] = self.kl_controller.coef
        self.kl_controller.update(metrics["objective/kl"], len(record))
        if self.args.rollout_staleness:
            metrics["rollout/staleness"] = step - 1 - float(record.data["versions"].double().mean())
        if self.args.dynamic_sampling_rounds:
            metrics["rollout/refilled_fraction"] = self.rollout.refilled_fraction
        finished = time.monotonic()
        metrics |= {
            "perf/generate_tokens_per_second": len(record.data["response_ids"]) / (collected - started),
            "perf/step_seconds": finished - started,
            "perf/collect_seconds": collected - started,
        }
        self.logger.log(step, metrics)
        advice = self.rollout.old_logprobs.judge(metrics["policy/logprob_gap"])
        if advice:
            self.logger.note(f"step {step}: {advice}")
        self._show_samples(step, record)
        return metrics

    def _add_advantages(self, record: PackedBatch) -> tuple[PackedBatch, Experience]:
        """Return the record with all that the losses read, and the experience in real units."""
        args, normaliser = self.args, self.value_normaliser
        experience = read_experience(record)
        if normaliser:
            real = {n: normaliser.denormalise(getattr(experience, n)) for n in ("old_values", "next_values")}
            experience = dataclasses.replace(experience, **real)
        experience = self.algorithm.add_advantages(experience, args, self.kl_controller.coef)
        results = experience
        mask = experience.response_mask if experience.loss_mask is None else experience.loss_mask
        if normaliser:
            normaliser.update(experience.returns, mask)
            results = dataclasses.replace(experience, returns=normaliser.normalise(experience.returns))
        record = add_results(record, results)
        weights, counts = loss_weights(mask, args.loss_aggregation, args.max_answer_seq_len)
        record = record.with_key("loss_weights", weights[experience.response_mask], like="response_ids")
        record = record.with_numbers("loss_counts", counts)
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
            PackedBatch.gather([r.with_key("prox_logprobs", x.cpu(), like="response_ids") for r, x in scored])
        )

    def _update(self, record: PackedBatch, step: int) -> dict[str, float]:
        """Return the means over the optimizer steps of a PPO step."""
        args = self.args
        means: dict[str, list[float]] = defaultdict(list)
        self.losses.begin_step(self.kl_controller.coef)
        num_updates = 0
        for micro_batches in self.plan.minibatches(record, step):
            found = self.losses.update_actor(micro_batches)
            if self.roles.critic:
                found |= self.losses.update_critic(micro_batches)
            for name, value in found.items():
                means[name].append(value)
            num_updates += 1
            if self.ema:
                self.ema.update()
            if 0 < args.early_stop_kl < found["policy/approx_kl"]:
                break
            if 0 < args.early_stop_imp_ratio < found["policy/ratio"]:
                break
        result = {name: sum(values) / len(values) for name, values in means.items()}
        del result["policy/rollout_gap"]  # only the first minibatch's tells the sampler's: policy/logprob_gap
        if args.early_stop_kl or args.early_stop_imp_ratio:
            result["policy/num_updates"] = num_updates
        return result

    def _logprob_gap(self, experience: Experience) -> dict[str, float]:
        """Return how far the sampler's log-probabilities are from the trainer's, mean and largest. Every rank
        must call this.
        """
        if self.rollout.old_logprobs.recomputes:
            return summarise_gap(experience)
        return {
            "policy/logprob_gap": self.losses.first_gap,
            "policy/logprob_gap_max": distributed.max_float(self.losses.first_gap_max),
        }

    def _show_samples(self, step: int, record: PackedBatch) -> None:
        shown = record.select(range(min(2, len(record))))
        texts = [[self.decode(ids) for ids in shown.sequences(k)] for k in ("prompt_ids", "response_ids")]
        for row, (prompt, answer) in enumerate(zip(*texts, strict=True)):
            score = round(float(shown.numbers("scores")[row]), 4)
            self.logger.sample(step, prompt=prompt, answer=answer, score=score)
            if self.args.print_answers and row == 0 and step % self.args.print_answers_interval == 0:
                self.logger.note(f"  prompt {prompt!r}\n  answer {answer!r}  score {score}")
