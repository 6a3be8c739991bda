"""What the policy is worth on prompts that it does not train on: before, during and after training.

The same prompts are answered each time, and each answer draws the random numbers of its prompt, so it changes
by the weights alone.

# W prompts
"""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from common.data.data_options import DataOptions
from common.data.dialogue import Template
from common.data.global_batches import evaluation_batches
from common.data.packed_batch import PackedBatch, collate_prompts, prompt_texts
from common.data.stage_datasets import StageData, build_data
from common.models.tensor_ops import wilson_interval
from common.ranks import distributed, watchdog
from common.runs.run_logger import RunLogger
from common.runs.saved_state import kept_random_numbers
from step3_ppo.arguments import PPOArguments
from step3_ppo.metrics import response_rows
from step3_ppo.rewards.reward_specs import RewardSpec
from step3_ppo.rewards.score_sum import PREFIX, PromptTexts
from step3_ppo.rollout import Rollout, join_scores
from step3_ppo.rollout_batch import gather_numbers, in_order, send_to_main, tokens

NUM_SHOWN = 4  # prompts whose answers are in samples.jsonl
# The rollouts number their prompts from 0 on; these have numbers of their own, the same ones every time.
FIRST_NUMBER = 2**40
VERIFIABLE = ("function", "http")  # kinds of rewards that check an answer

Judged = dict[str, list]  # what became of the prompts at one time, see `judge`


def choose_prompts(
    args: PPOArguments, options: DataOptions, data: StageData, template: Template
) -> tuple[list[dict[str, Any]], str]:
    """Return at most --eval_prompts held-out rows of `build_data`, by the seed, and a line about them.

    No prompt is there twice, or in the training part. Every rank must call this.

    Raises:
        ValueError: a flag asks for an evaluation, and nothing is held out.
    """
    if not args.eval_prompts:
        return [], ""
    held_out, where = data.eval, "held-out"
    if args.eval_data_path:
        options = replace(options, data_path=args.eval_data_path, data_split="0,0,1", eval_fraction=0.0)
        try:
            own = build_data(options, template)
        except ValueError as error:
            raise ValueError(str(error).replace("--data_path", "--eval_data_path")) from error
        held_out, where = own.eval if len(own.eval) else own.train, "--eval_data_path's"
    seen = {data.train[row]["prompt_text"] for row in range(len(data.train))} if len(held_out) else set()
    rows: list[dict[str, Any]] = []
    for index in torch.randperm(len(held_out), generator=torch.Generator().manual_seed(args.seed)).tolist():
        row = held_out[index]
        if row["prompt_text"] not in seen:
            seen.add(row["prompt_text"])
            rows.append(row)
        if len(rows) == args.eval_prompts:
            break
    asked = [f"--keep_best {args.keep_best}"] if args.keep_best else []
    if args.eval_interval and not args.eval_fraction:  # a small share of a few prompts may be none
        asked.append(f"--eval_interval {args.eval_interval}")
    if not rows and (asked or args.eval_data_path):
        raise ValueError(
            f"{', '.join(asked) or 'an evaluation'} needs prompts that are not trained on, and of "
            f"{len(held_out)} {where} ones none is left: raise --eval_fraction {args.eval_fraction}, or name "
            "others by --eval_data_path"
        )
    return rows, f"evaluation: {len(rows)} of {len(held_out)} {where} prompts" if len(held_out) else ""


def known_bests(rewards: Sequence[RewardSpec]) -> list[str]:
    """Return what --keep_best may name: numbers of an evaluation of which more is better."""
    names = ["eval/score", *(f"eval/score_{spec.name}" for spec in rewards if len(rewards) > 1)]
    names += ["eval/pass_rate"] if any(spec.kind in VERIFIABLE for spec in rewards) else []
    return names + ["eval/win_rate", "eval/win_rate_low"]


