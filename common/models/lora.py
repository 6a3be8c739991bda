"""LoRA: new and saved adapters, their weights under plain transformers' names, and models that share a base.

PEFT is imported where there are adapters: with bitsandbytes and torch's compiler it takes a second.

# O output rows, I input columns, r rank of an adapter, E experts whose matrices are stacked in one parameter
"""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from common.models.attention import backbone_name
from common.models.four_bit import packing_of, unpacked, whole_shape
from common.models.loading import init_weight, plain_model
from common.models.saved_adapters import (
    ADAPTER_WEIGHTS,
    POOLING,
    SCORE_HEAD,
    check_supported,
    is_adapter,
    read_adapter_config,
)
from common.ranks import distributed
from common.ranks.failures import first_line
from common.ranks.zero3 import gather_whole


@dataclass(frozen=True)
class LoraOptions:
    """Options of low-rank adapters; `dim` 0 means none, `alpha` 0 means alpha = dim (scaling 1).

    `folder` has a saved adapter to start from, whose own rank, scaling and layers are used.
    """

    dim: int = 0
    alpha: float = 0.0
    module_name: str = "auto"
    only_optimize_lora: bool = True
    folder: str = ""

    @classmethod
    def of(cls, args: Any, role: Any) -> Self:
        """Options from a program's flags; `role` as in `ModelOptions.of`."""
        path = role.model_name_or_path
        folder = path if is_adapter(path) else ""
        return cls(role.lora_dim, args.lora_alpha, role.lora_module_name, args.only_optimize_lora, folder)


def linear_module_names(model: nn.Module) -> list[str]:
    """Names of the linear layers that LoRA can adapt (all but the output head and score head)."""
    heads = {id(model.get_output_embeddings())} if hasattr(model, "get_output_embeddings") else set()
    names = [n for n, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D)) and id(m) not in heads]
    return [n for n in names if n.rsplit(".", 1)[-1] not in ("score", "lm_head", "embed_out")]


def stacked_names(model: nn.Module) -> list[str]:
    """Names of the parameters that stack the matrices of several experts."""
    return [
        f"{owner}.{name}".replace(".base_layer", "")
        for owner, module in model.named_modules()
        if "Experts" in type(module).__name__
        for name, parameter in module.named_parameters(recurse=False)
        if len(whole_shape(parameter)) == 3
    ]


def adapted_model_targets(model: nn.Module, module_name: str, flag: str = "--lora_module_name") -> list[str]:
    """Linear layers and stacked matrices of a model that `module_name` selects.

    Raises ValueError as `lora_targets` does.
    """
    return lora_targets(linear_module_names(model), module_name, flag, stacked_names(model))


def lora_targets(
    names: list[str], module_name: str, flag: str = "--lora_module_name", stacked: Sequence[str] = ()
) -> list[str]:
    """Those of the linear layers' `names` and of the `stacked` matrices that contain `module_name`, or, if
    none does, that match it as a regular expression. `auto` selects all linear layers and no stacked matrix.

    Raises ValueError with the candidates if nothing matches: an adapter without a layer would train nothing.
    """
    candidates = [*names, *stacked]
    targets = names if module_name == "auto" else [n for n in candidates if module_name in n]
    if not targets:
        try:
            targets = [n for n in candidates if re.search(module_name, n)]
        except re.error:  # not an expression, and not a part of any name
            pass
    if not targets:
        parts = {n.rsplit(".", 1)[-1] for n in candidates}
        parts |= {n.partition(".0.")[0] + "." for n in candidates if ".0." in n}
        raise ValueError(
            f"{flag} {module_name!r} matches no linear layer and no stacked matrix; use auto, a part of a "
            "name or an expression: " + ", ".join(sorted(parts))
        )
    return targets


