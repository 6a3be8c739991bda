"""Weighted sum of rewards; each reward is scored and logged separately."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import torch

from common.data.packed_batch import PackedBatch
from common.ranks import distributed, passes, watchdog
from common.ranks.failures import StepSkipped
from step3_ppo.environments import KIND, Environments
from step3_ppo.rewards.judge_reward import COSTS, JudgeReward
from step3_ppo.rewards.reward_specs import RewardSpec
from step3_ppo.rewards.text_rewards import Answers, RewardError, TextReward, in_daemon

# The prompt's text and the fields of its row, by the prompt's number.
PromptTexts = dict[int, tuple[str, dict[str, Any]]]
PREFIX = "score/"  # with a reward's name, the key of its scores in a rollout batch
Scores = dict[str, Sequence[torch.Tensor]]  # "scores" and "score/NAME", for each batch (B,) fp32


@dataclass
class Scorer:
    """The rewards of a run. Reward models read token ids and are passed in as roles; the others read text."""

    specs: Sequence[RewardSpec]
    texts: dict[str, TextReward] = field(default_factory=dict)  # by the spec's name
    decode: Callable[[torch.Tensor], str] | None = None
    environments: Environments | None = None  # their scores are already in the batches
    bias: float = 0.0  # added to the sum
    on_error: str = "refuse"  # --reward_on_error
    default_score: float = 0.0  # of a response without a score, under "default"
    first_failure: str = field(default="", init=False)  # of the last scores of all ranks
    costs: dict[str, float] = field(default_factory=dict, init=False)  # of all ranks' judges, not logged yet
    _pending: "PendingScores | None" = field(default=None, init=False)  # the scores started last

    def state_dict(self) -> dict[str, Any]:
        """State for a resumed run."""
        return {"costs": self.costs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        self.costs = state["costs"]

    @property
    def judges(self) -> dict[str, JudgeReward]:
        """The rewards that can also compare two responses, by name."""
        return {name: reward for name, reward in self.texts.items() if isinstance(reward, JudgeReward)}

    @property
    def tolerates_failures(self) -> bool:
        """Whether a response without a score is tolerated; else its step is skipped."""
        return self.on_error != "refuse"

    def start(self, batches: Sequence[PackedBatch], texts: PromptTexts) -> "PendingScores":
        """Start scoring batches; functions and servers run in a thread. Every rank must call this."""
        if not self.texts:
            return PendingScores(self, batches, None)
        with watchdog.phase("the decoding of the responses", clock="reward"):
            if self._pending:
                self._pending.join()  # of a skipped step; rewards are not called concurrently
            self._pending = PendingScores(self, batches, self._decode_texts(batches, texts))
        return self._pending

    def _decode_texts(self, batches: Sequence[PackedBatch], texts: PromptTexts) -> Answers:
        assert self.decode is not None
        numbers = [number for batch in batches for number in batch.numbers("group_ids").tolist()]
        responses = [self.decode(ids) for batch in batches for ids in batch.sequences("response_ids")]
        return Answers([texts[n][0] for n in numbers], responses, [texts[n][1] for n in numbers])

    def add_up(self, scores: Scores, num_batches: int) -> Scores:
        """Weighted sum of the rewards' scores, and each of them; {} without rewards. Every rank must call
        this.
        """
        if not self.specs:
            return {}
        if self.tolerates_failures:
            scores = {
                n: [torch.where(x.isfinite(), x, torch.nan) for x in tensors] for n, tensors in scores.items()
            }
            failed = [name for name, tensors in scores.items() if torch.cat(tensors).isnan().any()]
            sources = [*self.texts.values(), *([self.environments] if self.environments else [])]
            own = [source.first_failure for source in sources]
            own += [f"reward {name} returned NaN or infinity" for name in failed]
            failures = distributed.gather_objects(next(filter(None, own), ""))
            self.first_failure = next(filter(None, failures), "")
        total = []
        for index in range(num_batches):
            numbers = [(spec.weight, scores[spec.name][index].double().cpu()) for spec in self.specs]
            if self.tolerates_failures:
                default = self.default_score if self.on_error == "default" else 0.0
                numbers = [(weight, torch.where(x.isnan(), default, x)) for weight, x in numbers]
            total.append(sum((weight * x for weight, x in numbers), self.bias).float())
        return {"scores": total} | {PREFIX + spec.name: scores[spec.name] for spec in self.specs}

    def compare(
        self, prompts: Sequence[str], responses: Sequence[str], others: Sequence[str]
    ) -> dict[str, list[float]]:
        """Preferences of each judge for this rank's responses, see `JudgeReward.prefer`.

        Every rank must call this. Raises StepSkipped on all of them.
        """

        def compare() -> dict[str, list[float]]:
            try:
                return {name: judge.prefer(prompts, responses, others) for name, judge in self.judges.items()}
            except RewardError as error:
                raise StepSkipped(str(error)) from error

        with watchdog.phase("the comparison of pairs", clock="reward"):
            work = in_daemon(compare, "judges")
            preferences = distributed.run_together(lambda: passes.finished(work), StepSkipped)
            passes.leave_if_asked()
        self.gather_costs()
        return preferences[distributed.rank()]

    def gather_costs(self) -> None:
        """Add the costs of all ranks' judges since the last call to `costs`. Every rank must call this."""
        if not self.judges:
            return
        own = {f"{name}_{what}": judge.costs[what] for name, judge in self.judges.items() for what in COSTS}
        for judge in self.judges.values():
            judge.costs.clear()
        for rank_costs in distributed.gather_objects(own):
            for name, number in rank_costs.items():
                self.costs[name] = self.costs.get(name, 0.0) + number

    def pop_costs(self, group: str) -> dict[str, float]:
        """Costs of the judges since the last call, under the log names GROUP/NAME_calls, _cached,
        _prompt_tokens, _completion_tokens and _seconds (summed over requests).
        """
        costs = self.costs
        self.costs = {}
        return {f"{group}/{name}": number for name, number in costs.items()}

    def has_scores(self, batch: PackedBatch) -> torch.Tensor:
        """Which responses (B,) bool have a score from every reward with a weight."""
        is_scored = torch.ones(len(batch), dtype=torch.bool)
        for spec in self.specs:
            if spec.weight and PREFIX + spec.name in batch.data:
                is_scored &= ~batch.numbers(PREFIX + spec.name).isnan()
        return is_scored

    def counts(self, batch: PackedBatch) -> torch.Tensor:
        """Which responses (B,) bool count in losses, means and baselines: under --reward_on_error mask those
        with a score, else all.
        """
        is_masked = self.on_error == "mask"
        return self.has_scores(batch) if is_masked else torch.ones(len(batch), dtype=torch.bool)

    def close(self) -> None:
        """End processes and connections."""
        for reward in self.texts.values():
            reward.close()


