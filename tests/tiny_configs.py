"""Configurations of random models of two layers and hidden size 32, a family each."""

from typing import Any

import transformers

# Its attention calls what is registered from transformers 5.24 on.
PADDED_IN_5_23 = {"gptj"} if transformers.__version__.startswith("5.23.") else set()

_HEADS = {"num_attention_heads": 4, "hidden_size": 32, "num_hidden_layers": 2}
_MLP = _HEADS | {"intermediate_size": 64, "max_position_embeddings": 128}
_GROUPED = _MLP | {"num_key_value_heads": 2}
_GEMMA = _GROUPED | {"head_dim": 8, "hidden_activation": "gelu_pytorch_tanh"}
_FALCON = _HEADS | {"max_position_embeddings": 128}
_MIXTURE = _GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}

CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "opt": (transformers.OPTConfig, _MLP | {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "gpt2": (transformers.GPT2Config, _GPT2),
    "gptj": (transformers.GPTJConfig, _GPT2 | {"rotary_dim": 4}),
    "gpt_neox": (transformers.GPTNeoXConfig, _MLP),
    "bloom": (transformers.BloomConfig, {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "falcon": (transformers.FalconConfig, _FALCON | {"alibi": False, "multi_query": True}),
    "falcon_alibi": (transformers.FalconConfig, _FALCON | {"alibi": True, "multi_query": False}),
    "falcon_new": (
        transformers.FalconConfig,
        _FALCON | {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "llama": (transformers.LlamaConfig, _GROUPED),
    "qwen2": (transformers.Qwen2Config, _GROUPED),
    "qwen3": (transformers.Qwen3Config, _GROUPED | {"head_dim": 8}),
    "mistral": (transformers.MistralConfig, _GROUPED),
    "mistral_window": (transformers.MistralConfig, _GROUPED | {"sliding_window": 6}),
    "gemma": (transformers.GemmaConfig, _GEMMA),
    "gemma2": (transformers.Gemma2Config, _GEMMA | {"sliding_window": 6, "query_pre_attn_scalar": 8}),
    "phi": (transformers.PhiConfig, _MLP),
    "mixtral": (transformers.MixtralConfig, _GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": (transformers.Qwen2MoeConfig, _MIXTURE | {"shared_expert_intermediate_size": 32}),
    "qwen3_moe": (transformers.Qwen3MoeConfig, _MIXTURE | {"head_dim": 8}),
}
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")
# Experts whose matrices lie the other way round, with biases; linear layers that are named like experts.
EXPERTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt_oss": (
        transformers.GptOssConfig,
        _GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 6},
    ),
    "deepseek_v3": (
        transformers.DeepseekV3Config,
        _MLP
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
        | {"moe_intermediate_size": 32, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8}
        | {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
    ),
}
# Their dropouts have other names, or are layer drop or router jitter.
_GPT_NEO = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
NOISY: dict[str, tuple[Any, dict[str, Any]]] = {
    "starcoder2": (transformers.Starcoder2Config, _GROUPED),
    "gpt_neo": (transformers.GPTNeoConfig, _GPT_NEO),
    "minimax": (
        transformers.MiniMaxConfig,
        _GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "block_size": 8},
    ),
    "xglm": (transformers.XGLMConfig, {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64}),
    "phi3": (transformers.Phi3Config, _GROUPED),
    "seed_oss": (transformers.SeedOssConfig, _GROUPED | {"head_dim": 8}),
}

FAMILIES = ("opt", "gpt2", "gpt_neox", "bloom", "llama", "qwen2")  # for what need not go through all
# What tensor parallelism must cut, and the families above do not have.
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "opt_projected": (
        transformers.OPTConfig,
        _MLP | {"ffn_dim": 64, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
    ),
    "bloom_twelve_heads": (transformers.BloomConfig, {"hidden_size": 48, "n_layer": 2, "n_head": 12}),
    "falcon_biased": (
        transformers.FalconConfig,
        _FALCON | {"alibi": False, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "falcon_alibi_one_key": (transformers.FalconConfig, _FALCON | {"alibi": True, "multi_query": True}),
    "llama_odd_vocabulary": (
        transformers.LlamaConfig,
        _GROUPED | {"vocab_size": 321, "mlp_bias": True, "attention_bias": True},
    ),
    "qwen2_tied": (transformers.Qwen2Config, _GROUPED | {"tie_word_embeddings": True}),
    "gemma_one_key_head": (transformers.GemmaConfig, _GEMMA | {"num_key_value_heads": 1}),
    "phi_with_norms": (transformers.PhiConfig, _MLP | {"num_key_value_heads": 2, "qk_layernorm": True}),
    "gemma3": (transformers.Gemma3TextConfig, _GROUPED | {"head_dim": 16}),
}

LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3_ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def tiny_gemma3_config(vocab_size: int) -> transformers.Gemma3Config:
    """Return the configuration of a Gemma 3 with an image part; its PAD is token 5."""
    text = _GROUPED | {"vocab_size": vocab_size, "head_dim": 8, "initializer_range": 0.2, "pad_token_id": 5}
    text |= {"query_pre_attn_scalar": 8}
    image = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    image |= {"image_size": 28, "patch_size": 14}
    return transformers.Gemma3Config(text_config=text, vision_config=image, mm_tokens_per_image=4)


def tiny_config(family: str, vocab_size: int) -> Any:
    """Return the configuration; its BOS and EOS are token 0."""
    maker, options = (CONFIGS | EXPERTS | NOISY | VARIANTS)[family]
    tokens = {"vocab_size": vocab_size, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    return maker(**(tokens | options))
