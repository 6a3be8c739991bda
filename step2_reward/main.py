#!/usr/bin/env python
"""Step 2, reward modelling: a model learns which of two answers people prefer.

With --loss dpo a chat model learns it instead, and there is no step 3.

deepspeed --num_gpus 2 step2_reward/main.py --model_name_or_path SFT --data_path PAIRS --output_dir OUT
python step2_reward/main.py --model_name_or_path SFT --data_path PAIRS --output_dir OUT     (one process)

OUT/export loads with AutoModelForSequenceClassification.from_pretrained, after --loss dpo with
AutoModelForCausalLM.from_pretrained. --help lists the flags.
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.data.collators import collate_pairs
from common.data.data_options import DataOptions
from common.data.global_batches import GlobalBatches
from common.data.stage_datasets import build_data, preview_rows
from common.engine.optim import build_engine
from common.flags.args import Problems, parse_args
from common.programs import startup, training_loop
from common.ranks import distributed, watchdog
from common.runs.engine_state import EngineState
from common.runs.export import save_adapter, save_export
from common.runs.run import Run
from common.runs.saved_state import Progress
from step2_reward.arguments import RewardArguments
from step2_reward.dpo_trainer import DPOTrainer
from step2_reward.reference_logprobs import ReferencePairs, ReferencePart
from step2_reward.reward_trainer import RewardTrainer

COLUMNS = {
    "reward": ("reward/loss", "reward/accuracy", "reward/margin", "reward/learning_rate"),
    "dpo": ("dpo/loss", "dpo/accuracy", "dpo/margin", "dpo/learning_rate"),
}


class Learner(NamedTuple):
    """What is trained, and what of it is exported."""

    kind: str  # reward or dpo
    engine: Any
    model: nn.Module
    trainer: RewardTrainer | DPOTrainer


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


def build_ranking(
    args: RewardArguments, num_tokens: int, ds_config: dict, batches: Any, num_steps: int
) -> Learner:
    """Return a reward model with its trainer. Every rank must call this."""
    # A score that changes from one pass to the next cannot be ranked by: dropout is off unless asked for.
    model = training_loop.load_ranker(args, ds_config, num_tokens, dropout=args.dropout or 0.0)
    engine = build_engine(model, ds_config, args, num_steps)
    trainer = RewardTrainer(
        engine,
        is_packed=training_loop.use_layout(batches, model.classifier, args),
        rank_loss=args.loss,
        use_margin=args.use_margin,
        center_coef=args.center_coef,
        logger=training_loop.build_logger(args, (*COLUMNS["reward"], "perf/tokens_per_second"), num_steps),
    )
    return Learner("reward", engine, model.classifier, trainer)


def build_dpo(
    args: RewardArguments, num_tokens: int, ds_config: dict, batches: Any, num_steps: int
) -> Learner:
    """Return a policy with its trainer. Every rank must call this."""
    # The reference is the policy without dropout: with it the two would differ before anything is learned.
    model = training_loop.load_policy(args, ds_config, num_tokens, dropout=args.dropout or 0.0)
    engine = build_engine(model, ds_config, args, num_steps)
    trainer = DPOTrainer(
        engine,
        is_packed=training_loop.use_layout(batches, model.causal_lm, args),
        beta=args.beta,
        label_smoothing=args.label_smoothing,
        logger=training_loop.build_logger(args, (*COLUMNS["dpo"], "perf/tokens_per_second"), num_steps),
    )
    return Learner("dpo", engine, model.causal_lm, trainer)


@watchdog.phase("the reference's log-probabilities")
def find_reference(
    args: RewardArguments,
    learner: Learner,
    batches: GlobalBatches,
    held_out: ReferencePairs,
    num_steps: int,
    *,
    may_compute: bool,
) -> None:
    """Ask the policy, before its first step, about the pairs that the run will see.

    Every rank must call this. Raises ValueError when a run that goes on needs more of them than it began
    with.
    """
    rows = batches.rows_until(num_steps)
    missing = [row for row in rows if batches.dataset.logprobs[row].isnan().any()]
    if missing and not may_compute:
        raise ValueError(
            f"--max_train_steps {args.max_train_steps}: {len(missing)} more pairs need the reference's "
            "log-probabilities, and the model that gave them has moved on; begin anew with --resume never"
        )
    size, score = args.per_device_eval_batch_size, learner.trainer.score_reference
    batches.dataset.compute(score, batches.collate, missing, size)
    if may_compute:
        held_out.compute(score, batches.collate, range(len(held_out)), size)


def main() -> None:
    """Check everything, load, train, evaluate, export."""
    # ---- flags and checks: no model yet -----------------------------------------------------------------
    problems = Problems()
    args = parse_args(RewardArguments, description=__doc__.splitlines()[0], problems=problems)
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
        is_dpo = args.loss == "dpo"
        train, held_out = (ReferencePairs(pairs) if is_dpo else pairs for pairs in (data.train, data.eval))
        batches = training_loop.build_global_batches(
            args, train, collate_pairs, lambda: pair_lengths(data.train)
        )
    num_steps = training_loop.count_steps(args, len(batches))

    # ---- model ------------------------------------------------------------------------------------------
    with startup.as_problem(problems), watchdog.phase("the loading of the model"):
        build = build_dpo if is_dpo else build_ranking
        learner = build(args, len(tokenizer), ds_config, batches, num_steps)
    trainer, logger = learner.trainer, learner.trainer.logger

    # ---- training ---------------------------------------------------------------------------------------
    rows = {"--per_device_train_batch_size x --gradient_accumulation_steps": batches.global_rows}
    progress = Progress(data.key, rows, about_data=data.report.facts())
    parts = {"model": EngineState(learner.engine)}
    if is_dpo:
        parts["reference"] = ReferencePart({"train": train, "eval": held_out})
    run = Run(args, earlier, logger, progress, parts)

    def evaluate(step: int) -> None:
        if len(held_out):
            some = training_loop.held_out_batches(args, held_out, collate_pairs)
            progress.facts["eval"] = trainer.evaluate(step, some)

    with startup.as_problem(problems):
        run.begin()  # the first to write: the model is there
        if is_dpo:
            find_reference(args, learner, batches, held_out, num_steps, may_compute=progress.step == 0)
    if progress.step == 0:
        for line in data.report.lines():
            logger.note(line)
    training_loop.run_steps(batches, num_steps, trainer.train_step, evaluate, args.eval_interval, run)

    # ---- export -----------------------------------------------------------------------------------------
    if args.output_dir:
        folder = Path(args.output_dir)
        metadata = {"step": learner.kind, "template": args.template} | progress.facts
        save_export(folder / "export", learner.model, tokenizer, metadata=metadata, needs_own_pad=not is_dpo)
        save_adapter(folder / "adapter", learner.model, tokenizer, metadata=metadata)
        logger.note(f"saved {folder}/export")
    logger.close()
    run.finish()


if __name__ == "__main__":
    startup.run_program(main)
