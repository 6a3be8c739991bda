"""Builds the parts of a run from its flags: prompts, models, rewards, the trainer."""

from dataclasses import replace
from typing import Any

from torch import nn

from common.data.global_batches import BatchStream, GlobalBatches
from common.data.packed_batch import collate_prompts, collate_texts
from common.data.stage_datasets import build_pretraining
from common.engine.ds_config import EngineOptions, build_config, build_engine
from common.generation.decode import SamplingOptions
from common.generation.hybrid_engine import HybridEngine, HybridOptions
from common.models.loading import ModelOptions, load_causal_lm, plain_model
from common.models.lora import LoraOptions, add_lora
from common.models.policy_model import PolicyModel
from common.models.value_model import ValueModel, load_value_model
from common.models.varlen_attention import takes_packed
from common.ranks import distributed
from step3_ppo.arguments import PPOArguments, RoleFlags
from step3_ppo.rewards.reward_specs import build_text_reward
from step3_ppo.rewards.score_sum import ScoreSum
from step3_ppo.rewards.text_rewards import Failures
from step3_ppo.roles import Actor, Critic, Frozen, LoraReference, Reference, Reward, Roles
from step3_ppo.rollout import Rollout
from step3_ppo.start_up import StartUp, samples_per_rank


def build_prompt_batches(args: PPOArguments, dataset: Any) -> GlobalBatches:
    """Return this rank's prompts of the steps; ValueError when the data do not fill one."""
    return GlobalBatches(
        dataset,
        collate_prompts,
        rows_per_micro_batch=args.per_device_generation_batch_size,
        accumulation=args.generation_batches,
        rank=distributed.rank(),
        world_size=distributed.world_size(),
        seed=args.seed,
        what="prompt data",
        rows_flag="--per_device_generation_batch_size",
    )


def build_pretraining_batches(args: PPOArguments, tokenizer: Any) -> BatchStream | None:
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
        collate_texts,
        rows_per_micro_batch=args.per_device_training_batch_size,
        accumulation=args.gradient_accumulation_steps,
        seed=args.seed,
        what="--unsupervised_dataset_name data",
        rows_flag="--per_device_training_batch_size",
        rank=distributed.rank(),
        world_size=distributed.world_size(),
    )
    return BatchStream(batches)


def build_rollout(args: PPOArguments, start: StartUp, roles: Roles) -> Rollout:
    """Return what collects the rollout batches of the steps, with all rewards."""
    failures = Failures.parse(args.reward_on_error)
    texts = {s.name: build_text_reward(s, args, failures) for s in start.rewards if s.kind != "model"}
    return Rollout(args, roles, ScoreSum(start.rewards, texts, start.decode, failures))


