"""Training of step 2 on pairs: a reward model by a ranking loss, or under --loss dpo a policy, without one.

# N pairs; a pass holds each pair's chosen answer, then its rejected one
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from common.data.packed_batch import PackedBatch, pad_sequences, to_device, token_positions
from common.models.model_inputs import ModelInputs, build_model_inputs
from common.models.tensor_ops import correlation
from common.programs.single_model import Trainer
from common.ranks import distributed
from step2_reward.pair_math import (
    PairLosses,
    accuracy_figures,
    center_penalty,
    dpo_loss,
    end_score_loss,
    expected_calibration_error,
    first_difference,
    longer_share,
    token_wise_loss,
    wins,
)

SIDES = ("chosen", "rejected")


class PairScores(NamedTuple):
    """One batch of pairs under the model."""

    chosen: torch.Tensor  # (N,) fp32
    rejected: torch.Tensor  # (N,) fp32
    values: torch.Tensor | None = None  # (total,) fp32, of all tokens end to end


def build_pair_inputs(
    batch: PackedBatch, *, is_packed: bool = False, shares_prompts: bool = False
) -> tuple[torch.Tensor, torch.Tensor, ModelInputs]:
    """Return token ids (total,) and lengths (2N,) of both answers of each pair, and a model's inputs.

    Packed, what the answers of a pair begin alike may stand there once.
    """
    token_ids, pair_lengths = batch.interleave("chosen_ids", "rejected_ids")
    lengths, sizes = pair_lengths.flatten(), torch.full((len(batch),), 2) if shares_prompts else None
    return token_ids, lengths, build_model_inputs(token_ids, lengths, is_packed=is_packed, group_sizes=sizes)


def shared_length(row: dict[str, Any]) -> int:
    """Return with how many tokens both answers of a pair begin."""
    pair = zip(row["chosen_ids"], row["rejected_ids"], strict=False)
    return next(
        (i for i, (a, b) in enumerate(pair) if a != b),
        min(map(len, (row["chosen_ids"], row["rejected_ids"]))),
    )


def compute_pair_scores(
    model: Any, batch: PackedBatch, *, with_values: bool = False, **layout: bool
) -> PairScores:
    """Return the scores of both answers: the value at the last real token, end-of-turn token included; and
    the values of all tokens if asked for.

    `model` is a ValueModel or its engine, `layout` goes to `build_pair_inputs`.
    """
    _, lengths, inputs = build_pair_inputs(batch, **layout)
    if not with_values:
        scores = model(inputs, inputs.last_slots)
        return PairScores(scores[0::2], scores[1::2])
    values = model(inputs)
    (last,) = to_device([lengths.cumsum(0) - 1], values.device)
    scores = values[last]
    return PairScores(scores[0::2], scores[1::2], values)


def compute_pair_losses(
    batch: PackedBatch, scores: PairScores, *, rank_loss: str, use_margin: bool
) -> torch.Tensor:
    """Return the ranking loss (N,) of each pair."""
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


def compute_answer_logprobs(model: Any, batch: PackedBatch, **layout: bool) -> torch.Tensor:
    """Return (2N,) fp32: the log-probability of each answer given its prompt, end-of-turn token included.

    `model` is a PolicyModel or its engine, `layout` goes to `build_pair_inputs`. A token that nothing stands
    before has no probability.
    """
    token_ids, lengths, inputs = build_pair_inputs(batch, **layout)
    starts = [batch.numbers(f"{side}_response_start") for side in SIDES]
    first = torch.stack(starts, dim=1).flatten().clamp(min=1)  # (2N,)
    is_answer = token_positions(lengths) >= first.repeat_interleave(lengths)  # (total,)
    logprobs, _ = model(inputs, inputs.slots_before(is_answer), token_ids[is_answer])
    sequence = torch.arange(len(lengths)).repeat_interleave(lengths)[is_answer]
    (sequence,) = to_device([sequence], logprobs.device)
    return torch.zeros(len(lengths), device=logprobs.device).index_add(0, sequence, logprobs)


@torch.no_grad()
def judge_pairs(
    compute: Callable[[PackedBatch], Sequence[torch.Tensor]],
    batches: Iterable[tuple[PackedBatch, torch.Tensor]],
    *,
    what: str = "score",
) -> dict[str, float]:
    """Return accuracy with its interval, margin, calibration and what length has to do with it, of the rows
    of all ranks; the mean loss too where `compute` gives the losses.

    `compute(batch)` gives scores (N,) of the chosen and of the rejected answers, and maybe losses (N,);
    `what` is the scores' name. Every rank must call this.
    """
    own = []
    for batch, is_real in batches:
        lengths = [batch.lengths[f"{s}_ids"] - batch.numbers(f"{s}_response_start") for s in SIDES]
        figures = torch.stack([*compute(batch)]).cpu()  # at once: each copy waits for the device
        own.append([column[is_real] for column in (*lengths, *figures)])
    parts = [part for of_rank in distributed.gather_objects(own) for part in of_rank]
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    chosen_lengths, rejected_lengths, chosen, rejected, *loss = columns
    scores, lengths = torch.cat([chosen, rejected]), torch.cat([chosen_lengths, rejected_lengths])
    differences, longer = chosen - rejected, chosen_lengths - rejected_lengths
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
    """Moves an engine by the mean loss over the global batch's pairs."""

    columns = ("loss", "accuracy", "margin", "learning_rate")
    what: str  # what the model gives an answer

    @property
    def layout(self) -> dict[str, bool]:
        """How the answers of a pass stand, for `build_pair_inputs`."""
        return {"is_packed": self.is_packed, "shares_prompts": not self.args.no_share_prompts}

    def compute_losses(self, batch: PackedBatch) -> PairLosses:
        """Return what the model gives the answers of each pair, and its loss."""
        raise NotImplementedError

    def compute_sums(self, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the losses of the pairs, and how their answers are ranked, added up."""
        chosen, rejected, losses = self.compute_losses(batch)
        sums = {"accuracy": wins(chosen - rejected), "margin": chosen - rejected}
        sums |= {f"chosen_{self.what}": chosen, f"rejected_{self.what}": rejected}
        return losses.sum(), {name: values.detach().sum() for name, values in sums.items()}

    def judge(self, batches: Iterable[tuple[PackedBatch, torch.Tensor]]) -> dict[str, float]:
        """Return `judge_pairs` with the mean loss. Every rank must call this."""
        return judge_pairs(self.compute_losses, batches, what=self.what)


class RewardTrainer(PairTrainer):
    """Moves a reward model by a ranking loss."""

    kind, what = "reward", "score"

    def compute_losses(self, batch: PackedBatch) -> PairLosses:
        """Return the scores of each pair's answers, and the ranking loss, with --center_coef."""
        args = self.args
        with_values = args.loss == "token_wise"
        scores = compute_pair_scores(self.engine, batch, with_values=with_values, **self.layout)
        losses = compute_pair_losses(batch, scores, rank_loss=args.loss, use_margin=args.use_margin)
        if args.center_coef:
            losses = losses + args.center_coef * center_penalty(scores.chosen, scores.rejected)
        return PairLosses(scores.chosen, scores.rejected, losses)


class DPOTrainer(PairTrainer):
    """Moves a policy by the DPO loss."""

    kind, what = "dpo", "reward"

    def compute_losses(self, batch: PackedBatch) -> PairLosses:
        """Return the rewards of each pair's answers, and the DPO loss."""
        (reference,) = to_device([batch.data["reference_logprobs"]], distributed.device())  # (2N,)
        policy = self.compute_logprobs(batch)
        return dpo_loss(
            policy[0::2],
            policy[1::2],
            reference[0::2],
            reference[1::2],
            beta=self.args.beta,
            label_smoothing=self.args.label_smoothing,
        )

    def compute_logprobs(self, batch: PackedBatch) -> torch.Tensor:
        """Return `compute_answer_logprobs` of the policy as it is."""
        return compute_answer_logprobs(self.engine, batch, **self.layout)
