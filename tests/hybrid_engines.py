"""Engines of tiny models that train and generate."""

from typing import Any

from common.engine.ds_config import build_config, build_engine
from common.generation.hybrid_engine import HybridEngine, HybridOptions
from common.models.loading import ModelOptions, load_causal_lm
from common.models.lora import LoraOptions, add_lora
from step1_sft.arguments import SFTArguments


def build_tiny_engine(
    folder: str,
    stage: int,
    lora_dim: int = 0,
    *,
    num_tokens: int = 320,
    smallest_sharded: int | None = 0,
    lora_names: str = "auto",
    load_in_4bit: bool = False,
    **options: Any,
) -> Any:
    """Return an engine; stage 3 shards parameters from `smallest_sharded` elements on, None: by default."""
    zero = {} if smallest_sharded is None else {"stage3_param_persistence_threshold": smallest_sharded}
    overrides = {"zero_optimization": zero} if stage == 3 else {}
    ds_config = build_config(zero_stage=stage, overrides=overrides, **options)
    dtype = options.get("dtype", "fp32")
    more = {"dtype": dtype, "dropout": 0.0, "ds_config": ds_config, "load_in_4bit": load_in_4bit}
    model = load_causal_lm(ModelOptions(folder, **more), num_tokens)
    return build_engine(
        add_lora(model, LoraOptions(lora_dim, 3 * lora_dim, lora_names)),
        ds_config,
        SFTArguments(learning_rate=1e-2, lora_learning_rate=1e-2, lr_scheduler_type="constant"),
        100,
    )


def build(folder: str, stage: int, lora_dim: int = 0, **options: Any) -> HybridEngine:
    """Return a hybrid engine."""
    engine = build_tiny_engine(folder, stage, lora_dim)
    return HybridEngine(engine, HybridOptions(**options))
