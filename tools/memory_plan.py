"""Memory of every role in every phase of a run, on a rank's device and on its CPU.

# N ranks, P parameters of a model, b bytes of one

    stage  weights  gradients      fp32 weights, Adam    while the optimizer steps
    0      b P      b P, training  8 P (fp32: no copy)
    1      b P      b P, training  12 P / N              (4 + b) P / N, fp32 4 P / N
    2      b P      b P / N, tr.   12 P / N              the same
    3      b P / N  b P / N        12 P / N              the same, of 10^9 elements at most

    --optimizer_dtype bf16: 6 for 12, 2 for 4 + b; matrices of Muon: 8 for 12, or 4 for 6

arXiv:1910.02054 section 3, and counted on engines of DeepSpeed 0.19; bf16 runs at stage 1 instead of 0. Items
below 2 % are left out: norms and biases that ZeRO 3 keeps whole, padding of the vocabulary, the rollout
batch, and under LoRA copies of the other weights that --only_optimize_lora false trains.
"""

from dataclasses import dataclass, field

from common.generation.generate import PREFILL_TOKENS
from common.generation.kv_cache import kv_bytes_per_token
from common.models.four_bit import BYTES_PER_WEIGHT
from common.models.loading import DTYPES
from common.models.output_head import (
    CPU_KEPT_ELEMENTS,
    GPU_KEPT_ELEMENTS,
    chunk_elements,
)
from common.models.saved_adapters import is_adapter
from tools.planned_run import Role, Run
from tools.traced_layers import trace_activations

TEACHER = "--teacher_model_name_or_path"  # it scores each micro-batch when the actor is trained on it
TRAINING = ("backward", "reduce", "step")  # peaks of activations, gradients, optimizer buffers

# (role that holds gradients, role that runs, what it does): step 3 computes the actor's gradients, then the
# critic's; both are checked before the actor steps, then the critic.
WAITS = {("actor", "critic", "backward"), ("actor", "critic", "reduce"), ("critic", "actor", "step")}

Holdings = dict[tuple[str, str], float]  # (role, item) -> bytes


@dataclass
class Moment:
    """Memory held while a role does `verb`: idle, generate, score, or one of TRAINING."""

    phase: str
    role: str
    verb: str
    gpu: Holdings = field(default_factory=dict)
    cpu: Holdings = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Bytes on a rank's device."""
        return sum(self.gpu.values())

    def hold(self, role: str, item: str, num_bytes: float, *, on_cpu: bool = False) -> None:
        """Add bytes to an item."""
        holdings = self.cpu if on_cpu else self.gpu
        if num_bytes:
            holdings[role, item] = holdings.get((role, item), 0.0) + num_bytes


class MemoryPlan:
    """All moments of a run compared with the available memory, all in bytes.

    `left` on a device at the peak, negative if it does not fit; `cpu_peak` and, while the largest model is
    read, `loading` of a machine's CPU memory; `lacking` of both kinds together, 0 if the run fits.
    """

    def __init__(self, run: Run) -> None:
        turns = [("idle", "", "idle")] + ([("generate", "actor", "generate")] if run.actor else [])
        turns += [("score" if run.actor else "evaluate", role.name, "score") for role in run.roles]
        trained = [role.name for role in run.roles if role.spec.is_trained]
        turns += [(f"train {name}", name, verb) for name in trained for verb in TRAINING]
        self.moments = [_fill(run, Moment(*turn)) for turn in turns]
        self.peak = max(self.moments, key=lambda moment: moment.total)
        self.left = run.memory_bytes - self.peak.total
        self.cpu_peak = max(sum(moment.cpu.values()) for moment in self.moments) * run.args.num_gpus
        # Each rank reads all weights, then moves them; under ZeRO 3 only the first rank reads and sends them.
        readers = [(role.model.num_params, 1 if role.is_sharded else run.args.num_gpus) for role in run.roles]
        self.loading = max(run.num_bytes * size * number for size, number in readers)
        known = run.args.cpu_memory_gib * 2**30
        on_cpu = max(self.cpu_peak, self.loading) - known if known else 0.0
        self.lacking = max(-self.left, 0.0) + max(on_cpu, 0.0)
        self.fits = self.lacking == 0

    def of_phase(self, phase: str) -> Moment:
        """The moment of a phase that holds most."""
        return max((m for m in self.moments if m.phase == phase), key=lambda moment: moment.total)


