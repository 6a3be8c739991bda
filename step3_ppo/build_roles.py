"""The roles of a run: a specification of each, which of them share a frozen base, and their construction.

A role can share its base if the base is frozen: only adapters are trained, or it is a reward model. Roles
whose base is the same folder or hub name then share its parameters, each with its own adapters and head. The
reference needs no base: it is the actor with its initial adapters.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
from torch import nn

from common.data.dialogue import Template
from common.data.tokenizer import num_token_ids
from common.engine.ds_config import build_engine, config_of
from common.flags.args import Problems
from common.generation.decode import SamplingOptions
from common.generation.hybrid_engine import HybridEngine, HybridOptions
from common.models.saved_adapters import adapter_rank, base_of, is_adapter
from common.programs.conversation_form import closing_of
from common.programs.training_loop import load_policy, load_ranker, runs_packed, saved_model
from common.ranks import distributed
from step3_ppo.arguments import PPOArguments
from step3_ppo.rewards.reward_specs import RewardSpec
from step3_ppo.role_arguments import RoleFlags
from step3_ppo.roles import (
    Actor,
    Critic,
    LoraReference,
    MovingReference,
    Reference,
    Reward,
    Role,
    Roles,
    Teacher,
    has_text_steps,
)

# ---------------------------------------------------------------------------------------------------------
# Which roles there are
# ---------------------------------------------------------------------------------------------------------


class BaseKey(NamedTuple):
    """A base and how it is held. Roles with equal keys share the same parameters."""

    name: str  # folder or hub name
    is_sharded: bool  # by ZeRO 3
    is_on_cpu: bool  # between uses
    is_in_4bit: bool


@dataclass(frozen=True)
class RoleSpec:
    """One model of a run, and how it is loaded and held."""

    name: str  # actor, reference, critic, or a reward's name
    flag: str  # its flag, for messages
    flags: Any  # a RoleFlags; for a frozen model without LoRA and gradient checkpointing
    load_in_4bit: bool  # of a base under adapters
    is_trained: bool = False
    is_value_model: bool = False
    keeps_base: bool = False  # its base is frozen and can be shared
    uses_actor: bool = False  # the actor's weights, with adapters disabled or averaged

    @property
    def path(self) -> str:
        """Folder or hub name of the model."""
        return self.flags.model_name_or_path

    @property
    def is_reward(self) -> bool:
        """Whether it is a reward model."""
        return self.is_value_model and not self.is_trained

    @property
    def label(self) -> str:
        """Name of the role in messages."""
        return f"reward {self.name}" if self.is_reward else self.name

    @property
    def is_offloaded(self) -> bool:
        """Whether it is frozen and its weights are on the CPU between uses."""
        return not self.is_trained and self.flags.offload == "param"

    @property
    def is_in_4bit(self) -> bool:
        """Whether the linear layers of its base are in 4 bits."""
        return self.load_in_4bit and (self.flags.lora_dim > 0 or is_adapter(self.path))

    @property
    def base(self) -> BaseKey | None:
        """Key of a base that can be shared. Raises ValueError if an adapter does not name its base."""
        if not self.keeps_base:
            return None
        name = base_of(self.path)
        if Path(name).is_dir():
            name = str(Path(name).resolve())
        is_sharded = self.flags.zero_stage == 3
        is_on_cpu = self.is_offloaded or (is_sharded and self.flags.offload in ("param", "all"))
        return BaseKey(name, is_sharded, is_on_cpu, self.is_in_4bit)

    def ds_config(self, args: Any, micro_batch_size: int) -> dict[str, Any]:
        """The model's DeepSpeed configuration."""
        return config_of(
            args,
            zero_stage=self.flags.zero_stage,
            offload=self.flags.offload,
            micro_batch_size=micro_batch_size,
            is_trained=self.is_trained,
        )


def default_critic(args: Any) -> str:
    """Path of the critic's model: its flag's, by default the actor's in a run with rewards; may be ""."""
    default = args.actor_model_name_or_path if args.reward or args.environment else ""
    return args.critic_model_name_or_path or default


def default_rewards(args: Any) -> list[RewardSpec]:
    """The default reward, used without --reward and --environment: the critic's model; [] without one."""
    path = args.critic_model_name_or_path
    return [RewardSpec("model", path, 1.0, "model")] if path else []


