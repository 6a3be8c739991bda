"""The workload of the training benchmarks: seeded rows as long as a chat data set's, and the model for them.

Both sides of a comparison import this file, ours and the peer's: torch, transformers and the standard library
only. Lengths follow hh-rlhf (harmless, 1112 pairs; a word is taken as 1.3 tokens), measured and drawn:

                       5 %  10 %  25 %  50 %  75 %  90 %  95 %   mean
    prompt             11    14    25    84   153   253   324    108   (cut at 400: 2.8 % of them)
      lognormal        15    22    39    75   142   252   356    108   median 75, sigma .95, 8 to 400
    chosen response     6     9    15    28    53    89   117     40
      lognormal         6     8    15    27    51    88   123     41   median 28, sigma .90, 4 to 256
    rejected response   6     9    18    36    67   110   143     51
      lognormal         7    10    19    35    67   118   166     53   median 36, sigma .93, 4 to 256

The logarithms of a pair's two response lengths correlate by .31 there, and by .3 here. Ids are uniform in the
vocabulary: which token it is costs nothing. Rows have the columns of our token cache.
"""

import math
from typing import Any

import torch
from transformers import LlamaConfig

VOCABULARY = 8192
PAD, BOS, EOS, UNKNOWN = range(4)
FIRST_ID = 4  # smaller ids are the special ones
MAX_TOKENS = 512  # of prompt and response
MAX_PROMPT, MAX_RESPONSE = 400, 256
PROMPT = (75, 0.95)  # median, sigma of the logarithm
CHOSEN, REJECTED = (28, 0.90), (36, 0.93)
PAIR_CORRELATION = 0.3
WARM_UP_TOKENS = 8  # of a row of the step before the one whose memory is measured

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 4}  # what --quick makes of the model: it shows that a benchmark runs


def small_llama_config(**changes: Any) -> LlamaConfig:
    """Return the training benchmarks' model: 7.4 million weights, the output head is not the embedding."""
    options = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
    options |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": VOCABULARY}
    options |= {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "tie_word_embeddings": False}
    return LlamaConfig(**(options | {"max_position_embeddings": 2048, "dtype": "float32"} | changes))


def size_of(config: LlamaConfig) -> str:
    """Return a model's size as the benchmarks' last lines have it."""
    size = f"{config.num_hidden_layers} layers, hidden {config.hidden_size}"
    return f"{size}, vocabulary {config.vocab_size}, fp32"


def sft_rows(n: int, seed: int) -> list[dict[str, Any]]:
    """Return rows of `input_ids` and `loss_mask`, which is 1 at the tokens of the response, EOS included."""
    rows = []
    for row_id, pair in enumerate(pair_rows(n, seed)):
        start, ids = pair["chosen_response_start"], pair["chosen_ids"]
        mask = [0] * start + [1] * (len(ids) - start)
        rows.append({"row_id": str(row_id), "input_ids": ids, "loss_mask": mask})
    return rows


def pair_rows(n: int, seed: int) -> list[dict[str, Any]]:
    """Return rows of `chosen_ids`, `rejected_ids` (prompt, response, EOS) and where the responses start."""
    generator = torch.Generator().manual_seed(seed)
    prompt_lengths = _draw_lengths(torch.randn(n, generator=generator), PROMPT, (8, MAX_PROMPT))
    shared, *own = torch.randn(3, n, generator=generator)
    weight = math.sqrt(PAIR_CORRELATION)
    chosen, rejected = (
        _draw_lengths(weight * shared + math.sqrt(1 - weight**2) * z, shape, (4, MAX_RESPONSE))
        for z, shape in zip(own, (CHOSEN, REJECTED), strict=True)
    )
    rows = []
    for row_id in range(n):
        prompt = _draw_ids(int(prompt_lengths[row_id]), generator)
        longest = MAX_TOKENS - len(prompt)
        row: dict[str, Any] = {"row_id": str(row_id), "margin": 0.0}
        for side, lengths in (("chosen", chosen), ("rejected", rejected)):
            response = [*_draw_ids(min(int(lengths[row_id]), longest) - 1, generator), EOS]
            row |= {f"{side}_ids": prompt + response, f"{side}_response_start": len(prompt)}
        rows.append(row)
    return rows


def ppo_prompts(n: int, seed: int, max_tokens: int = MAX_PROMPT) -> list[dict[str, Any]]:
    """Return rows of `input_ids`: prompts of `max_tokens` at most."""
    generator = torch.Generator().manual_seed(seed)
    lengths = _draw_lengths(torch.randn(n, generator=generator), PROMPT, (8, max_tokens))
    return [{"row_id": str(i), "input_ids": _draw_ids(int(k), generator)} for i, k in enumerate(lengths)]


def memory_rows(n: int, num_tokens: int, vocabulary: int) -> list[dict[str, Any]]:
    """Return rows as `sft_rows` does, all of one length, a third of it the prompt."""
    num_prompt = max(num_tokens // 3, 1)
    mask = [0] * num_prompt + [1] * (num_tokens - num_prompt)
    ids = torch.randint(FIRST_ID, vocabulary, (n, num_tokens)).tolist()
    return [{"row_id": str(i), "input_ids": row, "loss_mask": mask} for i, row in enumerate(ids)]


def _draw_lengths(normal: torch.Tensor, shape: tuple[float, float], limits: tuple[int, int]) -> torch.Tensor:
    """Return lognormal lengths (n,) int64 from standard normal numbers (n,)."""
    median, sigma = shape
    return (median * torch.exp(sigma * normal)).long().clamp(*limits)


def _draw_ids(count: int, generator: torch.Generator) -> list[int]:
    return torch.randint(FIRST_ID, VOCABULARY, (count,), generator=generator).tolist()
