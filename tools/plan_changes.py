"""Which flags to change when a run does not fit: the cheapest first, each tried by making its plan."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from common.generation.tp_plans import working_tp_sizes
from tools.memory_plan import MemoryPlan
from tools.planned_run import Models, Run, find_problems, longest_row

MAX_NODES = 128


class Change(NamedTuple):
    """Flags to set, and what that costs."""

    flags: dict[str, Any]
    cost: str


def apply(args: Any, changes: Sequence[Change]) -> Any:
    """Return the flags with the changes made, one after the other."""
    for change in changes:
        args = replace(args, **change.flags)
    return args


def find_changes(args: Any, models: Models) -> list[Change] | None:
    """Return changes that together make a run fit, none of them idle; None where nothing does.

    One change where one is enough; more GPUs only where no other flags do.
    """
    for machines in [[], *([change] for change in more_machines(args))]:
        found = _search(apply(args, machines), models)
        if found is not None:
            return machines + found
    return None


def _search(args: Any, models: Models) -> list[Change] | None:
    """Return the first change that is enough, else all up to the first that is, without those not needed."""

    def lacking(changes: Sequence[Change]) -> float:
        """Return the bytes that are too many: 0 where it fits, inf where the flags exclude each other."""
        changed = apply(args, changes)
        return math.inf if find_problems(changed, models) else MemoryPlan(Run(changed, models)).lacking

    candidates = list(candidate_changes(args, models))
    for alone in [[], *([change] for change in candidates)]:
        if lacking(alone) == 0:
            return alone
    chosen: list[Change] = []
    for change in candidates:
        if lacking([*chosen, change]) < math.inf:
            chosen.append(change)
        if lacking(chosen) == 0:
            break
    else:
        return None
    for change in reversed(chosen):  # without those not needed, the dearest first
        rest = [other for other in chosen if other is not change]
        chosen = rest if lacking(rest) == 0 else chosen
    return chosen


def candidate_changes(args: Any, models: Models) -> Iterator[Change]:
    """Yield what may be changed, the cheapest first, each in its gentlest variant first."""
    is_ppo = args.stage == 3
    roles = [f"{name}_" for name in ("actor", "critic") if name in models] if is_ppo else [""]
    if is_ppo and args.enable_hybrid_engine:
        yield Change({"release_inference_cache": True}, "the cache is made anew every time")
    for chosen in [[role] for role in roles] + ([roles] if len(roles) > 1 else []):
        recompute = {f"{role}gradient_checkpointing": True for role in chosen}
        yield Change(recompute, "a third more arithmetic in training")
    if args.max_tokens_per_micro_batch:
        for n in halvings(args.max_tokens_per_micro_batch, longest_row(args)):
            yield Change({"max_tokens_per_micro_batch": n}, "more and smaller passes")
    else:
        name = "per_device_training_batch_size" if is_ppo else "per_device_train_batch_size"
        yield from _in_parts(args, name, "gradient_accumulation_steps", "smaller passes")
    if is_ppo and args.enable_hybrid_engine:
        for n in halvings(Run(args, models).num_slots):
            yield Change({"generation_slots": n}, "fewer sequences at a time")
    elif is_ppo:
        names = "per_device_generation_batch_size", "generation_batches"
        yield from _in_parts(args, *names, "fewer sequences at a time")
    away = "its weights come from the CPU at every step"
    if is_ppo and not args.actor_lora_dim:
        yield Change({"offload_reference_model": True}, away)
    if is_ppo and set(models) - {"actor", "reference", "critic"}:
        yield Change({"offload_reward_model": True}, away)
    stage_now = args.actor_zero_stage if is_ppo else args.zero_stage
    for stage in range(stage_now + 1, 4):
        yield Change({f"{role}zero_stage": stage for role in roles}, "more is sent")
    for what in ("optimizer", "all"):
        yield Change({"offload": what}, "Adam runs on the CPU: slow")
    for n in working_tp_sizes(models["actor"].plain) if is_ppo else ():
        if args.inference_tp_size < n <= args.num_gpus:
            yield Change({"inference_tp_size": n, "enable_hybrid_engine": True}, "ranks generate together")
    yield Change({f"{role}lora_dim": 64 for role in roles}, "trains adapters only: another result")


def _in_parts(args: Any, size_flag: str, count_flag: str, cost: str) -> Iterator[Change]:
    """Yield a batch in smaller parts, and as many more of them."""
    size, count = getattr(args, size_flag), getattr(args, count_flag)
    for n in halvings(size):
        yield Change({size_flag: n, count_flag: count * size // n}, cost)


def halvings(number: int, least: int = 1) -> list[int]:
    """Return the number halved again and again, down to `least`."""
    if number % 2 or number // 2 < least:
        return []
    return [number // 2, *halvings(number // 2, least)]


def more_machines(args: Any) -> list[Change]:
    """Return larger numbers of GPUs: up to 8 in a machine, then more machines."""
    gpus = [Change({"num_gpus": n}, "more GPUs") for n in (2, 4, 8) if n > args.num_gpus]
    per_node, nodes = max(args.num_gpus, 8), args.num_nodes
    while nodes < MAX_NODES:
        nodes *= 2
        gpus.append(Change({"num_gpus": per_node, "num_nodes": nodes}, "more machines"))
    return gpus
