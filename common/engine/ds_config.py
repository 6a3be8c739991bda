"""DeepSpeed configurations of trained and frozen models, from flags; and engines built from them.

Stage-3 persistence and prefetch have DeepSpeed-Chat's values. stage3_max_live_parameters is DeepSpeed's
default of 1e9, not DeepSpeed-Chat's 3e7: one matrix of a 7B model has 4.5e7 parameters, and nothing is
prefetched while more than the maximum are gathered.
"""

import json
import os
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

from common.engine.muon import Muon, is_hidden_matrix
from common.ranks import distributed
from common.ranks.zero3 import is_sharded

NO_DECAY_NAMES = ("bias", "norm", "ln_", "layernorm")
MAX_BUCKET = 200_000_000  # elements; DeepSpeed requires an even number
HYBRID_SECTION = "hybrid_engine"  # section of --ds_config for DeepSpeed's own hybrid engine


def load_overrides(args: Any) -> dict[str, Any]:
    """Contents of --ds_config; {} without it.

    Raises ValueError if the file is not a JSON object, has a section that flags replace, or offloads
    to a disk.
    """
    try:
        overrides = json.loads(Path(args.ds_config).read_text()) if args.ds_config else {}
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"--ds_config {args.ds_config} cannot be read as JSON: {error}") from error
    if not isinstance(overrides, dict):
        raise ValueError(f"--ds_config {args.ds_config}: expected a JSON object")
    if HYBRID_SECTION in overrides:
        raise ValueError(
            f"--ds_config {args.ds_config}: the section {HYBRID_SECTION} is not used; remove it, and use "
            "--enable_hybrid_engine, --inference_tp_size, --tp_gather_partition_size, "
            "--release_inference_cache or --unpin_actor_parameters of step 3 in place of its keys"
        )
    zero = overrides.get("zero_optimization")
    for name, section in zero.items() if isinstance(zero, dict) else ():
        if isinstance(section, dict) and section.get("device") == "nvme":
            raise ValueError(
                f"--ds_config {args.ds_config}: {name} to the device nvme is not supported, because "
                'checkpoints and generation read the states from memory; use "cpu", or --offload'
            )
    return overrides


def effective_zero_stage(zero_stage: int, dtype: str) -> int:
    """ZeRO stage in effect: at least 1 in bf16 and fp16.

    Under stage 0 bf16 would keep no fp32 master weights, and fp16 would use another optimizer of DeepSpeed
    without a benefit.
    """
    return max(zero_stage, int(dtype in ("bf16", "fp16")))


