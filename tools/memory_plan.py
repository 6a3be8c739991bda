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

from collections.abc import Iterator
from dataclasses import dataclass

from common.generation.generate import PREFILL_TOKENS
from common.generation.kv_cache import kv_bytes_per_token
from common.models.output_head import CPU_CHUNK_ELEMENTS, GPU_CHUNK_ELEMENTS
from tools.planned_run import Hardware, Role, Run

RECORD_BYTES = 44  # of a response token in step 3's rollout batch
TRAINING = ("backward", "reduce", "step")  # all activations, all gradients, the optimizer's copies

Holdings = dict[tuple[str, str], float]  # (role, item) -> bytes


@dataclass(frozen=True)
class Moment:
    """What is held at once while a role does `verb`: idle, generate, score, or one of TRAINING."""

    phase: str
    role: str
    verb: str
    gpu: Holdings
    cpu: Holdings

    @property
    def total(self) -> float:
        """Bytes on a rank's device."""
        return sum(self.gpu.values())


@dataclass(frozen=True)
class MemoryPlan:
    """All moments of a run, and the device they must fit into."""

    moments: tuple[Moment, ...]
    hardware: Hardware
    loading_bytes: float  # of a machine's CPU memory, while the largest model is read

    @property
    def peak(self) -> Moment:
        """The moment that holds most."""
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def left(self) -> float:
        """Bytes of the device that are left at the peak; negative where it does not fit."""
        return self.hardware.memory_bytes - self.peak.total

    @property
    def cpu_peak(self) -> float:
        """Bytes of a machine's CPU memory, all its ranks together."""
        return max(sum(moment.cpu.values()) for moment in self.moments) * self.hardware.num_gpus

    @property
    def fits(self) -> bool:
        """Whether everything has room; the CPU's is checked where it is known."""
        return self.lacking == 0

    @property
    def lacking(self) -> float:
        """Bytes that are too many, of the device and of the CPU's memory; 0 where it fits."""
        known = self.hardware.cpu_memory_bytes
        on_cpu = max(self.cpu_peak, self.loading_bytes) - known if known else 0.0
        return max(-self.left, 0.0) + max(on_cpu, 0.0)

    def of_phase(self, phase: str) -> Moment:
        """Return the moment of a phase that holds most."""
        return max((m for m in self.moments if m.phase == phase), key=lambda moment: moment.total)


def plan_memory(run: Run) -> MemoryPlan:
    """Return the plan of a run."""
    turns = [("idle", "", "idle")] + ([("generate", "actor", "generate")] if run.actor else [])
    turns += [("score" if run.actor else "evaluate", role.name, "score") for role in run.roles]
    trained = [role.name for role in run.roles if role.is_trained]
    turns += [(f"train {name}", name, verb) for name in trained for verb in TRAINING]
    moments = tuple(_moment(run, *turn) for turn in turns)
    # Each rank reads all weights and then moves them; under ZeRO 3 the first rank hands them out.
    loading = [
        run.num_bytes * role.model.num_params * (1 if role.is_sharded else run.hardware.num_gpus)
        for role in run.roles
    ]
    return MemoryPlan(moments, run.hardware, float(max(loading)))


def _moment(run: Run, phase: str, busy: str, verb: str) -> Moment:
    gpu: Holdings = {}
    cpu: Holdings = {}
    for role in run.roles:
        own_verb = verb if role.name == busy else "wait" if _waits(role, busy, verb) else "idle"
        for item, on_gpu, on_cpu in role_holdings(run, role, own_verb, verb):
            for holdings, num_bytes in ((gpu, on_gpu), (cpu, on_cpu)):
                if num_bytes:
                    holdings[role.name, item] = holdings.get((role.name, item), 0.0) + num_bytes
    if run.actor:
        args = run.args
        by_sample = RECORD_BYTES * args.max_answer_seq_len + 8 * args.max_prompt_seq_len
        cpu["all", "rollout batch"] = float(run.num_samples * run.num_ranks * by_sample)
    gpu["all", "reserved"] = run.hardware.reserved_bytes
    if run.hardware.is_cpu:  # one and the same memory
        gpu |= {key: gpu.get(key, 0.0) + num_bytes for key, num_bytes in cpu.items()}
        cpu = {}
    return Moment(phase, busy, verb, gpu, {key: value for key, value in cpu.items() if value})


