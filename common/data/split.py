"""Shares of the rows: disjoint between the three steps, a part held out, the same in every process."""

import hashlib

import numpy as np

from common.data.raw_rows import canonical


def parse_data_split(text: str) -> tuple[float, float, float]:
    """The three shares of `--data_split`, as fractions that sum to 1.

    Raises:
        ValueError: not three numbers of at least 0, some above 0.
    """
    try:
        shares = [float(part) for part in str(text).split(",")]
    except ValueError:
        shares = []
    if len(shares) != 3 or not all(0 <= share < float("inf") for share in shares) or not sum(shares) > 0:
        raise ValueError(
            f"--data_split {text!r} must be three numbers of at least 0, the shares of steps 1, 2 and 3, "
            "such as 2,4,4"
        )
    first, second, third = (share / sum(shares) for share in shares)
    return first, second, third


def share_indexes(num_rows: int, data_split: str, stage: int, seed: int) -> list[int]:
    """Row indexes of step `stage` (1, 2 or 3), ascending: a slice of one permutation, decided by `seed`.

    RandomState's permutation is frozen by numpy, so the shares outlive its versions.
    """
    shares = parse_data_split(data_split)
    start, end = (round(num_rows * sum(shares[:upto])) for upto in (stage - 1, stage))
    permutation = np.random.RandomState(seed % 2**32).permutation(num_rows)
    return sorted(permutation[start:end].tolist())


def is_held_out(row: object, eval_fraction: float, seed: int) -> bool:
    """Whether a row is for evaluation, by a hash of its content: equal rows fall on the same side."""
    digest = hashlib.blake2b(canonical(row), digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(digest) < eval_fraction * 2**64
