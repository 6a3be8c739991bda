"""Sharing of one copy of a frozen base model between roles.

A role takes part if its base stays as it is: adapters train alone, or it is a reward model. Roles whose base
is the same folder or hub name hold the same parameters then, each with adapters and head of its own. The
reference needs nothing: it is the actor's adapters as they began.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from common.flags.args import Problems
from common.models.saved_adapters import adapter_rank, base_of, is_adapter
from common.programs.training_loop import saved_model
from step3_ppo.rewards.reward_specs import RewardSpec


class Place(NamedTuple):
    """A base and how it is held. Roles with equal places share the same parameters."""

    base: str  # folder or hub name
    is_sharded: bool  # by ZeRO 3
    is_on_cpu: bool  # between uses
    is_in_4bit: bool


def fill_ranks(args: Any, problems: Problems) -> None:
    """Set the LoRA rank of roles that start from a saved adapter; add a problem if the flag names another
    rank.
    """
    for flag, role in {"actor_lora_dim": args.actor, "critic_lora_dim": args.critic}.items():
        path, given = role.model_name_or_path, role.lora_dim
        with problems.catch():
            rank = adapter_rank(path)
            problems.add_if(
                rank != 0 and given not in (0, rank),
                f"--{flag} {given}: the adapter {path} has rank {rank}, which is kept; leave the flag "
                "out, or give the export/ folder of its run, which gets new adapters",
            )
            setattr(args, flag, rank or given)


def model_paths(args: Any, rewards: Sequence[RewardSpec], *, has_critic: bool) -> dict[str, str]:
    """Paths of actor, critic and reward models by role: `actor`, `critic`, `reward NAME`."""
    paths = {"actor": args.actor_model_name_or_path}
    paths |= {"critic": args.critic_model_name_or_path} if has_critic else {}
    paths |= {f"reward {spec.name}": spec.target for spec in rewards if spec.kind == "model"}
    return {role: path for role, path in paths.items() if path}  # the checks come later


def find_places(args: Any, paths: Mapping[str, str]) -> dict[str, Place]:
    """Place of the base of each role in `paths`, without roles that train their base.

    Raises ValueError if an adapter does not name its base.
    """
    places = {}
    for role, path in paths.items():
        flags = args.actor if role == "actor" else args.critic
        is_sharded, is_on_cpu = flags.zero_stage == 3, args.offload_reward_model
        if role in ("actor", "critic"):
            if not (flags.lora_dim and args.only_optimize_lora):
                continue
            is_on_cpu = is_sharded and flags.offload in ("param", "all")
        base = base_of(path)
        base = str(Path(base).resolve()) if Path(base).is_dir() else base
        is_in_4bit = args.load_in_4bit and (role in ("actor", "critic") or is_adapter(path))
        places[role] = Place(base, is_sharded, is_on_cpu, is_in_4bit)
    return places


def describe_places(args: Any, paths: Mapping[str, str], problems: Problems) -> list[str]:
    """A line for each base that several roles share, and for each that must be held twice.

    Adds a problem if a role of the latter starts from an adapter, and so asks to share.
    """
    places: dict[str, Place] = {}
    with problems.catch():
        places = find_places(args, paths)
    roles_of: dict[str, dict[Place, list[str]]] = {}
    for role, place in places.items():
        roles_of.setdefault(place.base, {}).setdefault(place, []).append(role)
    lines = []
    for base, by_place in roles_of.items():
        for roles in by_place.values():
            names = ", ".join(roles).replace("actor", "actor, reference")
            lines += [f"one copy of {base} in memory serves {names}"] if len(roles) > 1 else []
        if len(by_place) > 1:
            groups = "; of ".join(", ".join(roles) for roles in by_place.values())
            line = f"{base} is held twice, as the base of {groups}: {_why_apart(args, by_place)}"
            if any(is_adapter(paths[role]) for roles in by_place.values() for role in roles):
                problems.add(f"{line}; or give the export/ folders, which are models of their own")
            else:
                lines.append(line)
    return lines


def _why_apart(args: Any, places: Mapping[Place, Any]) -> str:
    """Explain which flags prevent sharing the base, and how to fix it."""
    if len({place.is_sharded for place in places}) > 1:
        stages = f"--actor_zero_stage {args.actor_zero_stage}, --critic_zero_stage {args.critic_zero_stage}"
        return f"{stages} shard it for one and not for the other; give both 3, or neither"
    if len({place.is_in_4bit for place in places}) > 1:
        return "--load_in_4bit packs it under adapters alone; leave it out, or give adapters for all"
    flags = [f"--offload {args.offload}"]
    flags += [f"--critic_offload {args.critic_offload}"] if args.critic_offload else []
    flags += ["--offload_reward_model"] if args.offload_reward_model else []
    return f"{', '.join(flags)} keep it on the CPU for one and not for the other; give them for all, or none"


class Bases:
    """Loads a run's models, reusing a base that is already loaded."""

    def __init__(self, places: Mapping[str, Place]) -> None:
        self.places = places
        self.owners: dict[Place, nn.Module] = {}

    def load(self, role: str, load: Callable[..., Any], /, *words: Any, **more: Any) -> Any:
        """The model of a role, loaded by `load` (load_policy, load_ranker). Every rank must call this."""
        place = self.places.get(role)
        if place in self.owners:
            more["owner"] = self.owners[place]
        model = load(*words, **more)
        if place is not None:
            self.owners.setdefault(place, saved_model(model))
        return model
