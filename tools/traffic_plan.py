"""How long each phase of a step takes at best, and what bounds it: arithmetic, memory, links.

A phase takes the longer of its operations over the operations a second and the bytes it reads over the
memory's bandwidth; then its links' time, or beside it where ZeRO 3 gathers as it computes; then Adam's. Bytes
from other ranks cross two kinds of links at once, those inside a machine and those between machines, and the
slower counts; a collective takes a latency for each doubling of its ranks besides.

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
from dataclasses import dataclass

from common.generation.kv_cache import kv_bytes_per_token
from tools.memory_plan import scored_tokens
from tools.planned_run import Role, Run

STATE_BYTES = 30  # a parameter's that Adam reads and writes: gradient, weight, moments, and weight in 16 bits
SHARES = {"matmul": 0.4, "memory": 0.6, "link": 0.7}  # that are reached of what is sold
CPU_BYTES_A_SECOND = 200e9  # of a machine's CPU memory, for an offloaded optimizer's step
INTRA_LATENCY, INTER_LATENCY = 6e-6, 12e-6  # seconds of a collective for each doubling of ranks, of machines


def ranks_per_machine(run: Run, size: int, stride: int = 1) -> int:
    """Return how many of a group of `size` ranks stand on one machine, each `stride` after the one before."""
    return max(min(run.args.num_gpus // stride, size), 1)


@dataclass
class Phase:
    """What a rank computes, reads, and receives over each kind of link, all times of a step together."""

    flops: float = 0.0
    memory_bytes: float = 0.0
    intra_bytes: float = 0.0
    inter_bytes: float = 0.0
    host_bytes: float = 0.0  # between the device and the CPU's memory
    adam_bytes: float = 0.0  # that the optimizer reads and writes
    is_adam_on_cpu: bool = False
    latency: float = 0.0  # seconds
    is_overlapped: bool = False  # links work beside the arithmetic

    def gather(self, run: Run, size: int, num_bytes: float, count: float, *, stride: int = 1) -> None:
        """Gather `num_bytes` from a group of `size` ranks, in `count` collectives. A reduce-scatter costs the
        same, an all-reduce is one of each.

        Hierarchical: each machine takes in what the others have once, and its ranks pass it on.
        """
        per_node = ranks_per_machine(run, size, stride)
        num_nodes = size / per_node
        inter = num_bytes * (num_nodes - 1) / num_nodes / per_node
        self.intra_bytes += num_bytes * (size - 1) / size - inter
        self.inter_bytes += inter
        self.latency += count * (math.log2(per_node) * INTRA_LATENCY + math.log2(num_nodes) * INTER_LATENCY)

    def seconds_by(self, run: Run) -> dict[str, float]:
        """Return the seconds of each resource, only those that the phase waits for."""
        device, link = run.device, 1e9 * SHARES["link"]
        tflops = device.tflops_fp32 if run.dtype == "fp32" else device.tflops_16bit
        arithmetic = self.flops / (tflops * 1e12 * SHARES["matmul"])
        memory_rate = device.bandwidth_gb_s * 1e9 * SHARES["memory"]
        reading = self.memory_bytes / memory_rate
        intra = self.intra_bytes / (device.intra_node_gb_s * link)
        inter = self.inter_bytes / ((run.args.inter_node_gb_s or device.inter_node_gb_s) * link)
        work = {"arithmetic": arithmetic} if arithmetic >= reading else {"memory": reading}
        links = {"links in a machine": intra} if intra >= inter else {"links between machines": inter}
        links["latency of links"] = self.latency
        if not self.is_overlapped:
            work |= links
        elif sum(links.values()) > sum(work.values()):
            work = links
        host = 0.0 if run.is_cpu else self.host_bytes / (device.host_link_gb_s * link)
        cpu_rate = CPU_BYTES_A_SECOND * SHARES["memory"] / run.args.num_gpus
        adam = self.adam_bytes / (cpu_rate if self.is_adam_on_cpu else memory_rate)
        return work | {"link to the CPU": host, "Adam": adam}


def plan_traffic(run: Run) -> dict[str, Phase]:
    """Return the phases of a run's step, a PPO step or an optimizer step of steps 1 and 2, in their order."""
    if not run.actor:
        return {"train": plan_update(run, run.roles[0])}
    prefill, generate = plan_generation(run)
    phases = {"switch": plan_switch(run), "prefill": prefill, "generate": generate}
    for role in run.roles:
        if role is not run.actor or is_recomputed(run):
            phases[f"score {role.name}"] = plan_scoring(run, role)
    num_updates = run.args.ppo_epochs * run.num_samples / run.sequences_per_update
    trained = [role for role in run.roles if role.is_trained]
    return phases | {f"train {role.name}": plan_update(run, role, num_updates) for role in trained}


def is_recomputed(run: Run) -> bool:
    """Whether the actor scores its own responses: `auto` does if 16-bit weights part sampler and trainer."""
    source = run.args.old_logprobs
    return source == "recompute" or (source == "auto" and run.dtype != "fp32")


def forward_flops(run: Run, role: Role, num_tokens: float, num_scored: float) -> float:
    """Return the operations of a pass over whole sequences of which some tokens reach the head."""
    matrices = 2.0 * (role.model.num_body * num_tokens + role.model.num_head * num_scored)
    return matrices + attention_flops(run, role, num_tokens)


def attention_flops(run: Run, role: Role, num_tokens: float) -> float:
    """Return those of scores and weighted values, each token over half of the others on average."""
    return 2.0 * role.model.attention_width * run.length * num_tokens * role.model.num_layers