class PendingScores:
    """Scores of batches in the background; `wait` returns them."""

    def __init__(self, scorer: Scorer, batches: Sequence[PackedBatch], answers: Answers | None) -> None:
        """`answers` are the texts of the batches, for rewards that read text; None without such rewards."""
        self.scorer = scorer
        self.batches = batches
        self.answers = answers
        self._thread: Future[Scores] | None = None
        if answers is not None:
            self._thread = in_daemon(lambda: self._score_texts(on_device=False), "rewards")

    def wait(self, models: dict[str, Any]) -> Scores:
        """Scores of all rewards, (B,) fp32 for each batch: {"scores": the weighted sum, "score/NAME": one
        reward's}; {} without rewards. `models` are the Reward roles by name.

        Every rank must call this with the same number of batches. Raises StepSkipped, naming the reward, if a
        reward that reads text does not give a finite number per response. If failures are tolerated,
        "score/NAME" is NaN for such a response, which counts as the default, or 0, in the sum; see `counts`.
        """
        scores = {name: model.score(self.batches) for name, model in models.items()}
        if self.scorer.environments:
            scores[KIND] = [batch.numbers(PREFIX + KIND) for batch in self.batches]
        if self._thread or self.scorer.environments:
            with watchdog.phase("the rewards", clock="reward"):
                distributed.run_together(lambda: scores.update(self._finish()), StepSkipped)
                passes.leave_if_asked()
        self.scorer.gather_costs()
        return self.scorer.add_up(scores, len(self.batches))

    def join(self) -> None:
        """Wait for the thread, whether it failed or not."""
        wait([self._thread] if self._thread else [])

    def _score_texts(self, *, on_device: bool) -> Scores:
        sizes = [len(batch) for batch in self.batches]
        scores = {}
        for name, reward in self.scorer.texts.items():
            if reward.is_on_device == on_device:
                reward.first_failure = ""
                scores[name] = torch.tensor(reward.score(self.answers), dtype=torch.float32).split(sizes)
        return scores

    def _finish(self) -> Scores:
        environments = self.scorer.environments
        try:
            if environments and environments.first_failure and not self.scorer.tolerates_failures:
                raise RewardError(environments.first_failure)
            if not self._thread:
                return {}
            # Rewards on the device are scored here, since a thread would compete with the other roles.
            return self._score_texts(on_device=True) | (passes.finished(self._thread) or {})
        except RewardError as error:
            raise StepSkipped(str(error)) from error
