"""A decoding step for all running sequences: their state, sampling, and the forward pass.

On a GPU a pass is a captured CUDA graph, since launching kernels one by one would limit a small model.

# S slots, R maximum response tokens, n rows of a pass, L positions that attention reads, V vocabulary
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from common.generation.kv_cache import SLOT_ATTENTION, SlotCache, UsedKeys
from common.models.loading import build_position_ids, forward_accepts, plain_model
from common.models.sampling import Sample, counter_uniform, sample_tokens
from common.ranks import distributed
from common.ranks.failures import first_line, is_out_of_memory, say

POSITIONS_PER_BUCKET = 128
WINDOWED = {"sliding_attention", "chunked_attention"}  # layer types that attend to part of the context
# Sampling options with cached graphs; bounded, since a caller may use any temperature.
_MAX_CACHED_SAMPLINGS = 4


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling options. `num_valid_tokens` masks vocabulary padding; `stop_token_id` ends a response."""

    max_new_tokens: int
    stop_token_id: int
    pad_token_id: int
    num_valid_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    do_sample: bool = True
    seed: int = 0

    def sample(self, logits: torch.Tensor, uniforms: torch.Tensor) -> Sample:
        """Sample a token for each row of logits (n, V) by its uniform (n,)."""
        return sample_tokens(
            logits,
            uniforms,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            do_sample=self.do_sample,
            num_valid_tokens=self.num_valid_tokens,
        )


