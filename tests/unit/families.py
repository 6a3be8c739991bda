"""The model families that the tests go through."""

FAMILIES = ("opt", "gpt2", "gpt_neox", "bloom", "llama", "qwen2")