def _new_config(model: PreTrainedModel, options: LoraOptions) -> Any:
    """PEFT's configuration of new adapters. Raises ValueError if `module_name` matches nothing.

    PEFT mistakes a linear layer for experts of transformers 4 if it has one of their names: such a layer is
    selected by its weight, as stacked matrices are.
    """
    from peft import LoraConfig

    targets = adapted_model_targets(model, options.module_name)
    stacked = set(stacked_names(model))
    layers = [name for name in targets if name not in stacked]
    renamed = _mistaken_for_experts(model, layers)
    parameters = [f"{name}.weight" for name in renamed] + [name for name in targets if name in stacked]
    return LoraConfig(
        r=options.dim,
        lora_alpha=options.alpha or float(options.dim),
        target_modules=[name for name in layers if name not in renamed],
        target_parameters=parameters or None,
        bias="none",
    )


def _mistaken_for_experts(model: PreTrainedModel, layers: list[str]) -> list[str]:
    """Layers that PEFT would rename, by the last parts of their names."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    words = {name.rpartition(".")[2] for name in layers}
    for word in list(words):
        config = LoraConfig(target_modules=[word])
        with suppress(ValueError):  # PEFT fuses the layer with another
            convert_peft_config_for_transformers(config, model, None)
            words -= set(config.target_modules)
    return [name for name in layers if name.rpartition(".")[2] in words]


def build_lora(model: PreTrainedModel, options: LoraOptions) -> nn.Module:
    """The model with PEFT adapters, to be filled by `add_lora`, or the model itself without adapters.

    The adapters are trained, and the score head of a value model; without `only_optimize_lora` everything but
    the adapted matrices, as in DeepSpeed-Chat. Raises ValueError if they fit no layer.
    """
    if options.dim == 0 and not options.folder:
        return model
    from peft import get_peft_model

    config = _read_lora_config(options.folder) if options.folder else _new_config(model, options)
    try:
        adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
    except ValueError as error:  # the model has none of its layers
        raise ValueError(f"{options.folder}: the adapter cannot be loaded: {first_line(error)}") from error
    adapted_config = adapted.peft_config["default"]
    if not isinstance(adapted_config.target_modules, str):
        # PEFT makes it a set, whose order differs between processes.
        adapted_config.target_modules = sorted(adapted_config.target_modules)
    adapted_config.target_parameters = sorted(adapted_config.target_parameters or ()) or None
    adapted_ids = {id(w.parameter) for w in trained_weights(adapted).values() if w.lora_a is not None}
    for name, parameter in adapted.named_parameters():
        is_frozen = id(parameter) in adapted_ids or name.endswith((".base_layer.weight", ".base_layer.bias"))
        if "lora_" not in name and not is_frozen:
            parameter.requires_grad = not options.only_optimize_lora or name.endswith(SCORE_HEAD)
    return adapted


def add_lora(model: PreTrainedModel, options: LoraOptions, seed: int = 0) -> nn.Module:
    """The model with the adapters of `build_lora`: those of `options.folder`, or new ones from the seed.

    Every rank must call this. Raises ValueError if the folder's adapters do not fit this model.
    """
    adapted = build_lora(model, options)
    if options.folder:
        _load_adapter(adapted, options.folder)
    elif options.dim:
        for name, parameter in adapted.named_parameters():
            if "lora_A" in name:  # PEFT's A would depend on the ZeRO stage; B stays zero
                shape = getattr(parameter, "ds_shape", parameter.shape)
                init_weight(parameter, name, std=shape[-1] ** -0.5, seed=seed)
    if adapted is not model:
        distributed.print_once(f"note: {_describe_reach(adapted)}")
    return adapted


def _describe_reach(adapted: nn.Module) -> str:
    """The share of the weights that the adapters reach, as text."""
    sizes = {name: whole_shape(w.parameter).numel() for name, w in trained_weights(adapted).items()}
    reached = [name for name, weight in trained_weights(adapted).items() if weight.lora_a is not None]
    others = [name for name in stacked_names(plain_model(adapted)) if name not in reached]
    total = sum(sizes.values())
    text = f"the adapters reach {len(reached)} matrices, {sum(sizes[n] for n in reached) / total:.1%}"
    text += f" of the {total:,} weights of {plain_model(adapted).config.model_type}"
    if others:
        share = sum(sizes[name] for name in others) / total
        part = others[0].split(".")[-2]
        text += f"; {share:.1%} are stacked matrices, such as experts, which they do not reach: the module "
        text += f"name {part!r} adds them, '.' adds all matrices"
    return text


def _read_lora_config(folder: str) -> Any:
    """PEFT's configuration of a saved adapter, without dropout and task-specific fields."""
    from peft import LoraConfig

    check_supported(folder)
    config = {name: value for name, value in read_adapter_config(folder).items() if name != POOLING}
    config |= {"task_type": None, "modules_to_save": None, "lora_dropout": 0.0, "inference_mode": False}
    try:
        return LoraConfig(**config)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder}: the adapter cannot be loaded: {first_line(error)}") from error