def count_optimizer_steps(args: PPOArguments, num_steps: int) -> int:
    """Return the optimizer steps that so many PPO steps make: the schedules' length."""
    update = args.per_device_training_batch_size * args.gradient_accumulation_steps
    return num_steps * args.ppo_epochs * (samples_per_rank(args) // update)


def build_roles(args: PPOArguments, start: StartUp, num_steps: int) -> Roles:
    """Return all of them; both learning-rate schedules last for `num_steps` PPO steps.

    Every rank must call this.
    """
    tokenizer, num_optimizer_steps = start.tokenizer, count_optimizer_steps(args, num_steps)
    actor = _build_actor(args, tokenizer, num_optimizer_steps)
    critic = None
    if start.algorithm.needs_critic:
        critic = _build_critic(args, tokenizer, num_optimizer_steps)
    models = {spec.name: spec.target for spec in start.rewards if spec.kind == "model"}
    rewards = {name: _build_reward(args, tokenizer, path) for name, path in models.items()}
    return Roles(actor, _build_reference(args, tokenizer, actor), critic, rewards)


def load_actor(args: PPOArguments, tokenizer: Any, ds_config: dict[str, Any]) -> PolicyModel:
    """Return what the actor's engine trains. Every rank must call this."""
    model = load_causal_lm(_model_options(args, args.actor, ds_config), len(tokenizer))
    return _build_policy(args, tokenizer, add_lora(model, LoraOptions.of(args, args.actor), args.seed))


def load_critic(args: PPOArguments, tokenizer: Any, ds_config: dict[str, Any]) -> ValueModel:
    """Return what the critic's engine trains. Every rank must call this."""
    options, lora = _model_options(args, args.critic, ds_config), LoraOptions.of(args, args.critic)
    return load_value_model(options, len(tokenizer), lora, seed=args.seed)


def hybrid_options(args: PPOArguments) -> HybridOptions:
    """Return how the flags want the actor to generate."""
    return HybridOptions(
        enabled=args.enable_hybrid_engine,
        inference_tp_size=args.inference_tp_size,
        release_inference_cache=args.release_inference_cache,
        gather_by_layer=args.unpin_actor_parameters,
        tp_gather_partition_size=args.tp_gather_partition_size,
        max_out_tokens=args.max_prompt_seq_len + args.max_answer_seq_len,
        num_slots=args.generation_slots,
        offload_states=args.offload_states_for_generation,
    )


def _build_actor(args: PPOArguments, tokenizer: Any, num_optimizer_steps: int) -> Actor:
    ds_config = _train_config(args, args.actor)
    policy = load_actor(args, tokenizer, ds_config)
    engine = build_engine(policy, ds_config, args, num_optimizer_steps, role=args.actor)
    sampling = SamplingOptions(
        max_new_tokens=args.max_answer_seq_len,
        stop_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        num_valid_tokens=len(tokenizer),
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
    )
    is_packed = _is_packed(args, policy.causal_lm)
    return Actor(HybridEngine(engine, hybrid_options(args)), sampling, is_packed=is_packed)


def _build_reference(args: PPOArguments, tokenizer: Any, actor: Actor) -> Reference:
    """Return the actor's beginning, frozen; with LoRA it is the actor itself."""
    if args.actor_lora_dim:
        return Reference(LoraReference(actor.engine), actor.is_packed)
    ds_config = _frozen_config(args, args.actor, args.offload_reference_model)
    frozen = replace(args.actor, gradient_checkpointing=False)
    causal_lm = load_causal_lm(_model_options(args, frozen, ds_config), len(tokenizer))
    policy = _build_policy(args, tokenizer, causal_lm)
    weights = Frozen(policy, ds_config, offload=args.offload_reference_model)
    return Reference(weights, _is_packed(args, causal_lm))


def _build_critic(args: PPOArguments, tokenizer: Any, num_optimizer_steps: int) -> Critic:
    """Return the critic, which begins as the reward model."""
    ds_config = _train_config(args, args.critic)
    model = load_critic(args, tokenizer, ds_config)
    engine = build_engine(model, ds_config, args, num_optimizer_steps, role=args.critic)
    return Critic(engine, is_packed=_is_packed(args, model.classifier))


def _build_reward(args: PPOArguments, tokenizer: Any, path: str) -> Reward:
    ds_config = _frozen_config(args, args.critic, args.offload_reward_model)
    frozen = replace(args.actor, model_name_or_path=path, gradient_checkpointing=False)
    model = load_value_model(_model_options(args, frozen, ds_config), len(tokenizer))
    weights = Frozen(model, ds_config, offload=args.offload_reward_model)
    return Reward(weights, _is_packed(args, model.classifier))


def _train_config(args: PPOArguments, role: RoleFlags) -> dict[str, Any]:
    return build_config(_engine_options(args, role, args.offload))


def _frozen_config(args: PPOArguments, like: RoleFlags, is_offloaded: bool) -> dict[str, Any]:
    return build_config(_engine_options(args, like, "param" if is_offloaded else "none"), is_trained=False)


def _engine_options(args: PPOArguments, role: RoleFlags, offload: str) -> EngineOptions:
    rows = args.per_device_training_batch_size
    return EngineOptions.of(args, zero_stage=role.zero_stage, offload=offload, micro_batch_size=rows)


def _model_options(args: PPOArguments, role: RoleFlags, ds_config: dict[str, Any]) -> ModelOptions:
    # Without dropout: old and new log-probabilities must agree before the first update.
    return ModelOptions.of(args, role, ds_config, dropout=0.0)


def _build_policy(args: PPOArguments, tokenizer: Any, causal_lm: nn.Module) -> PolicyModel:
    return PolicyModel(causal_lm, num_valid_tokens=len(tokenizer), temperature=args.temperature)


def _is_packed(args: PPOArguments, model: nn.Module) -> bool:
    return args.packed and takes_packed(plain_model(model))
