#!/usr/bin/env python
"""Step 3, PPO: the SFT model learns to give answers that the reward model scores higher.

deepspeed --num_gpus 2 step3_ppo/main.py --actor_model_name_or_path SFT --critic_model_name_or_path REWARD
    --data_path PROMPTS --output_dir OUT
python step3_ppo/main.py ...     (one process)

OUT/export is the chat model, OUT/export_ema its average with --enable_ema. --help lists the flags.
"""

import sys
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from common import distributed, startup
from common.args import Problems, parse_args
from common.checkpoint import save_adapter, save_export
from common.data.collators import PromptCollator
from common.data.data_options import DataOptions
from common.data.global_batches import GlobalBatches
from common.data.pretraining import build_pretraining
from common.data.source_checks import check_sources
from common.data.stage_datasets import build_prompts
from common.dialogue import build_template
from common.tokenizer import vocabulary_difference
from common.training_loop import build_logger, count_steps
from common.value_model import has_saved_head
from step3_ppo.algorithms import ALGORITHMS
from step3_ppo.arguments import PPOArguments
from step3_ppo.ema import ExponentialMovingAverage
from step3_ppo.experience import MinibatchPlan
from step3_ppo.hybrid_options import HYBRID_SECTION, check_hybrid, take_hybrid_section
from step3_ppo.ppo_math import KLController
from step3_ppo.ppo_trainer import PPOTrainer
from step3_ppo.roles import RoleBuilder
from step3_ppo.rollout import OldLogprobs, PromptPlace, Rollout

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
POSITIVE = (
    "per_device_generation_batch_size", "generation_batches", "per_device_training_batch_size", "ppo_epochs",
    "max_prompt_seq_len", "max_answer_seq_len", "temperature", "top_p", "clip_range", "kl_horizon",
)  # fmt: skip


def build_data_options(args: PPOArguments) -> DataOptions:
    """Return what decides the prompts of step 3."""
    return DataOptions(
        data_path=args.data_path,
        stage=3,
        data_split=args.data_split,
        max_prompt_tokens=args.max_prompt_seq_len,
        eval_fraction=0.0,
        seed=args.seed,
        max_bad_rows=args.max_bad_rows,
        cache_dir=args.data_output_path,
    )


def check_ppo(args: PPOArguments, problems: Problems) -> None:
    """Add the problems of step 3's own numbers."""
    startup.check_positive(args, list(POSITIVE), problems)
    if args.algorithm not in ALGORITHMS:
        problems.add(
            f"--algorithm {args.algorithm} is not known; choose from {', '.join(sorted(ALGORITHMS))}"
        )
    samples = args.per_device_generation_batch_size * args.generation_batches
    update = args.per_device_training_batch_size * args.gradient_accumulation_steps
    if update < 1 or samples % update:
        problems.add(
            f"--per_device_generation_batch_size {args.per_device_generation_batch_size} x "
            f"--generation_batches {args.generation_batches} = {samples} samples a rank must be a "
            f"multiple of "
            f"--per_device_training_batch_size {args.per_device_training_batch_size} x "
            f"--gradient_accumulation_steps {args.gradient_accumulation_steps} = {update}"
        )
    if args.enable_test_mode and args.test_stop_step < 1:
        problems.add("--enable_test_mode needs --test_stop_step above 0")
    for name in ("gamma", "gae_lambda"):
        problems.check(
            0 <= getattr(args, name) <= 1, f"--{name} {getattr(args, name)} must be between 0 and 1"
        )
    problems.check(0 <= args.ema_decay < 1, f"--ema_decay {args.ema_decay} must be at least 0 and below 1")
    problems.check(args.top_p <= 1, f"--top_p {args.top_p} must be at most 1")
    if args.only_optimize_lora and not (args.actor_lora_dim and args.critic_lora_dim):
        problems.add("--only_optimize_lora needs --actor_lora_dim and --critic_lora_dim above 0")


def check_models(args: PPOArguments, problems: Problems) -> Any:
    """Return the actor's tokenizer, or None after adding what is wrong with one of the models."""
    tokenizers = {}
    num_tokens = args.max_prompt_seq_len + args.max_answer_seq_len
    lengths = (
        f"--max_prompt_seq_len {args.max_prompt_seq_len} + --max_answer_seq_len {args.max_answer_seq_len}"
    )
    for role in ("actor", "critic", "reward"):
        flag, name = f"--{role}_model_name_or_path", getattr(args, f"{role}_model_name_or_path")
        config = startup.check_model(flag, name, args, problems)
        if config is None:
            continue
        startup.check_length(config, num_tokens, f"{lengths} ({role})", problems)
        if role == "actor":
            check_hybrid(args, config, problems)
        if role != "reward" and getattr(args, f"{role}_lora_dim"):
            pattern = getattr(args, f"{role}_lora_module_name")
            startup.check_lora(f"--{role}_lora_module_name", config, pattern, args, problems)
        tokenizers[role] = startup.check_tokenizer(flag, name, args, problems)
        if role != "actor" and not has_saved_head(name):
            problems.add(
                f"{flag} {name} is no reward model (it has no score head); give the export/ of step 2"
            )
    actor = tokenizers.get("actor")
    for role, tokenizer in tokenizers.items():
        difference = actor and tokenizer and vocabulary_difference(actor, tokenizer)
        if difference:
            problems.add(
                f"--actor_model_name_or_path and --{role}_model_name_or_path have other vocabularies, "
                f"and the same token ids are given to both: {difference}; train the reward model "
                "from the same base"
            )
    return actor