def judge(batch: PackedBatch, scores: torch.Tensor) -> Judged:
    """Return {"scores", "answers"}: the scores with the digests of the answers' tokens, in the order of the
    sample ids, of all ranks: all that a comparison needs, as JSON can hold it.

    scores (b,), NaN, in the result None, for an answer that has none. Every rank must call this.
    """
    answers = [sequence.tolist() for sequence in batch.sequences("response_ids")]
    digests = [hashlib.blake2b(str(answer).encode(), digest_size=8).digest() for answer in answers]
    numbers = [int.from_bytes(digest, signed=True) for digest in digests]
    everyone = gather_numbers(batch, scores=scores, answers=torch.tensor(numbers, dtype=torch.int64))
    return {
        "scores": [None if math.isnan(score) else score for score in everyone["scores"].tolist()],
        "answers": [number.to_bytes(8, signed=True).hex() for number in everyone["answers"].tolist()],
    }


def compare(mine: Judged, before: Judged) -> dict[str, float]:
    """Return the share of prompts on which `mine` has the higher score, and its 95 % interval (Wilson).

    A tie counts half. The same answer ties whatever it scored: in other company it is scored in another
    micro-batch, and rounded otherwise. An answer without a score ties with any.
    """
    wins = 0.0
    for score, answer, old_score, old_answer in zip(
        mine["scores"], mine["answers"], before["scores"], before["answers"], strict=True
    ):
        is_tie = answer == old_answer or score is None or old_score is None or score == old_score
        wins += 0.5 if is_tie else float(score > old_score)
    rate = wilson_interval(wins, len(mine["scores"]))
    return {"eval/win_rate": rate.value, "eval/win_rate_low": rate.low, "eval/win_rate_high": rate.high}


def measure(batch: PackedBatch, checks: Sequence[str]) -> dict[str, float]:
    """Return the means of scored answers; `checks` are the rewards that all have to be above 0 for a pass.

    Every rank must call this.
    """
    names = [key for key in batch.data if key.startswith(PREFIX)]
    everyone = gather_numbers(
        batch,
        scores=batch.numbers("scores"),
        kl=(tokens(batch, "old_logprobs") - tokens(batch, "ref_logprobs")).double().sum(1),
        lengths=batch.lengths["response_ids"],
        is_finished=batch.numbers("is_finished"),
        **{key: batch.numbers(key) for key in names},
    )

    def mean(values: torch.Tensor) -> float:
        return float(values.double().nanmean())  # NaN: a reward whose failure is borne

    metrics = {"eval/score": mean(everyone["scores"])}
    if len(names) > 1:
        metrics |= {f"eval/score_{key.removeprefix(PREFIX)}": mean(everyone[key]) for key in names}
    if checks:
        passed = torch.stack([everyone[PREFIX + name] > 0 for name in checks]).all(0)
        metrics["eval/pass_rate"] = mean(passed)
    return metrics | {
        "eval/kl": mean(everyone["kl"]),
        "eval/response_tokens": mean(everyone["lengths"]),
        "eval/finished_fraction": mean(everyone["is_finished"]),
    }


