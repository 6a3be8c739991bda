#!/usr/bin/env python
"""Step 3, PPO: trains the SFT model to give responses that the reward model scores higher.

deepspeed --num_gpus 2 step3_ppo/main.py --actor_model_name_or_path SFT --critic_model_name_or_path REWARD
    --data_path PROMPTS --output_dir OUT
python step3_ppo/main.py ...     (one process)

OUT/export is the chat model, OUT/export_ema its average with --ema_decay, OUT/export_best the best model on
held-out prompts with --keep_best.
--help lists the usual flags, --help_all all of them.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.flags.args import begin_script
from common.programs.memory_check import begin_plan
from step3_ppo.arguments import PPOArguments

if __name__ == "__main__":
    begin_script(PPOArguments, __doc__)
    begin_plan(3)

from common.data.collators import collate_prompts
from common.data.global_batches import GlobalBatches, RowPlan
from common.models.policy_model import language_model
from common.programs import conversation_form, running, startup
from common.programs.training_loop import (
    EVAL_STEP,
    count_steps,
    facts_at,
    run_steps,
    save_model,
)
from common.ranks import distributed, watchdog
from common.ranks.failures import StepSkipped, TooManyBadSteps
from common.runs.durable_files import SaveFailed, remove_folder
from common.runs.export import save_export
from common.runs.run import Run
from common.runs.run_files import RunResult, read_result
from step3_ppo.build_trainer import build_pretraining_batches, build_run, build_trainer
from step3_ppo.checks import PPOStart, check_start_up
from step3_ppo.evaluation import select_eval_prompts
from step3_ppo.ppo_trainer import PPOTrainer
from step3_ppo.roles import Roles

EXPORT_BEST = "export_best"


def topology_lines(args: PPOArguments, roles: Roles) -> list[str]:
    """Description of the rank topology; [] for a single rank."""
    num_ranks = distributed.world_size()
    critic = f", critic {args.critic_zero_stage}" if roles.critic else ""
    line = (
        f"{num_ranks} ranks share every batch and the ZeRO stages (actor {args.actor_zero_stage}{critic}); "
    )
    line += f"generation by {roles.actor.hybrid_engine.layout.describe()}"
    return [line] if num_ranks > 1 else []


def train(start: PPOStart, trainer: PPOTrainer, run: Run) -> None:
    """Run the remaining steps. Raises Stopped, and TooManyBadSteps with the state saved."""

    def train_step(step: int) -> None:
        metrics = trainer.train_step(step, run)
        names = ("objective/score", "objective/kl", "distill/divergence")
        run.facts = {name: metrics[name] for name in names if name in metrics}

    best = Path(start.args.output_dir, EXPORT_BEST)
    if start.args.output_dir and not start.earlier.checkpoints and distributed.is_main() and best.is_dir():
        remove_folder(best)  # of an earlier run
    run_steps(run, train_step, lambda _: evaluate_and_export(start, trainer, run))


def evaluate_and_export(start: PPOStart, trainer: PPOTrainer, run: Run) -> None:
    """Evaluate if that is due after the finished steps, and export the best model so far.

    Every rank must call this. Raises TooManyBadSteps with the state saved.
    """
    args = start.args
    evaluation = trainer.evaluation
    step = run.step
    if evaluation is None or not evaluation.is_due(step, run.logger.num_steps):
        return
    try:
        with run.stoppable(), watchdog.phase("the evaluation", step, clock="evaluate"):
            metrics = evaluation.evaluate(step)
    except StepSkipped as error:
        run.record_bad_step(step, error)
        if step == 0:  # retry: later evaluations compare with this one
            evaluate_and_export(start, trainer, run)
        return
    if not args.output_dir or not evaluation.is_best(metrics):
        return
    best = {"metric": args.keep_best, "value": metrics[args.keep_best], "step": step}
    metadata = build_metadata(args, step, run.facts, vars(evaluation))
    metadata["best"] = best
    actor = language_model(trainer.roles.actor.model.module)
    try:
        save_export(Path(args.output_dir) / EXPORT_BEST, actor, start.tokenizer, metadata=metadata)
        evaluation.best = best
    except SaveFailed as error:
        trainer.logger.note(f"warning: {error}; the run continues")


def build_metadata(
    args: PPOArguments, step: int, facts: dict[str, float], evaluation: dict[str, Any]
) -> dict[str, Any]:
    """Metadata of an export of the actor at a step; `evaluation` has the step and metrics of the last
    evaluation.
    """
    metadata = {"step": "ppo", "num_steps": step} | conversation_form.describe_form(args)
    metadata["last_step"] = facts
    if not evaluation.get("metrics"):
        return metadata
    if evaluation.get("before"):
        metadata["eval_rows"] = len(evaluation["before"]["scores"])
    return metadata | facts_at(step, {"eval": evaluation["metrics"], EVAL_STEP: evaluation["step"]})


def save_all(start: PPOStart, trainer: PPOTrainer, run: Run) -> None:
    """Export the chat model, its EMA and the adapter. Every rank must call this."""
    actor = language_model(trainer.roles.actor.model.module)
    evaluation = vars(trainer.evaluation) if trainer.evaluation else {}
    metadata = build_metadata(start.args, run.step, run.facts, evaluation)
    save_model(start, trainer.logger, trainer.roles.actor.model.module, metadata)
    if trainer.ema:
        with trainer.ema.averaged_weights():
            folder = Path(start.args.output_dir) / "export_ema"
            save_export(folder, actor, start.tokenizer, metadata=metadata)


def main(argv: Sequence[str] | None = None) -> RunResult | None:
    """Check the flags, load, train, export; return the outcome of a finished run.

    `argv` defaults to sys.argv[1:].
    """
    # ---- flags and checks: no model yet -----------------------------------------------------------------
    start = check_start_up(__doc__.splitlines()[0], argv)
    data = startup.enter(start)
    if data is None:
        return read_result(start.args.output_dir)
    args, problems = start.args, start.problems

    # ---- data -------------------------------------------------------------------------------------------
    with startup.as_problem(problems), watchdog.phase("the preparation of the data"):
        plan = RowPlan(
            args.per_device_generation_batch_size,
            args.batches_per_step,
            rows_flag="--per_device_generation_batch_size",
            data_name="prompt data",
        )
        prompts = GlobalBatches.by_rows(data.train, collate_prompts, plan, args.seed, data.sources)
        held_out, eval_note = select_eval_prompts(args, start.options, data, start.template)
        pretraining = build_pretraining_batches(args, start.tokenizer)
    num_steps = count_steps(args, len(prompts))

    # ---- models -----------------------------------------------------------------------------------------
    with startup.as_problem(problems), watchdog.phase("the loading of the models"):
        trainer = build_trainer(start, num_steps, prompts, held_out, pretraining)
        run = build_run(start, trainer, prompts, data)
        run.begin()  # first write to disk; all models have loaded
    if run.step == 0:
        topology = topology_lines(args, trainer.roles)
        for line in [*data.report.lines(), *([eval_note] if eval_note else []), *topology]:
            trainer.logger.note(line)

    # ---- training ---------------------------------------------------------------------------------------
    too_many = None
    try:
        train(start, trainer, run)
    except TooManyBadSteps as error:  # raised on every rank, so the weights can still be exported
        too_many = error
    finally:
        trainer.rollout.scores.close()

    # ---- export -----------------------------------------------------------------------------------------
    if args.output_dir and run.num_updates:
        with run.stoppable():
            save_all(start, trainer, run)
    trainer.logger.close()
    trainer.logger.write_report()
    if too_many:
        raise too_many
    return run.finish()


if __name__ == "__main__":
    running.run_program(main)
