"""Which flags to change when a run does not fit: the cheapest first, each tried by making its plan."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tools.memory_plan import plan_memory
from tools.planned_run import Models, build_run, find_problems, longest_row

MAX_RANKS = 1024


class Change(NamedTuple):
    """Flags to set, and what that costs."""

    flags: dict[str, Any]
    cost: str


def apply(args: Any, changes: Sequence[Change]) -> Any:
    """Return the flags with the changes made, one after the other."""
    flags: dict[str, Any] = {}
    for change in changes:
        flags |= change.flags
    return replace(args, **flags)


def find_changes(args: Any, models: Models) -> list[Change] | None:
    """Return changes that together make a run fit, none of them idle; None where nothing does.

    More GPUs come only where no other flags do.
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
        return math.inf if find_problems(changed, models) else plan_memory(build_run(changed, models)).lacking

    if lacking([]) == 0:
        return []
    candidates = [change for change in candidate_changes(args, models) if lacking([change]) < math.inf]
    enough = next((change for change in candidates if lacking([change]) == 0), None)
    if enough:
        return [enough]
    for limit in (0.0, math.inf):  # bytes that a change alone may cost: another one may need it
        chosen: list[Change] = []
        least = lacking(chosen)
        for change in candidates:
            left = lacking([*chosen, change])
            if left < math.inf and left <= least + limit:
                chosen, least = [*chosen, change], left
            if least == 0:
                return _needed(chosen, lacking)
    return None


def _needed(chosen: list[Change], lacking: Callable[[Sequence[Change]], float]) -> list[Change]:
    """Return the changes without those that a run fits without, the dearest left out first."""
    for change in reversed(chosen):
        rest = [other for other in chosen if other is not change]
        chosen = rest if lacking(rest) == 0 else chosen
    return chosen


def halvings(number: int, least: int = 1) -> list[int]:
    """Return the number halved again and again, down to `least`."""
    found = []
    while number % 2 == 0 and number // 2 >= least:
        number //= 2
        found.append(number)
    return found


def candidate_changes(args: Any, models: Models) -> list[Change]:
    """Return what may be changed, the cheapest first, each in its gentlest variant first."""
    is_ppo = args.stage == 3
    roles = [f"{name}_" for name in ("actor", "critic") if name in models] if is_ppo else [""]
    found: list[Change] = []

    def offer(flags: dict[str, Any], cost: str) -> None:
        if any(getattr(args, name) != value for name, value in flags.items()):
            found.append(Change(flags, cost))

    if is_ppo and args.enable_hybrid_engine:
        offer({"release_inference_cache": True}, "the cache is made anew every time")
    for chosen in [[role] for role in roles] + ([roles] if len(roles) > 1 else []):
        recompute = {f"{role}gradient_checkpointing": True for role in chosen}
        offer(recompute, "a third more arithmetic in training")
    if args.max_tokens_per_micro_batch:
        for n in halvings(args.max_tokens_per_micro_batch, longest_row(args)):
            offer({"max_tokens_per_micro_batch": n}, "more and smaller passes")
    else:
        name = "per_device_training_batch_size" if is_ppo else "per_device_train_batch_size"
        rows = getattr(args, name)
        for n in halvings(rows):
            accumulation = args.gradient_accumulation_steps * rows // n
            offer({name: n, "gradient_accumulation_steps": accumulation}, "smaller passes")
    if is_ppo:
        _offer_generation(args, models, offer)
    for stage in (1, 2, 3):
        if stage > getattr(args, f"{roles[0]}zero_stage"):
            offer({f"{role}zero_stage": stage for role in roles}, "more is sent")
    for what in ("optimizer", "all"):
        offer({"offload": what}, "Adam runs on the CPU: slow")
    if is_ppo:
        for n in models["actor"].tp_sizes:
            if args.inference_tp_size < n <= args.num_gpus:
                offer({"inference_tp_size": n, "enable_hybrid_engine": True}, "ranks generate together")
    offer({f"{role}lora_dim": 64 for role in roles}, "trains adapters only: another result")
    return found


def _offer_generation(args: Any, models: Models, offer: Any) -> None:
    """Offer fewer sequences at a time, and frozen models that wait on the CPU."""
    if args.enable_hybrid_engine:
        for n in halvings(build_run(args, models).num_slots):
            offer({"generation_slots": n}, "fewer sequences at a time")
    else:
        prompts, batches = args.per_device_generation_batch_size, args.generation_batches
        for n in halvings(prompts):
            flags = {"per_device_generation_batch_size": n, "generation_batches": batches * prompts // n}
            offer(flags, "fewer sequences at a time")
    what = "its weights come from the CPU at every step"
    if not args.actor_lora_dim:
        offer({"offload_reference_model": True}, what)
    if set(models) - {"actor", "reference", "critic"}:
        offer({"offload_reward_model": True}, what)


def more_machines(args: Any) -> list[Change]:
    """Return larger numbers of GPUs: up to 8 in a machine, then more machines."""
    per_node = max(args.num_gpus, 8)
    nodes = [2**k for k in range(1, 11) if 2**k > args.num_nodes and 2**k * per_node <= MAX_RANKS]
    gpus = [Change({"num_gpus": n}, "more GPUs") for n in (2, 4, 8) if n > args.num_gpus]
    return gpus + [Change({"num_gpus": per_node, "num_nodes": n}, "more machines") for n in nodes]
