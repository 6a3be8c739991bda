"""Builds the roles of a run from its flags."""

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from common.engine.ds_config import EngineOptions, build_frozen_config, build_train_config
from common.engine.optim import build_engine
from common.generation.decode import SamplingOptions
from common.generation.hybrid_engine import HybridEngine
from common.models.loading import ModelOptions, load_causal_lm, plain_model
from common.models.lora import LoraOptions, add_lora
from common.models.policy_model import PolicyModel
from common.models.value_model import ValueModel, load_value_model
from common.models.varlen_attention import takes_packed
from step3_ppo.arguments import PPOArguments
from step3_ppo.hybrid_options import hybrid_options
from step3_ppo.role_arguments import RoleFlags
from step3_ppo.roles import Actor, AdapterOff, Critic, Frozen, Reference, Reward, Roles


@dataclass(frozen=True)
class RoleBuilder:
    """Builds roles from the flags; `num_optimizer_steps` is the length of both learning-rate schedules."""

    args: PPOArguments
    tokenizer: Any
    num_optimizer_steps: int
    needs_critic: bool
    reward_paths: dict[str, str]  # reward models by the name under which they are logged

    def build(self) -> Roles:
        """Return all of them. Every rank must call this."""
        actor = self.build_actor()
        critic = self.build_critic() if self.needs_critic else None
        rewards = {name: self.build_reward(path) for name, path in self.reward_paths.items()}
        return Roles(actor, self.build_reference(actor), critic, rewards)

    def _train_config(self, role: RoleFlags) -> dict[str, Any]:
        return build_train_config(self._engine_options(role.zero_stage, self.args.offload))

    def _frozen_config(self, like: RoleFlags, is_offloaded: bool) -> dict[str, Any]:
        stage = 3 if like.zero_stage == 3 else 0
        return build_frozen_config(self._engine_options(stage, "param" if is_offloaded else "none"))

    def _engine_options(self, zero_stage: int, offload: str) -> EngineOptions:
        rows = self.args.per_device_training_batch_size
        return EngineOptions.of(self.args, zero_stage=zero_stage, offload=offload, micro_batch_size=rows)

    def _model_options(self, role: RoleFlags, ds_config: dict[str, Any]) -> ModelOptions:
        # Without dropout: old and new log-probabilities must agree before the first update.
        return ModelOptions.of(self.args, role, ds_config, dropout=0.0)

    def _frozen_options(self, path: str, ds_config: dict[str, Any]) -> ModelOptions:
        frozen = replace(self.args.actor, model_name_or_path=path, gradient_checkpointing=False)
        return self._model_options(frozen, ds_config)

    def build_actor(self) -> Actor:
        """Return the actor in a hybrid engine. Every rank must call this."""
        args, ds_config = self.args, self._train_config(self.args.actor)
        policy = self.load_actor(ds_config)
        engine = build_engine(policy, ds_config, args, self.num_optimizer_steps, role=args.actor)
        sampling = SamplingOptions(
            max_new_tokens=args.max_answer_seq_len,
            stop_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
            num_valid_tokens=len(self.tokenizer),
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            seed=args.seed,
        )
        hybrid_engine = HybridEngine(engine, hybrid_options(args))
        return Actor(hybrid_engine, sampling, is_packed=self._is_packed(policy.causal_lm))

    def load_actor(self, ds_config: dict[str, Any]) -> PolicyModel:
        """Return what the actor's engine trains. Every rank must call this."""
        options = self._model_options(self.args.actor, ds_config)
        model = load_causal_lm(options, len(self.tokenizer))
        return self._policy(add_lora(model, LoraOptions.of(self.args, self.args.actor), self.args.seed))

    def _policy(self, causal_lm: nn.Module) -> PolicyModel:
        return PolicyModel(causal_lm, num_valid_tokens=len(self.tokenizer), temperature=self.args.temperature)

    def _is_packed(self, model: nn.Module) -> bool:
        return self.args.packed and takes_packed(plain_model(model))

    def build_reference(self, actor: Actor) -> Reference:
        """Return the actor's beginning, frozen; with LoRA it is the actor itself. Every rank must call
        this.
        """
        args = self.args
        if args.actor_lora_dim:
            return Reference(AdapterOff(actor.engine), is_packed=actor.is_packed)
        ds_config = self._frozen_config(args.actor, args.offload_reference_model)
        options = self._frozen_options(args.actor_model_name_or_path, ds_config)
        policy = self._policy(load_causal_lm(options, len(self.tokenizer)))
        frozen = Frozen(policy, ds_config, offload=args.offload_reference_model)
        return Reference(frozen, is_packed=self._is_packed(policy.causal_lm))

    def build_critic(self) -> Critic:
        """Return the critic, which begins as the reward model. Every rank must call this."""
        args, ds_config = self.args, self._train_config(self.args.critic)
        model = self.load_critic(ds_config)
        engine = build_engine(model, ds_config, args, self.num_optimizer_steps, role=args.critic)
        return Critic(engine, is_packed=self._is_packed(model.classifier))

    def load_critic(self, ds_config: dict[str, Any]) -> ValueModel:
        """Return what the critic's engine trains. Every rank must call this."""
        options = self._model_options(self.args.critic, ds_config)
        lora = LoraOptions.of(self.args, self.args.critic)
        return load_value_model(options, len(self.tokenizer), lora, seed=self.args.seed)

    def build_reward(self, path: str) -> Reward:
        """Return a reward model, frozen. Every rank must call this."""
        args = self.args
        ds_config = self._frozen_config(args.critic, args.offload_reward_model)
        model = load_value_model(self._frozen_options(path, ds_config), len(self.tokenizer))
        frozen = Frozen(model, ds_config, offload=args.offload_reward_model)
        return Reward(frozen, is_packed=self._is_packed(model.classifier))
