"""Records of a PPO step whose numbers depend on the sample id alone."""

import torch

from common.data.packed_batch import PackedBatch


def make_record(sample_ids, prompt_lengths, response_lengths, *, num_samples: int = 1) -> PackedBatch:
    """A scored record; responses shorter than 5 tokens are finished."""
    parts = []
    for sample, num_prompt, num_response in zip(sample_ids, prompt_lengths, response_lengths, strict=True):
        g = torch.Generator().manual_seed(sample)
        logprobs = {
            name: -torch.rand(num_response, generator=g)
            for name in ("rollout_logprobs", "old_logprobs", "ref_logprobs", "old_values")
        }
        numbers = {
            "group_ids": torch.tensor([sample // num_samples]),
            "is_finished": torch.tensor([num_response < 5]),
            "next_values": torch.rand(1, generator=g),
            "scores": torch.randn(1, generator=g),
        }
        parts.append(
            PackedBatch.build(
                [sample],
                {
                    "prompt_ids": [torch.randint(1, 50, (num_prompt,), generator=g)],
                    "response_ids": [torch.randint(1, 50, (num_response,), generator=g)],
                    "versions": [torch.zeros(num_response, dtype=torch.int64)],
                    **{key: [values] for key, values in (logprobs | numbers).items()},
                },
            )
        )
    return PackedBatch.concat(parts)
