"""Best of n: the policy that samples n responses and keeps the one that the reward model scores highest.

It is estimated for all n from the N responses to each prompt of one run with `--save_rollouts 1`. Its KL to
the sampled policy is at most log n - (n - 1)/n nats per response (arXiv:2401.01879), the figure used here.

# N responses to a prompt
"""

import gzip
import json
import math
import operator
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.runs.run_files import ROLLOUTS

Values = dict[str, float]  # of a response, by name


def compute_kl(n: int) -> float:
    """Upper bound of the KL of the best of n to the sampled policy, in nats per response."""
    return math.log(n) - (n - 1) / n


def expect_best(responses: Sequence[Values], score: str, n: int) -> Values:
    """Mean of every value over the best responses, by `score`, of all subsets of n of the N responses."""
    ranked = sorted(responses, key=lambda response: response[score])
    subsets = math.comb(len(ranked), n)
    # Subsets whose best is the i-th lowest take their other n - 1 from the i below it.
    weights = [math.comb(i, n - 1) / subsets for i in range(len(ranked))]
    values = {name: [response[name] for response in ranked] for name in ranked[0]}
    return {name: math.fsum(map(operator.mul, weights, numbers)) for name, numbers in values.items()}


def measure_best(run: Path, columns: Mapping[str, str], score: str) -> dict[str, Any]:
    """Curves over n = 1, 2, 4, ..., N: "steps" (n), "kl", and the mean over prompts of each of `columns`,
    {name: column of the rollouts}; the best is chosen by the name `score`.
    """
    prompts: dict[str, list[Values]] = defaultdict(list)
    with gzip.open(run / ROLLOUTS, "rt", encoding="utf-8") as file:
        for row in map(json.loads, file):
            prompts[row["prompt"]].append({name: float(row[column]) for name, column in columns.items()})
    fewest = min(map(len, prompts.values()))
    sizes = [2**i for i in range(fewest.bit_length())]
    curves: dict[str, Any] = {"steps": sizes, "kl": [compute_kl(n) for n in sizes], "prompts": len(prompts)}
    bests = [[expect_best(responses, score, n) for responses in prompts.values()] for n in sizes]
    for name in columns:
        curves[name] = [statistics.fmean(best[name] for best in of_size) for of_size in bests]
    return curves


def compare_at_equal_kl(
    run: dict[str, Any], best: dict[str, Any], names: Sequence[str]
) -> list[dict[str, Any]]:
    """Values of each evaluation of a run but the first, beside those of the best of n at its KL; `is_beyond`
    if no n has that KL, when the values are those of the largest n.
    """
    rows = []
    for place, kl in list(enumerate(run["kl"]))[1:]:
        row = {"name": run["name"], "seed": run["seed"], "step": run["steps"][place], "kl": kl}
        row["is_beyond"] = kl > best["kl"][-1]
        for name in names:
            row |= {name: run[name][place], f"best_of_n_{name}": float(np.interp(kl, best["kl"], best[name]))}
        rows.append(row)
    return rows
