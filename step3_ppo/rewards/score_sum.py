"""What a response is worth: several rewards, each scored and kept on its own, weighted and added up."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import torch

from common.data.packed_batch import PackedBatch
from common.ranks import distributed, watchdog
from common.ranks.failures import StepRefused
from step3_ppo.environments import KIND, Environments
from step3_ppo.rewards.judge_reward import COSTS, JudgeReward
from step3_ppo.rewards.reward_specs import RewardSpec
from step3_ppo.rewards.text_rewards import Answers, RewardError, TextReward, in_daemon

# The prompt's text and the fields of its row, by the prompt's number.
PromptTexts = dict[int, tuple[str, dict[str, Any]]]
PREFIX = "score/"  # of a rollout batch's key for one reward's scores
Scores = dict[str, Sequence[torch.Tensor]]  # "scores" and "score/NAME", for each batch (B,) fp32


@dataclass
class ScoreSum:
    """The rewards of a run: reward models read token ids and come with the roles, the others read text."""

    specs: Sequence[RewardSpec]
    texts: dict[str, TextReward] = field(default_factory=dict)  # by the spec's name
    decode: Callable[[torch.Tensor], str] | None = None
    on_error: float | None = None  # the score of an answer without one, see `parse_on_error`
    environments: Environments | None = None  # their scores are in the batches already
    bias: float = 0.0  # added to the sum
    first_failure: str = field(default="", init=False)  # of all ranks, of the last scores
    costs: dict[str, float] = field(default_factory=dict, init=False)  # of all ranks' judges, not logged yet
    _beside: Future[None] | None = field(default=None, init=False)  # what is asked in a thread

    @property
    def judges(self) -> dict[str, JudgeReward]:
        """The rewards that compare answers too, by name."""
        return {name: reward for name, reward in self.texts.items() if isinstance(reward, JudgeReward)}

    @property
    def bears_failures(self) -> bool:
        """Whether an answer may have no score; else it refuses its step."""
        return self.on_error is not None

    def ask(self, batches: Sequence[PackedBatch], texts: PromptTexts) -> Callable[[dict[str, Any]], Scores]:
        """Ask functions and servers in a thread; return a function of the Reward roles by name, which waits.

        It returns {"scores": the weighted sum, "score/NAME": one reward's}: for each batch (B,) fp32; without
        rewards {}. Every rank must call this, and that, with as many batches. That raises StepRefused, naming
        the reward, when a text reward gives something other than a finite number a response. Where failures
        are borne, "score/NAME" is NaN for such a response, and counts as the default, or 0, in the sum: see
        `counts`.
        """
        scores: Scores = {}

        def ask_texts(*, on_device: bool) -> None:
            for name, reward in self.texts.items():
                if reward.is_on_device == on_device:
                    reward.first_failure = ""
                    scores[name] = torch.tensor(reward.score(answers), dtype=torch.float32).split(sizes)

        def finish() -> None:
            try:
                if self.environments and self.environments.first_failure and not self.bears_failures:
                    raise RewardError(self.environments.first_failure)
                if self._beside:
                    ask_texts(on_device=True)  # a thread would take the device from the other roles
                    self._beside.result()
            except RewardError as error:
                raise StepRefused(str(error)) from error

        def get_scores(models: dict[str, Any]) -> Scores:
            for name, model in models.items():
                scores[name] = model.score(batches)
            if self.environments:
                scores[KIND] = [batch.numbers(PREFIX + KIND) for batch in batches]
            if self.texts or self.environments:
                with watchdog.phase("the rewards", clock="reward"):
                    distributed.run_together(finish, StepRefused)
            self._gather_costs()
            return self._add_up(scores, len(batches))

        if self.texts:
            with watchdog.phase("the texts of the responses", clock="reward"):
                if self._beside:
                    wait([self._beside])  # of a step that another role refused: one is asked at a time
                answers, sizes = self._read(batches, texts), [len(batch) for batch in batches]
                self._beside = in_daemon(lambda: ask_texts(on_device=False), "rewards")
        return get_scores

    def _read(self, batches: Sequence[PackedBatch], texts: PromptTexts) -> Answers:
        assert self.decode is not None
        numbers = [number for batch in batches for number in batch.numbers("group_ids").tolist()]
        responses = [self.decode(ids) for batch in batches for ids in batch.sequences("response_ids")]
        return Answers([texts[n][0] for n in numbers], responses, [texts[n][1] for n in numbers])

    def _add_up(self, scores: Scores, num_batches: int) -> Scores:
        if not self.specs:
            return {}
        if self.bears_failures:
            scores = {n: [torch.where(x.isfinite(), x, torch.nan) for x in of] for n, of in scores.items()}
            failed = [name for name, of_batches in scores.items() if torch.cat(of_batches).isnan().any()]
            sources = [*self.texts.values(), *([self.environments] if self.environments else [])]
            own = [source.first_failure for source in sources]
            own += [f"reward {name} gave NaN or infinity" for name in failed]
            failures = distributed.gather_objects(next(filter(None, own), ""))
            self.first_failure = next(filter(None, failures), "")
        total = []
        for index in range(num_batches):
            numbers = [(spec.weight, scores[spec.name][index].double().cpu()) for spec in self.specs]
            if self.bears_failures:
                default = 0.0 if math.isnan(self.on_error) else self.on_error
                numbers = [(weight, torch.where(x.isnan(), default, x)) for weight, x in numbers]
            total.append(sum((weight * x for weight, x in numbers), self.bias).float())
        return {"scores": total} | {PREFIX + spec.name: scores[spec.name] for spec in self.specs}

    def compare(
        self, prompts: Sequence[str], responses: Sequence[str], others: Sequence[str]
    ) -> dict[str, list[float]]:
        """Return by judge what `JudgeReward.prefer` says of this rank's answers.

        Every rank must call this. Raises StepRefused on all of them.
        """

        def compare() -> dict[str, list[float]]:
            try:
                return {name: judge.prefer(prompts, responses, others) for name, judge in self.judges.items()}
            except RewardError as error:
                raise StepRefused(str(error)) from error

        with watchdog.phase("the judged pairs", clock="reward"):
            preferences = distributed.run_together(compare, StepRefused)[distributed.rank()]
        self._gather_costs()
        return preferences

    def _gather_costs(self) -> None:
        """Add up what the judges of all ranks have cost since the last time. Every rank must call this."""
        if not self.judges:
            return
        own = {f"{name}_{what}": judge.costs[what] for name, judge in self.judges.items() for what in COSTS}
        for judge in self.judges.values():
            judge.costs.clear()
        for rank_costs in distributed.gather_objects(own):
            for name, number in rank_costs.items():
                self.costs[name] = self.costs.get(name, 0.0) + number

    def take_costs(self, group: str) -> dict[str, float]:
        """Costs of the judges since the last call, under the log names GROUP/NAME_calls, _cached,
        _prompt_tokens, _completion_tokens and _seconds (summed over requests).
        """
        taken, self.costs = self.costs, {}
        return {f"{group}/{name}": number for name, number in taken.items()}

    def has_scores(self, batch: PackedBatch) -> torch.Tensor:
        """Return (B,) bool: every reward that has a weight gave this response a score."""
        is_scored = torch.ones(len(batch), dtype=torch.bool)
        for spec in self.specs:
            if spec.weight and PREFIX + spec.name in batch.data:
                is_scored &= ~batch.numbers(PREFIX + spec.name).isnan()
        return is_scored

    def counts(self, batch: PackedBatch) -> torch.Tensor:
        """Return (B,) bool: False for responses without a score that no loss, mean or baseline may count."""
        is_masked = self.bears_failures and math.isnan(self.on_error)
        return self.has_scores(batch) if is_masked else torch.ones(len(batch), dtype=torch.bool)

    def close(self) -> None:
        """End processes and connections."""
        for reward in self.texts.values():
            reward.close()
