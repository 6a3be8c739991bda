"""What the single-model programs (steps 1 and 2) share: checks, batches, engine, and the loop over epochs."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.data.data_options import DataOptions, check_sources
from common.data.dialogue import Template
from common.data.global_batches import GlobalBatches, TokenBudget, evaluation_batches
from common.data.registry import import_plugins
from common.data.stage_datasets import StageData
from common.engine.ds_config import EngineOptions, build_config
from common.engine.engine_step import LossTerm, update_engine
from common.flags.args import Problems, parse_args
from common.models.loading import DTYPES, ModelOptions, load_causal_lm, plain_model
from common.models.lora import LoraOptions, add_lora
from common.models.model_flops import own_peak_flops
from common.models.policy_model import PolicyModel
from common.models.value_model import ValueModel, load_value_model
from common.models.varlen_attention import takes_packed
from common.programs import startup
from common.ranks import distributed, watchdog
from common.ranks.failures import StepRefused
from common.ranks.step_costs import COSTS
from common.runs.checkpoints import checkpoint_name
from common.runs.engine_state import EngineState
from common.runs.export import save_adapter, save_export
from common.runs.resume import EarlierRun, find_run
from common.runs.run import Run
from common.runs.run_logger import RunLogger
from common.runs.saved_state import Progress, Stateful
from common.runs.trackers import build_trackers


@dataclass(frozen=True)
class Start:
    """What is known when all of a command line is right: no model is loaded yet."""

    args: Any
    options: DataOptions
    tokenizer: Any
    template: Template
    earlier: EarlierRun
    ds_config: dict[str, Any]
    problems: Problems


def begin(flags: type, stage: int, description: str) -> Start | None:
    """Return the start of step `stage` (1 or 2) by its command line; None where there is nothing to do.

    Leaves with all problems where there are any.
    """
    problems = Problems()
    args = parse_args(flags, description=description, problems=problems)
    options = DataOptions.of(args, stage)
    import_plugins(args.plugins, problems)
    startup.check_run(args, {"--zero_stage": args.zero_stage}, problems)
    flag, name = "--model_name_or_path", args.model_name_or_path
    config = startup.check_model(flag, name, args, problems)
    startup.check_length(config, args.max_seq_len, f"--max_seq_len {args.max_seq_len}", problems)
    if args.lora_dim:
        startup.check_lora("--lora_module_name", config, args.lora_module_name, args, problems)
    tokenizer = config and startup.check_tokenizer(flag, name, args, problems)
    for problem in check_sources(options):
        problems.add(problem)
    template, notes = startup.find_template(flag, name, args, tokenizer, problems)
    earlier = find_run(args, problems)
    problems.exit_if_any()
    startup.print_notes(args)
    startup.print_note(*notes)
    ds_config = build_config(
        EngineOptions.of(
            args,
            zero_stage=args.zero_stage,
            offload=args.offload,
            micro_batch_size=args.per_device_train_batch_size,
        )
    )
    start = Start(args, options, tokenizer, template, earlier, ds_config, problems)
    is_run = startup.enter(args, options, template, earlier, problems, deepspeed_config_resolved=ds_config)
    return start if is_run else None


def build_global_batches(
    args: Any, dataset: Any, collate: Callable, read_lengths: Callable[[], list[tuple[int, ...]]]
) -> GlobalBatches:
    """Return the training batches of this rank; ValueError when the data do not fill one.

    `read_lengths` gives the lengths of every row's sequences; it is called where something depends on them.
    """
    is_cut_by_tokens = args.packed or args.max_tokens_per_micro_batch
    row_lengths = read_lengths() if is_cut_by_tokens or args.group_by_length else []
    budget = None
    if is_cut_by_tokens:
        num_sequences = max((len(lengths) for lengths in row_lengths), default=1)
        most = args.per_device_train_batch_size * num_sequences * args.max_seq_len
        budget = TokenBudget(row_lengths, args.max_tokens_per_micro_batch or most)
    return GlobalBatches(
        dataset,
        collate,
        rows_per_micro_batch=args.per_device_train_batch_size,
        accumulation=args.gradient_accumulation_steps,
        rank=distributed.rank(),
        world_size=distributed.world_size(),
        seed=args.seed,
        group_lengths=[max(lengths) for lengths in row_lengths] if args.group_by_length else None,
        budget=budget,
    )


def use_layout(batches: GlobalBatches, model: nn.Module, args: Any) -> bool:
    """Return whether sequences stand end to end in this model's passes, and let the batches know."""
    is_packed = args.packed and takes_packed(plain_model(model))
    if batches.budget:
        batches.budget.is_packed = is_packed
    return is_packed


def load_policy(
    args: Any, ds_config: dict[str, Any], num_tokens: int, *, dropout: float | None
) -> PolicyModel:
    """Return the chat model that a single-model program trains. Every rank must call this."""
    options = ModelOptions.of(args, args, ds_config, dropout=dropout)
    model = load_causal_lm(options, num_tokens)
    return PolicyModel(add_lora(model, LoraOptions.of(args, args), args.seed), num_valid_tokens=num_tokens)


def load_ranker(
    args: Any, ds_config: dict[str, Any], num_tokens: int, *, dropout: float | None
) -> ValueModel:
    """Return the reward model that a single-model program trains. Every rank must call this."""
    options = ModelOptions.of(args, args, ds_config, dropout=dropout)
    return load_value_model(options, num_tokens, LoraOptions.of(args, args), seed=args.seed)


def count_steps(args: Any, steps_per_epoch: int) -> int:
    """Return the steps of the whole run: epochs, or fewer by --max_train_steps."""
    num_steps = args.num_train_epochs * steps_per_epoch
    return min(num_steps, args.max_train_steps) if args.max_train_steps else num_steps


