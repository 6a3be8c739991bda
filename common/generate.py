"""Sampling from a causal LM: prefill, then one token a step through the key/value cache.

# B sequences, P prompt, R response, V vocabulary
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from common.models import build_position_ids, forward_accepts
from common.sampling import counter_uniform, sample_tokens
from common.tensor_ops import token_logprobs


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are drawn. `num_valid_tokens` masks vocabulary padding, `stop_token_id` ends a response."""

    max_new_tokens: int
    stop_token_id: int
    pad_token_id: int
    num_valid_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    do_sample: bool = True
    seed: int = 0


class Generation(NamedTuple):
    """Responses laid to the right of their prompts."""

    response_ids: torch.Tensor  # (B, R) int64, pad_token_id after the end
    response_mask: torch.Tensor  # (B, R) bool, True for sampled tokens, the stop token included
    logprobs: (
        torch.Tensor
    )  # (B, R) fp32, under the untruncated distribution at this temperature; 0 after the end
    is_finished: torch.Tensor  # (B,) bool, False where max_new_tokens cut the response


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt_ids: torch.Tensor,
    prompt_mask: torch.Tensor,
    sample_ids: torch.Tensor,
    options: SamplingOptions,
) -> Generation:
    """Return one response for each left-padded prompt (B, P).

    A token is drawn from one uniform per (seed, sample id, position in the response), so a text does not
    depend on the batch it is generated in. A response ends with its stop token; its length is counted, never
    searched for, so the stop token may be the pad token. The model must hold whole weights and be in eval
    mode.
    """
    takes_positions = forward_accepts(model, "position_ids")
    keeps_logits = forward_accepts(model, "logits_to_keep")
    num_sequences = prompt_ids.shape[0]
    mask = prompt_mask.long()
    position_ids = build_position_ids(mask)
    step_ids, cache = prompt_ids, None
    is_live = torch.ones(num_sequences, dtype=torch.bool, device=prompt_ids.device)
    tokens, masks, logprobs = [], [], []
    for position in range(options.max_new_tokens):
        inputs: dict[str, Any] = {"input_ids": step_ids, "attention_mask": mask, "use_cache": True}
        inputs["past_key_values"] = cache
        if takes_positions:
            inputs["position_ids"] = position_ids
        if keeps_logits:
            inputs["logits_to_keep"] = 1
        output = model(**inputs)
        logits, cache = output.logits[:, -1], output.past_key_values  # (B, V)
        uniforms = counter_uniform(options.seed, sample_ids, torch.full_like(sample_ids, position))
        drawn = sample_tokens(
            logits,
            uniforms,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            do_sample=options.do_sample,
            num_valid_tokens=options.num_valid_tokens,
        )
        drawn_logprobs = token_logprobs(
            logits, drawn, temperature=options.temperature, num_valid_tokens=options.num_valid_tokens
        )
        tokens.append(torch.where(is_live, drawn, options.pad_token_id))
        masks.append(is_live.clone())
        logprobs.append(torch.where(is_live, drawn_logprobs, 0.0))
        is_live &= drawn != options.stop_token_id
        if not is_live.any():
            break
        step_ids = tokens[-1].unsqueeze(1)
        mask = torch.cat([mask, mask.new_ones(num_sequences, 1)], dim=1)
        position_ids = position_ids[:, -1:] + 1
    stacked = [torch.stack(columns, dim=1) for columns in (tokens, masks, logprobs)]
    return Generation(*stacked, is_finished=~is_live)
