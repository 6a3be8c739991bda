"""PURE: what the demo is to reach, and the table of what it reached."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

SUMMARY_KEYS = (
    "seconds",
    "peak_gib",
    "unigram_perplexity",
    "sft_perplexity",
    "reward_accuracy",
    "score_before",
    "score_halfway",
    "score_after",
    "win_rate",
    "vader_sft",
    "vader_ppo",
    "kl",
    "distinct2_sft",
    "distinct2_ppo",
    "words_sft",
    "words_ppo",
)


class Aim(NamedTuple):
    """What a number is to reach; `is_met` takes the whole summary."""

    text: str
    is_met: Callable[[Mapping[str, float]], bool]


class Line(NamedTuple):
    """One line of the table."""

    key: str
    label: str
    decimals: int
    aim: Aim | None = None


_LINES = (
    Line("unigram_perplexity", "perplexity of held-out replies, unigram model", 1),
    Line(
        "sft_perplexity",
        "perplexity of held-out replies, SFT model",
        1,
        Aim(
            "at most half the unigram model's", lambda s: s["sft_perplexity"] <= 0.5 * s["unigram_perplexity"]
        ),
    ),
    Line(
        "reward_accuracy",
        "reward model, accuracy on held-out pairs",
        3,
        Aim("at least 0.85", lambda s: s["reward_accuracy"] >= 0.85),
    ),
    Line("score_before", "reward model's score of held-out prompts, SFT model", 3),
    Line("score_halfway", "reward model's score of held-out prompts, half-way", 3),
    Line("score_after", "reward model's score of held-out prompts, PPO model", 3),
    Line(
        "win_rate",
        "PPO's replies scored above SFT's, held-out prompts",
        3,
        Aim("at least 0.6", lambda s: s["win_rate"] >= 0.6),
    ),
    Line("vader_sft", "mean VADER score of sampled replies, SFT model", 3),
    Line(
        "vader_ppo",
        "mean VADER score of sampled replies, PPO model",
        3,
        Aim("at least 0.25 above the SFT model's", lambda s: s["vader_ppo"] >= s["vader_sft"] + 0.25),
    ),
    Line("kl", "KL to the SFT model, nats a reply", 2, Aim("under 10", lambda s: s["kl"] < 10)),
    Line("distinct2_sft", "distinct-2 (different word pairs), SFT model", 3),
    Line(
        "distinct2_ppo",
        "distinct-2 (different word pairs), PPO model",
        3,
        Aim("at least half the SFT model's", lambda s: s["distinct2_ppo"] >= 0.5 * s["distinct2_sft"]),
    ),
    Line("words_sft", "words a reply, SFT model", 2),
    Line(
        "words_ppo",
        "words a reply, PPO model",
        2,
        Aim("at least 0.6 of the SFT model's", lambda s: s["words_ppo"] >= 0.6 * s["words_sft"]),
    ),
    Line("seconds", "seconds, all of it", 0, Aim("at most 480", lambda s: s["seconds"] <= 480)),
    Line("peak_gib", "peak memory, GiB", 2, Aim("at most 4", lambda s: s["peak_gib"] <= 4)),
)


def missed_aims(summary: Mapping[str, float]) -> list[str]:
    """The keys of the numbers that miss their aim; NaN misses every aim."""
    return [line.key for line in _LINES if line.aim is not None and not line.aim.is_met(summary)]


def format_summary(summary: Mapping[str, float]) -> list[str]:
    """The table, a line a number, its aim beside it with met or missed.

    Raises ValueError when the summary's keys are not exactly SUMMARY_KEYS.
    """
    if sorted(summary) != sorted(SUMMARY_KEYS):
        raise ValueError(f"the summary's keys are {sorted(summary)}, not {sorted(SUMMARY_KEYS)}")
    missed = missed_aims(summary)
    width = max(len(line.label) for line in _LINES)
    rows = []
    for line in _LINES:
        row = f"{line.label:<{width}}  {summary[line.key]:>8.{line.decimals}f}"
        if line.aim is not None:
            row += f"  {'missed' if line.key in missed else 'met':<6}  aim: {line.aim.text}"
        rows.append(row)
    return rows
