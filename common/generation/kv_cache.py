"""Keys and values of running sequences: one preallocated block per layer, one slot per sequence, and the
schedule that assigns sequences to slots.

transformers' own modules run unmodified over it: each row writes at its own position, and attention reads the
first `upto` positions of the first slots, which the live sequences fill without gaps. On a GPU with torch's
attention kernel, decode passes use it: it reads only the used part of each slot, needs no mask and does not
repeat grouped heads. Prompt passes use torch's sdpa.

# S slots, L positions of a slot, n rows of a pass, H query heads or key/value heads, D their width
"""

from collections import deque
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from common.generation.tp_plans import head_counts
from common.models import exact
from common.models.attention import (
    FLASH_ATTENTION,
    KERNELS,
    plain_attention,
    run_kernel,
    takes_own_kernels,
)
from common.models.transformers_internals import attention_of
from common.ranks import distributed

SLOT_ATTENTION = "triptych_slots"
# Cost of an additional pass in tokens, by device: less padding than this is cheaper than another pass. The
# value for a GPU is an estimate, not measured.
PADDING_WORTH_A_PASS = {"cpu": 32, "cuda": 512}
# Prompts wait until 1/8 of the slots are free: fewer and larger prefill passes; an empty slot costs little.
_FREE_SHARE_BEFORE_REFILL = 1 / 8


class SlotCache(Cache):
    """A transformers cache whose rows are at different positions.

    Call `begin_prefill` or `begin_decode` before each forward pass. The first pass creates the blocks, when
    the shapes of keys and values are known.
    """

    def __init__(self, num_slots: int, max_length: int) -> None:
        super().__init__(layers=[])
        self.num_slots, self.max_length = num_slots, max_length
        self.keys: list[torch.Tensor] = []  # per layer: (S, H, L, D)
        self.values: list[torch.Tensor] = []
        self._slots: torch.Tensor | None = None  # prefill: (n,) int64
        self._sources: tuple[torch.Tensor, ...] | None = None  # prefill: rows (n, 1) and columns (n, T)
        self._positions: torch.Tensor | None = None  # decode: (n,) int64, where this pass writes
        self._rows: torch.Tensor | None = None  # decode: (n,) int64, 0 .. n - 1
        self._upto = 0

    def begin_prefill(self, slots: torch.Tensor, is_real: torch.Tensor | None) -> None:
        """Prepare a pass over whole prompts, left-padded, for these slots (n,).

        is_real (n, T) bool, True for a token of the prompt; None if no row has padding.
        """
        self._slots = slots
        self._sources = None
        self._positions = None
        self._upto = 0
        if is_real is not None:  # shift rows left; positions after a prompt are masked until overwritten
            num_rows, width = is_real.shape
            positions = torch.arange(width, device=slots.device)
            columns = positions + (width - is_real.sum(1, keepdim=True))
            rows = torch.arange(num_rows, device=slots.device).unsqueeze(1)
            self._sources = rows, columns.clamp(max=width - 1)

    def begin_decode(self, rows: torch.Tensor, positions: torch.Tensor, upto: int) -> None:
        """Prepare a pass with one token for each slot of `rows`, which is 0 .. n - 1.

        positions (n,) int64: where their keys and values are stored; `upto` exceeds all of them.
        """
        self._rows = rows
        self._positions = positions
        self._upto = upto

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values (n, H, T, D) of a layer; return those that this pass attends to."""
        while len(self.keys) <= layer_idx:
            self.keys.append(self._make_block(key_states))
            self.values.append(self._make_block(value_states))
        new = (key_states, value_states)
        blocks = (self.keys[layer_idx], self.values[layer_idx])
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
        """A block of zeros: unwritten positions are masked, but 0 x NaN would not be 0."""
        _, num_heads, _, width = states.shape
        if states.device.type == "cpu":  # contiguous keys of a head: one sequential read
            return states.new_zeros(self.num_slots, num_heads, self.max_length, width)
        # The kernel takes slots end to end, (S x L, H, D).
        return states.new_zeros(self.num_slots, self.max_length, num_heads, width).transpose(1, 2)

    def _write_prompts(self, states: torch.Tensor, block: torch.Tensor) -> None:
        if self._sources is not None:
            rows, columns = self._sources
            states = states[rows, :, columns].transpose(1, 2)
        block[self._slots, :, : states.shape[2]] = states

    def copy_slots(self, sources: torch.Tensor, targets: torch.Tensor, length: int) -> None:
        """Copy the first `length` positions of slots to other slots; both (m,) int64, no target a source."""
        for block in (*self.keys, *self.values):
            block[targets, :, :length] = block[sources, :, :length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions before this pass, as transformers' masks count them."""
        return max(self._upto - 1, 0)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """(Number of keys, offset of the first) for transformers' masks."""
        return self._upto or query_length, 0


class Admission(NamedTuple):
    """One batch of samples that enter the slots after the live ones."""

    samples: list[int]
    prompts: list[int]  # prefilled in one pass, longest first
    prompt_slots: list[int]  # slots of their keys and values
    copies: list[tuple[int, int]]  # (slot with the same prompt, slot)


