"""The hybrid engine as DeepSpeed's RolloutEngine: its texts, its layout, its random numbers."""

from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.rollout import (
    HybridEngineRollout,
    ResponseTokenBatch,
    RolloutBatch,
    RolloutEngine,
    RolloutRequest,
    SamplingConfig,
)
from hybrid_engines import build

from common.generation.rollout_engine import HybridRolloutEngine
from common.ranks import distributed

pytestmark = pytest.mark.usefixtures("process_group")
LENGTHS = (3, 7, 5)
WIDTH = max(LENGTHS)
GREEDY = {"max_new_tokens": 12, "temperature": 0.0}


def make_request() -> RolloutRequest:
    generator = torch.Generator().manual_seed(1)
    mask = (torch.arange(WIDTH) >= WIDTH - torch.tensor(LENGTHS)[:, None]).long()
    return RolloutRequest(torch.randint(1, 300, mask.shape, generator=generator) * mask, mask)


def make_tokenizer(eos: int | None = 0, pad: int | None = 0) -> SimpleNamespace:
    class Tokenizer(SimpleNamespace):
        def __len__(self) -> int:
            return 320

    return Tokenizer(eos_token_id=eos, pad_token_id=pad)


def responses(batch: RolloutBatch) -> list[list[int]]:
    """The response tokens that count, row by row."""
    rows = zip(batch.input_ids, batch.attention_mask.bool(), batch.response_start_idx, strict=True)
    return [ids[start:][mask[start:]].tolist() for ids, mask, start in rows]


def stop_token(hybrid) -> int:
    """A token that greedy decoding meets in the middle of some row."""
    free = HybridRolloutEngine(hybrid, make_tokenizer(eos=None)).generate(
        make_request(), SamplingConfig(**GREEDY)
    )
    return responses(free)[1][4]


@pytest.mark.parametrize(
    ("stage", "options", "more"),
    [
        (0, {}, {"n_samples_per_prompt": 2}),
        (3, {}, {}),
        (3, {"gather_by_layer": True}, {"continuous_batch_size": 2}),
    ],
)
def test_greedy_sequences_are_those_of_deepspeeds_own_engine(stage, options, more, tiny_model_folder):
    hybrid = build(tiny_model_folder("llama"), stage, **options)
    stop = stop_token(hybrid)
    for tokenizer in (make_tokenizer(stop, stop), make_tokenizer(stop, None)):
        sampling = SamplingConfig(**GREEDY, **more)
        ours = HybridRolloutEngine(hybrid, tokenizer).generate(make_request(), sampling)
        # DeepSpeed 0.19's own continuous batching does not run with the cache classes of transformers 5.
        sampling.continuous_batch_size = None
        expected = HybridEngineRollout(hybrid.engine, tokenizer).generate(make_request(), sampling)
        width = ours.seq_len
        assert width <= expected.seq_len
        assert ours.input_ids.equal(expected.input_ids[:, :width])
        assert ours.attention_mask.equal(expected.attention_mask[:, :width])
        assert not expected.attention_mask[:, width:].any()
        assert ours.response_start_idx.equal(expected.response_start_idx)
        assert stop in responses(ours)[more.get("n_samples_per_prompt", 1)], "eos counts, though it is pad"


def test_a_row_holds_its_prompt_and_one_of_its_samples(tiny_model_folder):
    engine = HybridRolloutEngine(build(tiny_model_folder("gpt2"), 0), make_tokenizer(), seed=3)
    assert isinstance(engine, RolloutEngine) and engine.name == "triptych_hybrid_engine"
    request = make_request()
    batch = engine.generate(request, SamplingConfig(max_new_tokens=6, n_samples_per_prompt=4))
    assert batch.batch_size == 12 and batch.response_start_idx.tolist() == [WIDTH] * 12
    assert batch.input_ids[:, :WIDTH].equal(request.prompt_ids.repeat_interleave(4, dim=0))
    assert batch.attention_mask[:, :WIDTH].equal(request.prompt_attention_mask.repeat_interleave(4, dim=0))
    assert len(set(map(tuple, responses(batch)))) == 12, "every sample has random numbers of its own"


def test_what_is_sampled_counts_by_its_length_whatever_its_ids(tiny_model_folder):
    hybrid = build(tiny_model_folder("llama"), 0)
    pad = stop_token(hybrid)  # greedy decoding meets it, and it ends nothing
    engine = HybridRolloutEngine(hybrid, make_tokenizer(eos=None, pad=pad))
    batch = engine.generate(make_request(), SamplingConfig(**GREEDY))
    assert batch.attention_mask[:, WIDTH:].all() and pad in responses(batch)[1]


