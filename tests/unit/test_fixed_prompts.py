"""--sample_interval: the same prompts and the same random numbers, so only the weights change an answer."""

from types import SimpleNamespace

import torch

from common.data.collators import PromptCollator
from common.data.global_batches import GlobalBatches
from step3_ppo.fixed_prompts import FIRST_SAMPLE_ID, NUM_PROMPTS, FixedPrompts

ROWS = [
    {"prompt_ids": list(range(1, n + 2)), "prompt_text": str(n), "row_id": n, "fields": "{}"}
    for n in range(NUM_PROMPTS + 3)
]


def batches(seed: int, rank: int = 0) -> GlobalBatches:
    return GlobalBatches(ROWS, PromptCollator(0), rows_per_micro_batch=1, rank=rank, world_size=2, seed=seed)


class EchoActor:
    """Answers with the prompt's tokens, doubled, behind which the padding is not read."""

    def __init__(self) -> None:
        self.calls: list[torch.Tensor] = []

    def generate(self, prompt_ids, prompt_mask, sample_ids):
        self.calls.append(sample_ids)
        ids = (prompt_ids * 2).flip(1)
        return SimpleNamespace(response_ids=ids, response_mask=prompt_mask.flip(1))


def test_they_are_the_first_rows_whatever_the_seed_and_the_rank():
    found = [FixedPrompts.first_of(batches(seed, rank), 5) for seed, rank in ((1, 0), (2, 1))]
    assert torch.equal(found[0].prompt_ids, found[1].prompt_ids)
    assert found[0].prompt_mask.sum(1).tolist() == [1, 2, 3, 4]


def test_they_are_due_at_first_and_every_interval():
    fixed = FixedPrompts.first_of(batches(1), 4)
    assert [step for step in range(1, 13) if fixed.is_due(step)] == [1, 4, 8, 12]


def test_answers_are_written_without_padding_and_drawn_alike_each_time():
    fixed, actor, written = FixedPrompts.first_of(batches(1), 4), EchoActor(), []
    logger = SimpleNamespace(sample=lambda step, **fields: written.append((step, fields)))
    for step in (1, 4):
        fixed.answer(step, actor, logger, lambda ids: " ".join(map(str, ids.tolist())))
    assert written[1] == (1, {"prompt": "1 2", "answer": "4 2", "is_fixed": True})
    assert [step for step, _ in written] == [1] * NUM_PROMPTS + [4] * NUM_PROMPTS
    assert torch.equal(*actor.calls)
    assert actor.calls[0].tolist() == [FIRST_SAMPLE_ID + i for i in range(NUM_PROMPTS)]
