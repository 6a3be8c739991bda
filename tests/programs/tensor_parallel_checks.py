"""Ranks that hold parts of a model compute the logits of the whole.

Run on four ranks by hybrid_engine_worker.py: they make two groups of two, which compute the same, and then
one of four.
"""

import copy
import inspect
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import transformers
from tiny_configs import CONFIGS, tiny_config
from torch import nn

from common.generation.inference_module import cut_module
from common.generation.tp_plans import build_cuts, working_tp_sizes

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {  # what the families' tiny configurations do not have
    "opt projected": ("opt", {"word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "bloom not a power of two": ("bloom", {"n_head": 12, "hidden_size": 48}),
    "falcon biased": ("falcon", {"multi_query": False, "parallel_attn": False, "bias": True}),
    "falcon alibi eager": ("falcon_alibi", {"multi_query": True, "_attn_implementation": "eager"}),
    "llama eager": ("llama", {"_attn_implementation": "eager", "attention_bias": True}),
    "llama odd vocabulary": ("llama", {"vocab_size": 321, "mlp_bias": True}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "gemma of one key head": ("gemma", {"num_key_value_heads": 1}),
    "phi with norms": ("phi", {"num_key_value_heads": 2, "qk_layernorm": True}),
}
GEMMA3 = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
          "intermediate_size": 64, "head_dim": 16, "vocab_size": 320, "pad_token_id": None}  # fmt: skip
CASES = (*CONFIGS, *VARIANTS, "gemma3")
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])  # the first row is left-padded


def make_model(case: str) -> nn.Module:
    """Return a random model whose biases are no zeros, the same on all ranks."""
    torch.manual_seed(0)
    family, changes = VARIANTS.get(case, (case, {}))
    config = transformers.Gemma3TextConfig(**GEMMA3) if case == "gemma3" else tiny_config(family, 320)
    for name, value in changes.items():
        setattr(config, name, value)
    config.initializer_range = config.init_std = 0.1
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    return model


@torch.no_grad()
def compute(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the logits of a padded prompt's real tokens, of a step after it, and the cache's heads."""
    tokens = torch.randint(1, 320, (2, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.cat([MASK, MASK.new_ones(2, 1)], dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    past, logits = None, []
    for part in (slice(0, 7), slice(7, 8)):
        inputs: dict[str, Any] = {"position_ids": positions[:, part]} if takes_positions else {}
        inputs |= {"attention_mask": mask[:, : part.stop], "past_key_values": past, "use_cache": True}
        output = model(tokens[:, part], **inputs)
        past = output.past_key_values
        logits.append(output.logits)
    return logits[0][MASK.bool()], logits[1], past.layers[0].keys.shape[1]


@cache
def pairs() -> list[dist.ProcessGroup]:
    """Return the groups of two."""
    return [dist.new_group([0, 1]), dist.new_group([2, 3])]


def check_cut(case: str) -> dict[str, str]:
    """Return what is wrong with the model cut in two and in four, {tp_size: complaint or ""}."""
    whole = make_model(case)
    sizes = (2,) if case == "falcon_new" else (2, 4)  # it has two groups of heads
    assert set(sizes) <= set(working_tp_sizes(whole))
    expected = compute(whole)
    found = {}
    for tp_size in sizes:
        group = dist.group.WORLD if tp_size == 4 else pairs()[dist.get_rank() // 2]
        model, wrong = copy.deepcopy(whole), []
        cut_module(model, build_cuts(model, tp_size), dist.get_rank(group), tp_size, group)
        *logits, num_heads = compute(model)
        for what, a, b in zip(("prefill", "decode"), expected, logits, strict=False):
            gap = float((a - b).abs().max())
            if not gap < 1e-5:
                wrong.append(f"{what} off by {gap:.1e}")
            everyone = [torch.empty_like(b) for _ in range(tp_size)]
            dist.all_gather(everyone, b.contiguous(), group=group)
            if not all(b.equal(other) for other in everyone):
                wrong.append(f"{what} differs between ranks")
        if num_heads != max(expected[2] // tp_size, 1):
            wrong.append(f"caches {num_heads} of {expected[2]} heads")
        found[str(tp_size)] = ", ".join(wrong)
    return found
