"""How long each phase of a step takes at best, and what bounds it: arithmetic, memory, links.

A phase is a sum of pieces of work. A piece takes the longer of its operations over the operations a second
and the bytes it reads over the memory's bandwidth; bytes from other ranks cross two kinds of links at once,
those inside a machine and those between machines, and the slower counts.

# N ranks, t tensor-parallel size, M bytes of weights, P parameters, T tokens

    forward, backward, recomputed forward      2 P T, 4 P T (2 P T where weights are frozen), 2 P T
    causal attention, forward and backward     2 and 5 x width x length x T x layers
    all-gather or reduce-scatter of M          (N - 1) / N M received; all-reduce: twice that
    of which from other machines               (machines - 1) / machines M / ranks of a machine
    ZeRO 0, 1, 2                               all-reduce of gradients, by 2 in every micro-batch; by 1 and 2
                                               an all-gather of weights
    ZeRO 3, each micro-batch                   two all-gathers of weights, a reduce-scatter of gradients
    hybrid switch                              (N - t) / (N t) M and more, see generation/reshard_plan.py
    a token step                               reads M / t and the keys; 2 all-reduces a layer

ZeRO 1 and 2 of DeepSpeed 0.19 all-reduce (use_multi_rank_bucket_allreduce) where a reduce-scatter would do.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from common.generation.kv_cache import kv_bytes_per_token
from tools.memory_plan import scored_tokens
from tools.planned_run import (
    ARITHMETIC,
    CPU,
    HOST,
    INTER,
    INTRA,
    LATENCY,
    MEMORY,
    Hardware,
    Role,
    Run,
)

STATE_BYTES = 30  # a parameter's that Adam reads and writes: gradient, weight, moments, and weight in 16 bits


class RankGroup(NamedTuple):
    """Ranks that take part in a collective: `per_node` of them on each of `num_nodes` machines."""

    per_node: int
    num_nodes: float  # 1.5: one and a half

    @property
    def size(self) -> float:
        """All of them."""
        return self.per_node * self.num_nodes


def strided_group(hardware: Hardware, tp_size: int) -> RankGroup:
    """Return a tensor-parallel group of the hybrid engine: ranks at a stride of N/t, see step3_ppo."""
    stride = hardware.num_ranks // tp_size
    per_node = max(min(hardware.num_gpus // stride, tp_size), 1)
    return RankGroup(per_node, tp_size / per_node)


def neighbours(hardware: Hardware, size: int) -> RankGroup:
    """Return a group of `size` ranks with successive numbers."""
    per_node = min(hardware.num_gpus, size)
    return RankGroup(per_node, size / per_node)


@dataclass(frozen=True)
class Cost:
    """Seconds by what they are spent on, and bytes that a rank receives over each kind of link."""

    seconds: dict[str, float] = field(default_factory=dict)
    intra_bytes: float = 0.0
    inter_bytes: float = 0.0

    @property
    def total(self) -> float:
        """All seconds."""
        return sum(self.seconds.values())

    @property
    def bound(self) -> str:
        """What takes most of the time."""
        return max(self.seconds, key=self.seconds.__getitem__) if self.total else "nothing"

    def __add__(self, other: "Cost") -> "Cost":
        """One after the other."""
        resources = dict.fromkeys([*self.seconds, *other.seconds])
        seconds = {r: self.seconds.get(r, 0.0) + other.seconds.get(r, 0.0) for r in resources}
        return Cost(seconds, self.intra_bytes + other.intra_bytes, self.inter_bytes + other.inter_bytes)

    def __mul__(self, times: float) -> "Cost":
        """The same several times."""
        seconds = {r: s * times for r, s in self.seconds.items()}
        return Cost(seconds, self.intra_bytes * times, self.inter_bytes * times)

    def beside(self, other: "Cost") -> "Cost":
        """Both at once: the longer one's time."""
        longer = max(self, other, key=lambda cost: cost.total)
        return Cost(
            longer.seconds, self.intra_bytes + other.intra_bytes, self.inter_bytes + other.inter_bytes
        )


