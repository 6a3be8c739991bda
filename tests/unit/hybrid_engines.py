"""Hybrid engines of tiny models, for a world of one rank."""

from common.engine.ds_config import EngineOptions, build_train_config
from common.engine.optim import build_engine
from common.generation.hybrid_engine import HybridEngine, HybridOptions
from common.models.loading import LoraOptions, ModelOptions, add_lora, load_causal_lm
from step1_sft.arguments import SFTArguments


def build(folder: str, stage: int, lora_dim: int = 0, **options) -> HybridEngine:
    overrides = {"zero_optimization": {"stage3_param_persistence_threshold": 0}} if stage == 3 else {}
    ds_config = build_train_config(EngineOptions(zero_stage=stage, overrides=overrides))
    model = load_causal_lm(ModelOptions(folder, dropout=0.0, ds_config=ds_config), 320)
    engine = build_engine(
        add_lora(model, LoraOptions(dim=lora_dim, alpha=3 * lora_dim)),
        ds_config,
        SFTArguments(learning_rate=1e-2, lora_learning_rate=1e-2, lr_scheduler_type="constant"),
        100,
    )
    return HybridEngine(engine, HybridOptions(**({"enabled": True} | options)))
