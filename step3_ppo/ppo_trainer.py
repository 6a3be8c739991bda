"""The PPO training loop: rollout, advantages, minibatches, updates, logging.

# b responses of this rank, total their tokens, R tokens of the longest
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from common.data.global_batches import GlobalBatches
from common.data.packed_batch import PackedBatch
from common.ranks import distributed, watchdog
from common.ranks.digests import DIGESTS
from common.ranks.failures import StepSkipped
from common.ranks.step_costs import COSTS
from common.runs.run import Run
from common.runs.run_logger import RunLogger
from step3_ppo import metrics
from step3_ppo.algorithms import Algorithm, step_mean
from step3_ppo.evaluation import Evaluation
from step3_ppo.hooks import run_hooks
from step3_ppo.ppo_losses import PPOLosses
from step3_ppo.ppo_math import loss_weights
from step3_ppo.roles import has_text_steps
from step3_ppo.rollout import Rollout, join_scores
from step3_ppo.rollout_batch import cut_minibatches, gather_numbers, merge_columns, tokens, with_tokens
from step3_ppo.rollout_correction import (
    Correction,
    prox_share,
    summarise_weights,
    weigh_tokens,
)
from step3_ppo.trainer_state import ExponentialMovingAverage, OpenStep, ValueNormaliser


class PPOTrainer:
    """The PPO training loop. Every rank must call all methods."""

    def __init__(
        self,
        algorithm: Algorithm,
        rollout: Rollout,
        losses: PPOLosses,
        prompts: GlobalBatches,
        logger: RunLogger,
        held_out: Sequence[dict[str, Any]] = (),
    ) -> None:
        """`held_out` are prompts for evaluation."""
        args = losses.args
        self.args = args
        self.algorithm = algorithm
        self.rollout = rollout
        self.roles = rollout.roles
        self.prompts = prompts
        self.logger = logger
        self.losses = losses
        self.kl_controller = losses.kl
        self.correction = losses.correction
        self.value_normaliser = None
        self.ema = None
        self.evaluation = None
        if algorithm.needs_critic and args.value_norm != "none":
            self.value_normaliser = ValueNormaliser(args.value_norm, args.value_norm_beta)
        if args.ema_decay:
            self.ema = ExponentialMovingAverage(self.roles.actor.model.module, args.ema_decay)
        # With --ref_ema_decay: the reference's averaged weights.
        self.ref_average = self.roles.reference.average if args.ref_ema_decay else None
        if held_out:
            self.evaluation = Evaluation(args, rollout, logger, held_out, len(prompts))
        # Rollout batches to be trained on, oldest first: --rollout_staleness of them between steps.
        self.waiting: deque[PackedBatch] = deque()
        self.open_step: OpenStep | None = None

    def train_step(self, step: int, run: Run) -> dict[str, float]:
        """Run (or finish) PPO step `step`, counted from 1; log and return its metrics.

        The run counts skipped minibatches, and can stop between any two minibatches. Raises StepSkipped if
        the step's rollout cannot be trained on.
        """
        COSTS.begin_step()
        if self.open_step is None:
            run_hooks("before_step", self, None)
            batch = self.collect(step, run)  # generate, score
            DIGESTS.add_batches("rollout", [batch])
            batch = run_hooks("before_advantages", self, batch)
            self.open_step = self.add_advantages(step, batch)  # rewards, advantages, returns
            self.open_step.batch = run_hooks("after_advantages", self, self.open_step.batch)
            DIGESTS.add_batches("advantages", [self.open_step.batch])
        for micro_batches in self.minibatches(self.open_step):  # ppo_epochs passes
            micro_batches = run_hooks("before_update", self, micro_batches)
            # Sampler and trainer are the same policy only before the first update.
            max_gap = math.inf if self.open_step.means else self.rollout.max_gap
            try:
                if self.update(self.open_step, self.losses.update, micro_batches, max_gap):
                    run.num_updates += 1
                    if has_text_steps(self.args):
                        self.update(self.open_step, self.losses.update_on_text)
                    run_hooks("after_update", self, micro_batches)
            except StepSkipped as error:
                run.record_bad_step(step, error, self.open_step.position)
            run.checkpoint_if_due(step, self.open_step.position)
        return self.finish_step(self.open_step)

    def collect(self, step: int, run: Run) -> PackedBatch:
        """Rollout batch of a step, with denormalised values: the normaliser's statistics may change before it
        is used.
        """
        while len(self.waiting) <= self.args.rollout_staleness:
            unread = partial(setattr, self.prompts, "num_steps", self.prompts.num_steps)
            with run.stoppable(unread), watchdog.phase("the rollout", step):
                run_hooks("before_rollout", self, None)
                batch = self.rollout.collect(self.prompts, version=step - 1)
                batch = run_hooks("after_rollout", self, batch)
                for name in ("old_values", "next_values") if self.value_normaliser else ():
                    values = self.value_normaliser.denormalise(batch.data[name])
                    batch = batch.with_key(name, values, like=name)
                self.waiting.append(batch)
            run.checkpoint_if_due(step, "rollout")
        return self.waiting.popleft()

    def add_advantages(self, step: int, batch: PackedBatch) -> OpenStep:
        """The step with all inputs of its losses, and the metrics that are known before its updates.

        Under --reward_on_error mask, responses without a score are excluded from means, baselines and
        normalisers: the algorithm does not see them. Their loss_mask is empty, and their score is logged as
        NaN.
        """
        with watchdog.phase("the advantages", step, clock="advantages"):
            has_score = self.rollout.scores.counts(batch)
            scored = batch.select(has_score.nonzero()[:, 0])
            scored = self.algorithm.add_advantages(scored, self.args, self.kl_controller.coef)
            clip = self.args.reward_clip * (self.args.whiten_scores == "none")
            summary = metrics.summarise(scored, clip)
            share = summary.get("objective/clipped_fraction", 0.0)
            if step == 1 and share > 0.1:  # later the report says so
                self.logger.note(
                    f"note: {share:.0%} of the first scores are beyond --reward_clip {clip:g}: PPO sees "
                    f"{clip:g} or -{clip:g} for them; --reward_clip 0 or --whiten_scores batch avoids it"
                )
            if self.rollout.recomputes:
                gaps = (scored.data["rollout_logprobs"] - scored.data["old_logprobs"]).abs()
                gaps = gaps[scored.data.get("sampled_mask", ...)]
                summary["policy/logprob_gap"] = float(step_mean(gaps))
            batch = merge_columns(self._normalise_values(scored), batch)
            if not bool(has_score.all()):
                scores = torch.where(has_score, batch.numbers("scores"), torch.nan)
                batch = batch.with_numbers("scores", scores)
            summary |= metrics.summarise_scores(batch, self.rollout.scores) | metrics.summarise_turns(batch)
            summary |= self.rollout.scores.pop_costs("reward")
            if self.args.rollout_staleness:
                # Mean number of PPO steps between the sampling of a token and this step.
                summary["rollout/staleness"] = step - 1 - float(step_mean(batch.data["versions"]))
            share = summary.get("objective/failed_fraction")
            first = self.rollout.scores.first_failure
            if share and step % self.logger.log_interval == 0:
                text = f"a reward failed for {share:.1%} of the responses; the first failure: {first}"
                self.logger.note(f"step {step}: {text}")
            mask = tokens(batch, "loss_mask")
            weights, counts = loss_weights(mask, self.args.loss_aggregation, self.args.max_answer_seq_len)
            batch = with_tokens(batch, loss_weights=weights).with_numbers("loss_counts", counts * has_score)
            is_current = self._is_current(step, batch)
            if self.correction and self.args.prox_logprobs == "loglinear":
                batch = batch.with_key("prox_share", prox_share(batch, step), like="response_ids")
            elif self.correction:
                batch, weight_metrics = self._correct(batch, self.correction, is_current=is_current)
                summary |= weight_metrics
            return OpenStep(step, batch, summary)

    def _normalise_values(self, batch: PackedBatch) -> PackedBatch:
        """Normalise old values and returns to the critic's scale."""
        normaliser = self.value_normaliser
        if normaliser is None:
            return batch
        old_values = normaliser.normalise(batch.data["old_values"])  # by the statistics before this update
        normaliser.update(batch.data["returns"], batch.data["loss_mask"])
        returns = normaliser.normalise(batch.data["returns"])
        batch = batch.with_key("old_values", old_values, like="response_ids")
        return batch.with_key("returns", returns, like="response_ids")

    def _is_current(self, step: int, batch: PackedBatch) -> bool:
        """Whether all tokens were sampled by the policy before this step's updates.

        Asserts that no token was sampled by a policy newer than this step's.
        """
        now = step - 1
        versions = batch.data["versions"]
        oldest, newest = (distributed.max_float(float(x)) for x in (-versions.min(), versions.max()))
        assert newest <= now, f"step {step} has tokens of a policy that has taken {newest:.0f} steps"
        return -oldest == now

    def _correct(
        self, batch: PackedBatch, correction: Correction, *, is_current: bool
    ) -> tuple[PackedBatch, dict[str, float]]:
        """The batch with prox_logprobs and importance weights, and metrics of the weights.

        If the policy before the updates is the sampler, and its log-probabilities were recomputed by the
        trainer, these are prox; otherwise a forward pass computes prox.
        """
        prox = batch.data["old_logprobs"]
        if not (is_current and self.rollout.recomputes):
            parts = self.rollout.score_cap.cut(batch)
            batch = join_scores(batch.ids, parts, {"prox_logprobs": self.roles.actor.score(parts)}, {})
            prox = batch.data["prox_logprobs"]
        batch, weights = weigh_tokens(batch, prox, correction)
        numbers = summarise_weights(weights, distributed.reduce_sum, distributed.max_float)
        gaps = (batch.data["rollout_logprobs"] - batch.data["prox_logprobs"])[batch.data["loss_mask"]]
        return batch, numbers | {"correction/kl": float(step_mean(gaps))}  # KL(sampler || prox) per token

    def minibatches(self, current: OpenStep) -> Iterator[list[PackedBatch]]:
        """Yield this rank's micro-batches of each remaining optimizer step of a PPO step."""
        remaining = cut_minibatches(
            current.batch, self.args, self.rollout.cap, current.step, first=current.num_minibatches
        )
        while not current.is_done:
            with watchdog.phase("the split into minibatches", clock="actor_update"):
                micro_batches = next(remaining, None)
            if micro_batches is None:
                return
            current.num_minibatches += 1
            yield micro_batches

    def update(self, current: OpenStep, make_step: Callable[..., dict[str, float]], *inputs: Any) -> bool:
        """Take an optimizer step and record its metrics; return whether it was taken.

        StepSkipped leaves everything unchanged.
        """
        with watchdog.phase("the updates", current.step):
            means = make_step(*inputs)
        if not means:
            return False
        for name, value in means.items():
            current.means.setdefault(name, []).append(value)
        if self.ema:
            self.ema.update()
        if "policy/approx_kl" in means:  # a step on text has none
            exceeds_ratio = 0 < self.args.early_stop_imp_ratio < means["policy/ratio"]
            current.is_done = exceeds_ratio or self.args.exceeds_kl(means["policy/approx_kl"])
        return True

    def finish_step(self, current: OpenStep) -> dict[str, float]:
        """Log the step, update the controllers, write responses; return the step's metrics."""
        step = current.step
        args = self.args
        numbers = current.averages()
        if "policy/logprob_gap" in numbers:  # only the first update compares sampler and trainer
            numbers["policy/logprob_gap"] = current.means["policy/logprob_gap"][0]
        numbers |= current.summary  # with the gap of the whole rollout if that was recomputed
        if args.early_stop_kl or args.early_stop_imp_ratio:
            numbers["policy/num_updates"] = len(current.means.get("policy/approx_kl", ()))
        numbers["hybrid/received_gib"] = self.roles.actor.hybrid_engine.received_bytes / 2**30
        numbers["objective/kl_coef"] = self.kl_controller.coef
        self.kl_controller.update(numbers["objective/kl"], len(current.batch) * distributed.world_size())
        if args.dynamic_sampling_rounds:
            numbers["rollout/refilled_fraction"] = self.rollout.refilled_fraction
        numbers |= COSTS.end_step(distributed.world_size())
        self.logger.log(step, numbers)
        gap = numbers.get("policy/logprob_gap")  # None: every minibatch was skipped
        warning = None if gap is None else self.rollout.check_logprob_gap(gap)
        if warning:
            self.logger.note(f"step {step}: {warning}")
        self._write_responses(step, current.batch)
        if self.ref_average:
            self.ref_average.update()
        run_hooks("after_step", self, current.batch)
        self.open_step = None
        return numbers

    def _write_responses(self, step: int, batch: PackedBatch) -> None:
        """Log the first responses of the step, and write all of them in the steps of --save_rollouts."""
        args = self.args
        ids = gather_numbers(batch)["ids"].tolist()
        decode = self.rollout.scores.decode
        shown = list(metrics.response_rows(batch, ids[:2], decode))
        for row in shown:
            self.logger.sample(step, **row)
        if shown and args.print_answers_interval and step % args.print_answers_interval == 0:
            text = "  prompt {prompt!r}\n  answer {answer!r}  score {score:.4f}"
            self.logger.note(text.format(**shown[0]))
        if args.save_rollouts and step % args.save_rollouts == 0:
            chunks = (ids[i : i + len(batch)] for i in range(0, len(ids), len(batch)))
            rows = [row for chunk in chunks for row in metrics.response_rows(batch, chunk, decode)]
            self.logger.rollout(step, rows)
