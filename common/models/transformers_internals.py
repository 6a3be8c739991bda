"""Private members of transformers' classes that several files read, for the versions that were tested."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel, modeling_utils
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange

TRANSFORMERS = ">=5.23,<5.25"  # as in requirements.txt


def class_for(auto_class: Any, config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The class that an auto class builds for a configuration; None if it has none (remote code)."""
    return auto_class._model_mapping.get(type(config), None)


def attention_of(model: PreTrainedModel) -> str:
    """Name of the attention that a model was loaded with."""
    return model.config._attn_implementation


def is_stateful(model: PreTrainedModel) -> bool:
    """Whether the family keeps a recurrent state from token to token."""
    return model._is_stateful


def takes_any_attention(model_class: Any) -> bool:
    """Whether a class, None for remote code, calls whichever attention is registered."""
    return getattr(model_class, "_supports_attention_backend", False)


def takes_sdpa(model_class: Any) -> bool:
    """Whether a class, None for remote code, calls torch's scaled_dot_product_attention."""
    return getattr(model_class, "_supports_sdpa", False)


def takes_flash(model_class: Any, implementation: str) -> bool:
    """Whether a class, None for remote code, calls this implementation of flash attention."""
    implementations = getattr(model_class, "_compatible_flash_implementations", None) or [implementation]
    return getattr(model_class, "_supports_flash_attn", False) and implementation in implementations


def keep_layers(config: PreTrainedConfig, kept: list[int]) -> None:
    """Keep only the per-layer configurations of layers `kept` of a heterogeneous model, in that order."""
    layers = config._heterogeneity_spec.per_layer_overrides
    own = {position: layers[layer] for position, layer in enumerate(kept) if layer in layers}
    config._heterogeneity_spec.per_layer_overrides = own


def save_as_class(model: PreTrainedModel) -> None:
    """Make `save_pretrained` name the weights as the model's class does, not as its base did; only the
    prefixes of a whole model's parts stay, because transformers 4 reads no others.
    """
    loaded = getattr(model, "_weight_conversions", None) or []
    prefixes = [change for change in loaded if isinstance(change, PrefixChange)]
    model._weight_conversions = None
    if prefixes and model.config.get_text_config() is not model.config:
        of_class = get_model_conversion_mapping(model, add_legacy=False)
        others = [change for change in of_class if not isinstance(change, PrefixChange)]
        model._weight_conversions = others + prefixes


@contextlib.contextmanager
def weights_saved_by(save: Callable[..., None]) -> Iterator[None]:
    """Let `save(tensors, path, metadata=...)` write the weights of `save_pretrained` in the block."""
    before = modeling_utils.safe_save_file
    modeling_utils.safe_save_file = save
    try:
        yield
    finally:
        modeling_utils.safe_save_file = before
