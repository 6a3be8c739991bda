"""Memory of every role in every phase of a run: what lies on a rank's device, and on its CPU.

# N ranks, P parameters of a model, b bytes of one

    stage  weights  gradients      fp32 weights, Adam    while the optimizer steps
    0      b P      b P, training  8 P (fp32: no copy)
    1      b P      b P, training  12 P / N              (4 + b) P / N, fp32 4 P / N
    2      b P      b P / N, tr.   12 P / N              the same
    3      b P / N  b P / N        12 P / N              the same, of 10^9 elements at most

In step 3 the actor's gradients wait for the critic's, as both step or neither.

arXiv:1910.02054 section 3, and counted on engines of DeepSpeed 0.19; bf16 runs at stage 1 instead of 0.
"""

from dataclasses import dataclass, field

from common.generation.generate import PREFILL_TOKENS
from common.generation.kv_cache import kv_bytes_per_token
from common.models.output_head import CPU_CHUNK_ELEMENTS, GPU_CHUNK_ELEMENTS
from tools.planned_model import trace_activations
from tools.planned_run import Role, Run

RECORD_BYTES = 44  # of a response token in step 3's rollout batch
TRAINING = ("backward", "reduce", "step")  # all activations, all gradients, the optimizer's copies

Holdings = dict[tuple[str, str], float]  # (role, item) -> bytes


@dataclass
class Moment:
    """What is held at once while a role does `verb`: idle, generate, score, or one of TRAINING."""

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
        """Add bytes to those of an item."""
        holdings = self.cpu if on_cpu else self.gpu
        if num_bytes:
            holdings[role, item] = holdings.get((role, item), 0.0) + num_bytes


class MemoryPlan:
    """All moments of a run against the memory that there is, all in bytes.

    `left` on a device at the peak, negative where it does not fit; `cpu_peak` and, while the largest model is
    read, `loading` of a machine's CPU memory; `lacking` of both kinds together, 0 where the run fits.
    """

    def __init__(self, run: Run) -> None:
        turns = [("idle", "", "idle")] + ([("generate", "actor", "generate")] if run.actor else [])
        turns += [("score" if run.actor else "evaluate", role.name, "score") for role in run.roles]
        trained = [role.name for role in run.roles if role.is_trained]
        turns += [(f"train {name}", name, verb) for name in trained for verb in TRAINING]
        self.moments = [_fill(run, Moment(*turn)) for turn in turns]
        self.peak = max(self.moments, key=lambda moment: moment.total)
        self.left = run.memory_bytes - self.peak.total
        self.cpu_peak = max(sum(moment.cpu.values()) for moment in self.moments) * run.args.num_gpus
        # Each rank reads all weights and then moves them; under ZeRO 3 the first rank hands them out.
        readers = [(role.model.num_params, 1 if role.is_sharded else run.args.num_gpus) for role in run.roles]
        self.loading = max(run.num_bytes * size * number for size, number in readers)
        known = run.args.cpu_memory_gib * 2**30
        on_cpu = max(self.cpu_peak, self.loading) - known if known else 0.0
        self.lacking = max(-self.left, 0.0) + max(on_cpu, 0.0)
        self.fits = self.lacking == 0

    def of_phase(self, phase: str) -> Moment:
        """Return the moment of a phase that holds most."""
        return max((m for m in self.moments if m.phase == phase), key=lambda moment: moment.total)


def _fill(run: Run, moment: Moment) -> Moment:
    for role in run.roles:
        verb = moment.verb if role.name == moment.role else "wait" if _waits(role, moment) else "idle"
        _hold_weights(run, role, verb, moment)
        if role.is_trained:
            _hold_training_state(run, role, verb, moment)
        _hold_activations(run, role, verb, moment)
        if role is run.actor:
            _hold_generation(run, role, verb, moment)
            if run.args.ema_decay:
                average = 4.0 * role.model.num_trained / _shards(run, role, from_stage=3)
                moment.hold(role.name, "EMA", average, on_cpu=role.params_on_cpu)
    if run.actor:
        by_sample = RECORD_BYTES * run.args.max_answer_seq_len + 8 * run.args.max_prompt_seq_len
        moment.hold("all", "rollout batch", float(run.num_samples * by_sample), on_cpu=True)
    moment.hold("all", "reserved", run.device.reserved_gib * 2**30)
    if run.is_cpu:  # one and the same memory
        for key, num_bytes in moment.cpu.items():
            moment.hold(*key, num_bytes)
        moment.cpu = {}
    return moment