class SlotSchedule:
    """Assigns samples to slots. Sample i continues prompt i // num_samples.

    Live sequences fill the slots 0 .. n - 1 without gaps: when one leaves, the last moves into its slot.
    Samples wait in descending order of prompt length, so that the prompts of one pass need little padding.
    """

    def __init__(
        self,
        prompt_lengths: list[int],
        *,
        num_samples: int,
        num_slots: int,
        max_tokens_per_pass: int,
        max_padding_per_pass: int = PADDING_WORTH_A_PASS["cpu"],
    ) -> None:
        self.prompt_lengths, self.num_samples = prompt_lengths, num_samples
        self.num_slots = num_slots
        self.max_tokens_per_pass = max_tokens_per_pass
        self.max_padding_per_pass = max_padding_per_pass
        order = sorted(range(len(prompt_lengths)), key=lambda prompt: -prompt_lengths[prompt])
        self.waiting = deque(p * num_samples + k for p in order for k in range(num_samples))
        self.slots: list[int] = []  # sample of each live slot

    def should_admit(self) -> bool:
        """Whether to prefill new prompts now, instead of adding a token to the live sequences."""
        num_free = self.num_slots - len(self.slots)
        if not self.waiting or not num_free:
            return False
        worthwhile = max(int(self.num_slots * _FREE_SHARE_BEFORE_REFILL), 1)
        return not self.slots or num_free >= min(worthwhile, len(self.waiting))

    def has_waiting_sibling(self, prompt: int) -> bool:
        """Whether more samples of a prompt wait; they would be at the head of the queue."""
        return bool(self.waiting) and self.waiting[0] // self.num_samples == prompt

    def admit(self) -> Admission:
        """Admit the samples that fit into the free slots and into one pass; at least one must be waiting."""
        admission = Admission([], [], [], [])
        slot_with = {sample // self.num_samples: slot for slot, sample in enumerate(self.slots)}
        width = num_real = 0
        while self.waiting and len(self.slots) < self.num_slots:
            sample = self.waiting[0]
            prompt = sample // self.num_samples
            slot = len(self.slots)
            if prompt in slot_with:
                admission.copies.append((slot_with[prompt], slot))
            else:
                width = max(width, self.prompt_lengths[prompt])
                num_real += self.prompt_lengths[prompt]
                num_tokens = width * (len(admission.prompts) + 1)
                padding = num_tokens - num_real
                is_full = num_tokens > self.max_tokens_per_pass or padding > self.max_padding_per_pass
                if admission.prompts and is_full:
                    break
                admission.prompts.append(prompt)
                admission.prompt_slots.append(slot)
                slot_with[prompt] = slot
            self.slots.append(self.waiting.popleft())
            admission.samples.append(sample)
        return admission

    def retire(self, finished: list[int]) -> list[tuple[int, int]]:
        """Empty these slots; return (from, to) of the sequences that must move to close the gaps."""
        num_left = len(self.slots) - len(finished)
        finished_slots = set(finished)
        holes = [slot for slot in finished if slot < num_left]
        movers = [slot for slot in range(num_left, len(self.slots)) if slot not in finished_slots]
        moves = list(zip(movers, holes, strict=True))
        for source, target in moves:
            self.slots[target] = self.slots[source]
        del self.slots[num_left:]
        return moves


def kv_bytes_per_token(config: Any, bytes_per_number: int, tp_size: int = 1) -> int:
    """Bytes of one token's keys and values on a rank, summed over the layers."""
    config = config.get_text_config()
    _, num_kv_heads, head_dim = head_counts(config)
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        num_kv_heads = 1  # Falcon-7B; larger ones repeat their key/value heads before they cache them
    per_rank = max(num_kv_heads // tp_size, 1)
    return 2 * config.num_hidden_layers * per_rank * head_dim * bytes_per_number


def choose_attention(source: PreTrainedModel) -> str:
    """Name of the attention for generation with a copy of `source`, given the one that it was loaded with."""
    chosen = attention_of(source)
    if exact.is_on():
        return chosen
    has_kernel = chosen == FLASH_ATTENTION or (chosen in KERNELS and distributed.has_gpu())
    if has_kernel and takes_own_kernels(type(source), source.config):
        return SLOT_ATTENTION
    return plain_attention(source) if chosen in KERNELS else chosen


class UsedKeys(NamedTuple):
    """What each row of a decode pass attends to: the first `lengths` keys of its slot."""

    lengths: torch.Tensor  # (n,) int32, including the new key
    row_starts: torch.Tensor  # (n + 1,) int32: 0, 1 .. n
    slot_starts: torch.Tensor  # (n + 1,) int32: 0, L .. n x L
    upto: int  # no length exceeds it

    @classmethod
    def of(cls, positions: torch.Tensor, upto: int, max_length: int) -> "UsedKeys":
        """The keys up to each row's position (n,), in slots of `max_length` positions."""
        rows = torch.arange(len(positions) + 1, dtype=torch.int32, device=positions.device)
        # A pass may be rounded up to include empty slots, whose positions are meaningless.
        lengths = (positions + 1).clamp(max=upto).to(torch.int32)
        return cls(lengths, rows, rows * max_length, upto)


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    used_keys: UsedKeys | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention output (n, 1, H, D) for a query (n, H, 1, D) and whole slots of keys and values
    (n, heads, L, D) of a `SlotCache`.

    used_keys: an argument of the model's forward pass; None for a prompt pass.
    """
    if used_keys is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    lengths, *bounds, upto = used_keys
    slots = (x.transpose(1, 2).flatten(0, 1) for x in (key, value))
    output = run_kernel(query.squeeze(2), *slots, *bounds, 1, upto, scaling, sliding_window, lengths)
    return output.unsqueeze(1), None


AttentionInterface.register(SLOT_ATTENTION, slot_attention)
AttentionMaskInterface.register(SLOT_ATTENTION, sdpa_mask)
