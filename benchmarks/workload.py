"""The workload of the benchmarks: seeded rows with the lengths of a chat data set, and models.

Both sides of a comparison import this file, ours and the peer's: torch, transformers, tokenizers and the
standard library only. Lengths follow hh-rlhf (harmless, 1112 pairs; 1.3 tokens assumed per word), measured
and sampled:

                       5 %  10 %  25 %  50 %  75 %  90 %  95 %   mean
    prompt             11    14    25    84   153   253   324    108   (cut at 400: 2.8 % of them)
      lognormal        15    22    39    75   142   252   356    108   median 75, sigma .95, 8 to 400
    chosen response     6     9    15    28    53    89   117     40
      lognormal         6     8    15    27    51    88   123     41   median 28, sigma .90, 4 to 256
    rejected response   6     9    18    36    67   110   143     51
      lognormal         7    10    19    35    67   118   166     53   median 36, sigma .93, 4 to 256

The logarithms of a pair's two response lengths have a correlation of .31 there, and of .3 here. Ids are
uniform in the vocabulary, since the cost does not depend on them. Rows have the columns of our token cache.

Weights are random, but responses end like real ones: EOS has the same probability p at every position, so
lengths are geometric, cut at `max_new_tokens`. For this, every embedding has the same large first entry,
which the residual stream carries to the final norm; EOS's row of the output head reads only that entry. The
logits of all other tokens remain random: their entropy is 8.83 of 9.01 nats.
"""

import math
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

VOCABULARY = 8192
PAD, BOS, EOS, UNKNOWN = range(4)
FIRST_ID = 4  # smaller ids are special tokens
MAX_TOKENS = 512  # of prompt and response
MAX_PROMPT, MAX_RESPONSE = 400, 256
PROMPT = (75, 0.95)  # median, sigma of the logarithm
CHOSEN = (28, 0.90)
REJECTED = (36, 0.93)
PAIR_CORRELATION = 0.3
WARM_UP_TOKENS = 8  # per row, in the step before the measured one
# Large compared with what the layers add: p varies by 3.5 %; with 1 by 11 %, and with 0.3 it is not constant.
SHARED_ENTRY = 2.0
EOS_PROBABILITY = 1 / 33  # with a limit of 64 tokens: mean 28, 14 % reach the limit

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 4}  # --quick only shows that a benchmark runs
# SmolLM2-135M's shape, with an output head of its own.
SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
SMOLLM2 |= {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152}
MODELS: dict[str, dict[str, int]] = {"small": {}, "smollm2": SMOLLM2}


def small_llama_config(**changes: Any) -> LlamaConfig:
    """Configuration of the training benchmarks' model: 7.4 million weights, untied output head."""
    options = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
    options |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": VOCABULARY}
    options |= {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "tie_word_embeddings": False}
    return LlamaConfig(**(options | {"max_position_embeddings": 2048, "dtype": "float32"} | changes))


def default_model() -> tuple[str, str]:
    """Key of `MODELS`, and the precision to train in, for this device: the small model would measure only
    kernel launches on a GPU.
    """
    return ("smollm2", "bf16") if torch.cuda.is_available() else ("small", "fp32")


def sizes_of(model: str, *, is_quick: bool) -> dict[str, int]:
    """Changes to `small_llama_config` for a key of `MODELS`."""
    return TINY if is_quick else MODELS[model]


def size_of(dtype: str = "fp32", **changes: Any) -> str:
    """Size of `small_llama_config` with these changes, as printed in the benchmarks' last lines."""
    config = small_llama_config(**changes)
    size = f"{config.num_hidden_layers} layers, hidden {config.hidden_size}"
    return f"{size}, vocabulary {config.vocab_size}, {dtype}"


def sft_rows(n: int, seed: int) -> list[dict[str, Any]]:
    """Rows of `input_ids` and `loss_mask`, which is 1 at the tokens of the response, EOS included."""
    rows = []
    for row_id, pair in enumerate(pair_rows(n, seed)):
        start, ids = pair["chosen_response_start"], pair["chosen_ids"]
        mask = [0] * start + [1] * (len(ids) - start)
        rows.append({"row_id": str(row_id), "input_ids": ids, "loss_mask": mask})
    return rows


