"""The same prompts, answered now and then: what the policy has become, told by texts.

# W prompts, P prompt
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from common.data.global_batches import GlobalBatches
from common.run_logger import RunLogger
from step3_ppo.roles import Actor

NUM_PROMPTS = 4
# The rollouts number their samples from 0 on; these draw by numbers of their own, the same ones every time,
# so that an answer changes by the weights alone.
FIRST_SAMPLE_ID = 2**40


@dataclass
class FixedPrompts:
    """A few prompts of the data; every rank answers all of them, the first one writes them down."""

    prompt_ids: torch.Tensor  # (W, P) int64, left-padded
    prompt_mask: torch.Tensor  # (W, P) bool, True for tokens
    interval: int

    @classmethod
    def first_of(cls, prompts: GlobalBatches, interval: int) -> "FixedPrompts":
        """Return the first rows of the data set, whose order no seed changes."""
        rows = [prompts.dataset[i] for i in range(min(NUM_PROMPTS, len(prompts.dataset)))]
        batch: dict[str, Any] = prompts.collate(rows)
        return cls(batch["prompt_ids"], batch["prompt_mask"].bool(), interval)

    def is_due(self, step: int) -> bool:
        """Return whether they are answered after this step (from 1)."""
        return step == 1 or step % self.interval == 0

    def answer(
        self, step: int, actor: Actor, logger: RunLogger, decode: Callable[[torch.Tensor], str]
    ) -> None:
        """Write the present policy's answers to samples.jsonl. Every rank must call this."""
        sample_ids = FIRST_SAMPLE_ID + torch.arange(len(self.prompt_ids))
        found = actor.generate(self.prompt_ids, self.prompt_mask, sample_ids)
        rows = zip(self.prompt_ids, self.prompt_mask, found.response_ids, found.response_mask, strict=True)
        for prompt, is_prompt, response, is_response in rows:
            texts = decode(prompt[is_prompt]), decode(response.cpu()[is_response.cpu()])
            logger.sample(step, prompt=texts[0], answer=texts[1], is_fixed=True)