def build_role_specs(args: Any, rewards: Sequence[RewardSpec], *, has_critic: bool) -> list[RoleSpec]:
    """Actor, reference or teacher, critic and reward models, in this order.

    A role whose flag names no model is left out: the checks report it.
    """
    teacher = args.teacher_model_name_or_path
    uses_actor = not teacher and bool(args.actor_lora_dim or args.ref_ema_decay)
    is_offloaded = args.offload_reference_model and not uses_actor
    specs = [
        _trained_spec(args, "actor", args.actor),
        RoleSpec(
            "reference",
            "--teacher_model_name_or_path" if teacher else "--actor_model_name_or_path",
            _frozen_flags(args.actor, teacher or args.actor_model_name_or_path, is_offloaded),
            args.load_in_4bit,
            uses_actor=uses_actor,
        ),
    ]
    if has_critic:
        specs.append(
            _trained_spec(
                args,
                "critic",
                replace(args.critic, model_name_or_path=default_critic(args)),
                is_value_model=True,
            )
        )
    for reward in (reward for reward in rewards if reward.kind == "model"):
        spec = RoleSpec(
            reward.name,
            "--reward model:" if args.reward else "--critic_model_name_or_path",
            _frozen_flags(args.critic, reward.target, args.offload_reward_model),
            args.load_in_4bit,
            is_value_model=True,
            keeps_base=True,
        )
        specs.append(spec)
    return [spec for spec in specs if spec.path]


def _trained_spec(args: Any, name: str, flags: RoleFlags, *, is_value_model: bool = False) -> RoleSpec:
    return RoleSpec(
        name,
        f"--{name}_model_name_or_path",
        flags,
        args.load_in_4bit,
        is_trained=True,
        is_value_model=is_value_model,
        keeps_base=flags.lora_dim > 0 and args.only_optimize_lora,
    )


def _frozen_flags(flags: RoleFlags, path: str, is_offloaded: bool) -> RoleFlags:
    offload = "param" if is_offloaded else "none"
    return replace(flags, model_name_or_path=path, offload=offload, gradient_checkpointing=False, lora_dim=0)


def fill_ranks(args: Any, problems: Problems) -> None:
    """Set the LoRA rank of roles that start from a saved adapter; add a problem if the flag names another
    rank.
    """
    for prefix, role in args.roles().items():
        path = role.model_name_or_path
        with problems.catch():
            rank = adapter_rank(path)
            problems.add_if(
                rank != 0 and role.lora_dim not in (0, rank),
                f"--{prefix}lora_dim {role.lora_dim}: the adapter {path} has rank {rank}, which is kept; "
                "leave the flag out, or give the export/ folder of its run, which gets new adapters",
            )
            setattr(args, f"{prefix}lora_dim", rank or role.lora_dim)


def describe_bases(args: Any, specs: Sequence[RoleSpec], problems: Problems) -> list[str]:
    """A line for each base that several roles share, and for each that is held twice.

    Adds a problem if a role of the latter starts from an adapter, which is meant to share, or if an adapter
    does not name its base.
    """
    sharing: dict[str, dict[BaseKey, list[RoleSpec]]] = {}
    with problems.catch():
        for spec in specs:
            key = spec.base
            if key:
                sharing.setdefault(key.name, {}).setdefault(key, []).append(spec)
    lines = []
    for name, by_key in sharing.items():
        groups = [", ".join(spec.label for spec in roles) for roles in by_key.values()]
        for group, roles in zip(groups, by_key.values(), strict=True):
            served = group.replace("actor", "actor, reference")
            lines += [f"one copy of {name} in memory serves {served}"] if len(roles) > 1 else []
        if len(by_key) > 1:
            line = f"{name} is held twice, as the base of {'; of '.join(groups)}: {_why_apart(args, by_key)}"
            if any(is_adapter(spec.path) for roles in by_key.values() for spec in roles):
                problems.add(f"{line}; or give the export/ folders, which are models of their own")
            else:
                lines.append(line)
    return lines


def _why_apart(args: Any, keys: Sequence[BaseKey]) -> str:
    """Explain which flags prevent sharing the base, and how to fix it."""
    if len({key.is_sharded for key in keys}) > 1:
        stages = f"--actor_zero_stage {args.actor_zero_stage}, --critic_zero_stage {args.critic_zero_stage}"
        return f"{stages} shard it for one and not for the other; give both 3, or neither"
    if len({key.is_in_4bit for key in keys}) > 1:
        return "--load_in_4bit packs it under adapters alone; leave it out, or give adapters for all"
    flags = [f"--offload {args.offload}"]
    flags += [f"--critic_offload {args.critic_offload}"] if args.critic_offload else []
    flags += ["--offload_reward_model"] if args.offload_reward_model else []
    return f"{', '.join(flags)} keep it on the CPU for one and not for the other; give them for all, or none"


# ---------------------------------------------------------------------------------------------------------
# Construction
# ---------------------------------------------------------------------------------------------------------