@torch.no_grad()
def _load_adapter(adapted: nn.Module, folder: str) -> None:
    """Fill the factors, and the score head of a value model if saved, from a saved adapter."""
    file = Path(folder) / ADAPTER_WEIGHTS
    try:
        saved = load_file(file)
    except (OSError, SafetensorError) as error:
        why = f"{first_line(error)}; pickled adapters are not read"
        raise ValueError(f"{file} cannot be read: {why}") from error
    targets = {
        name.replace(".default.", "."): parameter
        for name, parameter in adapted.named_parameters()
        if ".lora_" in name or name.endswith(SCORE_HEAD)
    }
    sizes = {name: getattr(p, "ds_shape", p.shape) for name, p in targets.items()}
    missing = [n for n in sizes if n not in saved and not n.endswith(SCORE_HEAD)]
    others = [n for n, value in saved.items() if tuple(value.shape) != tuple(sizes.get(n, ()))]
    if missing or others:
        raise ValueError(
            f"{folder} is not an adapter of {plain_model(adapted).name_or_path} for this role: "
            f"{len(missing)} LoRA factors of linear layers are missing, {len(others)} weights are something "
            f"else, or of another size, such as {[*missing, *others][0]}; give the export/ folder of the run"
        )
    for name, value in saved.items():
        with gather_whole([targets[name]], to_modify=True):
            if targets[name].numel():
                targets[name].copy_(value)


def share_backbone(model: PreTrainedModel, owner: nn.Module) -> None:
    """Replace the frozen backbone weights of a model by those of `owner`, a model of the same base, and free
    its own.

    `owner` is a transformers model or its PEFT wrapper; `model` has no adapters yet. The parameters are then
    the same objects, so moving one model moves both.
    """
    prefix = f"{backbone_name(model)}."
    shared = {name: weight.parameter for name, weight in trained_weights(owner).items()}
    for name, module in model.named_modules():
        own = [leaf for leaf, parameter in module._parameters.items() if parameter is not None]
        for leaf in own if f"{name}.".startswith(prefix) else ():
            parameter = shared[f"{name}.{leaf}"]
            assert not parameter.requires_grad, f"{name}.{leaf} is trained: it cannot be shared"
            module._parameters[leaf] = parameter


