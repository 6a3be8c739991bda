"""Code that the single-model programs (steps 1 and 2) share: checks, batches, engine, and the loop over
epochs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from common.data.global_batches import GlobalBatches, evaluation_batches
from common.data.packed_batch import PackedBatch
from common.data.stage_datasets import StageData
from common.engine.ds_config import build_engine, config_of
from common.engine.engine_step import LossTerm, compute_gradients, take_steps
from common.flags.args import Problems
from common.models.four_bit import refusals
from common.models.saved_adapters import is_adapter
from common.programs import conversation_form, model_checks, startup
from common.programs.startup import Start
from common.programs.training_loop import (
    EVAL_STEP,
    build_logger,
    facts_at,
    run_steps,
    runs_packed,
    save_model,
)
from common.ranks import distributed, watchdog
from common.ranks.step_costs import COSTS
from common.runs.run import IntervalClock, Run
from common.runs.run_logger import RunLogger
from common.runs.saved_state import EngineState, Stateful

# Larger passes are no faster on a CPU (bench_train.py: 1,024 to 16,384 tokens are alike), and take memory.
CPU_PASS_TOKENS = 2048


def begin(
    flags: type,
    stage: int,
    description: str,
    argv: Sequence[str] | None,
    check: Callable[[Any, Any, Problems], None] | None = None,
) -> tuple[Start, StageData | None]:
    """Start of step `stage` (1 or 2) from its command line, and its data: see `startup.enter`.

    `argv` defaults to sys.argv[1:]. `check(configuration, flags, problems)` adds a step's own problems.
    Prints all problems and exits if there are any.
    """
    start = startup.read_flags(flags, stage, description, argv)
    args, problems, flag = start.args, start.problems, "--model_name_or_path"
    config = startup.check_model(flag, args.model_name_or_path, args, problems)
    is_ranker = getattr(args, "kind", "") == "reward"
    model_checks.check_family(flag, config, args, problems, is_ranker=is_ranker)
    model_checks.check_length(config, args.max_seq_len, f"--max_seq_len {args.max_seq_len}", problems)
    if check and config:
        check(config, args, problems)
    if args.lora_dim:
        model_checks.check_lora("--lora_module_name", config, args.lora_module_name, args, problems)
    for refusal in refusals(args):
        problems.add(refusal)
    start.tokenizer = config and startup.check_tokenizer(flag, args.model_name_or_path, args, problems)
    lora_flag = "--lora_dim" if args.lora_dim or is_adapter(args.model_name_or_path) else ""
    start.notes += model_checks.check_new_tokens(
        flag, config, start.tokenizer, args, problems, lora_flag=lora_flag
    )
    startup.finish_checks(start, flag)
    rows = args.per_device_train_batch_size
    start.ds_config = config_of(args, zero_stage=args.zero_stage, offload=args.offload, micro_batch_size=rows)
    if is_adapter(args.model_name_or_path) or args.lora_dim or getattr(args, "kind", "reward") != "reward":
        start.frozen[flag] = args.model_name_or_path
    return start, startup.enter(start)


def build_global_batches(
    args: Any,
    dataset: Any,
    collate: Callable,
    columns: Sequence[str],
    shared_length: Callable[[dict[str, Any]], int] | None = None,
    **groups: Any,
) -> GlobalBatches:
    """Training batches of this rank. Raises ValueError if the data do not fill one. `groups` is passed to
    GlobalBatches.

    `columns` are the sequences of a row; `shared_length` returns the length of their common prefix, if that
    is computed once.
    """
    max_tokens = args.max_tokens_per_micro_batch
    if args.packed and not max_tokens:
        max_tokens = args.per_device_train_batch_size * len(columns) * args.max_seq_len
    shared: Any = ()
    if max_tokens and shared_length:
        shared = np.fromiter(map(shared_length, dataset), np.int32, len(dataset))
    return GlobalBatches(
        dataset,
        collate,
        rows_per_micro_batch=args.per_device_train_batch_size,
        accumulation=args.gradient_accumulation_steps,
        seed=args.seed,
        row_lengths=np.stack([dataset.lengths(column) for column in columns], axis=1).astype(np.int32),
        group_by_length=args.group_by_length,
        max_tokens=max_tokens,
        shared_lengths=shared,
        **groups,
    )


class Trainer:
    """Base trainer: minimises one loss, averaged over the global batch."""

    kind: str  # what the names of its numbers begin with
    columns: tuple[str, ...]  # the numbers of the console's table
    fact = "eval"  # what an export's metadata calls the last evaluation

    def __init__(self, engine: Any, args: Any, *, is_packed: bool, logger: RunLogger) -> None:
        self.engine, self.args, self.is_packed, self.logger = engine, args, is_packed, logger

    def compute_sums(self, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss of a micro-batch and statistics to log, summed over the items that `count` counts."""
        raise NotImplementedError

    def count(self, batch: PackedBatch) -> float:
        """Number of items that the loss is averaged over (rows)."""
        return len(batch)

    def judge(self, batches: Iterable[tuple[PackedBatch, torch.Tensor]]) -> dict[str, float]:
        """Metrics of held-out batches, each with a mask of rows that count. Every rank must call this."""
        raise NotImplementedError

    def prepare(self, micro_batches: list[PackedBatch]) -> None:
        """Precompute whatever the loss needs from all micro-batches of the step."""

    def train_step(self, step: int, micro_batches: list[PackedBatch]) -> None:
        """Make optimizer step `step` (from 1); log its metrics and speed.

        The token ids of micro-batches are keys that end in `_ids`. Every rank must call this.
        """
        COSTS.begin_step()
        self.prepare(micro_batches)
        term = LossTerm(f"{self.kind}/loss", micro_batches, self.compute_sums, self.count)
        (means,) = take_steps([compute_gradients(self.engine, [term])])
        speed = COSTS.end_step(distributed.world_size())
        columns = [column for batch in micro_batches for column in batch.data.items()]
        num_tokens = sum(len(tokens) for key, tokens in columns if key.endswith("_ids"))
        tokens_per_second = distributed.sum_float(float(num_tokens)) / speed["perf/step_seconds"]
        numbers = {name if "/" in name else f"{self.kind}/{name}": value for name, value in means.items()}
        self.logger.log(step, numbers | speed | {"perf/tokens_per_second": tokens_per_second})

    @torch.no_grad()
    def evaluate(self, step: int, batches: Iterable[tuple[PackedBatch, torch.Tensor]]) -> Any:
        """Compute, log and return the held-out metrics. Every rank must call this."""
        self.engine.eval()
        figures = self.judge(batches)
        self.logger.log_event(step, {f"{self.kind}/eval_{name}": value for name, value in figures.items()})
        return figures