def training_flops(run: Run, role: Role, num_tokens: float) -> float:
    """Return the operations of a forward and a backward pass."""
    model, counts, scored = role.model, role.counts, scored_tokens(run, num_tokens)
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


def gather_weights(run: Run, role: Role, phase: Phase, times: float) -> None:
    """Gather a ZeRO-3 model so many times; what lies on the CPU first comes from there."""
    small = role.model.num_small(role.zero.param_persistence_threshold)
    size = role.counts.num_params - small
    count = math.ceil(size / role.zero.prefetch_bucket_size)
    phase.gather(run, run.num_ranks, run.num_bytes * size * times, count * times)
    phase.host_bytes += run.num_bytes * size * times / run.num_ranks if role.params_on_cpu else 0.0


def plan_update(run: Run, role: Role, times: float = 1) -> Phase:
    """Return so many optimizer steps: their micro-batches, the exchange of gradients, Adam's own reading."""
    num_passes, trained = run.num_micro_batches * times, role.counts.num_trained
    flops = training_flops(run, role, run.sequences_per_update * run.length) * times
    phase = Phase(flops=flops, is_overlapped=role.is_sharded)
    gradients, buckets = run.num_bytes * trained, math.ceil(trained / role.zero.reduce_bucket_size)
    if role.is_sharded:
        window = role.zero.max_reuse_distance / (3 if role.is_checkpointed else 2)
        again = 1 - min(window / role.counts.num_params, 1.0)
        gather_weights(run, role, phase, num_passes * (1 + again))
        phase.gather(run, run.num_ranks, gradients * num_passes, buckets * num_passes)
    else:
        reductions = num_passes if role.zero.stage == 2 else times
        phase.gather(run, run.num_ranks, 2 * gradients * reductions, buckets * reductions)
        if role.zero.stage:
            phase.gather(run, run.num_ranks, gradients * times, times)
    shard = trained / (run.num_ranks if role.zero.stage else 1)
    phase.adam_bytes, phase.is_adam_on_cpu = STATE_BYTES * shard * times, role.states_on_cpu
    if role.states_on_cpu:
        phase.host_bytes += 2 * run.num_bytes * shard * times  # gradients there, weights back
    return phase


def plan_scoring(run: Run, role: Role) -> Phase:
    """Return a model's numbers for all responses of a rank."""
    num_tokens = run.num_samples * run.length
    flops = forward_flops(run, role, num_tokens, scored_tokens(run, num_tokens))
    phase = Phase(flops=flops, is_overlapped=role.is_sharded)
    if role.is_sharded:
        gather_weights(run, role, phase, math.ceil(num_tokens / run.tokens_per_pass))
    elif role.params_on_cpu:  # there and back
        phase.host_bytes = 2.0 * run.num_bytes * role.model.num_params
    return phase


def plan_switch(run: Run) -> Phase:
    """Return the entering of generate mode, once for each generation batch."""
    b, role, times = run.num_bytes, run.actor, run.args.generation_batches
    phase = Phase()
    if run.args.offload_states_for_generation:
        shard = role.counts.num_trained / (run.num_ranks if role.zero.stage else 1)
        phase.host_bytes = 2 * 12 * shard * times
    if run.gathers_by_layer:
        return phase
    sizes = run.switch_sizes()
    size = run.num_ranks // run.tp_size
    count = sum(len(shape) > 1 for shape in role.model.shapes.values())
    if sizes.from_gather_group:
        gathered = b * sizes.from_gather_group * size / (size - 1)
        phase.gather(run, size, gathered * times, count * times)
    local_share = (run.args.num_gpus - 1) / max(run.num_ranks - 1, 1)
    phase.intra_bytes += b * sizes.from_all * local_share * times
    phase.inter_bytes += b * sizes.from_all * (1 - local_share) * times
    phase.memory_bytes = 2.0 * b * sizes.new * times
    return phase


def plan_generation(run: Run) -> tuple[Phase, Phase]:
    """Return the reading of all prompts, and all token steps of a replica, every response at full length."""
    args, role, model, b, t = run.args, run.actor, run.actor.model, run.num_bytes, run.tp_size
    prompts = args.per_device_generation_batch_size * t
    rows, steps = run.num_slots, math.ceil(prompts * args.num_samples_per_prompt / run.num_slots)
    steps *= args.max_answer_seq_len * args.generation_batches
    prompt_flops = forward_flops(run, role, prompts * args.max_prompt_seq_len, prompts)
    prefill = Phase(prompt_flops / t * args.generation_batches, is_overlapped=run.gathers_by_layer)
    context = args.max_prompt_seq_len + args.max_answer_seq_len / 2  # the mean of a response
    size = model.num_body + model.num_head
    keys = rows * context * kv_bytes_per_token(model.config, b, t)
    attention = 4.0 * model.attention_width * context * model.num_layers
    token = Phase(
        flops=rows * (2.0 * size + attention) / t * steps,
        memory_bytes=(b * size / t + keys) * steps,
        is_overlapped=run.gathers_by_layer,
    )
    if run.gathers_by_layer:
        gather_weights(run, role, prefill, args.generation_batches)
        gather_weights(run, role, token, steps)
    stride, reductions = run.num_ranks // t, (2 * model.num_layers + 1) * steps
    token.gather(run, t, 2 * reductions * rows * model.hidden_size * b, reductions, stride=stride)
    token.gather(run, t, rows * model.vocabulary * b * steps, steps, stride=stride)  # logits
    return prefill, token
