"""Flags that no program defines: DeepSpeed-Chat's of other names or without effect, and removed ones.

A program takes a name whose flag it has, and every program that loads a tokenizer what has no effect.
"""

from typing import Any

# In DeepSpeed-Chat's scripts of one time or another; taken wherever no flag of now has that name.
OLDER_NAMES = {
    "generation_batches": "generation_batch_numbers",
    "per_device_generation_batch_size": "per_device_train_batch_size",
    "per_device_training_batch_size": "per_device_mini_train_batch_size",
    "max_train_steps": "test_stop_step",
}

# A switch, and the flag and value that it stands for where that flag is not given itself.
SWITCHES = {
    "disable_dropout": ("dropout", "0"),
    "enable_tensorboard": ("trackers", "tensorboard"),
    "enable_ema": ("ema_decay", "0.992"),
    "print_answers": ("print_answers_interval", "1"),
    "overwrite_output_dir": ("resume", "overwrite"),
}


def rename_flags(saved: dict[str, Any]) -> dict[str, Any]:
    """Return the flags of a run that an earlier version saved, what its switches stood for among them."""
    flags = dict(saved)
    for name, (target, value) in SWITCHES.items():
        is_on = flags.pop(name, None)
        if is_on is False and name in ("enable_ema", "print_answers"):
            flags.pop(target, None)  # it had a value that did nothing
        if is_on and name == "disable_dropout":
            flags[target] = float(value)
        if is_on and name == "enable_tensorboard":
            flags[target] = [*flags.get(target, []), value]
    return flags


# Accepted and ignored: why.
IGNORED = {
    "preprocessing_num_workers": "the tokenizer uses its own threads, rank 0 tokenises once for all",
    "num_padding_at_beginning": "lengths are carried along, so leading padding needs no special case",
    "print_loss": "the loss is printed at every step",
    "compute_fp32_loss": "losses are always computed in fp32",
    "deepspeed": "every program runs on DeepSpeed",
    "deepspeed_config": "use --ds_config FILE to override single keys",
    "offload_reference_model": "no reference model is held: its log-probabilities are computed before",
    "align_overflow": "each fp16 engine skips its own overflowing steps",
    "actor_dropout": "dropout is off in PPO",
    "critic_dropout": "dropout is off in PPO",
    "disable_actor_dropout": "dropout is off in PPO",
    "disable_critic_dropout": "dropout is off in PPO",
    "enable_mixed_precision_lora": "it belonged to DeepSpeed's MixZ++",
    "enable_test_mode": "--test_stop_step alone is --max_train_steps",
    "num_beams": "answers are greedy or sampled, never searched with beams",
    "num_beam_groups": "answers are greedy or sampled, never searched with beams",
    "penalty_alpha": "contrastive search left transformers",
}

# Ours of earlier versions: the default that they had, and what there is instead.
REMOVED = {
    "early_stop_imp_ratio": (0.0, "--early_stop_kl ends a step's updates"),
    "kl_horizon": (10000, "it is 10,000 samples; --kl_target says where kl_coef is steered to"),
    "max_logprob_gap": (1e-3, "the sampler is trusted up to 1e-3 nats a token; --old_logprobs says more"),
    "max_out_tokens": (0, "a slot has room for --max_prompt_seq_len + --max_answer_seq_len"),
    "eval_before_training": (True, "every evaluated run is evaluated before its first step"),
    "min_reward_accuracy": (0.6, "reward models are warned of below a held-out accuracy of 0.6"),
    "actor_lora_alpha": (0.0, "--lora_alpha is that of both roles"),
    "critic_lora_alpha": (0.0, "--lora_alpha is that of both roles"),
    "reward_model_name_or_path": ("", "--reward model:PATH is the same"),
    "adam_beta2": (0.95, "it is 0.95"),
    "check_collectives": (False, "TORCH_DISTRIBUTED_DEBUG=DETAIL in the environment is the same"),
    "export_critic": (False, "`python export.py OUTPUT_DIR --what critic --output DIR` writes it"),
    "export_interval": (0, "`python export.py CHECKPOINT --output DIR` makes an export of any checkpoint"),
    "length_reward_coef": (0.0, "--length_reward_tokens alone is a penalty of 1"),
    "on_save_error": ("go_on", "a run continues and saves at the next interval"),
    "overlong_penalty": (0.0, "--overlong_buffer_tokens alone is a penalty of 1"),
    "sample_interval": (0, "--eval_interval judges held-out prompts and shows answers"),
    "save_points": ("step", "checkpoints are of whole steps; a run that is stopped saves within one too"),
    "truncated_penalty": (-1.0, "`--truncated SCORE`, a number, is the score of a cut response"),
    "value_norm_beta": (0.99995, "it is 0.99995"),
}
