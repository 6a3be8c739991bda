"""The hybrid engine behind DeepSpeed's rollout interface, for trainers that are written against it.

# B prompts, N samples of each, P prompt, R response
"""

import torch
from deepspeed.runtime.rollout import RolloutBatch, RolloutEngine, RolloutRequest, SamplingConfig
from transformers import PreTrainedTokenizerBase

from common.generation.decode import SamplingOptions
from common.generation.hybrid_engine import HybridEngine
from common.ranks import distributed

_NO_STOP_TOKEN = -1  # no token has this id: a tokenizer without eos lets every response run to its limit


class HybridRolloutEngine(RolloutEngine):
    """Takes `RolloutRequest`s like DeepSpeed's own `HybridEngineRollout`, and samples reproducibly.

    Every response of every call and rank has random numbers of its own, named by its count and the rank: they
    depend on `seed` and on what was asked before, not on slots or on the other responses.

    Raises ValueError when the tokenizer has neither pad nor eos.
    """

    name = "triptych_hybrid_engine"

    def __init__(self, hybrid: HybridEngine, tokenizer: PreTrainedTokenizerBase, *, seed: int = 0) -> None:
        self.hybrid, self.seed = hybrid, seed
        eos_id, pad_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        if eos_id is None and pad_id is None:
            raise ValueError("the tokenizer has neither pad_token nor eos_token; set one of them")
        self._stop_id = _NO_STOP_TOKEN if eos_id is None else eos_id
        self._pad_id = eos_id if pad_id is None else pad_id
        self._num_tokens = len(tokenizer)
        self._num_sampled = 0  # responses of this rank, in all calls

    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Return B x N sequences of prompt and response, those of one prompt next to each other.

        input_ids (B x N, P + R) int64 on the prompts' device, prompts as they came, padded behind the longest
        response; attention_mask of the same shape, int64, 1 for prompt tokens and for what was sampled, eos
        included, whatever its id. A temperature of 0 or less takes the likeliest token, a top_k of 0 or less
        all of them. `continuous_batch_size` bounds the sequences that a replica runs at a time. Every rank
        must call this, with the same `sampling`.

        Raises:
            ValueError: a number of `sampling` is out of its range, or prompts are not left-padded.
        """
        self._check(request, sampling)
        prompt_ids, prompt_mask = request.prompt_ids, request.prompt_attention_mask.bool()
        num_samples = sampling.n_samples_per_prompt
        more = {"max_slots": sampling.continuous_batch_size} if sampling.continuous_batch_size else {}
        with self.hybrid.generation_mode():
            found = self.hybrid.generate(
                prompt_ids,
                prompt_mask,
                self._next_sample_ids(len(prompt_ids) * num_samples).to(prompt_ids.device),
                self._options(sampling),
                num_samples=num_samples,
                **more,
            )
        input_ids = torch.cat([prompt_ids.repeat_interleave(num_samples, dim=0), found.response_ids], dim=1)
        is_real = torch.cat([prompt_mask.repeat_interleave(num_samples, dim=0), found.response_mask], dim=1)
        starts = torch.full((len(input_ids),), prompt_ids.shape[1], device=prompt_ids.device)
        return RolloutBatch(input_ids=input_ids, attention_mask=is_real.long(), response_start_idx=starts)

    def sync_weights(self, step: int) -> None:
        """Do nothing: every `generate` reads the weights that are trained."""

    def shutdown(self) -> None:
        """Give the memory of keys, values and graphs back; a later `generate` takes it anew."""
        self.hybrid.release()

    def _options(self, sampling: SamplingConfig) -> SamplingOptions:
        is_greedy = sampling.temperature <= 0
        return SamplingOptions(
            max_new_tokens=sampling.max_new_tokens,
            stop_token_id=self._stop_id,
            pad_token_id=self._pad_id,
            num_valid_tokens=self._num_tokens,
            temperature=1.0 if is_greedy else sampling.temperature,
            top_k=max(sampling.top_k, 0),
            top_p=sampling.top_p,
            do_sample=not is_greedy,
            seed=self.seed,
        )

    def _next_sample_ids(self, num: int) -> torch.Tensor:
        """Return (num,) int64 that no other call and no other rank gets."""
        first, self._num_sampled = self._num_sampled, self._num_sampled + num
        return torch.arange(first, first + num) * distributed.world_size() + distributed.rank()

    def _check(self, request: RolloutRequest, sampling: SamplingConfig) -> None:
        for name in ("max_new_tokens", "n_samples_per_prompt", "continuous_batch_size"):
            value = getattr(sampling, name)
            if value is not None and value < 1:
                raise ValueError(f"SamplingConfig.{name} {value} must be at least 1")
        if sampling.continuous_batch_size and not self.hybrid.options.enabled:
            raise ValueError(
                f"SamplingConfig.continuous_batch_size {sampling.continuous_batch_size} needs "
                "HybridOptions(enabled=True): transformers' own generate has no slots"
            )
        ends_with_padding = ~request.prompt_attention_mask[:, -1].bool()
        if ends_with_padding.any():
            row = int(ends_with_padding.nonzero()[0])
            raise ValueError(
                f"prompt {row} ends with padding, or is empty: its last prompt_attention_mask is 0; pad "
                "prompts on the left"
            )
