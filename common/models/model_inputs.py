"""Model inputs from sequences laid end to end: padded rows, or one packed row in which a prefix shared by
several sequences occurs once.

# S sequences, T tokens of the longest, total tokens of all, G groups of sequences
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from common.data.packed_batch import pad_sequences, padded_slots, to_device, token_positions
from common.models.attention import Packing


@dataclass(frozen=True)
class ModelInputs:
    """Inputs of a forward pass, and the slot in them of each token of the packed order; built on the CPU.

    Padded: rows (S, T) with the padding on the right. There is no mask: a token of a causal model never
    attends to what follows it, and without a mask attention takes its fast path. Packed: one row (1, n), for
    models whose attention receives the boundaries; a single sequence is both. Slots are numbered row by row;
    they stay on the CPU, where masks select tokens. Tokens shared by sequences have one slot.
    """

    input_ids: torch.Tensor  # (S, T) or (1, n) int64
    position_ids: torch.Tensor  # the same shape, counted within each sequence
    token_slots: torch.Tensor  # (total,) int64 on the CPU
    last_slots: torch.Tensor  # (S,) int64 on the CPU, of each sequence's last token
    num_tokens: int  # computed tokens, without padding
    num_pairs: int  # pairs of token and key in attention, without causality
    packing: Packing | None = None  # only if there is one row
    num_unused_pairs: int = 0  # part of num_pairs: tokens whose last hidden states are unused

    def slots_before(self, is_scored: torch.Tensor) -> torch.Tensor:
        """Slots (N,) int64 that predict the scored tokens: those of the tokens before them.

        is_scored (total,) bool, False for every sequence's first token.
        """
        return self.token_slots[is_scored.nonzero()[:, 0] - 1]

    def to(self, device: torch.device | str, slots: torch.Tensor, *more: torch.Tensor) -> tuple[Any, ...]:
        """The inputs, `slots` and `more` on a device, moved by one copy; the pass's last hidden states are
        used at `slots` (N,) int64 only.
        """
        fields = vars(self.packing) if self.packing else {}
        num_unused_pairs = 0
        # If no slot is used, as in rows without targets, all are computed: every weight needs a gradient.
        if self.packing and 0 < len(used := slots.unique()) < self.num_tokens:
            fields = fields | {"used_slots": used}
            lengths, key_lengths = map(torch.tensor, (self.packing.lengths, self.packing.key_lengths))
            num_keys = key_lengths.repeat_interleave(lengths)  # of each token's segment
            num_unused_pairs = self.num_pairs - int(num_keys[used].sum())
        names = [name for name, value in fields.items() if isinstance(value, torch.Tensor)]
        tensors = [self.input_ids, self.position_ids, *(fields[name] for name in names), slots, *more]
        ids, positions, *moved = to_device(tensors, device)
        packing = Packing(**fields | dict(zip(names, moved, strict=False))) if self.packing else None
        inputs = {"input_ids": ids, "position_ids": positions, "packing": packing}
        return replace(self, **inputs, num_unused_pairs=num_unused_pairs), *moved[len(names) :]

    def model_arguments(self, *, with_packing: bool) -> dict[str, Any]:
        """Keyword arguments of a transformers backbone: `position_ids`, and the packing of the row if its
        layers accept it.
        """
        arguments = {"input_ids": self.input_ids, "position_ids": self.position_ids, "use_cache": False}
        return arguments | ({"packing": self.packing} if with_packing and self.packing else {})


def build_model_inputs(
    token_ids: torch.Tensor,
    lengths: torch.Tensor,
    *,
    is_packed: bool,
    group_sizes: torch.Tensor | None = None,
) -> ModelInputs:
    """Model inputs of concatenated sequences: token_ids (total,) int64, lengths (S,) int64 above 0, all on
    the CPU.

    If packed, the sequences of a group, which are adjacent, share their common prefix; group_sizes (G,)
    int64, by default all 1.
    """
    if not is_packed and len(lengths) > 1:
        input_ids, _ = pad_sequences(token_ids, lengths)
        position_ids = torch.arange(input_ids.shape[1]).expand(input_ids.shape)
        slots = padded_slots(lengths)
        num_pairs = int(lengths.square().sum())
        return ModelInputs(
            input_ids, position_ids, slots, slots[lengths.cumsum(0) - 1], len(token_ids), num_pairs
        )
    return _pack(token_ids, lengths, torch.ones_like(lengths) if group_sizes is None else group_sizes)


def common_lengths(token_ids: torch.Tensor, lengths: torch.Tensor, group_sizes: torch.Tensor) -> torch.Tensor:
    """Length of the prefix that all sequences of a group share: (G,) int64, 0 for a group of one; arguments
    as for `build_model_inputs`.
    """
    sequences = iter(token_ids.split(lengths.tolist()))
    common = []
    for size in group_sizes.tolist():
        first, *others = (next(sequences) for _ in range(size))
        length = min(map(len, (first, *others))) if others else 0
        for other in others:
            length = int((first[:length] == other[:length]).long().cumprod(0).sum())
        common.append(length)
    return torch.tensor(common)


def _pack(token_ids: torch.Tensor, lengths: torch.Tensor, group_sizes: torch.Tensor) -> ModelInputs:
    """Model inputs of one row: each group's first sequence, then the others without the shared prefix."""
    shared = common_lengths(token_ids, lengths, group_sizes).repeat_interleave(group_sizes)  # (S,)
    starts = lengths.cumsum(0) - lengths
    is_first = torch.zeros(len(lengths), dtype=torch.bool)
    is_first[group_sizes.cumsum(0) - group_sizes] = True
    first_starts = starts[is_first].repeat_interleave(group_sizes)  # (S,)

    positions = token_positions(lengths)  # (total,)
    is_kept = (positions >= shared.repeat_interleave(lengths)) | is_first.repeat_interleave(lengths)
    slots = is_kept.cumsum(0) - 1  # slots of the kept tokens
    token_slots = slots[
        torch.where(is_kept, torch.arange(len(slots)), token_positions(lengths, first_starts))
    ]

    # Segments: a group's shared prefix, and the rest of each sequence, which also attends to the prefix.
    new_lengths = torch.stack([is_first * shared, lengths - shared], dim=1).flatten()  # (2S,)
    attended_lengths = torch.stack([shared, lengths], dim=1).flatten()
    is_segment = new_lengths > 0
    segment_lengths = new_lengths[is_segment]
    key_lengths = attended_lengths[is_segment]
    key_slots = None
    if shared.any():
        key_slots = token_slots[token_positions(key_lengths, starts.repeat_interleave(2)[is_segment])]
    packing = Packing(
        segment_lengths.tolist(), key_lengths.tolist(), _ends(segment_lengths), _ends(key_lengths), key_slots
    )
    return ModelInputs(
        token_ids[is_kept].unsqueeze(0),
        positions[is_kept].unsqueeze(0),
        token_slots,
        token_slots[starts + lengths - 1],
        num_tokens=int(is_kept.sum()),
        num_pairs=int((segment_lengths * key_lengths).sum()),
        packing=packing,
    )


def _ends(lengths: torch.Tensor) -> torch.Tensor:
    """0 and the end of each segment, (P + 1,) int32, as kernels expect them."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
