"""Metrics of a rollout batch, by log name; and its responses as rows.

Every rank holds its share of a step. Metrics are over all ranks and do not depend on their number.

# b responses of this rank, B of all, R tokens of the longest
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from common.data.packed_batch import ROW_IDS, PackedBatch
from common.models.tensor_ops import correlation, masked_sum
from common.ranks import distributed
from step3_ppo.environments import KIND, NUM_TURNS
from step3_ppo.rewards.scorer import PREFIX, Scorer
from step3_ppo.rollout_batch import exchange_rows, gather_numbers, response_mask, sampled_mask, tokens


def gather_responses(batch: PackedBatch, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    """Numbers (B,) of all ranks' responses: scores, also of each reward, kl (k1, nats), lengths, is_finished,
    and `more` (b,) of this rank. Every rank must call this.
    """
    difference = tokens(batch, "old_logprobs") - tokens(batch, "ref_logprobs")
    return gather_numbers(
        batch,
        kl=masked_sum(difference, sampled_mask(batch), dim=1),
        lengths=batch.lengths["response_ids"].float(),
        is_finished=batch.numbers("is_finished").float(),
        **{key: batch.numbers(key) for key in batch.data if key == "scores" or key.startswith(PREFIX)},
        **more,
    )


def summarise(batch: PackedBatch, clip: float = 0.0) -> dict[str, float]:
    """Means over a batch with rewards; `objective/kl` is in nats per response (k1).

    Scores are clipped to [-clip, clip]; 0: they are not. Without scores their metrics are left out. Every
    rank must call this.
    """
    rewards = masked_sum(tokens(batch, "rewards"), response_mask(batch), dim=1)
    gathered = gather_responses(batch, rewards=rewards)
    metrics = {}
    if "scores" in gathered:
        metrics = {
            "objective/score": float(gathered["scores"].mean()),
            "objective/score_std": float(gathered["scores"].std(correction=0)),
            "objective/reward": float(gathered["rewards"].mean()),
            "objective/score_length_correlation": float(correlation(gathered["scores"], gathered["lengths"])),
        }
        if clip:
            metrics["objective/clipped_fraction"] = float((gathered["scores"].abs() > clip).float().mean())
    metrics |= {
        "objective/kl": float(gathered["kl"].mean()),
        "rollout/response_tokens": float(gathered["lengths"].mean()),
        "rollout/finished_fraction": float(gathered["is_finished"].mean()),
        "rollout/distinct_1": distinct_ngrams(batch.sequences("response_ids"), 1),
        "rollout/distinct_2": distinct_ngrams(batch.sequences("response_ids"), 2),
    }
    if "old_values" in batch.data and "returns" in batch.data:
        is_sampled = batch.data.get("sampled_mask", ...)
        metrics["value/explained_variance"] = explained_variance(
            batch.data["old_values"][is_sampled], batch.data["returns"][is_sampled]
        )
    return metrics


def explained_variance(values: torch.Tensor, returns: torch.Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over the tokens (N) of all ranks: at most 1.

    1 for a perfect critic, 0 for one that predicts only the mean; 0 also if the returns do not vary. Every
    rank must call this.
    """
    numbers = torch.stack([returns.double(), returns.double() - values.double()])  # (2, N)
    count = distributed.sum_float(len(returns))
    means = distributed.reduce_sum(numbers.sum(1)) / max(count, 1)
    return_squares, error_squares = distributed.reduce_sum((numbers - means[:, None]).square().sum(1))
    return float(torch.where(return_squares > 0, 1 - error_squares / return_squares, 0.0).float())


