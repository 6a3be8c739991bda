"""A causal LM cut for tensor-parallel generation, on ranks of this machine, against the whole model.

The ranks are processes on the CPU, one thread each. They load the model one after another: memory holds one
whole copy and the slices at most.

# S rows, T tokens of the longest, V vocabulary
"""

import gc
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing, nn

from common.data.packed_batch import pad_rows
from common.data.plugins import import_plugins
from common.flags.args import Problems
from common.generation.inference_module import cut_module
from common.generation.tp_plans import NoPlan, build_cuts, planned_linears, working_tp_sizes
from common.models.loading import ModelOptions, build_position_ids, forward_accepts, load_causal_lm
from common.programs import startup
from tools.findings import Finding, tolerance_of

MAX_DEFAULT_SIZE = 4
_WHY = "so step 3 generates at --inference_tp_size"
_MAX_ROWS = 4  # of which logits are held whole


@dataclass(frozen=True)
class RankJob:
    """What the ranks load and compute."""

    options: ModelOptions
    num_tokens: int
    rows: list[list[int]]
    plugins: list[str]
    limit_seconds: float


@dataclass(frozen=True)
class RankReport:
    """What the ranks of one size found."""

    difference: float  # of logits, prompts and a cached step after them
    largest: float  # of the whole model's logits, without sign
    are_equal: bool  # all ranks have the same bits


def plan_slices(model: nn.Module, tp_sizes: Sequence[int]) -> tuple[list[Finding], dict[int, float]]:
    """Return what is wrong with the plan, and for each size to run the share of bytes that is not cut.

    Without `tp_sizes`: those up to MAX_DEFAULT_SIZE that work.
    """
    is_asked = bool(tp_sizes)
    try:
        planned_linears(model)
    except NoPlan as error:
        reason = str(error).split("; use --inference_tp_size")[0]
        text = (
            f"no plan: generation uses t = 1 ({reason}); to write one, use register_tp_plan in a module that "
            '--plugins names: CONTRIBUTING.md, "Add a tensor-parallel plan"'
        )
        # Who asked for a size must not read "ok" at the end.
        return [Finding("tensor parallel", text, False if max(tp_sizes, default=1) > 1 else None)], {}
    working = working_tp_sizes(model)
    if not is_asked:
        tp_sizes = [size for size in working if size <= MAX_DEFAULT_SIZE]
    findings, uncut = [], {}
    for tp_size in tp_sizes:
        try:
            cuts = build_cuts(model, tp_size)
        except ValueError as error:
            findings.append(Finding(f"tensor parallel {tp_size}", str(error), is_ok=False))
            continue
        if tp_size > 1:
            parameters = dict(model.named_parameters())
            whole = sum(p.nbytes for name, p in parameters.items() if name not in cuts)
            uncut[tp_size] = whole / sum(p.nbytes for p in parameters.values())
    if not uncut and not findings:
        sizes = ", ".join(map(str, working))
        findings.append(Finding("tensor parallel", f"nothing is cut at t = 1; sizes that work: {sizes}"))
    return findings, uncut


def check_ranks(job: RankJob, tp_size: int, uncut: float) -> list[Finding]:
    """Return the finding on one size."""
    name = f"tensor parallel {tp_size}"
    try:
        report = run_ranks(job, tp_size)
    except (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException) as error:
        last = str(error).strip().splitlines()[-1]  # of a rank's traceback: what it raised
        return [Finding(name, f"a rank failed: {last}", is_ok=False, why=_WHY)]
    except TimeoutError:
        text = f"no answer after {job.limit_seconds / 60:g} minutes; raise --tp_timeout_minutes"
        return [Finding(name, text, is_ok=False, why=_WHY)]
    tolerance = tolerance_of(job.options.dtype, report.largest)
    more = f"{uncut:.1%} of the bytes are whole on every rank"
    if not report.are_equal:
        return [Finding(name, f"ranks differ among themselves; {more}", is_ok=False, why=_WHY)]
    text = f"largest difference {report.difference:.1e}, at most {tolerance:.1e}; {more}"
    return [Finding(name, text, report.difference <= tolerance, _WHY)]


def run_ranks(job: RankJob, tp_size: int) -> RankReport:
    """Start the ranks, wait for them, return what they found.

    Raises:
        ProcessRaisedException, ProcessExitedException: a rank failed; TimeoutError: they took too long.
    """
    with tempfile.TemporaryDirectory(prefix="triptych_ranks_") as folder:
        # A process that has done nothing but the imports, seconds of them, makes the ranks of all sizes.
        multiprocessing.set_forkserver_preload([__name__])
        context = multiprocessing.start_processes(
            run_rank, (tp_size, job, folder), nprocs=tp_size, join=False, start_method="forkserver"
        )
        deadline = time.monotonic() + job.limit_seconds
        try:
            while not context.join(timeout=max(deadline - time.monotonic(), 0)):
                if time.monotonic() >= deadline:
                    raise TimeoutError
        finally:
            for process in context.processes:  # a rank may wait for ever for one that is gone
                process.kill()
                process.join()
        return RankReport(**json.loads(Path(folder, "report.json").read_text()))


def run_rank(rank: int, tp_size: int, job: RankJob, folder: str) -> None:
    """Compute with one rank's slices; the first rank writes the report. Every rank must call this."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # there may be fewer GPUs than ranks
    torch.set_num_threads(1)
    startup.quiet_libraries()
    import_plugins(job.plugins, Problems())
    store = dist.FileStore(str(Path(folder, "store")), tp_size)
    limit = timedelta(seconds=job.limit_seconds)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=tp_size, timeout=limit)
    with torch.inference_mode():
        report = compare_with_whole(job, rank, tp_size)
    if rank == 0:
        Path(folder, "report.json").write_text(json.dumps(asdict(report)))
    dist.destroy_process_group()


def compare_with_whole(job: RankJob, rank: int, tp_size: int) -> RankReport:
    """Return how this rank's logits differ from the whole model's. Every rank must call this."""
    model, expected = None, torch.empty(0)
    for turn in range(tp_size):  # whole models one at a time
        if turn == rank:
            model = load_causal_lm(job.options, job.num_tokens).eval()
            if rank == 0:
                expected = compute(model, job.rows)
            cut_module(model, build_cuts(model, tp_size), rank, tp_size, None)
            gc.collect()
        dist.barrier()
    found = compute(model, job.rows)
    first = found.clone()
    dist.broadcast(first, src=0)
    is_equal = torch.tensor(int(found.equal(first)))
    dist.all_reduce(is_equal, dist.ReduceOp.MIN)
    if rank != 0:
        return RankReport(0.0, 0.0, bool(is_equal))
    difference = float((found - expected).abs().max())
    return RankReport(difference, float(expected.abs().max()), bool(is_equal))


def compute(model: nn.Module, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return logits (N, V) fp32 of left-padded rows, the last token of each read with the others cached."""
    ids, mask = pad_rows(rows[:_MAX_ROWS], 0, on_left=True)  # (S, T)
    positions = build_position_ids(mask)
    past, logits, last = None, [], ids.shape[1] - 1
    for part in (slice(0, last), slice(last, last + 1)):
        inputs: dict[str, Any] = {"position_ids": positions[:, part]}
        output = model(
            input_ids=ids[:, part],
            attention_mask=mask[:, : part.stop].long(),
            past_key_values=past,
            use_cache=True,
            **(inputs if forward_accepts(model, "position_ids") else {}),
        )
        past = output.past_key_values
        logits.append(output.logits[mask[:, part]].float())
    return torch.cat(logits)
