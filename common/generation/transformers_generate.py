"""Generation by transformers' own `generate`, with our sampler: the baseline to compare with.

It gives the same texts as our own decoder, which tests use; it holds whole weights, pads every prompt to the
longest and decodes until the last response of the batch has ended.

# B prompts, N samples of each, P prompt, R response, V vocabulary
"""

from typing import Any

import torch
from torch import nn
from transformers import LogitsProcessorList, StoppingCriteriaList

from common.generation.decode import DecodeState, SamplingOptions
from common.generation.generate import Generation, collect_responses


class TransformersGenerator:
    """Has the `generate` of `common.generation.generate.Generator`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def release(self) -> None:
        """Nothing is kept from call to call."""

    @torch.no_grad()
    def generate(
        self,
        prompt_ids: torch.Tensor,
        prompt_mask: torch.Tensor,
        sample_ids: torch.Tensor,
        options: SamplingOptions,
        *,
        num_samples: int,
        limits: torch.Tensor,
    ) -> Generation:
        """Return `num_samples` responses for each left-padded prompt (B, P), see `Generator.generate`."""
        ids, mask = (x.repeat_interleave(num_samples, dim=0) for x in (prompt_ids, prompt_mask.long()))
        state = DecodeState.build(len(sample_ids), options.max_new_tokens, ids.device)
        state.enter(0, mask.sum(1), limits, sample_ids, options.seed)

        def choose_sampled(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            """Leave one token possible: the one that was sampled."""
            state.sample(slice(None), scores, options)
            return torch.full_like(scores, -torch.inf).scatter_(1, state.last_ids.unsqueeze(1), 0.0)

        def have_ended(input_ids: torch.Tensor, scores: torch.Tensor, **more: Any) -> torch.Tensor:
            return ~state.is_live

        self.model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,  # the processor has sampled
            max_new_tokens=options.max_new_tokens,
            pad_token_id=options.pad_token_id,
            eos_token_id=None,
            logits_processor=LogitsProcessorList([choose_sampled]),
            stopping_criteria=StoppingCriteriaList([have_ended]),
        )
        return collect_responses(state, options)
