"""Slots of keys and values against plain concatenation."""

import pytest
import torch
from transformers import FalconConfig, GPT2Config, LlamaConfig

from common.generation.kv_cache import SlotCache, kv_bytes_per_token


def test_prompts_and_tokens_land_at_each_rows_own_position():
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
    assert cache.num_bytes() == 2 * 3 * 6 * 2 * 4


@pytest.mark.parametrize(
    ("config", "numbers"),
    [
        (LlamaConfig(num_hidden_layers=3, hidden_size=64, num_attention_heads=8, num_key_value_heads=2), 96),
        (GPT2Config(n_layer=2, n_embd=32, n_head=4), 128),
        (FalconConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=4, multi_query=True), 16),
        (
            FalconConfig(
                num_hidden_layers=1, hidden_size=32, num_attention_heads=4, new_decoder_architecture=True,
                num_kv_heads=2,
            ),
            64,
        ),
    ],
)  # fmt: skip
def test_bytes_of_a_token(config, numbers):
    assert kv_bytes_per_token(config, 4) == 4 * numbers
    assert kv_bytes_per_token(config, 2, tp_size=2) in (numbers, 2 * numbers)  # one head cannot be halved
