"""Models of a plan, on torch's meta device, and what the hybrid engine's switch moves of one."""

import copy
from functools import cache
from math import prod
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from common.engine.muon import is_hidden_matrix
from common.generation.resharding import Route, TPLayout, group_by_layers, plan_weight
from common.generation.tp_plans import Cut, NoPlan, build_cuts
from common.models.attention import backbone_of
from common.models.loading import plain_model
from common.models.lora import LoraOptions, build_lora, linear_module_names, trained_weights

cached_cuts = cache(build_cuts)


class PlannedModel:
    """A model without weights: `plain` of transformers, and `module`, the same with the adapters of `lora`.

    Raises ValueError for a classifier without a `score` head, or if no layer would get an adapter.
    """

    def __init__(self, plain: PreTrainedModel, lora: LoraOptions | None = None) -> None:
        self.plain = self.module = plain
        if lora:
            with torch.device("meta"):
                self.module = build_lora(copy.deepcopy(plain), lora)
        text = plain.config.get_text_config()
        self.num_layers = text.num_hidden_layers
        self.hidden_size = text.hidden_size
        named = dict(self.module.named_parameters())  # tied weights count once
        self.sizes = [p.numel() for p in named.values()]
        self.matrices = {name: p.numel() for name, p in named.items() if p.dim() > 1}
        self.num_params = sum(self.sizes)
        self.num_in_backbone = sum(p.numel() for p in backbone_of(plain).parameters())
        trained = {name: p for name, p in named.items() if p.requires_grad}
        self.num_trained_tensors = len(trained)
        self.num_trained = sum(p.numel() for p in trained.values())
        in_matrices = [p.numel() for name, p in trained.items() if is_hidden_matrix(name, p)]  # for Muon
        self.num_in_matrices = sum(in_matrices)
        self.largest_matrix = max(in_matrices, default=0)
        self.linear_names = linear_module_names(plain)
        in_linear = [plain.get_submodule(name).weight.numel() for name in self.linear_names]
        self.num_in_linear = sum(in_linear)
        self.largest_linear = max(in_linear, default=0)
        stacks = (w for w in trained_weights(self.module).values() if w.num_stacked > 1)
        self.num_in_stacks = sum(w.parameter.numel() for w in stacks)  # with adapters
        self.is_value_model = isinstance(getattr(plain, "score", None), nn.Linear)
        adapted = plain_model(self.module)
        self.head = adapted.score if self.is_value_model else adapted.get_output_embeddings()
        if self.head is None:
            raise ValueError(f"{type(plain).__name__} has no linear `score` head")
        # ZeRO 3 gathers all parameters of a module at once.
        modules = self.module.modules()
        self.largest_module = max(sum(p.numel() for p in m.parameters(recurse=False)) for m in modules)

    def find_cuts(self, tp_size: int) -> dict[str, Cut]:
        """Cuts of the weights; {} for a family without a plan, which generates with t = 1.

        Raises ValueError for a size that does not fit the model.
        """
        try:
            return cached_cuts(self.plain, tp_size)
        except NoPlan:
            return {}


@cache
def with_adapters(model: PlannedModel, lora: LoraOptions) -> PlannedModel:
    """The model with the adapters of `lora`, or unchanged without any."""
    return PlannedModel(model.plain, lora) if lora.dim or lora.folder else model


class Switch(NamedTuple):
    """Elements of weights that a rank holds and moves when generation starts."""

    new: int  # in its slices, except views of the trainer's weights
    from_gather_group: int  # received
    from_all: int  # received
    staged: int  # in send and receive buffers until the slices are built: largest sum of `at_once` layers
    new_at_once: int  # largest part of `new` in `at_once` layers: copied into slices that are kept


@cache
def plan_switch(
    model: PlannedModel,
    layout: TPLayout,
    at_once: int,
    *,
    is_sharded: bool,
    merges: bool = False,
    is_packed: bool = False,
) -> Switch:
    """Elements that the hybrid engine moves and holds on a rank, by its own plan, `at_once` layers at a time.

    Unless `is_sharded`, every rank has all weights. `is_packed`: linear layers are in 4 bits. Unless it
    `merges` adapters, generation has a copy of each factor A.
    """
    cuts = model.find_cuts(layout.tp_size)
    weights = trained_weights(model.module)
    new = from_group = from_all = max_staged = max_new = 0
    for names in group_by_layers(list(weights), at_once):
        staged = 0
        new_before = new
        for name in names:
            plan = plan_weight(tuple(weights[name].parameter.shape), cuts.get(name), layout)
            is_view = plan.cut is None or (plan.cut.dim == 0 and len(plan.cut.ranges[0]) == 1)
            if is_sharded:
                is_view = plan.is_view
                received = plan.count_received()
                from_group += received if plan.route is Route.ROWS else 0
                from_all += received if plan.route is not Route.ROWS else 0
                if plan.route is Route.BLOCKS:
                    staged += 2 * received
                elif plan.route is Route.WHOLE and plan.cut is not None:
                    staged += layout.world_size * plan.shard_size
            # W + scaling B A is a new tensor, even if W's slice is a view.
            has_adapter = weights[name].lora_a is not None
            is_special = has_adapter or (is_packed and name.removesuffix(".weight") in model.linear_names)
            is_merged = is_special and (merges or weights[name].is_added_by_trainer)
            new += 0 if is_view and not is_merged else prod(plan.local_shape)
            if has_adapter and not is_merged:
                new += weights[name].lora_a.numel() + is_sharded * weights[name].lora_b.numel()
        max_staged = max(max_staged, staged)
        max_new = max(max_new, new - new_before)
    return Switch(new, from_group, from_all, max_staged, max_new)