def _waits(role: Role, moment: Moment) -> bool:
    """Return whether a role holds gradients for its step while another is busy.

    Step 3 makes the actor's, then the critic's; both are judged before the actor steps, then the critic.
    """
    if moment.verb == "step":
        return (role.name, moment.role) == ("critic", "actor")
    return (role.name, moment.role) == ("actor", "critic") and moment.verb in TRAINING


def _shards(run: Run, role: Role, *, from_stage: int) -> int:
    return run.num_ranks if role.zero.stage >= from_stage else 1


def _hold_weights(run: Run, role: Role, verb: str, moment: Moment) -> None:
    model, b = role.model, run.num_bytes
    if role.is_adapter_off:  # how what trains beside the adapters began, and once more while it is put back
        others = b * (model.num_trained - model.num_adapter) / _shards(run, role, from_stage=3)
        moment.hold(role.name, "beginnings", others * (2 if verb == "score" else 1))
    elif not role.is_sharded:
        is_away = role.params_on_cpu and verb == "idle"
        moment.hold(role.name, "weights", b * model.num_params, on_cpu=is_away)
    else:
        small = model.num_small(role.zero.param_persistence_threshold)
        moment.hold(role.name, "weights", b * small)
        part = b * (model.num_params - small) / run.num_ranks
        moment.hold(role.name, "weights", part, on_cpu=role.params_on_cpu)


def _hold_training_state(run: Run, role: Role, verb: str, moment: Moment) -> None:
    """Hold gradients, optimizer states and buffers: see the table above."""
    b, stage, trained, name = run.num_bytes, role.zero.stage, role.model.num_trained, role.name
    shard = trained / _shards(run, role, from_stage=1)
    is_away, is_second = role.states_on_cpu, run.num_micro_batches > 1  # what the first pass left is there
    has_copy = run.dtype != "fp32" or stage > 0
    is_lent = verb == "generate" and run.args.offload_states_for_generation
    moment.hold(name, "optimizer", (12 if has_copy else 8) * shard, on_cpu=is_away or is_lent)
    bucket = role.zero.reduce_bucket_size
    bucket = min(bucket, trained) if run.is_cpu else bucket  # pages nobody writes take no memory
    if is_away:  # fp32 gradients there, and the weights or gradients on their way
        moment.hold(name, "gradients", (4 + b) * shard, on_cpu=True)
        largest = float(b * min(role.model.largest_module, trained)) if stage < 3 else 0.0
        moment.hold(name, "buckets", largest)
        moment.hold(name, "buckets", largest, on_cpu=True)
    if stage == 3:
        moment.hold(name, "gradients", 0.0 if is_away else b * shard)
        moment.hold(name, "buckets", b * bucket)
    if verb in ("backward", "reduce"):
        if stage <= 1 and (verb == "reduce" or is_second):
            moment.hold(name, "gradients", float(b * trained))
        if stage == 2 and is_second and not is_away:
            moment.hold(name, "gradients", b * shard)
        moment.hold(name, "buckets", b * bucket if stage in (1, 2) else 0.0)
    if verb == "reduce":
        if stage in (1, 2) and not is_away:  # a rank's own part
            moment.hold(name, "gradients", b * shard)
        moment.hold(name, "buckets", b * min(bucket, trained) if stage == 0 or run.num_ranks > 1 else 0.0)
    if verb in ("wait", "step") and stage < 3 and not is_away:
        moment.hold(name, "gradients", b * shard)
    if verb == "step" and not is_away and has_copy:
        at_once = min(shard, role.zero.sub_group_size) if stage == 3 else shard
        flat = b if run.dtype != "fp32" and stage > 0 else 0
        moment.hold(name, "step's buffers", (4 + flat) * at_once)


def _gathered(run: Run, role: Role, verb: str) -> float:
    """Return the bytes of whole weights that ZeRO 3 holds while a model runs.

    A pass without gradients: one module, and what is fetched ahead. With them: all weights, as torch's linear
    saves a view of its weight, unless layers are recomputed; then what the backward pass will need within the
    reuse distance, which a layer's forward, recomputation and backward each count for.
    """
    settings, model = role.zero, role.model
    ahead = min(settings.prefetch_bucket_size, model.num_params)
    held = model.largest_module + 2 * ahead  # fetched together and then copied apart
    if verb == "reduce":
        held += model.largest_module  # its gradient
    if verb == "backward":
        if role.is_checkpointed or settings.memory_efficient_linear:
            held += settings.max_reuse_distance / (3 if role.is_checkpointed else 2)
        else:
            held += model.num_params
    return run.num_bytes * min(held, 2 * model.num_params)


