"""What a response is worth: several rewards, each scored and kept on its own, weighted and added up."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from common.data.packed_batch import PackedBatch
from common.ranks import distributed, watchdog
from common.ranks.failures import StepRefused
from step3_ppo.rewards.classifier_reward import ClassifierReward
from step3_ppo.rewards.reward_specs import RewardSpec
from step3_ppo.rewards.text_rewards import Answers, Failures, RewardError, TextReward, checked_scores

# The prompt's text and the fields of its row, by the prompt's number.
PromptTexts = dict[int, tuple[str, dict[str, Any]]]
PREFIX = "score/"  # of a rollout batch's key for one reward's scores
Scores = dict[str, list[torch.Tensor]]  # "scores" and "score/NAME", for each batch (B,) fp32


@dataclass
class ScoreSum:
    """The rewards of a run: reward models read token ids and come with the roles, the others read text."""

    specs: Sequence[RewardSpec]
    texts: dict[str, TextReward] = field(default_factory=dict)  # by the spec's name
    decode: Callable[[torch.Tensor], str] | None = None
    failures: Failures = field(default_factory=Failures)
    first_failure: str = field(default="", init=False)  # of all ranks, of the last scores

    @contextmanager
    def asked(
        self, batches: Sequence[PackedBatch], texts: PromptTexts
    ) -> Iterator[Callable[[dict[str, Any]], Scores]]:
        """Ask functions and servers in a thread, beside what the block does; give a function of the Reward
        roles by name, which waits for them.

        It returns {"scores": the weighted sum, "score/NAME": one reward's}: for each batch (B,) fp32. Every
        rank must call this, and that, with as many batches. That raises RewardError, naming the reward, when
        one gives something other than a finite number a response. Where failures are borne, "score/NAME" is
        NaN for such a response, and counts as the default, or 0, in the sum: see `counts`.
        """
        of_texts: dict[str, list[torch.Tensor]] = {}
        background: Future[None] = Future()

        def ask(is_classifier: bool) -> None:
            for name, reward in self.texts.items():
                if isinstance(reward, ClassifierReward) == is_classifier:
                    of_texts[name] = self._score_texts(name, answers, sizes)

        def ask_beside() -> None:
            try:
                background.set_result(ask(is_classifier=False))
            except BaseException as error:  # raised where it is waited for
                background.set_exception(error)

        def wait() -> None:
            ask(is_classifier=True)  # on this rank's device, which a thread would take from the other roles
            background.result()

        # A daemon: the program must be able to end while a reward hangs.
        thread = threading.Thread(target=ask_beside, name="rewards", daemon=True)
        if self.texts:
            with watchdog.phase("the texts of the responses", clock="reward"):
                answers, sizes = self._read(batches, texts), [len(batch) for batch in batches]
                thread.start()
        try:
            yield lambda models: self._add_up(models, batches, of_texts, wait)
        except StepRefused:
            if self.texts:
                thread.join()  # the run goes on: a reward is asked by one step at a time
            raise
        except BaseException:
            self.close()  # the run ends: whoever waits for a server or a process is told
            raise

    def _add_up(
        self,
        models: dict[str, Any],
        batches: Sequence[PackedBatch],
        of_texts: dict[str, list[torch.Tensor]],
        wait: Callable[[], None],
    ) -> Scores:
        found = {spec.name: models[spec.name].score(batches) for spec in self.specs if spec.name in models}
        if self.texts:
            with watchdog.phase("the rewards", clock="reward"):
                distributed.run_together(wait, RewardError)
        found |= {name: of_texts[name] for name in self.texts}
        if self.failures.are_borne:
            found = {n: [torch.where(x.isfinite(), x, torch.nan) for x in of] for n, of in found.items()}
            messages = distributed.gather_objects(self.failures.first)
            self.first_failure, self.failures.first = next(filter(None, messages), ""), ""
        total = [
            sum(spec.weight * self._real(found[spec.name][index]) for spec in self.specs).float()
            for index in range(len(batches))
        ]
        return {"scores": total} | {PREFIX + name: scores for name, scores in found.items()}

    def _real(self, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.double().cpu()
        if not self.failures.are_borne:
            return scores
        return torch.where(scores.isnan(), self.failures.default or 0.0, scores)

    def has_scores(self, batch: PackedBatch) -> torch.Tensor:
        """Return (B,) bool: every reward that has a weight gave this response a score."""
        found = torch.ones(len(batch), dtype=torch.bool)
        for spec in self.specs:
            if spec.weight and PREFIX + spec.name in batch.data:
                found &= ~batch.numbers(PREFIX + spec.name).isnan()
        return found

    def counts(self, batch: PackedBatch) -> torch.Tensor:
        """Return (B,) bool: False for responses without a score that no loss, mean or baseline may count."""
        is_masked = self.failures.are_borne and self.failures.default is None
        return self.has_scores(batch) if is_masked else torch.ones(len(batch), dtype=torch.bool)

    def close(self) -> None:
        """End processes and connections."""
        for reward in self.texts.values():
            reward.close()

    def _read(self, batches: Sequence[PackedBatch], texts: PromptTexts) -> Answers:
        assert self.decode is not None
        numbers = [number for batch in batches for number in batch.numbers("group_ids").tolist()]
        responses = [self.decode(ids) for batch in batches for ids in batch.sequences("response_ids")]
        return Answers([texts[n][0] for n in numbers], responses, [texts[n][1] for n in numbers])

    def _score_texts(self, name: str, answers: Answers, sizes: list[int]) -> list[torch.Tensor]:
        checked = checked_scores(name, self.texts[name].score(answers), answers, self.failures)
        return list(torch.tensor(checked, dtype=torch.float32).split(sizes))
