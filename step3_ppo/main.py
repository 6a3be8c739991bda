#!/usr/bin/env python
"""Step 3, PPO: the SFT model learns to give answers that the reward model scores higher.

deepspeed --num_gpus 2 step3_ppo/main.py --actor_model_name_or_path SFT --critic_model_name_or_path REWARD
    --data_path PROMPTS --output_dir OUT
python step3_ppo/main.py ...     (one process)

OUT/export is the chat model, OUT/export_ema its average with --ema_decay, OUT/export_best what was best on
held-out prompts with --keep_best. --help lists the flags.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.data.data_options import DataOptions
from common.data.global_batches import BatchStream, GlobalBatches
from common.data.stage_datasets import build_data
from common.flags.args import Problems, parse_args
from common.models.policy_model import language_model
from common.programs import startup
from common.programs.training_loop import build_logger, count_steps
from common.ranks import distributed, watchdog
from common.ranks.failures import StepRefused, TooManyBadSteps
from common.runs.checkpoints import checkpoint_name
from common.runs.durable_files import remove_folder
from common.runs.export import ExportFailed, save_adapter, save_export
from common.runs.run import Run
from common.runs.saved_state import EngineState, Progress, ShardState
from step3_ppo.arguments import PPOArguments
from step3_ppo.builders import (
    build_pretraining_batches,
    build_prompt_batches,
    build_roles,
    build_rollout,
)
from step3_ppo.evaluation import choose_prompts
from step3_ppo.ppo_losses import PPOLosses
from step3_ppo.ppo_trainer import PPOTrainer
from step3_ppo.start_up import StartUp, check_start_up
from step3_ppo.trainer_state import TrainerState

EXPORT_BEST = "export_best"
COLUMNS = (
    "objective/score",
    "objective/kl",
    "policy/loss",
    "policy/entropy",
    "value/loss",
    "value/explained_variance",
    "rollout/response_tokens",
    "perf/step_seconds",
)


def build_trainer(
    args: PPOArguments,
    start: StartUp,
    num_steps: int,
    prompts: GlobalBatches,
    held_out: Sequence[dict[str, Any]],
    pretraining: BatchStream | None,
) -> PPOTrainer:
    """Load the models and return what does the PPO steps. Every rank must call this."""
    roles = build_roles(args, start, num_steps)
    rollout = build_rollout(args, start, roles)
    losses = PPOLosses(args, roles, pretraining)
    logger = build_logger(args, COLUMNS, num_steps)
    return PPOTrainer(
        args, start.algorithm, roles, rollout, BatchStream(prompts), losses, logger, start.decode, held_out
    )


def build_run(args: PPOArguments, start: StartUp, trainer: PPOTrainer, progress: Progress) -> Run:
    """Return what keeps the run, with all that moves in it. Every rank must call this."""
    roles = trainer.roles
    parts: dict[str, Any] = {"actor": EngineState(roles.actor.engine)}
    if roles.critic:
        parts["critic"] = EngineState(roles.critic.engine)
    if trainer.ema:
        parts["ema"] = ShardState(trainer.ema.parameters, trainer.ema.averages)
    parts["trainer"] = TrainerState(trainer)
    return Run(args, start.earlier, trainer.logger, progress, parts)


def train(trainer: PPOTrainer, run: Run, num_steps: int, tokenizer: Any) -> None:
    """Do the steps that are left. Raises Stopped, and TooManyBadSteps with the state saved."""
    progress = run.progress
    if progress.step == 0:
        if trainer.evaluation is None or trainer.evaluation.step < 0:
            remove_best(trainer.args)
        while trainer.evaluation and trainer.evaluation.is_due(0, num_steps):
            judge_and_export(trainer, run, tokenizer)  # again where it was refused: the rest compares with it
            run.point(checkpoint_name(0), is_due=False)
    while progress.step < num_steps:
        step = progress.step + 1
        try:
            metrics = trainer.train_step(step, run)
            progress.facts = {name: metrics[name] for name in ("objective/score", "objective/kl")}
            progress.step = step
        except StepRefused as error:
            progress.step = step
            run.refuse(step, error, checkpoint_name(step))
        judge_and_export(trainer, run, tokenizer)
        run.point(checkpoint_name(step), is_due=run.is_due(step))


def judge_and_export(trainer: PPOTrainer, run: Run, tokenizer: Any) -> None:
    """Evaluate where that is due after the steps that are done, and export the best model so far.

    Every rank must call this. Raises TooManyBadSteps with the state saved.
    """
    args, evaluation, step = trainer.args, trainer.evaluation, run.progress.step
    if evaluation is None:
        return
    try:
        metrics = evaluation.judge_if_due(step, trainer.logger.num_steps)
    except StepRefused as error:
        metrics = {}
        run.refuse(step, error, checkpoint_name(step))
    if not args.output_dir or not evaluation.is_best(metrics):
        return
    best = {"metric": args.keep_best, "value": metrics[args.keep_best], "step": step}
    metadata = build_metadata(args, run.progress.facts, evaluation.metrics)
    metadata |= {"num_steps": step, "best": best}
    actor = language_model(trainer.roles.actor.engine.module)
    try:
        save_export(Path(args.output_dir) / EXPORT_BEST, actor, tokenizer, metadata=metadata)
        evaluation.best = best
    except ExportFailed as error:
        trainer.logger.note(f"warning: {error}; the run continues")


def remove_best(args: PPOArguments) -> None:
    """Remove what an earlier run in this folder has exported as its best model."""
    folder = Path(args.output_dir) / EXPORT_BEST
    if args.output_dir and distributed.is_main() and folder.is_dir():
        remove_folder(folder)


def build_metadata(
    args: PPOArguments, facts: dict[str, float], held_out: dict[str, float] | None
) -> dict[str, Any]:
    """Return what an export of the actor says of itself; `held_out` are the last evaluation's numbers."""
    metadata = {"step": "ppo", "template": args.template, "last_step": facts}
    return metadata | ({"eval": held_out} if held_out else {})


