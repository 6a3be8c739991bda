"""The model folders of bench_ppo_step.py, read by ours and by the peer alike; and the tokenizer of both.

Weights are random, yet responses end as real ones do: the policy gives EOS the same probability p at every
place, so lengths are geometric, cut at `max_new_tokens`. How: every embedding has the same large first entry,
which the residual stream carries to the final norm; EOS's row of the output head reads that entry alone. The
logits of all others are as random as ever: their entropy is 8.83 of 9.01 nats.

Imported from both environments: torch, transformers, tokenizers and the standard library only.
"""

import math
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from benchmarks.chat_rows import EOS, VOCABULARY, ppo_prompts, small_llama_config

# Above what the layers add: p spreads by 3.5 %; by 11 % at 1, and at 0.3 it is no constant.
SHARED_ENTRY = 2.0
EOS_PROBABILITY = 1 / 33  # cut at 64 tokens: mean 28, 14 % reach the cut


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single words: id 17 is "t17"; special are <pad>, <s>, </s>, <unk> (0 to 3)."""
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    words = [*special, *(f"t{i}" for i in range(len(special), VOCABULARY))]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        padding_side="left",
    )


def build_policy(config: LlamaConfig, seed: int, eos_probability: float) -> LlamaForCausalLM:
    """Return a random model that ends its responses with this probability at every token."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    rows = ppo_prompts(64, seed + 1, max_tokens=64)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = SHARED_ENTRY
        head = model.lm_head.weight
        head[EOS] = 0
        entries, log_others = [], []
        for row in rows:
            hidden = model.model(torch.tensor([row["input_ids"]])).last_hidden_state[0]  # (T, hidden)
            logits = hidden @ head.T
            logits[:, EOS] = -math.inf
            entries.append(hidden[:, 0])
            log_others.append(logits.logsumexp(-1))
        # log p / (1 - p) = head[EOS, 0] * entry - log_other
        wanted = torch.cat(log_others) + math.log(eos_probability / (1 - eos_probability))
        head[EOS, 0] = (wanted / torch.cat(entries)).mean()
    return model


def save_models(
    folder: str | Path, seed: int, eos_probability: float = EOS_PROBABILITY, **changes: Any
) -> dict[str, str]:
    """Save fp32 models with their tokenizer; return the folders of `policy`, `reward` and `value`.

    The policy is causal, the others have one label; the value model's weights are not the reward model's.
    `changes` are those of `small_llama_config`.
    """
    folders = {name: str(Path(folder, name)) for name in ("policy", "reward", "value")}
    policy = build_policy(small_llama_config(**changes), seed, eos_probability)
    policy.generation_config.update(do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    policy.save_pretrained(folders["policy"])
    for offset, name in enumerate(("reward", "value"), start=1):
        torch.manual_seed(seed + offset)
        config = small_llama_config(num_labels=1, **changes)
        LlamaForSequenceClassification(config).save_pretrained(folders[name])
    for path in folders.values():
        build_tokenizer().save_pretrained(path)
    return folders
