"""Sampling agrees with transformers and with the training forward, whatever the batch."""

import pytest
import torch
from chi_square import NUM_DRAWS, SMALLEST_P_VALUE, p_value
from families import DECODERS
from transformers import AutoModelForCausalLM, GPTNeoConfig, GPTNeoForCausalLM

from common.generation.decode import SamplingOptions
from common.generation.generate import Generator
from common.generation.inference_module import share_weights
from common.models.loading import compute_logits
from common.models.output_head import token_logprobs


def generate(model, *inputs, **more):
    return Generator(model).generate(*inputs, **more)


LENGTHS = (3, 7, 5, 12)


def make_prompts(vocab_size: int, lengths=LENGTHS) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    width = max(lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = torch.randint(1, vocab_size, (length,), generator=generator)
        mask[row, width - length :] = 1
    return ids, mask


def load(folder: str):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def options(**changes) -> SamplingOptions:
    return SamplingOptions(**({"max_new_tokens": 12, "stop_token_id": 0, "pad_token_id": 0} | changes))


@pytest.mark.parametrize("family", DECODERS)
def test_greedy_text_of_left_padded_prompts_is_that_of_transformers_one_by_one(family, tiny_model_folder):
    model = load(tiny_model_folder(family))
    ids, mask = make_prompts(model.config.vocab_size)
    # The stop token is one that greedy decoding meets in the middle of some row, and it is the pad token too.
    free = generate(model, ids, mask, torch.arange(4), options(do_sample=False, stop_token_id=-1))
    stop = int(free.response_ids[1, 4])
    ours = generate(
        model, ids, mask, torch.arange(4), options(do_sample=False, stop_token_id=stop, pad_token_id=stop)
    )
    for row, length in enumerate(LENGTHS):
        prompt = ids[row : row + 1, -length:]
        expected = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=stop,
            pad_token_id=stop,
        )[0, length:]
        assert ours.response_ids[row][ours.response_mask[row]].tolist() == expected.tolist()
        assert bool(ours.is_finished[row]) == (int(expected[-1]) == stop)
    assert ours.is_finished.any()


@pytest.mark.parametrize("family", DECODERS)
def test_logprobs_are_those_of_one_training_forward(family, tiny_model_folder):
    model = load(tiny_model_folder(family))
    ids, mask = make_prompts(model.config.vocab_size)
    out = generate(model, ids, mask, torch.arange(4), options(temperature=1.3, top_k=20, seed=5))
    whole = torch.cat([ids, out.response_ids], dim=1)
    whole_mask = torch.cat([mask, out.response_mask.long()], dim=1)
    logits = compute_logits(model, whole, whole_mask, num_last=out.response_ids.shape[1] + 1)[:, :-1]
    expected = token_logprobs(logits, out.response_ids, temperature=1.3)
    torch.testing.assert_close(out.logprobs, torch.where(out.response_mask, expected, 0.0), atol=1e-5, rtol=0)
    assert (out.logprobs[out.response_mask] < 0).all()


@pytest.mark.parametrize("family", DECODERS)
def test_a_text_does_not_depend_on_its_batch(family, tiny_model_folder):
    model = load(tiny_model_folder(family))
    ids, mask = make_prompts(model.config.vocab_size)
    together = generate(model, ids, mask, torch.arange(4), options(seed=3))
    order = torch.tensor([2, 0, 3, 1])
    shuffled = generate(model, ids[order], mask[order], order, options(seed=3))
    for place, row in enumerate(order.tolist()):
        alone = generate(
            model, ids[row : row + 1, -LENGTHS[row] :], mask[row : row + 1, -LENGTHS[row] :],
            torch.tensor([row]), options(seed=3),
        )  # fmt: skip
        text = together.response_ids[row][together.response_mask[row]].tolist()
        assert shuffled.response_ids[place][shuffled.response_mask[place]].tolist() == text
        assert alone.response_ids[0][alone.response_mask[0]].tolist() == text
    other_seed = generate(model, ids, mask, torch.arange(4), options(seed=4))
    assert other_seed.response_ids.tolist() != together.response_ids.tolist()


def test_padding_holds_any_id_and_the_limit_leaves_a_response_unfinished(tiny_model_folder):
    model = load(tiny_model_folder("gpt2"))
    ids, mask = make_prompts(model.config.vocab_size)
    first = generate(model, ids, mask, torch.arange(4), options(stop_token_id=-1))
    second = generate(
        model, torch.where(mask.bool(), ids, 9), mask, torch.arange(4), options(stop_token_id=-1)
    )
    assert first.response_ids.equal(second.response_ids)
    assert not first.is_finished.any() and first.response_mask.all() and first.response_ids.shape == (4, 12)


def test_vocabulary_padding_is_never_sampled_and_has_no_probability(tiny_model_folder):
    model = load(tiny_model_folder("llama"))
    ids, mask = make_prompts(50)
    out = generate(model, ids, mask, torch.arange(4), options(num_valid_tokens=50, temperature=5.0))
    assert int(out.response_ids.max()) < 50
    logits = compute_logits(model, torch.cat([ids, out.response_ids], 1), torch.ones(4, 24).long())
    rest = torch.log_softmax(logits[..., :50].float() / 5.0, -1)
    assert rest.exp().sum(-1).allclose(torch.ones(()))


