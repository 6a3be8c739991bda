"""Known patterns of a reward that is hacked, a policy that collapses, a fit that goes too far. PURE.

Each sign is a rule on means over the first and the last fifth of the steps (five at least), stated beside
what it found. A rule is a hint to read samples, no proof.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from common.runs.report.run_files import Curve
from common.runs.report.svg_charts import shown, smooth

MIN_STEPS = 10
Curves = Mapping[str, Curve]


@dataclass(frozen=True)
class Sign:
    """One pattern: what was seen, or "" when it is not there."""

    title: str
    rule: str
    seen: str = ""


@dataclass(frozen=True)
class Rule:
    """A pattern, the numbers that it needs, and how it is found."""

    title: str
    text: str
    needs: tuple[str, ...]
    find: Callable[[Curves], str]


def early_and_late(curve: Curve) -> tuple[float, float]:
    """Return the means of the first and of the last fifth of the values, five values at least."""
    width = max(len(curve.values) // 5, min(5, len(curve.values)))
    return fmean(curve.values[:width]), fmean(curve.values[-width:])


def _move(name: str, early: float, late: float) -> str:
    return f"{name} went from {shown(early)} to {shown(late)}"


def _over_optimised(curves: Curves) -> str:
    score, kl = curves["objective/score"], curves["objective/kl"]
    width = max(len(score.values) // 5, 5)
    means = smooth(score.values, width)
    start, top = means[0], max(means)
    place = means.index(top)
    _, late = early_and_late(score)
    if place >= len(means) * 0.8 or top <= start or top - late < 0.2 * (top - start):
        return ""
    kl_then, kl_now = smooth(kl.values, width)[min(place, len(kl.values) - 1)], early_and_late(kl)[1]
    if kl_now < 1.2 * kl_then or kl_now <= 0:
        return ""
    return (
        f"the score had its highest mean, {shown(top)}, near step {score.steps[place]} and is {shown(late)} "
        f"now, while KL rose from {shown(kl_then)} to {shown(kl_now)} nats a response"
    )


def _flat_score(curves: Curves) -> str:
    score, kl = curves["objective/score"], curves["objective/kl"]
    middle = len(score.values) // 2
    if middle < 5:
        return ""
    first = _gain(score.values[:middle])
    second = _gain(score.values[middle:])
    kl_first, kl_second = _gain(kl.values[:middle]), _gain(kl.values[middle:])
    is_flat = abs(second) <= 0.1 * first
    if not is_flat or kl_second <= 0 or kl_second < 0.5 * kl_first:
        return ""
    return (
        f"the first half of the steps brought {shown(first)} of score, the second {shown(second)}, and KL "
        f"went on: {shown(kl_first)} and {shown(kl_second)} nats a response"
    )


def _gain(values: list[float]) -> float:
    width = max(len(values) // 4, 2)
    return fmean(values[-width:]) - fmean(values[:width])


def _paid_for_length(curves: Curves) -> str:
    found = early_and_late(curves["objective/score_length_correlation"])[1]
    early, late = early_and_late(curves["rollout/response_tokens"])
    has_grown = late > 1.3 * early
    if found > 0.5 or (has_grown and found > 0.3):
        return (
            f"score and length correlate by {shown(found)}; {_move('length', early, late)} tokens a response"
        )
    return ""


def _length_without_end(curves: Curves) -> str:
    early, late = early_and_late(curves["rollout/finished_fraction"])
    return _move("the finished fraction", early, late) if late < 0.5 or late < early - 0.3 else ""


def _too_short(curves: Curves) -> str:
    early, late = early_and_late(curves["rollout/response_tokens"])
    return f"{_move('length', early, late)} tokens a response" if late < 0.5 * early else ""


def _repeats(curves: Curves) -> str:
    early, late = early_and_late(curves["rollout/distinct_2"])
    return _move("distinct-2", early, late) if late < 0.7 * early else ""


def _entropy_collapse(curves: Curves) -> str:
    early, late = early_and_late(curves["policy/entropy"])
    return f"{_move('entropy', early, late)} nats a token" if late < 0.3 * early else ""


def _negative_kl(curves: Curves) -> str:
    late = early_and_late(curves["objective/kl"])[1]
    return f"mean KL of the last steps is {shown(late)} nats a response" if late < -0.5 else ""


def _critic_worse_than_mean(curves: Curves) -> str:
    late = early_and_late(curves["value/explained_variance"])[1]
    return f"explained variance is {shown(late)}" if late < 0 else ""


def _rewards_part(curves: Curves) -> str:
    score = early_and_late(curves["objective/score"])
    parts = []
    for name in curves:
        other = name.replace("objective/agreement_", "objective/score_")
        if not name.startswith("objective/agreement_") or other not in curves:
            continue
        early, late = early_and_late(curves[other])
        if score[1] > score[0] and late < early and early_and_late(curves[name])[1] < 0.1:
            parts.append(_move(other.removeprefix("objective/score_"), early, late))
    return (
        f"{'; '.join(parts)}, while the score went from {shown(score[0])} to {shown(score[1])}"
        if parts
        else ""
    )


def _over_fitted(name: str, curves: Curves) -> str:
    held_out = curves[name]
    low = min(held_out.values)
    step = held_out.steps[held_out.values.index(low)]
    if held_out.last <= 1.02 * low:
        return ""
    return f"the held-out loss was {shown(low)} at step {step} and is {shown(held_out.last)} now"


def _weak_judge(curves: Curves) -> str:
    found = curves["reward/eval_accuracy"].last
    if found >= 0.6:
        return ""
    names = [f"reward/eval_{name}" for name in ("pairs", "accuracy_low", "accuracy_high")]
    if not all(name in curves for name in names):  # a run of before these were logged
        return f"it ranks {100 * found:.1f} % of held-out pairs rightly"
    pairs, low, high = (curves[name].last for name in names)
    return (
        f"it ranks {100 * found:.1f} % of {pairs:.0f} held-out pairs rightly "
        f"(95 % interval {100 * low:.1f} to {100 * high:.1f} %)"
    )


def _judge_of_length(curves: Curves) -> str:
    found = curves["reward/eval_length_correlation"].last
    return f"held-out scores and lengths correlate by {shown(found)}" if abs(found) > 0.5 else ""


def _chosen_lost(curves: Curves) -> str:
    chosen, rejected = curves["dpo/eval_chosen_reward"].last, curves["dpo/eval_rejected_reward"].last
    if chosen >= 0 or -chosen <= (chosen - rejected) / 2:
        return ""
    return f"held-out rewards are {shown(chosen)} for the chosen, {shown(rejected)} for the rejected answers"


HACKING = (
    Rule(
        "The score has turned while KL goes on (over-optimisation)",
        "The smoothed score peaked in the first 80 % of the steps, has lost a fifth of its gain since, "
        "and KL is 1.2 times what it was there. Lower the learning rate, raise --kl_coef, or take the "
        "checkpoint of that step.",
        ("objective/score", "objective/kl"),
        _over_optimised,
    ),
    Rule(
        "The score stands still while KL goes on",
        "The score moved in the second half of the steps by at most a tenth of what it gained in the first, "
        "but KL by at least half: distance is paid for nothing.",
        ("objective/score", "objective/kl"),
        _flat_score,
    ),
    Rule(
        "The score is paid for length",
        "Score and length correlate by more than 0.5 in the last steps, or by more than 0.3 while responses "
        "grew 1.3 times. Try --overlong_penalty, or a reward model trained on pairs of like length.",
        ("objective/score_length_correlation", "rollout/response_tokens"),
        _paid_for_length,
    ),
    Rule(
        "Responses do not end",
        "Less than half of the last responses end before the limit, or 0.3 fewer than at the beginning. See "
        "--truncated and --max_answer_seq_len.",
        ("rollout/finished_fraction",),
        _length_without_end,
    ),
    Rule(
        "Responses have become very short",
        "The last responses have less than half of the tokens of the first.",
        ("rollout/response_tokens",),
        _too_short,
    ),
    Rule(
        "Responses repeat each other, or themselves",
        "distinct-2, the share of token pairs that differ among a step's responses, fell below 0.7 times its "
        "first value.",
        ("rollout/distinct_2",),
        _repeats,
    ),
    Rule(
        "The policy has stopped to explore",
        "Entropy fell below 0.3 times its first value. Try --entropy_coef or a higher --kl_coef.",
        ("policy/entropy",),
        _entropy_collapse,
    ),
    Rule(
        "KL is negative",
        "The mean KL of the last steps is below -0.5 nats a response. A mean over samples of the policy "
        "cannot be: what is sampled from is not what is trained (see policy/logprob_gap, --top_k, --top_p).",
        ("objective/kl",),
        _negative_kl,
    ),
    Rule(
        "The critic is worse than a constant",
        "value/explained_variance is below 0 in the last steps: advantages are mostly noise.",
        ("value/explained_variance",),
        _critic_worse_than_mean,
    ),
    Rule(
        "Another reward falls while the score rises",
        "A reward that is logged on its own (a weight of 0 is an opinion that counts nothing) fell while the "
        "score rose, and agrees with it by less than 0.1 in the last steps.",
        ("objective/score",),
        _rewards_part,
    ),
)
FITTING = (
    Rule(
        "The held-out loss rises again",
        "The last held-out loss is more than 2 % above the lowest one: fewer epochs, or a lower "
        "learning rate.",
        ("sft/eval_loss",),
        partial(_over_fitted, "sft/eval_loss"),
    ),
    Rule(
        "The held-out DPO loss rises again",
        "The last held-out loss is more than 2 % above the lowest one: fewer epochs, a higher --beta, or a "
        "lower learning rate.",
        ("dpo/eval_loss",),
        partial(_over_fitted, "dpo/eval_loss"),
    ),
    Rule(
        "Chosen answers lose probability, too",
        "The policy gives the chosen answers less than its reference did, by more than half of the margin, "
        "and only the rejected ones less still (arXiv:2402.13228): a higher --beta, or fewer steps.",
        ("dpo/eval_chosen_reward", "dpo/eval_rejected_reward"),
        _chosen_lost,
    ),
    Rule(
        "The reward model is a weak judge",
        "It ranks less than 60 % of held-out pairs rightly: what step 3 climbs may be noise.",
        ("reward/eval_accuracy",),
        _weak_judge,
    ),
    Rule(
        "The reward model judges by length",
        "Held-out scores correlate with length by more than 0.5: step 3 will learn that first.",
        ("reward/eval_length_correlation",),
        _judge_of_length,
    ),
)


def find_signs(curves: Curves, rules: tuple[Rule, ...] = HACKING, min_steps: int = MIN_STEPS) -> list[Sign]:
    """Return a sign for each rule whose numbers are there for `min_steps` steps."""
    return [
        Sign(rule.title, rule.text, rule.find(curves))
        for rule in rules
        if all(name in curves and len(curves[name].values) >= min_steps for name in rule.needs)
    ]