def _fill(run: Run, moment: Moment) -> Moment:
    for role in run.roles:
        verb = "wait" if (role.name, moment.role, moment.verb) in WAITS else "idle"
        verb = moment.verb if role.name == moment.role else verb
        if not role.spec.uses_actor:
            num_own = role.model.num_params - role.num_shared
            in_4bit = role.num_packed * BYTES_PER_WEIGHT
            weights = run.num_bytes * (num_own - role.num_packed) + in_4bit
            weights /= run.num_ranks if role.is_sharded else 1
            teaches = role.spec.flag == TEACHER and (moment.role, moment.verb) == ("actor", "backward")
            is_idle = verb == "idle" and not teaches
            is_away = role.params_on_cpu and (role.is_sharded or is_idle)
            moment.hold(role.name, "weights", weights, on_cpu=is_away)
            if role.params_on_cpu and not (is_away or run.is_cpu):  # the pinned copies stay
                moment.hold(role.name, "weights", weights, on_cpu=True)
        elif is_adapter(role.spec.path):  # initial adapters; while scoring, also the current ones
            initial_bytes = run.num_bytes * role.model.num_trained / run.num_ranks
            moment.hold(role.name, "adapters", initial_bytes * (2 if verb == "score" else 1))
        if role.spec.is_trained:
            _hold_training_state(run, role, verb, moment)
        _hold_activations(run, role, verb, moment)
        # One weight at a time. That a reference which uses the actor is in 4 bits, only its weights say.
        if (role.spec.is_in_4bit or role.num_packed) and verb not in ("idle", "wait", "step"):
            moment.hold(role.name, "unpacked weight", run.num_bytes * role.model.largest_linear)
        if role is run.actor:
            _hold_generation(run, role, verb == "generate", moment)
    moment.hold("device", "reserved", reserved_gib(run) * 2**30)
    if run.is_cpu:  # device and CPU share one memory
        for key, num_bytes in moment.cpu.items():
            moment.hold(*key, num_bytes)
        moment.cpu = {}
    return moment


def reserved_gib(run: Run) -> float:
    """Memory outside tensors in GiB: CUDA context, fragmentation and NCCL's buffers, which grow with the
    number of communicators on 8 ranks and more; on a CPU the libraries of a process (the demo's steps).
    """
    return 0.6 if run.is_cpu else 2.0 + (run.num_ranks >= 8)


def has_master_copy(run: Run, role: Role) -> bool:
    """Whether the optimizer keeps a copy of the weights in the states' dtype."""
    return run.args.dtype != "fp32" or role.zero.stage > 0


def share_of_muon(run: Run, role: Role) -> float:
    """Share of the trained weights that Muon steps."""
    return role.model.num_in_matrices / role.model.num_trained if run.args.optimizer == "muon" else 0.0


def count_stepped(run: Run, role: Role) -> float:
    """Trained weights that a rank steps: its share of them, unless the stage is 0."""
    return role.model.num_trained / (run.num_ranks if role.zero.stage else 1)


def held_in_states(run: Run, role: Role) -> float:
    """Bytes of a rank's optimizer states: two moments per weight, one for Muon, and the copy."""
    num_states = 2 + has_master_copy(run, role) - share_of_muon(run, role)
    return DTYPES[run.args.optimizer_dtype].itemsize * num_states * count_stepped(run, role)


def _hold_training_state(run: Run, role: Role, verb: str, moment: Moment) -> None:
    """Hold optimizer states, averages, gradients and buffers: see the table above."""
    state_bytes = DTYPES[run.args.optimizer_dtype].itemsize
    muon_share = share_of_muon(run, role)
    is_lent = moment.verb == "generate" and run.args.offload_states_for_generation and role.states_can_move
    is_away = role.steps_on_cpu or is_lent
    moment.hold(role.name, "optimizer", held_in_states(run, role), on_cpu=is_away)
    if role is run.actor:
        num_averages = bool(run.args.ema_decay) + bool(run.args.ref_ema_decay)
        average_bytes = 4.0 * role.model.num_trained / run.num_ranks
        moment.hold(role.name, "EMA", num_averages * average_bytes, on_cpu=role.params_on_cpu)
    _hold_gradients(run, role, verb, moment)
    _hold_buckets(run, role, verb, moment)
    if verb == "step":
        num_at_once = count_stepped(run, role)
        if role.is_sharded:
            num_at_once = min(num_at_once, role.zero.sub_group_size)
        if role.steps_on_cpu or not has_master_copy(run, role):
            num_at_once = 0
        flat_bytes = run.num_bytes if state_bytes != run.num_bytes else 0  # freed once copied
        by_adamw = (state_bytes + flat_bytes) * num_at_once * max(muon_share, 1 - muon_share)
        # Muon's matrices are stepped separately: fp32 terms of a matrix and its powers, a matrix per rank.
        work = (32.0 + run.num_bytes * run.num_ranks) * role.model.largest_matrix if muon_share else 0.0
        by_muon = state_bytes * num_at_once * muon_share + work
        moment.hold(role.name, "step's buffers", max(by_adamw, by_muon))