@dataclass
class DecodeState:
    """State of every slot; the tensors keep their addresses."""

    last_ids: torch.Tensor  # (S,) int64, sampled but not in the cache yet
    lengths: torch.Tensor  # (S,) int64, tokens in the cache, and so the position of the next one
    num_sampled: torch.Tensor  # (S,) int64, tokens of the response so far
    limits: torch.Tensor  # (S,) int64, maximum response tokens
    is_live: torch.Tensor  # (S,) bool
    is_stopped: torch.Tensor  # (S,) bool, ended by the stop token
    uniforms: torch.Tensor  # (S, R + 1) fp32
    response_ids: torch.Tensor  # (S, R + 1) int64; the extra column takes writes after R tokens
    logprobs: torch.Tensor  # (S, R + 1) fp32
    log_kept: torch.Tensor  # (S, R + 1) fp32, log of the probability mass that top_k and top_p keep
    given_ids: torch.Tensor  # (S, R + 1) int64, tokens of the environment in place of sampled ones; -1: none

    @classmethod
    def build(cls, num_slots: int, max_new_tokens: int, device: torch.device) -> "DecodeState":
        """An empty state."""
        columns = max_new_tokens + 1
        integers = [torch.zeros(num_slots, dtype=torch.int64, device=device) for _ in range(4)]
        flags = [torch.zeros(num_slots, dtype=torch.bool, device=device) for _ in range(2)]
        uniforms, logprobs, log_kept = torch.zeros(3, num_slots, columns, device=device)
        response_ids = torch.zeros(num_slots, columns, dtype=torch.int64, device=device)
        given_ids = torch.full_like(response_ids, -1)
        return cls(*integers, *flags, uniforms, response_ids, logprobs, log_kept, given_ids)

    @property
    def max_new_tokens(self) -> int:
        """Capacity in response tokens."""
        return self.uniforms.shape[1] - 1

    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the state, each with one row per slot."""
        return list(vars(self).values())

    def enter(
        self,
        first: int,
        prompt_lengths: torch.Tensor,
        limits: torch.Tensor,
        sample_ids: torch.Tensor,
        seed: int | torch.Tensor,
    ) -> None:
        """Put new sequences into the slots from `first` on; tensors are (m,) int64, that of seeds (m, 1)."""
        slots = slice(first, first + len(sample_ids))
        self.lengths[slots], self.limits[slots] = prompt_lengths, limits
        self.num_sampled[slots] = 0
        self.given_ids[slots] = -1
        self.is_live[slots], self.is_stopped[slots] = True, False
        positions = torch.arange(self.uniforms.shape[1], device=sample_ids.device)
        self.uniforms[slots] = counter_uniform(seed, sample_ids.unsqueeze(1), positions)

    def continue_with(self, slot: int, count: int, token_ids: Sequence[int]) -> None:
        """Continue a sequence that stopped after `count` tokens with tokens of the environment."""
        self.given_ids[slot, count : count + len(token_ids)] = torch.as_tensor(token_ids, dtype=torch.int64)
        # The stop token is not in the cache yet, and later passes have overwritten last_ids.
        self.last_ids[slot] = self.response_ids[slot, count - 1]
        self.is_live[slot], self.is_stopped[slot] = True, False

    def sample(self, slots: slice, logits: torch.Tensor, options: SamplingOptions) -> None:
        """Sample the next token of the sequences in `slots` from logits (n, V), or use the given token with
        log-probability 0. Finished sequences do not change.
        """
        self.append(slots, options.sample(logits, self.next_uniforms(slots)), options.stop_token_id)

    def next_uniforms(self, slots: slice) -> torch.Tensor:
        """Uniforms (n,) of the next tokens."""
        return self.uniforms[slots].gather(1, self.num_sampled[slots].unsqueeze(1)).squeeze(1)

    def append(self, slots: slice, sample: Sample, stop_token_id: int) -> None:
        """Append the tokens of `sample`, see there."""
        row = {name: tensor[slots] for name, tensor in vars(self).items()}
        columns = row["num_sampled"].unsqueeze(1)
        token_ids, logprobs, log_kept = sample
        given_ids = row["given_ids"].gather(1, columns).squeeze(1)
        is_given = given_ids >= 0
        token_ids = torch.where(is_given, given_ids, token_ids)
        logprobs, log_kept = (x.masked_fill(is_given, 0.0) for x in (logprobs, log_kept))
        # A finished sequence writes to the column after its last token, which is never used.
        row["response_ids"].scatter_(1, columns, token_ids.unsqueeze(1))
        row["logprobs"].scatter_(1, columns, logprobs.unsqueeze(1))
        row["log_kept"].scatter_(1, columns, log_kept.unsqueeze(1))
        row["last_ids"].copy_(token_ids)
        is_live = row["is_live"]
        row["num_sampled"].add_(is_live)
        is_stop = (token_ids == stop_token_id) & ~is_given  # the environment's tokens may include it
        row["is_stopped"].logical_or_(is_stop & is_live)
        is_live.logical_and_(~is_stop & (row["num_sampled"] < row["limits"]))


class DecodeGraphs:
    """CUDA graphs by (rows, positions, sampling options), valid while the weights keep their addresses.

    Options are None for passes that do not sample.

    `group`: the ranks of a tensor-parallel model, None for a single rank. They drop their graphs together:
    a rank that still has a graph would not join the collectives of the warm-up pass before a capture.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        self.model, self.group = model, group
        self.graphs: dict[tuple[int, int, SamplingOptions | None], torch.cuda.CUDAGraph] = {}
        self.is_capturable = True
        self._addresses: list[int] = []
        self._is_checked = False  # since the generation began
        self._pool: object | None = None
        self._stream: torch.cuda.Stream | None = None
        distributed.RELEASED_AT_STOP.add(self)

    def begin(self, options: SamplingOptions | None) -> None:
        """Prepare for a generation."""
        # The seed is used before a pass, not in it.
        self._options = options and dataclasses.replace(options, seed=0)
        self._is_checked = False

    def _drop_stale(self) -> None:
        """Drop the graphs if a weight has moved or there are too many options. The prompts' pass is over:
        the first one moves the factors of adapters.
        """
        tensors = (*self.model.parameters(), *self.model.buffers())  # adapters are buffers
        addresses = [tensor.data_ptr() for tensor in tensors]
        has_moved = addresses != self._addresses
        self._addresses = addresses
        if self.group is not None:
            has_moved = bool(distributed.max_float(has_moved, self.group))
        known = {key[2] for key in self.graphs}
        if has_moved or (len(known) == _MAX_CACHED_SAMPLINGS and self._options not in known):
            self.release()
        self._is_checked = True

    def release(self) -> None:
        """Destroy the graphs, even if something still refers to them."""
        for graph in self.graphs.values():
            graph.reset()
        self.graphs.clear()
        self._pool = None

    def run(
        self, rows: int, upto: int, run_pass: Callable[[int, int], None], state: list[torch.Tensor]
    ) -> None:
        """Run `run_pass(rows, upto)`, as a graph if possible; `state`: the tensors that a pass modifies."""
        if not self._is_checked:
            self._drop_stale()
        key = (rows, upto, self._options)
        if self.is_capturable and key not in self.graphs:
            self._capture(key, lambda: run_pass(rows, upto), state)
        if self.is_capturable:
            self.graphs[key].replay()
        else:
            run_pass(rows, upto)

    def _capture(
        self,
        key: tuple[int, int, SamplingOptions | None],
        run_pass: Callable[[], None],
        state: list[torch.Tensor],
    ) -> None:
        """Capture a pass; clear `is_capturable` if that is impossible because the pass synchronizes with the
        device or copies to it.
        """
        before = [tensor.clone() for tensor in state]
        # One stream for all graphs of this model, not shared with other models: cuBLAS keeps a workspace per
        # stream, and destroying a graph frees its stream's workspace.
        self._stream = self._stream or torch.cuda.Stream()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        mode = torch.cuda.get_sync_debug_mode()
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):
                torch.cuda.set_sync_debug_mode("error")
                run_pass()  # warm-up: libraries allocate workspaces on first use
                torch.cuda.set_sync_debug_mode(mode)
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                    run_pass()
            self.graphs[key] = graph
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            self.is_capturable = False  # the same on all ranks of the group: they run the same model
            self.release()
            if distributed.is_main():
                say(f"note: the model generates without CUDA graphs: {first_line(error)}")
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        torch.cuda.current_stream().wait_stream(self._stream)
        for tensor, old in zip(state, before, strict=True):
            tensor.copy_(old)


