"""Tiny models and data for runs of whole programs: everything is made on the spot, from fixed seeds."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tiny_configs import tiny_config
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from common.models.loading import ModelOptions, load_causal_lm
from common.models.lora import LoraOptions, add_lora, trained_weights
from common.runs.export import save_adapter

HIDDEN, NUM_POSITIONS = 32, 128
WORDS = ("the", "quick", "brown", "fox", "is", "fine", "warm", "sunny", "day", "cat", "dog", "you", "weather")


def save_causal_lm(
    folder: Path, tokenizer: PreTrainedTokenizerFast | None, *, family: str = "llama", seed: int = 0
) -> Path:
    """Return the folder of a random two-layer model (GPT-2's are tied and lie the other way round).

    Its EOS is likely after some texts and not after others, so that responses end after unequal lengths.
    """
    torch.manual_seed(seed)
    num_tokens = len(tokenizer) if tokenizer else 320
    if family == "gpt2":
        config = GPT2Config(
            n_embd=HIDDEN, n_layer=2, n_head=4, n_positions=NUM_POSITIONS, vocab_size=num_tokens
        )
        model = GPT2LMHeadModel(config)
    elif family == "mixtral":
        config = tiny_config(family, num_tokens)
        config.router_aux_loss_coef = 0.1  # a hundred times the usual: it is to be seen
        config.bos_token_id = config.eos_token_id = tokenizer.eos_token_id if tokenizer else 0
        model = MixtralForCausalLM(config)
    else:
        model = LlamaForCausalLM(_llama_config(num_tokens, num_layers=2))
    if tokenizer and tokenizer.eos_token:
        nn.init.normal_(model.lm_head.weight[tokenizer.eos_token_id], std=0.5)
    return _save(folder, model, tokenizer)


def save_reward_model(folder: Path, tokenizer: PreTrainedTokenizerFast, *, seed: int = 1) -> Path:
    """Return the folder of a random reward model whose scores differ from text to text."""
    torch.manual_seed(seed)
    model = LlamaForSequenceClassification(_llama_config(len(tokenizer), num_layers=2))
    nn.init.normal_(model.score.weight, std=0.3)
    return _save(folder, model, tokenizer)


def save_token_lover(folder: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    """Return the folder of a reward model that is made by hand: it loves texts of tokens with an even id.

    An embedding says +1 or -1 in its first place, and a constant in its second. Attention with queries of
    zero takes the mean over all tokens; nothing else is done. The score grows with that mean, and with what
    the last token says.
    """
    model = LlamaForSequenceClassification(_llama_config(len(tokenizer), num_layers=1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        embeddings, layer = model.model.embed_tokens.weight, model.model.layers[0]
        embeddings[:, 0] = torch.where(torch.arange(len(tokenizer)) % 2 == 0, 1.0, -1.0)
        embeddings[:, 1] = 2.0
        for norm in (layer.input_layernorm, layer.post_attention_layernorm, model.model.norm):
            norm.weight.fill_(1.0)
        layer.self_attn.v_proj.weight[0, 0] = 1.0
        layer.self_attn.o_proj.weight[0, 0] = 1.0
        model.score.weight[0, 0] = 1.0
    return _save(folder, model, tokenizer)


def save_random_adapter(folder: Path, base: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    """Return the folder of an adapter that moves its base, as step 1 writes it."""
    model = add_lora(load_causal_lm(ModelOptions(str(base)), len(tokenizer)), LoraOptions(dim=4))
    torch.manual_seed(2)
    for weight in trained_weights(model).values():
        if weight.lora_b is not None:
            nn.init.normal_(weight.lora_b, std=0.1)
    save_adapter(folder, model, tokenizer, metadata={})
    return folder


def _llama_config(num_tokens: int, *, num_layers: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=num_tokens,
        max_position_embeddings=NUM_POSITIONS,
        initializer_range=0.1,  # far from uniform: a wrong position or mask shows in every number
        num_labels=1,
    )


def _save(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None) -> Path:
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def make_rows(count: int, *, seed: int = 0) -> list[dict[str, str]]:
    """Return rows that serve all three steps, of very different lengths; chosen is full of "fine"."""
    draw = random.Random(seed)

    def say(num_words: int, more: Sequence[str] = ()) -> str:
        return " ".join(draw.choice([*WORDS, *more]) for _ in range(num_words))

    rows = []
    for index in range(count):
        long = 14 if index % 4 == 0 else 2
        prompt = f"{say(draw.randint(1, long))} {index}?"
        chosen, rejected = (
            say(draw.randint(1, long + 4), ("fine",) * 12),
            say(draw.randint(1, long + 4), ("dog",) * 12),
        )
        rows.append({"prompt": prompt, "chosen": f"{chosen}.", "rejected": f"{rejected}!"})
    return rows


def write_rows(path: Path, rows: Sequence[dict[str, Any] | str]) -> Path:
    """Return the path of a JSON lines file; a str is a line as it stands."""
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def save_inputs(folder: Path, tokenizer: PreTrainedTokenizerFast) -> SimpleNamespace:
    """Tiny models and data in a folder, by name."""
    texts = [{"text": f"{r['prompt']} {r['chosen']}"} for r in make_rows(60, seed=9)]
    return SimpleNamespace(
        base=save_causal_lm(folder / "base", tokenizer),
        gpt2=save_causal_lm(folder / "gpt2", tokenizer, family="gpt2"),
        mixtral=save_causal_lm(folder / "mixtral", tokenizer, family="mixtral"),
        reward=save_reward_model(folder / "reward", tokenizer),
        rows=write_rows(folder / "rows.jsonl", make_rows(50)),
        text=write_rows(folder / "text.jsonl", texts),
        cache=folder / "cache",
        folder=folder,
    )


def step_flags(tiny: Any, step: int, **more: Any) -> dict[str, Any]:
    """Return flags of a short run of a step on tiny models and data, and more; None leaves a flag out."""
    flags: dict[str, Any] = {"data_path": tiny.rows, "data_output_path": tiny.cache}
    if step == 3:
        flags |= {"actor_model_name_or_path": tiny.base, "critic_model_name_or_path": tiny.reward}
        flags |= {"per_device_generation_batch_size": 4, "per_device_training_batch_size": 4}
        flags |= {"max_prompt_seq_len": 24, "max_answer_seq_len": 8}
    else:
        flags |= {"model_name_or_path": tiny.base, "max_seq_len": 48, "per_device_train_batch_size": 4}
    return {name: value for name, value in (flags | more).items() if value is not None}


def from_words(text: str) -> dict[str, str]:
    """Return the flags of a command line, by name."""
    words = text.split()
    return {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}
