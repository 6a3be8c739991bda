"""Estimated seconds of each phase of a step, from computation, memory reads, launches and communication.

    score, train   the longest of computation (matrix products; bytes that other operations and the optimizer
                   read and write), launches by the host, and gathers: they overlap, but not on a CPU
    switch         gathers, and copies of states kept on the CPU
    generate       prompts: as score. A token step: reads of weights, keys and values, kernel launches,
                   all-reduces of a replica's ranks; nothing overlaps
    gathers        the longer of both links' transfers, and the hops of a ring for each matrix

Left out: the reference's pass before DPO and KTO, advantages, the exchange of rows, rewards that are not
models, waits for other ranks. Rows have their mean lengths, by default full ones.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from common.generation.kv_cache import kv_bytes_per_token
from common.models.model_flops import ModelFlops
from tools.machines import Machines
from tools.memory_plan import count_stepped, held_in_states
from tools.planned_model import PlannedModel
from tools.planned_run import Role, Run
from tools.step_flags import MEAN_LENGTHS
from tools.traced_layers import Moved, trace_activations
from tools.traffic_plan import Phase, gathers_of_pass, plan_traffic, scoring_passes, token_steps

# How good the seconds are: tests/unit/published_runs.json, which a test compares with this text.
ACCURACY = (
    "14 of 19 published training and decoding speeds are within 0.75 to 1.33 of it; "
    "PPO by other programs took 1.3 to 3.3 times as long"
)
# Operations outside the layers of a token step, and of an optimizer step (docs/performance.md).
TOKEN_STEP_LAUNCHES = 91
STEP_LAUNCHES = 113
CACHE_LAUNCHES = 2  # writes of a layer's keys and values
# Measured on a CPU whose operations take 6 microseconds: DeepSpeed's hook on a weight's gradient takes 30,
# gathering and releasing a matrix under ZeRO 3 takes 150. One more operation makes the gradient.
GRADIENT_LAUNCHES = 6
GATHER_LAUNCHES = 25
# torch's attention over packed rows takes the host 341 microseconds with its backward pass, of 16 for other
# operations (docs/performance.md).
ATTENTION_LAUNCHES = 20
# Weights that torch's fused AdamW steps per second on all CPUs of a GPU machine: assumed, twice what two
# cores of an AMD EPYC reach, 1.9e9, at 28 bytes each.
CPU_ADAM_RATE = 3.8e9
# On a CPU, by profiles of the demo: layers start an operation half as fast as the tiny model that is
# measured, which stays in the caches; attention is called for each packed row, 80 microseconds, 160 with its
# backward pass; in token steps oneDNN takes 30 microseconds more for a product.
COLD_LAUNCHES = 2
SEQUENCE_LAUNCHES = 12
PRODUCT_LAUNCHES = 4
ADAPTER_LAUNCHES = 5  # PEFT's operations around an adapted matrix, each time


@dataclass
class PhaseTime:
    """Seconds of a phase by cause."""

    arithmetic: float = 0.0
    memory: float = 0.0
    kernels: float = 0.0
    links: float = 0.0
    hops: float = 0.0
    host: float = 0.0
    cpu_adam: float = 0.0  # on a GPU machine's CPU; nothing overlaps it
    is_overlapped: bool = False  # computation, launches and communication overlap

    @property
    def causes(self) -> dict[str, float]:
        """The seconds by cause."""
        return {name: value for name, value in vars(self).items() if name != "is_overlapped"}

    @property
    def _groups(self) -> list[dict[str, float]]:
        """The causes, those that do not overlap together."""
        if not self.is_overlapped:
            return [self.causes]
        groups = (("arithmetic", "memory"), ("kernels",), ("links", "hops", "host"))
        return [{name: self.causes[name] for name in (*names, "cpu_adam")} for names in groups]

    @property
    def seconds(self) -> float:
        """Seconds of the whole phase."""
        return max(sum(group.values()) for group in self._groups)

    @property
    def bound(self) -> str:
        """The longest cause, of those that take longest together."""
        group = max(self._groups, key=lambda group: sum(group.values()))
        return max(group, key=group.__getitem__)


def at_mean_lengths(run: Run) -> Run:
    """The run with rows of the mean lengths that its flags give; itself without any."""
    given = {limit: getattr(run.args, name) for name, limit in MEAN_LENGTHS.items()}
    means: dict[str, Any] = {limit: mean for limit, mean in given.items() if mean}
    if not means:
        return run
    if run.args.packed:  # passes of as many tokens
        means["max_tokens_per_micro_batch"] = run.tokens_per_pass
    shorter = Run(replace(run.args, **means), [role.spec for role in run.roles], run.models)
    shorter.longest_answer = run.longest_answer
    return shorter


def describe_lengths(run: Run) -> str:
    """The lengths of the rows that the seconds are of."""
    args = at_mean_lengths(run).args
    if run.actor:
        return (
            f"prompts of {args.max_prompt_seq_len:.4g} and responses of {args.max_answer_seq_len:.4g} tokens"
        )
    return f"sequences of {args.max_seq_len:.4g} tokens"


def plan_times(run: Run, machines: Machines) -> dict[str, PhaseTime]:
    """The phases of `plan_traffic` with their seconds, of rows of mean lengths."""
    run = at_mean_lengths(run)
    times = {}
    for name, phase in plan_traffic(run).items():
        verb, _, role_name = name.partition(" ")
        time = PhaseTime(is_overlapped=verb in ("score", "train") and not machines.is_cpu)
        ideal_seconds = max(phase.intra_bytes / machines.near, phase.inter_bytes / machines.far)
        time.links = ideal_seconds / machines.link_share
        time.host = phase.host_bytes / (machines.host * machines.link_share)
        if name == "switch":
            time.hops = _switch_hops(run, phase, machines)
        elif name == "generate":
            _add_generation(run, time, machines)
        else:
            role = next((role for role in run.roles if role.name == role_name), run.roles[0])
            is_training = verb == "train"
            time.arithmetic = _pass_arithmetic(run, role, machines, is_training=is_training)
            time.memory = _pass_bytes(run, role, is_training=is_training) / _achieved_memory(machines)
            time.kernels = _pass_launches(run, role, is_training=is_training) * machines.launch_seconds
            time.hops = _gather_hops(run, role, machines, is_training=is_training)
            time.cpu_adam = _cpu_adam_seconds(run, role) if is_training else 0.0
        times[name] = time
    return times


def _achieved_memory(machines: Machines) -> float:
    return machines.memory * machines.memory_share


@cache
def flops_of(model: PlannedModel) -> ModelFlops:
    """FLOPs of the passes of a planned model."""
    return ModelFlops(model.module, model.head)


def count_passed(run: Run) -> tuple[int, float, float]:
    """Sequences of a rank's scoring in a step, or of its training in an epoch; their computed tokens, where a
    group's prompt counts once; their scored tokens.
    """
    if run.actor:
        scored = run.num_samples * run.args.max_answer_seq_len
        return run.num_samples, run.count_tokens(run.num_samples), scored
    num_tokens = run.sequences_per_update * run.length
    return run.sequences_per_update, num_tokens, num_tokens


def num_updates(run: Run) -> float:
    """Optimizer steps of a role in a step."""
    return run.args.ppo_epochs * run.num_samples / run.sequences_per_update if run.actor else 1


def num_epochs(run: Run, *, is_training: bool) -> int:
    """Passes over the samples of a step."""
    return run.args.ppo_epochs if run.actor and is_training else 1


def times_through(role: Role, *, is_training: bool) -> int:
    """Times that a pass goes through the layers: forward, recomputed, backward."""
    return 1 + is_training + (is_training and role.is_checkpointed)


def _pass_arithmetic(run: Run, role: Role, machines: Machines, *, is_training: bool) -> float:
    """Seconds of a rank's products in a step's scoring, or in its training over all epochs.

    Attention kernels compute only the pairs of a token and an earlier one.
    """
    flops = flops_of(role.model)
    rows, num_tokens, num_scored = count_passed(run)
    pairs = rows * run.length**2 / 2
    of_attention = flops.of_pass(0, pairs, 0, is_training=is_training)
    of_matrices = flops.of_pass(num_tokens, 0, num_scored, is_training=is_training)
    if times_through(role, is_training=is_training) == 3:
        of_attention += flops.of_pass(0, pairs, 0, is_training=False)
        of_matrices += flops.of_pass(num_tokens, 0, 0, is_training=False)
    return num_epochs(run, is_training=is_training) * _product_seconds(of_matrices, of_attention, machines)


def _product_seconds(of_matrices: float, of_attention: float, machines: Machines) -> float:
    """Seconds of this many FLOPs."""
    seconds = of_matrices / machines.arithmetic_share + of_attention / machines.attention_share
    return seconds / machines.flops


def _pass_bytes(run: Run, role: Role, *, is_training: bool) -> float:
    """Bytes that a rank reads and writes in a step's scoring or training, besides those of products: between
    the products of layers and heads, of adapters, and of gradients and optimizer states.
    """
    model = role.model
    b = run.num_bytes
    _, num_tokens, num_scored = count_passed(run)
    turns = times_through(role, is_training=is_training)
    of_token = _layer(run, role, is_training=is_training).num_bytes * model.num_layers
    of_token /= math.ceil(run.length)
    if has_lora(role):
        # A product is scaled and added: five times the width of what its matrix reads or makes.
        of_token += turns * 5 * b * model.num_trained / role.spec.flags.lora_dim
    # A logit is written, and read to be normalised in fp32.
    of_logits = (1 + is_training) * num_scored * model.head.weight.shape[0] * (b + 8)
    num_bytes = num_epochs(run, is_training=is_training) * (num_tokens * of_token + of_logits)
    if not is_training:
        return num_bytes
    # Each pass writes gradients, then copies or adds them to those of earlier passes.
    of_gradients = 3 * b * model.num_trained * run.num_micro_batches
    return num_bytes + num_updates(run) * (of_gradients + _optimizer_bytes(run, role))


def _layer(run: Run, role: Role, *, is_training: bool) -> Moved:
    """What a layer moves in a pass, recomputed or not."""
    traced = trace_activations(role.model, run.args.dtype, math.ceil(run.length))
    if not is_training:
        return traced.forward
    if not role.is_checkpointed:
        return traced.training
    return Moved(*map(sum, zip(traced.training, traced.forward, strict=True)))


def has_lora(role: Role) -> bool:
    """Whether only adapters are trained."""
    return bool(role.spec.flags.lora_dim) and role.model.num_trained < role.model.num_params


def _cpu_adam_seconds(run: Run, role: Role) -> float:
    """Seconds of the optimizer steps on the CPU of a GPU machine, which its ranks share."""
    if run.is_cpu or not role.steps_on_cpu:
        return 0.0
    return num_updates(run) * run.args.num_gpus * count_stepped(run, role) / CPU_ADAM_RATE


def _optimizer_bytes(run: Run, role: Role) -> float:
    """Bytes of an optimizer step of a rank: states read and written, gradients read for their norm and for
    the step, weights written. None on a GPU machine's CPU.
    """
    if role.steps_on_cpu and not run.is_cpu:
        return 0.0
    return 2 * held_in_states(run, role) + 3 * run.num_bytes * count_stepped(run, role)


def _pass_launches(run: Run, role: Role, *, is_training: bool) -> float:
    """Operations that the host starts in a step's scoring or training."""
    num_gradients = role.model.num_trained_tensors
    of_turn = GATHER_LAUNCHES * count_matrices(role) * role.is_sharded
    of_turn += ADAPTER_LAUNCHES * num_gradients / 2 * has_lora(role)
    of_pass = role.model.num_layers * _layer(run, role, is_training=is_training).launches
    of_pass *= COLD_LAUNCHES if run.is_cpu else 1
    of_row = (1 + is_training) * role.model.num_layers * SEQUENCE_LAUNCHES * run.is_cpu
    of_rows = of_row * count_passed(run)[0] * num_epochs(run, is_training=is_training)
    of_pass += times_through(role, is_training=is_training) * of_turn
    if not is_training:
        return of_rows + of_pass * scoring_passes(run)
    of_pass += role.model.num_layers * ATTENTION_LAUNCHES * (not run.is_cpu)
    of_pass += num_gradients * GRADIENT_LAUNCHES
    return of_rows + num_updates(run) * (run.num_micro_batches * of_pass + STEP_LAUNCHES)


