"""Weights of a frozen model that are kept in CPU memory between uses."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from common.models.attention import decoder_layers
from common.ranks import distributed


class OffloadedWeights:
    """Parameters and buffers of a model, on the GPU only within `on_device`. They must not change there:
    nothing is copied back.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = decoder_layers(model)
        # Pinned for asynchronous copies to the GPU. The first part has all tensors outside the layers.
        parts = _tensors_by_layer(model, self._layers)
        self._parts = [[(tensor, tensor.data.pin_memory()) for tensor in part] for part in parts]
        self._copying = torch.cuda.Stream()
        self._move_to_cpu()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Context with the weights on the GPU; each is copied once.

        Copies are queued on a separate stream, layer by layer, and a layer waits for its own copies only: the
        first pass computes while later layers are being copied.
        """
        computing = torch.cuda.current_stream()
        hooks = []
        try:
            # Allocated on the computing stream, whose pool gets the memory back: no other stream holds any.
            for tensor, data in chain(*self._parts):
                tensor.data = torch.empty_like(data, device=distributed.device())
            self._copying.wait_stream(computing)  # it may still read the memory's old contents
            arrivals = [self._copy(part) for part in self._parts]
            computing.wait_event(arrivals[0])
            for layer, arrival in zip(self._layers, arrivals[1:], strict=True):
                hooks.append(layer.register_forward_pre_hook(partial(_wait, computing, arrival)))
            yield
        finally:
            computing.wait_stream(self._copying)  # before it reuses the memory
            for hook in hooks:
                hook.remove()
            self._move_to_cpu()

    def _copy(self, part: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.cuda.Event:
        """Start copying a part; return the event of its completion."""
        with torch.cuda.stream(self._copying):
            for tensor, data in part:
                tensor.data.copy_(data, non_blocking=True)
            return self._copying.record_event()

    def _move_to_cpu(self) -> None:
        for tensor, data in chain(*self._parts):
            tensor.data = data


def _wait(computing: torch.cuda.Stream, arrival: torch.cuda.Event, *_: Any) -> None:
    computing.wait_event(arrival)


def _tensors_by_layer(model: nn.Module, layers: list[nn.Module]) -> list[list[torch.Tensor]]:
    """Tensors outside the layers, then those of each layer; a shared tensor only in its first part."""
    owned = [list(layer.modules()) for layer in layers]
    inside = set(chain(*owned))
    seen = {}
    rest = [module for module in model.modules() if module not in inside]
    parts = []
    for modules in (rest, *owned):
        tensors = chain(*([*m.parameters(recurse=False), *m.buffers(recurse=False)] for m in modules))
        new = {id(tensor): tensor for tensor in tensors if id(tensor) not in seen}
        seen |= new
        parts.append(list(new.values()))
    return parts