@dataclass(frozen=True)
class TrafficPlan:
    """The phases of a step in their order."""

    phases: dict[str, Cost]
    num_tokens: float  # of all ranks, sampled in step 3, trained on in steps 1 and 2

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(cost.total for cost in self.phases.values())

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks."""
        return self.num_tokens / self.seconds


def plan_traffic(run: Run) -> TrafficPlan:
    """Return the plan of a run's step: a PPO step, or an optimizer step of steps 1 and 2."""
    args = run.args
    if not run.actor:
        (role,) = run.roles
        tokens = run.sequences_per_update * run.length * run.num_ranks
        return TrafficPlan({"train": cost_of_update(run, role)}, tokens)
    samples = run.num_samples
    num_updates = args.ppo_epochs * samples / run.sequences_per_update
    phases = {
        "switch": cost_of_switch(run) * args.generation_batches,
        "generate": cost_of_generation(run) * args.generation_batches,
    }
    for role in run.roles:
        if role.name != "actor" or is_recomputed(run):
            phases[f"score {role.name}"] = cost_of_scoring(run, role)
    for role in run.roles:
        if role.is_trained:
            phases[f"train {role.name}"] = cost_of_update(run, role) * num_updates
    return TrafficPlan(phases, samples * args.max_answer_seq_len * run.num_ranks)


def is_recomputed(run: Run) -> bool:
    """Whether the actor scores its own responses: `auto` does if 16-bit weights part sampler and trainer."""
    source = run.args.old_logprobs
    return source == "recompute" or (source == "auto" and run.dtype != "fp32")


def spend(hardware: Hardware, resource: str, amount: float) -> Cost:
    """Return the cost of so many operations or bytes of one resource."""
    return Cost({resource: amount / hardware.rates[resource]})


def work(hardware: Hardware, flops: float, read_bytes: float = 0.0) -> Cost:
    """Return a computation's cost: the longer of its arithmetic and its reading."""
    costs = spend(hardware, ARITHMETIC, flops), spend(hardware, MEMORY, read_bytes)
    return max(costs, key=lambda cost: cost.total)


def transfer(hardware: Hardware, intra_bytes: float, inter_bytes: float) -> Cost:
    """Return the cost of bytes that come over both kinds of links at once."""
    costs = spend(hardware, INTRA, intra_bytes), spend(hardware, INTER, inter_bytes)
    return Cost(max(costs, key=lambda cost: cost.total).seconds, intra_bytes, inter_bytes)


def latency(hardware: Hardware, group: RankGroup, count: float) -> Cost:
    """Return what `count` collectives take however little they carry: each time the ranks double, once."""
    inside, between = math.log2(group.per_node), math.log2(group.num_nodes)
    return Cost({LATENCY: count * (inside * hardware.intra_latency + between * hardware.inter_latency)})


def all_gather(hardware: Hardware, group: RankGroup, num_bytes: float, count: float = 1) -> Cost:
    """Return the cost of gathering `num_bytes` in `count` collectives; a reduce-scatter costs the same.

    Hierarchical: each machine takes in what the others have once, its ranks share the work and pass it on.
    """
    if group.size == 1:
        return Cost()
    received = num_bytes * (group.size - 1) / group.size
    inter = num_bytes * (group.num_nodes - 1) / group.num_nodes / group.per_node
    return transfer(hardware, received - inter, inter) + latency(hardware, group, count)


def all_reduce(hardware: Hardware, group: RankGroup, num_bytes: float, count: float = 1) -> Cost:
    """Return the cost of a sum over ranks: a reduce-scatter and an all-gather."""
    return all_gather(hardware, group, num_bytes, count / 2) * 2


def host_transfer(hardware: Hardware, num_bytes: float) -> Cost:
    """Return the cost of bytes between a device and the CPU's memory."""
    return Cost() if hardware.is_cpu else spend(hardware, HOST, num_bytes)


