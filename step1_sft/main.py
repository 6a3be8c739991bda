#!/usr/bin/env python
"""Step 1, supervised fine-tuning: a base model learns to answer.

deepspeed --num_gpus 2 step1_sft/main.py --model_name_or_path MODEL --data_path FILE --output_dir OUT
python step1_sft/main.py --model_name_or_path MODEL --data_path FILE --output_dir OUT     (one process)

OUT/export loads with AutoModelForCausalLM.from_pretrained. --help lists the flags, --dry_run checks them.
"""

import sys
from pathlib import Path

if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.data.collators import collate_sft
from common.data.data_options import DataOptions
from common.data.stage_datasets import build_data, preview_rows
from common.engine.optim import build_engine
from common.flags.args import Problems, parse_args
from common.programs import startup, training_loop
from common.ranks import distributed, watchdog
from common.runs.engine_state import EngineState
from common.runs.export import save_adapter, save_export
from common.runs.run import Run
from common.runs.saved_state import Progress
from step1_sft.arguments import SFTArguments
from step1_sft.sft_trainer import SFTTrainer

COLUMNS = ("sft/loss", "sft/learning_rate", "sft/grad_norm", "perf/tokens_per_second")


def build_data_options(args: SFTArguments) -> DataOptions:
    """Return what decides the rows of step 1."""
    return DataOptions(
        data_path=args.data_path,
        stage=1,
        data_split=args.data_split,
        sft_only_data_path=args.sft_only_data_path,
        max_seq_len=args.max_seq_len,
        loss_on=args.loss_on,
        eval_fraction=args.eval_fraction,
        seed=args.seed,
        max_bad_rows=args.max_bad_rows,
        score_column=args.score_column,
        cache_dir=args.data_output_path,
    )


def main() -> None:
    """Check everything, load, train, evaluate, export."""
    # ---- flags and checks: no model yet -----------------------------------------------------------------
    problems = Problems()
    args = parse_args(SFTArguments, description=__doc__.splitlines()[0], problems=problems)
    options = build_data_options(args)
    tokenizer, template, earlier = training_loop.check_single_model(args, options, problems)
    ds_config = training_loop.build_single_model_config(args)
    if args.dry_run:
        with startup.as_problem(problems):
            startup.print_note(*preview_rows(options, template))
        startup.print_resolved(args, deepspeed_config_resolved=ds_config)
        return
    if earlier.finished:
        startup.print_finished(earlier.finished)
        return

    startup.take_folder(args.output_dir, problems)

    # ---- data -------------------------------------------------------------------------------------------
    distributed.start(args.local_rank, args.collective_timeout)
    distributed.seed_everything(args.seed)
    with startup.as_problem(problems), watchdog.phase("the preparation of the data"):
        data = build_data(options, template)
        batches = training_loop.build_global_batches(
            args,
            data.train,
            collate_sft,
            lambda: [(length,) for length in data.train.lengths("input_ids").tolist()],
        )
    num_steps = training_loop.count_steps(args, len(batches))

    # ---- model ------------------------------------------------------------------------------------------
    with startup.as_problem(problems), watchdog.phase("the loading of the model"):
        model = training_loop.load_policy(args, ds_config, len(tokenizer), dropout=args.dropout)
        engine = build_engine(model, ds_config, args, num_steps)
    logger = training_loop.build_logger(args, COLUMNS, num_steps)

    # ---- training ---------------------------------------------------------------------------------------
    is_packed = training_loop.use_layout(batches, model.causal_lm, args)
    trainer = SFTTrainer(engine, is_packed=is_packed, logger=logger)
    rows = {"--per_device_train_batch_size x --gradient_accumulation_steps": batches.global_rows}
    progress = Progress(data.key, rows, about_data=data.report.facts())
    run = Run(args, earlier, logger, progress, {"model": EngineState(engine)})

    def evaluate(step: int) -> None:
        if len(data.eval):
            held_out = training_loop.held_out_batches(args, data.eval, collate_sft)
            progress.facts["eval_perplexity"] = trainer.evaluate(step, held_out)

    with startup.as_problem(problems):
        run.begin()  # the first to write: the model is there
    if progress.step == 0:
        for line in data.report.lines():
            logger.note(line)
    training_loop.run_steps(batches, num_steps, trainer.train_step, evaluate, args.eval_interval, run)

    # ---- export -----------------------------------------------------------------------------------------
    if args.output_dir:
        folder = Path(args.output_dir)
        metadata = {"step": "sft", "template": args.template} | progress.facts
        save_export(folder / "export", model.causal_lm, tokenizer, metadata=metadata)
        save_adapter(folder / "adapter", model.causal_lm, tokenizer, metadata=metadata)
        logger.note(f"saved {folder}/export")
    logger.close()
    run.finish()


if __name__ == "__main__":
    startup.run_program(main)
