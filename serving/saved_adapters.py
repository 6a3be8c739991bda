"""LoRA adapters saved without the model that they belong to: merged into it to answer."""

import json
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel

from common.models.lora import trained_weights
from common.ranks.failures import first_line

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def is_adapter(path: str) -> bool:
    """Whether a folder holds an adapter alone, without the model that it belongs to."""
    return (Path(path) / _CONFIG).is_file() and not (Path(path) / "config.json").exists()


def base_of_adapter(path: str) -> str:
    """Return the folder or hub name of the model that an adapter was trained on.

    Raises ValueError when the adapter does not tell.
    """
    base = _read_config(path).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ValueError(f"{Path(path) / _CONFIG} names no base model; give the export/ folder of the run")
    return base


def merge_adapter(model: PreTrainedModel, path: str) -> PreTrainedModel:
    """Return the model with an adapter in its weights; pickled adapters are not read.

    Raises ValueError when it is no LoRA adapter, or not one of this model.
    """
    config = _read_config(path)
    if config.get("peft_type") != "LORA":
        kind = config.get("peft_type")
        raise ValueError(f"{path} is an adapter of the type {kind}; only LORA can be merged")
    try:
        adapted = get_peft_model(model, LoraConfig(**config), autocast_adapter_dtype=False)
        loaded = set_peft_model_state_dict(adapted, load_file(Path(path) / _WEIGHTS))
    except (OSError, SafetensorError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path}: the adapter cannot be loaded: {first_line(error)}") from error
    missing = [name for name in loaded.missing_keys if "lora_" in name]
    if missing or loaded.unexpected_keys:
        names = [*missing, *loaded.unexpected_keys]
        raise ValueError(f"{path} is no adapter of its base model: {len(names)} weights do not match")
    with torch.no_grad():  # as the export was merged, to the bit
        for weight in trained_weights(adapted).values():
            if weight.lora_a is not None:
                weight.parameter.copy_(weight.merged())
                weight.lora_b.zero_()
    return adapted.merge_and_unload()  # the magnitudes of DoRA, embeddings: what we never train


def _read_config(path: str) -> dict:
    try:
        config = json.loads((Path(path) / _CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{Path(path) / _CONFIG} cannot be read: {error}") from error
    return config if isinstance(config, dict) else {}