def forward_flops(run: Run, role: Role, num_tokens: float, num_scored: float) -> float:
    """Return the operations of a pass over whole sequences of which some tokens reach the head."""
    model = role.model
    matrices = 2.0 * (model.num_body * num_tokens + model.num_head * num_scored)
    return matrices + attention_flops(run, role, num_tokens)


def attention_flops(run: Run, role: Role, num_tokens: float) -> float:
    """Return those of scores and weighted values, each token over half of the others on average."""
    model = role.model
    return 2.0 * model.num_heads * model.head_dim * run.length * num_tokens * model.num_layers


def training_flops(run: Run, role: Role, num_tokens: float) -> float:
    """Return the operations of a forward and a backward pass."""
    model, scored = role.model, scored_tokens(run, num_tokens)
    counts = model.counts(role.lora)
    is_frozen = role.lora.dim and role.lora.only_optimize_lora
    trained_body = 0 if is_frozen else model.num_body - counts.num_adapted
    body = (4 * model.num_body + 2 * trained_body + 6 * counts.num_adapter) * num_tokens
    attention = attention_flops(run, role, num_tokens)
    if role.is_checkpointed:
        body += 2 * model.num_body * num_tokens
        attention *= 4.5 / 3.5
    # The head's logits are made again in the backward pass of step 3, see common/models/output_head.py.
    head = (8 if run.actor else 6) * model.num_head * scored
    return body + 3.5 * attention + head


def gathered_bytes(run: Run, role: Role) -> float:
    """Return the bytes of the weights that ZeRO 3 shards."""
    small = role.model.num_small(role.zero.param_persistence_threshold)
    return run.num_bytes * (role.model.counts(role.lora).num_params - small)


def gather_weights(run: Run, role: Role, *, share: float = 1.0) -> Cost:
    """Return the cost of gathering a ZeRO-3 model once; what lies on the CPU first comes from there."""
    num_bytes = gathered_bytes(run, role) * share
    count = math.ceil(num_bytes / run.num_bytes / role.zero.prefetch_bucket_size)
    cost = all_gather(run.hardware, neighbours(run.hardware, run.num_ranks), num_bytes, count)
    if role.params_on_cpu:
        cost += host_transfer(run.hardware, num_bytes / run.num_ranks)
    return cost


def cost_of_update(run: Run, role: Role) -> Cost:
    """Return the cost of one optimizer step: its micro-batches, the exchange of gradients, the states."""
    b, hardware = run.num_bytes, run.hardware
    num_tokens = run.sequences_per_update * run.length / run.num_micro_batches
    compute = work(hardware, training_flops(run, role, num_tokens))
    counts = role.model.counts(role.lora)
    world = neighbours(hardware, run.num_ranks)
    gradients = float(b * counts.num_trained)
    buckets = math.ceil(counts.num_trained / role.zero.reduce_bucket_size)
    if role.is_sharded:  # gathered and reduced beside the arithmetic
        window = role.zero.max_reuse_distance / (3 if role.is_checkpointed else 2)
        again = 1 - min(window / counts.num_params, 1.0)
        links = gather_weights(run, role) + all_gather(hardware, world, gradients, buckets)
        links += gather_weights(run, role, share=again)
        cost = compute.beside(links) * run.num_micro_batches
    else:
        reductions = run.num_micro_batches if role.zero.stage == 2 else 1
        cost = compute * run.num_micro_batches
        cost += all_reduce(hardware, world, gradients, buckets) * reductions
        if role.zero.stage:
            cost += all_gather(hardware, world, gradients, buckets)
    return cost + cost_of_states(run, role)


