"""What a step's experience says of the policy, by the names of the logs; and its responses, a row each.

# B responses, R tokens of the longest
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from common.data.packed_batch import ROW_IDS, PackedBatch
from common.models.tensor_ops import correlation, masked_mean, masked_sum
from step3_ppo.experience import Experience
from step3_ppo.ppo_math import explained_variance
from step3_ppo.rewards.score_sum import PREFIX


def summarise(experience: Experience) -> dict[str, float]:
    """Return the means of a step's experience; `objective/kl` is in nats a response (k1)."""
    mask = experience.response_mask
    kl_per_response = masked_sum(experience.old_logprobs - experience.ref_logprobs, mask, dim=1)
    lengths = experience.response_lengths.float()
    found = {
        "objective/score": float(experience.scores.mean()),
        "objective/score_std": float(experience.scores.std(correction=0)),
        "objective/kl": float(kl_per_response.mean()),
        "objective/reward": float(masked_sum(experience.rewards, mask, dim=1).mean()),
        "objective/score_length_correlation": float(correlation(experience.scores, lengths)),
        "rollout/response_tokens": float(lengths.mean()),
        "rollout/finished_fraction": float(experience.is_finished.float().mean()),
        "rollout/distinct_1": distinct_ngrams(experience.response_ids, mask, 1),
        "rollout/distinct_2": distinct_ngrams(experience.response_ids, mask, 2),
    }
    if experience.old_values is not None:
        found["value/explained_variance"] = float(
            explained_variance(experience.old_values, experience.returns, mask)
        )
    return found


def summarise_scores(record: PackedBatch) -> dict[str, float]:
    """Return the mean of each reward, and how far each goes along with what is maximised."""
    scores = record.numbers("scores")
    names = [key for key in record.data if key.startswith(PREFIX)]
    if len(names) < 2:
        return {}
    found = {}
    for key in names:
        one, name = record.numbers(key), key.removeprefix(PREFIX)
        is_scored = ~(one.isnan() | scores.isnan())  # failures that are borne, or masked
        if bool(is_scored.any()):
            found[f"objective/score_{name}"] = float(one[is_scored].mean())
            found[f"objective/agreement_{name}"] = float(correlation(one[is_scored], scores[is_scored]))
    return found


def summarise_failures(record: PackedBatch) -> dict[str, float]:
    """Return the share of responses that a reward gave no score, of several rewards that of each too."""
    failed = {k: record.numbers(k).isnan() for k in record.data if k.startswith(PREFIX)}
    found = {"objective/failed_fraction": float(torch.stack(list(failed.values())).any(0).double().mean())}
    if len(failed) > 1:
        names = {key: f"objective/failed_fraction_{key.removeprefix(PREFIX)}" for key in failed}
        found |= {names[key]: float(is_failed.double().mean()) for key, is_failed in failed.items()}
    return found


def response_rows(record: PackedBatch, decode: Callable[[torch.Tensor], str]) -> Iterator[dict[str, Any]]:
    """Yield each response as samples.jsonl and rollouts.jsonl.gz have it, as far as the record knows it.

    `kl` is in nats a response (k1), `version` counts the PPO steps of the policy that gave it, and
    `advantage_sum` is the sum of its tokens' advantages.
    """
    scores = [key for key in record.data if key == "scores" or key.startswith(PREFIX)]
    for index, row_id in enumerate(record.texts(ROW_IDS)):
        data = record.select([index]).data
        row: dict[str, Any] = {"row_id": row_id}
        row |= {"prompt": decode(data["prompt_ids"]), "answer": decode(data["response_ids"])}
        row |= {("score" if key == "scores" else key): round(float(data[key]), 6) for key in scores}
        row |= {"response_tokens": len(data["response_ids"]), "is_finished": bool(data["is_finished"])}
        row["version"] = int(data["versions"][0])
        if "ref_logprobs" in data:
            row["kl"] = round(float((data["old_logprobs"] - data["ref_logprobs"]).sum()), 6)
        if "advantages" in data:
            row["advantage_sum"] = round(float(data["advantages"].sum()), 6)
        yield row


def summarise_gap(experience: Experience) -> dict[str, float]:
    """Return how far the sampler's log-probabilities are from recomputed ones, mean and largest."""
    gap = (experience.rollout_logprobs - experience.old_logprobs).abs()
    mask = experience.response_mask
    return {
        "policy/logprob_gap": float(masked_mean(gap, mask)),
        "policy/logprob_gap_max": float(torch.where(mask, gap, 0.0).max()),
    }


def distinct_ngrams(ids: torch.Tensor, mask: torch.Tensor, n: int) -> float:
    """Return different n-grams by all n-grams of the responses: 1 when none comes twice, 0 without any.

    ids, mask (B, R). Li et al. 2016, arXiv:1510.03055.
    """
    if ids.shape[1] < n:
        return 0.0
    windows, is_whole = ids.unfold(1, n, 1), mask.unfold(1, n, 1).all(-1)  # (B, R - n + 1, n)
    grams = windows[is_whole]
    return len(grams.unique(dim=0)) / len(grams) if len(grams) else 0.0
