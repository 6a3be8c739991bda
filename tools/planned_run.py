"""What a plan is made of: machines, models and the flags of a step; nothing is loaded."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from transformers import AutoConfig

from common.data.registry import import_plugins
from common.engine.ds_config import build_config, load_overrides
from common.flags.args import Problems, flag
from common.generation.generate import DEFAULT_SLOTS
from common.models.loading import DTYPES
from common.models.lora import LoraOptions
from common.models.model_flops import DEVICES
from common.programs import startup
from step3_ppo.algorithms import find_algorithm
from step3_ppo.checks import check_flags, samples_per_rank
from step3_ppo.rewards.reward_specs import parse_rewards
from tools.planned_model import PlannedModel, Switch, plan_switch, with_adapters
from tools.step_flags import StageArguments

SHAPES = Path(__file__).resolve().parents[1] / "training_scripts/model_shapes.json"  # by hub name

Models = dict[str, PlannedModel]  # by role, without adapters


@dataclass
class PlanArguments(StageArguments):
    """The machines."""

    gpu: str = flag("h100-80g", "kind of device", choices=tuple(DEVICES))
    num_gpus: int = flag(1, "GPUs, or CPU processes, of each machine", low=1)
    num_nodes: int = flag(1, "machines", low=1)
    gpu_memory_gib: float = flag(0.0, "memory of a GPU; 0: what --gpu has", low=0)
    cpu_memory_gib: float = flag(0.0, "CPU memory of a machine; 0: not known, so not checked", low=0)
    flash_attention: bool = flag(False, "flash-attn is installed there (requirements-gpu.txt)")


@dataclass(frozen=True)
class Role:
    """One model of a run."""

    name: str
    model: PlannedModel  # with its adapters
    zero: DeepSpeedZeroConfig  # the stage as it is run; sizes in elements
    is_trained: bool
    is_checkpointed: bool
    params_on_cpu: bool
    is_adapter_off: bool = False  # the actor without its adapters: no weights of its own

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a part of the weights."""
        return self.zero.stage == 3

    @property
    def states_on_cpu(self) -> bool:
        """Whether its optimizer is kept on the CPU."""
        return self.zero.offload_optimizer is not None