def pair_rows(n: int, seed: int) -> list[dict[str, Any]]:
    """Rows of `chosen_ids`, `rejected_ids` (prompt, response, EOS) and the start of each response."""
    generator = torch.Generator().manual_seed(seed)
    prompt_lengths = _random_lengths(torch.randn(n, generator=generator), PROMPT, (8, MAX_PROMPT))
    shared, *own = torch.randn(3, n, generator=generator)
    weight = math.sqrt(PAIR_CORRELATION)
    chosen, rejected = (
        _random_lengths(weight * shared + math.sqrt(1 - weight**2) * z, shape, (4, MAX_RESPONSE))
        for z, shape in zip(own, (CHOSEN, REJECTED), strict=True)
    )
    rows = []
    for row_id in range(n):
        prompt = _random_ids(int(prompt_lengths[row_id]), generator)
        longest = MAX_TOKENS - len(prompt)
        row: dict[str, Any] = {"row_id": str(row_id), "margin": 0.0}
        for side, lengths in (("chosen", chosen), ("rejected", rejected)):
            response = [*_random_ids(min(int(lengths[row_id]), longest) - 1, generator), EOS]
            row |= {f"{side}_ids": prompt + response, f"{side}_response_start": len(prompt)}
        rows.append(row)
    return rows


def ppo_prompts(n: int, seed: int, max_tokens: int) -> list[dict[str, Any]]:
    """Rows of `input_ids`: prompts of at most `max_tokens`."""
    generator = torch.Generator().manual_seed(seed)
    lengths = _random_lengths(torch.randn(n, generator=generator), PROMPT, (8, max_tokens))
    return [{"row_id": str(i), "input_ids": _random_ids(int(k), generator)} for i, k in enumerate(lengths)]


def memory_rows(n: int, num_tokens: int, vocabulary: int) -> list[dict[str, Any]]:
    """Rows like those of `sft_rows`, all of the same length; a third is the prompt."""
    num_prompt = max(num_tokens // 3, 1)
    mask = [0] * num_prompt + [1] * (num_tokens - num_prompt)
    ids = torch.randint(FIRST_ID, vocabulary, (n, num_tokens)).tolist()
    return [{"row_id": str(i), "input_ids": row, "loss_mask": mask} for i, row in enumerate(ids)]


def memory_pairs(n: int, num_tokens: int, vocabulary: int) -> list[dict[str, Any]]:
    """Rows like those of `pair_rows`, all sequences of the same length; a third is the common prompt."""
    rows = memory_rows(2 * n, num_tokens, vocabulary)
    pairs = []
    for chosen, rejected in zip(rows[:n], rows[n:], strict=True):
        start = chosen["loss_mask"].index(1)
        pair = {"chosen_ids": chosen["input_ids"], "chosen_response_start": start, "margin": 0.0}
        ids = chosen["input_ids"][:start] + rejected["input_ids"][start:]
        pairs.append(chosen | pair | {"rejected_ids": ids, "rejected_response_start": start})
    return pairs


def build_tokenizer(vocabulary: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words: id 17 is "t17"; ids 0 to 3 are <pad>, <s>, </s> and <unk>."""
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    words = [*special.values(), *(f"t{i}" for i in range(FIRST_ID, vocabulary))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, padding_side="left", **special)


def build_policy(config: LlamaConfig, seed: int) -> LlamaForCausalLM:
    """A random model that ends its responses with probability EOS_PROBABILITY at every token."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    log_odds = math.log(EOS_PROBABILITY / (1 - EOS_PROBABILITY))
    weights = []
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = SHARED_ENTRY
        head = model.lm_head.weight
        head[EOS] = 0
        for row in ppo_prompts(64, seed + 1, max_tokens=64):
            hidden = model.model(torch.tensor([row["input_ids"]])).last_hidden_state[0]  # (T, hidden)
            logits = hidden @ head.T
            logits[:, EOS] = -math.inf
            # log odds = head[EOS, 0] * entry - logsumexp of all other logits
            weights.append((log_odds + logits.logsumexp(-1)) / hidden[:, 0])
        head[EOS, 0] = torch.cat(weights).mean()
    return model


def save_models(folder: str | Path, seed: int, **changes: Any) -> dict[str, str]:
    """Save fp32 models with their tokenizer; return the folders of `policy`, `reward` and `value`.

    The policy is causal, the others have one label; reward and value model have different weights.
    `changes`: see `small_llama_config`.
    """
    folders = {name: str(Path(folder, name)) for name in ("policy", "reward", "value")}
    policy = build_policy(small_llama_config(**changes), seed)
    policy.generation_config.update(do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    policy.save_pretrained(folders["policy"])
    for offset, name in enumerate(("reward", "value"), start=1):
        torch.manual_seed(seed + offset)
        config = small_llama_config(num_labels=1, **changes)
        LlamaForSequenceClassification(config).save_pretrained(folders[name])
    for path in folders.values():
        build_tokenizer(config.vocab_size).save_pretrained(path)
    return folders


def _random_lengths(
    normal: torch.Tensor, shape: tuple[float, float], limits: tuple[int, int]
) -> torch.Tensor:
    """Log-normal lengths (n,) int64 from standard normal numbers (n,)."""
    median, sigma = shape
    return (median * torch.exp(sigma * normal)).long().clamp(*limits)


def _random_ids(count: int, generator: torch.Generator) -> list[int]:
    return torch.randint(FIRST_ID, VOCABULARY, (count,), generator=generator).tolist()
