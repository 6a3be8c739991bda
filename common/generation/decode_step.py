"""One token for each live sequence: the pass that generation repeats.

# S slots, n rows of a pass, L positions that attention reads, V vocabulary
"""

import dataclasses
from typing import Any

import torch
from torch import nn

from common.generation.decode_graphs import DecodeGraphs, round_positions, round_rows
from common.generation.decode_state import DecodeState, SamplingOptions
from common.generation.kv_cache import SlotCache
from common.generation.slot_attention import decoding
from common.models.loading import forward_accepts, plain_model


class DecodeStep:
    """The model, its cache and its state; `run` adds a token to the first n slots."""

    def __init__(
        self, model: nn.Module, cache: SlotCache, state: DecodeState, options: SamplingOptions
    ) -> None:
        self.model, self.cache, self.state, self.options = model, cache, state, options
        self._takes_positions = forward_accepts(model, "position_ids")
        config = plain_model(model).config.get_text_config()
        self._has_alibi = not self._takes_positions or bool(getattr(config, "alibi", False))
        self._window, self._is_mixed = _sliding_window(config)
        _refuse_own_window(config, cache.max_length)
        device = state.lengths.device
        self._dtype = next(model.parameters()).dtype
        self._rows = torch.arange(cache.num_slots, device=device)
        self._places = torch.arange(cache.max_length, device=device)
        # Passes that may run ahead before the host looks who ended: each look waits for the device.
        self.passes_per_look = 4 if device.type == "cuda" else 1
        self._graphs = DecodeGraphs(model) if device.type == "cuda" else None

    def begin(self) -> None:
        """Prepare for a generation; the weights may have moved since the last."""
        if self._graphs:
            self._graphs.check_weights()

    def has_room(self, num_slots: int, max_length: int, options: SamplingOptions) -> bool:
        """Whether the cache and the state are large enough, and tokens are drawn with these options.

        The seed may be another: it has made its numbers before a pass.
        """
        return (
            self.cache.num_slots >= num_slots
            and self.cache.max_length >= max_length
            and options == dataclasses.replace(self.options, seed=options.seed)
        )

    def run(self, num_rows: int, upto: int) -> None:
        """Draw a token for each of the first `num_rows` slots; `upto` is above every position in use."""
        if self._graphs:
            rows = round_rows(num_rows, self.cache.num_slots)
            upto = round_positions(upto, self.cache.max_length)
            self._graphs.run(rows, upto, self._run_pass, self.state.tensors())
        else:
            self._run_pass(num_rows, upto)

    def _run_pass(self, num_rows: int, upto: int) -> None:
        state = self.state
        slots, positions = slice(0, num_rows), state.lengths[:num_rows]
        self.cache.begin_decode(self._rows[:num_rows], positions, upto)
        inputs: dict[str, Any] = {
            "input_ids": state.last_ids[:num_rows].unsqueeze(1),
            "attention_mask": self._build_mask(positions, upto),
            "past_key_values": self.cache,
            "use_cache": True,
        }
        if self._takes_positions:
            inputs["position_ids"] = positions.unsqueeze(1)
        with decoding(positions):
            logits = self.model(**inputs).logits[:, -1]
        positions.add_(state.is_live[:num_rows])
        state.draw(slots, logits, self.options)

    def _build_mask(self, positions: torch.Tensor, upto: int) -> Any:
        """Return which of the first `upto` places each row attends to, in the form that the model wants."""
        places = self._places[:upto]
        is_visible = places <= positions.unsqueeze(1)  # (n, L)
        if self._has_alibi:
            return is_visible.long()  # the model makes its biases from it
        near = mask = self._additive(is_visible)
        if self._window is not None and upto > self._window:
            near = self._additive(is_visible & (places > positions.unsqueeze(1) - self._window))
        return {"full_attention": mask, "sliding_attention": near} if self._is_mixed else near

    def _additive(self, is_visible: torch.Tensor) -> torch.Tensor:
        """Return (n, 1, 1, L): 0 where visible, else the smallest number."""
        lowest = torch.finfo(self._dtype).min
        return torch.zeros(is_visible.shape, dtype=self._dtype, device=is_visible.device).masked_fill_(
            ~is_visible, lowest
        )[:, None, None, :]


def _refuse_own_window(config: Any, max_length: int) -> None:
    """Raise ValueError for GPT-Neo beyond its window: its local layers cut a mask of their own, by the place
    of a key among those given, which is wrong for slots.
    """
    window = getattr(config, "window_size", None)
    if config.model_type == "gpt_neo" and "local" in config.attention_layers and max_length > window:
        raise ValueError(
            f"gpt_neo's local layers see {window} tokens by a mask of their own, and sequences may have "
            f"{max_length}: keep prompt and answer within {window}, or leave out --enable_hybrid_engine"
        )


def _sliding_window(config: Any) -> tuple[int | None, bool]:
    """Return (positions that a windowed layer sees, whether other layers see all)."""
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if kinds:
        return (window, True) if "sliding_attention" in kinds else (None, False)
    return window, False