def save_all(args: PPOArguments, trainer: PPOTrainer, tokenizer: Any, facts: dict[str, float]) -> None:
    """Write the chat model, its average and the adapter. Every rank must call this."""
    folder, roles = Path(args.output_dir), trainer.roles
    actor = language_model(roles.actor.engine.module)
    metadata = build_metadata(args, facts, trainer.evaluation.metrics if trainer.evaluation else None)
    save_export(folder / "export", actor, tokenizer, metadata=metadata)
    save_adapter(folder / "adapter", actor, tokenizer, metadata=metadata)
    if trainer.ema:
        with trainer.ema.averaged_weights():
            save_export(folder / "export_ema", actor, tokenizer, metadata=metadata)
    trainer.logger.note(f"saved {folder}/export")


def main() -> None:
    """Check everything, load, train, export."""
    # ---- flags and checks: no model yet -----------------------------------------------------------------
    problems = Problems()
    args = parse_args(PPOArguments, description=__doc__.splitlines()[0], problems=problems)
    options = DataOptions.of(args, 3)
    args, start = check_start_up(args, options, problems)
    startup.print_notes(args)
    for line in start.warnings:
        startup.print_note(line)
    if not startup.enter(args, options, start.template, start.earlier, problems):
        return

    # ---- data -------------------------------------------------------------------------------------------
    with startup.as_problem(problems), watchdog.phase("the preparation of the data"):
        data = build_data(options, start.template)
        prompts = build_prompt_batches(args, data.train)
        held_out, told = choose_prompts(args, options, data, start.template)
        pretraining = build_pretraining_batches(args, start.tokenizer)
    num_steps = count_steps(args, len(prompts))

    # ---- models -----------------------------------------------------------------------------------------
    with startup.as_problem(problems), watchdog.phase("the loading of the models"):
        trainer = build_trainer(args, start, num_steps, prompts, held_out, pretraining)
        rows = {
            "--per_device_generation_batch_size x --generation_batches": prompts.global_rows,
            "--per_device_training_batch_size x --gradient_accumulation_steps": trainer.plan.global_rows,
        }
        progress = Progress(data.key, rows, about_data=data.report.facts())
        run = build_run(args, start, trainer, progress)
        run.begin()  # the first to write: all models are there
    if progress.step == 0:
        for line in [*data.report.lines(), *([told] if told else [])]:
            trainer.logger.note(line)

    # ---- training ---------------------------------------------------------------------------------------
    too_many = None
    try:
        train(trainer, run, num_steps, start.tokenizer)
    except TooManyBadSteps as error:  # by all ranks alike: what was learned before it can be kept
        too_many = error

    # ---- export -----------------------------------------------------------------------------------------
    if args.output_dir and progress.facts:
        save_all(args, trainer, start.tokenizer, progress.facts)
    trainer.rollout.scores.close()
    trainer.logger.close()
    if too_many:
        raise too_many
    run.finish()


if __name__ == "__main__":
    startup.run_program(main)
