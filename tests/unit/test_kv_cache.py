"""Slots of keys and values against plain concatenation, and the kernel that reads them (a stand-in)."""

import pytest
import torch
from test_generate import load, load_prompted, options
from transformers import FalconConfig, LlamaConfig

from common.generation import inference_module, kv_cache
from common.generation.generate import Generator, PromptBatch
from common.generation.kv_cache import SlotCache, kv_bytes_per_token
from common.models import attention
from common.ranks import distributed

CALLS = []


def test_slot_cache_writes_at_each_rows_own_position():
    cache = SlotCache(num_slots=3, max_length=6)
    keys = torch.arange(2 * 1 * 3 * 2, dtype=torch.float32).view(2, 1, 3, 2)
    is_real = torch.tensor([[True, True, True], [False, True, True]])
    cache.begin_prefill(torch.tensor([2, 0]), is_real)
    assert cache.get_mask_sizes(3) == (3, 0) and cache.get_seq_length() == 0
    got, _ = cache.update(keys, keys + 100, 0)
    assert got is keys, "a prompt attends to itself, padding and all"
    assert cache.keys[0][2, 0, :3].equal(keys[0, 0]) and cache.keys[0][0, 0, :2].equal(keys[1, 0, 1:])
    new = torch.full((2, 1, 1, 2), -1.0)
    cache.begin_decode(torch.arange(2), torch.tensor([2, 0]), upto=4)
    assert cache.get_mask_sizes(1) == (4, 0) and cache.get_seq_length() == 3
    got_keys, got_values = cache.update(new, new, 0)
    assert got_keys.shape == (2, 1, 4, 2)
    assert got_keys[0, 0].tolist() == [[8.0, 9.0], [10.0, 11.0], [-1.0, -1.0], [0.0, 0.0]]
    assert got_values[0, 0, 2].tolist() == [-1.0, -1.0] and got_values[0, 0, 0].tolist() == [108.0, 109.0]
    cache.copy_slots(torch.tensor([2]), torch.tensor([1]), length=3)
    assert cache.keys[0][1, :, :3].equal(cache.keys[0][2, :, :3])


@pytest.mark.parametrize(
    ("config", "numbers"),
    [
        (LlamaConfig(num_hidden_layers=3, hidden_size=64, num_attention_heads=8, num_key_value_heads=2), 96),
        (FalconConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=4, multi_query=True), 16),
    ],
)  # fmt: skip
def test_kv_cache_bytes_per_token(config, numbers):
    assert kv_bytes_per_token(config, 4) == 4 * numbers
    assert kv_bytes_per_token(config, 2, tp_size=2) in (numbers, 2 * numbers)  # one head cannot be halved


def stand_in(query, keys, values, starts, slot_starts, longest, longest_key, **options):
    """What the kernel's documentation says, row by row and head by head: (rows, H, D)."""
    window, used = options["window_size_left"], options["seqused_k"]
    assert longest == 1 and starts.tolist() == list(range(len(query) + 1))
    assert options["window_size_right"] == (-1 if window < 0 else 0) and not options["is_causal"]
    assert used.dtype == starts.dtype == slot_starts.dtype == torch.int32 and int(used.max()) <= longest_key
    CALLS.append(window)
    output = torch.empty_like(query)
    group = query.shape[1] // keys.shape[1]
    for row, (begin, length) in enumerate(zip(slot_starts.tolist(), used.tolist(), strict=False)):
        first = begin + (0 if window < 0 else max(0, length - 1 - window))
        for head in range(query.shape[1]):
            k, v = (x[first : begin + length, head // group] for x in (keys, values))
            weights = (k @ query[row, head] * options["scale"]).softmax(0)
            output[row, head] = weights @ v
    return (output,)


@pytest.fixture
def stand_in_kernel(monkeypatch):
    monkeypatch.setattr(attention, "varlen_kernel", stand_in)
    CALLS.clear()


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gpt_neox", "mistral_window", "phi"])
def test_kv_cache_kernel_generates_the_texts_of_torch_attention(
    family, tiny_model_folder, stand_in_kernel, monkeypatch
):
    model, ids, mask = load_prompted(tiny_model_folder(family))
    expected = Generator(model, num_slots=3).generate(
        PromptBatch(ids, mask, torch.arange(4)), options(seed=8)
    )
    assert not CALLS
    monkeypatch.setattr(inference_module, "choose_attention", lambda _: kv_cache.SLOT_ATTENTION)
    shared = inference_module.share_weights(model)
    found = Generator(shared, num_slots=3).generate(PromptBatch(ids, mask, torch.arange(4)), options(seed=8))
    assert found.response_ids.equal(expected.response_ids)
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-5, rtol=0)
    assert set(CALLS) == {5 if family == "mistral_window" else -1}


@pytest.mark.parametrize(
    ("family", "trained_by", "has_gpu", "expected"),
    [
        ("llama", "flash_attention_2", True, kv_cache.SLOT_ATTENTION),
        ("llama", "triptych_varlen", True, kv_cache.SLOT_ATTENTION),
        ("llama", "triptych_varlen", False, "sdpa"),
        ("llama", "sdpa", True, "sdpa"),  # in fp32, or on a GPU that is too old
        ("gemma2", "flash_attention_2", True, "eager"),  # caps its scores, which sdpa does not
        ("gpt_neo", "flash_attention_2", True, "eager"),  # has an attention of its own
        ("gpt_neo", "eager", True, "eager"),
    ],
)
def test_kv_cache_kernel_is_chosen_only_where_it_can_run(
    family, trained_by, has_gpu, expected, tiny_model_folder, monkeypatch
):
    monkeypatch.setattr(distributed, "has_gpu", lambda: has_gpu)
    model = load(tiny_model_folder(family))
    model.config._attn_implementation = trained_by
    assert kv_cache.choose_attention(model) == expected