def summarise_scores(batch: PackedBatch, scores: Scorer) -> dict[str, float]:
    """Per-reward means and their correlation with the total score.

    If failures are tolerated, also the fraction of responses without a score. Every rank must call this.
    """
    keys = [key for key in batch.data if key.startswith(PREFIX)]
    if len(keys) < 2 and not scores.tolerates_failures:
        return {}
    gathered = gather_numbers(batch, **{key: batch.numbers(key) for key in ["scores", *keys]})
    several = keys if len(keys) > 1 else []
    metrics = {}
    for key in several:
        reward_scores = gathered[key]
        name = key.removeprefix(PREFIX)
        is_scored = ~(
            reward_scores.isnan() | gathered["scores"].isnan()
        )  # without tolerated and masked failures
        if bool(is_scored.any()):
            metrics[f"objective/score_{name}"] = float(reward_scores[is_scored].mean())
            agreement = correlation(reward_scores[is_scored], gathered["scores"][is_scored])
            metrics[f"objective/agreement_{name}"] = float(agreement)
    if scores.tolerates_failures:
        failed = torch.stack([gathered[key].isnan() for key in keys])
        metrics["objective/failed_fraction"] = float(failed.any(0).double().mean())
        for key, reward_failed in zip(several, failed, strict=False):
            name = f"objective/failed_fraction_{key.removeprefix(PREFIX)}"
            metrics[name] = float(reward_failed.double().mean())
    return metrics


def summarise_turns(batch: PackedBatch) -> dict[str, float]:
    """Mean number of turns with the environment, and the number of failed conversations; {} without one.

    Every rank must call this.
    """
    if NUM_TURNS not in batch.data:
        return {}
    failed = batch.numbers(PREFIX + KIND).isnan()
    turns = batch.numbers(NUM_TURNS)
    gathered = gather_numbers(batch, failed=failed, turns=turns.double())
    return {
        "rollout/turns": float(gathered["turns"].mean()),
        "rollout/environment_failures": float(gathered["failed"].sum()),
    }


def distinct_ngrams(sequences: Sequence[torch.Tensor], n: int) -> float:
    """Number of different n-grams divided by the number of n-grams, over all responses: 1 if none repeats, 0
    without n-grams.

    Li et al. 2016, arXiv:1510.03055. Every rank must call this.
    """
    windows = [ids.unfold(0, n, 1) for ids in sequences if len(ids) >= n]
    grams = torch.cat(windows) if windows else torch.zeros(0, n, dtype=torch.int64)
    codes = torch.zeros(len(grams), dtype=torch.int64)
    for column in grams.unbind(1):
        codes = codes * 1_000_003 + column  # 64-bit hash: collisions are negligible
    unique = codes.unique()
    num_ranks = distributed.world_size()
    owners = unique % num_ranks  # each rank counts its share
    parts = distributed.all_to_all([unique[owners == rank] for rank in range(num_ranks)])
    num_unique, num_grams = distributed.reduce_sum(
        torch.tensor([len(torch.cat(parts).unique()), len(grams)], dtype=torch.float64)
    ).tolist()
    return num_unique / num_grams if num_grams else 0.0


def response_rows(
    batch: PackedBatch, ids: Sequence[int], decode: Callable[[torch.Tensor], str]
) -> Iterator[dict[str, Any]]:
    """Yield the responses with these sample ids as rows of samples.jsonl and rollouts.jsonl.gz, with the
    fields that the batch has; on the first rank only. Every rank must iterate.

    `kl` is in nats per response (k1), `version` is the number of PPO steps of the sampling policy, and
    `advantage_sum` is the sum over its tokens.
    """
    scores = [key for key in batch.data if key == "scores" or key.startswith(PREFIX)]
    batch = exchange_rows(batch, [ids, *[()] * (distributed.world_size() - 1)])
    for index, row_id in enumerate(batch.texts(ROW_IDS)):
        data = batch.select([index]).data
        row: dict[str, Any] = {"row_id": row_id}
        row |= {"prompt": decode(data["prompt_ids"]), "answer": decode(data["response_ids"])}
        row |= {("score" if key == "scores" else key): round(float(data[key]), 6) for key in scores}
        row |= {"response_tokens": len(data["response_ids"]), "is_finished": bool(data["is_finished"])}
        row["version"] = int(data["versions"][0])
        if "ref_logprobs" in data:
            difference = (data["old_logprobs"] - data["ref_logprobs"])[data.get("sampled_mask", ...)]
            row["kl"] = round(float(difference.sum()), 6)
        if NUM_TURNS in data:
            row[NUM_TURNS] = int(data[NUM_TURNS])
        if "advantages" in data:
            row["advantage_sum"] = round(float(data["advantages"].sum()), 6)
        yield row
