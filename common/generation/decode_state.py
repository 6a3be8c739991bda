"""What a decoder knows of each running sequence, on the device, and how a token enters it.

# S slots, R response tokens at most, n rows of a pass, V vocabulary
"""

from dataclasses import dataclass

import torch

from common.models.sampling import counter_uniform, draw_tokens
from common.models.tensor_ops import token_logprobs


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are drawn. `num_valid_tokens` masks vocabulary padding, `stop_token_id` ends a response."""

    max_new_tokens: int
    stop_token_id: int
    pad_token_id: int
    num_valid_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    do_sample: bool = True
    seed: int = 0


@dataclass
class DecodeState:
    """One entry for each slot; the tensors stay at their addresses as long as the state lives."""

    last_ids: torch.Tensor  # (S,) int64, drawn but not in the cache yet
    lengths: torch.Tensor  # (S,) int64, tokens in the cache: where the next one goes
    num_drawn: torch.Tensor  # (S,) int64
    limits: torch.Tensor  # (S,) int64, response tokens at most
    is_live: torch.Tensor  # (S,) bool
    is_stopped: torch.Tensor  # (S,) bool, ended by the stop token
    uniforms: torch.Tensor  # (S, R + 1) fp32
    response_ids: torch.Tensor  # (S, R + 1) int64; the last column takes what a sequence that ended draws
    logprobs: torch.Tensor  # (S, R + 1) fp32
    log_kept: torch.Tensor  # (S, R + 1) fp32

    @classmethod
    def build(cls, num_slots: int, max_new_tokens: int, device: torch.device) -> "DecodeState":
        """Return a state without sequences."""

        def zeros(dtype: torch.dtype, *more: int) -> torch.Tensor:
            return torch.zeros(num_slots, *more, dtype=dtype, device=device)

        columns = max_new_tokens + 1
        integers = [zeros(torch.int64) for _ in range(4)]
        flags = [zeros(torch.bool) for _ in range(2)]
        return cls(
            *integers,
            *flags,
            uniforms=zeros(torch.float32, columns),
            response_ids=zeros(torch.int64, columns),
            logprobs=zeros(torch.float32, columns),
            log_kept=zeros(torch.float32, columns),
        )

    def tensors(self) -> list[torch.Tensor]:
        """Return all of it, to be moved row by row."""
        return list(vars(self).values())

    def enter(
        self,
        first: int,
        prompt_lengths: torch.Tensor,
        limits: torch.Tensor,
        sample_ids: torch.Tensor,
        seed: int,
    ) -> None:
        """Put new sequences into the slots from `first` on; the other arguments are (m,) int64."""
        slots = slice(first, first + len(sample_ids))
        self.lengths[slots], self.limits[slots] = prompt_lengths, limits
        self.num_drawn[slots] = 0
        self.is_live[slots], self.is_stopped[slots] = True, False
        columns = self.uniforms.shape[1]
        positions = torch.arange(columns, device=sample_ids.device).repeat(len(sample_ids))
        drawn = counter_uniform(seed, sample_ids.repeat_interleave(columns), positions)
        self.uniforms[slots] = drawn.view(-1, columns)

    def draw(self, slots: slice, logits: torch.Tensor, options: SamplingOptions) -> None:
        """Draw the next token of the sequences in `slots` from logits (n, V); a sequence that ended stays as
        it is.
        """
        row = {name: tensor[slots] for name, tensor in vars(self).items()}
        columns = row["num_drawn"].unsqueeze(1)
        draw = draw_tokens(
            logits,
            row["uniforms"].gather(1, columns).squeeze(1),
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            do_sample=options.do_sample,
            num_valid_tokens=options.num_valid_tokens,
        )
        logprobs = token_logprobs(
            logits, draw.token_ids, temperature=options.temperature, num_valid_tokens=options.num_valid_tokens
        )
        # Tokens of a sequence that ended land in a column behind its last: nobody reads them.
        row["response_ids"].scatter_(1, columns, draw.token_ids.unsqueeze(1))
        row["logprobs"].scatter_(1, columns, logprobs.unsqueeze(1))
        row["log_kept"].scatter_(1, columns, draw.log_kept.unsqueeze(1))
        row["last_ids"].copy_(draw.token_ids)
        is_live = row["is_live"]
        row["num_drawn"].add_(is_live)
        is_stop = draw.token_ids == options.stop_token_id
        row["is_stopped"].logical_or_(is_stop & is_live)
        is_live.logical_and_(~is_stop & (row["num_drawn"] < row["limits"]))

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy rows to other rows; both (m,) int64, no target a source."""
        for tensor in self.tensors():
            tensor[targets] = tensor[sources]
