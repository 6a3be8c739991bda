"""Held-out evaluation of the policy before, during and after training.

Every evaluation uses the same prompts, and for each prompt the same random numbers: a response changes only
with the weights.

# W prompts
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from common.data.collators import collate_prompts
from common.data.data_options import DataOptions
from common.data.dialogue import Template
from common.data.global_batches import evaluation_batches
from common.data.packed_batch import PackedBatch
from common.data.stage_datasets import StageData, build_data
from common.models.tensor_ops import wilson_interval
from common.ranks import distributed
from common.runs.run import IntervalClock
from common.runs.run_logger import RunLogger
from common.runs.saved_state import kept_random_numbers
from step3_ppo.algorithms import step_mean
from step3_ppo.arguments import PPOArguments
from step3_ppo.checks import VERIFIABLE
from step3_ppo.environments import NUM_TURNS
from step3_ppo.metrics import gather_responses, response_rows
from step3_ppo.rewards.scorer import PREFIX
from step3_ppo.rollout import Rollout
from step3_ppo.rollout_batch import gather_numbers

NUM_SHOWN = 4  # prompts whose responses are written to samples.jsonl
# Rollout prompts are numbered from 0; evaluation prompts from here, the same in every evaluation.
FIRST_NUMBER = 2**40

# Results of one evaluation, see `gather_results`; with an LLM judge also "texts".
EvalResults = dict[str, list]


def select_eval_prompts(
    args: PPOArguments, options: DataOptions, data: StageData, template: Template
) -> tuple[list[dict[str, Any]], str]:
    """At most --eval_prompts held-out rows of `build_data`, selected by the seed, and a line about them.

    No prompt occurs twice, nor in the training data. Every rank must call this.

    Raises ValueError if a flag requests an evaluation but nothing is held out.
    """
    if not args.eval_prompts:
        return [], ""
    held_out = data.eval
    name = "held-out prompts"
    if args.eval_data_path:
        options = replace(options, data_path=args.eval_data_path, data_split="0,0,1", eval_fraction=0.0)
        try:
            own = build_data(options, template)
        except ValueError as error:
            raise ValueError(str(error).replace("--data_path", "--eval_data_path")) from error
        held_out = own.eval if len(own.eval) else own.train
        name = "prompts of --eval_data_path"
    seen = {row["prompt_text"] for row in data.train} if len(held_out) else set()
    rows: list[dict[str, Any]] = []
    for index in torch.randperm(len(held_out), generator=torch.Generator().manual_seed(args.seed)).tolist():
        row = held_out[index]
        if row["prompt_text"] not in seen:
            seen.add(row["prompt_text"])
            rows.append(row)
        if len(rows) == args.eval_prompts:
            break
    flags = [f"--keep_best {args.keep_best}"] if args.keep_best else []
    if args.eval_interval and not args.eval_fraction:  # a small fraction of a few prompts may be none
        flags.append(f"--eval_interval {args.eval_interval}")
    if not rows and (flags or args.eval_data_path):
        raise ValueError(
            f"{', '.join(flags) or 'an evaluation'} needs prompts that are not trained on, but 0 of "
            f"{len(held_out)} {name} are left: raise --eval_fraction {args.eval_fraction}, or use "
            "others with --eval_data_path"
        )
    return rows, f"evaluation: {len(rows)} of {len(held_out)} {name}" if len(held_out) else ""


def gather_results(batch: PackedBatch, scores: torch.Tensor) -> EvalResults:
    """{"scores", "answers"} of all ranks by sample id: scores, and digests of the responses' tokens;
    JSON-serialisable, and sufficient for `compare`.

    scores (b,), NaN for a response without one, which is None in the result. Every rank must call this.
    """
    tokens = (ids.tolist() for ids in batch.sequences("response_ids"))
    digests = [hashlib.blake2b(str(ids).encode(), digest_size=8).hexdigest() for ids in tokens]
    gathered = distributed.gather_objects(list(zip(batch.ids, scores.tolist(), digests, strict=True)))
    rows = sorted(row for rank_rows in gathered for row in rank_rows)
    return {
        "scores": [None if math.isnan(score) else score for _, score, _ in rows],
        "answers": [digest for _, _, digest in rows],
    }


def compare(current: EvalResults, before: EvalResults) -> dict[str, float]:
    """Fraction of prompts on which `current` has the higher score, and its 95 % interval (Wilson).

    A tie counts half. Identical responses tie whatever their scores, because rounding depends on the
    micro-batch. A response without a score ties with any other.
    """
    wins = 0.0
    for score, answer, old_score, old_answer in zip(
        current["scores"], current["answers"], before["scores"], before["answers"], strict=True
    ):
        is_tie = answer == old_answer or score is None or old_score is None or score == old_score
        wins += 0.5 if is_tie else float(score > old_score)
    return win_rate("", wins, len(current["scores"]))


def win_rate(name: str, wins: float, num_prompts: int) -> dict[str, float]:
    """The rate and its 95 % interval (Wilson), by log name; {} without prompts."""
    if not num_prompts:
        return {}
    rate = wilson_interval(wins, num_prompts)
    key = f"eval/win_rate{name}"
    return {key: rate.value, f"{key}_low": rate.low, f"{key}_high": rate.high}


def measure(batch: PackedBatch, checks: Sequence[str]) -> dict[str, float]:
    """Means of scored responses; `checks` are the rewards that must all be above 0 to pass.

    Every rank must call this.
    """
    more = {NUM_TURNS: batch.numbers(NUM_TURNS).float()} if NUM_TURNS in batch.data else {}
    gathered = gather_responses(batch, **more)
    if checks:
        gathered["passed"] = torch.stack([gathered[PREFIX + name] > 0 for name in checks]).all(0)
    # NaN: a tolerated failure of a reward.
    means = {name: float(values.double().nanmean()) for name, values in gathered.items()}
    names = [name for name in means if name.startswith(PREFIX)]
    metrics = {"eval/score": means["scores"]} if "scores" in means else {}
    if "divergences" in batch.data:
        sampled = batch.data.get("sampled_mask", ...)
        metrics["eval/divergence"] = float(step_mean(batch.data["divergences"][sampled]))
    if len(names) > 1:
        metrics |= {f"eval/score_{name.removeprefix(PREFIX)}": means[name] for name in names}
    if checks:
        metrics["eval/pass_rate"] = means["passed"]
    metrics |= {"eval/turns": means[NUM_TURNS]} if NUM_TURNS in means else {}
    return metrics | {
        "eval/kl": means["kl"],
        "eval/response_tokens": means["lengths"],
        "eval/finished_fraction": means["is_finished"],
    }


class Evaluation:
    """Periodic evaluation on a fixed set of held-out prompts."""

    def __init__(
        self,
        args: PPOArguments,
        rollout: Rollout,
        logger: RunLogger,
        rows: Sequence[dict[str, Any]],
        steps_per_epoch: int,
    ) -> None:
        """`rows` (W,) come from `build_data`, the same on every rank."""
        self.args = args
        self.rollout = rollout
        self.logger = logger
        self.rows = rows
        self.clock = IntervalClock(args.eval_interval, steps_per_epoch)
        self.step = -1  # of the last evaluation
        self.metrics: dict[str, float] = {}  # of the last evaluation
        self.before: EvalResults | None = None  # of the policy before training
        self.best: dict[str, Any] = {}  # metric, value, step of --keep_best
        token_ids = json.dumps([row["prompt_ids"] for row in rows])
        self.prompts = hashlib.sha256(token_ids.encode()).hexdigest()  # must be the same in a resumed run

    def state_dict(self) -> dict[str, Any]:
        """State for a resumed run."""
        return {
            "step": self.step,
            "metrics": self.metrics,
            "before": self.before,
            "best": self.best,
            "prompts": self.prompts,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state. Raises ValueError if the held-out prompts differ."""
        if state["prompts"] != self.prompts:
            raise ValueError("the held-out prompts have changed since it was saved; bring the old ones back")
        self.step = state["step"]
        self.metrics = state["metrics"]
        self.before = state["before"]
        self.best = state["best"]

    def is_due(self, step: int, num_steps: int) -> bool:
        """Whether an evaluation is due after this step (0: before training). Every rank must call this."""
        return step > self.step and (step in (0, num_steps) or self.clock.is_due(step))

    @kept_random_numbers()
    def evaluate(self, step: int) -> dict[str, float]:
        """Metrics of the responses of the current policy.

        Training is not affected. Every rank must call this. Raises StepSkipped if a reward fails.
        """
        batch = self._sample(step)
        scores = self.rollout.scores
        has_score = scores.counts(batch)
        checks = [spec.name for spec in scores.specs if spec.kind in VERIFIABLE]
        metrics = measure(batch.select(has_score.nonzero()[:, 0]), checks)
        if scores.specs:
            results = gather_results(batch, torch.where(has_score, batch.numbers("scores"), torch.nan))
            if step == 0:
                self.before = results
            metrics |= compare(results, self.before) if self.before else {}
        if scores.judges and self.before:
            metrics |= self._compare_by_judges(batch) | scores.pop_costs("eval")
        if scores.tolerates_failures:
            failed = gather_numbers(batch, failed=~scores.has_scores(batch))["failed"]
            metrics["eval/failed_fraction"] = float(failed.double().mean())
        self.step, self.metrics = step, metrics
        self.logger.log_event(step, metrics)
        self._write_samples(step, batch)
        return metrics

    def _compare_by_judges(self, batch: PackedBatch) -> dict[str, float]:
        """Each judge's `eval/win_rate_NAME` of the responses against those before training.

        A win or a loss must be the same in both orders; everything else counts half. A pair on which a judge
        fails is not counted if failures are tolerated. Every rank must call this. Raises StepSkipped.
        """
        scores = self.rollout.scores
        texts = [scores.decode(ids) for ids in batch.sequences("response_ids")]
        if "texts" not in self.before:
            gathered = distributed.gather_objects(list(zip(batch.ids, texts, strict=True)))
            self.before["texts"] = [text for _, text in sorted(row for rows in gathered for row in rows)]
        own = [number - FIRST_NUMBER for number in batch.ids]
        prompts = [self.rows[index]["prompt_text"] for index in own]
        metrics = {}
        for name, wins in scores.compare(prompts, texts, [self.before["texts"][i] for i in own]).items():
            kept = [win for win in wins if not math.isnan(win)]
            count = round(distributed.sum_float(len(kept)))
            metrics |= win_rate(f"_{name}", distributed.sum_float(sum(kept)), count)
        return metrics

    def _sample(self, step: int) -> PackedBatch:
        """This rank's responses to the prompts, with log-probabilities and scores.

        A prompt has the same number, and so the same response, for any number of ranks.
        """
        max_rows = -(-len(self.rows) // distributed.world_size())
        size = min(self.args.per_device_generation_batch_size, max_rows)
        batches = evaluation_batches(self.rows, collate_prompts, rows_per_batch=size)
        prompts, is_real = zip(*batches, strict=True)
        responses, texts = self.rollout.sample(prompts, step, 1, FIRST_NUMBER)
        num_kept = int(distributed.max_float(float(torch.cat(is_real).sum())))  # the same on each rank
        scored = self.rollout.score(responses.select(range(num_kept)), texts, is_trained_on=False)
        end = FIRST_NUMBER + len(self.rows)  # later numbers are the padding rows of the last batches
        return scored.select([row for row, number in enumerate(scored.ids) if number < end])

    def _write_samples(self, step: int, batch: PackedBatch) -> None:
        """Write the responses to the first prompts to samples.jsonl. Every rank must call this."""
        ids = range(FIRST_NUMBER, FIRST_NUMBER + min(NUM_SHOWN, len(self.rows)))
        for row in response_rows(batch, ids, self.rollout.scores.decode):
            self.logger.sample(step, **row, is_fixed=True)

    def is_best(self, metrics: dict[str, float]) -> bool:
        """Whether the --keep_best metric of an evaluation exceeds the best so far."""
        name = self.args.keep_best
        highest = self.best["value"] if self.best.get("metric") == name else -math.inf
        return name in metrics and metrics[name] > highest
