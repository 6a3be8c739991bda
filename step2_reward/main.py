#!/usr/bin/env python
"""Step 2, reward modelling: a model learns which of two answers people prefer.

deepspeed --num_gpus 2 step2_reward/main.py --model_name_or_path SFT --data_path PAIRS --output_dir OUT
python step2_reward/main.py --model_name_or_path SFT --data_path PAIRS --output_dir OUT     (one process)

OUT/export loads with AutoModelForSequenceClassification.from_pretrained. --help lists the flags.
"""

import sys
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common import distributed, startup, training_loop
from common.args import Problems, parse_args
from common.data.collators import PackedPairCollator, PairCollator
from common.data.data_options import DataOptions
from common.data.stage_datasets import build_pairs
from common.saving.engine_state import EngineState
from common.saving.export import save_adapter, save_export
from common.saving.run_saver import Run
from common.saving.run_state import Progress
from common.value_model import load_value_model
from common.watch import watchdog
from step2_reward.arguments import RewardArguments
from step2_reward.reward_trainer import RewardTrainer

COLUMNS = (
    "reward/loss",
    "reward/accuracy",
    "reward/margin",
    "reward/learning_rate",
    "perf/tokens_per_second",
)


def build_data_options(args: RewardArguments) -> DataOptions:
    """Return what decides the rows of step 2."""
    return DataOptions(
        data_path=args.data_path,
        stage=2,
        data_split=args.data_split,
        max_seq_len=args.max_seq_len,
        eval_fraction=args.eval_fraction,
        seed=args.seed,
        max_bad_rows=args.max_bad_rows,
        max_pairs_per_prompt=args.max_pairs_per_prompt,
        score_column=args.score_column,
        cache_dir=args.data_output_path,
    )


def pair_lengths(table: Any) -> list[tuple[int, int]]:
    """Return the tokens of each pair's two answers, prompt included."""
    chosen, rejected = table.lengths("chosen_ids"), table.lengths("rejected_ids")
    return list(zip(chosen.tolist(), rejected.tolist(), strict=True))


def main() -> None:
    """Check everything, load, train, evaluate, export."""
    # ---- flags and checks: no model yet -----------------------------------------------------------------
    problems = Problems()
    args = parse_args(RewardArguments, description=__doc__.splitlines()[0], problems=problems)
    options = build_data_options(args)
    tokenizer, template, earlier = training_loop.check_single_model(args, options, problems)
    ds_config = training_loop.build_single_model_config(args)
    if args.dry_run:
        startup.print_resolved(args, deepspeed_config_resolved=ds_config)
        return
    if earlier.finished:
        startup.print_finished(earlier.finished)
        return

    # ---- data -------------------------------------------------------------------------------------------
    distributed.start(args.local_rank, args.collective_timeout, check_collectives=args.check_collectives)
    distributed.seed_everything(args.seed)
    pad = PairCollator(tokenizer.pad_token_id)
    with startup.as_problem(problems), watchdog.phase("the preparation of the data"):
        data = build_pairs(options, tokenizer, template)
        collate = PackedPairCollator() if args.packed else pad
        batches = training_loop.build_global_batches(
            args, data.train, collate, lambda: pair_lengths(data.train)
        )
    num_steps = training_loop.count_steps(args, len(batches))

    # ---- model ------------------------------------------------------------------------------------------
    with startup.as_problem(problems), watchdog.phase("the loading of the model"):
        # A score that changes from one pass to the next cannot be ranked by: dropout is off unless asked for.
        loading = training_loop.model_options(args, ds_config, dropout=args.dropout or 0.0)
        model = load_value_model(loading, len(tokenizer), training_loop.lora_options(args), seed=args.seed)
        engine = training_loop.build_single_model_engine(model, ds_config, args, num_steps)
    logger = training_loop.build_logger(args, COLUMNS, num_steps)

    # ---- training ---------------------------------------------------------------------------------------
    trainer = RewardTrainer(
        engine,
        is_flat=training_loop.use_layout(batches, model.classifier, args),
        rank_loss=args.rank_loss,
        use_margin=args.use_margin,
        center_coef=args.center_coef,
        logger=logger,
    )
    progress = Progress(data.key, batches.global_rows)
    run = Run(args, earlier, logger, progress, {"model": EngineState(engine)})

    def evaluate(step: int) -> None:
        if len(data.eval):
            held_out = training_loop.held_out_batches(args, data.eval, pad)
            progress.facts["eval"] = trainer.evaluate(step, held_out)

    with startup.as_problem(problems):
        run.saver.begin()  # the first to write: the model is there
    if progress.step == 0:
        for line in data.report.lines():
            logger.note(line)
    training_loop.run_steps(batches, num_steps, trainer.train_step, evaluate, args.eval_interval, run)

    # ---- export -----------------------------------------------------------------------------------------
    if args.output_dir:
        folder = Path(args.output_dir)
        metadata = {"step": "reward", "template": args.template} | progress.facts
        save_export(folder / "export", model.classifier, tokenizer, metadata=metadata, needs_own_pad=True)
        save_adapter(folder / "adapter", model.classifier)
        logger.note(f"saved {folder}/export")
    logger.close()
    run.saver.finish(num_steps)


if __name__ == "__main__":
    startup.run_program(main)
