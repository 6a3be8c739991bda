"""The PPO trainer, built from the flags and the loaded models."""

from collections.abc import Sequence
from typing import Any

from common.data.collators import collate_texts
from common.data.global_batches import GlobalBatches, RowPlan
from common.data.stage_datasets import StageData, build_pretraining
from common.models import exact
from common.programs.training_loop import build_logger
from common.ranks import distributed
from common.runs.run import Run
from common.runs.saved_state import EngineState
from step3_ppo.arguments import PPOArguments
from step3_ppo.build_roles import build_roles
from step3_ppo.checks import PPOStart
from step3_ppo.environments import KIND, Environments
from step3_ppo.ppo_losses import PPOLosses
from step3_ppo.ppo_math import KLController
from step3_ppo.ppo_trainer import PPOTrainer
from step3_ppo.rewards.reward_specs import build_text_reward, reward_bias
from step3_ppo.rewards.scorer import Scorer
from step3_ppo.rollout import Rollout
from step3_ppo.trainer_state import TrainerState

COLUMNS = (
    "objective/score",
    "objective/kl",
    "distill/divergence",
    "rollout/response_tokens",
    "policy/loss",
    "policy/clip_fraction",
    "value/loss",
    "perf/generate_tokens_per_second",
)


def build_pretraining_batches(args: PPOArguments, tokenizer: Any) -> GlobalBatches | None:
    """Endless micro-batches of text blocks for the actor's unsupervised loss; None without the flag."""
    if not args.unsupervised_dataset_name:
        return None
    blocks = build_pretraining(
        args.unsupervised_dataset_name,
        args.unsupervised_dataset_config_name or None,
        args.max_prompt_seq_len + args.max_answer_seq_len,
        tokenizer,
        seed=args.seed,
        cache_dir=args.data_output_path,
        max_bad_rows=args.max_bad_rows,
    )
    plan = RowPlan(
        args.per_device_training_batch_size,
        args.gradient_accumulation_steps,
        rows_flag="--per_device_training_batch_size",
        data_name="--unsupervised_dataset_name data",
    )
    return GlobalBatches.by_rows(blocks, collate_texts, plan, args.seed)


def build_trainer(
    start: PPOStart,
    num_steps: int,
    prompts: GlobalBatches,
    held_out: Sequence[dict[str, Any]] = (),
    pretraining: GlobalBatches | None = None,
) -> PPOTrainer:
    """Load the models and build the PPO trainer. Every rank must call this."""
    args = start.args
    exact.use((args.max_prompt_seq_len + args.max_answer_seq_len) * args.exact)
    algorithm = start.algorithm
    specs = start.rewards
    num_updates = num_steps * args.updates_per_step
    roles = build_roles(
        args,
        start.tokenizer,
        specs,
        num_updates,
        has_critic=algorithm.needs_critic,
        template=start.template,
    )
    texts = {spec.name: build_text_reward(spec, args) for spec in specs if spec.kind not in ("model", KIND)}
    environments = None
    if args.environment:
        parts = (start.template, start.decode, args.max_prompt_seq_len)
        environments = Environments(args.environment, *parts)
    scores = Scorer(
        specs,
        texts,
        start.decode,
        environments,
        reward_bias(args.reward),
        on_error=args.reward_on_error,
        default_score=args.reward_default_score,
    )
    rollout = Rollout(args, roles, scores, needs_greedy=algorithm.needs_greedy)
    logger = build_logger(args, COLUMNS, num_steps)
    kl = KLController(args.kl_coef, args.kl_target, args.kl_horizon)
    losses = PPOLosses(args, roles, kl, start.policy_loss, pretraining)
    return PPOTrainer(algorithm, rollout, losses, prompts, logger, held_out)


def build_run(start: PPOStart, trainer: PPOTrainer, prompts: GlobalBatches, data: StageData) -> Run:
    """Build the Run that checkpoints every stateful component. Every rank must call this."""
    args = start.args
    roles = trainer.roles
    samples = args.samples_per_update * distributed.world_size()
    rows = {
        "--per_device_generation_batch_size x --generation_batches": prompts.order.global_rows,
        "--per_device_training_batch_size x --gradient_accumulation_steps": samples,
    }
    parts: dict[str, Any] = {"actor": EngineState(roles.actor.model)}
    if roles.critic:
        parts["critic"] = EngineState(roles.critic.model)
    if trainer.ema:
        parts["ema"] = trainer.ema
    if trainer.ref_average:
        parts["ref_ema"] = trainer.ref_average
    parts["trainer"] = TrainerState(trainer)
    steps = len(prompts)
    if trainer.evaluation:
        trainer.logger.time_left.expect(
            "evaluate", lambda step: args.eval_interval.is_due(step, steps, seconds=0)
        )
    return Run(
        args, start.earlier, trainer.logger, data, rows, parts, steps_per_epoch=steps, frozen=start.frozen
    )