class DecodeStep:
    """The model, its cache and its state; `run` adds a token to the first n slots, with `graphs` on a GPU."""

    def __init__(
        self, model: nn.Module, cache: SlotCache, state: DecodeState, graphs: DecodeGraphs | None = None
    ) -> None:
        self.model = model
        self.cache = cache
        self.state = state
        self._takes_positions = forward_accepts(model, "position_ids")
        self._keeps_logits = forward_accepts(model, "logits_to_keep")
        self._cache_argument = "past_key_values"
        if forward_accepts(model, "cache"):  # its name from transformers 5.24 on
            self._cache_argument = "cache"
        config = plain_model(model).config
        self._has_slot_attention = config._attn_implementation == SLOT_ATTENTION
        config = config.get_text_config()
        self._has_alibi = not self._takes_positions or bool(getattr(config, "alibi", False))
        self._window, self._chunk, self._is_mixed = _windows(config)
        _check_own_window(config, cache.max_length)
        device = state.lengths.device
        self._dtype = next(model.parameters()).dtype
        self._rows = torch.arange(cache.num_slots, device=device)
        self._positions = torch.arange(cache.max_length, device=device)
        self._unread = torch.zeros(1, dtype=self._dtype, device=device)
        # Passes between two checks for finished sequences: each check synchronizes with the device.
        self.passes_per_check = 4 if device.type == "cuda" else 1
        self._graphs = graphs if device.type == "cuda" else None
        self.logits = torch.empty(0, device=device)  # (S, V) of the last pass if that does not sample

    def begin(self, options: SamplingOptions | None) -> None:
        """Prepare for a generation; the weights may have moved since the last one.

        Without options, a pass does not sample: it leaves `logits`.
        """
        self.options = options
        if self._graphs:
            self._graphs.begin(options)

    def prefill(
        self, ids: torch.Tensor, mask: torch.Tensor, slots: torch.Tensor, has_padding: bool
    ) -> torch.Tensor:
        """Logits (m, V) after prompts (m, T), left-padded, whose keys and values are stored in `slots`.

        mask (m, T) bool, True for real tokens; all are real if not `has_padding`, an argument because reading
        the mask would synchronize with the GPU.
        """
        self.cache.begin_prefill(slots, mask if has_padding else None)
        inputs: dict[str, Any] = {"input_ids": ids, self._cache_argument: self.cache, "use_cache": True}
        inputs["attention_mask"] = mask.long() if has_padding else None
        if self._takes_positions:
            inputs["position_ids"] = build_position_ids(mask)
        if self._keeps_logits:
            inputs["logits_to_keep"] = 1
        logits = self.model(**inputs).logits[:, -1]
        if self.options is None and not len(self.logits):  # outside graphs: its address stays
            self.logits = logits.new_empty(self.cache.num_slots, logits.shape[1])
        return logits

    def has_room(self, num_slots: int, max_length: int, max_new_tokens: int) -> bool:
        """Whether the cache and the state are large enough."""
        return (
            self.cache.num_slots >= num_slots
            and self.cache.max_length >= max_length
            and self.state.max_new_tokens >= max_new_tokens
        )

    def run(self, num_rows: int, upto: int) -> None:
        """Sample a token for each of the first `num_rows` slots; `upto` exceeds every position in use."""
        if not self._graphs:
            self._run_pass(num_rows, upto)
            return
        # A graph has fixed numbers of rows and positions; rounding both up limits the number of graphs.
        rows = min(1 << (num_rows - 1).bit_length(), self.cache.num_slots)
        buckets = -(-upto // POSITIONS_PER_BUCKET)
        upto = min(buckets * POSITIONS_PER_BUCKET, self.cache.max_length)
        self._graphs.run(rows, upto, self._run_pass, self.state.tensors())

    def _run_pass(self, num_rows: int, upto: int) -> None:
        state = self.state
        slots = slice(0, num_rows)
        positions = state.lengths[:num_rows]
        inputs: dict[str, Any] = {}
        if self._has_slot_attention:
            inputs["used_keys"] = UsedKeys.of(positions, upto, self.cache.max_length)
            upto = self.cache.max_length  # the kernel takes whole slots
        self.cache.begin_decode(self._rows[:num_rows], positions, upto)
        inputs |= {
            "input_ids": state.last_ids[:num_rows].unsqueeze(1),
            "attention_mask": self._build_mask(positions, upto),
            self._cache_argument: self.cache,
            "use_cache": True,
        }
        if self._takes_positions:
            inputs["position_ids"] = positions.unsqueeze(1)
        logits = self.model(**inputs).logits[:, -1]
        positions.add_(state.is_live[:num_rows])
        if self.options is None:
            self.logits[slots] = logits
        else:
            state.sample(slots, logits, self.options)

    def _build_mask(self, positions: torch.Tensor, upto: int) -> Any:
        """Mask of each row over the first `upto` positions, in the form that the model expects."""
        if self._has_slot_attention:  # reads lengths instead
            unread = self._unread.expand(len(positions), 1, 1, upto)
            return dict.fromkeys(WINDOWED | {"full_attention"}, unread) if self._is_mixed else unread
        keys = self._positions[:upto]
        is_visible = keys <= positions.unsqueeze(1)  # (n, L)
        if self._has_alibi:
            return is_visible.long()  # the model builds its ALiBi biases from it
        near = mask = self._additive(is_visible)
        if self._window is not None and upto > self._window:
            near = self._additive(is_visible & (keys > positions.unsqueeze(1) - self._window))
        if self._chunk is not None and upto > self._chunk:
            is_of_chunk = keys // self._chunk == positions.unsqueeze(1) // self._chunk
            near = self._additive(is_visible & is_of_chunk)
        return dict.fromkeys(WINDOWED, near) | {"full_attention": mask} if self._is_mixed else near

    def _additive(self, is_visible: torch.Tensor) -> torch.Tensor:
        """Additive mask (n, 1, 1, L): 0 where visible, else the smallest number."""
        mask = torch.zeros(is_visible.shape, dtype=self._dtype, device=is_visible.device)
        return mask.masked_fill_(~is_visible, torch.finfo(self._dtype).min)[:, None, None, :]


def _check_own_window(config: Any, max_length: int) -> None:
    """Raise ValueError if `max_length` exceeds the length up to which a family's layers do not depend on a
    key's index (GPT-Neo's windows) or on the cache's length (Llama 4's temperatures): slots change both.
    """
    layers = ""
    limit = max_length
    if config.model_type == "gpt_neo" and "local" in config.attention_layers:
        layers = "local layers"
        limit = config.window_size
    elif getattr(config, "attn_temperature_tuning", False):
        layers = "layers without rotary positions"
        limit = config.floor_scale - 1
    if max_length > limit:
        raise ValueError(
            f"{config.model_type}'s {layers} are exact up to {limit} tokens, but sequences may have "
            f"{max_length}: keep prompt and response within {limit}, or leave out --enable_hybrid_engine"
        )


def _windows(config: Any) -> tuple[int | None, int | None, bool]:
    """(Window of sliding layers, chunk size of chunked layers, whether the model takes one mask per layer
    type).
    """
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if not kinds:
        return window, None, False
    chunk = config.attention_chunk_size if "chunked_attention" in kinds else None
    return window if "sliding_attention" in kinds else None, chunk, bool(kinds & WINDOWED)
