"""Options of the hybrid engine, and what can be told of them before any model is loaded."""

from typing import Any

import psutil
import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM

from common.engine.ds_config import HYBRID_SECTION, effective_zero_stage, load_overrides
from common.flags.args import Problems
from common.flags.flag_values import describe_range, is_in_range
from common.generation.generate import DEFAULT_SLOTS
from common.generation.hybrid_engine import HybridOptions
from common.generation.kv_cache import kv_bytes_per_token
from common.generation.tp_plans import NoPlan, build_cuts
from common.models.loading import DTYPES
from common.ranks import distributed
from step3_ppo.arguments import PPOArguments

_FLAG_OF_KEY = {
    "enabled": "enable_hybrid_engine",
    "inference_tp_size": "inference_tp_size",
    "release_inference_cache": "release_inference_cache",
    "pin_parameters": "unpin_actor_parameters",
    "tp_gather_partition_size": "tp_gather_partition_size",
}


def take_hybrid_section(args: PPOArguments, problems: Problems) -> None:
    """Set the flags that the `hybrid_engine` section of --ds_config names; a flag that was given must agree.

    DeepSpeed never sees the section: it would build its own hybrid engine.
    """
    if not args.ds_config or problems.messages:
        return
    for key, value in load_overrides(args).get(HYBRID_SECTION, {}).items():
        if key == "max_out_tokens":  # a slot has room for what the lengths need
            continue
        flag = _FLAG_OF_KEY.get(key)
        if flag is None:
            problems.add(
                f"--ds_config {args.ds_config}: {HYBRID_SECTION} has no key {key!r}; it knows "
                + ", ".join(_FLAG_OF_KEY)
            )
            continue
        field = PPOArguments.__dataclass_fields__[flag]
        limits = field.metadata["range"]
        if type(value) is not field.type or not is_in_range(value, **limits):
            kind = "true or false" if field.type is bool else f"a whole number {describe_range(**limits)}"
            problems.add(f"--ds_config {args.ds_config}: {HYBRID_SECTION}.{key} {value!r} must be {kind}")
            continue
        value = not value if key == "pin_parameters" else value
        given, default = getattr(args, flag), getattr(PPOArguments, flag)
        if given not in (default, value):
            problems.add(
                f"--{flag} {given} and {HYBRID_SECTION}.{key} of --ds_config {args.ds_config} differ; "
                "give one of them"
            )
        setattr(args, flag, value)


def hybrid_options(args: PPOArguments) -> HybridOptions:
    """Return the options that the flags ask for."""
    return HybridOptions(
        enabled=args.enable_hybrid_engine,
        inference_tp_size=args.inference_tp_size,
        release_inference_cache=args.release_inference_cache,
        gather_by_layer=args.unpin_actor_parameters,
        tp_gather_partition_size=args.tp_gather_partition_size,
        max_out_tokens=args.max_prompt_seq_len + args.max_answer_seq_len,
        num_slots=args.generation_slots,
        offload_states=args.offload_states_for_generation,
    )


def check_hybrid(args: PPOArguments, config: Any, problems: Problems) -> None:
    """Add what is wrong with the hybrid engine's flags; `config` is the actor's, None if there is none."""
    dtype = distributed.dtype_name(args.dtype)
    if args.offload_states_for_generation and effective_zero_stage(args.actor_zero_stage, dtype) == 0:
        problems.add("--offload_states_for_generation needs --actor_zero_stage 1, 2 or 3")
    if args.offload_states_for_generation and args.offload in ("param", "all"):
        problems.add(
            f"--offload_states_for_generation and --offload {args.offload} exclude each other: parameters "
            "that live on the CPU already cannot be moved; use --offload none or optimizer"
        )
    tp_size = args.inference_tp_size
    if tp_size > 1 and not args.enable_hybrid_engine:
        problems.add(f"--inference_tp_size {tp_size} needs --enable_hybrid_engine")
    elif tp_size > 1:
        _check_tp_size(args, config, problems)
    if config is not None and args.enable_hybrid_engine and not problems.messages:
        _check_slots(args, config, problems)


def _check_tp_size(args: PPOArguments, config: Any, problems: Problems) -> None:
    tp_size, num_ranks = args.inference_tp_size, distributed.world_size()
    if num_ranks % tp_size:
        divisors = ", ".join(str(n) for n in range(1, num_ranks + 1) if num_ranks % n == 0)
        problems.add(
            f"--inference_tp_size {tp_size} does not divide the number of ranks, {num_ranks}; use {divisors}"
        )
    elif args.unpin_actor_parameters and args.actor_zero_stage == 3:
        problems.add(
            f"--inference_tp_size {tp_size} and --unpin_actor_parameters exclude each other: what is "
            "gathered layer by layer is whole; give one of them"
        )
    elif config is not None:
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=args.trust_remote_code)
        try:
            build_cuts(model, tp_size)
        except NoPlan:
            pass  # it generates with 1, and says so
        except ValueError as error:
            problems.add(str(error))


def _check_slots(args: PPOArguments, config: Any, problems: Problems) -> None:
    """Add a problem when keys and values alone would not fit into what is free now."""
    num_bytes = DTYPES[distributed.dtype_name(args.dtype)].itemsize
    slot_length = args.max_prompt_seq_len + args.max_answer_seq_len
    num_samples = args.per_device_generation_batch_size * args.num_samples_per_prompt * args.inference_tp_size
    num_slots = min(args.generation_slots or DEFAULT_SLOTS, num_samples)
    slot_bytes = slot_length * kv_bytes_per_token(config, num_bytes, args.inference_tp_size)
    if distributed.has_gpu():
        free_bytes, _ = torch.cuda.mem_get_info()
    else:
        free_bytes = psutil.virtual_memory().available // distributed.local_world_size()
    if num_slots * slot_bytes > free_bytes:
        advised = max(free_bytes // (2 * slot_bytes), 1)
        problems.add(
            f"--generation_slots {num_slots} of {slot_length} tokens need "
            f"{num_slots * slot_bytes / 2**30:.1f} GiB for keys and values, and {free_bytes / 2**30:.1f} GiB "
            f"are free; use at most {advised}, which leaves half of it to the rest"
        )
