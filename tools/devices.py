"""The flags of a plan: machines, with presets, and those of the steps that matter; their checks, and changes.

Presets are the makers' data sheets: 10^12 operations of dense matrix products, GB/s (10^9 bytes) of memory,
and of links in one direction for each GPU. What a program reaches of them are the three efficiencies.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoConfig

from common.flags.args import REQUIRED, PackingArguments, Problems, flag
from common.models.device_peaks import DEVICES
from common.programs import startup
from tools.model_sizes import ModelSizes

MAX_RANKS = 1024
SHAPES = Path(__file__).resolve().parents[1] / "training_scripts/model_shapes.json"  # by hub name

Models = dict[str, ModelSizes]  # by role


@dataclass
class HardwareArguments:
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


@dataclass
class ModelArguments:
    """Models and precision, as in the steps."""

    stage: int = flag(REQUIRED, "step that is planned: 1 SFT, 2 reward model, 3 PPO", choices=(1, 2, 3))
    model_name_or_path: str = flag("", "steps 1 and 2: the model; no weights are loaded")
    loss: str = flag(
        "end_score",
        "step 2: dpo plans a policy in place of a reward model",
        choices=("end_score", "token_wise", "dpo"),
    )
    actor_model_name_or_path: str = flag("", "step 3: the actor, also the reference")
    critic_model_name_or_path: str = flag("", "step 3: the critic")
    reward_model_name_or_path: str = flag("", "step 3: the reward model; empty: the critic's")
    no_critic: bool = flag(False, "the --algorithm is grpo, rloo or another without a critic")
    trust_remote_code: bool = flag(False, "run code that comes with a hub model")
    pad_vocab_multiple: int = flag(
        1, "pad the embeddings to a multiple of this while training", low=1, high=2**16
    )
    dtype: str = flag("", "weights; empty: bf16, on a CPU fp32", choices=("fp32", "bf16", "fp16"))
    offload: str = flag(
        "none",
        "keep on the CPU: optimizer state, parameters (ZeRO-3 only), or all; alone: all",
        choices=("none", "optimizer", "param", "all"),
        const="all",
    )
    only_optimize_lora: bool = flag(True, "with LoRA train the adapters and the score head alone")
    gradient_accumulation_steps: int = flag(1, "micro-batches per optimizer step", low=1)
    ds_config: str = flag("", "JSON file merged over the DeepSpeed configuration that the flags make")


@dataclass
class SingleModelArguments:
    """Steps 1 and 2."""

    zero_stage: int = flag(0, "DeepSpeed ZeRO stage", choices=(0, 1, 2, 3))
    gradient_checkpointing: bool = flag(False, "recompute activations in the backward pass")
    lora_dim: int = flag(0, "rank of the adapters; 0: no LoRA", low=0, high=2**16)
    lora_module_name: str = flag("auto", "adapt the linear layers whose name contains this")
    max_seq_len: int = flag(512, "tokens of prompt and response at most", low=4)
    per_device_train_batch_size: int = flag(16, "rows (step 2: pairs) per rank and micro-batch", low=1)
    per_device_eval_batch_size: int = flag(16, "rows per rank and evaluation batch", low=1)


@dataclass
class PPOPlanArguments:
    """Step 3."""

    actor_zero_stage: int = flag(0, "ZeRO stage of actor and reference", choices=(0, 1, 2, 3))
    critic_zero_stage: int = flag(0, "ZeRO stage of critic and reward model", choices=(0, 1, 2, 3))
    actor_gradient_checkpointing: bool = flag(False, "recompute the actor's activations")
    critic_gradient_checkpointing: bool = flag(False, "recompute the critic's activations")
    offload_reference_model: bool = flag(False, "keep the reference on the CPU between uses")
    offload_reward_model: bool = flag(False, "keep the reward model on the CPU between uses")
    actor_lora_dim: int = flag(0, "rank of the actor's adapters; 0: no LoRA", low=0, high=2**16)
    actor_lora_module_name: str = flag("auto", "adapt the actor's linear layers whose name contains this")
    critic_lora_dim: int = flag(0, "rank of the critic's adapters; 0: no LoRA", low=0, high=2**16)
    critic_lora_module_name: str = flag("auto", "adapt the critic's linear layers whose name contains this")
    max_prompt_seq_len: int = flag(256, "prompt tokens at most", low=1)
    max_answer_seq_len: int = flag(256, "response tokens at most", low=1)
    num_samples_per_prompt: int = flag(1, "responses sampled for each prompt", low=1, high=2**16)
    per_device_generation_batch_size: int = flag(16, "prompts per rank and generation batch", low=1)
    generation_batches: int = flag(1, "generation batches per PPO step", low=1)
    per_device_training_batch_size: int = flag(16, "samples per rank and micro-batch of the update", low=1)
    ppo_epochs: int = flag(1, "passes over the samples of a step", low=1)
    old_logprobs: str = flag("auto", "log-probabilities at rollout", choices=("auto", "rollout", "recompute"))
    enable_hybrid_engine: bool = flag(False, "generate by our own decoder")
    inference_tp_size: int = flag(1, "ranks that share one copy of the actor while it generates", low=1)
    generation_slots: int = flag(
        0, "sequences that are generated at a time on a replica; 0: up to 128", low=0
    )
    tp_gather_partition_size: int = flag(8, "layers that are gathered at a time under ZeRO 3", low=1)
    unpin_actor_parameters: bool = flag(False, "under ZeRO 3 gather layer by layer in every pass")
    release_inference_cache: bool = flag(False, "free keys, values and buffers after generation")
    offload_states_for_generation: bool = flag(False, "move the optimizer state away while it generates")
    ema_decay: float = flag(0.0, "average the actor's weights; 0: no average", low=0, below=1)


@dataclass
class PlanArguments(
    ModelArguments, SingleModelArguments, PPOPlanArguments, PackingArguments, HardwareArguments
):
    """A plan: the flags of the steps that matter to it, under their names, and the machines."""

    json: bool = flag(False, "print the whole plan as one JSON object in the last line, too")


@dataclass(frozen=True)
class Hardware:
    """What is really reached: bytes and operations a second, after the efficiencies."""

    name: str
    num_gpus: int
    num_nodes: int
    memory_bytes: float
    reserved_bytes: float
    cpu_memory_bytes: float  # of a machine; 0: not known
    flops: float
    bandwidth: float
    intra: float
    inter: float
    host_link: float
    cpu_bandwidth: float  # a rank's share
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


def build_hardware(args: HardwareArguments, dtype: str) -> Hardware:
    """Return what the flags describe."""
    device = DEVICES[args.gpu]
    tflops = args.gpu_tflops or (device.tflops_fp32 if dtype == "fp32" else device.tflops_16bit)
    bandwidth = args.gpu_bandwidth_gb_s or device.bandwidth_gb_s
    link = 1e9 * args.link_efficiency
    return Hardware(
        name=args.gpu,
        num_gpus=args.num_gpus,
        num_nodes=args.num_nodes,
        memory_bytes=(args.gpu_memory_gib or device.memory_gib) * 2**30,
        reserved_bytes=(args.reserved_gib or device.reserved_gib) * 2**30,
        cpu_memory_bytes=args.cpu_memory_gib * 2**30,
        flops=tflops * 1e12 * args.matmul_efficiency,
        bandwidth=bandwidth * 1e9 * args.memory_efficiency,
        intra=(args.intra_node_gb_s or device.intra_node_gb_s) * link,
        inter=(args.inter_node_gb_s or device.inter_node_gb_s) * link,
        host_link=(args.host_link_gb_s or device.host_link_gb_s) * link,
        cpu_bandwidth=args.cpu_bandwidth_gb_s * 1e9 * args.memory_efficiency / args.num_gpus,
        intra_latency=args.intra_node_latency_us * 1e-6,
        inter_latency=args.inter_node_latency_us * 1e-6,
    )


def hardware_lines(args: HardwareArguments, hardware: Hardware) -> list[str]:
    """Say what is assumed of the machines, before and after the efficiencies."""
    reached = (hardware.flops / 1e12, hardware.bandwidth / 1e9, hardware.intra / 1e9, hardware.inter / 1e9)
    known = f"{args.cpu_memory_gib:g} GiB" if args.cpu_memory_gib else "not known, so not checked"
    return [
        "{:.4g} TFLOP/s of matrix products and {:.4g} GB/s of memory are reached: {:.0%} and {:.0%} of the "
        "data sheet".format(*reached[:2], args.matmul_efficiency, args.memory_efficiency),
        "{:.4g} GB/s come from ranks of the machine, {:.4g} from other machines, {:.4g} from the CPU: "
        "{:.0%}".format(*reached[2:], hardware.host_link / 1e9, args.link_efficiency),
        f"a collective takes {args.intra_node_latency_us:g} us for each doubling of ranks in a machine, "
        f"{args.inter_node_latency_us:g} us for each of machines",
        f"reserved of a device {hardware.reserved_bytes / 2**30:g} GiB; CPU memory {known}",
    ]


def read_models(args: PlanArguments, problems: Problems) -> Models:
    """Return the models by role, after adding what is wrong with their paths."""
    if args.stage in (1, 2):
        paths = {"model": ("--model_name_or_path", args.model_name_or_path, has_score_head(args))}
    else:
        reward = args.reward_model_name_or_path or args.critic_model_name_or_path
        paths = {"actor": ("--actor_model_name_or_path", args.actor_model_name_or_path, False)}
        if not args.no_critic:
            paths["critic"] = ("--critic_model_name_or_path", args.critic_model_name_or_path, True)
        if reward:
            paths["reward"] = ("--reward_model_name_or_path", reward, True)
    models: Models = {}
    read: dict[tuple[str, bool], ModelSizes] = {}
    for role, (name, path, is_value_model) in paths.items():
        if not path:
            cure = ", or --no_critic for an algorithm without one" if role == "critic" else ""
            problems.add(f"{name} is needed for --stage {args.stage}{cure}")
            continue
        if (path, is_value_model) not in read:
            config = known_config(path) or startup.check_model(name, path, args, problems)
            if config is None:
                continue
            text, multiple = config.get_text_config(), args.pad_vocab_multiple
            text.vocab_size = -(-text.vocab_size // multiple) * multiple
            startup.check_length(config, longest_row(args) // sequences_of_row(args), name, problems)
            more = {"is_value_model": is_value_model, "trust_remote_code": args.trust_remote_code}
            try:
                read[path, is_value_model] = ModelSizes(config, **more)
            except ValueError as error:
                problems.add(f"{name} {path}: {error}")
                continue
        models[role] = read[path, is_value_model]
    return models


def known_config(path: str) -> Any:
    """Return the configuration of a model whose shape model_shapes.json has, so that no hub is asked."""
    shape = {} if Path(path).exists() else json.loads(SHAPES.read_text()).get(path)
    return AutoConfig.for_model(**shape) if shape else None


def has_score_head(args: PlanArguments) -> bool:
    """Return whether the model of steps 1 and 2 is a reward model."""
    return args.stage == 2 and args.loss != "dpo"


def sequences_of_row(args: PlanArguments) -> int:
    """Return the sequences of a row: step 2 has pairs."""
    return 2 if args.stage == 2 else 1


def dtype_of(args: PlanArguments) -> str:
    """Return the name of the dtype: what the programs would choose on such a device."""
    return args.dtype or ("fp32" if args.gpu == "cpu" else "bf16")


def longest_row(args: PlanArguments) -> int:
    """Return the tokens of what stays together in a pass: a row, a pair, a prompt with its response."""
    if args.stage == 3:
        return args.max_prompt_seq_len + args.max_answer_seq_len
    return args.max_seq_len * sequences_of_row(args)


def role_prefixes(args: PlanArguments, models: Models) -> list[str]:
    """Return what the flags of each trained model begin with."""
    return [f"{name}_" for name in ("actor", "critic") if name in models] if args.stage == 3 else [""]


def find_problems(args: PlanArguments, models: Models) -> list[str]:
    """Return what is wrong with the flags; what a step would refuse is refused here too."""
    found = Problems()
    num_ranks, tp_size, longest = args.num_gpus * args.num_nodes, args.inference_tp_size, longest_row(args)
    cap = args.max_tokens_per_micro_batch
    text = f"--max_tokens_per_micro_batch {cap} holds no whole row; raise it to at least {longest}"
    found.check(cap == 0 or cap >= longest, text)
    for stage in [args.zero_stage] if args.stage < 3 else [args.actor_zero_stage, args.critic_zero_stage]:
        text = f"--offload {args.offload} needs ZeRO stage 3, not {stage}"
        found.check(args.offload != "param" or stage == 3, text)
        needs_states = args.offload in ("optimizer", "all") and dtype_of(args) != "bf16"
        text = f"--offload {args.offload} needs ZeRO stage 1, 2 or 3: under stage 0 no state can move"
        found.check(stage > 0 or not needs_states, text)
    if args.stage < 3:
        return found.messages
    samples = args.per_device_generation_batch_size * args.generation_batches * args.num_samples_per_prompt
    update = args.per_device_training_batch_size * args.gradient_accumulation_steps
    text = f"{samples} samples a rank are no multiple of those of an optimizer step, {update}: change one"
    found.check(samples % update == 0, text)
    tp = f"--inference_tp_size {tp_size}"
    sizes = models["actor"].tp_sizes
    text = f"{tp} does not fit the actor; use {', '.join(map(str, sizes))}"
    found.check(tp_size in sizes or sizes == [1], text)
    found.check(tp_size == 1 or args.enable_hybrid_engine, f"{tp} needs --enable_hybrid_engine")
    found.check(num_ranks % tp_size == 0, f"{tp} does not divide the number of ranks, {num_ranks}")
    is_cut = tp_size == 1 or not args.unpin_actor_parameters or args.actor_zero_stage < 3
    found.check(is_cut, f"{tp} and --unpin_actor_parameters exclude each other")
    text = f"--offload_states_for_generation and --offload {args.offload} exclude each other"
    found.check(not args.offload_states_for_generation or args.offload not in ("param", "all"), text)
    return found.messages


class Change(NamedTuple):
    """Flags to set, and what that costs."""

    flags: dict[str, Any]
    cost: str


def halvings(number: int, least: int = 1) -> list[int]:
    """Return the number halved again and again, down to `least`."""
    found = []
    while number % 2 == 0 and number // 2 >= least:
        number //= 2
        found.append(number)
    return found


def candidate_changes(args: PlanArguments, models: Models, num_slots: int) -> list[list[Change]]:
    """Return what may be changed, the cheapest first; each as its variants, the gentlest first."""
    is_ppo = args.stage == 3
    prefixes = role_prefixes(args, models)
    rows = f"per_device_train{'ing' if is_ppo else ''}_batch_size"
    accumulation = args.gradient_accumulation_steps
    found: list[list[Change]] = []
    if is_ppo and args.enable_hybrid_engine:
        found.append([Change({"release_inference_cache": True}, "the cache is made anew every time")])
    what = "a third more arithmetic in training"
    choices = [[prefix] for prefix in prefixes] + ([prefixes] if len(prefixes) > 1 else [])
    found.append([Change({f"{p}gradient_checkpointing": True for p in chosen}, what) for chosen in choices])
    if args.max_tokens_per_micro_batch:
        tokens = halvings(args.max_tokens_per_micro_batch, longest_row(args))
        found.append([Change({"max_tokens_per_micro_batch": n}, "more and smaller passes") for n in tokens])
    else:
        before = getattr(args, rows)
        found.append(
            [
                Change({rows: n, "gradient_accumulation_steps": accumulation * before // n}, "smaller passes")
                for n in halvings(before)
            ]
        )
    if is_ppo:
        found += _changes_of_generation(args, models, num_slots)
    stages = [stage for stage in (1, 2, 3) if stage > getattr(args, f"{prefixes[0]}zero_stage")]
    found.append([Change({f"{p}zero_stage": s for p in prefixes}, "more is sent") for s in stages])
    found.append([Change({"offload": what}, "Adam runs on the CPU: slow") for what in ("optimizer", "all")])
    if is_ppo:
        sizes = [n for n in models["actor"].tp_sizes if args.inference_tp_size < n <= args.num_gpus]
        more = {"enable_hybrid_engine": True}
        found.append([Change({"inference_tp_size": n} | more, "ranks generate together") for n in sizes])
    dims = {f"{prefix}lora_dim": 64 for prefix in prefixes}
    found.append([Change(dims, "trains adapters only: another result")])
    return [variants for variants in (_real_changes(args, v) for v in found) if variants]


def more_machines(args: PlanArguments) -> list[Change]:
    """Return larger numbers of GPUs: up to 8 in a machine, then more machines."""
    per_node = max(args.num_gpus, 8)
    nodes = [2**k for k in range(1, 11) if 2**k > args.num_nodes and 2**k * per_node <= MAX_RANKS]
    gpus = [Change({"num_gpus": n}, "more GPUs") for n in (2, 4, 8) if n > args.num_gpus]
    return gpus + [Change({"num_gpus": per_node, "num_nodes": n}, "more machines") for n in nodes]


def _changes_of_generation(args: PlanArguments, models: Models, num_slots: int) -> list[list[Change]]:
    if args.enable_hybrid_engine:
        slots = [Change({"generation_slots": n}, "fewer sequences at a time") for n in halvings(num_slots)]
    else:
        before, batches = args.per_device_generation_batch_size, args.generation_batches
        slots = [
            Change(
                {"per_device_generation_batch_size": n, "generation_batches": batches * before // n},
                "fewer sequences at a time",
            )
            for n in halvings(before)
        ]
    what = "its weights come from the CPU at every step"
    names = ([] if args.actor_lora_dim else ["reference"]) + [name for name in models if name == "reward"]
    return [slots, *([Change({f"offload_{name}_model": True}, what)] for name in names)]


def _real_changes(args: PlanArguments, variants: list[Change]) -> list[Change]:
    return [v for v in variants if any(getattr(args, name) != value for name, value in v.flags.items())]


def apply(args: PlanArguments, changes: Sequence[Change]) -> PlanArguments:
    """Return the flags with the changes made."""
    flags: dict[str, Any] = {}
    for change in changes:
        flags |= change.flags
    return replace(args, **flags)
