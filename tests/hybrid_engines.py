"""Engines of tiny models that train and generate."""

from typing import Any

import torch
from plain_logits import compute_logits

from common.engine.ds_config import build_config, build_engine
from common.generation.decode import SamplingOptions
from common.generation.generate import Generation, PromptBatch
from common.generation.hybrid_engine import HybridEngine, HybridOptions
from common.models.loading import ModelOptions, load_causal_lm
from common.models.lora import LoraOptions, add_lora
from step1_sft.arguments import SFTArguments

IDS = torch.arange(1, 13).view(2, 6)
SAMPLING = SamplingOptions(max_new_tokens=10, stop_token_id=0, pad_token_id=0, seed=3)


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


def train_once(hybrid: HybridEngine) -> None:
    """Make an optimizer step on IDS."""
    hybrid.engine.train()
    ids = IDS.to(hybrid.engine.device)
    loss = compute_logits(hybrid.engine, ids, torch.ones_like(ids)).float().square().mean()
    hybrid.engine.backward(loss)
    hybrid.engine.step()


def generate(hybrid: HybridEngine) -> Generation:
    """Return a response to each row of IDS."""
    with hybrid.generation_mode():
        mask = torch.ones_like(IDS)
        return hybrid.generate(PromptBatch(IDS, mask, torch.arange(2)), SAMPLING)
