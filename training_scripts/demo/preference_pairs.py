"""PURE: preference pairs whose label is a sentiment score and about which length tells nothing."""

import random
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

_MAX_CANDIDATES = 16  # waiting replies one reply is compared with; bounds the search, seldom reached


class PairIndexes(NamedTuple):
    """Indexes of the more and the less positive reply of a pair, and of the reply whose context is asked."""

    chosen: int
    rejected: int
    prompt: int


def pair_by_sentiment(
    scores: Sequence[float],
    lengths: Sequence[int],
    *,
    min_gap: float,
    length_tolerance: int,
    seed: int,
    max_pairs: int | None = None,
) -> list[PairIndexes]:
    """Pairs of replies of like length, the one with the higher score as chosen, in random order.

    Each reply is used once at most. The two lengths differ by `length_tolerance` at most, the scores by
    `min_gap` at least. The prompt is that of either reply, by a fair coin: whether a reply fits its prompt
    tells nothing about the label either. Same seed, same pairs.
    """
    if min_gap <= 0:
        raise ValueError(f"--min_gap {min_gap} must be above 0; replies with equal scores have no order")
    if length_tolerance < 0:
        raise ValueError(f"--length_tolerance {length_tolerance} must be 0 or more")
    rng = random.Random(seed)
    order = list(range(len(scores)))
    rng.shuffle(order)
    waiting: dict[int, deque[int]] = {}
    pairs = []
    for index in order:
        # Lengths within one class differ by length_tolerance at most.
        class_waiting = waiting.setdefault(lengths[index] // (length_tolerance + 1), deque())
        for position, other in enumerate(class_waiting):
            if abs(scores[index] - scores[other]) >= min_gap:
                del class_waiting[position]
                chosen, rejected = (index, other) if scores[index] > scores[other] else (other, index)
                pairs.append(PairIndexes(chosen, rejected, rng.choice((chosen, rejected))))
                break
        else:
            class_waiting.append(index)
            if len(class_waiting) > _MAX_CANDIDATES:
                class_waiting.popleft()
        if max_pairs is not None and len(pairs) == max_pairs:
            break
    rng.shuffle(pairs)
    return pairs


def length_rule_accuracy(
    chosen_lengths: Sequence[int], rejected_lengths: Sequence[int]
) -> tuple[float, float]:
    """Accuracies (longer wins, shorter wins) of guessing the chosen reply by its length; a tie counts half.

    Both are 0.5 where length tells nothing. Raises ValueError without pairs.
    """
    if not chosen_lengths:
        raise ValueError("no pairs: lower --min_gap or raise --num_train_pairs")
    outcomes = [
        0.5 if chosen == rejected else float(chosen > rejected)
        for chosen, rejected in zip(chosen_lengths, rejected_lengths, strict=True)
    ]
    longer_wins = sum(outcomes) / len(outcomes)
    return longer_wins, 1.0 - longer_wins
