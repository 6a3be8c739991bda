"""Whether a run fits into its machines, which flag to change where it does not, and how long a step takes.

python -m tools.plan --stage 3 --actor_model_name_or_path SFT --critic_model_name_or_path REWARD \\
    --actor_zero_stage 3 --enable_hybrid_engine --gpu a100-80g --num_gpus 8

The flags are those of the step, and the machines'. Nothing is loaded and no GPU is needed: figures are worked
out from the models' configurations (`memory_plan.py`, `traffic_plan.py`). Exit code 1 where it does not fit.
"""

import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import combinations
from typing import Any, NamedTuple

from common.engine.ds_config import effective_zero_stage, load_overrides
from common.flags.args import Problems, parse_args
from common.models.loading import DTYPES, LoraOptions
from common.programs import startup
from tools.devices import (
    Change,
    Models,
    PlanArguments,
    apply,
    build_hardware,
    candidate_changes,
    dtype_of,
    find_problems,
    hardware_lines,
    has_score_head,
    more_machines,
    read_models,
    sequences_of_row,
)
from tools.findings import run_tool
from tools.memory_plan import TRAINING, MemoryPlan, Role, Run, plan_memory
from tools.traffic_plan import TrafficPlan, is_recomputed, plan_traffic, strided_group

STEPS = {1: "step 1, SFT", 2: "step 2, reward model", 3: "step 3, PPO"}
MOST_CHANGES = 4  # of one suggestion


class Suggestion(NamedTuple):
    """Changes that together make a run fit, and the bytes that are then left."""

    changes: list[Change]
    left: float


def main(argv: Sequence[str] | None = None) -> None:
    """Check the flags, plan, print; exit code 1 where the run does not fit, 2 where the flags are wrong."""
    startup.quiet_libraries()
    problems = Problems()
    args = parse_args(PlanArguments, argv, description=__doc__.splitlines()[0], problems=problems)
    models = read_models(args, problems)
    try:
        load_overrides(args)
    except (OSError, ValueError) as error:
        problems.add(f"--ds_config {args.ds_config} cannot be read as JSON: {error}")
    if not problems.messages:
        for problem in find_problems(args, models):
            problems.add(problem)
    problems.exit_if_any()
    run = build_run(args, models)
    memory, traffic = plan_memory(run), plan_traffic(run)
    suggestion = None if memory.fits else find_suggestion(args, models)
    lines = [*head_lines(run), "", *memory_lines(run, memory), "", *verdict_lines(run, memory, suggestion)]
    lines += ["", *traffic_lines(run, traffic), "", *assumption_lines(run)]
    print("\n".join(lines))
    if args.json:
        print(json.dumps(as_object(run, memory, traffic, suggestion)))
    sys.stdout.flush()
    if not memory.fits:
        raise SystemExit(1)


# ---- the run --------------------------------------------------------------------------------------------


