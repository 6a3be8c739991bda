"""LoRA adapters saved without their base model, as PEFT and our steps write them."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
SCORE_HEAD = "score.weight"  # suffix of the name of a reward model's head
# Parts of PEFT's LoRA besides two factors per matrix.
UNSUPPORTED = (
    "use_dora",
    "lora_bias",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "arrow_config",
    "trainable_token_indices",
    "layer_replication",
    "kasa_config",
    "monteclora_config",
)
POOLING = "reward_pooling"  # key in the configuration of a reward model or its adapter: step 2's flag


def is_adapter(path: str) -> bool:
    """Whether a folder holds an adapter alone, without a model; False for an empty path (a flag that was left
    out).
    """
    file = Path(path or "", ADAPTER_CONFIG)
    return bool(path) and file.is_file() and not file.with_name("config.json").exists()


def base_of(path: str) -> str:
    """Folder or hub name of the model that an adapter was trained on; for a model, its own.

    Raises ValueError if the adapter does not name it.
    """
    if not is_adapter(path):
        return path
    base = read_adapter_config(path).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        file = Path(path) / ADAPTER_CONFIG
        raise ValueError(f"{file} names no base model; give the export/ folder of the run")
    return base


def tokenizer_of(path: str) -> str:
    """Folder or hub name that has the tokenizer; an adapter from elsewhere may have none."""
    return path if (Path(path) / "tokenizer_config.json").exists() else base_of(path)


def read_adapter_config(path: str) -> dict[str, Any]:
    """Contents of adapter_config.json. Raises ValueError if it cannot be read or is not a LoRA adapter's."""
    try:
        config = json.loads((Path(path) / ADAPTER_CONFIG).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{Path(path) / ADAPTER_CONFIG} cannot be read: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise ValueError(f"{path} is an adapter of type {kind}; only LORA is supported")
    return config


def check_supported(path: str) -> None:
    """Raise ValueError if an adapter has parts besides two factors per matrix: they would have no effect."""
    config = read_adapter_config(path)
    if extra := [name for name in UNSUPPORTED if config.get(name)]:
        raise ValueError(
            f"{path} is an adapter with {', '.join(extra)}, which is not supported here; merge it into its "
            "base first: PEFT's merge_and_unload(), then save_pretrained(NEW), and give NEW"
        )


def adapter_rank(path: str) -> int:
    """Rank of an adapter's factors; 0 for a model. Raises ValueError if the adapter does not name it."""
    rank = read_adapter_config(path).get("r") if is_adapter(path) else 0
    if not isinstance(rank, int):
        raise ValueError(f"{Path(path) / ADAPTER_CONFIG} has no rank r; give the export/ folder of the run")
    return rank


def has_score_head(path: str) -> bool:
    """Whether an adapter includes the head of a reward model. Raises ValueError if it cannot be read."""
    file = Path(path) / ADAPTER_WEIGHTS
    try:
        with safe_open(file, "pt") as weights:
            return any(name.endswith(SCORE_HEAD) for name in weights.keys())  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file} cannot be read: {error}; pickled adapters are not read") from error