def _zero_section(stage: int, offload: str, is_trained: bool) -> dict[str, Any]:
    section: dict[str, Any] = {"stage": stage}
    if stage >= 1 and is_trained and offload in ("optimizer", "all"):
        section["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if stage == 3:
        section |= {
            "stage3_param_persistence_threshold": 1e4,
            "stage3_prefetch_bucket_size": 3e7,
            "memory_efficient_linear": False,
        }
        if offload in ("param", "all"):
            section["offload_param"] = {"device": "cpu", "pin_memory": True}
    return section


def merge(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """`base` updated by `overrides`, with dictionaries merged key by key."""
    merged = dict(base)
    for key, value in overrides.items():
        both_are_dicts = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both_are_dicts else value
    return merged


def build_config(
    *,
    zero_stage: int = 0,
    dtype: str = "fp32",
    offload: str = "none",
    optimizer_dtype: str = "fp32",
    overrides: dict[str, Any] | None = None,
    is_trained: bool = True,
) -> dict[str, Any]:
    """DeepSpeed configuration of a trained or a frozen model; only stage 3 shards a frozen one.

    `offload` is none | optimizer | param | all; parameters can only be offloaded under ZeRO stage 3.
    `overrides`, such as batch sizes, is merged over the result key by key.
    """
    stage = effective_zero_stage(zero_stage, dtype) if is_trained else zero_stage
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**9,  # the run logger prints instead
        "zero_optimization": _zero_section(stage, offload, is_trained),
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "timers": {"throughput": {"enabled": False}},  # it would wait for the device in every pass
        # torch's AdamW is used everywhere: DeepSpeed's CPU Adam is compiled at first use, and its lock file
        # remains after a kill.
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
        if is_trained and optimizer_dtype == "bf16":
            config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    if dtype == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale_window": 100}
    return merge(config, overrides or {})


def with_buckets(ds_config: dict[str, Any], num_trained: int, num_ranks: int) -> dict[str, Any]:
    """The configuration with bucket sizes that fit the trained parameters; --ds_config may set its own.

    DeepSpeed allocates a tensor of the bucket size for any model, by default 5e8 elements. If gradients fill
    several buckets, stages 1 and 2 reduce them during the backward pass, which needs a second bucket.
    """
    section = ds_config["zero_optimization"]
    if section["stage"] == 0:
        return ds_config
    size = min(MAX_BUCKET, num_trained + num_trained % 2)
    sized: dict[str, Any] = {"reduce_bucket_size": size, "allgather_bucket_size": size}
    if section["stage"] < 3 and num_ranks > 1 and num_trained > size:
        sized["overlap_comm"] = True
    return ds_config | {"zero_optimization": sized | section}


def config_of(
    args: Any, *, zero_stage: int, offload: str, micro_batch_size: int, is_trained: bool = True
) -> dict[str, Any]:
    """Configuration of one of a program's models from its flags, with --ds_config merged over it.

    `micro_batch_size`: rows per rank.
    """
    flags = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "gradient_clipping": args.gradient_clipping,
    }
    return build_config(
        zero_stage=zero_stage,
        dtype=distributed.dtype_name(args.dtype),
        offload=offload,
        optimizer_dtype=args.optimizer_dtype,
        overrides=flags | load_overrides(args),
        is_trained=is_trained,
    )


def build_optimizer(
    model: nn.Module,
    *,
    learning_rate: float,
    weight_decay: float = 0.0,
    lora_learning_rate: float = 1e-4,
    optimizer: str = "adamw",
    muon_learning_rate: float | None = None,
) -> torch.optim.AdamW:
    """torch's fused AdamW over the trained parameters, the same on GPUs, on CPUs and under offload; or Muon,
    which uses AdamW for everything but the matrices of hidden layers.

    Parameter groups are matrices, vectors without weight decay, LoRA factors with their own learning rate,
    and Muon's matrices; `rate_name` is the log name of a group's learning rate.
    """
    has_own_rate = muon_learning_rate is not None
    muon_rate = muon_learning_rate if has_own_rate else learning_rate
    is_muon = optimizer == "muon"
    rates = {"decay": learning_rate, "no_decay": learning_rate, "lora": lora_learning_rate, "muon": muon_rate}
    names = {"lora": "lora_learning_rate"} | ({"muon": "muon_learning_rate"} if has_own_rate else {})
    groups: dict[str, dict[str, Any]] = {}
    for name, rate in rates.items():
        decay = 0.0 if name == "no_decay" else weight_decay
        rate_name = names.get(name, "learning_rate")
        groups[name] = {"params": [], "weight_decay": decay, "lr": rate, "rate_name": rate_name}
        groups[name]["is_muon"] = name == "muon"
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_vector = any(word in name.lower() for word in NO_DECAY_NAMES)
            uses_muon = is_muon and not is_vector and is_hidden_matrix(name, parameter)
            group = "lora" if "lora_" in name else "no_decay" if is_vector else "decay"
            groups["muon" if uses_muon else group]["params"].append(parameter)
    used = [group for group in groups.values() if group["params"]]
    kind = Muon if is_muon else torch.optim.AdamW
    return kind(used, lr=learning_rate, betas=(0.9, 0.95), fused=True)


def _share_cores(ds_config: dict[str, Any]) -> None:
    """Let an AdamW that is offloaded from a GPU use this rank's share of the machine's cores.

    torchrun sets OMP_NUM_THREADS=1, DeepSpeed's launcher gives all cores to every rank; a value above 1 is
    kept.
    """
    is_offloaded = distributed.has_gpu() and "offload_optimizer" in ds_config["zero_optimization"]
    if is_offloaded and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        torch.set_num_threads(max(len(os.sched_getaffinity(0)) // distributed.num_ranks_here(), 1))


def build_engine(
    model: nn.Module, ds_config: dict[str, Any], args: Any, num_steps: int, *, role: Any = None
) -> Any:
    """DeepSpeed engine with its optimizer and a schedule over `num_steps`. Every rank must call this.

    `args` are the flags. `role` has the learning rates: `args.actor` or `args.critic` in step 3, else `args`.
    """
    role = role or args
    optimizer = build_optimizer(
        model,
        learning_rate=role.learning_rate,
        weight_decay=role.weight_decay,
        lora_learning_rate=role.lora_learning_rate,
        optimizer=args.optimizer,
        muon_learning_rate=args.muon_learning_rate,
    )
    from transformers import get_scheduler  # imports PEFT, and with it torch's compiler: a second

    schedule = get_scheduler(
        args.lr_scheduler_type,
        optimizer,
        num_warmup_steps=args.num_warmup_steps,
        num_training_steps=num_steps,
    )
    model.to(distributed.device())
    _share_cores(ds_config)
    trained = (p for p in model.parameters() if p.requires_grad)
    num_trained = sum(p.ds_numel if is_sharded(p) else p.numel() for p in trained)
    config = with_buckets(ds_config, num_trained, distributed.world_size())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)
    if isinstance(optimizer, Muon):
        optimizer.attach(engine)
    return engine