def _waits(role: Role, busy: str, verb: str) -> bool:
    """Return whether a role holds gradients for its step while another is busy.

    Step 3 makes the actor's, then the critic's; both are judged before the actor steps, then the critic.
    """
    return (
        (role.name, busy) == ("actor", "critic")
        and verb in ("backward", "reduce")
        or ((role.name, busy, verb) == ("critic", "actor", "step"))
    )


def role_holdings(run: Run, role: Role, verb: str, phase: str) -> Iterator[tuple[str, float, float]]:
    """Yield (item, bytes on the device, bytes on the CPU) of a role that does `verb` in a phase."""
    yield from _weights(run, role, verb)
    if role.is_trained:
        yield from _training_state(run, role, verb)
    if role.is_sharded and run.num_ranks > 1 and verb in ("score", "backward", "reduce"):
        yield "gathered weights", _gathered(run, role, verb), 0.0
    if verb == "backward":
        yield "activations", _training_activations(run, role), 0.0
    if verb == "reduce":
        layer = run.activations(role).backward_work * run.tokens_per_pass / run.length
        yield "activations", layer, 0.0
    if verb == "score":
        tokens = run.tokens_per_pass if run.actor else run.tokens_per_evaluation
        yield "activations", _scoring_activations(run, role, tokens), 0.0
    if role is run.actor:
        yield from _generation(run, role, verb)
        if run.args.ema_decay:
            average = 4.0 * role.num_trained / _shards(run, role, from_stage=3)
            yield _placed("EMA", average, on_cpu=role.params_on_cpu)


def _placed(item: str, num_bytes: float, *, on_cpu: bool) -> tuple[str, float, float]:
    return (item, 0.0, num_bytes) if on_cpu else (item, num_bytes, 0.0)


def _shards(run: Run, role: Role, *, from_stage: int) -> int:
    return run.num_ranks if role.zero.stage >= from_stage else 1


def _weights(run: Run, role: Role, verb: str) -> Iterator[tuple[str, float, float]]:
    counts, b = role.model.counts(role.lora), run.num_bytes
    if role.is_adapter_off:  # how what trains beside the adapters began, and once more while it is put back
        others = b * (counts.num_trained - counts.num_adapter) / _shards(run, role, from_stage=3)
        yield "beginnings", others * (2 if verb == "score" else 1), 0.0
        return
    if not role.is_sharded:
        yield _placed("weights", float(b * counts.num_params), on_cpu=role.params_on_cpu and verb == "idle")
        return
    small = role.model.num_small(role.zero.param_persistence_threshold)
    yield "weights", float(b * small), 0.0
    yield _placed("weights", b * (counts.num_params - small) / run.num_ranks, on_cpu=role.params_on_cpu)


def _training_state(run: Run, role: Role, verb: str) -> Iterator[tuple[str, float, float]]:
    """Yield gradients, optimizer states and buffers: see the table above."""
    b, n, stage, trained = run.num_bytes, run.num_ranks, role.zero.stage, role.num_trained
    shard = trained / _shards(run, role, from_stage=1)
    has_copy = run.dtype != "fp32" or stage > 0
    states = (8 + (4 if has_copy else 0)) * shard
    is_away = verb == "generate" and run.args.offload_states_for_generation
    yield _placed("optimizer", states, on_cpu=role.states_on_cpu or is_away)
    bucket = role.zero.reduce_bucket_size
    bucket = min(bucket, trained) if run.hardware.is_cpu else bucket  # pages nobody writes take no memory
    if role.states_on_cpu:  # fp32 gradients there, and the weights or gradients on their way
        yield "gradients", 0.0, (4 + b) * shard
        largest = float(b * min(role.model.largest_module, trained)) if stage < 3 else 0.0
        yield "buckets", largest, largest
    if stage == 3:
        if not role.states_on_cpu:
            yield "gradients", b * shard, 0.0
        yield "buckets", b * bucket, 0.0
    if verb in ("backward", "reduce"):
        is_second = run.num_micro_batches > 1  # what the first one left is there all along
        if stage <= 1 and (verb == "reduce" or is_second):
            yield "gradients", float(b * trained), 0.0
        if stage == 2 and is_second and not role.states_on_cpu:
            yield "gradients", b * shard, 0.0
        yield "buckets", b * bucket if stage in (1, 2) else 0.0, 0.0
    if verb == "reduce":
        if stage in (1, 2) and not role.states_on_cpu:  # a rank's own part
            yield "gradients", b * shard, 0.0
        yield "buckets", b * min(bucket, trained) if stage == 0 or n > 1 else 0.0, 0.0
    if verb in ("wait", "step") and stage < 3 and not role.states_on_cpu:
        yield "gradients", b * shard, 0.0
    if verb == "step" and not role.states_on_cpu and has_copy:
        at_once = min(shard, role.zero.sub_group_size) if stage == 3 else shard
        flat = b if run.dtype != "fp32" and stage > 0 else 0
        yield "step's buffers", (4 + flat) * at_once, 0.0


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


