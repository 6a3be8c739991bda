"""The hybrid engine behind DeepSpeed's rollout interface, for trainers that are written against it.

# B prompts, N samples of each, P prompt, R response
"""

import torch
from deepspeed.runtime.rollout import RolloutBatch, RolloutEngine, RolloutRequest, SamplingConfig
from transformers import PreTrainedTokenizerBase

from common.data.dialogue import num_token_ids
from common.generation.decode import SamplingOptions
from common.generation.hybrid_engine import HybridEngine
from common.ranks import distributed

_NO_STOP_TOKEN = -1  # no token has this id: a tokenizer without eos lets every response run to its limit


class HybridRolloutEngine(RolloutEngine):
    """Takes `RolloutRequest`s like DeepSpeed's own `HybridEngineRollout`, and samples reproducibly.

    Every response of every call and rank has random numbers of its own, named by its count and the rank.
    Raises ValueError when the tokenizer has neither pad nor eos.
    """

    name = "triptych_hybrid_engine"

    def __init__(self, hybrid: HybridEngine, tokenizer: PreTrainedTokenizerBase, *, seed: int = 0) -> None:
        eos_id, pad_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        if eos_id is None and pad_id is None:
            raise ValueError("the tokenizer has neither pad_token nor eos_token; set one of them")
        self.hybrid = hybrid
        self._fixed = {
            "stop_token_id": _NO_STOP_TOKEN if eos_id is None else eos_id,
            "pad_token_id": eos_id if pad_id is None else pad_id,
            "num_valid_tokens": num_token_ids(tokenizer),
            "seed": seed,
        }
        self._num_sampled = 0  # responses of this rank, in all calls

    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Return B x N sequences of prompt and response, those of one prompt next to each other.

        input_ids (B x N, P + R) int64, prompts as they came, padded behind the longest response;
        attention_mask of the same shape, int64, 1 for prompt tokens and for what was sampled, eos included,
        whatever its id. A temperature of 0 or less takes the likeliest token, a top_k of 0 or less all of
        them. Slots are the engine's `generation_slots`: `continuous_batch_size` has no effect.
        Every rank must call this, with the same `sampling`. Raises ValueError when prompts are not padded
        on the left.
        """
        prompt_ids, prompt_mask = request.prompt_ids, request.prompt_attention_mask.bool()
        if not prompt_mask[:, -1].all():
            row = int(prompt_mask[:, -1].int().argmin())
            raise ValueError(f"prompt {row} ends with padding, or is empty: pad prompts on the left")
        num_samples, is_greedy = sampling.n_samples_per_prompt, sampling.temperature <= 0
        options = SamplingOptions(
            max_new_tokens=sampling.max_new_tokens,
            temperature=1.0 if is_greedy else sampling.temperature,
            top_k=max(sampling.top_k, 0),
            top_p=sampling.top_p,
            do_sample=not is_greedy,
            **self._fixed,
        )
        sample_ids = self._next_sample_ids(len(prompt_ids) * num_samples)
        with self.hybrid.generation_mode():
            found = self.hybrid.generate(
                prompt_ids, prompt_mask, sample_ids, options, num_samples=num_samples
            )
        device = prompt_ids.device
        input_ids, is_real = (
            torch.cat([of_prompts.repeat_interleave(num_samples, dim=0), of_samples.to(device)], dim=1)
            for of_prompts, of_samples in zip((prompt_ids, prompt_mask), found[:2], strict=True)
        )
        starts = torch.full((len(input_ids),), prompt_ids.shape[1], device=device)
        return RolloutBatch(input_ids, is_real.long(), starts)

    def sync_weights(self, step: int) -> None:
        """Do nothing: every `generate` reads the weights that are trained."""

    def shutdown(self) -> None:
        """Give the memory of keys, values and graphs back; a later `generate` takes it anew."""
        self.hybrid.release()

    def _next_sample_ids(self, num: int) -> torch.Tensor:
        """Return (num,) int64 that no other call and no other rank gets."""
        first, self._num_sampled = self._num_sampled, self._num_sampled + num
        return torch.arange(first, first + num) * distributed.world_size() + distributed.rank()
