"""Compatibility with transformers 4: fields of a saved model that it reads under other names than
transformers 5 writes. PURE.

Programs built on transformers 4 (vLLM, converters, trainers) silently use a default if a name is missing.
transformers 5 reads a file with both names like one with only its own.
"""

from typing import Any

LOCAL = "rope_local_base_freq"  # RoPE base of sliding-window layers
OLDER_NAMES = {  # families with their own names
    "gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
    "gpt_neox_japanese": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
    "modernbert": {"rope_theta": "global_rope_theta", LOCAL: "local_rope_theta"},
    "modernbert-decoder": {"rope_theta": "global_rope_theta", LOCAL: "local_rope_theta"},
}
NEWER_TOKENIZERS = ("TokenizersBackend", "PythonBackend")  # classes that transformers 4 lacks
# Families whose scaling has a `type`, and only these keys.
SCALING_KEYS = {
    "olmo": ("type", "factor"),
    "olmo2": ("type", "factor"),
    "phi3": ("type", "short_factor", "long_factor"),
    "phi4_multimodal": ("type", "short_factor", "long_factor"),
}


def add_older_names(config: dict[str, Any]) -> None:
    """Add the names that transformers 4 reads to the contents of a config.json and its parts."""
    for part in config.values():
        if isinstance(part, dict) and "model_type" in part:
            add_older_names(part)
    if "dtype" in config:
        config["torch_dtype"] = config["dtype"]  # name before 4.56
    if config.get("model_type") == "qwen3_moe":
        config["num_experts"] = config["num_local_experts"]
    if config.get("model_type") == "granitemoehybrid":
        older = {"linear_attention": "mamba", "full_attention": "attention"}
        config["layer_types"] = [older[kind] for kind in config["layer_types"]]
    _add_rope(config)


def _add_rope(config: dict[str, Any]) -> None:
    """Add base, scaling and fraction of rotary positions, which transformers 5 keeps in one dictionary or in
    one per kind of layer.
    """
    parameters = config.get("rope_parameters") or {}
    family = config.get("model_type", "")
    names = OLDER_NAMES.get(family, {})
    has_local = family.startswith("gemma3") or LOCAL in names
    scaling = dict(parameters.get("full_attention", {}) if has_local else parameters)
    if "rope_theta" not in scaling:  # kinds of layers that transformers 4 lacks
        return
    older = {name: scaling.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in scaling}
    if has_local:
        older[LOCAL] = parameters["sliding_attention"]["rope_theta"]
    config |= {names.get(name, name): value for name, value in older.items()}
    if family in SCALING_KEYS:
        scaling["type"] = scaling["rope_type"]
        scaling = {key: scaling[key] for key in SCALING_KEYS[family] if key in scaling}
    if LOCAL not in names and len(scaling) > 1:  # null would unset rope_parameters in transformers 5
        config["rope_scaling"] = scaling


def add_older_tokenizer_names(config: dict[str, Any], base: dict[str, Any], tokenizer: Any) -> None:
    """Add the names that transformers 4 reads to the contents of a tokenizer_config.json; `base` is the
    contents of the base model's file.
    """
    named = base.get("tokenizer_class") or config["tokenizer_class"]
    config["tokenizer_class"] = "PreTrainedTokenizerFast" if named in NEWER_TOKENIZERS else named
    if isinstance(config.get("extra_special_tokens"), list):  # transformers 4 expects a dictionary there
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    if "model_specific_special_tokens" in config:  # such as Gemma 3's image_token
        config["extra_special_tokens"] = config["model_specific_special_tokens"]
    config["model_input_names"] = tokenizer.model_input_names  # PreTrainedTokenizerFast differs
    config["padding_side"] = tokenizer.padding_side  # not saved by transformers 5
    ids = tokenizer("a").input_ids  # its classes rebuild the post-processor from these
    config["add_bos_token"] = ids[0] == tokenizer.bos_token_id
    config["add_eos_token"] = ids[-1] == tokenizer.eos_token_id