@pytest.mark.parametrize("family", ["llama", "bloom", "gemma2"])
@pytest.mark.parametrize("num_slots", [1, 2, 3, 64])
def test_slots_change_no_text(family, num_slots, tiny_model_folder):
    model = load(tiny_model_folder(family))
    ids, mask = make_prompts(model.config.vocab_size)
    chosen = options(seed=3, top_k=40, top_p=0.9, temperature=1.2)
    limits = torch.tensor([2, 12, 5, 9])
    expected = generate(model, ids, mask, torch.arange(4), chosen, limits=limits)
    found = Generator(model, num_slots=num_slots).generate(ids, mask, torch.arange(4), chosen, limits=limits)
    assert found.response_ids.equal(expected.response_ids)
    assert found.response_mask.equal(expected.response_mask) and found.is_finished.equal(expected.is_finished)
    assert (found.response_mask.sum(1) <= limits).all()
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("num_slots", [1, 2, 4, 64])
def test_samples_of_a_prompt_share_its_prefill(num_slots, tiny_model_folder):
    model = load(tiny_model_folder("qwen2"))
    ids, mask = make_prompts(model.config.vocab_size)
    each, sample_ids = 3, torch.arange(12)
    apart = generate(
        model, ids.repeat_interleave(each, 0), mask.repeat_interleave(each, 0), sample_ids, options(seed=9)
    )
    num_read = []
    generator = Generator(model, num_slots=num_slots)
    read = generator.read_prompts
    generator.read_prompts = lambda cache, ids, *more: num_read.append(len(ids)) or read(cache, ids, *more)
    together = generator.generate(ids, mask, sample_ids, options(seed=9), num_samples=each)
    assert together.response_ids.equal(apart.response_ids)
    torch.testing.assert_close(together.logprobs, apart.logprobs, atol=1e-5, rtol=0)
    # Every prompt once, unless its last running sample had left before the next could enter.
    assert sum(num_read) == 4 if num_slots == 64 else sum(num_read) <= 12
    assert len({tuple(row) for row in together.response_ids.tolist()}) > 4, "samples of a prompt differ"


def test_truncation_keeps_both_log_probabilities(tiny_model_folder):
    model = load(tiny_model_folder("llama"))
    ids, mask = make_prompts(model.config.vocab_size)
    out = generate(model, ids, mask, torch.arange(4), options(top_k=5, stop_token_id=-1))
    whole = torch.cat([ids, out.response_ids], dim=1)
    all_mask = torch.cat([mask, torch.ones_like(out.response_ids)], dim=1)
    logits = compute_logits(model, whole, all_mask, num_last=13)[:, :-1]
    kept = logits.masked_fill(logits < logits.topk(5).values[..., -1:], -torch.inf)
    expected = torch.log_softmax(kept.double(), -1).gather(-1, out.response_ids.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(out.truncated_logprobs.double(), expected, atol=1e-5, rtol=0)
    assert (out.truncated_logprobs > out.logprobs).all()
    whole_out = generate(model, ids, mask, torch.arange(4), options())
    assert whole_out.truncated_logprobs.equal(whole_out.logprobs)


def test_the_block_is_used_again_and_grows_when_it_must(tiny_model_folder):
    model = load(tiny_model_folder("llama"))
    ids, mask = make_prompts(model.config.vocab_size)
    generator = Generator(model, num_slots=4)
    first = generator.generate(ids, mask, torch.arange(4), options())
    step = generator._step
    assert generator.generate(ids, mask, torch.arange(4), options()).response_ids.equal(first.response_ids)
    assert generator._step is step
    longer = torch.cat([ids, ids], dim=1), torch.cat([mask, mask], dim=1)
    generator.generate(*longer, torch.arange(4), options())
    assert generator._step is not step and generator._step.cache.max_length == 24 + 12


def test_draws_follow_the_distribution(tiny_model_folder):
    model = load(tiny_model_folder("llama"))
    prompt = torch.tensor([[5, 9, 2]])
    one_token = options(max_new_tokens=1, stop_token_id=-1, temperature=0.7, top_k=12)
    out = Generator(model, num_slots=512).generate(
        prompt, torch.ones_like(prompt), torch.arange(NUM_DRAWS), one_token, num_samples=NUM_DRAWS
    )
    with torch.no_grad():
        logits = compute_logits(model, prompt, torch.ones_like(prompt), num_last=1)[0, -1].double() / 0.7
    kept = logits.masked_fill(logits < logits.topk(12).values[-1], -torch.inf)
    counts = torch.bincount(out.response_ids[:, 0], minlength=len(logits))
    assert int((counts > 0).sum()) == 12
    chosen = kept.isfinite()
    assert p_value(counts[chosen], NUM_DRAWS * torch.softmax(kept[chosen], -1)) > SMALLEST_P_VALUE


def test_gpt_neo_beyond_its_window_is_refused():
    config = GPTNeoConfig(
        hidden_size=16, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]], window_size=8,
        vocab_size=64, max_position_embeddings=64, intermediate_size=32,
    )  # fmt: skip
    model = GPTNeoForCausalLM(config).eval()
    ids = torch.randint(3, 64, (1, 4))
    options = SamplingOptions(max_new_tokens=4, stop_token_id=-1, pad_token_id=0)
    sample_ids = torch.zeros(1, dtype=torch.int64)
    found = Generator(share_weights(model)).generate(ids, torch.ones_like(ids).bool(), sample_ids, options)
    assert found.response_ids.shape == (1, 4)
    longer = SamplingOptions(max_new_tokens=5, stop_token_id=-1, pad_token_id=0)
    with pytest.raises(ValueError, match="local layers see 8 tokens .* may have 9.* leave out"):
        Generator(share_weights(model)).generate(ids, torch.ones_like(ids).bool(), sample_ids, longer)
