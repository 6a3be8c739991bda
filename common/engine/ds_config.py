"""Flags -> DeepSpeed configuration dictionaries, for trained and for frozen models.

Keys that DeepSpeed-Chat's users know keep their values (stage-3 persistence, live parameters, prefetch).
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from common.ranks import distributed

HYBRID_SECTION = "hybrid_engine"  # of --ds_config: read by step 3; DeepSpeed would build its own from it


@dataclass(frozen=True)
class EngineOptions:
    """What one model's engine needs to know.

    `offload` is none | optimizer | param | all; parameters can only be offloaded under ZeRO stage 3.
    `micro_batch_size` is per rank; `overrides` is merged over the result, key by key.
    """

    zero_stage: int = 0
    dtype: str = "fp32"
    offload: str = "none"
    micro_batch_size: int = 1
    gradient_accumulation_steps: int = 1
    world_size: int = 1
    gradient_clipping: float = 1.0
    overrides: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, args: Any, *, zero_stage: int, offload: str, micro_batch_size: int) -> Self:
        """Return what a program's flags say of one of its models, --ds_config laid over it."""
        overrides = load_overrides(args)
        overrides.pop(HYBRID_SECTION, None)
        return cls(
            zero_stage=zero_stage,
            dtype=distributed.dtype_name(args.dtype),
            offload=offload,
            micro_batch_size=micro_batch_size,
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            world_size=distributed.world_size(),
            gradient_clipping=args.gradient_clipping,
            overrides=overrides,
        )


def load_overrides(args: Any) -> dict[str, Any]:
    """Return the keys of --ds_config, {} without it.

    Raises OSError or ValueError when the file cannot be read as JSON.
    """
    return json.loads(Path(args.ds_config).read_text()) if args.ds_config else {}


def effective_zero_stage(zero_stage: int, dtype: str) -> int:
    """Return the stage that is run: in bf16 and fp16 at least 1.

    Under stage 0 bf16 would keep no fp32 master weights, and fp16 keeps them in another optimizer of
    DeepSpeed's, for nothing.
    """
    return max(zero_stage, 1) if dtype in ("bf16", "fp16") else zero_stage


def _zero_section(stage: int, offload: str, is_trained: bool) -> dict[str, Any]:
    section: dict[str, Any] = {"stage": stage}
    if stage >= 1 and is_trained and offload in ("optimizer", "all"):
        section["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    if stage == 3:
        section |= {
            "stage3_param_persistence_threshold": 1e4,
            "stage3_max_live_parameters": 3e7,
            "stage3_prefetch_bucket_size": 3e7,
            "memory_efficient_linear": False,
        }
        if offload in ("param", "all"):
            section["offload_param"] = {"device": "cpu", "pin_memory": False}
    return section


def merge(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with `overrides` laid over it, dictionaries merged key by key."""
    merged = dict(base)
    for key, value in overrides.items():
        both_are_dicts = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both_are_dicts else value
    return merged


def _build(options: EngineOptions, is_trained: bool) -> dict[str, Any]:
    stage = effective_zero_stage(options.zero_stage, options.dtype) if is_trained else options.zero_stage
    global_batch = options.micro_batch_size * options.gradient_accumulation_steps * options.world_size
    config = {
        "train_batch_size": global_batch,
        "train_micro_batch_size_per_gpu": options.micro_batch_size,
        "gradient_accumulation_steps": options.gradient_accumulation_steps,
        "steps_per_print": 10**9,  # the run logger prints
        "zero_optimization": _zero_section(stage, options.offload, is_trained),
        "gradient_clipping": options.gradient_clipping,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        # torch's AdamW is ours everywhere: DeepSpeed's CPU Adam is compiled at first use and its lock
        # outlives a kill.
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    if options.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if options.dtype == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale_window": 100}
    return merge(config, options.overrides)


def build_train_config(options: EngineOptions) -> dict[str, Any]:
    """Return the configuration of a model that is trained."""
    return _build(options, is_trained=True)


def build_frozen_config(options: EngineOptions) -> dict[str, Any]:
    """Return the configuration of a model that is only read: stage 3 shards it, any other stage does not."""
    return _build(options, is_trained=False)
