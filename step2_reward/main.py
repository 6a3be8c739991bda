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

from common import distributed, startup
from common.args import Problems, parse_args
from common.checkpoint import save_adapter, save_export
from common.data.collators import PairCollator
from common.data.data_options import DataOptions
from common.data.global_batches import GlobalBatches, evaluation_batches
from common.data.source_checks import check_sources
from common.data.stage_datasets import build_pairs
from common.dialogue import build_template
from common.models import LoraOptions, ModelOptions
from common.training_loop import build_engine, build_logger, build_single_model_config, count_steps, run_steps
from common.value_model import load_value_model
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
        cache_dir=args.data_output_path,
    )


def pair_lengths(table: Any) -> list[int]:
    """Return the tokens of each pair's longer answer, prompt included."""
    chosen, rejected = table.lengths("chosen_ids"), table.lengths("rejected_ids")
    return [max(pair) for pair in zip(chosen.tolist(), rejected.tolist(), strict=True)]


def main() -> None:
    """Check everything, load, train, evaluate, export."""
    # ---- flags and checks: no model yet -----------------------------------------------------------------
    problems = Problems()
    args = parse_args(RewardArguments, description=__doc__.splitlines()[0], problems=problems)
    problems.exit_if_any()
    startup.check_run(args, {"--zero_stage": args.zero_stage}, problems)
    startup.check_positive(args, ["per_device_train_batch_size", "per_device_eval_batch_size"], problems)
    config = startup.check_model("--model_name_or_path", args.model_name_or_path, args, problems)
    startup.check_length(config, args.max_seq_len, f"--max_seq_len {args.max_seq_len}", problems)
    tokenizer = config and startup.check_tokenizer(
        "--model_name_or_path", args.model_name_or_path, args, problems
    )
    options = build_data_options(args)
    for problem in check_sources(args.data_path, 2, options):
        problems.add(problem)
    with startup.as_problem(problems):
        template = tokenizer and build_template(args.template, tokenizer)
    problems.exit_if_any()
    startup.print_notes(args)
    dtype = args.dtype or distributed.default_dtype_name()
    if args.dry_run:
        ds_config = build_single_model_config(args, dtype, startup.load_overrides(args))
        if distributed.is_main():
            print(startup.resolved_json(args, deepspeed_config_resolved=ds_config))
        return

    # ---- data -------------------------------------------------------------------------------------------
    distributed.start(args.local_rank)
    distributed.seed_everything(args.seed)
    ranks = {"rank": distributed.rank(), "world_size": distributed.world_size()}
    collate = PairCollator(tokenizer.pad_token_id)
    with startup.as_problem(problems):
        data = build_pairs(options, tokenizer, template)
        batches = GlobalBatches(
            data.train,
            collate,
            rows_per_micro_batch=args.per_device_train_batch_size,
            accumulation=args.gradient_accumulation_steps,
            seed=args.seed,
            group_lengths=pair_lengths(data.train) if args.group_by_length else None,
            **ranks,
        )
    num_steps = count_steps(args, len(batches))
    logger = build_logger(args, COLUMNS, num_steps)
    logger.write_json("args.json", startup.resolved_json(args))
    for line in data.report.lines():
        logger.note(line)

    # ---- model ------------------------------------------------------------------------------------------
    ds_config = build_single_model_config(args, dtype, startup.load_overrides(args))
    lora = LoraOptions(args.lora_dim, args.lora_alpha, args.lora_module_name, args.only_optimize_lora)
    with startup.as_problem(problems):
        model = load_value_model(
            ModelOptions(
                args.model_name_or_path,
                dtype=dtype,
                # a score that changes from one pass to the next cannot be ranked by: dropout is off by default
                dropout=args.dropout or 0.0,
                gradient_checkpointing=args.gradient_checkpointing,
                pad_vocab_multiple=args.pad_vocab_multiple,
                trust_remote_code=args.trust_remote_code,
                ds_config=ds_config,
            ),
            len(tokenizer),
            lora,
            seed=args.seed,
        )
        engine = build_engine(
            model,
            ds_config,
            learning_rate=args.learning_rate,
            weight_decay=args.weight_decay,
            lora_learning_rate=args.lora_learning_rate,
            beta2=args.adam_beta2,
            schedule=args.lr_scheduler_type,
            num_warmup_steps=args.num_warmup_steps,
            num_steps=num_steps,
        )

    # ---- training ---------------------------------------------------------------------------------------
    trainer = RewardTrainer(
        engine,
        rank_loss=args.rank_loss,
        use_margin=args.use_margin,
        center_coef=args.center_coef,
        logger=logger,
    )

    def evaluate(step: int) -> None:
        if data.eval is not None and len(data.eval):
            rows = args.per_device_eval_batch_size
            held_out = evaluation_batches(
                data.eval, collate, rows_per_batch=rows, max_batches=args.eval_iters, **ranks
            )
            metrics["eval"] = trainer.evaluate(step, held_out)

    metrics: dict = {}
    run_steps(
        batches, num_steps, train_step=trainer.train_step, evaluate=evaluate, eval_interval=args.eval_interval
    )

    # ---- export -----------------------------------------------------------------------------------------
    if args.output_dir:
        metadata = {"step": "reward", "template": args.template, **metrics}
        folder = Path(args.output_dir)
        save_export(folder / "export", model.classifier, tokenizer, metadata=metadata, needs_own_pad=True)
        save_adapter(folder / "adapter", model.classifier)
        logger.note(f"saved {folder}/export")
    logger.close()


if __name__ == "__main__":
    startup.run_program(main)
