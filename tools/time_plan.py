"""Estimated seconds of each phase of a step on GPU machines, from computation, memory reads and
communication. Not measured.

    score, train   the longer of arithmetic and gathers, which overlap
    switch         gathers, and copies of states kept on the CPU
    generate       prompts: arithmetic. A token step: reads of weights, keys and values, kernel launches,
                   all-reduces of a replica's ranks; nothing overlaps
    gathers        the longer of both links' transfers, and the hops of a ring for each matrix

Left out: the optimizer's step, advantages, the exchange of rows, rewards that are not models, waits for
other ranks. Every response has full length, as in the other plans.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from common.generation.kv_cache import kv_bytes_per_token
from common.models.model_flops import ModelFlops
from common.ranks.devices import DEVICES
from tools.planned_run import PlannedModel, Role, Run
from tools.traffic_plan import Phase, gathers_of_pass, plan_traffic, scoring_passes


class Machines(NamedTuple):
    """GPUs and their links: rates in FLOPs or bytes per second, one way; latencies in seconds."""

    flops: float
    memory: float
    near: float  # to a GPU in the same machine
    far: float  # to another machine, per GPU
    host: float  # to the CPU's memory
    arithmetic_share: float  # share of `flops` that passes reach
    memory_share: float  # share of `memory` that a token step reaches
    link_share: float  # share of `near`, `far`, `host` that collectives and copies reach
    layer_seconds: float  # per layer of a token step, besides memory reads
    ring: tuple[float, float, float]  # latencies of a gather: start, hop in a machine, hop between
    tree: tuple[float, float, float]  # latencies of a small all-reduce, in the same order


# flops, memory, near: NVIDIA's data sheet of the H100 SXM. far: 400 Gbit/s of InfiniBand per GPU, as in
# a DGX H100. host: PCIe 5.0 x16. ring, tree: the latencies of NCCL's own model (src/graph/tuning.cc, LL128).
# arithmetic_share: torchtitan's Llama-3.1-8B on 8 H100 reaches about 0.39, nanochat 0.40 to 0.46.
# layer_seconds: DeepSpeed's 2.8 ms for a token step of OPT-1.3B by CUDA graph on an H100 (its pull request
# 8271), minus memory reads, per layer (of 24). memory_share, link_share: assumed.
H100 = Machines(
    flops=1e12 * DEVICES["h100-80g"].tflops_16bit,
    memory=3.35e12,
    near=450e9,
    far=50e9,
    host=64e9,
    arithmetic_share=0.4,
    memory_share=0.8,
    link_share=0.8,
    layer_seconds=75e-6,
    ring=(14e-6, 1.9e-6, 4.0e-6),
    tree=(14e-6, 1.25e-6, 8.5e-6),
)


@dataclass
class PhaseTime:
    """Seconds of a phase by cause."""

    arithmetic: float = 0.0
    memory: float = 0.0
    kernels: float = 0.0
    links: float = 0.0
    hops: float = 0.0
    host: float = 0.0
    is_overlapped: bool = False  # communication overlaps arithmetic

    @property
    def causes(self) -> dict[str, float]:
        """The seconds by cause."""
        return {name: value for name, value in vars(self).items() if name != "is_overlapped"}

    @property
    def seconds(self) -> float:
        """Seconds of the whole phase."""
        total = sum(self.causes.values())
        return max(self.arithmetic, total - self.arithmetic) if self.is_overlapped else total

    @property
    def bound(self) -> str:
        """The longest cause; a cause of communication if that exceeds the arithmetic that it overlaps."""
        causes = self.causes
        if self.is_overlapped and self.arithmetic < self.seconds:
            del causes["arithmetic"]
        return max(causes, key=causes.__getitem__)


def plan_times(run: Run, machines: Machines = H100) -> dict[str, PhaseTime]:
    """The phases of `plan_traffic` with their seconds."""
    times = {}
    for name, phase in plan_traffic(run).items():
        verb, _, role_name = name.partition(" ")
        time = PhaseTime(is_overlapped=verb in ("score", "train"))
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
            time.arithmetic = _pass_flops(run, role, is_training=is_training) / _achieved_flops(machines)
            time.hops = _gather_hops(run, role, machines, is_training=is_training)
        times[name] = time
    return times


def _achieved_flops(machines: Machines) -> float:
    return machines.flops * machines.arithmetic_share


@cache
def flops_of(model: PlannedModel) -> ModelFlops:
    """FLOPs of the passes of a planned model."""
    return ModelFlops(model.module, model.head)


def _pass_flops(run: Run, role: Role, *, is_training: bool) -> float:
    """FLOPs of a rank in a step's scoring, or in its training over all epochs."""
    args = run.args
    flops = flops_of(role.model)
    rows = run.num_samples if run.actor else run.sequences_per_update
    num_tokens = rows * run.length
    num_pairs = rows * run.length**2
    num_scored = rows * args.max_answer_seq_len if run.actor else num_tokens
    if not is_training:
        return flops.of_pass(num_tokens, num_pairs, num_scored, is_training=False)
    num_flops = flops.of_pass(num_tokens, num_pairs, num_scored, is_training=True)
    if role.is_checkpointed:
        num_flops += flops.of_pass(num_tokens, num_pairs, 0, is_training=False)
    return num_flops * (args.ppo_epochs if run.actor else 1)


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
    return sum(p.numel() > threshold for p in role.model.module.parameters())


def _gather_hops(run: Run, role: Role, machines: Machines, *, is_training: bool) -> float:
    ring = ring_seconds(run, run.num_ranks, machines)
    num_buckets = math.ceil(role.model.num_trained / max(role.zero.reduce_bucket_size, 1))
    num_updates = run.args.ppo_epochs * run.num_samples / run.sequences_per_update if run.actor else 1
    passes = run.num_micro_batches * num_updates
    if not is_training:
        return ring * count_matrices(role) * scoring_passes(run) if role.is_sharded else 0.0
    if role.is_sharded:
        return ring * passes * (count_matrices(role) * gathers_of_pass(role) + num_buckets)
    return ring * num_buckets * 2 * (passes if role.zero.stage == 2 else num_updates)


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
    prefill_flops = flops.of_pass(
        num_prompts * prompt, num_prompts * prompt**2, num_prompts, is_training=False
    )
    time.arithmetic = batches * prefill_flops / t / _achieved_flops(machines)
    slots = min(run.num_slots, num_samples)
    steps = batches * math.ceil(num_samples / slots) * (answer - 1)
    lengths = torch.full((num_prompts,), prompt), torch.full((num_samples,), answer)
    decoding = flops.of_generation(*lengths, args.num_samples_per_prompt) - prefill_flops
    weights = (flops.body + flops.head) * run.num_bytes / t
    keys = slots * (prompt + answer / 2) * kv_bytes_per_token(model.plain.config, run.num_bytes, t)
    read_seconds = steps * (weights + keys) / (machines.memory * machines.memory_share)
    time.memory = max(read_seconds, batches * decoding / t / _achieved_flops(machines))
    time.kernels = steps * model.num_layers * machines.layer_seconds
    stride = 1 if run.has_contiguous_groups else run.num_ranks // t
    time.hops = steps * (2 * model.num_layers + 2) * tree_seconds(run, t, machines, stride)


def step_seconds(times: Iterable[PhaseTime]) -> float:
    """Seconds of all phases, one after the other."""
    return sum(time.seconds for time in times)
