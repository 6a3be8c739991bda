"""What one PPO step has seen: packed as it is kept and sent, padded as algorithms read it.

A step's record is a PackedBatch with one item a response, in the order of the sample ids. Its keys are the
fields of `Experience` of one number a token, laid end to end, and of one number a response; prompt_ids too.

# B responses, R tokens of the longest, total response tokens of all
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from common.data.micro_batches import plan_micro_batches
from common.data.packed_batch import PackedBatch
from common.ranks import distributed


@dataclass(frozen=True)
class Experience:
    """The responses of a step as algorithms see them, right-padded, on the CPU; every rank holds all of them.

    `old_` was computed at the rollout, `ref_` by the frozen reference. Rows are in the order of their sample
    ids, those of a group next to each other. Nothing outside `response_mask` counts: it may hold any number.
    """

    sample_ids: torch.Tensor  # (B,) int64, the place in the run's sequence of responses, for any rank count
    group_ids: torch.Tensor  # (B,) int64, one for all responses to a prompt
    response_ids: torch.Tensor  # (B, R) int64
    response_mask: torch.Tensor  # (B, R) bool, stop token included
    is_finished: torch.Tensor  # (B,) bool, False where the length limit cut the response
    versions: torch.Tensor  # (B, R) int64, PPO steps that the policy had made when it sampled the token
    rollout_logprobs: torch.Tensor  # (B, R) fp32, the sampler's own
    old_logprobs: torch.Tensor  # (B, R) fp32, of the policy that sampled: what the ratio is taken to
    ref_logprobs: torch.Tensor  # (B, R) fp32
    scores: torch.Tensor  # (B,) fp32, as the rewards gave them, weighted and added up
    old_values: torch.Tensor | None = None  # (B, R) fp32, of the state before each token; None: no critic
    next_values: torch.Tensor | None = None  # (B,) fp32, of the state after the last token
    prox_logprobs: torch.Tensor | None = None  # (B, R) fp32, of the policy before the step's updates
    rewards: torch.Tensor | None = None  # (B, R) fp32, filled in by the algorithm
    advantages: torch.Tensor | None = None  # (B, R) fp32, filled in by the algorithm
    returns: torch.Tensor | None = None  # (B, R) fp32, filled in by an algorithm with a critic
    loss_mask: torch.Tensor | None = None  # (B, R) bool, tokens that losses count; None: response_mask

    @property
    def response_lengths(self) -> torch.Tensor:
        """Return the response tokens (B,) int64, stop token included."""
        return self.response_mask.sum(1)


TOKEN_FIELDS = (
    "response_ids", "versions", "rollout_logprobs", "old_logprobs", "ref_logprobs", "old_values",
    "prox_logprobs",
)  # fmt: skip
RESPONSE_FIELDS = ("group_ids", "is_finished", "scores", "next_values")
RESULT_FIELDS = ("rewards", "advantages", "returns", "loss_mask")  # what algorithms fill in, a number a token


def read_experience(record: PackedBatch) -> Experience:
    """Return a step's record as algorithms see it."""
    fields = {name: record.pad(name)[0] for name in TOKEN_FIELDS if name in record.data}
    fields |= {name: record.numbers(name) for name in RESPONSE_FIELDS if name in record.data}
    _, response_mask = record.pad("response_ids")
    return Experience(sample_ids=torch.tensor(record.ids), response_mask=response_mask, **fields)


def add_results(record: PackedBatch, experience: Experience) -> PackedBatch:
    """Return the record with what an algorithm has filled in."""
    mask = experience.response_mask
    for name in RESULT_FIELDS:
        padded = getattr(experience, name)
        if padded is None and name == "loss_mask":
            padded = mask
        if padded is not None:
            record = record.with_key(name, padded[mask], like="response_ids")
    return record


def put_back(kept: PackedBatch, record: PackedBatch) -> PackedBatch:
    """Return `record` with what `kept`, some of its responses, has beyond it: zeros for the others."""
    chosen = set(kept.ids)
    rest = record.select([item for item, sample in enumerate(record.ids) if sample not in chosen])
    for key in kept.data.keys() - rest.data.keys():
        if torch.equal(kept.lengths[key], kept.lengths["response_ids"]):
            zeros = kept.data[key].new_zeros(len(rest.data["response_ids"]))
            rest = rest.with_key(key, zeros, like="response_ids")
        else:
            rest = rest.with_numbers(key, kept.data[key].new_zeros(len(rest)))
    whole = PackedBatch.concat([kept, rest])
    places = {sample: item for item, sample in enumerate(whole.ids)}
    return whole.select([places[sample] for sample in record.ids])


def gather_records(local: PackedBatch) -> PackedBatch:
    """Return the responses of all ranks by sample id. Every rank must call this.

    They are small (a few numbers a token), and once every rank holds all, advantages and minibatches are the
    same for any number of ranks, and a group is whole everywhere.
    """
    whole = PackedBatch.concat(distributed.gather_objects(local))
    order = sorted(range(len(whole)), key=lambda item: whole.ids[item])
    return whole.select(order)


def sequence_lengths(record: PackedBatch) -> list[tuple[int]]:
    """Return the tokens of each prompt with its response."""
    return [(n,) for n in (record.lengths["prompt_ids"] + record.lengths["response_ids"]).tolist()]


@dataclass(frozen=True)
class TokenCap:
    """How many tokens a forward pass may take; `is_packed`: sequences stand end to end there."""

    max_tokens: int
    is_packed: bool = False

    def cut(self, record: PackedBatch) -> list[PackedBatch]:
        """Return this rank's micro-batches of a record that all ranks hold; every rank gets as many."""
        plan = plan_micro_batches(
            sequence_lengths(record),
            num_ranks=distributed.world_size(),
            max_tokens=self.max_tokens,
            is_packed=self.is_packed,
        )
        return [record.select(items) for items in plan[distributed.rank()]]


@dataclass(frozen=True)
class MinibatchPlan:
    """How a step's responses are cut: `rows` a rank and micro-batch, `accumulation` of those an update.

    With a `cap` an update has as many responses, but its micro-batches are cut by tokens.
    """

    rows: int
    accumulation: int
    epochs: int
    seed: int
    cap: TokenCap | None = None

    @property
    def global_rows(self) -> int:
        """Return the responses of an optimizer step, over all ranks."""
        return self.rows * self.accumulation * distributed.world_size()

    def minibatches(self, record: PackedBatch, step: int) -> Iterator[list[PackedBatch]]:
        """Yield this rank's micro-batches of every optimizer step, reshuffled by (seed, step, epoch).

        The responses of an optimizer step do not depend on the number of ranks, on the accumulation or on the
        cut into micro-batches.
        """
        rank, world_size = distributed.rank(), distributed.world_size()
        size = self.global_rows
        for epoch in range(self.epochs):
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + step) * 101 + epoch)
            order = torch.randperm(len(record), generator=generator)
            for first in range(0, len(record) - size + 1, size):
                chosen = order[first : first + size]
                if self.cap:
                    yield self.cap.cut(record.select(chosen))
                    continue
                starts = [(a * world_size + rank) * self.rows for a in range(self.accumulation)]
                yield [record.select(chosen[s : s + self.rows]) for s in starts]
