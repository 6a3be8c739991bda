"""Bytes that a rank receives in each phase of a step: within its machine, from other machines, from the CPU.

# N ranks, t tensor-parallel size, M bytes of weights

    all-gather or reduce-scatter of M          (N - 1) / N M received; all-reduce: twice that
    of which from other machines               (machines - 1) / machines M / ranks of a machine
    ZeRO 0, 1, 2                               all-reduce of gradients, under 2 per micro-batch; under 1 and 2
                                               an all-gather of weights
    ZeRO 3, each micro-batch                   two all-gathers of weights, three of some (gathers_of_pass), a
                                               reduce-scatter of gradients
    hybrid switch                              (N - t) / (N t) M and more, see generation/resharding.py
    a token that replicas of t process         2 all-reduces per layer, one of its embedding; if the next is
                                               sampled, a gather of logits

ZeRO 1 and 2 of DeepSpeed 0.19 all-reduce (use_multi_rank_bucket_allreduce) although a reduce-scatter would
suffice. Adapters that ZeRO 3 shards, which are gathered at the switch too, amount to less than 2 % and are
left out.
"""

import math
from dataclasses import dataclass

from common.generation.generate import PREFILL_TOKENS
from common.generation.resharding import group_by_layers
from step3_ppo.loss_arguments import TRUSTED_GAP
from tools.planned_run import Role, Run


