"""The responses of a PPO step in one container, from sampling to the loss; and the exchange of rows between
ranks.

A rollout batch is a PackedBatch with one item per response; its ids are the sample ids: positions in the
run's sequence of responses, the same for any number of ranks. A rank holds the responses that it has sampled,
in whole groups, the same number on every rank; other ranks receive only numbers such as their lengths and
scores. Rows are sent to the rank that trains on them, one minibatch at a time.

    prompt_ids        per prompt    int64
    response_ids      per response  int64, stop token included
    versions          per token     int64, PPO steps that the policy had taken when it sampled the token
    rollout_logprobs  per token     fp32, of the sampler
    old_logprobs      per token     fp32, of the policy that sampled; denominator of the ratio
    ref_logprobs      per token     fp32, of the frozen reference, or the teacher
    prox_logprobs     per token     fp32, of the policy before the step's updates, with --rollout_correction;
                                    denominator of the ratio then
    correction_weights  per token   fp32, factors of the losses, with --rollout_correction
    prox_share        per token     fp32, with --prox_logprobs loglinear: the updates make these two from it
    old_values        per token     fp32, of the state before the token; with a critic
    next_values       per response  fp32, of the state after the last token; with a critic
    sampled_mask      per token     bool, True for sampled tokens; with an environment (--environment)
    loss_mask         per token     bool, True counts in losses: sampled tokens that are not masked out
    group_ids         per response  int64, one for all responses to a prompt
    is_finished       per response  bool, False if the length limit truncated the response
    num_turns         per response  int64, turns that the environment received; with an environment
    greedy_scores, greedy_is_finished, greedy_lengths  per response, of the greedy response (remax)
    scores            per response  fp32, weighted sum of the rewards, if any; score/NAME: each of them
    divergences       per token     fp32, from the teacher; held-out prompts only
    rewards, advantages, returns  per token  fp32, filled in by the algorithm

# b responses of this rank, B of all, R tokens of the longest of this rank
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from safetensors.torch import load, save

from common.data.micro_batches import plan_micro_batches
from common.data.packed_batch import PackedBatch
from common.ranks import distributed
from step3_ppo.arguments import PPOArguments


def response_mask(batch: PackedBatch) -> torch.Tensor:
    """Positions with a response token, stop token included: (b, R) bool."""
    return batch.pad("response_ids")[1]


def sampled_mask(batch: PackedBatch) -> torch.Tensor:
    """Positions with a token that the model sampled: (b, R) bool.

    Others are padding, or tokens of an environment; each response ends with a sampled token.
    """
    return tokens(batch, "sampled_mask") if "sampled_mask" in batch.data else response_mask(batch)


def tokens(batch: PackedBatch, key: str) -> torch.Tensor:
    """One number per response token, right-padded with zeros: (b, R)."""
    return batch.pad(key)[0]


def with_tokens(batch: PackedBatch, **columns: torch.Tensor) -> PackedBatch:
    """The batch with one number per response token for each key, given as (b, R)."""
    mask = response_mask(batch)
    for key, padded in columns.items():
        batch = batch.with_key(key, padded[mask], like="response_ids")
    return batch


def spread_over_tokens(numbers: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """A response's number (b,) at each token that was sampled, 0 elsewhere: (b, R) fp32."""
    return torch.where(sampled_mask(batch), numbers.float()[:, None], 0.0)


def num_tokens(batch: PackedBatch) -> torch.Tensor:
    """Number of tokens (b,) int64 of each prompt with its response."""
    return batch.lengths["prompt_ids"] + batch.lengths["response_ids"]


