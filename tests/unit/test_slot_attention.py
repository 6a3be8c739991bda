"""flash-attn's key/value-cache kernel under transformers' modules; the kernel here is a stand-in in torch."""

import sys
from types import SimpleNamespace

import pytest
import torch
from test_generate import load, make_prompts, options

from common.generation import inference_module, kv_cache
from common.generation.generate import Generator

CALLS = []


def stand_in(query, keys, values, *, cache_seqlens, softmax_scale, causal, window_size):
    """What the kernel's documentation says, row by row and head by head."""
    assert causal and cache_seqlens.dtype == torch.int32 and keys.shape[2] <= query.shape[2]
    CALLS.append(window_size)
    output = torch.empty_like(query)
    group = query.shape[2] // keys.shape[2]
    for row, length in enumerate(cache_seqlens.tolist()):
        first = 0 if window_size[0] < 0 else max(0, length - 1 - window_size[0])
        for head in range(query.shape[2]):
            k, v = (x[row, first:length, head // group] for x in (keys, values))
            weights = (k @ query[row, 0, head] * softmax_scale).softmax(0)
            output[row, 0, head] = weights @ v
    return output


@pytest.fixture
def stand_in_kernel(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_with_kvcache=stand_in))
    CALLS.clear()


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gpt_neox", "qwen3", "mistral_window", "phi"])
def test_texts_are_those_of_torchs_attention(family, tiny_model_folder, stand_in_kernel, monkeypatch):
    model = load(tiny_model_folder(family))
    ids, mask = make_prompts(model.config.vocab_size)
    expected = Generator(model, num_slots=3).generate(ids, mask, torch.arange(4), options(seed=8))
    assert not CALLS
    monkeypatch.setattr(inference_module, "choose_attention", lambda *_: kv_cache.SLOT_ATTENTION)
    lent = inference_module.share_weights(model)
    found = Generator(lent, num_slots=3).generate(ids, mask, torch.arange(4), options(seed=8))
    assert found.response_ids.equal(expected.response_ids)
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-5, rtol=0)
    assert set(CALLS) == {(5, 0) if family == "mistral_window" else (-1, -1)}


def test_the_kernel_is_chosen_only_where_it_can_run(tiny_model_folder, monkeypatch):
    model = load(tiny_model_folder("llama"))
    has_flash = True
    spec = SimpleNamespace(find_spec=lambda name: object() if has_flash else None)
    monkeypatch.setattr(kv_cache, "importlib", SimpleNamespace(util=spec))
    choose, gpu = kv_cache.choose_attention, torch.device("cuda")
    assert choose(model, torch.device("cpu")) == choose(model, gpu) == "sdpa"  # fp32
    half = model.to(torch.bfloat16)
    assert choose(half, gpu) == kv_cache.SLOT_ATTENTION and choose(half, torch.device("cpu")) == "sdpa"
    capped = load(tiny_model_folder("gemma2")).to(torch.bfloat16)
    assert choose(capped, gpu) == capped.config._attn_implementation
    own = load(tiny_model_folder("gptj")).to(torch.bfloat16)
    assert choose(own, gpu) == own.config._attn_implementation
    has_flash = False
    half.config._attn_implementation = "flash_attention_2"
    assert choose(half, gpu) == "sdpa"