def build_trainer(
    kind: type[Trainer], start: Start, model: nn.Module, batches: GlobalBatches, num_steps: int
) -> Trainer:
    """Build the trainer of a model. Tells the batches whether sequences are packed, and on a CPU cuts them
    into passes of CPU_PASS_TOKENS unless a flag sets the size of micro-batches.

    Every rank must call this.
    """
    args = start.args
    engine = build_engine(model, start.ds_config, args, num_steps)
    is_packed = runs_packed(args, model)
    batches.is_packed = is_packed
    longest = int(batches.row_lengths.sum(axis=1).max())
    is_large = batches.rows * longest > CPU_PASS_TOKENS
    if is_packed and is_large and not args.max_tokens_per_micro_batch and not distributed.has_gpu():
        batches.max_tokens = max(CPU_PASS_TOKENS, longest)
    columns = (*(f"{kind.kind}/{name}" for name in kind.columns), "perf/tokens_per_second")
    return kind(engine, args, is_packed=is_packed, logger=build_logger(args, columns, num_steps))


def train(
    start: Start,
    data: StageData,
    batches: GlobalBatches,
    trainer: Trainer,
    *,
    held_out: Any,
    parts: Mapping[str, Stateful] | None = None,
    prepare: Callable[[int], None] = lambda step: None,
) -> None:
    """Start or resume a run, train it to its end, and write the trained model and its adapter.

    `held_out` are the rows of an evaluation. `parts` of a checkpoint are saved with the model. `prepare` is
    called with the current step before the first one. Raises Stopped if the run is asked to stop,
    TooManyBadSteps if too many steps are skipped. Every rank must call this.
    """
    args, logger = start.args, trainer.logger
    rows = {"--per_device_train_batch_size x --gradient_accumulation_steps": batches.global_rows}
    parts = {"model": EngineState(trainer.engine)} | (parts or {})
    steps = len(batches)
    run = Run(args, start.earlier, logger, data, rows, parts, steps_per_epoch=steps, frozen=start.frozen)
    eval_clock = IntervalClock(args.eval_interval, len(batches))

    def evaluate(step: int) -> None:
        is_due = step == logger.num_steps or step % len(batches) == 0
        if not len(held_out) or not (is_due or eval_clock.is_due(step)):
            return
        some = evaluation_batches(
            held_out,
            batches.collate,
            rows_per_batch=args.per_device_eval_batch_size,
            max_batches=args.eval_iters,
        )
        with watchdog.phase("the evaluation", step, clock="evaluate"):
            run.facts |= {trainer.fact: trainer.evaluate(step, some), EVAL_STEP: step}

    with startup.as_problem(start.problems):
        run.begin()  # the first to write: the model is there
        prepare(run.step)
    if run.step == 0:
        for line in data.report.lines():
            logger.note(line)
        evaluate(0)
        run.point(0)
    batches.num_drawn = run.step

    def train_step(step: int) -> None:
        with watchdog.phase("the training step", step):
            trainer.train_step(step, next(batches))
        run.num_updates += 1

    run_steps(run, train_step, evaluate)
    if args.output_dir:
        metadata = {"step": trainer.kind} | conversation_form.describe_form(args)
        metadata |= facts_at(run.step, run.facts)
        save_model(start, logger, trainer.engine.module, metadata)
    logger.close()
    run.finish()
