"""What a plan is made of: machines, models and the flags of a step; nothing is loaded.

Presets of machines are the makers' data sheets: 10^12 operations of dense matrix products, GB/s (10^9 bytes)
of memory, and of links in one direction for each GPU. What a program reaches of them are the efficiencies.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from transformers import AutoConfig

from common.data.plugins import import_plugins
from common.engine.ds_config import EngineOptions, build_frozen_config, build_train_config, load_overrides
from common.flags.args import Problems, flag
from common.generation.generate import DEFAULT_SLOTS
from common.models.loading import DTYPES
from common.models.lora import LoraOptions
from common.models.model_flops import DEVICES
from common.programs import startup
from step3_ppo.algorithms import find_algorithm
from step3_ppo.rewards.reward_specs import parse_rewards
from tools.model_sizes import Activations, ModelSizes, SwitchSizes, trace_activations
from tools.step_flags import StageArguments

SHAPES = Path(__file__).resolve().parents[1] / "training_scripts/model_shapes.json"  # by hub name
ARITHMETIC, MEMORY, INTRA, INTER = "arithmetic", "memory", "links in a machine", "links between machines"
HOST, LATENCY, CPU = "link to the CPU", "latency of links", "CPU"

Models = dict[str, ModelSizes]  # by role


@dataclass
class PlanArguments(StageArguments):
    """The machines; 0 is what --gpu says."""

    gpu: str = flag("h100-80g", "kind of device", choices=tuple(DEVICES))
    num_gpus: int = flag(1, "GPUs, or CPU processes, of each machine", low=1)
    num_nodes: int = flag(1, "machines", low=1)
    gpu_memory_gib: float = flag(0.0, "memory of a GPU", low=0)
    reserved_gib: float = flag(
        0.0, "of it for the CUDA context, NCCL and what the allocator cannot use", low=0
    )
    gpu_tflops: float = flag(0.0, "dense matrix products in --dtype, 10^12 operations a second", low=0)
    gpu_bandwidth_gb_s: float = flag(0.0, "reading its own memory", low=0)
    intra_node_gb_s: float = flag(0.0, "from other GPUs of a machine, one direction", low=0)
    inter_node_gb_s: float = flag(0.0, "from other machines, for each GPU", low=0)
    host_link_gb_s: float = flag(0.0, "from the CPU's memory", low=0)
    cpu_memory_gib: float = flag(0.0, "CPU memory of a machine; 0: not known, so not checked", low=0)
    cpu_bandwidth_gb_s: float = flag(
        200.0, "of a machine's CPU memory, for an offloaded optimizer's step", above=0
    )
    intra_node_latency_us: float = flag(
        6.0, "of a collective for each doubling of ranks inside a machine", low=0
    )
    inter_node_latency_us: float = flag(12.0, "of a collective for each doubling of machines", low=0)
    matmul_efficiency: float = flag(0.4, "share of --gpu_tflops that is reached", above=0, high=1)
    memory_efficiency: float = flag(0.6, "share of --gpu_bandwidth_gb_s that is reached", above=0, high=1)
    link_efficiency: float = flag(0.7, "share of links that is reached", above=0, high=1)
    flash_attention: bool = flag(False, "flash-attn is installed there (requirements-gpu.txt)")
    json: bool = flag(False, "print the whole plan as one JSON object in the last line, too")


@dataclass(frozen=True)
class Hardware:
    """What is really reached of the machines, after the efficiencies."""

    name: str
    num_gpus: int
    num_nodes: int
    memory_bytes: float
    reserved_bytes: float
    cpu_memory_bytes: float  # of a machine; 0: not known
    rates: dict[str, float]  # by resource: operations or bytes a second of a rank
    intra_latency: float
    inter_latency: float

    @property
    def num_ranks(self) -> int:
        """Ranks of all machines."""
        return self.num_gpus * self.num_nodes

    @property
    def is_cpu(self) -> bool:
        """Whether a device's memory is the CPU's."""
        return self.name == "cpu"


def build_hardware(args: PlanArguments, dtype: str) -> Hardware:
    """Return what the flags describe."""
    device = DEVICES[args.gpu]
    tflops = args.gpu_tflops or (device.tflops_fp32 if dtype == "fp32" else device.tflops_16bit)
    memory, link = 1e9 * args.memory_efficiency, 1e9 * args.link_efficiency
    return Hardware(
        name=args.gpu,
        num_gpus=args.num_gpus,
        num_nodes=args.num_nodes,
        memory_bytes=(args.gpu_memory_gib or device.memory_gib) * 2**30,
        reserved_bytes=(args.reserved_gib or device.reserved_gib) * 2**30,
        cpu_memory_bytes=args.cpu_memory_gib * 2**30,
        rates={
            ARITHMETIC: tflops * 1e12 * args.matmul_efficiency,
            MEMORY: (args.gpu_bandwidth_gb_s or device.bandwidth_gb_s) * memory,
            INTRA: (args.intra_node_gb_s or device.intra_node_gb_s) * link,
            INTER: (args.inter_node_gb_s or device.inter_node_gb_s) * link,
            HOST: (args.host_link_gb_s or device.host_link_gb_s) * link,
            CPU: args.cpu_bandwidth_gb_s * memory / args.num_gpus,
        },
        intra_latency=args.intra_node_latency_us * 1e-6,
        inter_latency=args.inter_node_latency_us * 1e-6,
    )


# ---- the run --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Role:
    """One model of a run."""

    name: str
    model: ModelSizes
    zero: DeepSpeedZeroConfig  # the stage as it is run; sizes in elements
    is_trained: bool = True
    lora: LoraOptions = LoraOptions()
    is_checkpointed: bool = False
    is_offloaded: bool = False  # a frozen model that waits on the CPU
    is_adapter_off: bool = False  # the actor without its adapters: no weights of its own

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a part of the weights."""
        return self.zero.stage == 3

    @property
    def params_on_cpu(self) -> bool:
        """Whether its weights are kept on the CPU."""
        return self.is_offloaded or self.zero.offload_param is not None

    @property
    def states_on_cpu(self) -> bool:
        """Whether its optimizer is kept on the CPU."""
        return self.zero.offload_optimizer is not None

    @property
    def num_trained(self) -> int:
        """Parameters with an optimizer state."""
        return self.model.counts(self.lora).num_trained