def _hold_gradients(run: Run, role: Role, verb: str, moment: Moment) -> None:
    """Hold all gradients, or those that this rank steps; offloaded ones are on the CPU, also in fp32."""
    whole = run.num_bytes * role.model.num_trained
    num_stepped = count_stepped(run, role)
    own = run.num_bytes * num_stepped
    if role.steps_on_cpu:
        moment.hold(role.name, "gradients", own + 4 * num_stepped, on_cpu=True)
        own = 0.0
    has_earlier = run.num_micro_batches > 1  # gradients of an earlier micro-batch
    if role.zero.stage == 3 or verb in ("wait", "step"):
        moment.hold(role.name, "gradients", own)
    elif verb == "backward" and has_earlier:
        moment.hold(role.name, "gradients", own if role.zero.stage == 2 else whole)
    elif verb == "reduce" and role.zero.stage == 2:
        moment.hold(role.name, "gradients", 2 * own if has_earlier else own)
    elif verb == "reduce":
        moment.hold(role.name, "gradients", whole + own if role.zero.stage else whole)


def _hold_buckets(run: Run, role: Role, verb: str, moment: Moment) -> None:
    """Hold the buffers that gradients are reduced and offloaded through."""
    stage = role.zero.stage
    filled = min(role.zero.reduce_bucket_size, role.model.num_trained)
    bucket = filled if run.is_cpu else role.zero.reduce_bucket_size  # unwritten pages take no CPU memory
    if stage == 3 or (stage and verb in ("backward", "reduce")):
        is_double = stage < 3 and role.zero.overlap_comm
        moment.hold(role.name, "buckets", run.num_bytes * bucket * (2 if is_double else 1))
    if verb == "reduce" and (stage == 0 or run.num_ranks > 1):
        moment.hold(role.name, "buckets", run.num_bytes * filled)
    if role.steps_on_cpu and stage < 3:
        largest = min(role.model.largest_module, role.model.num_trained)
        moment.hold(role.name, "buckets", run.num_bytes * largest)


def _gathered(run: Run, role: Role, verb: str) -> float:
    """Bytes of whole weights that ZeRO 3 holds while a model runs; on one rank they are views of its part.

    Without gradients: prefetched weights, up to the limit of live parameters. With gradients: all weights,
    because torch's linear saves a view of its weight, unless layers are recomputed; then at least what the
    backward pass needs within the reuse distance, in which a layer's forward, recomputation and backward
    each count.
    """
    settings, model = role.zero, role.model
    live = float(settings.max_live_parameters)
    if verb == "backward":
        if role.is_checkpointed or settings.memory_efficient_linear:
            live = max(live, settings.max_reuse_distance / (3 if role.is_checkpointed else 2))
        else:
            live = model.num_params
    # The last weights are fetched together and then copied separately.
    held = min(live, model.num_params) + model.largest_module + settings.prefetch_bucket_size
    if verb == "reduce":
        held += model.largest_module  # its gradient
    return run.num_bytes * min(held, 2 * model.num_params) * (run.num_ranks > 1)


# ---- activations ----------------------------------------------------------------------------------------


def _hold_activations(run: Run, role: Role, verb: str, moment: Moment) -> None:
    if verb not in ("score", "backward", "reduce"):
        return
    if role.is_sharded:
        moment.hold(role.name, "gathered weights", _gathered(run, role, verb))
    model = role.model
    traced = trace_activations(role.model, run.args.dtype, run.length)
    num_tokens = run.tokens_per_score if verb == "score" else run.tokens_per_pass
    num_sequences = num_tokens / run.length
    states = num_tokens * model.hidden_size * run.num_bytes  # hidden states between two layers
    # PEFT adds adapters to a layer's stacked experts in each pass, and the backward pass needs the sum.
    sums = run.num_bytes * model.num_in_stacks / model.num_layers
    if verb == "backward":
        inside = num_sequences * traced.saved_by_layer + _shared_keys(run, role, num_tokens)
        outside = num_sequences * traced.saved_outside
        work = num_sequences * traced.backward_work
        head = head_bytes(run, role, num_tokens, is_training=True)
        if role.is_checkpointed:
            held = outside + model.num_layers * states + max(work + inside, head)
        else:
            held = outside + model.num_layers * inside + max(work, head)
        held += sums * (0.5 + (1 if role.is_checkpointed else model.num_layers))  # 0.5: gradients of sums
    elif verb == "reduce":
        held = num_sequences * traced.backward_work
    else:
        head = head_bytes(run, role, num_tokens, is_training=False)
        held = max(num_sequences * traced.forward_peak, 2 * states + head) + sums
    moment.hold(role.name, "activations", held)


