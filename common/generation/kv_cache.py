"""Keys and values of running sequences: one preallocated block a layer, a slot for each sequence.

transformers' own modules run unmodified over it: each row writes at its own position, and attention reads the
first `upto` positions of the first slots, which the live sequences fill without gaps.

# S slots, L positions of a slot, n rows of a pass, H key/value heads, D their width
"""

from typing import Any

import torch
from transformers import Cache


class SlotCache(Cache):
    """A transformers cache whose rows lie at positions of their own.

    Tell it what a forward pass is, by `begin_prefill` or `begin_decode`, before the pass. The blocks are
    made by the first pass, when the shapes of keys and values are known.
    """

    def __init__(self, num_slots: int, max_length: int) -> None:
        super().__init__(layers=[])
        self.num_slots, self.max_length = num_slots, max_length
        self.keys: list[torch.Tensor] = []  # a layer: (S, H, L, D)
        self.values: list[torch.Tensor] = []
        self._slots: torch.Tensor | None = None  # prefill: (n,) int64
        self._is_real: torch.Tensor | None = None  # prefill: (n, T) bool, None without padding
        self._positions: torch.Tensor | None = None  # decode: (n,) int64, where this pass writes
        self._rows: torch.Tensor | None = None  # decode: (n,) int64, 0 .. n - 1
        self._upto = 0

    def begin_prefill(self, slots: torch.Tensor, is_real: torch.Tensor | None) -> None:
        """Say that the next pass holds whole prompts, left-padded, for these slots (n,).

        is_real (n, T) bool, True for a token of the prompt; None when no row has padding.
        """
        self._slots, self._is_real, self._positions, self._upto = slots, is_real, None, 0

    def begin_decode(self, rows: torch.Tensor, positions: torch.Tensor, upto: int) -> None:
        """Say that the next pass holds one token for each slot of `rows`, which is 0 .. n - 1.

        positions (n,) int64 are where their keys and values go; `upto` is above all of them.
        """
        self._rows, self._positions, self._upto = rows, positions, upto

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values (n, H, T, D) of a layer; return those that this pass attends to."""
        while len(self.keys) <= layer_idx:
            self.keys.append(self._make_block(key_states))
            self.values.append(self._make_block(value_states))
        new, blocks = (key_states, value_states), (self.keys[layer_idx], self.values[layer_idx])
        if self._positions is None:
            for states, block in zip(new, blocks, strict=True):
                self._write_prompts(states, block)
            return key_states, value_states
        num_rows = len(key_states)
        for states, block in zip(new, blocks, strict=True):
            block[self._rows, :, self._positions] = states[:, :, 0]
        keys, values = (block[:num_rows, :, : self._upto] for block in blocks)
        return keys, values

    def _make_block(self, states: torch.Tensor) -> torch.Tensor:
        """Return zeros: what was never written is masked, but 0 x NaN would not be."""
        _, num_heads, _, width = states.shape
        if states.device.type == "cpu":  # a head's keys lie together: read in one stream
            return states.new_zeros(self.num_slots, num_heads, self.max_length, width)
        # flash-attn's kernel wants a position's heads together
        return states.new_zeros(self.num_slots, self.max_length, num_heads, width).transpose(1, 2)

    def _write_prompts(self, states: torch.Tensor, block: torch.Tensor) -> None:
        if self._is_real is None:
            block[self._slots, :, : states.shape[2]] = states
            return
        rows, columns = self._is_real.nonzero(as_tuple=True)
        positions = (self._is_real.cumsum(1) - 1)[rows, columns]
        block[self._slots[rows], :, positions] = states[rows, :, columns]

    def copy_slots(self, sources: torch.Tensor, targets: torch.Tensor, length: int) -> None:
        """Copy the first `length` positions of slots to other slots; both (m,) int64, no target a source."""
        for block in (*self.keys, *self.values):
            block[targets, :, :length] = block[sources, :, :length]

    def num_bytes(self) -> int:
        """Return the bytes of all blocks."""
        return sum(block.numel() * block.element_size() for block in (*self.keys, *self.values))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the positions before this pass, as transformers' masks count them."""
        return max(self._upto - 1, 0)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return (number of keys, offset of the first) for transformers' masks."""
        return self._upto or query_length, 0


def kv_bytes_per_token(config: Any, bytes_per_number: int, tp_size: int = 1) -> int:
    """Return what keys and values of one token take on a rank, all layers together."""
    config = config.get_text_config()
    num_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        num_kv_heads = 1  # Falcon-7B; larger ones repeat their key/value heads before they cache them
    per_rank = max(num_kv_heads // tp_size, 1)
    return 2 * config.num_hidden_layers * per_rank * head_dim * bytes_per_number