# ---- activations ----------------------------------------------------------------------------------------


def _hold_activations(run: Run, role: Role, verb: str, moment: Moment) -> None:
    if verb not in ("score", "backward", "reduce"):
        return
    if role.is_sharded and run.num_ranks > 1:
        moment.hold(role.name, "gathered weights", _gathered(run, role, verb))
    model, found = role.model, trace_activations(role.model, run.dtype, run.length, run.is_flash)
    num_sequences = run.tokens_per_pass / run.length
    if verb == "backward":
        head = head_bytes(run, role, run.tokens_per_pass, is_training=True)
        layer_work, kept = num_sequences * found.backward_work, num_sequences * found.saved_outside
        if role.is_checkpointed:
            kept += num_sequences * model.num_layers * run.length * model.hidden_size * run.num_bytes
            layer_work += num_sequences * found.saved_by_layer
        else:
            kept += num_sequences * model.num_layers * found.saved_by_layer
        held = kept + max(layer_work, head)
    elif verb == "reduce":
        held = num_sequences * found.backward_work
    else:
        num_tokens = run.tokens_per_pass if run.actor else run.tokens_per_evaluation
        head = head_bytes(run, role, num_tokens, is_training=False)
        states = num_tokens * model.hidden_size * run.num_bytes * 2
        held = max(num_tokens / run.length * found.forward_peak, states + head)
    moment.hold(role.name, "activations", held)


def head_bytes(run: Run, role: Role, num_tokens: float, *, is_training: bool) -> float:
    """Return what the head holds for the scored ones among a pass's tokens: a chunk of logits, their
    gradients and what is upcast of them (measured); for a value model the values' inputs in fp32.
    """
    b, model, num_scored = run.num_bytes, role.model, scored_tokens(run, num_tokens)
    if model.is_value_model:
        return num_scored * model.hidden_size * 4 * (2 if is_training else 1)
    chunk = CPU_CHUNK_ELEMENTS if run.is_cpu else GPU_CHUNK_ELEMENTS
    logits = min(chunk, num_scored * model.head.weight.shape[0])
    if not is_training:
        return logits * (b + (8 if run.actor else 4))  # step 3 wants the entropy too
    work = logits * ((2 * b + 8) if run.actor else (b + 8))
    work += num_scored * model.hidden_size * b
    # Its gradient is added up in fp32.
    return work + (model.head.weight.numel() * (4 + b) if model.is_head_trained else 0)


def scored_tokens(run: Run, num_tokens: float) -> float:
    """Return how many of a pass's tokens reach the head: the responses in step 3."""
    return num_tokens * run.args.max_answer_seq_len / run.length if run.actor else num_tokens


def _hold_generation(run: Run, role: Role, verb: str, moment: Moment) -> None:
    """Hold slices, keys and values, and buffers; some of it stays until it is released."""
    args, b, name = run.args, run.num_bytes, role.name
    is_on = verb == "generate"
    stays = is_on or (args.enable_hybrid_engine and not args.release_inference_cache)
    keys = float(run.num_slots * run.length * kv_bytes_per_token(role.model.config, b, run.tp_size))
    if not args.enable_hybrid_engine:  # transformers' cache grows by copying, a layer at a time
        keys *= 1 + 1 / role.model.num_layers
    if stays:
        moment.hold(name, "keys and values", keys)
    if not run.gathers_by_layer:
        switch = run.plan_switch()
        moment.hold(name, "gather buffers", b * switch.staged if is_on else 0.0)
        moment.hold(name, "slices of weights", b * switch.new if is_on else 0.0)
    elif is_on:
        moment.hold(name, "gathered weights", _gathered(run, role, "score"))
    if is_on:
        prompts = run.num_slots * args.max_prompt_seq_len
        most = PREFILL_TOKENS if args.enable_hybrid_engine else prompts
        prefill = max(min(prompts, most), args.max_prompt_seq_len) / run.length
        # Logits of a token step, their fp32 weights for the sampling, the integers these are added up as.
        draw = run.num_slots * role.model.head.weight.shape[0] * (b + 20)
        found = trace_activations(role.model, run.dtype, run.length, run.is_flash)
        passes = prefill * found.forward_peak / run.tp_size
        moment.hold(name, "activations", max(passes, draw))
