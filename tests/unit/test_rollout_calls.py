"""What a rollout hands on: how sequences stand to the cuts, ranks to the numbers of prompts; and what of it
an evaluation asks for.
"""

import pytest
from test_global_batches import as_rank
from test_rollout import EndlessPrompts, FakeActor, build

from common.ranks import distributed
from step3_ppo.evaluation import FIRST_NUMBER, Evaluation


@pytest.mark.parametrize(
    ("layout", "num_passes"), [([], 5), (["is_packed"], 4), (["is_packed", "shares_prompts"], 3)]
)
def test_passes_are_cut_as_the_actor_lays_sequences(layout, num_passes, monkeypatch):
    """Rows of 4, 5, 5, 6, 2 and 3 tokens: padded, packed, or groups of 6, 7 and 4 that share prompts."""
    for name in layout:
        monkeypatch.setattr(FakeActor, name, True)
    rollout, asked = build(caps=(64, 7)), []
    reward = rollout.roles.rewards["model"]
    score = reward.score
    monkeypatch.setattr(reward, "score", lambda parts: asked.append(parts) or score(parts))
    assert rollout.collect(EndlessPrompts(), version=0).numbers("scores").tolist() == list(range(6))
    assert len(asked[0]) == num_passes


def test_prompts_are_numbered_over_the_ranks_batch_by_batch():
    """Three a batch: those of the first rank, of the second, then of the first again."""
    prompts, numbers = EndlessPrompts(), []
    for rank in range(2):
        with as_rank(rank, 2):
            batch, texts = build().sample([*next(prompts), *next(prompts)], 0, 2, 12)
        assert list(texts) == sorted(set(batch.numbers("group_ids").tolist()))
        numbers.append(list(texts))
    assert numbers == [[12, 13, 14, 18, 19, 20], [15, 16, 17, 21, 22, 23]]


def test_what_is_not_trained_on_is_scored_over_all_tokens():
    """Though what is trained on is scored among those that the sampler could draw."""
    rollout = build(replay_sampling_support=True)
    answers, texts = rollout.sample(next(EndlessPrompts()), 0, 2, 0)
    assert "support_ids" not in rollout.score(answers, texts, is_trained_on=False).data


def test_two_ranks_answer_each_prompt_of_an_evaluation_once(monkeypatch):
    """The second has two of five, and scores as many rows as the first."""
    texts = {"prompt_text": "", "row_id": "rows:1", "fields": "{}", "messages": "[]"}
    rows = [{"prompt_ids": [6, 7, 8 + i]} | texts for i in range(5)]
    monkeypatch.setattr(distributed, "gather_objects", lambda value: [value])
    monkeypatch.setattr(distributed, "max_float", lambda value: max(value, 3.0))
    found, num_scored = {}, []
    for rank in range(2):
        rollout = build()

        def score(answers, *texts, all_of_it=rollout.score, **how):
            num_scored.append(len(answers))
            return all_of_it(answers, *texts, **how)

        monkeypatch.setattr(rollout, "score", score)
        with as_rank(rank, 2):
            batch = Evaluation(rollout.args, rollout, None, rows, 1)._sample(0)
        found |= dict(zip(batch.ids, [ids.tolist() for ids in batch.sequences("prompt_ids")], strict=True))
    assert found == {FIRST_NUMBER + i: [6, 7, 8 + i] for i in range(5)} and num_scored == [3, 3]
