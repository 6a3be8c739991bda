"""Sequences laid end to end, as a model reads them: padded rows, or one row without padding.

# S sequences, T tokens of the longest, total tokens of all
"""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class ModelInputs:
    """What a forward pass takes, and where each token of the packed order stands in it.

    Padded: rows (S, T) with the padding on the right. There is no mask: a causal model's token never sees
    what stands behind it, and without one attention takes its fast path. Flat: one row (1, total), for models
    whose attention is told where sequences begin.
    """

    input_ids: torch.Tensor  # (S, T) or (1, total) int64
    position_ids: torch.Tensor  # the same shape, counted within each sequence
    starts: torch.Tensor  # (S,) int64, the slot of each sequence's first token, rows end to end
    lengths: torch.Tensor  # (S,) int64
    cu_seqlens: torch.Tensor | None = None  # (S + 1,) int32, flat only
    max_length: int = 0  # flat only
    num_tokens: int = 0  # without padding
    num_pairs: int = 0  # of tokens that attention compares: the squared lengths, added up

    @property
    def token_slots(self) -> torch.Tensor:
        """Return (total,) int64: where each token of the packed order stands, rows end to end."""
        within = _count_within(self.lengths)
        return self.starts.repeat_interleave(self.lengths) + within

    @property
    def is_token(self) -> torch.Tensor:
        """Return which slots hold a token, the others pad: bool, the shape of input_ids."""
        found = torch.zeros(self.input_ids.numel(), dtype=torch.bool, device=self.input_ids.device)
        found[self.token_slots] = True
        return found.view(self.input_ids.shape)

    @property
    def last_slots(self) -> torch.Tensor:
        """Return (S,) int64: where each sequence's last token stands."""
        return self.starts + self.lengths - 1

    def model_arguments(self) -> dict[str, Any]:
        """Return the arguments of a transformers backbone, `position_ids` among them."""
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
    """Return model inputs of sequences laid end to end: token_ids (total,) int64, lengths (S,) above 0."""
    sizes = {"num_tokens": int(lengths.sum()), "num_pairs": int(lengths.square().sum())}
    token_ids, lengths = token_ids.to(device), lengths.to(device)
    within = _count_within(lengths)
    if is_packed:
        ends = lengths.cumsum(0)
        return ModelInputs(
            token_ids.unsqueeze(0),
            within.unsqueeze(0),
            ends - lengths,
            lengths,
            cu_seqlens=torch.nn.functional.pad(ends, (1, 0)).to(torch.int32),
            max_length=int(lengths.max()),
            **sizes,
        )
    width = int(lengths.max())
    starts = torch.arange(len(lengths), device=lengths.device) * width
    columns = torch.arange(width, device=lengths.device)
    is_token = columns < lengths.unsqueeze(1)  # (S, T)
    padded = torch.zeros(is_token.shape, dtype=token_ids.dtype, device=token_ids.device)
    padded[is_token] = token_ids
    return ModelInputs(padded, columns.expand(len(lengths), -1), starts, lengths, **sizes)


def _count_within(lengths: torch.Tensor) -> torch.Tensor:
    """Return (total,) int64: 0, 1, 2, ... within each sequence."""
    ends = lengths.cumsum(0)
    return torch.arange(int(ends[-1]), device=lengths.device) - (ends - lengths).repeat_interleave(lengths)
