"""The auxiliary load-balancing loss of mixtures of experts, with the coefficient of the model's
configuration.

# L layers with experts, N tokens, E experts
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from common.data.packed_batch import PackedBatch
from common.models.attention import backbone_of
from common.models.model_inputs import ModelInputs
from common.models.transformers_internals import class_for


def router_coefficient(model: PreTrainedModel) -> float:
    """Weight of the loss in training; 0 without routers that can be recorded, and for a family whose language
    model has a coefficient and never adds the loss (Llama 4).
    """
    backbone = backbone_of(model)
    language_model = class_for(AutoModelForCausalLM, model.config) or type(model)
    config = model.config.get_text_config()
    can_record = "router_logits" in (getattr(backbone, "_can_record_outputs", None) or {})
    can_record &= "output_router_logits" in inspect.signature(language_model.forward).parameters
    return float(getattr(config, "router_aux_loss_coef", None) or 0.0) if can_record else 0.0


def balance_loss(
    config: Any, router_logits: tuple[torch.Tensor, ...], inputs: ModelInputs
) -> torch.Tensor | None:
    """E times the sum over experts of (choices per token) x (mean probability), both over all layers: fp32
    scalar, the number of experts per token if all are used equally. None without a router.

    router_logits: L of (N + padding, E). Padding does not count, and tokens shared by sequences count once.
    arXiv:2101.03961 eq. 4 to 6, as transformers has it.
    """
    if not router_logits:
        return None  # all layers are dense
    num_slots = inputs.input_ids.numel()
    mask = None
    if inputs.num_tokens < num_slots:
        mask = torch.zeros(num_slots).index_fill(0, inputs.token_slots, 1.0)
        mask = mask.to(inputs.input_ids.device)
    num_experts = router_logits[0].shape[-1]
    num_chosen = config.get_text_config().num_experts_per_tok
    # In fp32, as routers choose: in bf16 many experts have equal probabilities.
    logits = tuple(layer.flatten(0, -2).float() for layer in router_logits)
    return load_balancing_loss_func(logits, num_experts, num_chosen, mask)


def add_router_loss(
    engine: Any, loss_sum: torch.Tensor, batch: PackedBatch, count_items: Callable[[PackedBatch], float]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A micro-batch's summed loss plus the router loss of its pass, and the router loss alone as a statistic;
    the loss unchanged for a model without experts.

    `engine` holds a PolicyModel or a ValueModel. A router loss belongs to one micro-batch: the mean is
    weighted by the items of each.
    """
    model: nn.Module = getattr(engine, "module", engine)
    router_loss = model.router_loss
    model.router_loss = None  # frees the graph of the pass
    if router_loss is None:
        return loss_sum, {}
    router_sum = router_loss * count_items(batch)
    return loss_sum + model.router_coefficient * router_sum, {"router_loss": router_sum.detach()}
