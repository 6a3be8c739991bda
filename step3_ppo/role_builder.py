"""Builds the roles of a run from its flags."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from common.engine.ds_config import EngineOptions, build_frozen_config, build_train_config
from common.generation.decode_state import SamplingOptions
from common.generation.hybrid_engine import HybridEngine
from common.models.loading import LoraOptions, ModelOptions, add_lora, load_causal_lm, plain_model
from common.models.policy_model import PolicyModel
from common.models.value_model import ValueModel, load_value_model
from common.models.varlen_attention import takes_packed
from common.programs.training_loop import build_engine
from common.ranks import distributed
from step3_ppo.arguments import PPOArguments
from step3_ppo.hybrid_options import hybrid_options
from step3_ppo.roles import Actor, AdapterOff, Critic, Frozen, Reference, Reward, Roles


@dataclass(frozen=True)
class RoleBuilder:
    """Builds roles from the flags; `num_optimizer_steps` is the length of both learning-rate schedules."""

    args: PPOArguments
    dtype: str
    tokenizer: Any
    num_optimizer_steps: int
    ds_overrides: dict[str, Any]
    needs_critic: bool
    reward_paths: dict[str, str]  # reward models by the name under which they are logged

    def build(self) -> Roles:
        """Return all of them. Every rank must call this."""
        actor = self.build_actor()
        critic = self.build_critic() if self.needs_critic else None
        rewards = {name: self.build_reward(path) for name, path in self.reward_paths.items()}
        return Roles(actor, self.build_reference(actor), critic, rewards)

    def _engine_options(self, zero_stage: int, offload: str) -> EngineOptions:
        return EngineOptions(
            zero_stage=zero_stage,
            dtype=self.dtype,
            offload=offload,
            micro_batch_size=self.args.per_device_training_batch_size,
            gradient_accumulation_steps=self.args.gradient_accumulation_steps,
            world_size=distributed.world_size(),
            gradient_clipping=self.args.gradient_clipping,
            overrides=self.ds_overrides,
        )

    def _model_options(self, name: str, ds_config: dict[str, Any], **more: Any) -> ModelOptions:
        args = self.args
        return ModelOptions(
            name,
            dtype=self.dtype,
            dropout=0.0,  # old and new log-probabilities must agree before the first update
            pad_vocab_multiple=args.pad_vocab_multiple,
            trust_remote_code=args.trust_remote_code,
            ds_config=ds_config,
            is_packed=args.packed,
            **more,
        )

    def _lora(self, role: str) -> LoraOptions:
        args = self.args
        dim, alpha = getattr(args, f"{role}_lora_dim"), getattr(args, f"{role}_lora_alpha")
        return LoraOptions(dim, alpha, getattr(args, f"{role}_lora_module_name"), args.only_optimize_lora)

    def _train_config(self, role: str) -> dict[str, Any]:
        return build_train_config(
            self._engine_options(getattr(self.args, f"{role}_zero_stage"), self.args.offload)
        )

    def _frozen_config(self, role: str, offload: bool) -> dict[str, Any]:
        stage = 3 if getattr(self.args, f"{role}_zero_stage") == 3 else 0
        return build_frozen_config(self._engine_options(stage, "param" if offload else "none"))

    def _engine(self, role: str, model: nn.Module, ds_config: dict[str, Any]) -> Any:
        args = self.args
        return build_engine(
            model,
            ds_config,
            learning_rate=getattr(args, f"{role}_learning_rate"),
            weight_decay=getattr(args, f"{role}_weight_decay"),
            lora_learning_rate=getattr(args, f"{role}_lora_learning_rate"),
            beta2=args.adam_beta2,
            schedule=args.lr_scheduler_type,
            num_warmup_steps=args.num_warmup_steps,
            num_steps=self.num_optimizer_steps,
        )

    def build_actor(self) -> Actor:
        """Return the actor in a hybrid engine. Every rank must call this."""
        args, ds_config = self.args, self._train_config("actor")
        policy = self.load_actor(ds_config)
        engine = self._engine("actor", policy, ds_config)
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
        args = self.args
        checkpointing = args.actor_gradient_checkpointing
        options = self._model_options(
            args.actor_model_name_or_path, ds_config, gradient_checkpointing=checkpointing
        )
        model = load_causal_lm(options, len(self.tokenizer))
        return self._policy(add_lora(model, self._lora("actor"), args.seed))

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
        ds_config = self._frozen_config("actor", args.offload_reference_model)
        options = self._model_options(args.actor_model_name_or_path, ds_config)
        policy = self._policy(load_causal_lm(options, len(self.tokenizer)))
        frozen = Frozen(policy, ds_config, offload=args.offload_reference_model)
        return Reference(frozen, is_packed=self._is_packed(policy.causal_lm))

    def build_critic(self) -> Critic:
        """Return the critic, which begins as the reward model. Every rank must call this."""
        ds_config = self._train_config("critic")
        model = self.load_critic(ds_config)
        return Critic(self._engine("critic", model, ds_config), is_packed=self._is_packed(model.classifier))

    def load_critic(self, ds_config: dict[str, Any]) -> ValueModel:
        """Return what the critic's engine trains. Every rank must call this."""
        args = self.args
        checkpointing = args.critic_gradient_checkpointing
        options = self._model_options(
            args.critic_model_name_or_path, ds_config, gradient_checkpointing=checkpointing
        )
        return load_value_model(options, len(self.tokenizer), self._lora("critic"), seed=args.seed)

    def build_reward(self, path: str) -> Reward:
        """Return a reward model, frozen. Every rank must call this."""
        args = self.args
        ds_config = self._frozen_config("critic", args.offload_reward_model)
        model = load_value_model(self._model_options(path, ds_config), len(self.tokenizer))
        frozen = Frozen(model, ds_config, offload=args.offload_reward_model)
        return Reward(frozen, is_packed=self._is_packed(model.classifier))