def build_pretraining_batches(args: PPOArguments, tokenizer: Any, ranks: dict[str, int]) -> Any:
    """Return endless micro-batches of text blocks for the actor's second loss, None without the flag."""
    if not args.unsupervised_dataset_name:
        return None
    blocks = build_pretraining(
        args.unsupervised_dataset_name,
        args.unsupervised_dataset_config_name or None,
        args.max_prompt_seq_len + args.max_answer_seq_len,
        tokenizer,
        cache_dir=args.data_output_path,
        max_bad_rows=args.max_bad_rows,
    )
    batches = GlobalBatches(
        blocks,
        collate_blocks,
        rows_per_micro_batch=args.per_device_training_batch_size,
        accumulation=args.gradient_accumulation_steps,
        seed=args.seed,
        what="--unsupervised_dataset_name data",
        rows_flag="--per_device_training_batch_size",
        **ranks,
    )
    return batches.forever()


def collate_blocks(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Return text blocks, all of one length, as input_ids and attention_mask (B, T)."""
    input_ids = torch.tensor([list(row["input_ids"]) for row in rows])
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}


def build_trainer(
    args: PPOArguments, tokenizer: Any, num_steps: int, first_lines: list[str], pretraining: Any
) -> PPOTrainer:
    """Load the four models and return what does the PPO steps. Every rank must call this."""
    plan = MinibatchPlan(
        args.per_device_training_batch_size, args.gradient_accumulation_steps, args.ppo_epochs, args.seed
    )
    samples = args.per_device_generation_batch_size * args.generation_batches
    updates_per_step = args.ppo_epochs * samples // (plan.rows * plan.accumulation)
    dtype = args.dtype or distributed.default_dtype_name()
    overrides = {k: v for k, v in startup.load_overrides(args).items() if k != HYBRID_SECTION}
    roles = RoleBuilder(args, dtype, tokenizer, num_steps * updates_per_step, overrides).build()
    place = PromptPlace(args.per_device_generation_batch_size, args.generation_batches)
    return PPOTrainer(
        args,
        roles,
        Rollout(roles, place=place, old_logprobs=OldLogprobs(args.old_logprobs, args.max_logprob_gap)),
        ALGORITHMS[args.algorithm],
        plan,
        KLController(args.kl_coef, target=args.kl_target or None, horizon=args.kl_horizon),
        build_logger(args, COLUMNS, num_steps, first_lines),  # the first to write: all models are there
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        ema=ExponentialMovingAverage(roles.actor.engine.module, args.ema_decay) if args.enable_ema else None,
        pretraining=pretraining,
    )


def save_all(args: PPOArguments, trainer: PPOTrainer, tokenizer: Any, metrics: dict[str, float]) -> None:
    """Write the chat model, its average, the adapter and the critic. Every rank must call this."""
    folder, roles = Path(args.output_dir), trainer.roles
    actor, critic = roles.actor.engine.module, roles.critic.engine.module.classifier
    final = {name: metrics[name] for name in ("objective/score", "objective/kl")}
    metadata = {"step": "ppo", "template": args.template, "last_step": final}
    save_export(folder / "export", actor, tokenizer, metadata=metadata)
    save_adapter(folder / "adapter", actor)
    save_export(folder / "export_critic", critic, tokenizer, metadata={"step": "critic"}, needs_own_pad=True)
    if trainer.ema:
        with trainer.ema.averaged_weights():
            save_export(folder / "export_ema", actor, tokenizer, metadata=metadata)
    trainer.logger.note(f"saved {folder}/export")


def main() -> None:
    """Check everything, load, train, export."""
    # ---- flags and checks: no model yet -----------------------------------------------------------------
    problems = Problems()
    args = parse_args(PPOArguments, description=__doc__.splitlines()[0], problems=problems)
    stages = {"--actor_zero_stage": args.actor_zero_stage, "--critic_zero_stage": args.critic_zero_stage}
    startup.check_run(args, stages, problems)
    take_hybrid_section(args, problems)
    check_ppo(args, problems)
    tokenizer = check_models(args, problems)
    options = build_data_options(args)
    for problem in check_sources(args.data_path, 3, options):
        problems.add(problem)
    with startup.as_problem(problems):
        template = tokenizer and build_template(args.template, tokenizer)
    problems.exit_if_any()
    startup.print_notes(args)
    if args.dry_run:
        startup.print_resolved(args)
        return

    # ---- data -------------------------------------------------------------------------------------------
    distributed.start(args.local_rank)
    distributed.seed_everything(args.seed)
    ranks = {"rank": distributed.rank(), "world_size": distributed.world_size()}
    with startup.as_problem(problems):
        data = build_prompts(options, tokenizer, template)
        prompts = GlobalBatches(
            data.train,
            PromptCollator(tokenizer.pad_token_id),
            rows_per_micro_batch=args.per_device_generation_batch_size,
            accumulation=args.generation_batches,
            seed=args.seed,
            what="prompt data",
            rows_flag="--per_device_generation_batch_size",
            **ranks,
        )
        pretraining = build_pretraining_batches(args, tokenizer, ranks)
    num_steps = count_steps(args, len(prompts))
    if args.enable_test_mode:
        num_steps = min(num_steps, args.test_stop_step)

    # ---- models -----------------------------------------------------------------------------------------
    with startup.as_problem(problems):
        trainer = build_trainer(args, tokenizer, num_steps, data.report.lines(), pretraining)

    # ---- training ---------------------------------------------------------------------------------------
    for step, prompt_batches in enumerate(prompts.forever(), start=1):
        metrics = trainer.train_step(step, prompt_batches)
        if step == num_steps:
            break

    # ---- export -----------------------------------------------------------------------------------------
    if args.output_dir:
        save_all(args, trainer, tokenizer, metrics)
    trainer.logger.close()


if __name__ == "__main__":
    startup.run_program(main)
