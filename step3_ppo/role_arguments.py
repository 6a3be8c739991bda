"""Flags of step 3's four models. Does not import torch."""

from dataclasses import dataclass, fields

from common.flags.args import REQUIRED, flag


@dataclass(frozen=True)
class RoleFlags:
    """The flags of one role, under the names that steps 1 and 2 have for them."""

    model_name_or_path: str
    learning_rate: float
    lora_learning_rate: float
    weight_decay: float
    zero_stage: int
    offload: str
    gradient_checkpointing: bool
    lora_dim: int
    lora_module_name: str


@dataclass
class RoleArguments:
    """Actor, critic, reference and reward models."""

    actor_model_name_or_path: str = flag(
        REQUIRED, "SFT model or its LoRA adapter; also the reference", is_usual=True
    )
    critic_model_name_or_path: str = flag(
        "",
        "initial critic: a reward model or its adapter, or with --reward also a language model, which gets "
        "a new value head; empty with --reward: the actor's model",
        is_usual=True,
    )
    teacher_model_name_or_path: str = flag("", "teacher for --algorithm distill; it replaces the reference")
    actor_learning_rate: float = flag(9.65e-6, "peak learning rate of the actor", low=0, is_usual=True)
    critic_learning_rate: float = flag(5e-6, "peak learning rate of the critic", low=0, is_usual=True)
    actor_weight_decay: float = flag(0.0, "AdamW weight decay of the actor's matrices", low=0)
    critic_weight_decay: float = flag(0.0, "AdamW weight decay of the critic's matrices", low=0)
    actor_zero_stage: int = flag(
        0,
        "ZeRO stage of the actor; 3 also shards the reference or teacher",
        choices=(0, 1, 2, 3),
        may_change=True,
        is_usual=True,
    )
    critic_zero_stage: int = flag(
        0, "ZeRO stage of the critic; 3 also shards the reward models", choices=(0, 1, 2, 3), may_change=True
    )
    critic_offload: str = flag(
        "",
        "--offload for the critic; empty: the value of --offload",
        choices=("", "none", "optimizer", "param", "all"),
        may_change=True,
    )
    actor_gradient_checkpointing: bool = flag(
        False, "recompute the actor's activations in the backward pass", may_change=True
    )
    critic_gradient_checkpointing: bool = flag(
        False, "recompute the critic's activations in the backward pass", may_change=True
    )
    offload_reference_model: bool = flag(
        False,
        "keep the weights of the reference or teacher on the CPU between uses",
        may_change=True,
        only_with="actor_lora_dim=0 teacher_model_name_or_path",
    )
    ref_ema_decay: float = flag(
        0.0,
        "EMA decay of the reference, which then follows the actor; 0: the reference is the initial actor",
        low=0,
        below=1,
    )
    offload_reward_model: bool = flag(
        False, "keep the weights of the reward models on the CPU between uses", may_change=True
    )
    actor_lora_dim: int = flag(
        0, "rank of the actor's LoRA adapters; 0: no LoRA", low=0, high=2**16, is_usual=True
    )
    actor_lora_module_name: str = flag(
        "auto",
        "adapt the actor's linear layers and stacked experts whose names contain this text or match this "
        "regular expression; auto: all linear layers except the head",
        only_with="actor_lora_dim",
    )
    actor_lora_learning_rate: float = flag(
        5e-5, "learning rate of the actor's adapters", low=0, only_with="actor_lora_dim"
    )
    critic_lora_dim: int = flag(0, "rank of the critic's LoRA adapters; 0: no LoRA", low=0, high=2**16)
    critic_lora_module_name: str = flag(
        "auto",
        "adapt the critic's linear layers and stacked experts whose names contain this text or match this "
        "regular expression; auto: all linear layers except the head",
        only_with="critic_lora_dim",
    )
    critic_lora_learning_rate: float = flag(
        5e-5, "learning rate of the critic's adapters", low=0, only_with="critic_lora_dim"
    )
    lora_alpha: float = flag(
        0.0,
        "LoRA alpha, where the adapter is scaled by alpha / rank; 0: alpha = rank",
        low=0,
        only_with="actor_lora_dim critic_lora_dim",
    )
    only_optimize_lora: bool = flag(
        True, "train only the adapters and the value head", only_with="actor_lora_dim critic_lora_dim"
    )
    load_in_4bit: bool = flag(
        False,
        "load the base models of adapters in 4 bits (NF4, bitsandbytes); needs --actor_lora_dim or "
        "--critic_lora_dim",
    )

    @property
    def actor(self) -> RoleFlags:
        """The actor's flags; the reference follows its --actor_zero_stage."""
        return self._of_role("actor", self.offload)

    @property
    def critic(self) -> RoleFlags:
        """The critic's flags; the reward models follow its --critic_zero_stage."""
        return self._of_role("critic", self.critic_offload or self.offload)

    def roles(self) -> dict[str, RoleFlags]:
        """Flags of each trained model, by the prefix of their names."""
        return {"actor_": self.actor, "critic_": self.critic}

    def _of_role(self, role: str, offload: str) -> RoleFlags:
        names = [field.name for field in fields(RoleFlags) if field.name != "offload"]
        return RoleFlags(**{name: getattr(self, f"{role}_{name}") for name in names}, offload=offload)
