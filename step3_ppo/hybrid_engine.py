"""Train mode <-> generate mode of the actor: one set of weights, two uses.

ZeRO 0-2: the inference module *is* the trained module, nothing is copied or sent. ZeRO 3: the weights are
gathered one parameter at a time into a plain module without DeepSpeed's hooks, and dropped on leaving.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn

from common import distributed
from common.models import plain_model
from common.zero3 import gather_whole, is_sharded


class HybridEngine:
    """A DeepSpeed engine that can also generate.

    `build_module` makes a module of the engine's structure; it is called once, without memory for weights,
    and only when the engine's own are sharded.
    """

    def __init__(self, engine: Any, build_module: Callable[[], nn.Module]) -> None:
        self.engine = engine
        self.is_sharded = any(is_sharded(p) for p in engine.module.parameters())
        self.inference_module: nn.Module = engine.module
        if self.is_sharded:
            with init_empty_weights(include_buffers=False):
                self.inference_module = build_module()
            plain_model(self.inference_module).tie_weights()  # each empty weight is an object of its own
            for module in self.inference_module.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, buffer.to(distributed.device()))
            self._owners = _find_owners(self.inference_module)

    @contextmanager
    def generation_mode(self) -> Iterator[nn.Module]:
        """Give the inference module, in eval mode with whole weights; leaving gives back the trainer
        untouched.

        Every rank must enter it together; inside, ranks need not keep step.
        """
        was_training = self.engine.module.training
        try:
            if self.is_sharded:
                self._gather_weights()
            self.inference_module.eval()
            yield self.inference_module
        finally:
            if self.is_sharded:
                self._drop_weights()
            self.engine.module.train(was_training)

    def _gather_weights(self) -> None:
        for name, parameter in self.engine.module.named_parameters():
            with torch.no_grad(), gather_whole([parameter]):
                weight = nn.Parameter(parameter.detach().clone(), requires_grad=False)
            for module, attribute in self._owners[name]:
                module._parameters[attribute] = weight

    def _drop_weights(self) -> None:
        for owners in self._owners.values():
            for module, attribute in owners:
                parameter = module._parameters[attribute]
                module._parameters[attribute] = nn.Parameter(parameter.to("meta"), requires_grad=False)


def _find_owners(root: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Return {parameter name: every (module, attribute) that holds it}; tied weights have several."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in root.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((module, attribute))
    return {name: owners[id(parameter)] for name, parameter in root.named_parameters()}