def cost_of_states(run: Run, role: Role) -> Cost:
    """Return the cost of Adam's own arithmetic: reading and writing a rank's states."""
    shard = role.num_trained / (run.num_ranks if role.zero.stage else 1)
    if not role.states_on_cpu:
        return work(run.hardware, 0.0, STATE_BYTES * shard)
    away = spend(run.hardware, CPU, STATE_BYTES * shard)
    return away + host_transfer(run.hardware, 2 * run.num_bytes * shard)  # gradients there, weights back


def cost_of_scoring(run: Run, role: Role) -> Cost:
    """Return the cost of a model's numbers for all responses of a rank."""
    num_tokens = run.num_samples * run.length
    passes = math.ceil(num_tokens / run.tokens_per_pass)
    flops = forward_flops(run, role, num_tokens, scored_tokens(run, num_tokens))
    compute = work(run.hardware, flops)
    if role.is_sharded:
        return compute.beside(gather_weights(run, role) * passes)
    there_and_back = 2.0 * run.num_bytes * role.model.num_params
    return compute + host_transfer(run.hardware, there_and_back if role.params_on_cpu else 0.0)


def cost_of_switch(run: Run) -> Cost:
    """Return the cost of entering generate mode once."""
    b, hardware, role = run.num_bytes, run.hardware, run.actor
    cost = Cost()
    if run.args.offload_states_for_generation:
        shard = role.num_trained / (run.num_ranks if role.zero.stage else 1)
        cost += host_transfer(hardware, 2 * 12 * shard)
    if run.gathers_by_layer:
        return cost
    sizes, num_ranks = run.switch_sizes(), run.num_ranks
    from_all = sizes.from_all * b
    local_share = (hardware.num_gpus - 1) / max(num_ranks - 1, 1)
    group = neighbours(hardware, num_ranks // run.tp_size)
    received = sizes.from_gather_group * b
    inter = received * group.size / max(group.size - 1, 1) * (group.num_nodes - 1) / group.num_nodes
    inter /= group.per_node
    cost += transfer(
        hardware, received - inter + from_all * local_share, inter + from_all * (1 - local_share)
    )
    if received or from_all:
        count = sum(len(shape) > 1 for shape in role.model.shapes.values())
        cost += latency(hardware, neighbours(hardware, num_ranks), count)
    return cost + work(hardware, 0.0, 2.0 * b * sizes.new)


def cost_of_generation(run: Run) -> Cost:
    """Return the cost of a generation batch on a replica, every response at its full length."""
    args, hardware, role, t = run.args, run.hardware, run.actor, run.tp_size
    prompts = args.per_device_generation_batch_size * t
    rounds = math.ceil(prompts * args.num_samples_per_prompt / run.num_slots)
    prompt_tokens = prompts * args.max_prompt_seq_len
    prefill = work(hardware, forward_flops(run, role, prompt_tokens, prompts) / t)
    step = cost_of_token_step(run, role)
    if run.gathers_by_layer:
        gathered = gather_weights(run, role)
        return prefill.beside(gathered) + step.beside(gathered) * (rounds * args.max_answer_seq_len)
    return prefill + step * (rounds * args.max_answer_seq_len)


def cost_of_token_step(run: Run, role: Role) -> Cost:
    """Return the cost of one token for each slot, at the mean length of a response."""
    args, hardware, model, b, t = run.args, run.hardware, role.model, run.num_bytes, run.tp_size
    rows, context = run.num_slots, args.max_prompt_seq_len + args.max_answer_seq_len / 2
    keys = rows * context * kv_bytes_per_token(model.config, b, t)
    weights = b * (model.num_body + model.num_head) / t
    attention = 4.0 * model.num_heads * model.head_dim * context * model.num_layers
    flops = rows * (2.0 * (model.num_body + model.num_head) + attention) / t
    group = strided_group(hardware, t)
    reductions = 2 * model.num_layers + 1
    sums = all_reduce(hardware, group, reductions * rows * model.hidden_size * b, reductions)
    logits = all_gather(hardware, group, float(rows * model.vocabulary * b))
    return work(hardware, flops, weights + keys) + sums + logits