def train_and_log(step: int, engine: Any, term: LossTerm, logger: RunLogger) -> float:
    """Do optimizer step `step` (from 1) by the mean of one loss, log it and its speed, return the loss.

    The token ids of the term's micro-batches are keys that end in `_ids`. Every rank must call this.
    """
    COSTS.begin_step()
    engine.train()
    means = update_engine(engine, [term])
    speed = COSTS.end_step(distributed.world_size())
    columns = [column for batch in term.micro_batches for column in batch.data.items()]
    num_tokens = sum(len(tokens) for key, tokens in columns if key.endswith("_ids"))
    speed["perf/tokens_per_second"] = distributed.sum_float(float(num_tokens)) / speed["perf/step_seconds"]
    kind = term.name.split("/")[0]
    numbers = {name if "/" in name else f"{kind}/{name}": value for name, value in means.items()}
    logger.log(step, numbers | speed)
    return means[term.name]


def gather_columns(
    columns_of: Callable[[Any], Sequence[torch.Tensor]],
    batches: Iterable[tuple[Any, torch.Tensor]],
) -> list[torch.Tensor]:
    """Return what `columns_of` gives of the batches, an entry a pair, of all ranks' real rows, on the CPU.

    Every rank must call this.
    """
    own = [[column.cpu()[is_real] for column in columns_of(batch)] for batch, is_real in batches]
    parts = [part for of_rank in distributed.gather_objects(own) for part in of_rank]
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def train(
    start: Start,
    data: StageData,
    batches: GlobalBatches,
    trainer: Any,
    parts: Mapping[str, Stateful],
    *,
    held_out: Any,
    fact: str,
    prepare: Callable[[int], None] = lambda step: None,
) -> Run:
    """Make or resume a run and train it to its end; return it.

    `trainer` has `engine`, `logger`, `train_step`, `evaluate`. `held_out` are the rows of an evaluation,
    whose result the export has as `fact`. `prepare` is called with the step that the run is at, before the
    first one. Raises Stopped when the run is asked to stop, TooManyBadSteps when too many steps are refused.
    Every rank must call this.
    """
    args, logger = start.args, trainer.logger
    rows = {"--per_device_train_batch_size x --gradient_accumulation_steps": batches.global_rows}
    progress = Progress(data.key, rows, about_data=data.report.facts())
    run = Run(args, start.earlier, logger, progress, {"model": EngineState(trainer.engine)} | parts)

    def evaluate(step: int) -> None:
        if not len(held_out):
            return
        some = evaluation_batches(
            held_out,
            batches.collate,
            rows_per_batch=args.per_device_eval_batch_size,
            rank=distributed.rank(),
            world_size=distributed.world_size(),
            max_batches=args.eval_iters,
        )
        with watchdog.phase("the evaluation", step, clock="evaluate"):
            progress.facts[fact] = trainer.evaluate(step, some)

    with startup.as_problem(start.problems):
        run.begin()  # the first to write: the model is there
        prepare(progress.step)
    if progress.step == 0:
        for line in data.report.lines():
            logger.note(line)
    _run_steps(batches, trainer, evaluate, args.eval_interval, run)
    return run


def _run_steps(
    batches: GlobalBatches, trainer: Any, evaluate: Callable[[int], None], eval_interval: int, run: Run
) -> None:
    """Train; evaluate before, every `eval_interval` steps, after an epoch, at the end."""
    progress, num_steps = run.progress, run.logger.num_steps
    if progress.step == 0:
        evaluate(0)
        run.point(checkpoint_name(0), is_due=False)
    for micro_batches in batches.forever(progress.step):
        if progress.step >= num_steps:
            return
        step = progress.step + 1
        refusal = None
        try:
            with watchdog.phase("the training step", step):
                trainer.train_step(step, micro_batches)
        except StepRefused as error:
            refusal = error
        progress.step = step
        if refusal:
            run.refuse(step, refusal, checkpoint_name(step))
        is_due = eval_interval and step % eval_interval == 0
        if is_due or step % len(batches) == 0 or step == num_steps:
            evaluate(step)
        run.point(checkpoint_name(step), is_due=run.is_due(step))


def export(start: Start, run: Run, model: nn.Module, kind: str) -> None:
    """Write the trained model and its adapter, and end the run. Every rank must call this.

    `kind` is sft, reward or dpo.
    """
    args, logger = start.args, run.logger
    if args.output_dir:
        folder = Path(args.output_dir)
        metadata = {"step": kind, "template": args.template} | run.progress.facts
        is_scorer = kind == "reward"
        save_export(folder / "export", model, start.tokenizer, metadata=metadata, needs_own_pad=is_scorer)
        save_adapter(folder / "adapter", model, start.tokenizer, metadata=metadata)
        logger.note(f"saved {folder}/export")
    logger.close()
    run.finish()


def build_logger(args: Any, columns: tuple[str, ...], num_steps: int) -> RunLogger:
    """Return the run's logger, and find out what perf/mfu is a share of; all ranks do so at about one time.

    TensorBoard's folder is --tensorboard_path or OUTPUT_DIR/tensorboard.
    """
    COSTS.peak_flops = own_peak_flops(DTYPES[distributed.dtype_name(args.dtype)])
    folder = args.tensorboard_path or f"{args.output_dir or '.'}/tensorboard"
    return RunLogger(
        args.output_dir,
        columns=columns,
        num_steps=num_steps,
        log_interval=args.log_interval,
        trackers=build_trackers(args.trackers, args.output_dir, folder),
        config=dataclasses.asdict(args),
    )