class RoleLoader:
    """Loads a run's models one by one, reusing a base that is already loaded. Every rank must call all
    methods.
    """

    def __init__(self, args: PPOArguments, num_tokens: int) -> None:
        self.args = args
        self.num_tokens = num_tokens
        self.owners: dict[BaseKey, nn.Module] = {}  # model that each base was loaded with

    def load_engine(self, spec: RoleSpec, num_steps: int) -> Any:
        """DeepSpeed engine that trains the role's model, with schedules over `num_steps`."""
        ds_config = spec.ds_config(self.args, self.args.per_device_training_batch_size)
        model = self._load_model(spec, ds_config)
        return build_engine(model, ds_config, self.args, num_steps, role=spec.flags)

    def load_frozen(self, spec: RoleSpec, kind: type[Role]) -> Any:
        """A role of this kind with its frozen model."""
        ds_config = spec.ds_config(self.args, self.args.per_device_training_batch_size)
        model = self._load_model(spec, ds_config).requires_grad_(False)
        layout = self.layout_of(model)
        is_sharded = spec.flags.zero_stage == 3
        if is_sharded:  # DeepSpeed gathers and offloads its weights
            model, *_ = deepspeed.initialize(model=model, config=ds_config)
        elif not spec.is_offloaded:
            model.to(distributed.device())
        return kind(model, is_offloaded=spec.is_offloaded and not is_sharded, **layout)

    def layout_of(self, model: Any) -> dict[str, bool]:
        """Layout of sequences in the passes of a role's model."""
        is_packed = runs_packed(self.args, model)
        has_groups = self.args.num_samples_per_prompt > 1 and not self.args.no_share_prompts
        return {"is_packed": is_packed, "shares_prompts": is_packed and has_groups}

    def _load_model(self, spec: RoleSpec, ds_config: dict[str, Any]) -> Any:
        load: Any = load_ranker if spec.is_value_model else load_policy
        base = spec.base
        shared = {"owner": self.owners[base]} if base in self.owners else {}
        # Without dropout: old and new log-probabilities must agree before the first update.
        model = load(self.args, ds_config, self.num_tokens, dropout=0.0, role=spec.flags, **shared)
        if base:
            self.owners.setdefault(base, saved_model(model))
        return model


def build_roles(
    args: PPOArguments,
    tokenizer: Any,
    rewards: Sequence[RewardSpec],
    num_optimizer_steps: int,
    *,
    has_critic: bool,
    template: Template | None = None,
) -> Roles:
    """Load and build all roles. Learning-rate schedules have `num_optimizer_steps` steps, the actor's twice
    that if it has separate steps on text.

    Every rank must call this.
    """
    specs = {spec.name: spec for spec in build_role_specs(args, rewards, has_critic=has_critic)}
    loader = RoleLoader(args, num_token_ids(tokenizer))
    num_actor_steps = num_optimizer_steps * (2 if has_text_steps(args) else 1)
    engine = loader.load_engine(specs["actor"], num_actor_steps)
    hybrid_engine = HybridEngine(engine, HybridOptions.of(args))
    layout = loader.layout_of(engine.module)
    actor = Actor(hybrid_engine, sampling_options(args, tokenizer), **layout)
    critic = None
    if has_critic:
        engine = loader.load_engine(specs["critic"], num_optimizer_steps)
        critic = Critic(engine, **loader.layout_of(engine.module))
        can_move_states = engine.zero_optimization_stage() > 0 and args.critic.offload not in ("param", "all")
        if args.offload_states_for_generation and can_move_states:
            hybrid_engine.offload_during_generation(engine)
    scorers = {}
    for name in (reward.name for reward in rewards if reward.kind == "model"):
        scorers[name] = loader.load_frozen(specs[name], Reward)
        if template:
            scorers[name].closing_ids = closing_of(specs[name].path, template)
    reference: Reference
    if args.teacher_model_name_or_path:
        reference = loader.load_frozen(specs["reference"], Teacher)
    elif args.actor_lora_dim:
        has_new_adapters = not is_adapter(args.actor_model_name_or_path)
        reference = LoraReference(actor.model, has_new_adapters=has_new_adapters, **layout)
    elif args.ref_ema_decay:
        reference = MovingReference(actor.model, args.ref_ema_decay, **layout)
    else:
        reference = loader.load_frozen(specs["reference"], Reference)
    return Roles(actor, reference, critic, scorers)


def sampling_options(args: PPOArguments, tokenizer: Any) -> SamplingOptions:
    """Sampling options from the flags."""
    return SamplingOptions(
        max_new_tokens=args.max_answer_seq_len,
        stop_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        num_valid_tokens=num_token_ids(tokenizer),
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
    )