@dataclass(frozen=True)
class Run:
    """Everything that a plan depends on."""

    args: Any  # PlanArguments and the step's flags
    hardware: Hardware
    dtype: str
    roles: tuple[Role, ...]
    length: int  # tokens of a sequence
    tokens_per_pass: int  # of a training micro-batch, and of step 3's scoring
    tokens_per_evaluation: int
    sequences_per_update: int  # of a rank and optimizer step
    num_samples: int  # responses of a rank in a PPO step

    @property
    def num_ranks(self) -> int:
        """Ranks of all machines."""
        return self.hardware.num_ranks

    @property
    def num_bytes(self) -> int:
        """Bytes of a weight."""
        return DTYPES[self.dtype].itemsize

    @property
    def num_micro_batches(self) -> int:
        """Passes of an optimizer step."""
        return -(-self.sequences_per_update * self.length // self.tokens_per_pass)

    @property
    def actor(self) -> Role | None:
        """The role that generates, None in steps 1 and 2."""
        return self.roles[0] if self.args.stage == 3 else None

    @property
    def tp_size(self) -> int:
        """Ranks that generate together: 1 without a plan for the family, as in the hybrid engine."""
        asked = self.args.inference_tp_size if self.actor and self.args.enable_hybrid_engine else 1
        return asked if asked > 1 and self.actor.model.cuts(asked) else 1

    @property
    def gathers_by_layer(self) -> bool:
        """Whether generation gathers ZeRO-3 weights in every pass."""
        args = self.args
        return args.enable_hybrid_engine and args.unpin_actor_parameters and self.actor.is_sharded

    @property
    def num_slots(self) -> int:
        """Sequences that a replica runs at a time; transformers' generate runs all of a batch."""
        waiting = self.args.per_device_generation_batch_size * self.args.num_samples_per_prompt * self.tp_size
        if not self.args.enable_hybrid_engine:
            return waiting
        return min(self.args.generation_slots or DEFAULT_SLOTS, waiting)

    @property
    def is_flash(self) -> bool:
        """Whether attention keeps no mask: packed sequences, or flash-attn; both want a GPU and 16 bits."""
        is_usable = not self.hardware.is_cpu and self.dtype != "fp32"
        return is_usable and (self.args.flash_attention or self.args.packed)

    def activations(self, role: Role) -> Activations:
        """Return those of one sequence."""
        return trace_activations(role.model, self.dtype, self.length, is_flash=self.is_flash)

    def switch_sizes(self) -> SwitchSizes:
        """Return what the change to generate mode moves and holds."""
        actor, layers = self.actor, self.args.tp_gather_partition_size
        return actor.model.switch_sizes(self.num_ranks, self.tp_size, actor.is_sharded, layers, actor.lora)


def build_run(args: Any, models: Models) -> Run:
    """Return what the flags describe."""
    dtype, is_ppo = dtype_of(args), args.stage == 3
    rows = args.per_device_training_batch_size if is_ppo else args.per_device_train_batch_size
    sequences = rows * sequences_of_row(args)
    longest = longest_row(args)
    prompts = args.per_device_generation_batch_size * args.generation_batches if is_ppo else 0
    return Run(
        args=args,
        hardware=build_hardware(args, dtype),
        dtype=dtype,
        roles=tuple(build_roles(args, models, dtype)),
        length=longest // sequences_of_row(args),
        tokens_per_pass=args.max_tokens_per_micro_batch or rows * longest,
        tokens_per_evaluation=0 if is_ppo else args.per_device_eval_batch_size * longest,
        sequences_per_update=sequences * args.gradient_accumulation_steps,
        num_samples=prompts * args.num_samples_per_prompt if is_ppo else 0,
    )


def build_roles(args: Any, models: Models, dtype: str) -> list[Role]:
    """Return the roles as the steps make them, the actor first."""
    overrides = load_overrides(args)

    def zero(stage: int, offload: str, *, is_trained: bool) -> DeepSpeedZeroConfig:
        build = build_train_config if is_trained else build_frozen_config
        options = EngineOptions(zero_stage=stage, dtype=dtype, offload=offload, overrides=overrides)
        return DeepSpeedZeroConfig(**build(options)["zero_optimization"])

    def trained(name: str, flags: Any) -> Role:
        settings = zero(flags.zero_stage, args.offload, is_trained=True)
        lora = LoraOptions.of(args, flags)
        return Role(name, models[name], settings, lora=lora, is_checkpointed=flags.gradient_checkpointing)

    def frozen(name: str, like: Any, is_offloaded: bool) -> Role:
        stage = 3 if like.zero_stage == 3 else 0
        settings = zero(stage, "param" if is_offloaded else "none", is_trained=False)
        return Role(name, models[name], settings, is_trained=False, is_offloaded=is_offloaded)

    if args.stage < 3:
        (name,) = models
        return [trained(name, args)]
    actor = trained("actor", args.actor)
    reference = replace(actor, name="reference", is_trained=False, is_adapter_off=True)
    if not args.actor_lora_dim:
        reference = frozen("reference", args.actor, args.offload_reference_model)
    critic = [trained("critic", args.critic)] if "critic" in models else []
    rewards = [name for name in models if name not in ("actor", "reference", "critic")]
    return [
        actor,
        reference,
        *critic,
        *(frozen(name, args.critic, args.offload_reward_model) for name in rewards),
    ]


def read_models(args: Any, problems: Problems) -> Models:
    """Return the models by role, after adding what is wrong with their paths."""
    models: Models = {}
    read: dict[tuple[str, bool], ModelSizes] = {}
    for role, (name, path, is_value_model) in _model_paths(args, problems).items():
        if (path, is_value_model) not in read:
            config = known_config(path) or startup.check_model(name, path, args, problems)
            if config is None:
                continue
            text, multiple = config.get_text_config(), args.pad_vocab_multiple
            text.vocab_size = -(-text.vocab_size // multiple) * multiple
            startup.check_length(config, longest_row(args) // sequences_of_row(args), name, problems)
            try:
                read[path, is_value_model] = ModelSizes(config, is_value_model, args.trust_remote_code)
            except ValueError as error:
                problems.add(f"{name} {path}: {error}")
                continue
        models[role] = read[path, is_value_model]
    return models


def _model_paths(args: Any, problems: Problems) -> dict[str, tuple[str, str, bool]]:
    """Return (flag, path, whether it is a value model) by role, after adding what is missing."""
    if args.stage < 3:
        is_value_model = args.stage == 2 and args.loss != "dpo"
        name = "reward" if is_value_model else "policy"
        return {name: ("--model_name_or_path", args.model_name_or_path, is_value_model)}
    actor, critic = args.actor_model_name_or_path, args.critic_model_name_or_path
    found = {name: ("--actor_model_name_or_path", actor, False) for name in ("actor", "reference")}
    import_plugins(args.plugins, problems)
    try:
        needs_critic, specs = find_algorithm(args.algorithm).needs_critic, parse_rewards(args.reward)
    except ValueError as error:
        problems.add(str(error))
        return found
    if needs_critic:
        critic = critic or (actor if args.reward else "")
        cure = "give it, or an --algorithm without a critic, such as grpo"
        problems.check(bool(critic), f"--critic_model_name_or_path is needed for --stage 3: {cure}")
        found["critic"] = ("--critic_model_name_or_path", critic, True)
    if args.reward:
        found |= {s.name: ("--reward model:", s.target, True) for s in specs if s.kind == "model"}
    else:
        found["reward"] = ("--critic_model_name_or_path", critic, True)
    return {role: what for role, what in found.items() if what[1]}


def known_config(path: str) -> Any:
    """Return the configuration of a model whose shape model_shapes.json has, so that no hub is asked."""
    shape = {} if Path(path).exists() else json.loads(SHAPES.read_text()).get(path)
    return AutoConfig.for_model(**shape) if shape else None


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


def find_problems(args: Any, models: Models) -> list[str]:
    """Return what is wrong with the flags; what a step would refuse is refused here too."""
    found = Problems()
    cap, longest = args.max_tokens_per_micro_batch, longest_row(args)
    text = f"--max_tokens_per_micro_batch {cap} holds no whole row; raise it to at least {longest}"
    found.check(cap == 0 or cap >= longest, text)
    for stage in [args.zero_stage] if args.stage < 3 else [args.actor_zero_stage, args.critic_zero_stage]:
        text = f"--offload {args.offload} needs ZeRO stage 3, not {stage}"
        found.check(args.offload != "param" or stage == 3, text)
        needs_states = args.offload in ("optimizer", "all") and dtype_of(args) == "fp32"
        text = f"--offload {args.offload} needs ZeRO stage 1, 2 or 3: under stage 0 no state can move"
        found.check(stage > 0 or not needs_states, text)
    if args.stage < 3:
        return found.messages
    samples = args.per_device_generation_batch_size * args.generation_batches * args.num_samples_per_prompt
    update = args.per_device_training_batch_size * args.gradient_accumulation_steps
    text = f"{samples} samples a rank are no multiple of those of an optimizer step, {update}: change one"
    found.check(samples % update == 0, text)
    tp_size, num_ranks, sizes = (
        args.inference_tp_size,
        args.num_gpus * args.num_nodes,
        models["actor"].tp_sizes,
    )
    tp = f"--inference_tp_size {tp_size}"
    text = f"{tp} does not fit the actor; use {', '.join(map(str, sizes))}"
    found.check(tp_size in sizes or sizes == [1], text)
    found.check(tp_size == 1 or args.enable_hybrid_engine, f"{tp} needs --enable_hybrid_engine")
    found.check(num_ranks % tp_size == 0, f"{tp} does not divide the number of ranks, {num_ranks}")
    is_cut = tp_size == 1 or not args.unpin_actor_parameters or args.actor_zero_stage < 3
    found.check(is_cut, f"{tp} and --unpin_actor_parameters exclude each other")
    text = f"--offload_states_for_generation and --offload {args.offload} exclude each other"
    found.check(not args.offload_states_for_generation or args.offload not in ("param", "all"), text)
    return found.messages