def ring_seconds(run: Run, size: int, machines: Machines, stride: int = 1) -> float:
    """Seconds of the hops of a gather by `size` ranks, `stride` ranks apart."""
    if size == 1:
        return 0.0
    num_nodes = size // max(min(run.args.num_gpus // stride, size), 1)
    start, near, far = machines.ring
    return start + (size - num_nodes) * near + (num_nodes - 1) * far


def tree_seconds(run: Run, size: int, machines: Machines, stride: int = 1) -> float:
    """Seconds of the hops of a small all-reduce, up and down a tree with a chain in each machine."""
    if size == 1:
        return 0.0
    per_node = max(min(run.args.num_gpus // stride, size), 1)
    start, near, far = machines.tree
    return start + 2 * ((per_node - 1) * near + math.log2(size // per_node) * far)


def count_matrices(role: Role) -> int:
    """Number of weights that ZeRO 3 gathers: those too large to stay whole."""
    threshold = role.zero.param_persistence_threshold
    return sum(size > threshold for size in role.model.sizes)


def _gather_hops(run: Run, role: Role, machines: Machines, *, is_training: bool) -> float:
    ring = ring_seconds(run, run.num_ranks, machines)
    num_buckets = math.ceil(role.model.num_trained / max(role.zero.reduce_bucket_size, 1))
    updates = num_updates(run)
    passes = run.num_micro_batches * updates
    if not is_training:
        return ring * count_matrices(role) * scoring_passes(run) if role.is_sharded else 0.0
    if role.is_sharded:
        return ring * passes * (count_matrices(role) * gathers_of_pass(role) + num_buckets)
    return ring * num_buckets * 2 * (passes if role.zero.stage == 2 else updates)


def _switch_hops(run: Run, phase: Phase, machines: Machines) -> float:
    if not phase.intra_bytes + phase.inter_bytes:
        return 0.0
    size, t = run.num_ranks, run.tp_size
    exchanges = math.ceil(run.actor.model.num_layers / run.args.tp_gather_partition_size) + 1
    hops = exchanges * ring_seconds(run, size, machines) if t > 1 else 0.0
    if t == 1 or not run.has_contiguous_groups:
        hops += count_matrices(run.actor) * ring_seconds(run, size // t, machines)
    return hops


def _add_generation(run: Run, time: PhaseTime, machines: Machines) -> None:
    args = run.args
    model = run.actor.model
    t = run.tp_size
    flops = flops_of(model)
    num_prompts = args.per_device_generation_batch_size * t
    num_samples = num_prompts * args.num_samples_per_prompt
    prompt = args.max_prompt_seq_len
    answer = args.max_answer_seq_len
    batches = args.batches_per_step
    # Kernels compute only the pairs of a prompt's token and an earlier one.
    pairs = num_prompts * prompt**2
    of_matrices = flops.of_pass(num_prompts * prompt, 0, num_prompts, is_training=False)
    of_attention = flops.of_pass(0, pairs, 0, is_training=False)
    time.arithmetic = batches / t * _product_seconds(of_matrices, of_attention / 2, machines)
    traced = trace_activations(model, args.dtype, math.ceil(run.length))
    of_prompts = num_prompts * prompt / math.ceil(run.length) * model.num_layers * traced.forward.num_bytes
    steps = batches * token_steps(run)
    num_sampled = batches * num_samples * (answer - 1)  # after the first of a response
    lengths = torch.full((num_prompts,), prompt), torch.full((num_samples,), answer)
    decoding = flops.of_generation(*lengths, args.num_samples_per_prompt) - of_matrices - of_attention
    weights = (flops.body + flops.head) * run.num_bytes / t
    keys = num_sampled * (prompt + answer / 2) * kv_bytes_per_token(model.plain.config, run.num_bytes, t)
    read_seconds = (steps * weights + keys) / machines.reads
    decode_seconds = batches / t * _product_seconds(decoding, 0, machines)
    time.memory = batches * of_prompts / t / _achieved_memory(machines)
    overlap = sum if machines.is_cpu else max
    time.memory += overlap((read_seconds, decode_seconds))
    if replays_graphs(run):
        time.kernels = steps * model.num_layers * machines.layer_seconds
    else:
        of_step = model.num_layers * (traced.forward.launches + CACHE_LAUNCHES) + TOKEN_STEP_LAUNCHES
        if run.is_cpu:
            of_step = COLD_LAUNCHES * of_step + PRODUCT_LAUNCHES * len(model.linear_names)
        time.kernels = steps * of_step * machines.launch_seconds
    stride = 1 if run.has_contiguous_groups else run.num_ranks // t
    time.hops = steps * (2 * model.num_layers + 2) * tree_seconds(run, t, machines, stride)


def replays_graphs(run: Run) -> bool:
    """Whether token steps are CUDA graphs."""
    args = run.args
    return args.enable_hybrid_engine and not (run.is_cpu or run.gathers_by_layer or args.no_cuda_graphs)


def step_seconds(times: Iterable[PhaseTime]) -> float:
    """Seconds of all phases, one after the other."""
    return sum(time.seconds for time in times)


def hours_of_run(run: Run, step: float) -> float:
    """Hours of all steps of --num_rows rows, or of --max_train_steps; 0 if neither is known."""
    args = run.args
    if run.actor:
        rows_of_step = args.per_device_generation_batch_size * args.batches_per_step
    else:
        rows_of_step = args.per_device_train_batch_size * args.gradient_accumulation_steps
    steps = args.num_train_epochs * args.num_rows / (rows_of_step * run.num_ranks)
    if args.max_train_steps:
        steps = min(steps or math.inf, args.max_train_steps)
    return steps * step / 3600
