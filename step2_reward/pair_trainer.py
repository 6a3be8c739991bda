"""Trainer of step 2 on pairs: a reward model with a ranking loss, or under --loss dpo or ipo a policy.

# N pairs; a pass holds each pair's chosen response, then its rejected one
"""

from collections.abc import Callable, Iterable, Sequence

import torch

from common.data.packed_batch import PackedBatch, pad_sequences, to_device
from common.models.router_loss import add_router_loss
from common.models.tensor_ops import correlation
from common.programs.single_model import Trainer
from common.ranks import distributed
from step2_reward.answer_scores import (
    SIDES,
    PairScores,
    compute_answer_logprobs,
    compute_pair_scores,
    first_scored,
)
from step2_reward.pair_math import (
    PairLosses,
    accuracy_figures,
    center_penalty,
    dpo_loss,
    end_score_loss,
    expected_calibration_error,
    first_difference,
    ipo_loss,
    longer_share,
    token_wise_loss,
    wins,
)


def compute_pair_losses(
    batch: PackedBatch, scores: PairScores, *, rank_loss: str, use_margin: bool
) -> torch.Tensor:
    """Ranking loss (N,) of each pair."""
    device = scores.chosen.device
    if rank_loss == "end_score":
        (margin,) = to_device([batch.numbers("margin")], device) if use_margin else (0.0,)
        return end_score_loss(scores.chosen, scores.rejected, margin)
    token_ids, pair_lengths = batch.interleave("chosen_ids", "rejected_ids")
    ids, _ = pad_sequences(token_ids, pair_lengths.flatten())  # (2N, T)
    values, _ = pad_sequences(scores.values, pair_lengths.flatten())
    lengths = pair_lengths[:, 0], pair_lengths[:, 1]
    divergence = first_difference(ids[0::2], ids[1::2], *lengths)
    *lengths, divergence = to_device([*lengths, divergence], device)
    return token_wise_loss(values[0::2], values[1::2], *lengths, divergence)


@torch.no_grad()
def evaluate_pairs(
    compute: Callable[[PackedBatch], Sequence[torch.Tensor]],
    batches: Iterable[tuple[PackedBatch, torch.Tensor]],
    *,
    what: str = "score",
) -> dict[str, float]:
    """Accuracy with its interval, margin, calibration and length bias, over the rows of all ranks; also the
    mean loss if `compute` returns losses.

    `compute(batch)` returns scores (N,) of the chosen and of the rejected responses, and optionally losses
    (N,); `what` is the name of the scores. Every rank must call this.
    """
    own = []
    for batch, is_real in batches:
        lengths = [batch.lengths[f"{s}_ids"] - batch.numbers(f"{s}_response_start") for s in SIDES]
        figures = torch.stack([*compute(batch)]).cpu()  # one copy, because each waits for the device
        own.append([column[is_real] for column in (*lengths, *figures)])
    parts = [part for rank_parts in distributed.gather_objects(own) for part in rank_parts]
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    chosen_lengths, rejected_lengths, chosen, rejected, *loss = columns
    scores = torch.cat([chosen, rejected])
    lengths = torch.cat([chosen_lengths, rejected_lengths])
    differences = chosen - rejected
    longer = chosen_lengths - rejected_lengths
    return {
        **({"loss": float(loss[0].mean())} if loss else {}),
        **accuracy_figures(differences),
        "margin": float(differences.mean()),
        "calibration_error": float(expected_calibration_error(differences)),
        "length_correlation": float(correlation(scores, lengths.float())),
        "prefers_longer": float(longer_share(differences, longer)),
        "longer_is_chosen": float(longer_share(torch.ones_like(chosen), longer)),
        f"chosen_{what}": float(chosen.mean()),
        f"rejected_{what}": float(rejected.mean()),
        f"{what}_std": float(scores.std(correction=0)),
    }


class PairTrainer(Trainer):
    """Trains a model by the mean loss over the pairs of the global batch."""

    columns = ("loss", "accuracy", "margin", "learning_rate")
    what: str  # log name of a response's score
    trained_sides = SIDES

    @property
    def layout(self) -> dict[str, bool]:
        """Layout of the responses in a pass, for `build_pair_inputs`."""
        return {"is_packed": self.is_packed, "shares_prompts": not self.args.no_share_prompts}

    def compute_losses(self, batch: PackedBatch) -> PairLosses:
        """Scores of the responses of each pair, and the loss."""
        raise NotImplementedError

    def count(self, batch: PackedBatch) -> float:
        """Sum of the weights of the pairs: prompts count equally, however many pairs they have."""
        return float(batch.numbers("weight").sum())

    def compute_sums(self, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Losses of the pairs, with a mixture's router loss, and their ranking, summed by weight."""
        chosen, rejected, losses = self.compute_losses(batch)
        (weights,) = to_device([batch.numbers("weight")], losses.device)
        sums = {"accuracy": wins(chosen - rejected), "margin": chosen - rejected}
        sums |= {f"chosen_{self.what}": chosen, f"rejected_{self.what}": rejected}
        loss, more = add_router_loss(self.engine, (losses * weights).sum(), batch, self.count)
        return loss, more | {n: (values.detach() * weights).sum() for n, values in sums.items()}

    def evaluate_batches(self, batches: Iterable[tuple[PackedBatch, torch.Tensor]]) -> dict[str, float]:
        """`evaluate_pairs` with the mean loss. Every rank must call this."""
        return evaluate_pairs(self.compute_losses, batches, what=self.what)


class RewardTrainer(PairTrainer):
    """Trains a reward model by a ranking loss."""

    kind, what = "reward", "score"

    def compute_losses(self, batch: PackedBatch) -> PairLosses:
        """Scores of the responses of each pair, and the ranking loss with --center_coef."""
        args = self.args
        with_values = args.loss == "token_wise"
        scores = compute_pair_scores(self.engine, batch, with_values=with_values, **self.layout)
        losses = compute_pair_losses(batch, scores, rank_loss=args.loss, use_margin=args.use_margin)
        if args.center_coef:
            losses = losses + args.center_coef * center_penalty(scores.chosen, scores.rejected)
        return PairLosses(scores.chosen, scores.rejected, losses)


class DPOTrainer(PairTrainer):
    """Trains a policy by the DPO or IPO loss."""

    kind, what = "dpo", "reward"
    sides = SIDES

    def compute_losses(self, batch: PackedBatch) -> PairLosses:
        """Rewards of the responses of each pair, and the loss."""
        num_tokens = batch.interleave("chosen_ids", "rejected_ids")[1].flatten() - first_scored(
            batch
        )  # (2N,)
        reference, num_tokens = to_device(
            [batch.data["reference_logprobs"], num_tokens], distributed.device()
        )
        logprobs = torch.stack([self.compute_logprobs(batch), reference])  # (2, 2N)
        args = self.args
        if args.loss == "ipo":
            policy, reference = logprobs / num_tokens.clamp(min=1)
            return ipo_loss(policy[0::2], policy[1::2], reference[0::2], reference[1::2], beta=args.beta)
        policy, reference = logprobs
        return dpo_loss(
            policy[0::2],
            policy[1::2],
            reference[0::2],
            reference[1::2],
            beta=args.beta,
            label_smoothing=args.label_smoothing,
        )

    def compute_logprobs(self, batch: PackedBatch) -> torch.Tensor:
        """`compute_answer_logprobs` of the current policy."""
        return compute_answer_logprobs(self.engine, batch, **self.layout)
