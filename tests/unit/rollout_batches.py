"""Rollout batches and padded responses whose numbers depend on ids or seeds alone, or are given."""

import math

import torch

from common.data.packed_batch import PackedBatch

# What stands in the padding must not matter, not even where it is no number.
PADDING = [0.0, 1e6, math.nan, -math.inf]


def random_batch(num: int, *, lengths: list[int] | None = None, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Return `num` random (B, R) tensors and the mask of responses of these lengths, 0 and R among them."""
    lengths = [9, 1, 4, 0, 8] if lengths is None else lengths
    generator = torch.Generator().manual_seed(seed)
    tensors = torch.randn(num, len(lengths), 9, generator=generator)
    return *tensors, torch.arange(9) < torch.tensor(lengths)[:, None]


def fill(x: torch.Tensor, mask: torch.Tensor, padding: float) -> torch.Tensor:
    return torch.where(mask, x, padding)


def make_rollout_batch(sample_ids, prompt_lengths, response_lengths, *, num_samples: int = 1) -> PackedBatch:
    """A scored rollout batch; responses shorter than 5 tokens are finished."""
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
            "greedy_scores": torch.tensor([0.25]),
            "greedy_is_finished": torch.tensor([True]),
            "greedy_lengths": torch.tensor([3]),
        }
        parts.append(
            PackedBatch.build(
                [sample],
                {
                    "prompt_ids": [torch.randint(1, 50, (num_prompt,), generator=g)],
                    "response_ids": [torch.randint(1, 50, (num_response,), generator=g)],
                    "versions": [torch.zeros(num_response, dtype=torch.int64)],
                    "loss_mask": [torch.ones(num_response, dtype=torch.bool)],
                    **{key: [values] for key, values in (logprobs | numbers).items()},
                },
            )
        )
    return PackedBatch.concat(parts)


def make_batch(lengths, **columns) -> PackedBatch:
    """A rollout batch of responses with these lengths; columns are padded (b, R) or numbers (b,).

    What is not given is zero; all are finished, each is a group of its own, and all tokens count.
    """
    num, width = len(lengths), max([2, *lengths])
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    zeros, ids = torch.zeros(num, width), torch.zeros(num, width, dtype=torch.int64)
    made = {name: zeros for name in ("rollout_logprobs", "old_logprobs", "ref_logprobs")}
    made |= {"response_ids": ids, "versions": ids, "prompt_ids": ids, "loss_mask": mask}
    made |= {
        "group_ids": torch.arange(num),
        "is_finished": torch.ones(num).bool(),
        "scores": torch.zeros(num),
    }
    batch = PackedBatch(tuple(range(num)), {}, {})
    for name, values in (made | columns).items():
        if values.dim() == 1:
            batch = batch.with_numbers(name, values)
        else:
            kept = mask[:, : values.shape[1]]
            batch = batch.with_key(name, values[:, :width][kept], lengths=kept.sum(1))
    return batch
