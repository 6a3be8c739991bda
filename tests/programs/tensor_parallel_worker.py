"""Started by test_tensor_parallel.py under torchrun: cut models against whole ones, one line for each case.

Four ranks make two groups of two, which compute the same, and then one of four.
"""

import copy
import inspect
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.generation.inference_module import cut_module  # noqa: E402
from common.generation.tp_plans import build_cuts, working_tp_sizes  # noqa: E402

HEADS = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 320}
MLP = HEADS | {"intermediate_size": 64, "max_position_embeddings": 64}
GROUPED = MLP | {"num_key_value_heads": 2}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 320}
OPT = HEADS | {"ffn_dim": 64, "max_position_embeddings": 64, "word_embed_proj_dim": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "opt": ("OPT", OPT),
    "opt projected": ("OPT", OPT | {"word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "gpt2": ("GPT2", GPT2),
    "gptj": ("GPTJ", GPT2 | {"rotary_dim": 4}),
    "gpt_neox": ("GPTNeoX", MLP),
    "bloom": ("Bloom", HEADS),
    "bloom not a power of two": ("Bloom", HEADS | {"num_attention_heads": 12, "hidden_size": 48}),
    "falcon grouped": ("Falcon", HEADS | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon multi-query": ("Falcon", HEADS),
    "falcon neither": ("Falcon", HEADS | {"multi_query": False, "parallel_attn": False, "bias": True}),
    "falcon alibi": ("Falcon", HEADS | {"alibi": True, "multi_query": False, "bias": True}),
    "falcon alibi eager": ("Falcon", HEADS | {"alibi": True, "attn_implementation": "eager"}),
    "llama": ("Llama", GROUPED),
    "llama eager": ("Llama", GROUPED | {"attn_implementation": "eager", "attention_bias": True}),
    "llama odd vocabulary": ("Llama", GROUPED | {"vocab_size": 321, "mlp_bias": True}),
    "qwen2": ("Qwen2", GROUPED | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", GROUPED | {"head_dim": 16}),
    "mistral": ("Mistral", GROUPED | {"sliding_window": 5}),
    "gemma": ("Gemma", GROUPED | {"head_dim": 16, "num_key_value_heads": 1}),
    "gemma3": ("Gemma3Text", GROUPED | {"head_dim": 16}),
    "phi": ("Phi", GROUPED | {"qk_layernorm": True}),
}
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])  # the first row is left-padded


def make_model(family: str, options: dict[str, Any]) -> nn.Module:
    """Return a random model whose biases are no zeros, the same on all ranks."""
    torch.manual_seed(0)
    # The families' default tokens lie outside of a tiny vocabulary.
    config_class = getattr(transformers, f"{family}Config")
    config = config_class(bos_token_id=0, eos_token_id=0, pad_token_id=None, **options)
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
        inputs = {"position_ids": positions[:, part]} if takes_positions else {}
        output = model(
            tokens[:, part],
            attention_mask=mask[:, : part.stop],
            past_key_values=past,
            use_cache=True,
            **inputs,
        )
        past = output.past_key_values
        logits.append(output.logits)
    return logits[0][MASK.bool()], logits[1], past.layers[0].keys.shape[1]


def compare(whole: nn.Module, tp_size: int, group: dist.ProcessGroup) -> str:
    """Return what is wrong with the cut model, or an empty word."""
    tp_rank = dist.get_rank(group)
    model = copy.deepcopy(whole)
    cuts = build_cuts(model, tp_size)
    cut_module(model, cuts, tp_rank, tp_size, group)
    expected, found = compute(whole), compute(model)
    wrong = []
    for what, a, b in zip(("prefill", "decode"), expected, found, strict=False):
        difference = float((a - b).abs().max())
        if not difference < 1e-5:
            wrong.append(f"{what} off by {difference:.1e}")
        everyone = [torch.empty_like(b) for _ in range(tp_size)]
        dist.all_gather(everyone, b.contiguous(), group=group)
        if not all(b.equal(other) for other in everyone):
            wrong.append(f"{what} differs between ranks")
    if found[2] != max(expected[2] // tp_size, 1):
        wrong.append(f"caches {found[2]} of {expected[2]} heads")
    return ", ".join(wrong)


def main() -> None:
    """Print `CASE tp_size ok` or what is wrong, from rank 0."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for name, (family, options) in CASES.items():
        whole = make_model(family, options)
        assert {2, 4} <= set(working_tp_sizes(whole)), name
        for tp_size, group in ((2, pairs[rank // 2]), (4, dist.group.WORLD)):
            verdicts: list[str] = [""] * 4
            dist.all_gather_object(verdicts, compare(whole, tp_size, group))
            if rank == 0:
                print(f"{name}|{tp_size}|{'; '.join(sorted({*verdicts} - {''})) or 'ok'}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