class TrainedWeight(NamedTuple):
    """A weight and, if LoRA adapts it, the factors and the scaling of its adapter.

    `packing`: the quantisation state of a weight in 4 bits. `is_added_by_trainer`: the trainer's own forward
    pass merges the adapter, instead of computing it beside the weight.
    """

    parameter: torch.Tensor
    lora_a: torch.Tensor | None = None  # (r, I)
    lora_b: torch.Tensor | None = None  # (O, r)
    scaling: float = 0.0
    is_stored_transposed: bool = False  # (I, O) in GPT-2's Conv1D, (E, I, O) in gpt-oss
    packing: Any = None
    num_stacked: int = 1  # E: the weight is (E, O, I), A (E r, I), B (O, r E), where E varies fastest
    is_added_by_trainer: bool = False

    def tensors(self) -> list[torch.Tensor]:
        """The weight and, if it has an adapter, the factors A and B."""
        return [self.parameter] if self.lora_a is None else [self.parameter, self.lora_a, self.lora_b]

    def replace_tensors(self, tensors: list[torch.Tensor]) -> "TrainedWeight":
        """This weight with other tensors instead of `tensors()`, such as gathered ones."""
        return self._replace(**dict(zip(("parameter", "lora_a", "lora_b"), tensors, strict=False)))

    def cut_factors(self, take: Callable[[torch.Tensor, int], torch.Tensor]) -> "TrainedWeight":
        """This weight, a part of the whole one, and the same part of its adapter: `take(factor, dim)` returns
        a factor's part along dimension `dim` of the stored weight.
        """
        if self.lora_a is None or self.num_stacked > 1:
            return self
        if self.is_stored_transposed:
            return self._replace(lora_a=take(self.lora_a.T, 0).T, lora_b=take(self.lora_b.T, 1).T)
        return self._replace(lora_a=take(self.lora_a, 1), lora_b=take(self.lora_b, 0))

    def merged(self) -> torch.Tensor:
        """weight + scaling B A in the weight's dtype, added in fp32; the weight itself without an adapter.

        A weight in 4 bits is unpacked. Nothing is modified.
        """
        weight = unpacked(self.parameter, self.packing) if self.packing else self.parameter
        if self.lora_a is None:
            return weight
        if self.num_stacked > 1:
            return self._merged_stack()
        left = self.lora_b.float()
        right = self.lora_a.float()
        if self.is_stored_transposed:
            left, right = right.T, left.T
        return (weight.float() + self.scaling * (left @ right)).to(weight.dtype)

    def _merged_stack(self) -> torch.Tensor:
        """All experts' matrices merged one at a time, so that only one is in fp32."""
        merged = torch.empty_like(self.parameter)
        factors_a = self.lora_a.chunk(self.num_stacked)
        factors_b = self.lora_b.unflatten(1, (-1, self.num_stacked)).unbind(2)
        for into, matrix, a, b in zip(merged, self.parameter, factors_a, factors_b, strict=True):
            into.copy_(TrainedWeight(matrix, a, b, self.scaling, self.is_stored_transposed).merged())
        return merged


def trained_weights(model: nn.Module) -> dict[str, TrainedWeight]:
    """{plain name: weight} of a transformers model or its PEFT wrapper; tied weights occur once."""
    plain = plain_model(model)
    layers = {
        f"{name}.{getattr(layer, 'parameter_name', 'weight')}".replace(".base_layer", ""): layer
        for name, layer in plain.named_modules()
        # Of an adapted embedding, which only adapters from elsewhere have, it is empty.
        if getattr(layer, "lora_A", None)
    }
    weights = {}
    for name, parameter in plain.named_parameters():
        if ".lora_" in name:
            continue
        name = name.replace(".base_layer", "")
        packing = packing_of(parameter)
        weights[name] = TrainedWeight(parameter, packing=packing)
        if name in layers:
            layer = layers[name]
            factors = (layer.lora_A["default"].weight, layer.lora_B["default"].weight)
            is_conv1d = getattr(layer, "fan_in_fan_out", False)
            is_transposed = is_conv1d or getattr(layer.get_base_layer(), "is_transposed", False)
            num_stacked = getattr(layer, "num_experts", 1)
            layout = layer.scaling["default"], bool(is_transposed), packing, num_stacked
            is_added = hasattr(layer, "parameter_name")
            weights[name] = TrainedWeight(parameter, *factors, *layout, is_added_by_trainer=is_added)
    return weights
