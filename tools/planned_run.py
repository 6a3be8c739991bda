"""Inputs of a plan: models on torch's meta device, machines, and the flags of a step. Loads no weights."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from common.engine.ds_config import with_buckets
from common.flags.args import Problems
from common.flags.optimizer import check_optimizer
from common.flags.plugins import import_plugins
from common.generation.generate import DEFAULT_SLOTS
from common.generation.hybrid_engine import merges_adapters
from common.generation.resharding import TPLayout
from common.models.attention import takes_own_kernels
from common.models.four_bit import incompatible_flags
from common.models.loading import DTYPES
from common.models.lora import LoraOptions
from common.models.saved_adapters import base_of
from common.programs import model_checks, startup
from common.ranks.devices import DEVICES
from step3_ppo.algorithms import find_algorithm
from step3_ppo.build_roles import (
    BaseKey,
    RoleSpec,
    build_role_specs,
    default_critic,
    default_rewards,
    describe_bases,
    fill_ranks,
)
from step3_ppo.checks import check_flags
from step3_ppo.rewards.reward_specs import RewardSpec, parse_rewards
from tools.planned_model import PlannedModel, Switch, plan_switch, with_adapters
from tools.step_flags import MEAN_LENGTHS

SHAPES = Path(__file__).resolve().parents[1] / "training_scripts/model_shapes.json"  # by hub name
Models = dict[str, PlannedModel]  # by role, without adapters

WITHOUT_BF16 = ("cpu", "t4-16g")  # devices whose default precision is fp32


@dataclass(frozen=True)
class Role:
    """One model of a run."""

    spec: RoleSpec
    model: PlannedModel  # with its adapters
    zero: DeepSpeedZeroConfig  # effective stage; sizes in elements
    num_shared: int = 0  # parameters shared with an earlier role, which owns them
    num_packed: int = 0  # own parameters in 4 bits

    @property
    def name(self) -> str:
        """Its name in the step; "reward" for the only reward model."""
        return self.spec.label.removesuffix(" model")

    @property
    def is_checkpointed(self) -> bool:
        """Whether the backward pass recomputes activations."""
        return self.spec.flags.gradient_checkpointing

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a part of the weights."""
        return self.zero.stage == 3

    @property
    def steps_on_cpu(self) -> bool:
        """Whether its optimizer's states and step are on the CPU."""
        return self.zero.offload_optimizer is not None

    @property
    def params_on_cpu(self) -> bool:
        """Whether its weights are kept on the CPU: under ZeRO 3 layer by layer, else between uses."""
        return self.spec.is_offloaded or self.zero.offload_param is not None

    @property
    def states_can_move(self) -> bool:
        """Whether --offload_states_for_generation moves its optimizer states."""
        return self.spec.is_trained and self.zero.stage > 0 and self.zero.offload_param is None


