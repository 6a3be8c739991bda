"""The four roles: actor, reference, critic, reward. Each answers `score`; the actor `generate`s, two
`update`.

# B sequences, P prompt, R response, T = P + R, V vocabulary
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import deepspeed
import torch
from torch import nn

from common import distributed
from common.decode_state import SamplingOptions
from common.ds_config import EngineOptions, build_frozen_config, build_train_config
from common.engine_step import LossTerm, update_engine
from common.generate import Generation
from common.models import LoraOptions, ModelOptions, add_lora, compute_logits, load_causal_lm
from common.tensor_ops import token_entropy, token_logprobs
from common.training_loop import build_engine
from common.value_model import gather_scores, load_value_model
from common.zero3 import local_shard, swapped_shards
from step3_ppo.arguments import PPOArguments
from step3_ppo.hybrid_engine import HybridEngine
from step3_ppo.hybrid_options import hybrid_options


class TokenScores(NamedTuple):
    """A value model's answer to prompts with responses."""

    values: torch.Tensor  # (B, R) fp32, of the state before each response token
    last_values: torch.Tensor  # (B,) fp32, at the last real token: a reward model's score


def whole_sequences(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (input_ids, attention_mask), both (B, T) on this rank's device, of prompts with responses."""
    input_ids = torch.cat([batch.prompt_ids, batch.response_ids], dim=1)
    attention_mask = torch.cat([batch.prompt_mask.bool(), batch.response_mask], dim=1).long()
    return input_ids.to(distributed.device()), attention_mask.to(distributed.device())


class Frozen:
    """A model that is only read; `offload` keeps its weights on the CPU between uses."""

    def __init__(self, model: nn.Module, ds_config: dict[str, Any], *, offload: bool) -> None:
        model.requires_grad_(False)
        self.is_offloaded = offload and ds_config["zero_optimization"]["stage"] != 3
        if (
            ds_config["zero_optimization"]["stage"] == 3
        ):  # sharded: DeepSpeed gathers and offloads as it reads
            model, *_ = deepspeed.initialize(model=model, config=ds_config)
        elif not self.is_offloaded:
            model.to(distributed.device())
        model.eval()  # a DeepSpeed engine's eval returns nothing
        self.model = model

    @contextmanager
    def on_device(self) -> Iterator[nn.Module]:
        """Give the model with its weights where they can be computed with."""
        try:
            yield self.model.to(distributed.device()) if self.is_offloaded else self.model
        finally:
            if self.is_offloaded:
                self.model.to("cpu")


class AdapterOff:
    """The actor as it began: its adapters off, and the few other weights that train put back meanwhile.

    Those are all but the adapted matrices, unless --only_optimize_lora; each rank keeps its own part of them.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.others = {
            name: parameter
            for name, parameter in engine.module.named_parameters()
            if parameter.requires_grad and ".lora_" not in name
        }
        self.beginnings = {name: local_shard(p).detach().clone() for name, p in self.others.items()}

    @contextmanager
    def on_device(self) -> Iterator[nn.Module]:
        """Give the engine while it computes what it computed before training. Every rank must call this."""
        self.engine.eval()
        with self.engine.module.disable_adapter(), swapped_shards(self.others, self.beginnings):
            yield self.engine


class Policy:
    """Log-probabilities of responses: the actor and the reference."""

    def __init__(self, *, num_valid_tokens: int, temperature: float) -> None:
        self.num_valid_tokens, self.temperature = num_valid_tokens, temperature

    def compute_logprobs(
        self, model: Any, batch: Any, *, with_entropy: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """Return logprobs (B, R) fp32 of the response tokens, and their entropies if asked.

        Positions that pad count nothing and may hold any number.
        """
        input_ids, attention_mask = whole_sequences(batch)
        num_response = batch.response_ids.shape[1]
        logits = compute_logits(model, input_ids, attention_mask, num_last=num_response + 1)[:, :-1]
        options = {"temperature": self.temperature, "num_valid_tokens": self.num_valid_tokens}
        logprobs = token_logprobs(logits, input_ids[:, -num_response:], **options)
        return (logprobs, token_entropy(logits, **options)) if with_entropy else (logprobs,)


class Reference(Policy):
    """The frozen policy that the KL penalty is measured against."""

    def __init__(self, frozen: Frozen | AdapterOff, **options: Any) -> None:
        super().__init__(**options)
        self.frozen = frozen

    @torch.no_grad()
    def score(self, batch: Any) -> torch.Tensor:
        """Return logprobs (B, R) fp32. Every rank must call this."""
        with self.frozen.on_device() as model:
            return self.compute_logprobs(model, batch)[0]


class Actor(Policy):
    """The policy that is trained."""

    def __init__(self, hybrid_engine: HybridEngine, sampling: SamplingOptions, **options: Any) -> None:
        super().__init__(**options)
        self.hybrid_engine, self.sampling = hybrid_engine, sampling
        self.engine = hybrid_engine.engine

    def generation_mode(self) -> Any:
        """Give the inference module, see `HybridEngine.generation_mode`."""
        return self.hybrid_engine.generation_mode()

    def generate(
        self, prompt_ids: torch.Tensor, prompt_mask: torch.Tensor, sample_ids: torch.Tensor
    ) -> Generation:
        """Return one sampled response for each left-padded prompt. Every rank must call this."""
        inputs = [x.to(distributed.device()) for x in (prompt_ids, prompt_mask, sample_ids)]
        with self.generation_mode():
            return self.hybrid_engine.generate(*inputs, self.sampling)

    @torch.no_grad()
    def score(self, batch: Any) -> torch.Tensor:
        """Return logprobs (B, R) fp32 under the present weights. Every rank must call this."""
        self.engine.eval()
        return self.compute_logprobs(self.engine, batch)[0]

    def update(self, terms: Sequence[LossTerm]) -> dict[str, float]:
        """Return the means after one optimizer step. Every rank must call this."""
        self.engine.train()
        return update_engine(self.engine, terms)


class ValueRole:
    """Values of responses: the critic and the reward model."""

    def compute_values(self, model: Any, batch: Any) -> TokenScores:
        """Return the values of every state of a response, and of the one after it."""
        input_ids, attention_mask = whole_sequences(batch)
        num_prompt, num_response = batch.prompt_ids.shape[1], batch.response_ids.shape[1]
        values = model(input_ids, attention_mask)  # (B, T)
        last_positions = num_prompt + batch.response_mask.sum(1).to(values.device) - 1
        before_each_token = values[:, num_prompt - 1 : num_prompt + num_response - 1]
        return TokenScores(before_each_token, gather_scores(values, last_positions))


class Reward(ValueRole):
    """The frozen reward model."""

    def __init__(self, frozen: Frozen) -> None:
        self.frozen = frozen

    @torch.no_grad()
    def score(self, batch: Any) -> torch.Tensor:
        """Return scores (B,) fp32, each read at the last real token. Every rank must call this."""
        with self.frozen.on_device() as model:
            return self.compute_values(model, batch).last_values


class Critic(ValueRole):
    """The value function that is trained."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    @torch.no_grad()
    def score(self, batch: Any) -> TokenScores:
        """Return values under the present weights. Every rank must call this."""
        self.engine.eval()
        return self.compute_values(self.engine, batch)

    def update(self, terms: Sequence[LossTerm]) -> dict[str, float]:
        """Return the means after one optimizer step. Every rank must call this."""
        self.engine.train()
        return update_engine(self.engine, terms)


@dataclass
class Roles:
    """The models of a PPO run."""

    actor: Actor
    reference: Reference
    critic: Critic
    reward: Reward


@dataclass(frozen=True)
class RoleBuilder:
    """Builds roles from the flags; `num_optimizer_steps` is the length of both learning-rate schedules."""

    args: PPOArguments
    dtype: str
    tokenizer: Any
    num_optimizer_steps: int
    ds_overrides: dict[str, Any]

    def build(self) -> Roles:
        """Return all four. Every rank must call this."""
        actor = self.build_actor()
        return Roles(actor, self.build_reference(actor), self.build_critic(), self.build_reward())

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
        args, ds_config, lora = self.args, self._train_config("actor"), self._lora("actor")
        checkpointing = args.actor_gradient_checkpointing
        options = self._model_options(
            args.actor_model_name_or_path, ds_config, gradient_checkpointing=checkpointing
        )
        model = load_causal_lm(options, len(self.tokenizer))
        engine = self._engine("actor", add_lora(model, lora, args.seed), ds_config)
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
        return Actor(HybridEngine(engine, hybrid_options(args)), sampling, **self._policy_options())

    def _policy_options(self) -> dict[str, Any]:
        return {"num_valid_tokens": len(self.tokenizer), "temperature": self.args.temperature}

    def build_reference(self, actor: Actor) -> Reference:
        """Return the actor's beginning, frozen; with LoRA it is the actor itself. Every rank must call
        this.
        """
        args = self.args
        if args.actor_lora_dim:
            return Reference(AdapterOff(actor.engine), **self._policy_options())
        ds_config = self._frozen_config("actor", args.offload_reference_model)
        options = self._model_options(args.actor_model_name_or_path, ds_config)
        model = load_causal_lm(options, len(self.tokenizer))
        frozen = Frozen(model, ds_config, offload=args.offload_reference_model)
        return Reference(frozen, **self._policy_options())

    def build_critic(self) -> Critic:
        """Return the critic, which begins as the reward model. Every rank must call this."""
        args, ds_config = self.args, self._train_config("critic")
        checkpointing = args.critic_gradient_checkpointing
        options = self._model_options(
            args.critic_model_name_or_path, ds_config, gradient_checkpointing=checkpointing
        )
        model = load_value_model(options, len(self.tokenizer), self._lora("critic"), seed=args.seed)
        return Critic(self._engine("critic", model, ds_config))

    def build_reward(self) -> Reward:
        """Return the reward model, frozen. Every rank must call this."""
        args = self.args
        ds_config = self._frozen_config("critic", args.offload_reward_model)
        name = args.reward_model_name_or_path or args.critic_model_name_or_path
        model = load_value_model(self._model_options(name, ds_config), len(self.tokenizer))
        return Reward(Frozen(model, ds_config, offload=args.offload_reward_model))
