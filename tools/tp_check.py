"""A causal LM cut for tensor-parallel generation, on ranks of this machine, against the whole model.

The ranks are processes on the CPU, one thread each. They load the model one after another: memory holds one
whole copy and the slices at most.

# S rows, T tokens of the longest, V vocabulary
"""

import gc
import os
import tempfile
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing, nn

from common.data.packed_batch import pad_rows
from common.data.registry import import_plugins
from common.flags.args import Problems
from common.generation.inference_module import cut_module
from common.generation.tp_plans import NoPlan, build_cuts, planned_linears, working_tp_sizes
from common.models.loading import ModelOptions, build_position_ids, forward_accepts, load_causal_lm
from common.programs import startup
from tools.model_checks import Finding, compare, tolerance_of

MAX_DEFAULT_SIZE = 4
LIMIT = timedelta(minutes=20)  # that a rank waits for another one


def choose_sizes(model: nn.Module, tp_sizes: Sequence[int]) -> tuple[list[Finding], list[int]]:
    """Return what is wrong with the plan, and the sizes to run: without `tp_sizes` the smallest that work."""
    try:
        planned_linears(model)
    except NoPlan as error:
        # Who asked for a size must not read "ok" at the end.
        is_ok = False if max(tp_sizes, default=1) > 1 else None
        return [Finding("tensor parallel", f"no plan, generation uses t = 1: {error}", is_ok)], []
    working = working_tp_sizes(model)
    told = f"sizes that work for this model: {', '.join(map(str, working))}"
    asked = list(tp_sizes) or [size for size in working if size <= MAX_DEFAULT_SIZE]
    findings = [
        Finding(f"tensor parallel {size}", f"not so many; {told}", is_ok=False)
        for size in asked
        if size not in working
    ]
    if max(asked) == 1:
        findings = [Finding("tensor parallel", f"nothing is cut at t = 1; {told}")]
    return findings, [size for size in asked if size in working and size > 1]


def check_ranks(
    tp_size: int, options: ModelOptions, num_tokens: int, rows: list[list[int]], plugins: list[str]
) -> Iterator[Finding]:
    """Yield the finding on one size, whose ranks load the model that `load_causal_lm` has of these."""
    name, why = f"tensor parallel {tp_size}", "so step 3 generates at --inference_tp_size"
    with tempfile.TemporaryDirectory(prefix="triptych_ranks_") as folder:
        # A process that has done nothing but the imports, seconds of them, makes the ranks of all sizes.
        multiprocessing.set_forkserver_preload([__name__])
        job = (tp_size, options, num_tokens, rows, plugins, folder)
        try:  # one that fails ends the others
            multiprocessing.start_processes(run_rank, job, nprocs=tp_size, start_method="forkserver")
        except (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException) as error:
            last = str(error).strip().splitlines()[-1]  # of a rank's traceback: what it raised
            yield Finding(name, f"a rank failed: {last}", is_ok=False, why=why)
            return
        found, expected = torch.load(Path(folder, "logits.pt"), weights_only=True)
    yield compare(name, found, expected, tolerance_of(options.dtype, float(expected.abs().max())), why)


def run_rank(
    rank: int,
    tp_size: int,
    options: ModelOptions,
    num_tokens: int,
    rows: list[list[int]],
    plugins: list[str],
    folder: str,
) -> None:
    """Compute with one rank's slices; the first writes logits of the slices and of the whole model. Every
    rank must call this.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # there may be fewer GPUs than ranks
    torch.set_num_threads(1)
    startup.quiet_libraries()
    import_plugins(plugins, Problems())
    store = dist.FileStore(str(Path(folder, "store")), tp_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=tp_size, timeout=LIMIT)
    with torch.inference_mode():
        for turn in range(tp_size):  # whole models one at a time
            if turn == rank:
                model = load_causal_lm(options, num_tokens).eval()
                expected = compute(model, rows) if rank == 0 else None
                cut_module(model, build_cuts(model, tp_size), rank, tp_size, None)
                gc.collect()
            dist.barrier()
        found = compute(model, rows)
    if rank == 0:
        torch.save((found, expected), Path(folder, "logits.pt"))
    dist.destroy_process_group()


def compute(model: nn.Module, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return logits (N, V) fp32 of left-padded rows, the last token of each read with the others cached."""
    ids, mask = pad_rows(rows, 0, on_left=True)  # (S, T)
    positions = build_position_ids(mask)
    past, logits, last = None, [], ids.shape[1] - 1
    for part in (slice(0, last), slice(last, last + 1)):
        more = {"position_ids": positions[:, part]} if forward_accepts(model, "position_ids") else {}
        output = model(
            input_ids=ids[:, part],
            attention_mask=mask[:, : part.stop].long(),
            past_key_values=past,
            use_cache=True,
            **more,
        )
        past = output.past_key_values
        logits.append(output.logits[mask[:, part]].float())
    return torch.cat(logits)