def build_run(args: PlanArguments, models: Models) -> Run:
    """Return what the flags describe."""
    dtype = dtype_of(args)
    of_row = sequences_of_row(args)
    if args.stage == 3:
        roles = _build_ppo_roles(args, models, dtype)
        length = args.max_prompt_seq_len + args.max_answer_seq_len
        rows, evaluated = args.per_device_training_batch_size, 0
    else:
        name = "reward" if has_score_head(args) else "policy"
        lora = LoraOptions(args.lora_dim, 0.0, args.lora_module_name, args.only_optimize_lora)
        stage = effective_zero_stage(args.zero_stage, dtype)
        roles = [Role(name, models["model"], stage, True, lora, args.gradient_checkpointing, args.offload)]
        length = args.max_seq_len
        rows, evaluated = args.per_device_train_batch_size, args.per_device_eval_batch_size
    tokens_per_pass = args.max_tokens_per_micro_batch or rows * of_row * length
    sequences_per_update = rows * of_row * args.gradient_accumulation_steps
    prompts = args.per_device_generation_batch_size * args.generation_batches
    return Run(
        args=args,
        hardware=build_hardware(args, dtype),
        dtype=dtype,
        roles=tuple(roles),
        length=length,
        tokens_per_pass=tokens_per_pass,
        tokens_per_evaluation=evaluated * of_row * length,
        sequences_per_update=sequences_per_update,
        num_micro_batches=-(-sequences_per_update * length // tokens_per_pass),
        num_samples=prompts * args.num_samples_per_prompt,
        num_ranks=args.num_gpus * args.num_nodes,
        num_bytes=DTYPES[dtype].itemsize,
        ds_overrides=load_overrides(args),
    )


def _build_ppo_roles(args: PlanArguments, models: Models, dtype: str) -> list[Role]:
    """Return the roles as `step3_ppo/role_builder.py` makes them."""
    trained = {}
    for name in ("actor", "critic"):
        dim, part = getattr(args, f"{name}_lora_dim"), getattr(args, f"{name}_lora_module_name")
        trained[name] = {
            "zero_stage": effective_zero_stage(getattr(args, f"{name}_zero_stage"), dtype),
            "lora": LoraOptions(dim, 0.0, part, args.only_optimize_lora) if dim else LoraOptions(),
            "is_checkpointed": getattr(args, f"{name}_gradient_checkpointing"),
            "offload": args.offload,
        }

    def frozen(name: str, like: str, *, is_offloaded: bool) -> Role:
        stage = 3 if getattr(args, f"{like}_zero_stage") == 3 else 0
        model = models["actor" if name == "reference" else name]
        return Role(name, model, stage, is_trained=False, offload="param" if is_offloaded else "none")

    roles = [Role("actor", models["actor"], **trained["actor"])]
    if args.actor_lora_dim:
        own = trained["actor"] | {"is_trained": False, "is_adapter_off": True, "offload": "none"}
        roles.append(Role("reference", models["actor"], **own))
    else:
        roles.append(frozen("reference", "actor", is_offloaded=args.offload_reference_model))
    if "critic" in models:
        roles.append(Role("critic", models["critic"], **trained["critic"]))
    if "reward" in models:
        roles.append(frozen("reward", "critic", is_offloaded=args.offload_reward_model))
    return roles


# ---- what to change -------------------------------------------------------------------------------------


def find_suggestion(args: PlanArguments, models: Models) -> Suggestion | None:
    """Return the first single change that fits, else the first of the shortest combinations, each in its
    gentlest variant; more GPUs only where no other flags do. Every candidate's plan is really made.
    """
    found = _search(args, models, sizes=range(1, MOST_CHANGES + 1))
    if found:
        return found
    for machines in more_machines(args):
        found = _search(apply(args, [machines]), models, sizes=range(MOST_CHANGES))
        if found:
            return Suggestion([machines, *found.changes], found.left)
    return None


def _search(args: PlanArguments, models: Models, sizes: Iterable[int]) -> Suggestion | None:
    """Return the first of the combinations of so many changes that fits."""
    candidates = candidate_changes(args, models, build_run(args, models).num_slots)
    tried: dict[tuple[str, ...], float] = {}

    def left(changes: Sequence[Change]) -> float:
        """Return the bytes left: below 0 where it does not fit, -inf where the flags exclude each other."""
        key = tuple(str(change.flags) for change in changes)
        if key not in tried:
            changed = apply(args, changes)
            plan = None if find_problems(changed, models) else plan_memory(build_run(changed, models))
            tried[key] = -math.inf if plan is None else plan.left if plan.fits else -1.0
        return tried[key]

    def strongest_of(chosen: Sequence[list[Change]]) -> list[Change] | None:
        return next((s for s in _strongest(chosen) if left(s) > -math.inf), None)

    # Where not even everything together fits, with or without ranks that generate together, nothing does.
    without_tp = [v for v in candidates if not v or "inference_tp_size" not in v[0].flags]
    if all(left(strongest_of(chosen) or []) < 0 for chosen in (candidates, without_tp)):
        return None
    for size in sizes:
        for chosen in combinations(candidates, size):
            strongest = strongest_of(chosen)
            if strongest is None or left(strongest) < 0:
                continue
            for i in reversed(range(size)):  # the dearest is weakened first
                weaker = ([*strongest[:i], variant, *strongest[i + 1 :]] for variant in chosen[i])
                strongest = next(changes for changes in weaker if left(changes) >= 0)
            return Suggestion(strongest, left(strongest))
    return None


def _strongest(chosen: Sequence[list[Change]]) -> Iterator[list[Change]]:
    """Yield the strongest variants together, then with one of them weaker: not all go with all others."""
    strongest = [variants[-1] for variants in chosen]
    yield strongest
    for i, variants in enumerate(chosen):
        for variant in reversed(variants[:-1]):
            yield [*strongest[:i], variant, *strongest[i + 1 :]]


# ---- printing -------------------------------------------------------------------------------------------


def grid(rows: Sequence[Sequence[str]], num_left: int = 1) -> list[str]:
    """Return the rows as lines with aligned columns, the first `num_left` of them to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    aligned = ["<" if i < num_left else ">" for i in range(len(widths))]
    shapes = [f"{{:{side}{width}}}" for side, width in zip(aligned, widths, strict=True)]
    return ["  ".join(shapes).format(*row).rstrip() for row in rows]


def count_text(number: float) -> str:
    """Return a count in three digits: 6.74 B."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number:.0f}"


def gib(num_bytes: float) -> str:
    """Return bytes in GiB, a dash for none."""
    return f"{num_bytes / 2**30:.2f}" if num_bytes else "-"


def head_lines(run: Run) -> list[str]:
    """Say what is planned: step, machines, models."""
    hardware = run.hardware
    machines = f"{hardware.num_nodes} machines of " if hardware.num_nodes > 1 else ""
    rows = [["role", "family", "parameters", "trained", "layers", "hidden", "ZeRO"]]
    for role in run.roles:
        model, counts = role.model, role.model.counts(role.lora)
        trained = count_text(counts.num_trained) if role.is_trained else "-"
        family = model.config.model_type + (", adapters off" if role.is_adapter_off else "")
        sizes = [str(model.num_layers), str(model.hidden_size), str(role.zero_stage)]
        rows.append([role.name, family, count_text(counts.num_params), trained, *sizes])
    step = "step 2, DPO" if run.args.stage == 2 and run.args.loss == "dpo" else STEPS[run.args.stage]
    title = f"{step}, on {machines}{hardware.num_gpus} x {hardware.name}, {run.dtype}"
    return [title, "", *grid(rows, num_left=2)]


def memory_lines(run: Run, memory: MemoryPlan) -> list[str]:
    """Show what a rank holds in each phase, and on its CPU."""
    moments = [memory.of_phase(phase) for phase in dict.fromkeys(m.phase for m in memory.moments)]
    size = run.hardware.memory_bytes
    title = f"{'' if run.hardware.is_cpu else 'GPU '}memory of a rank, GiB"
    rows = [
        [title, "", *(m.phase.split()[0] for m in moments)],
        ["", "", *(m.role for m in moments)],
        ["", "", *(m.verb if m.verb in TRAINING else "" for m in moments)],
        *_item_rows(run, [m.gpu for m in moments]),
        ["all", "", *(gib(m.total) for m in moments)],
        [f"left of {size / 2**30:g}", "", *(gib(size - m.total) for m in moments)],
    ]
    on_cpu = _item_rows(run, [m.cpu for m in moments])
    if on_cpu:
        blank = [""] * (len(moments) + 1)
        rows += [["", *blank], ["CPU memory of a rank, GiB", *blank], *on_cpu]
        of_all = [sum(m.cpu.values()) * run.hardware.num_gpus for m in moments]
        rows.append(["all ranks of a machine", "", *map(gib, of_all)])
    loading = gib(memory.loading_bytes)
    return [*grid(rows, num_left=2), f"while models are loaded, a machine's CPU holds up to {loading} GiB"]


def _item_rows(run: Run, columns: Sequence[dict[tuple[str, str], float]]) -> list[list[str]]:
    """Return a row for each item that is worth a digit somewhere, role by role."""
    rows = []
    for role in (*(role.name for role in run.roles), "all"):
        name = {"all": ""}.get(role, role)
        for key in dict.fromkeys(key for held in columns for key in held if key[0] == role):
            cells = [gib(held.get(key, 0.0)) for held in columns]
            if any(cell not in ("-", "0.00") for cell in cells):
                rows.append([name, key[1], *cells])
                name = ""
    return rows


def change_text(changes: Sequence[Change]) -> str:
    """Return the changes as flags."""
    flags: dict[str, Any] = {}
    for change in changes:
        flags |= change.flags
    return " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in flags.items())


def verdict_lines(run: Run, memory: MemoryPlan, suggestion: Suggestion | None) -> list[str]:
    """Say whether it fits, and what would make it."""
    peak = memory.peak
    what = f"{peak.phase}, {peak.verb}" if peak.verb in TRAINING else f"{peak.phase} {peak.role}".strip()
    if memory.fits:
        return [f"fits: at the peak, {what}, {gib(memory.left)} GiB are left"]
    if memory.left < 0:
        largest = sorted(peak.gpu.items(), key=lambda pair: -pair[1])[:3]
        items = ", ".join(f"{role}'s {item} {gib(num_bytes)}" for (role, item), num_bytes in largest)
        lines = [f"does not fit: {what} takes {gib(peak.total)} GiB, {gib(-memory.left)} too many"]
        lines.append(f"the largest: {items}")
    else:
        known, needed = run.hardware.cpu_memory_bytes, max(memory.cpu_peak, memory.loading_bytes)
        lines = [f"does not fit: a machine's CPU memory, {gib(needed)} GiB of {gib(known)}"]
    if suggestion is None:
        return [*lines, f"no {MOST_CHANGES} changes together make it fit: take a smaller model"]
    costs = "; ".join(dict.fromkeys(change.cost for change in suggestion.changes))
    lines.append(f"change: {change_text(suggestion.changes)}")
    return [*lines, f"        leaves {gib(suggestion.left)} GiB; {costs}"]


def traffic_lines(run: Run, traffic: TrafficPlan) -> list[str]:
    """Show the time of each phase, what bounds it, and what a rank receives in it."""
    rows = [["time of a step", "bound by", "seconds", "share", "GiB in machine", "GiB from others"]]
    for name, cost in traffic.phases.items():
        if cost.total:
            share = f"{cost.total / traffic.seconds:.0%}"
            received = [gib(cost.intra_bytes), gib(cost.inter_bytes)]
            rows.append([name, cost.bound, f"{cost.total:.3g}", share, *received])
    rows.append(["all", "", f"{traffic.seconds:.3g}", "", "", ""])
    what = "response tokens" if run.actor else "tokens"
    speed = traffic.tokens_per_second
    of_rank = speed / run.num_ranks
    lines = grid(rows, num_left=2)
    lines.append(f"{traffic.num_tokens:,.0f} {what} a step, {speed:,.0f} a second, {of_rank:,.0f} a rank")
    spread = strided_group(run.hardware, run.tp_size).num_nodes
    if spread > 1:
        lines.append(
            f"note: the {run.tp_size} ranks of a replica stand on {spread:g} machines (a stride of N/t)"
        )
    return lines


def assumption_lines(run: Run) -> list[str]:
    """Name everything that the figures rest on."""
    args = run.args
    by_kernel = "without a mask (flash-attn)" if run.is_flash else "torch's, with a mask of length x length"
    lines = [
        *hardware_lines(args, run.hardware),
        "times are what these rates allow: launches, sampling, data and stragglers come on top",
        f"sequences are full: {run.length} tokens; a pass has {run.tokens_per_pass:,}, and an optimizer step "
        f"passes: {run.num_micro_batches}",
        f"attention {by_kernel}; activations are counted on the model's own layers",
        "ZeRO 3 gathers and reduces beside the arithmetic, lower stages after it",
    ]
    for role in run.roles:
        zero = run.zero(role)
        if role.is_trained and role.zero_stage:
            kept = f", reuse distance {zero.stage3_max_reuse_distance:.2g}" if role.is_sharded else ""
            bucket = f"gradient bucket {zero.reduce_bucket_size:.2g}"
            lines.append(f"ZeRO {role.zero_stage} of the {role.name}, in elements: {bucket}{kept}")
    if run.actor:
        again = "are computed again" if is_recomputed(run) else "are the sampler's"
        how = "gathered layer by layer" if run.gathers_by_layer else f"by replicas of {run.tp_size}"
        lines += [
            f"generation {how}: {run.num_slots} sequences at a time, slots of {run.length} tokens",
            f"log-probabilities at rollout {again} (--old_logprobs {args.old_logprobs})",
            "no text for --unsupervised_dataset_name, no evaluation, no reward but the model's",
        ]
    return ["assumed", *(f"  {line}" for line in lines)]


def as_object(run: Run, memory: MemoryPlan, traffic: TrafficPlan, found: Suggestion | None) -> dict[str, Any]:
    """Return the plan for programs; bytes of a rank, seconds of a step."""
    moments = [
        {
            "phase": m.phase,
            "role": m.role,
            "verb": m.verb,
            "gpu": {f"{role} {item}": num_bytes for (role, item), num_bytes in m.gpu.items()},
            "cpu": {f"{role} {item}": num_bytes for (role, item), num_bytes in m.cpu.items()},
        }
        for m in memory.moments
    ]
    peak = {"phase": memory.peak.phase, "role": memory.peak.role, "verb": memory.peak.verb}
    flags = [change.flags for change in found.changes] if found else None
    return {
        "name": "plan",
        "flags": asdict(run.args),
        "dtype": run.dtype,
        "hardware": asdict(run.hardware),
        "parameters": {r.name: asdict(r.model.counts(r.lora)) for r in run.roles},
        "memory": {"fits": memory.fits, "left": memory.left, "peak": peak, "moments": moments},
        "suggestion": {"changes": flags, "left": found.left} if found else None,
        "step_seconds": traffic.seconds,
        "tokens_per_second": traffic.tokens_per_second,
        "phases": {name: asdict(cost) | {"bound": cost.bound} for name, cost in traffic.phases.items()},
    }


if __name__ == "__main__":
    run_tool(main)
