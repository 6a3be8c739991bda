"""Code that the single-model programs (steps 1 and 2) share: checks, batches, engine, and the loop over
epochs."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from common.data.global_batches import EpochOrder, GlobalBatches, Groups, RowPlan, evaluation_batches
from common.data.micro_batches import CPU_PASS_TOKENS, TokenPlan
from common.data.packed_batch import PackedBatch
from common.data.stage_datasets import StageData
from common.engine.ds_config import build_engine, config_of
from common.engine.engine_step import LossTerm, compute_gradients, take_steps
from common.flags.args import Problems
from common.models.four_bit import incompatible_flags
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
from common.ranks.passes import watched
from common.ranks.step_costs import COSTS
from common.runs.run import IntervalClock, Run
from common.runs.run_files import RunResult
from common.runs.run_logger import RunLogger
from common.runs.saved_state import EngineState, Stateful


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
    args = start.args
    problems = start.problems
    flag = "--model_name_or_path"
    config = model_checks.check_model(flag, args.model_name_or_path, args, problems)
    is_ranker = getattr(args, "kind", "") == "reward"
    model_checks.check_family(flag, config, args, problems, is_ranker=is_ranker)
    model_checks.check_length(config, args.max_seq_len, f"--max_seq_len {args.max_seq_len}", problems)
    if check and config:
        check(config, args, problems)
    if args.lora_dim:
        model_checks.check_lora("", config, args, args, problems)
    for problem in incompatible_flags(args):
        problems.add(problem)
    start.tokenizer = config and model_checks.check_tokenizer(flag, args.model_name_or_path, args, problems)
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


ROWS_OF_EVAL_ITERS = 16  # that --eval_iters counts as a batch where no batch size is set


class TrainingRows:
    """Training rows of a model: their order, and their batches, which depend on how the model runs them.

    `lengths` are those of each row's sequences (sequences, rows); `shared_length` returns the length of a
    row's common prefix, if that is computed once. Raises ValueError if the rows do not fill a global batch,
    or one alone is above --max_tokens_per_micro_batch.
    """

    def __init__(
        self,
        args: Any,
        rows: Any,
        collate: Callable,
        lengths: Sequence[Sequence[int]],
        groups: Groups | None = None,
        shared_length: Callable[[dict[str, Any]], int] | None = None,
    ) -> None:
        self.args = args
        self.rows = rows
        self.collate = collate
        row_lengths = np.stack(lengths, axis=1).astype(np.int32)
        max_tokens = args.max_tokens_per_micro_batch
        if args.packed and not max_tokens:
            max_tokens = args.per_device_train_batch_size * len(lengths) * args.max_seq_len
        shared = np.empty(0, np.int32)
        if max_tokens and shared_length:
            read_rows = watched(rows, len(rows), "rows")
            shared = np.fromiter(map(shared_length, read_rows), np.int32, len(rows))
        conversations = groups.group_of if groups and len(lengths) == 1 else ()  # rows of a conversation
        self.token_plan = TokenPlan(row_lengths, max_tokens, shared_lengths=shared, groups=conversations)
        if max_tokens and len(rows):
            self.token_plan.check_longest()
        self.row_plan = RowPlan(args.per_device_train_batch_size, args.gradient_accumulation_steps)
        longest = row_lengths.max(axis=1) if args.group_by_length else None
        self.order = EpochOrder(len(rows), self.row_plan, args.seed, groups, longest)

    def batches(self, is_packed: bool) -> GlobalBatches:
        """Training batches of this rank, for a model that runs sequences packed or padded.

        On a CPU large steps are split into passes of CPU_PASS_TOKENS unless a flag sets their size.
        """
        plan = replace(self.token_plan, is_packed=is_packed)
        costs = plan.row_lengths.sum(axis=1)
        if not is_packed:
            costs = plan.row_lengths.max(axis=1) * plan.row_lengths.shape[1]
        longest = int(costs.max())
        is_large = self.row_plan.rows_per_micro_batch * longest > CPU_PASS_TOKENS
        is_free = not self.args.max_tokens_per_micro_batch and not distributed.has_gpu()
        if is_large and is_free:
            plan = replace(plan, max_tokens=max(CPU_PASS_TOKENS, longest))
        return GlobalBatches(self.rows, self.collate, self.order, plan if plan.max_tokens else self.row_plan)


class Trainer:
    """Base trainer: minimises one loss, averaged over the global batch."""

    kind: str  # prefix of the metrics' names
    columns: tuple[str, ...]  # metrics of the console line
    metadata_key = "eval"  # key of the last evaluation in an export's metadata

    def __init__(self, engine: Any, args: Any, *, is_packed: bool, logger: RunLogger) -> None:
        self.engine = engine
        self.args = args
        self.is_packed = is_packed
        self.logger = logger

    def compute_sums(self, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss of a micro-batch and statistics to log, summed over the items that `count` counts."""
        raise NotImplementedError

    def count(self, batch: PackedBatch) -> float:
        """Number of items that the loss is averaged over (rows)."""
        return len(batch)

    def evaluate_batches(self, batches: Iterable[tuple[PackedBatch, torch.Tensor]]) -> dict[str, float]:
        """Metrics of held-out batches, each with a mask of rows that count. Every rank must call this."""
        raise NotImplementedError

    def prepare(self, micro_batches: list[PackedBatch]) -> None:
        """Precompute whatever the loss needs from all micro-batches of the step."""

    def train_step(self, step: int, micro_batches: list[PackedBatch]) -> None:
        """Take optimizer step `step` (from 1); log its metrics and speed.

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
        figures = self.evaluate_batches(batches)
        self.logger.log_event(step, {f"{self.kind}/eval_{name}": value for name, value in figures.items()})
        return figures


def build_trainer(kind: type[Trainer], start: Start, model: nn.Module, num_steps: int) -> Trainer:
    """Build the trainer of a model. Every rank must call this."""
    args = start.args
    engine = build_engine(model, start.ds_config, args, num_steps)
    columns = (*(f"{kind.kind}/{name}" for name in kind.columns), "perf/tokens_per_second")
    logger = build_logger(args, columns, num_steps)
    return kind(engine, args, is_packed=runs_packed(args, model), logger=logger)


def train(
    start: Start, data: StageData, rows: TrainingRows, trainer: Trainer, held_out: Any, reference: Any = None
) -> RunResult:
    """Start or resume a run, train it to its end, and write the trained model and its adapter; return its
    outcome.

    `held_out` are the rows of an evaluation. `reference` is saved in checkpoints with the model; before the
    first step it computes its log-probabilities of the rows. Raises Stopped after a request to stop,
    TooManyBadSteps if too many steps are skipped. Every rank must call this.
    """
    args = start.args
    logger = trainer.logger
    order = rows.order
    sizes = {"--per_device_train_batch_size x --gradient_accumulation_steps": order.global_rows}
    parts: dict[str, Stateful] = {"model": EngineState(trainer.engine)}
    if reference:
        parts["reference"] = reference
    run = Run(
        args, start.earlier, logger, data, sizes, parts, steps_per_epoch=len(order), frozen=start.frozen
    )
    eval_clock = IntervalClock(args.eval_interval, len(order))
    logger.time_left.expect(
        "evaluate",
        lambda step: step % len(order) == 0 or args.eval_interval.is_due(step, len(order), seconds=0),
    )

    def evaluate(step: int) -> None:
        is_due = step == logger.num_steps or step % len(order) == 0
        if not len(held_out) or not (is_due or eval_clock.is_due(step)):
            return
        size = args.per_device_eval_batch_size or args.per_device_train_batch_size
        most = args.eval_iters * (args.per_device_eval_batch_size or ROWS_OF_EVAL_ITERS)
        most *= distributed.world_size()
        eval_batches = evaluation_batches(held_out, rows.collate, rows_per_batch=size, max_rows=most)
        with run.stoppable(), watchdog.phase("the evaluation", step, clock="evaluate"):
            run.facts |= {trainer.metadata_key: trainer.evaluate(step, eval_batches), EVAL_STEP: step}
        run.facts["eval_rows"] = min(len(held_out), most or len(held_out))

    with startup.as_problem(start.problems):
        run.begin()  # first write to disk; the model has loaded
        if reference:
            needed = order.rows_until(logger.num_steps)
            with run.stoppable():
                reference.compute(trainer, needed, is_begun=run.step > 0)
    if run.step == 0:
        for line in data.report.lines():
            logger.note(line)
    batches = rows.batches(trainer.is_packed)
    batches.num_steps = run.step

    def train_step(step: int) -> None:
        with watchdog.phase("the training step", step):
            trainer.train_step(step, next(batches))
        run.num_updates += 1

    run_steps(run, train_step, evaluate)
    if args.output_dir:
        metadata = {"step": trainer.kind, "num_steps": run.step} | conversation_form.describe_form(args)
        metadata |= facts_at(run.step, run.facts)
        with run.stoppable():
            save_model(start, logger, trainer.engine.module, metadata)
    logger.close()
    logger.write_report()
    return run.finish()
