"""What the demo measures and is to reach, and the table of what it reached. PURE."""

from collections.abc import Callable, Mapping

# Key of summary.json: what it is, decimals shown.
NUMBERS = {
    "unigram_perplexity": ("perplexity of held-out replies, unigram model", 1),
    "sft_perplexity": ("perplexity of held-out replies, SFT model", 1),
    "reward_accuracy": ("reward model, accuracy on held-out pairs", 3),
    "score_before": ("reward model's score of held-out prompts, SFT model", 3),
    "score_halfway": ("reward model's score of held-out prompts, half-way", 3),
    "score_after": ("reward model's score of held-out prompts, PPO model", 3),
    "win_rate": ("PPO's replies scored above SFT's, held-out prompts", 3),
    "vader_sft": ("mean VADER score of sampled replies, SFT model", 3),
    "vader_ppo": ("mean VADER score of sampled replies, PPO model", 3),
    "kl": ("KL to the SFT model, nats a reply", 2),
    "distinct2_sft": ("distinct-2 (different word pairs), SFT model", 3),
    "distinct2_ppo": ("distinct-2 (different word pairs), PPO model", 3),
    "words_sft": ("words a reply, SFT model", 2),
    "words_ppo": ("words a reply, PPO model", 2),
    "seconds": ("seconds, all of it", 0),
    "peak_gib": ("peak memory, GiB", 2),
}
Summary = Mapping[str, float]
AIMS: dict[str, tuple[str, Callable[[Summary], bool]]] = {
    "sft_perplexity": (
        "at most half the unigram model's",
        lambda s: s["sft_perplexity"] <= 0.5 * s["unigram_perplexity"],
    ),
    "reward_accuracy": ("at least 0.85", lambda s: s["reward_accuracy"] >= 0.85),
    "win_rate": ("at least 0.6", lambda s: s["win_rate"] >= 0.6),
    "vader_ppo": ("at least 0.25 above the SFT model's", lambda s: s["vader_ppo"] >= s["vader_sft"] + 0.25),
    "kl": ("under 10", lambda s: s["kl"] < 10),
    "distinct2_ppo": (
        "at least half the SFT model's",
        lambda s: s["distinct2_ppo"] >= 0.5 * s["distinct2_sft"],
    ),
    "words_ppo": ("at least 0.6 of the SFT model's", lambda s: s["words_ppo"] >= 0.6 * s["words_sft"]),
    "seconds": ("at most 480", lambda s: s["seconds"] <= 480),
    "peak_gib": ("at most 4", lambda s: s["peak_gib"] <= 4),
}


def missed_aims(summary: Summary) -> list[str]:
    """The keys of the numbers that miss their aim; NaN misses every aim."""
    return [key for key, (_, is_met) in AIMS.items() if not is_met(summary)]


def format_summary(summary: Summary) -> list[str]:
    """The table, a line a number, its aim beside it with met or missed."""
    missed = missed_aims(summary)
    width = max(len(label) for label, _ in NUMBERS.values())
    rows = []
    for key, (label, decimals) in NUMBERS.items():
        row = f"{label:<{width}}  {summary[key]:>8.{decimals}f}"
        if key in AIMS:
            row += f"  {'missed' if key in missed else 'met':<6}  aim: {AIMS[key][0]}"
        rows.append(row)
    return rows
