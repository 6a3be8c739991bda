"""The model families that the tests go through."""

FAMILIES = ("opt", "gpt2", "gpt_neox", "bloom", "llama", "qwen2")
# Generation goes through every family that has a decoder of its own in transformers.
DECODERS = FAMILIES + (
    "gptj", "falcon", "falcon_alibi", "falcon_new", "qwen3", "mistral", "mistral_window", "gemma", "gemma2",
    "phi",
)  # fmt: skip
