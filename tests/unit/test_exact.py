"""--exact: sampler and trainer are equal to the bit, whatever is computed beside a token."""

import pytest
import torch
import torch.nn.functional as F

from common.generation.decode import SamplingOptions
from common.generation.generate import Generator, PromptBatch
from common.generation.inference_module import share_weights
from common.models import exact
from common.models.loading import ModelOptions, load_causal_lm
from common.models.model_inputs import build_model_inputs
from common.models.policy_model import PolicyModel

NUM, PROMPT, ANSWER = 6, 100, 23
FAMILIES = ["llama", "qwen2", "opt", "gpt2", "mistral_window", "gpt_neox"]


@pytest.fixture(autouse=True)
def exactly():
    exact.use(PROMPT + ANSWER)
    yield
    exact.use(0)


def by_plain_loop(query, key, value, is_seen):
    """Attention in float64, query by query."""
    output = torch.zeros(query.shape[0], query.shape[2], query.shape[1], query.shape[3], dtype=torch.float64)
    group = query.shape[1] // key.shape[1]
    for row in range(query.shape[0]):
        for head in range(query.shape[1]):
            for number in range(query.shape[2]):
                seen = is_seen.expand(len(query), -1, -1, -1)[row, 0, number]
                k, v = (x[row, head // group, seen].double() for x in (key, value))
                weights = (k @ query[row, head, number].double() / query.shape[3] ** 0.5).softmax(0)
                output[row, number, head] = weights @ v
    return output


def test_attention_is_that_of_a_plain_loop():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 37, 8, generator=generator) for heads in (4, 2, 2))
    for window in (None, 5):
        seen = exact.seen_keys(None, 37, 37, torch.device("cpu"), window)
        rows = torch.arange(37)
        back = rows.unsqueeze(1) - rows
        assert seen[0, 0].equal((back >= 0) & (back < (window or 99)))
        expected = by_plain_loop(query, key, value, seen)
        torch.testing.assert_close(
            exact.attend(query, key, value, seen).double(), expected, atol=1e-5, rtol=0
        )
    last = exact.seen_keys(None, 3, 37, torch.device("cpu"))
    assert last[0, 0].sum(1).tolist() == [35, 36, 37], "the queries are the last ones"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_of_a_product_does_not_depend_on_the_others(dtype):
    hidden, weight, bias = (
        torch.randn(70, 96).to(dtype),
        torch.randn(160, 96).to(dtype),
        torch.randn(160).to(dtype),
    )
    whole = F.linear(hidden, weight, bias)
    for first, last in ((0, 1), (69, 70), (3, 4), (5, 68)):
        assert F.linear(hidden[first:last], weight, bias).equal(whole[first:last])
    assert F.linear(hidden.view(7, 10, 96), weight, bias).equal(whole.view(7, 10, 160))
    assert F.linear(hidden[:0], weight).shape == (0, 160)
    exact.use(0)
    torch.testing.assert_close(F.linear(hidden, weight, bias), whole)


def gap(model, num_slots, is_packed):
    """The answers, and the largest difference of their log-probabilities from the trainer's."""
    ids = torch.randint(3, 300, (NUM, PROMPT), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids, dtype=torch.bool)
    for row in range(NUM):
        mask[row, : 7 * row] = False
    options = SamplingOptions(ANSWER, stop_token_id=-1, pad_token_id=0)
    generator = Generator(share_weights(model), num_slots=num_slots)
    sampled = generator.generate(PromptBatch(ids, mask, torch.arange(NUM)), options)
    rows = [torch.cat([row[m], a]) for row, m, a in zip(ids, mask, sampled.response_ids, strict=True)]
    lengths = torch.tensor([len(row) for row in rows])
    is_scored = torch.cat([torch.arange(len(row)) >= len(row) - ANSWER for row in rows])
    inputs = build_model_inputs(torch.cat(rows), lengths, is_packed=is_packed)
    policy = PolicyModel(model, num_valid_tokens=320)
    with torch.no_grad():
        logprobs, _ = policy(inputs, inputs.slots_before(is_scored), torch.cat(rows)[is_scored])
    return sampled, float((logprobs.view(NUM, ANSWER) - sampled.logprobs).abs().max())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sampler_and_trainer_are_equal_to_the_bit(family, dtype, tiny_model_folder):
    model = load_causal_lm(ModelOptions(tiny_model_folder(family), dtype), 320).eval()
    sampled, first_gap = gap(model, 1, is_packed=True)
    assert first_gap == 0.0
    for num_slots, is_packed in ((2, False), (NUM, True)):
        again, other_gap = gap(model, num_slots, is_packed=is_packed)
        assert other_gap == 0.0
        assert again.response_ids.equal(sampled.response_ids) and again.logprobs.equal(sampled.logprobs)


def test_as_usual_bf16_differs(tiny_model_folder):
    """Else the tests above show nothing."""
    exact.use(0)
    model = load_causal_lm(ModelOptions(tiny_model_folder("llama"), "bf16"), 320).eval()
    assert gap(model, NUM, is_packed=True)[1] > 1e-3


def test_gradients_are_those_of_the_usual_way(tiny_model_folder):
    model = load_causal_lm(ModelOptions(tiny_model_folder("llama"), "fp32"), 320).train()
    ids = torch.randint(3, 300, (40,), generator=torch.Generator().manual_seed(1))
    inputs = build_model_inputs(ids, torch.tensor([11, 29]), is_packed=True)
    policy = PolicyModel(model, num_valid_tokens=320)
    gradients = []
    for length in (PROMPT + ANSWER, 0):
        exact.use(length)
        model.zero_grad()
        policy(inputs, torch.arange(39), ids[1:])[0].sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=2e-4, rtol=1e-4)


def test_a_model_with_an_attention_of_its_own_is_refused(tiny_model_folder):
    with pytest.raises(
        ValueError, match="--exact does not support the attention of bloom; leave the flag out"
    ):
        load_causal_lm(ModelOptions(tiny_model_folder("bloom"), "fp32"), 320)


def test_more_keys_than_it_was_set_up_for_are_an_error():
    exact.use(40)
    states = [torch.zeros(1, 1, 65, 8) for _ in range(3)]
    with pytest.raises(AssertionError, match="65 keys, but --exact was set up for 64"):
        exact.attend(*states, exact.seen_keys(None, 65, 65, torch.device("cpu")))