class Run:
    """Everything that a plan depends on: the flags (PlanArguments' and the step's) and quantities derived
    from them.

    Raises ValueError if a model does not fit the adapters or slices that the flags set.
    """

    def __init__(self, args: Any, specs: Sequence[RoleSpec], models: Models) -> None:
        self.args = args
        self.models = models
        self.is_cpu = args.gpu == "cpu"
        self.memory_bytes = (args.gpu_memory_gib or DEVICES[args.gpu].memory_gib) * 2**30
        self.num_ranks = args.num_gpus * args.num_nodes
        self.num_bytes = DTYPES[args.dtype].itemsize  # bytes per weight
        self.roles = build_roles(args, specs, models)
        is_ppo = args.stage == 3
        cap = args.max_tokens_per_micro_batch
        self.actor = self.roles[0] if is_ppo else None  # the role that generates
        self.length = sequence_length(args)
        sequences_of_row = 2 if args.stage == 2 and not args.is_unpaired else 1  # pairs
        self.row_length = self.length * sequences_of_row  # tokens that a pass cannot split
        rows = args.per_device_training_batch_size if is_ppo else args.per_device_train_batch_size
        # Sequences that share a prompt; pairs are planned as if their prompts were empty.
        self.group_size = (
            args.num_samples_per_prompt if is_ppo and shares_prompts(args, models["actor"]) else 1
        )
        self.tokens_per_pass = max(cap, self.row_length) if cap else rows * self.row_length
        if not (cap or args.packed):
            self.tokens_per_pass = self.count_tokens(rows)
        self.tokens_per_score = self.tokens_per_pass
        if not is_ppo:  # evaluation passes
            self.tokens_per_score = (args.per_device_eval_batch_size or rows) * self.row_length
        elif args.max_tokens_per_scoring_pass:
            self.tokens_per_score = max(args.max_tokens_per_scoring_pass, self.row_length)
        # Sequences, then passes, per rank and optimizer step.
        self.sequences_per_update = rows * sequences_of_row * args.gradient_accumulation_steps
        num_tokens = self.count_tokens(self.sequences_per_update // sequences_of_row)
        self.num_micro_batches = math.ceil(round(num_tokens / self.tokens_per_pass, 9))  # of means, too
        self.longest_answer = getattr(args, "max_answer_seq_len", 0)
        if not self.actor:
            return
        self.num_samples = args.samples_per_step
        # As in the hybrid engine, 1 if the family has no plan.
        self.tp_size = args.inference_tp_size if models["actor"].find_cuts(args.inference_tp_size) else 1
        self.has_contiguous_groups = args.inference_tp_groups == "contiguous"
        is_hybrid = args.enable_hybrid_engine
        self.gathers_by_layer = is_hybrid and args.unpin_actor_parameters and self.actor.is_sharded
        # Sequences that a replica generates at a time; transformers' generate runs a whole batch.
        num_all = args.per_device_generation_batch_size * args.num_samples_per_prompt * self.tp_size
        self.num_slots = min(args.generation_slots or DEFAULT_SLOTS, num_all) if is_hybrid else num_all

    def count_tokens(self, rows: int) -> int:
        """The largest number of tokens computed for adjacent rows: a group's prompt counts once."""
        num_groups = (
            rows // self.group_size if rows % self.group_size == 0 else (rows - 2) // self.group_size + 2
        )
        num_spared = rows - min(num_groups, rows)  # prompts that are not recomputed
        return rows * self.row_length - num_spared * (self.args.max_prompt_seq_len if self.actor else 0)

    def plan_switch(self) -> Switch:
        """Elements that the switch to generation moves and holds on a rank."""
        is_contiguous = self.has_contiguous_groups
        rank = int(is_contiguous and self.num_ranks > 1)  # a typical rank: it owns no part of its slice
        return plan_switch(
            self.actor.model,
            TPLayout(self.num_ranks, self.tp_size, rank, is_contiguous),
            self.args.tp_gather_partition_size,
            is_sharded=self.actor.is_sharded,
            merges=merges_adapters(
                self.args.merge_adapters, self.actor.is_sharded, self.args.inference_tp_size
            ),
            is_packed=self.actor.num_packed > 0,
        )


def shares_prompts(args: Any, model: PlannedModel) -> bool:
    """Whether a group's prompt is computed only once."""
    has_kernels = args.gpu == "cpu" or args.dtype != "fp32"
    return (
        has_kernels and not args.no_share_prompts and takes_own_kernels(type(model.plain), model.plain.config)
    )


def sequence_length(args: Any) -> int:
    """The largest number of tokens of a sequence."""
    return args.max_prompt_seq_len + args.max_answer_seq_len if args.stage == 3 else args.max_seq_len


def build_roles(args: Any, specs: Sequence[RoleSpec], models: Models) -> list[Role]:
    """The roles with a model, the actor first."""
    roles: list[Role] = []
    loaded_bases: set[BaseKey] = set()
    for spec in (spec for spec in specs if spec.name in models):
        if spec.uses_actor:
            roles.append(replace(roles[0], spec=spec))
            continue
        model = with_adapters(models[spec.name], LoraOptions.of(args, spec.flags))
        config = spec.ds_config(args, 1)
        if spec.is_trained:
            config = with_buckets(config, model.num_trained, args.num_gpus * args.num_nodes)
        zero = DeepSpeedZeroConfig(**config["zero_optimization"])
        base = spec.base
        num_shared = model.num_in_backbone if base in loaded_bases else 0
        loaded_bases |= {base} if base else set()
        num_packed = model.num_in_linear if spec.is_in_4bit and not num_shared else 0
        roles.append(Role(spec, model, zero, num_shared, num_packed))
    return roles


# ---- from the flags -------------------------------------------------------------------------------------


def read_run(args: Any, problems: Problems) -> Run:
    """The run of the flags; exits with all problems if there are any."""
    models = read_models(args, problems)
    run = None if problems.messages else build_run(args, models, problems)
    problems.exit_if_any()
    assert run is not None
    return run


def build_run(args: Any, models: Models, problems: Problems) -> Run | None:
    """The run of these models; None after adding the problems for which a step would reject its flags."""
    if args.dtype in ("", "auto"):  # the programs' default on such a device
        args = replace(args, dtype="fp32" if args.gpu in WITHOUT_BF16 else "bf16")
    startup.check_offload(args, args.dtype, problems)
    check_optimizer(args, args.dtype, problems)
    if args.stage == 3:
        args = replace(args, critic_model_name_or_path=default_critic(args))
        fill_ranks(args, problems)
        check_flags(args, args.num_gpus * args.num_nodes, args.dtype, problems)
    specs = find_specs(args, problems)
    describe_bases(args, specs, problems)
    for problem in incompatible_flags(args, is_planned=True):
        problems.add(problem)
    for name, limit in MEAN_LENGTHS.items():
        mean = getattr(args, name)
        most = getattr(args, limit, 0)
        text = f"step {args.stage} allows 1 to {most} (--{limit}; 0 if the step has none)"
        problems.add_if(mean and not 1 <= mean <= most, f"--{name} {mean:g}: {text}")
    if problems.messages:
        return None
    with problems.catch():
        return Run(args, specs, models)
    return None


def read_models(args: Any, problems: Problems) -> Models:
    """Models by role; adds the problems of their paths."""
    models: dict[tuple[str, bool], PlannedModel | None] = {}
    specs = find_specs(args, problems)
    for spec in specs:
        if (spec.path, spec.is_value_model) not in models:
            models[spec.path, spec.is_value_model] = read_model(args, spec, problems)
    by_role = {spec.name: models[spec.path, spec.is_value_model] for spec in specs}
    return {name: model for name, model in by_role.items() if model}


def read_model(args: Any, spec: RoleSpec, problems: Problems) -> PlannedModel | None:
    """The model; None after adding the problem if it cannot be planned."""
    config = None
    with problems.catch():
        config = known_config(base_of(spec.path)) or model_checks.check_model(
            spec.flag, spec.path, args, problems, takes_adapter=args.stage == 3
        )
    if config is None:
        return None
    model_checks.check_length(config, sequence_length(args), spec.flag, problems)
    auto_class: Any = AutoModelForCausalLM
    if spec.is_value_model:
        config.num_labels = 1
        auto_class = AutoModelForSequenceClassification
    try:
        return PlannedModel(model_checks.empty_model(config, args, auto_class))
    except ValueError as error:
        problems.add(f"{spec.flag} {spec.path}: {error}")
    return None


def find_specs(args: Any, problems: Problems) -> list[RoleSpec]:
    """The roles of the step; adds problems for missing ones.

    Only folders can be shared bases: a hub name means exports of earlier steps, which are separate models.
    """
    if args.stage < 3:
        spec = RoleSpec("policy", "--model_name_or_path", args, args.load_in_4bit, is_trained=True)
        is_ranker = args.stage == 2 and args.kind == "reward"
        return [replace(spec, name="reward", is_value_model=True) if is_ranker else spec]
    import_plugins(args.plugins, problems)
    rewards: list[RewardSpec] = []
    has_critic = False
    with problems.catch():
        has_critic = find_algorithm(args.algorithm).needs_critic
        problems.add_if(
            has_critic and not default_critic(args),
            "--critic_model_name_or_path is required for --stage 3: set it, or use an --algorithm without a "
            "critic, such as grpo",
        )
    with problems.catch():
        rewards = parse_rewards(args.reward, has_teacher=bool(args.teacher_model_name_or_path))
    if not (args.reward or args.environment):
        rewards = default_rewards(args)
    specs = build_role_specs(args, rewards, has_critic=has_critic)
    return [replace(spec, keeps_base=spec.keeps_base and Path(spec.path).is_dir()) for spec in specs]


def known_config(path: str) -> Any:
    """Configuration of a model in model_shapes.json, which avoids the hub; None for other models."""
    shape = {} if Path(path).exists() else json.loads(SHAPES.read_text()).get(path)
    return AutoConfig.for_model(**shape) if shape else None