@dataclass
class Evaluation:
    """Answers the same prompts now and then; a part of a checkpoint by its `state_dict`."""

    args: PPOArguments
    rollout: Rollout
    logger: RunLogger
    decode: Callable[[torch.Tensor], str]
    rows: list[dict[str, Any]]  # (W,) of `build_data`, the same ones on every rank
    step: int = field(default=-1, init=False)  # of the last evaluation
    metrics: dict[str, float] = field(default_factory=dict, init=False)  # its numbers
    before: Judged | None = field(default=None, init=False)  # of the policy before training
    best: dict[str, Any] = field(default_factory=dict, init=False)  # metric, value, step of --keep_best
    _texts: PromptTexts = field(default_factory=dict, init=False)  # of this rank's prompts

    def state_dict(self) -> dict[str, Any]:
        """Return what lasts from one evaluation to the next."""
        state = {"step": self.step, "metrics": self.metrics, "before": self.before, "best": self.best}
        return state | {"prompts": self._digest()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` gave. Raises ValueError when the prompts are others."""
        if state["prompts"] != self._digest():
            raise ValueError("the held-out prompts have changed since it was saved; bring the old ones back")
        self.step, self.metrics, self.best = state["step"], state["metrics"], state["best"]
        self.before = state["before"]

    def _digest(self) -> str:
        tokens = json.dumps([row["prompt_ids"] for row in self.rows])
        return hashlib.sha256(tokens.encode()).hexdigest()

    def is_due(self, step: int, num_steps: int) -> bool:
        """Return whether the prompts are to be judged after this step; 0 is before the first."""
        if step <= self.step:
            return False
        if step == 0:
            return True
        interval = self.args.eval_interval
        return step == num_steps or (interval > 0 and step % interval == 0)

    def judge_if_due(self, step: int, num_steps: int) -> dict[str, float]:
        """Judge the answers to the prompts if it is time; return the numbers, else {}.

        Nothing of the training changes by it. Every rank must call this. Raises StepRefused where a reward
        fails.
        """
        if self.is_due(step, num_steps):
            with watchdog.phase("the evaluation", step, clock="evaluate"), kept_random_numbers():
                return self._judge(step)
        return {}

    def _judge(self, step: int) -> dict[str, float]:
        batch, scores = self._score(self._answer(step)), self.rollout.scores
        self.rollout.refuse_if_not_finite(batch)
        ids = range(FIRST_NUMBER, FIRST_NUMBER + len(self.rows))
        batch = batch.select([row for row, sample in enumerate(batch.ids) if sample in ids])
        has_score = scores.counts(batch)
        judged = judge(batch, torch.where(has_score, batch.numbers("scores"), torch.nan))
        if step == 0:
            self.before = judged
        checks = [spec.name for spec in scores.specs if spec.kind in VERIFIABLE]
        metrics = measure(batch.select(has_score.nonzero()[:, 0]), checks)
        metrics |= compare(judged, self.before) if self.before else {}
        if scores.failures.are_borne:
            failed = gather_numbers(batch, failed=~scores.has_scores(batch))["failed"]
            metrics["eval/failed_fraction"] = float(failed.double().mean())
        self.step, self.metrics = step, metrics
        self.logger.log_event(step, metrics)
        self._show(step, batch)
        return metrics

    def _answer(self, step: int) -> PackedBatch:
        """Return this rank's answers to the prompts, and a few more: as many on each rank.

        A prompt has the same number, and so the same answer, for any number of ranks.
        """
        world_size, rank, num_prompts = distributed.world_size(), distributed.rank(), len(self.rows)
        size = min(self.args.per_device_generation_batch_size, -(-num_prompts // world_size))
        batches = evaluation_batches(
            self.rows, collate_prompts, rows_per_batch=size, rank=rank, world_size=world_size
        )
        parts, num_kept = [], 0
        for index, (prompts, is_real) in enumerate(batches):
            first = FIRST_NUMBER + (index * world_size + rank) * size
            numbers = torch.arange(first, first + len(is_real))
            self._texts |= zip(numbers.tolist(), prompt_texts(prompts), strict=True)
            parts.append(self.rollout.sample(prompts, numbers, step))
            num_of_main = num_prompts - index * world_size * size  # real ones of the first rank, or more
            num_kept += max(min(size, num_of_main), 0)
        return PackedBatch.concat(parts).select(range(num_kept))

    def _score(self, batch: PackedBatch) -> PackedBatch:
        """Return the answers with log-probabilities and scores."""
        rollout, roles = self.rollout, self.rollout.roles
        parts = rollout.cap.cut(batch)
        with rollout.scores.asked(parts, self._texts) as get_scores:
            columns = {"old_logprobs": roles.actor.score(parts), "ref_logprobs": roles.reference.score(parts)}
            numbers = get_scores(roles.rewards)
        return in_order(join_scores(parts, columns, numbers), batch.ids)

    def _show(self, step: int, batch: PackedBatch) -> None:
        """Write the answers to the first prompts to samples.jsonl. Every rank must call this."""
        ids = range(FIRST_NUMBER, FIRST_NUMBER + min(NUM_SHOWN, len(self.rows)))
        for row in response_rows(send_to_main(batch, ids), self.decode):
            self.logger.sample(step, **row, is_fixed=True)

    def is_best(self, metrics: dict[str, float]) -> bool:
        """Return whether an evaluation's --keep_best number is above the best one so far."""
        name = self.args.keep_best
        known = self.best.get("value") if self.best.get("metric") == name else None
        return name in metrics and (known is None or metrics[name] > known)
