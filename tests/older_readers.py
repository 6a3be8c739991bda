"""Makes tests/older_readers.json, what transformers 4.57 reads in a model, in an environment of its own.

python -m venv older && older/bin/pip install transformers==4.57.6 torch
older/bin/python tests/older_readers.py
"""

import inspect
import json
from pathlib import Path

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 30.0}
LINEAR = {"rope_type": "linear", "factor": 8.0}
LONG = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
GEMMA3 = {"rope_theta": 1e6, "rope_local_base_freq": 9999.0, "head_dim": 8}
# Each with values that are not its class's own.
CASES = {
    "llama": ("llama", {"rope_theta": 1e6}),
    "llama_llama3": ("llama", {"rope_theta": 5e5, "rope_scaling": LLAMA3, "eos_token_id": [2, 8, 9]}),
    "llama_dynamic": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.5}}),
    "llama_older_scaling": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "mistral": ("mistral", {"rope_theta": 1e5, "sliding_window": 16, "head_dim": 8}),
    "qwen2": ("qwen2", {"rope_theta": 1e6, "rope_scaling": YARN, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"rope_theta": 1e6, "head_dim": 16}),
    "qwen3_moe": ("qwen3_moe", {"rope_theta": 1e6, "num_experts": 6}),
    "mixtral": ("mixtral", {"rope_theta": 1e5, "num_local_experts": 5}),
    "gpt_oss": ("gpt_oss", {"rope_theta": 2e5, "num_local_experts": 4}),
    "deepseek_v3": ("deepseek_v3", {"rope_theta": 2e4, "rope_scaling": YARN | {"mscale": 1.0}}),
    "gemma2": ("gemma2", {"rope_theta": 2e4, "head_dim": 8}),
    "gemma3_text": ("gemma3_text", GEMMA3 | {"rope_scaling": LINEAR}),
    "gemma3": ("gemma3", {"text_config": SIZES | GEMMA3 | {"rope_scaling": LINEAR}}),
    "mistral3": (
        "mistral3",
        {"text_config": SIZES | {"model_type": "mistral", "rope_theta": 1e9, "head_dim": 8}},
    ),
    "phi": ("phi", {"partial_rotary_factor": 0.25, "rope_theta": 3e4}),
    "phi3": ("phi3", {"rope_scaling": LONG, "original_max_position_embeddings": 64}),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.5, "rope_theta": 3e4}),
    "olmo2": ("olmo2", {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.5, "rotary_emb_base": 54321}),
    "modernbert-decoder": ("modernbert-decoder", {"global_rope_theta": 3e4, "local_rope_theta": 4e3}),
    "granitemoehybrid": ("granitemoehybrid", {"layer_types": ["mamba", "attention"], "mamba_n_heads": 4}),
    "falcon": ("falcon", {"rope_theta": 2e4, "alibi": False}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    "opt": ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "bloom": ("bloom", {"n_layer": 2}),
}


def main() -> None:
    configs, reads = {}, {}
    for name, (family, more) in CASES.items():
        given = more if "text_config" in more or family in ("gpt2", "bloom") else SIZES | more
        config = CONFIG_MAPPING[family](**given, dtype="bfloat16")
        configs[name] = json.loads(config.to_json_string())
        for part in (config, config.get_text_config()):
            parameters = inspect.signature(type(part).__init__).parameters.values()
            of_class = {p.name: p.default for p in parameters if p.default is not p.empty}
            reads[part.model_type] = {"tie_word_embeddings": True, "problem_type": None, **of_class}
    classes = [name for pair in TOKENIZER_MAPPING_NAMES.values() for name in pair if name]
    table = {
        "transformers": transformers.__version__,
        "configs": configs,
        "reads": reads,
        "tokenizer_classes": sorted({*classes, "PreTrainedTokenizerFast"}),
        "generation": sorted(transformers.GenerationConfig().to_dict()),
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