def test_the_batch_gives_deepspeeds_response_targets(tiny_model_folder):
    hybrid = build(tiny_model_folder("llama"), 0)
    stop = stop_token(hybrid)
    engine = HybridRolloutEngine(hybrid, make_tokenizer(stop, stop))
    batch = engine.generate(make_request(), SamplingConfig(**GREEDY))
    targets = ResponseTokenBatch.from_rollout(batch)
    found = [ids[mask].tolist() for ids, mask in zip(targets.target_ids, targets.response_mask, strict=True)]
    assert found == responses(batch)
    assert len(found[1]) == found[1].index(stop) + 1 < 12 and len(found[0]) == 12


def test_calls_and_ranks_draw_new_numbers_that_the_seed_repeats(tiny_model_folder, monkeypatch):
    folder, sampling = tiny_model_folder("llama"), SamplingConfig(max_new_tokens=8, top_k=-1, top_p=0.9)

    def two_calls(**changes) -> list[list[int]]:
        engine = HybridRolloutEngine(build(folder, 0), make_tokenizer(), **({"seed": 5} | changes))
        return [row for _ in range(2) for row in responses(engine.generate(make_request(), sampling))]

    rows = two_calls()
    assert rows[:3] != rows[3:] and rows == two_calls() and rows != two_calls(seed=6)

    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    ids = []
    for rank in range(2):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        engine = HybridRolloutEngine(SimpleNamespace(), make_tokenizer())
        ids += [engine._next_sample_ids(3 + rank), engine._next_sample_ids(4)]
    assert len(torch.cat(ids).unique()) == 3 + 4 + 4 + 4


def test_the_sequences_that_run_together_are_bounded_and_change_no_text(tiny_model_folder):
    texts = []
    for bound in (None, 1, 2):
        engine = HybridRolloutEngine(build(tiny_model_folder("llama"), 0), make_tokenizer())
        sampling = SamplingConfig(8, n_samples_per_prompt=2, continuous_batch_size=bound)
        texts.append(responses(engine.generate(make_request(), sampling)))
        assert engine.hybrid.generator._step.cache.num_slots == (bound or 6)
    assert texts[0] == texts[1] == texts[2]


def test_new_weights_are_seen_without_a_sync_and_shutdown_frees_the_cache(tiny_model_folder):
    hybrid = build(tiny_model_folder("llama"), 0)
    engine = HybridRolloutEngine(hybrid, make_tokenizer())
    before = responses(engine.generate(make_request(), SamplingConfig(**GREEDY)))
    with torch.no_grad():
        for parameter in hybrid.engine.module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    engine.sync_weights(1)
    after = responses(engine.generate(make_request(), SamplingConfig(**GREEDY)))
    assert before != after
    engine.shutdown()
    assert hybrid.generator._step is None
    assert responses(engine.generate(make_request(), SamplingConfig(**GREEDY))) == after


def test_transformers_generate_serves_too_but_has_no_slots(tiny_model_folder):
    folder = tiny_model_folder("llama")
    plain, ours = (
        HybridRolloutEngine(build(folder, 0, enabled=enabled), make_tokenizer(), seed=2)
        for enabled in (False, True)
    )
    sampling = SamplingConfig(8, n_samples_per_prompt=2)
    assert responses(plain.generate(make_request(), sampling)) == responses(
        ours.generate(make_request(), sampling)
    )
    with pytest.raises(ValueError, match=r"continuous_batch_size 2 needs HybridOptions\(enabled=True\)"):
        plain.generate(make_request(), SamplingConfig(8, continuous_batch_size=2))


def test_what_cannot_be_generated_is_named(tiny_model_folder):
    engine = HybridRolloutEngine(build(tiny_model_folder("llama"), 0), make_tokenizer())
    for name in ("max_new_tokens", "n_samples_per_prompt", "continuous_batch_size"):
        sampling = SamplingConfig(**({"max_new_tokens": 4} | {name: 0}))
        with pytest.raises(ValueError, match=f"{name} 0 must be at least 1"):
            engine.generate(make_request(), sampling)
    request = make_request()
    request = RolloutRequest(request.prompt_ids.flip(1), request.prompt_attention_mask.flip(1))
    with pytest.raises(ValueError, match="prompt 0 ends with padding.*pad prompts on the left"):
        engine.generate(request, SamplingConfig(4))
    with pytest.raises(ValueError, match="neither pad_token nor eos_token"):
        HybridRolloutEngine(engine.hybrid, make_tokenizer(None, None))
