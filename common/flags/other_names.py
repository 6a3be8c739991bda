"""Legacy flags: DeepSpeed-Chat's names, flags without effect, and removed flags.

A program accepts the older names of its flags; every program that loads a tokenizer accepts the flags
without effect.
"""

import re
from collections.abc import Collection
from typing import Any

# Names from different versions of DeepSpeed-Chat's scripts; accepted unless a current flag has that name.
OLDER_NAMES = {
    "generation_batches": "generation_batch_numbers",
    "per_device_generation_batch_size": "per_device_train_batch_size",
    "per_device_training_batch_size": "per_device_mini_train_batch_size",
    "max_train_steps": "test_stop_step",
}

# Switches, each with the flag and value that it sets unless that flag is given.
SWITCHES = {
    "disable_dropout": ("dropout", "0"),
    "enable_tensorboard": ("trackers", "tensorboard"),
    "enable_ema": ("ema_decay", "0.992"),
    "print_answers": ("print_answers_interval", "1"),
    "overwrite_output_dir": ("resume", "overwrite"),
}

# Switches of DeepSpeed-Chat that now take a value: the value of a flag that is given without one.
WITHOUT_VALUE = {"offload": "all", "critic_offload": "all", "whiten_scores": "batch"}

# Values that combined several numbers or words, which are now separate flags: the groups are these flags.
OLDER_FORMS = {
    "max_tokens_per_micro_batch": r"(?P<max_tokens_per_micro_batch>\d+),(?P<max_tokens_per_scoring_pass>\d+)",
    "clip_range": r"(?P<clip_range>[^,]+),(?P<clip_range_high>[^,]+)",
    "distill_loss": r"((?P<distill_weight>[^*]+)\*)?(?P<distill_loss>[^*:]+)((?<=jsd):(?P<distill_beta>.+))?",
    "early_stop_kl": r"(?P<early_stop_kl>.+):(?P<early_stop_action>skip)",
    "kl_in": r"(?P<kl_in>reward|loss):(?P<kl_estimator>k[123])",
    "optimizer": r"(?P<optimizer>muon):(?P<muon_learning_rate>.+)",
    "reward_on_error": r"(?P<reward_on_error>default):(?P<reward_default_score>.+)",
    "rollout_correction": (
        r"(?P<rollout_correction>(?!none)\w+):((?P<correction_low>[^,]+),)?(?P<correction_high>(?![0.]+$)[^,]+)"
    ),
    "truncated": r"((?P<truncated>bootstrap):)?(?P<truncated_score>[-+.\d].*)",
}


def split_values(flags: dict[str, Any], names: Collection[str]) -> list[str]:
    """Replace values in one of the `OLDER_FORMS` by the equivalent flags, if all of them are in `names`;
    return a note for each.
    """
    notes = []
    for name, form in OLDER_FORMS.items():
        match = re.fullmatch(form, str(flags.get(name, "")))
        groups = match.groupdict() if match else {}
        parts = {part: value.strip() for part, value in groups.items() if value is not None}
        if parts.get("correction_high") == "inf":
            parts["correction_high"] = "3e38"  # also no bound
        if parts.keys() - {name} and parts.keys() <= set(names):
            words = " ".join(f"--{part} {value}" for part, value in parts.items())
            notes.append(f"--{name} {flags.pop(name)} is an older spelling; write {words}")
            flags |= parts
    return notes


def rename_flags(saved: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Flags of a run saved by an earlier version, under their current `names` and with the flags that its
    switches set.
    """
    flags = dict(saved)
    split_values(flags, names)
    if flags.get("disable_dropout"):
        flags["dropout"] = 0.0
    if flags.get("enable_ema") is False:
        flags.pop("ema_decay", None)  # its value had no effect
    if isinstance(flags.get("whiten_scores"), bool):
        flags["whiten_scores"] = "batch" if flags["whiten_scores"] else "none"
    return flags


# Accepted and ignored, with the reason.
IGNORED = {
    "preprocessing_num_workers": "the tokenizer uses its own threads, and rank 0 tokenises for all ranks",
    "num_padding_at_beginning": "sequence lengths are stored, so leading padding needs no special case",
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
    "enable_mixed_precision_lora": "it belongs to DeepSpeed's MixZ++",
    "enable_test_mode": "--test_stop_step alone acts as --max_train_steps",
    "num_beams": "beam search is not supported: responses are greedy or sampled",
    "num_beam_groups": "beam search is not supported: responses are greedy or sampled",
    "penalty_alpha": "transformers has removed contrastive search",
}

# Flags of our earlier versions, with their defaults; CHANGELOG.md names the replacements.
REMOVED = {
    "max_logprob_gap": 0.001, "max_out_tokens": 0,
    "eval_before_training": True, "min_reward_accuracy": 0.6, "actor_lora_alpha": 0.0,
    "critic_lora_alpha": 0.0, "reward_model_name_or_path": "", "adam_beta2": 0.95,
    "check_collectives": False, "export_critic": False, "export_interval": 0, "length_reward_coef": 0.0,
    "on_save_error": "go_on", "overlong_penalty": 0.0, "sample_interval": 0, "save_points": "step",
    "truncated_penalty": -1.0, "use_decoupled_loss": False,
    "behav_imp_weight_cap": 0.0, "c_clip": 0.0,
}  # fmt: skip
