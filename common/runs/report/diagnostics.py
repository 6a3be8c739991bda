"""Known patterns of a hacked reward, a collapsed policy, an overfitted model.

Each diagnostic is a rule on means over the first and the last fifth of the steps (five at least), stated
beside what it saw. It is a reason to read samples, no proof.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from common.runs.report.charts import shown, smooth
from common.runs.run_files import Curve, RunFiles

MIN_STEPS = 10
Curves = Mapping[str, Curve]


@dataclass(frozen=True)
class Diagnostic:
    """A pattern, its rule in words, the metrics it needs, and `find`: what it sees in them, or ""."""

    title: str
    rule: str
    needs: tuple[str, ...]
    find: Callable[[Curves], str]


@dataclass(frozen=True)
class Finding:
    """What a diagnostic saw in a run, "" for nothing."""

    title: str
    rule: str
    seen: str


def early_and_late(curve: Curve) -> tuple[float, float]:
    """Return the means of the first and of the last fifth of the values, five values at least."""
    width = max(len(curve.values) // 5, min(5, len(curve.values)))
    return fmean(curve.values[:width]), fmean(curve.values[-width:])


def _move(name: str, early: float, late: float) -> str:
    return f"{name} went from {shown(early)} to {shown(late)}"


def _moved(metric: str, name: str, is_bad: Callable[[float, float], bool]) -> Callable[[Curves], str]:
    """Return a `find` that says how a metric moved where `is_bad(early, late)`."""

    def find(curves: Curves) -> str:
        early, late = early_and_late(curves[metric])
        return _move(name, early, late) if is_bad(early, late) else ""

    return find


def _over_optimised(curves: Curves) -> str:
    score, kl = curves["objective/score"], curves["objective/kl"]
    width = max(len(score.values) // 5, 5)
    means = smooth(score.values, width)
    start, top = means[0], max(means)
    peak = means.index(top)
    late = early_and_late(score)[1]
    if peak >= len(means) * 0.8 or top <= start or top - late < 0.2 * (top - start):
        return ""
    kl_then, kl_now = smooth(kl.values, width)[min(peak, len(kl.values) - 1)], early_and_late(kl)[1]
    if kl_now < 1.2 * kl_then or kl_now <= 0:
        return ""
    return (
        f"the score had its highest mean, {shown(top)}, near step {score.steps[peak]} and is {shown(late)} "
        f"now, while KL rose from {shown(kl_then)} to {shown(kl_now)} nats a response"
    )


def _flat_score(curves: Curves) -> str:
    halves = []
    for name in ("objective/score", "objective/kl"):
        values = curves[name].values
        middle = len(values) // 2
        halves.append((_gain(values[:middle]), _gain(values[middle:])))
    (first, second), (kl_first, kl_second) = halves
    if abs(second) > 0.1 * first or kl_second <= 0 or kl_second < 0.5 * kl_first:
        return ""
    return (
        f"the first half of the steps brought {shown(first)} of score, the second {shown(second)}, and KL "
        f"rose by {shown(kl_first)} and {shown(kl_second)} nats a response"
    )


def _gain(values: list[float]) -> float:
    width = max(len(values) // 4, 2)
    return fmean(values[-width:]) - fmean(values[:width])


def _paid_for_length(curves: Curves) -> str:
    found = early_and_late(curves["objective/score_length_correlation"])[1]
    early, late = early_and_late(curves["rollout/response_tokens"])
    if found <= 0.3 or (found <= 0.5 and late <= 1.3 * early):
        return ""
    return f"score and length correlate by {shown(found)}; {_move('length', early, late)} tokens a response"


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
    return f"{'; '.join(parts)}, while {_move('the score', *score)}" if parts else ""


def _over_fitted(held_out: Curve) -> str:
    low = min(held_out.values)
    if held_out.last <= 1.02 * low:
        return ""
    step = held_out.steps[held_out.values.index(low)]
    return f"the held-out loss was {shown(low)} at step {step} and is {shown(held_out.last)} now"


def _chosen_lost(curves: Curves) -> str:
    chosen, rejected = curves["dpo/eval_chosen_reward"].last, curves["dpo/eval_rejected_reward"].last
    if chosen >= 0 or -chosen <= (chosen - rejected) / 2:
        return ""
    return f"held-out rewards are {shown(chosen)} for the chosen, {shown(rejected)} for the rejected answers"


def _weak_judge(curves: Curves) -> str:
    found = curves["reward/eval_accuracy"].last
    if found >= 0.6:
        return ""
    names = [f"reward/eval_{name}" for name in ("pairs", "accuracy_low", "accuracy_high")]
    if not all(name in curves for name in names):  # an older run
        return f"it ranks {100 * found:.1f} % of held-out pairs rightly"
    pairs, low, high = (curves[name].last for name in names)
    interval = f"95 % interval {100 * low:.1f} to {100 * high:.1f} %"
    return f"it ranks {100 * found:.1f} % of {pairs:.0f} held-out pairs rightly ({interval})"


def _judge_of_length(curves: Curves) -> str:
    found = curves["reward/eval_length_correlation"].last
    return f"held-out scores and lengths correlate by {shown(found)}" if abs(found) > 0.5 else ""


HACKING = (  # for runs of PPO
    Diagnostic(
        "The score falls while KL rises (over-optimisation)",
        "The smoothed score peaked in the first 80 % of the steps, has lost a fifth of its gain since, and "
        "KL is 1.2 times what it was there. Lower the learning rate, raise --kl_coef, or take the checkpoint "
        "of that step.",
        ("objective/score", "objective/kl"),
        _over_optimised,
    ),
    Diagnostic(
        "The score stands still while KL rises",
        "The score moved in the second half of the steps by at most a tenth of what it gained in the first, "
        "but KL by at least half: distance is paid for nothing.",
        ("objective/score", "objective/kl"),
        _flat_score,
    ),
    Diagnostic(
        "The score is paid for length",
        "Score and length correlate by more than 0.5 in the last steps, or by more than 0.3 while responses "
        "grew 1.3 times. Try --overlong_penalty, or a reward model trained on pairs of like length.",
        ("objective/score_length_correlation", "rollout/response_tokens"),
        _paid_for_length,
    ),
    Diagnostic(
        "Responses do not end",
        "Less than half of the last responses end before the limit, or 0.3 fewer than at the beginning. See "
        "--truncated and --max_answer_seq_len.",
        ("rollout/finished_fraction",),
        _moved(
            "rollout/finished_fraction",
            "the finished fraction",
            lambda early, late: late < 0.5 or late < early - 0.3,
        ),
    ),
    Diagnostic(
        "Responses have become very short",
        "The last responses have less than half of the tokens of the first.",
        ("rollout/response_tokens",),
        _moved("rollout/response_tokens", "tokens a response", lambda early, late: late < 0.5 * early),
    ),
    Diagnostic(
        "Responses repeat each other, or themselves",
        "distinct-2, the share of token pairs that differ among a step's responses, fell below 0.7 times its "
        "first value.",
        ("rollout/distinct_2",),
        _moved("rollout/distinct_2", "distinct-2", lambda early, late: late < 0.7 * early),
    ),
    Diagnostic(
        "The policy has stopped exploring",
        "Entropy fell below 0.3 times its first value. Try --entropy_coef or a higher --kl_coef.",
        ("policy/entropy",),
        _moved("policy/entropy", "nats of entropy a token", lambda early, late: late < 0.3 * early),
    ),
    Diagnostic(
        "KL is negative",
        "The mean KL of the last steps is below -0.5 nats a response. A mean over samples of the policy "
        "cannot be: the policy that samples is not the one that is trained (see policy/logprob_gap, --top_k, "
        "--top_p).",
        ("objective/kl",),
        _moved("objective/kl", "KL in nats a response", lambda early, late: late < -0.5),
    ),
    Diagnostic(
        "The critic is worse than a constant",
        "value/explained_variance is below 0 in the last steps: advantages are mostly noise.",
        ("value/explained_variance",),
        _moved("value/explained_variance", "explained variance", lambda early, late: late < 0),
    ),
    Diagnostic(
        "Another reward falls while the score rises",
        "A reward that is logged on its own (of weight 0, too) fell while the score rose, and agrees with it "
        "by less than 0.1 in the last steps.",
        ("objective/score",),
        _rewards_part,
    ),
)
FITTING = (  # for all runs, on held-out metrics
    Diagnostic(
        "The held-out loss rises again",
        "The last held-out loss is more than 2 % above the lowest one: fewer epochs, or a lower "
        "learning rate.",
        ("sft/eval_loss",),
        lambda curves: _over_fitted(curves["sft/eval_loss"]),
    ),
    Diagnostic(
        "The held-out DPO loss rises again",
        "The last held-out loss is more than 2 % above the lowest one: fewer epochs, a higher --beta, or a "
        "lower learning rate.",
        ("dpo/eval_loss",),
        lambda curves: _over_fitted(curves["dpo/eval_loss"]),
    ),
    Diagnostic(
        "Chosen answers lose probability, too",
        "The policy gives the chosen answers less than its reference did, by more than half of the margin, "
        "and only the rejected ones less still (arXiv:2402.13228): a higher --beta, or fewer steps.",
        ("dpo/eval_chosen_reward", "dpo/eval_rejected_reward"),
        _chosen_lost,
    ),
    Diagnostic(
        "The reward model is a weak judge",
        "It ranks less than 60 % of held-out pairs rightly: what step 3 climbs may be noise.",
        ("reward/eval_accuracy",),
        _weak_judge,
    ),
    Diagnostic(
        "The reward model judges by length",
        "Held-out scores correlate with length by more than 0.5: step 3 will learn that first.",
        ("reward/eval_length_correlation",),
        _judge_of_length,
    ),
)


def find_diagnostics(
    curves: Curves, diagnostics: Sequence[Diagnostic] = HACKING, min_steps: int = MIN_STEPS
) -> list[Finding]:
    """Return a finding for each diagnostic whose metrics have `min_steps` steps."""
    return [
        Finding(one.title, one.rule, one.find(curves))
        for one in diagnostics
        if all(name in curves and len(curves[name].values) >= min_steps for name in one.needs)
    ]


def seen_diagnostics(run: RunFiles) -> list[Finding]:
    """Return the patterns that a run shows."""
    found = find_diagnostics(run.curves) if run.kind == "ppo" else []
    found += find_diagnostics(run.curves, FITTING, min_steps=1)
    return [finding for finding in found if finding.seen]
