"""Hybrid engines of tiny models, for a world of one rank."""

from common.engine.ds_config import EngineOptions, build_train_config
from common.generation.hybrid_engine import HybridEngine, HybridOptions
from common.models.loading import LoraOptions, ModelOptions, add_lora, load_causal_lm
from common.programs.training_loop import build_engine


def build(folder: str, stage: int, lora_dim: int = 0, **options) -> HybridEngine:
    overrides = {"zero_optimization": {"stage3_param_persistence_threshold": 0}} if stage == 3 else {}
    ds_config = build_train_config(EngineOptions(zero_stage=stage, overrides=overrides))
    model = load_causal_lm(ModelOptions(folder, dropout=0.0, ds_config=ds_config), 320)
    engine = build_engine(
        add_lora(model, LoraOptions(dim=lora_dim, alpha=3 * lora_dim)), ds_config,
        learning_rate=1e-2, weight_decay=0.0, lora_learning_rate=1e-2, beta2=0.95,
        schedule="constant", num_warmup_steps=0, num_steps=100,
    )  # fmt: skip
    return HybridEngine(engine, HybridOptions(**({"enabled": True} | options)))