@dataclass
class Phase:
    """Bytes that a rank receives over each kind of link in a phase, over the whole step."""

    intra_bytes: float = 0.0
    inter_bytes: float = 0.0
    host_bytes: float = 0.0  # between the device and the CPU's memory, both ways

    def gather(self, run: Run, size: int, num_bytes: float, *, stride: int = 1) -> None:
        """Add a gather of `num_bytes` from a group of `size` ranks, `stride` ranks apart. A reduce-scatter
        receives the same number, an all-reduce is one of each.

        Hierarchical: each machine receives the others' bytes once, and its ranks pass them on.
        """
        per_node = max(min(run.args.num_gpus // stride, size), 1)  # ranks of the group on one machine
        inter = num_bytes * (1 - per_node / size) / per_node
        self.intra_bytes += num_bytes * (size - 1) / size - inter
        self.inter_bytes += inter

    def gather_weights(self, run: Run, role: Role, times: float) -> None:
        """Add this many gathers of a ZeRO-3 model; weights on the CPU are copied from there first."""
        num_bytes = run.num_bytes * role.model.num_params * times
        self.gather(run, run.num_ranks, num_bytes)
        self.host_bytes += num_bytes / run.num_ranks if role.params_on_cpu else 0.0


def plan_traffic(run: Run) -> dict[str, Phase]:
    """Phases of a run's step in order: a PPO step, or an optimizer step of steps 1 and 2."""
    if not run.actor:
        return {"train": plan_update(run, run.roles[0], 1)}
    phases = {"switch": plan_switch(run), "generate": plan_generation(run)}
    for role in run.roles:
        if role is run.actor and not is_recomputed(run):
            continue
        phases[f"score {role.name}"] = phase = Phase()
        if role.is_sharded:
            phase.gather_weights(run, role, scoring_passes(run))
        elif role.params_on_cpu:  # nothing is copied back
            phase.host_bytes = float(run.num_bytes * role.model.num_params)
    num_updates = run.args.ppo_epochs * run.num_samples / run.sequences_per_update
    trained = [role for role in run.roles if role.spec.is_trained]
    return phases | {f"train {role.name}": plan_update(run, role, num_updates) for role in trained}


def scoring_passes(run: Run) -> int:
    """Passes in which a rank scores the responses of a step."""
    return math.ceil(round(run.count_tokens(run.num_samples) / run.tokens_per_score, 9))


def token_steps(run: Run) -> float:
    """Passes of a replica in which each of its slots samples a token after the first: those of full slots,
    but as many as its longest response needs.
    """
    num_samples = run.args.per_device_generation_batch_size * run.tp_size * run.args.num_samples_per_prompt
    rounds = math.ceil(num_samples / run.num_slots)
    return max(rounds * (run.args.max_answer_seq_len - 1), run.longest_answer - 1)


def is_recomputed(run: Run) -> bool:
    """Whether the actor scores its own responses in every step: with `auto`, if 16-bit weights make sampler
    and trainer differ by more than --trusted_logprob_gap.
    """
    args = run.args
    rounds_apart = args.dtype != "fp32" and (args.trusted_logprob_gap or math.inf) < TRUSTED_GAP[args.dtype]
    return args.old_logprobs == "recompute" or (args.old_logprobs == "auto" and rounds_apart)


def plan_update(run: Run, role: Role, times: float) -> Phase:
    """Phase of this many optimizer steps: gathers of their micro-batches, exchange of gradients."""
    phase = Phase()
    num_passes = run.num_micro_batches * times
    gradients = run.num_bytes * role.model.num_trained
    if role.is_sharded:
        phase.gather_weights(run, role, num_passes * gathers_of_pass(role))
        phase.gather(run, run.num_ranks, gradients * num_passes)
    else:
        reductions = num_passes if role.zero.stage == 2 else times
        phase.gather(run, run.num_ranks, 2 * gradients * reductions)
        if role.zero.stage:
            phase.gather(run, run.num_ranks, gradients * times)
    if role.zero.offload_optimizer:  # gradients to the CPU, weights back
        phase.host_bytes += 2 * gradients * times / (run.num_ranks if role.zero.stage else 1)
    return phase


def gathers_of_pass(role: Role) -> float:
    """Number of times that ZeRO 3 gathers the weights of a trained model in a micro-batch: forward and
    backward, but once for those used again within the reuse distance.

    If layers are recomputed, a weight used in the first half of its layer is gathered a third time.
    """
    size = role.model.num_params
    distance = role.zero.max_reuse_distance
    if not role.is_checkpointed:
        return 2 - min(distance / 2 / size, 1.0)
    matrices = role.model.matrices
    thrice = 0
    for names in group_by_layers(list(matrices), 1):
        later_elements = 0  # elements of its layer's later weights
        for name in reversed(names):
            thrice += matrices[name] if 2 * later_elements > distance else 0
            later_elements += matrices[name]
    return 2 - min(distance / 3 / size, 1.0) + thrice / size


def plan_switch(run: Run) -> Phase:
    """Phase of entering generation, once per step."""
    phase = Phase()
    if run.args.offload_states_for_generation:
        moved = sum(
            r.model.num_trained for r in run.roles if r.states_can_move and not r.zero.offload_optimizer
        )
        phase.host_bytes = 2 * 12 * moved / run.num_ranks
    if run.gathers_by_layer:
        return phase
    switch = run.plan_switch()
    size = run.num_ranks // run.tp_size
    if switch.from_gather_group:
        gathered = switch.from_gather_group * size / (size - 1)
        phase.gather(run, size, run.num_bytes * gathered)
    local_share = (run.args.num_gpus - 1) / max(run.num_ranks - 1, 1)
    from_all = run.num_bytes * switch.from_all
    phase.intra_bytes += from_all * local_share
    phase.inter_bytes += from_all * (1 - local_share)
    return phase


def plan_generation(run: Run) -> Phase:
    """Phase of a replica's prefill and decoding, every response at full length: its first token is sampled
    from the prompt's logits, its last one is not processed.
    """
    phase = Phase()
    args = run.args
    model = run.actor.model
    t = run.tp_size
    num_prompts = args.per_device_generation_batch_size * t
    num_samples = num_prompts * args.num_samples_per_prompt
    rounds = math.ceil(num_samples / run.num_slots)
    if run.gathers_by_layer:
        prefill_passes = math.ceil(num_prompts * args.max_prompt_seq_len / PREFILL_TOKENS)
        passes = max(prefill_passes, rounds) + token_steps(run)
        phase.gather_weights(run, run.actor, passes * args.batches_per_step)
    sums = 2 * (2 * model.num_layers + 1) * model.hidden_size  # per token, by all-reduces
    num_sampled_from = num_prompts + num_samples * (args.max_answer_seq_len - 1)
    num_processed = num_sampled_from + num_prompts * (args.max_prompt_seq_len - 1)
    num_bytes = (num_processed * sums + num_sampled_from * model.head.weight.shape[0]) * run.num_bytes
    stride = 1 if run.has_contiguous_groups else run.num_ranks // t
    phase.gather(run, t, num_bytes * args.batches_per_step, stride=stride)
    return phase
