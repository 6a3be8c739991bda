"""Whether a run fits into its machines, which flag to change where it does not, and what ranks send.

python -m tools.plan --stage 3 --actor_model_name_or_path SFT --critic_model_name_or_path REWARD \\
    --actor_zero_stage 3 --enable_hybrid_engine --gpu a100-80g --num_gpus 8

The flags are those of the step, and the machines'. Nothing is loaded and no GPU is needed: figures are worked
out from the models' configurations (`memory_plan.py`, `traffic_plan.py`). Exit code 1 where it does not fit.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict

from common.flags.args import Problems
from common.programs import startup
from tools.memory_plan import TRAINING, Holdings, MemoryPlan
from tools.plan_changes import apply, find_changes
from tools.planned_run import PlanArguments, Run, read_run
from tools.step_flags import STEP_NAMES, parse_step_args
from tools.terminal import run_tool
from tools.traffic_plan import Phase, is_recomputed, plan_traffic


def main(argv: Sequence[str] | None = None) -> None:
    """Check the flags, plan, print; exit code 1 where the run does not fit, 2 where the flags are wrong."""
    startup.quiet_libraries()
    problems = Problems()
    args = parse_step_args(PlanArguments, argv, description=__doc__.splitlines()[0], problems=problems)
    run = read_run(args, problems)
    memory = MemoryPlan(run)
    sections = [head_lines(run), memory_lines(run, memory), verdict_lines(run, memory)]
    sections += [traffic_lines(plan_traffic(run)), assumption_lines(run)]
    print("\n\n".join("\n".join(lines) for lines in sections))
    sys.stdout.flush()
    if not memory.fits:
        raise SystemExit(1)


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
    args = run.args
    machines = f"{args.num_nodes} machines of " if args.num_nodes > 1 else ""
    rows = [["role", "family", "parameters", "trained", "layers", "hidden", "ZeRO"]]
    for role in run.roles:
        model = role.model
        family = model.config.model_type + (", adapters off" if role.is_adapter_off else "")
        trained = count_text(model.num_trained) if role.is_trained else "-"
        sizes = [model.num_layers, model.hidden_size, role.zero.stage]
        rows.append([role.name, family, count_text(model.num_params), trained, *map(str, sizes)])
    step = "step 2, DPO" if args.stage == 2 and args.loss == "dpo" else STEP_NAMES[args.stage]
    title = f"{step}, on {machines}{args.num_gpus} x {args.gpu}, {run.dtype}"
    return [title, "", *grid(rows, num_left=2)]


def memory_lines(run: Run, memory: MemoryPlan) -> list[str]:
    """Show what a rank holds in each phase, and on its CPU."""
    moments = [memory.of_phase(phase) for phase in dict.fromkeys(m.phase for m in memory.moments)]
    size = run.memory_bytes
    title = f"{'' if run.is_cpu else 'GPU '}memory of a rank, GiB"
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
        of_all = [sum(m.cpu.values()) * run.args.num_gpus for m in moments]
        rows.append(["all ranks of a machine", "", *map(gib, of_all)])
    loading = gib(memory.loading)
    return [*grid(rows, num_left=2), f"while models are loaded, a machine's CPU holds up to {loading} GiB"]


def _item_rows(run: Run, columns: Sequence[Holdings]) -> list[list[str]]:
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


def verdict_lines(run: Run, memory: MemoryPlan) -> list[str]:
    """Say whether it fits, and what would make it."""
    peak = memory.peak
    what = f"{peak.phase}, {peak.verb}" if peak.verb in TRAINING else f"{peak.phase} {peak.role}".strip()
    if memory.fits:
        return [f"fits: at the peak, {what}, {gib(memory.left)} GiB are left"]
    if memory.left < 0:
        verdict = f"does not fit: {what} takes {gib(peak.total)} GiB, {gib(-memory.left)} too many"
    else:
        needed, known = max(memory.cpu_peak, memory.loading), run.args.cpu_memory_gib
        verdict = f"does not fit: a machine's CPU memory, {gib(needed)} GiB of {known:.2f}"
    changes = find_changes(run.args, run.models)
    if changes is None:
        return [verdict, "no changes together make it fit: take a smaller model"]
    left = MemoryPlan(Run(apply(run.args, changes), run.models)).left
    flags = {name: value for change in changes for name, value in change.flags.items()}
    words = [f"--{name}" if value is True else f"--{name} {value}" for name, value in flags.items()]
    costs = "; ".join(dict.fromkeys(change.cost for change in changes))
    return [verdict, f"change: {' '.join(words)}", f"        leaves {gib(left)} GiB; {costs}"]


def traffic_lines(phases: dict[str, Phase]) -> list[str]:
    """Show what a rank receives in each phase of a step."""
    rows = [["a rank receives in a step, GiB", "in its machine", "from others", "from and to the CPU"]]
    for name, phase in phases.items():
        rows.append([name, *map(gib, asdict(phase).values())])
    return grid(rows)


def assumption_lines(run: Run) -> list[str]:
    """Name what the figures rest on."""
    args = run.args
    cpu = f"{args.cpu_memory_gib:g} GiB" if args.cpu_memory_gib else "not known, so not checked"
    by_kernel = "without a mask (flash-attn)" if run.is_flash else "torch's, with a mask of length x length"
    lines = [
        f"reserved of a device {run.device.reserved_gib:g} GiB; CPU memory {cpu}",
        f"sequences are full: {run.length} tokens; a pass has {run.tokens_per_pass:,}, and an optimizer step "
        f"passes: {run.num_micro_batches}",
        f"attention {by_kernel}",
    ]
    if run.actor:
        again = "are computed again" if is_recomputed(run) else "are the sampler's"
        how = "gathered layer by layer" if run.gathers_by_layer else f"by replicas of {run.tp_size}"
        lines += [
            f"generation {how}: {run.num_slots} sequences at a time, slots of {run.length} tokens",
            f"log-probabilities at rollout {again} (--old_logprobs {args.old_logprobs})",
            "no unsupervised text, no evaluation, no reward but models'",
        ]
    return ["assumed", *(f"  {line}" for line in lines)]


if __name__ == "__main__":
    run_tool(main)