def sampled_positions(batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of tokens (b,) int64 of each prompt with its response, and which of all tokens were sampled:
    (total,) bool; both on the CPU.
    """
    responses = batch.data.get("sampled_mask", torch.ones(len(batch.data["response_ids"]), dtype=torch.bool))
    masks = {"prompt_ids": torch.zeros(len(batch.data["prompt_ids"]), dtype=torch.bool)}
    for like, mask in (masks | {"response_ids": responses.cpu()}).items():
        batch = batch.with_key(f"{like} sampled", mask, like=like)
    return num_tokens(batch), batch.interleave("prompt_ids sampled", "response_ids sampled")[0]


def with_closing(batch: PackedBatch, closing_ids: Sequence[int]) -> PackedBatch:
    """The batch with these token ids after each finished response; they count as sampled."""
    if not closing_ids:
        return batch
    is_finished = batch.numbers("is_finished").tolist()
    closings = [torch.tensor(closing_ids if finished else [], dtype=torch.int64) for finished in is_finished]
    lengths = batch.lengths["response_ids"] + torch.tensor(list(map(len, closings)))
    columns = {"response_ids": closings}
    if "sampled_mask" in batch.data:
        columns["sampled_mask"] = [torch.ones(len(closing), dtype=torch.bool) for closing in closings]
    for key, endings in columns.items():
        pairs = zip(batch.sequences(key), endings, strict=True)
        data = torch.cat([torch.cat([sequence.cpu(), ending]) for sequence, ending in pairs])
        batch = batch.with_key(key, data, lengths=lengths)
    return batch


def merge_columns(kept: PackedBatch, batch: PackedBatch) -> PackedBatch:
    """`batch` with the columns that an algorithm added to some of its rows; zeros in the others, which are in
    no loss.
    """
    if len(kept) == len(batch):
        return kept
    is_kept = set(kept.ids)
    rest = batch.select([row for row, sample in enumerate(batch.ids) if sample not in is_kept])
    for key in [*(key for key in kept.data if key not in batch.data), "loss_mask"]:
        zeros = kept.data[key].new_zeros(len(rest.data["response_ids"]))
        rest = rest.with_key(key, zeros, like="response_ids")
    return reorder(PackedBatch.concat([kept, rest]), batch.ids)


def reorder(batch: PackedBatch, ids: Sequence[int]) -> PackedBatch:
    """The rows with these sample ids, in this order."""
    row_of = {sample: row for row, sample in enumerate(batch.ids)}
    return batch.select([row_of[sample] for sample in ids])


def to_tensors(batch: PackedBatch) -> dict[str, torch.Tensor]:
    """A batch as named tensors that own their memory, for files and communication."""
    tensors = {"ids": torch.tensor(batch.ids, dtype=torch.int64)}
    for key in batch.data:
        tensors[f"{key}:data"] = batch.data[key]
        tensors[f"{key}:lengths"] = batch.lengths[key]
    return {name: tensor.contiguous().clone() for name, tensor in tensors.items()}  # keys may share memory


def from_tensors(tensors: Mapping[str, torch.Tensor], keys: Iterable[str]) -> PackedBatch:
    """The batch with these keys from the result of `to_tensors`."""
    data, lengths = ({key: tensors[f"{key}:{part}"] for key in keys} for part in ("data", "lengths"))
    return PackedBatch(tuple(tensors["ids"].tolist()), data, lengths)


# ---------------------------------------------------------------------------------------------------------
# Communication between ranks
# ---------------------------------------------------------------------------------------------------------


def gather_numbers(batch: PackedBatch, **columns: torch.Tensor) -> dict[str, torch.Tensor]:
    """Columns (b,) of all ranks as (B,), in the order of the sample ids, which are the column "ids".

    Every rank must call this.
    """
    columns = {"ids": torch.tensor(batch.ids, dtype=torch.int64), **columns}
    gathered = distributed.gather_objects(columns)
    joined = {name: torch.cat([rank_columns[name] for rank_columns in gathered]) for name in columns}
    order = joined["ids"].argsort()
    return {name: column[order] for name, column in joined.items()}


def gather_ids(batch: PackedBatch, is_chosen: torch.Tensor) -> list[int]:
    """Sample ids of the chosen rows of all ranks, ascending; is_chosen (b,) bool.

    Every rank must call this.
    """
    gathered = gather_numbers(batch, is_chosen=is_chosen)
    return gathered["ids"][gathered["is_chosen"]].tolist()


def exchange_rows(batch: PackedBatch, wanted: Sequence[Sequence[int]]) -> PackedBatch:
    """The rows wanted[this rank], in that order; wanted[rank] are sample ids, each held by one rank.

    Only these rows are sent, as one tensor of bytes. Every rank must call this with the same `wanted`.
    """
    own_ids = wanted[distributed.rank()]
    if distributed.world_size() == 1:
        return reorder(batch, own_ids)
    held = set(batch.ids)
    parts = [reorder(batch, [sample for sample in ids if sample in held]) for ids in wanted]
    sent = [torch.frombuffer(bytearray(save(to_tensors(part))), dtype=torch.uint8) for part in parts]
    received = [load(data.numpy().tobytes()) for data in distributed.all_to_all(sent)]
    return reorder(PackedBatch.concat([from_tensors(part, batch.data) for part in received]), own_ids)


def replace_rows(
    batch: PackedBatch, dropped: Sequence[int], fresh: PackedBatch, taken: Sequence[int]
) -> PackedBatch:
    """The batch without the dropped sample ids and with the `taken` rows of `fresh`, redistributed to equal
    numbers per rank; only surplus rows move.

    As many rows are dropped as taken, over all ranks, in whole groups. Every rank must call this.
    """
    is_dropped, is_taken = set(dropped), set(taken)
    kept = batch.select([row for row, sample in enumerate(batch.ids) if sample not in is_dropped])
    more = fresh.select([row for row, sample in enumerate(fresh.ids) if sample in is_taken])
    changed = PackedBatch.concat([kept, more])
    wanted = [list(ids) for ids in distributed.gather_objects(changed.ids)]
    quota = sum(map(len, wanted)) // len(wanted)
    spare = [sample for ids in wanted for sample in ids[quota:]]
    for ids in wanted:
        del ids[quota:]
        missing = quota - len(ids)
        ids += spare[:missing]
        del spare[:missing]
    return exchange_rows(changed, wanted)


# ---------------------------------------------------------------------------------------------------------
# Micro-batches and minibatches
# ---------------------------------------------------------------------------------------------------------


def row_sizes(batch: PackedBatch) -> dict[str, torch.Tensor]:
    """Numbers that a split depends on: prompt tokens, response tokens and group of each row, (b,) int64."""
    lengths = {"prompt": batch.lengths["prompt_ids"], "response": batch.lengths["response_ids"]}
    return lengths | {"group": batch.numbers("group_ids")}


@dataclass(frozen=True)
class TokenCap:
    """Token budget of a forward pass. `is_packed`: sequences are packed; `shares_prompts`: a prompt of
    several responses counts once.
    """

    max_tokens: int
    is_packed: bool = False
    shares_prompts: bool = False

    def plan(self, sizes: Mapping[str, torch.Tensor], num_ranks: int = 1) -> list[list[list[int]]]:
        """plan[rank][micro_batch] = rows, for rows with these `row_sizes`."""
        prompts = sizes["prompt"].tolist()
        return plan_micro_batches(
            [
                (prompt + response,)
                for prompt, response in zip(prompts, sizes["response"].tolist(), strict=True)
            ],
            num_ranks=num_ranks,
            max_tokens=self.max_tokens,
            is_packed=self.is_packed,
            shared=list(zip(sizes["group"].tolist(), prompts, strict=True)) if self.shares_prompts else (),
        )

    def cut(self, batch: PackedBatch) -> list[PackedBatch]:
        """Micro-batches of this rank's rows, the same number on every rank. Every rank must call this."""
        sizes = row_sizes(batch)
        (plan,) = self.plan(sizes)
        count = int(distributed.max_float(len(plan)))
        if len(plan) < count:  # as a plan for `count` ranks with one micro-batch each
            plan = [rows for (rows,) in self.plan(sizes, count)]
        return [batch.select(rows) for rows in plan]


def cut_minibatches(
    batch: PackedBatch, args: PPOArguments, cap: TokenCap, step: int, first: int = 0
) -> Iterator[list[PackedBatch]]:
    """Yield this rank's micro-batches of every optimizer step of PPO step `step`, from `first`.

    Every rank must iterate in step.
    """
    gathered = gather_numbers(batch, **row_sizes(batch))
    ids = gathered["ids"].tolist()
    for plan in itertools.islice(plan_minibatches(gathered, args, cap, step), first, None):
        wanted = [[ids[row] for rows in rank_rows for row in rows] for rank_rows in plan]
        minibatch = exchange_rows(batch, wanted)
        yield [reorder(minibatch, [ids[row] for row in rows]) for rows in plan[distributed.rank()]]


def plan_minibatches(
    sizes: Mapping[str, torch.Tensor], args: PPOArguments, cap: TokenCap, step: int
) -> Iterator[list[list[list[int]]]]:
    """Yield plan[rank][micro_batch] = rows for every optimizer step, reshuffled by (seed, step, epoch).

    `sizes` are the `row_sizes` of all rows; responses to one prompt stay adjacent. The responses of an
    optimizer step do not depend on the number of ranks, on accumulation or on the split into micro-batches,
    which is by tokens under the cap if a flag asks for it, else by --per_device_training_batch_size.
    """
    num_ranks = distributed.world_size()
    size = args.samples_per_update * num_ranks
    _, group = sizes["group"].unique(return_inverse=True)  # (B,) int64, from 0
    for epoch in range(args.ppo_epochs):
        generator = torch.Generator().manual_seed((args.seed * 1_000_003 + step) * 101 + epoch)
        group_positions = torch.randperm(int(group.max()) + 1, generator=generator).argsort()
        order = group_positions[group].argsort(stable=True)
        for chosen in order[: len(order) // size * size].split(size):
            if args.packed or args.max_tokens_per_micro_batch:
                plan = cap.plan({name: column[chosen] for name, column in sizes.items()}, num_ranks)
                yield [[chosen[rows].tolist() for rows in rank_rows] for rank_rows in plan]
            else:
                parts = chosen.view(args.gradient_accumulation_steps, num_ranks, -1)
                yield [parts[:, rank].tolist() for rank in range(num_ranks)]
