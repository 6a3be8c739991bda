"""Sampling agrees with transformers and with the training forward, whatever the batch."""

import pytest
import torch
from families import DECODERS
from transformers import AutoModelForCausalLM

from common.decode_state import SamplingOptions
from common.generate import generate
from common.models import compute_logits
from common.tensor_ops import token_logprobs

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
