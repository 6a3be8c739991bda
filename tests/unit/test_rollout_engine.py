"""The hybrid engine as DeepSpeed's RolloutEngine: its texts, its layout, its random numbers."""

from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.rollout import HybridEngineRollout, RolloutBatch, RolloutRequest, SamplingConfig
from hybrid_engines import build

from common.generation.rollout_engine import HybridRolloutEngine
from common.ranks import distributed

pytestmark = pytest.mark.usefixtures("process_group")
LENGTHS = torch.tensor([3, 7, 5])
GREEDY = SamplingConfig(max_new_tokens=12, temperature=0.0, n_samples_per_prompt=2)


class Tokenizer(SimpleNamespace):
    """What the engine asks of a tokenizer."""

    def __len__(self) -> int:
        return 320


def make_request() -> RolloutRequest:
    mask = (torch.arange(7) >= 7 - LENGTHS[:, None]).long()
    return RolloutRequest(torch.randint(1, 300, mask.shape, generator=torch.manual_seed(1)) * mask, mask)


def responses(batch: RolloutBatch) -> list[list[int]]:
    """The response tokens that count, row by row."""
    rows = zip(batch.input_ids, batch.attention_mask.bool(), batch.response_start_idx, strict=True)
    return [ids[start:][mask[start:]].tolist() for ids, mask, start in rows]


@pytest.mark.parametrize("stage", [0, 3])
def test_greedy_sequences_are_those_of_deepspeeds_own_engine(stage, tiny_model_folder):
    hybrid = build(tiny_model_folder("llama"), stage)
    free = HybridRolloutEngine(hybrid, Tokenizer(eos_token_id=None, pad_token_id=0))
    stop = responses(free.generate(make_request(), GREEDY))[2][4]  # met in the middle of a row
    tokenizer = Tokenizer(eos_token_id=stop, pad_token_id=None)
    ours = HybridRolloutEngine(hybrid, tokenizer).generate(make_request(), GREEDY)
    expected = HybridEngineRollout(hybrid.engine, tokenizer).generate(make_request(), GREEDY)
    assert ours.input_ids.equal(expected.input_ids[:, : ours.seq_len])
    assert ours.attention_mask.equal(expected.attention_mask[:, : ours.seq_len])
    assert ours.response_start_idx.equal(expected.response_start_idx)
    assert stop in responses(ours)[2], "eos counts, though it is pad"


def test_calls_and_ranks_sample_anew_and_the_seed_repeats_them(tiny_model_folder, monkeypatch):
    hybrid, tokenizer = build(tiny_model_folder("llama"), 0), Tokenizer(eos_token_id=0, pad_token_id=0)
    sampling = SamplingConfig(max_new_tokens=8, top_k=-1, top_p=0.9)

    def two_calls(seed: int) -> list[list[int]]:
        engine = HybridRolloutEngine(hybrid, tokenizer, seed=seed)
        return [row for _ in range(2) for row in responses(engine.generate(make_request(), sampling))]

    rows = two_calls(5)
    assert rows[:3] != rows[3:] and rows == two_calls(5) and rows != two_calls(6)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    ids = []
    for rank in range(2):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        engine = HybridRolloutEngine(hybrid, tokenizer)
        ids += [engine._next_sample_ids(3 + rank), engine._next_sample_ids(4)]
    assert len(torch.cat(ids).unique()) == 3 + 4 + 4 + 4


def test_what_cannot_be_generated_is_named(tiny_model_folder):
    hybrid, request = build(tiny_model_folder("llama"), 0), make_request()
    engine = HybridRolloutEngine(hybrid, Tokenizer(eos_token_id=0, pad_token_id=0))
    padded_right = RolloutRequest(request.prompt_ids.flip(1), request.prompt_attention_mask.flip(1))
    with pytest.raises(ValueError, match="prompt 0 ends with padding.*pad prompts on the left"):
        engine.generate(padded_right, GREEDY)
    with pytest.raises(ValueError, match="neither pad_token nor eos_token"):
        HybridRolloutEngine(hybrid, Tokenizer(eos_token_id=None, pad_token_id=None))