def head_bytes(run: Run, role: Role, num_tokens: float, *, is_training: bool) -> float:
    """Return what the head holds for the scored ones among a pass's tokens: a chunk of logits, their
    gradients and what is upcast of them (measured); for a value model the values' inputs in fp32.
    """
    b, model, num_scored = run.num_bytes, role.model, scored_tokens(run, num_tokens)
    if model.is_value_model:
        return num_scored * model.hidden_size * 4 * (2 if is_training else 1)
    chunk = CPU_CHUNK_ELEMENTS if run.hardware.is_cpu else GPU_CHUNK_ELEMENTS
    logits = min(chunk, num_scored * model.vocabulary)
    if not is_training:
        return logits * (b + (8 if run.actor else 4))  # step 3 wants the entropy too
    work = logits * ((2 * b + 8) if run.actor else (b + 8))
    work += num_scored * model.hidden_size * b
    is_trained = not (role.lora.dim and role.lora.only_optimize_lora)
    return work + (model.num_head * (4 + b) if is_trained else 0)  # its gradient is added up in fp32


def scored_tokens(run: Run, num_tokens: float) -> float:
    """Return how many of a pass's tokens reach the head: the responses in step 3."""
    return num_tokens * run.args.max_answer_seq_len / run.length if run.actor else num_tokens


def _training_activations(run: Run, role: Role) -> float:
    found, model = run.activations(role), role.model
    num_sequences = run.tokens_per_pass / run.length
    head = head_bytes(run, role, run.tokens_per_pass, is_training=True)
    layer_work = num_sequences * found.backward_work
    if role.is_checkpointed:
        kept = num_sequences * model.num_layers * run.length * model.hidden_size * run.num_bytes
        layer_work += num_sequences * found.saved_by_layer
    else:
        kept = num_sequences * model.num_layers * found.saved_by_layer
    return kept + num_sequences * found.saved_outside + max(layer_work, head)


def _scoring_activations(run: Run, role: Role, num_tokens: int) -> float:
    found = run.activations(role)
    head = head_bytes(run, role, num_tokens, is_training=False)
    states = num_tokens * role.model.hidden_size * run.num_bytes * 2
    return max(num_tokens / run.length * found.forward_peak, states + head)


def _generation(run: Run, role: Role, verb: str) -> Iterator[tuple[str, float, float]]:
    """Yield slices, keys and values, and buffers; some of it stays until it is released."""
    args, b = run.args, run.num_bytes
    is_on = verb == "generate"
    stays = is_on or (args.enable_hybrid_engine and not args.release_inference_cache)
    keys = float(run.num_slots * run.length * kv_bytes_per_token(role.model.config, b, run.tp_size))
    if not args.enable_hybrid_engine:  # transformers' cache grows by copying, a layer at a time
        keys *= 1 + 1 / role.model.num_layers
    if stays:
        yield "keys and values", keys, 0.0
    if run.gathers_by_layer:
        if is_on:
            yield "gathered weights", _gathered(run, role, "score"), 0.0
    else:
        sizes = run.switch_sizes()
        if stays:
            yield "gather buffers", float(b * sizes.staged), 0.0
        if is_on:
            yield "slices of weights", float(b * sizes.new), 0.0
    if is_on:
        prompts = run.num_slots * args.max_prompt_seq_len
        most = PREFILL_TOKENS if args.enable_hybrid_engine else prompts
        prefill = max(min(prompts, most), args.max_prompt_seq_len) / run.length
        # Logits of a token step, their fp32 weights for the sampling, the integers these are added up as.
        draw = run.num_slots * role.model.vocabulary * (b + 20)
        yield "activations", max(prefill * run.activations(role).forward_peak / run.tp_size, draw), 0.0
