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

from common import distributed, startup
from common.args import Problems, parse_args
from common.checkpoint import save_adapter, save_export
from common.data.collators import SFTCollator
from common.data.data_options import DataOptions
from common.data.global_batches import GlobalBatches, evaluation_batches
from common.data.source_checks import check_sources
from common.data.stage_datasets import build_sft
from common.dialogue import build_template
from common.models import LoraOptions, ModelOptions, add_lora, load_causal_lm
from common.training_loop import build_engine, build_logger, build_single_model_config, count_steps, run_steps
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
        max_pairs_per_prompt=args.max_pairs_per_prompt,
        cache_dir=args.data_output_path,
    )


def main() -> None:
    """Check everything, load, train, evaluate, export."""
    # ---- flags and checks: no model yet -----------------------------------------------------------------
    problems = Problems()
    args = parse_args(SFTArguments, description=__doc__.splitlines()[0], problems=problems)
    problems.exit_if_any()
    startup.check_run(args, {"--zero_stage": args.zero_stage}, problems)
    startup.check_positive(args, ["per_device_train_batch_size", "per_device_eval_batch_size"], problems)
    config = startup.check_model("--model_name_or_path", args.model_name_or_path, args, problems)
    startup.check_length(config, args.max_seq_len, f"--max_seq_len {args.max_seq_len}", problems)
    tokenizer = config and startup.check_tokenizer(
        "--model_name_or_path", args.model_name_or_path, args, problems
    )
    options = build_data_options(args)
    for problem in check_sources([*args.data_path, *args.sft_only_data_path], 1, options):
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
    collate = SFTCollator(tokenizer.pad_token_id)
    with startup.as_problem(problems):
        data = build_sft(options, tokenizer, template)
        batches = GlobalBatches(
            data.train,
            collate,
            rows_per_micro_batch=args.per_device_train_batch_size,
            accumulation=args.gradient_accumulation_steps,
            seed=args.seed,
            group_lengths=data.train.lengths("input_ids").tolist() if args.group_by_length else None,
            **ranks,
        )
    num_steps = count_steps(args, len(batches))
    logger = build_logger(args, COLUMNS, num_steps)
    logger.write_json("args.json", startup.resolved_json(args))
    for line in data.report.lines():
        logger.note(line)

    # ---- model ------------------------------------------------------------------------------------------
    ds_config = build_single_model_config(args, dtype, startup.load_overrides(args))
    model = load_causal_lm(
        ModelOptions(
            args.model_name_or_path,
            dtype=dtype,
            dropout=args.dropout,
            gradient_checkpointing=args.gradient_checkpointing,
            pad_vocab_multiple=args.pad_vocab_multiple,
            trust_remote_code=args.trust_remote_code,
            ds_config=ds_config,
        ),
        len(tokenizer),
    )
    lora = LoraOptions(args.lora_dim, args.lora_alpha, args.lora_module_name, args.only_optimize_lora)
    with startup.as_problem(problems):
        model = add_lora(model, lora, args.seed)
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
    trainer = SFTTrainer(engine, num_valid_tokens=len(tokenizer), logger=logger)

    def evaluate(step: int) -> None:
        if data.eval is not None and len(data.eval):
            rows = args.per_device_eval_batch_size
            held_out = evaluation_batches(
                data.eval, collate, rows_per_batch=rows, max_batches=args.eval_iters, **ranks
            )
            metrics["eval_perplexity"] = trainer.evaluate(step, held_out)

    metrics: dict[str, float] = {}
    run_steps(
        batches, num_steps, train_step=trainer.train_step, evaluate=evaluate, eval_interval=args.eval_interval
    )

    # ---- export -----------------------------------------------------------------------------------------
    if args.output_dir:
        metadata = {"step": "sft", "template": args.template, **metrics}
        save_export(Path(args.output_dir) / "export", engine.module, tokenizer, metadata=metadata)
        save_adapter(Path(args.output_dir) / "adapter", engine.module)
        logger.note(f"saved {args.output_dir}/export")
    logger.close()


if __name__ == "__main__":
    startup.run_program(main)