def _shared_keys(run: Run, role: Role, num_tokens: float) -> float:
    """Bytes of keys and values that a layer saves in addition where prompts are shared: each response's come
    with a copy of its prompt's.
    """
    if run.group_size == 1:
        return 0.0
    by_token = kv_bytes_per_token(role.model.plain.config, run.num_bytes, 1) / role.model.num_layers
    return _num_responses(run, num_tokens) * run.args.max_prompt_seq_len * by_token


def _num_responses(run: Run, num_tokens: float) -> float:
    """Responses of a pass of step 3 over this many tokens: a group's prompt counts once."""
    return num_tokens / (run.args.max_answer_seq_len + run.args.max_prompt_seq_len / run.group_size)


def head_bytes(run: Run, role: Role, num_tokens: float, *, is_training: bool) -> float:
    """Bytes that the head holds for the scored tokens of a pass, in step 3 the responses: a chunk of logits,
    its gradients and its fp32 copies (measured); for a value model the inputs of the values in fp32.
    """
    b = run.num_bytes
    model = role.model
    head = role.model.head.weight
    num_scored = num_tokens
    if run.actor:
        num_scored = _num_responses(run, num_tokens) * run.args.max_answer_seq_len
    if model.is_value_model:
        return num_scored * model.hidden_size * 4 * (2 if is_training else 1)
    chunk = chunk_elements(is_cpu=run.is_cpu, is_bf16=run.args.dtype == "bf16")
    logits = min(chunk, num_scored * head.shape[0])
    if not is_training:
        return logits * (b + (8 if run.actor else 4))  # step 3 also needs the entropy
    work = logits * ((2 * b + 8) if run.actor else (b + 8))
    if run.actor or run.args.stage == 2:
        kept = min(CPU_KEPT_ELEMENTS if run.is_cpu else GPU_KEPT_ELEMENTS, num_scored * head.shape[0])
        work += max(kept - logits, 0) * b
    work += num_scored * model.hidden_size * b
    # The head's gradient is accumulated in fp32.
    return work + (head.numel() * (4 + b) if head.requires_grad else 0)


def _hold_generation(run: Run, role: Role, is_on: bool, moment: Moment) -> None:
    """Hold slices, keys and values, and buffers; keys, values and captured passes, with the slices that they
    read, are kept until they are released.
    """
    args = run.args
    b = run.num_bytes
    name = role.name
    model = role.model
    keys = float(run.num_slots * run.length * kv_bytes_per_token(model.plain.config, b, run.tp_size))
    is_kept = args.enable_hybrid_engine and not args.release_inference_cache
    if is_on or is_kept:
        moment.hold(name, "keys and values", keys)
    has_graphs = is_kept and not (run.is_cpu or run.gathers_by_layer or args.no_cuda_graphs)
    if is_on or has_graphs:
        of_logit = b + (38.0 if args.top_p < 1 else 20.0)  # counted on a pretended GPU, plus a margin of 4
        moment.hold(name, "token passes", run.num_slots * model.head.weight.shape[0] * of_logit)
    if not run.gathers_by_layer and (is_on or has_graphs):
        moment.hold(name, "slices of weights", b * run.plan_switch().new)
    if not is_on:
        return
    if run.gathers_by_layer:
        moment.hold(name, "gathered weights", _gathered(run, role, "score"))
    else:
        switch = run.plan_switch()
        moment.hold(name, "gather buffers", b * (switch.staged + has_graphs * switch.new_at_once))
    prompts = run.num_slots * args.max_prompt_seq_len
    most = PREFILL_TOKENS if args.enable_hybrid_engine else prompts
    prefill = max(min(prompts, most), args.max_prompt_seq_len) / run.length
    traced = trace_activations(model, args.dtype, run.length)
    moment.hold(name, "activations", prefill * traced.forward_peak / run.tp_size)
