"""Trainer of step 2 under --loss kto: a policy from single responses labelled good or bad.

# N rated answers, each next to its prompt followed by an answer to another prompt
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import Dataset

from common.data.packed_batch import PackedBatch, to_device
from common.engine.engine_step import Stat
from common.models.router_loss import add_router_loss
from common.programs.single_model import Trainer
from common.ranks import distributed
from common.ranks.passes import watched
from common.ranks.step_costs import COSTS
from step2_reward.answer_scores import compute_answer_logprobs
from step2_reward.pair_math import kto_baseline, kto_loss, wins

ANSWER, MISMATCHED = SIDES = ("answer", "mismatched")


class MismatchedRows(Dataset):
    """Labelled responses, each with `mismatched_ids`: its prompt, and a response to another prompt.

    The order of the rows determines the response, which is therefore the same in every epoch.
    """

    def __init__(self, rows: Any, max_tokens: int) -> None:
        self.rows, self.max_tokens = rows, max_tokens
        prompts = [
            hash(tuple(row["answer_ids"][: row["answer_response_start"]]))
            for row in watched(rows, len(rows), "rows")
        ]
        self.others = find_others(prompts)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row, other = self.rows[index], self.rows[self.others[index]]
        answer = other["answer_ids"][other["answer_response_start"] :]
        room = max(self.max_tokens - len(answer), 0)  # tokens left for the end of the prompt
        start = min(row["answer_response_start"], room)
        prompt = row["answer_ids"][row["answer_response_start"] - start : row["answer_response_start"]]
        return row | {"mismatched_ids": prompt + answer, "mismatched_response_start": start}

    def lengths(self, column: str) -> Any:
        """Lengths of the rows of `answer_ids`."""
        return self.rows.lengths(column)


def find_others(prompts: list[int]) -> list[int]:
    """For each row, the index of the next row with another prompt, wrapping around at the end; if all prompts
    are equal, of the next row.
    """
    count = len(prompts)
    others = [(i + 1) % count for i in range(count)]
    if len(set(prompts)) < 2:
        return others
    for i in reversed(range(2 * count)):  # twice, because the last rows wrap around
        here = i % count
        after = (i + 1) % count
        others[here] = others[after] if prompts[here] == prompts[after] else after
    return others


class KTOTrainer(Trainer):
    """Trains a policy by the KTO loss."""

    kind = "kto"
    columns = ("loss", "kl", "accuracy", "desirable_reward", "undesirable_reward")
    sides = SIDES
    trained_sides = (ANSWER,)
    baseline: torch.Tensor  # scalar, set per step

    def compute_logprobs(self, batch: PackedBatch, *sides: str) -> torch.Tensor:
        """`compute_answer_logprobs` of the current policy."""
        layout = {"is_packed": self.is_packed, "shares_prompts": not self.args.no_share_prompts}
        return compute_answer_logprobs(self.engine, batch, sides or SIDES, **layout)

    def compute_log_ratios(self, batch: PackedBatch, side: str) -> torch.Tensor:
        """Log-ratios (N,) of policy to reference for the responses of one side."""
        reference = batch.data["reference_logprobs"].view(-1, 2)[:, SIDES.index(side)]
        (reference,) = to_device([reference.contiguous()], distributed.device())
        return self.compute_logprobs(batch, side) - reference

    @torch.no_grad()
    def prepare(self, micro_batches: list[PackedBatch]) -> None:
        """Compute the baseline of the step over the whole global batch, so that it does not depend on the
        split into micro-batches.

        Every rank must call this.
        """
        self.engine.eval()  # as for the reference's log-probabilities
        with COSTS.clock("forward_backward"):
            self.baseline = kto_baseline(
                gather_rows([self.compute_log_ratios(batch, MISMATCHED) for batch in micro_batches])
            ).to(distributed.device())

    def compute_losses(
        self, log_ratios: torch.Tensor, labels: torch.Tensor, kl: torch.Tensor
    ) -> torch.Tensor:
        """`kto_loss` (N,) with the flags."""
        args = self.args
        return kto_loss(
            log_ratios,
            labels,
            kl,
            beta=args.beta,
            desirable_weight=args.desirable_weight,
            undesirable_weight=args.undesirable_weight,
        )

    def compute_sums(self, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, Stat]]:
        """Losses of the responses and their rewards, summed."""
        (labels,) = to_device([batch.numbers("label")], distributed.device())
        log_ratios = self.compute_log_ratios(batch, ANSWER)
        losses = self.compute_losses(log_ratios, labels, self.baseline)
        ratios = log_ratios.detach()
        is_good = labels == 1
        loss, more = add_router_loss(self.engine, losses.sum(), batch, self.count)
        return loss, more | {
            "kl": self.baseline * len(batch),
            "accuracy": wins((ratios - self.baseline) * (2 * labels - 1)).sum(),
            # No selection by a mask: its size would have to be read from the device.
            "desirable_reward": (self.args.beta * ratios.where(is_good, 0.0).sum(), is_good.sum()),
            "undesirable_reward": (self.args.beta * ratios.where(~is_good, 0.0).sum(), (~is_good).sum()),
        }

    def evaluate_batches(self, batches: Iterable[tuple[PackedBatch, torch.Tensor]]) -> dict[str, float]:
        """Loss, KL, accuracy (the fraction of responses on their label's side of the KL) and rewards, over
        the rows of all ranks. Every rank must call this.
        """
        own = []
        for batch, is_real in batches:
            ratios = [self.compute_log_ratios(batch, side).cpu() for side in SIDES]
            own.append(torch.stack([*ratios, batch.numbers("label").float()], dim=1)[is_real])
        log_ratios, mismatched, labels = gather_rows(own).T
        kl = kto_baseline(mismatched)
        is_good = labels == 1
        rewards = {"desirable": log_ratios[is_good], "undesirable": log_ratios[~is_good]}
        return {
            "loss": float(self.compute_losses(log_ratios, labels, kl).mean()),
            "kl": float(kl),
            "accuracy": float(wins((log_ratios - kl) * (2 * labels - 1)).mean()),
            **{f"{n}_reward": self.args.beta * float(r.mean()) for n, r in rewards.items() if len(r)},
        }


def gather_rows(own: list[torch.Tensor]) -> torch.Tensor:
    """Rows of all ranks, on the CPU. Every rank must call this."""
    parts = distributed.gather_objects([part.cpu() for part in own])
    return torch.cat([part for rank_parts in parts for part in rank_parts])