class Run:
    """Everything that a plan depends on: the flags (PlanArguments' and the step's) and what they come to."""

    def __init__(self, args: Any, models: Models) -> None:
        self.args, self.models = args, models
        self.device, self.is_cpu = DEVICES[args.gpu], args.gpu == "cpu"
        self.memory_bytes = (args.gpu_memory_gib or self.device.memory_gib) * 2**30
        self.num_ranks = args.num_gpus * args.num_nodes
        self.dtype = dtype_of(args)
        self.num_bytes = DTYPES[self.dtype].itemsize  # of a weight
        self.roles = build_roles(args, models)
        # Attention keeps no mask of packed sequences, or with flash-attn; both want a GPU and 16 bits.
        self.is_flash = not self.is_cpu and self.dtype != "fp32" and (args.flash_attention or args.packed)
        is_ppo, longest = args.stage == 3, longest_row(args)
        self.actor = self.roles[0] if is_ppo else None  # the role that generates
        rows = args.per_device_training_batch_size if is_ppo else args.per_device_train_batch_size
        self.length = longest // sequences_of_row(args)  # tokens of a sequence
        self.tokens_per_pass = args.max_tokens_per_micro_batch or rows * longest  # in step 3 of scoring, too
        self.tokens_per_evaluation = 0 if is_ppo else args.per_device_eval_batch_size * longest
        # Of a rank and optimizer step, then of its passes.
        self.sequences_per_update = rows * sequences_of_row(args) * args.gradient_accumulation_steps
        self.num_micro_batches = -(-self.sequences_per_update * self.length // self.tokens_per_pass)
        if not self.actor:
            return
        self.num_samples = samples_per_rank(args)
        # 1 without a plan for the family, as in the hybrid engine.
        self.tp_size = args.inference_tp_size if models["actor"].find_cuts(args.inference_tp_size) else 1
        is_hybrid = args.enable_hybrid_engine
        self.gathers_by_layer = is_hybrid and args.unpin_actor_parameters and self.actor.is_sharded
        # Sequences that a replica runs at a time; transformers' generate runs all of a batch.
        waiting = args.per_device_generation_batch_size * args.num_samples_per_prompt * self.tp_size
        self.num_slots = min(args.generation_slots or DEFAULT_SLOTS, waiting) if is_hybrid else waiting

    def plan_switch(self) -> Switch:
        """Return what the change to generate mode moves and holds, in elements of a rank."""
        actor, layers = self.actor, self.args.tp_gather_partition_size
        return plan_switch(actor.model, self.num_ranks, self.tp_size, actor.is_sharded, layers)


def build_roles(args: Any, models: Models) -> list[Role]:
    """Return the roles as the steps make them, the actor first."""
    overrides = load_overrides(args)

    def read_zero(stage: int, offload: str, *, is_trained: bool) -> DeepSpeedZeroConfig:
        config = build_config(
            zero_stage=stage,
            dtype=dtype_of(args),
            offload=offload,
            overrides=overrides,
            is_trained=is_trained,
        )
        return DeepSpeedZeroConfig(**config["zero_optimization"])

    def build_trained(name: str, flags: Any) -> Role:
        zero = read_zero(flags.zero_stage, args.offload, is_trained=True)
        model = with_adapters(models[name], LoraOptions.of(args, flags))
        return Role(name, model, zero, True, flags.gradient_checkpointing, zero.offload_param is not None)

    def build_frozen(name: str, like: Any, is_offloaded: bool) -> Role:
        stage = 3 if like.zero_stage == 3 else 0
        zero = read_zero(stage, "param" if is_offloaded else "none", is_trained=False)
        return Role(name, models[name], zero, False, False, is_offloaded or zero.offload_param is not None)

    if args.stage < 3:
        (name,) = models
        return [build_trained(name, args)]
    actor = build_trained("actor", args.actor)
    if args.actor_lora_dim:
        reference = replace(actor, name="reference", is_trained=False, is_adapter_off=True)
    else:
        reference = build_frozen("reference", args.actor, args.offload_reference_model)
    trained = [build_trained("critic", args.critic)] if "critic" in models else []
    rewards = [name for name in models if name not in ("actor", "reference", "critic")]
    frozen = [build_frozen(name, args.critic, args.offload_reward_model) for name in rewards]
    return [actor, reference, *trained, *frozen]


# ---- models ---------------------------------------------------------------------------------------------


def read_models(args: Any, problems: Problems) -> Models:
    """Return the models by role, after adding what is wrong with their paths."""
    read: dict[tuple[str, bool], PlannedModel] = {}
    found = find_models(args, problems)
    for flag_name, path, is_value_model in dict.fromkeys(found.values()):
        config = known_config(path) or startup.check_model(flag_name, path, args, problems)
        if config is None:
            continue
        text, multiple = config.get_text_config(), args.pad_vocab_multiple
        text.vocab_size = -(-text.vocab_size // multiple) * multiple
        startup.check_length(config, longest_row(args) // sequences_of_row(args), flag_name, problems)
        try:
            model = PlannedModel(config, is_value_model, trust_remote_code=args.trust_remote_code)
            read[path, is_value_model] = model
        except ValueError as error:
            problems.add(f"{flag_name} {path}: {error}")
    return {role: read[what[1:]] for role, what in found.items() if what[1:] in read}


def find_models(args: Any, problems: Problems) -> dict[str, tuple[str, str, bool]]:
    """Return (flag, path, whether it is a value model) by role, after adding what is missing."""
    if args.stage < 3:
        is_value_model = args.stage == 2 and args.loss != "dpo"
        name = "reward" if is_value_model else "policy"
        return {name: ("--model_name_or_path", args.model_name_or_path, is_value_model)}
    import_plugins(args.plugins, problems)
    critic = args.critic_model_name_or_path or (args.actor_model_name_or_path if args.reward else "")
    of_actor = ("--actor_model_name_or_path", args.actor_model_name_or_path, False)
    of_critic = ("--critic_model_name_or_path", critic, True)
    found = {"actor": of_actor, "reference": of_actor}
    try:
        needs_critic, rewards = find_algorithm(args.algorithm).needs_critic, parse_rewards(args.reward)
    except ValueError as error:
        problems.add(str(error))
        return found
    if needs_critic:
        cure = "give it, or an --algorithm without a critic, such as grpo"
        problems.check(bool(critic), f"--critic_model_name_or_path is needed for --stage 3: {cure}")
        found["critic"] = of_critic
    if not args.reward:
        found["reward"] = of_critic
    found |= {spec.name: ("--reward model:", spec.target, True) for spec in rewards if spec.kind == "model"}
    return {role: what for role, what in found.items() if what[1]}


def known_config(path: str) -> Any:
    """Return the configuration of a model whose shape model_shapes.json has, so that no hub is asked."""
    shape = {} if Path(path).exists() else json.loads(SHAPES.read_text()).get(path)
    return AutoConfig.for_model(**shape) if shape else None


# ---- flags ----------------------------------------------------------------------------------------------


def sequences_of_row(args: Any) -> int:
    """Return the sequences of a row: step 2 has pairs."""
    return 2 if args.stage == 2 else 1


def dtype_of(args: Any) -> str:
    """Return the name of the dtype: what the programs would choose on such a device."""
    return args.dtype or ("fp32" if args.gpu == "cpu" else "bf16")


def longest_row(args: Any) -> int:
    """Return the tokens of what stays together in a pass: a row, a pair, a prompt with its response."""
    if args.stage == 3:
        return args.max_prompt_seq_len + args.max_answer_seq_len
    return args.max_seq_len * sequences_of_row(args)


def read_run(args: Any, problems: Problems) -> Run:
    """Return the run that the flags describe, or leave with all that is wrong with them."""
    models = read_models(args, problems)
    startup.check_ds_config(args, problems)
    if not problems.messages:
        for problem in find_problems(args, models):
            problems.add(problem)
    problems.exit_if_any()
    return Run(args, models)


def find_problems(args: Any, models: Models) -> list[str]:
    """Return what is wrong with the flags; what a step would refuse is refused here too."""
    found = Problems()
    names = ("actor_zero_stage", "critic_zero_stage") if args.stage == 3 else ("zero_stage",)
    stages = {f"--{name}": getattr(args, name) for name in names}
    startup.check_offload(args.offload, stages, dtype_of(args), found)
    if args.stage == 3:
        check_flags(args, args.num_gpus * args.num_nodes, dtype_of(args), found)
    else:
        cap, longest = args.max_tokens_per_micro_batch, longest_row(args)
        text = f"--max_tokens_per_micro_batch {cap} holds no whole row; raise it to at least {longest}"
        found.check(cap == 0 or cap >= longest, text)
    try:
        if args.stage == 3:
            models["actor"].find_cuts(args.inference_tp_size)
        build_roles(args, models)
    except ValueError as error:
        found.add(str(error))
    return found.messages
