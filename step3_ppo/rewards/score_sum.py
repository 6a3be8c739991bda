"""What a response is worth: several rewards, each scored and kept on its own, weighted and added up."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from common import distributed
from common.data.packed_batch import PackedBatch
from common.watch import watchdog
from step3_ppo.rewards.reward_specs import RewardSpec
from step3_ppo.rewards.text_rewards import Answers, RewardError, TextReward, checked_scores

# The prompt's text and the fields of its row, by the prompt's number.
PromptTexts = dict[int, tuple[str, dict[str, Any]]]
PREFIX = "score/"  # of a record's key for one reward's scores


@dataclass
class ScoreSum:
    """The rewards of a run: reward models read token ids and come with the roles, the others read text."""

    specs: Sequence[RewardSpec]
    texts: dict[str, TextReward] = field(default_factory=dict)  # by the spec's name
    decode: Callable[[torch.Tensor], str] | None = None

    @property
    def reads_texts(self) -> bool:
        """Whether a reward wants the prompts' texts."""
        return bool(self.texts)

    def score(
        self, models: dict[str, Any], records: Sequence[PackedBatch], texts: PromptTexts
    ) -> dict[str, list[torch.Tensor]]:
        """Return {"scores": the weighted sum, "score/NAME": one reward's}: for each record (B,) fp32.

        `models` are the Reward roles by name. Every rank must call this with as many records. Raises
        RewardError, naming the reward, when one gives something other than a finite number a response.
        """
        found = {spec.name: models[spec.name].score(records) for spec in self.specs if spec.name in models}
        if self.texts:
            answers = [self._read(record, texts) for record in records]
            with watchdog.phase("the rewards", clock="reward"), failing_together():
                for name, reward in self.texts.items():
                    found[name] = self._score_texts(name, reward, answers)
        total = [
            sum(spec.weight * found[spec.name][index].double().cpu() for spec in self.specs).float()
            for index in range(len(records))
        ]
        return {"scores": total} | {PREFIX + name: scores for name, scores in found.items()}

    def close(self) -> None:
        """End processes and connections."""
        for reward in self.texts.values():
            reward.close()

    def _read(self, record: PackedBatch, texts: PromptTexts) -> Answers:
        assert self.decode is not None
        of_prompts = [texts[number] for number in record.numbers("group_ids").tolist()]
        responses = [self.decode(ids) for ids in record.sequences("response_ids")]
        return Answers([text for text, _ in of_prompts], responses, [row for _, row in of_prompts])

    def _score_texts(self, name: str, reward: TextReward, answers: Sequence[Answers]) -> list[torch.Tensor]:
        whole = Answers(
            *([x for part in answers for x in getattr(part, f)] for f in ("prompts", "responses", "rows"))
        )
        scores = torch.tensor(checked_scores(name, reward.score(whole), whole), dtype=torch.float32)
        return list(scores.split([len(part) for part in answers]))


@contextmanager
def failing_together() -> Iterator[None]:
    """Raise the first rank's error on every rank: none waits for one that has left. Every rank must enter and
    leave it.
    """
    error = None
    try:
        yield
    except Exception as failure:  # a classifier may run out of memory, too
        error = failure
    messages = [m for m in distributed.gather_objects(error and f"{error}") if m]
    if error is not None:
        raise error
    if messages:
        raise RewardError(messages[0])
