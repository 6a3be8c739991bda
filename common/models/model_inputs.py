"""Sequences laid end to end, as a model reads them: padded rows, or one row without padding.

# S sequences, T tokens of the longest, total tokens of all
"""

from dataclasses import dataclass
from typing import Any

import torch

from common.data.packed_batch import pad_sequences, padded_slots, token_positions


@dataclass(frozen=True)
class ModelInputs:
    """What a forward pass takes, and the slot of each token of the packed order in it.

    Padded: rows (S, T) with the padding on the right. There is no mask: a causal model's token never sees
    what stands behind it, and without one attention takes its fast path. Packed: one row (1, total), for
    models whose attention is told where sequences begin. Slots count rows end to end; they are on the CPU,
    where tokens are chosen by masks.
    """

    input_ids: torch.Tensor  # (S, T) or (1, total) int64
    position_ids: torch.Tensor  # the same shape, counted within each sequence
    token_slots: torch.Tensor  # (total,) int64 on the CPU
    last_slots: torch.Tensor  # (S,) int64 on the CPU, of each sequence's last token
    num_pairs: int  # of tokens that attention compares: the squared lengths, added up
    cu_seqlens: torch.Tensor | None = None  # (S + 1,) int32, packed only
    max_length: int = 0  # packed only

    @property
    def num_tokens(self) -> int:
        """The tokens without padding."""
        return len(self.token_slots)

    @property
    def is_token(self) -> torch.Tensor:
        """Which slots hold a token, the others pad: bool, the shape of input_ids."""
        found = torch.zeros(self.input_ids.numel(), dtype=torch.bool)
        found[self.token_slots] = True
        return found.view(self.input_ids.shape).to(self.input_ids.device)

    def model_arguments(self) -> dict[str, Any]:
        """The arguments of a transformers backbone, `position_ids` among them."""
        arguments = {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "use_cache": False,
        }
        if self.cu_seqlens is not None:  # the names that transformers hands through to its attention
            arguments |= {f"cu_seq_lens_{x}": self.cu_seqlens for x in "qk"}
            arguments |= {f"max_length_{x}": self.max_length for x in "qk"}
        return arguments


def build_model_inputs(
    token_ids: torch.Tensor, lengths: torch.Tensor, *, is_packed: bool, device: torch.device | str = "cpu"
) -> ModelInputs:
    """Model inputs on `device` of sequences laid end to end: token_ids (total,) int64, lengths (S,) int64
    above 0, both on the CPU.
    """
    ends = lengths.cumsum(0)
    num_pairs = int(lengths.square().sum())
    if is_packed:
        return ModelInputs(
            token_ids.unsqueeze(0).to(device),
            token_positions(lengths).unsqueeze(0).to(device),
            torch.arange(len(token_ids)),
            ends - 1,
            num_pairs,
            cu_seqlens=torch.cat([ends.new_zeros(1), ends]).to(device, torch.int32),
            max_length=int(lengths.max()),
        )
    input_ids, _ = pad_sequences(token_ids, lengths)
    position_ids = torch.arange(input_ids.shape[1], device=device).expand(input_ids.shape)
    slots = padded_slots(lengths)
    return ModelInputs(input_ids.to(device), position_ids, slots, slots[ends - 1], num_pairs)
