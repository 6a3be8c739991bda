"""Parsing of `--distill_loss`: the actor's loss against the teacher.

[WEIGHT*]reverse_kl  [WEIGHT*]forward_kl  [WEIGHT*]jsd:BETA  [WEIGHT*]sampled
"""

import difflib
from dataclasses import dataclass

from common.models.divergence import FORWARD_KL, REVERSE_KL
from step3_ppo.rewards.text_rewards import read_number

FORMS = {"reverse_kl": REVERSE_KL, "forward_kl": FORWARD_KL, "jsd:BETA": None, "sampled": None}


@dataclass(frozen=True)
class DistillLoss:
    """Divergence from the teacher in the actor's loss, and its weight."""

    weight: float
    beta: float | None  # of `common.models.divergence`, over the vocabulary; None: of the sampled token


def parse_distill_loss(text: str) -> DistillLoss:
    """Parse --distill_loss; the weight is 1 by default, and jsd:0 and jsd:1 are the two KLs.

    Raises ValueError for another form (the nearest is named), a weight that is not above 0, a BETA outside
    0 to 1.
    """
    weight_text, star, form = text.strip().rpartition("*")
    weight = read_number(weight_text) if star else 1.0
    if weight is None or weight <= 0:
        raise ValueError(
            f"--distill_loss {text}: the weight {weight_text!r} is not a number above 0; write it as in "
            "0.5*reverse_kl, or leave it out for 1"
        )
    kind, colon, beta_text = (part.strip() for part in form.partition(":"))
    if kind == "jsd":
        beta = read_number(beta_text)
        if beta is None or not FORWARD_KL <= beta <= REVERSE_KL:
            raise ValueError(
                f"--distill_loss {text}: BETA {beta_text!r} is not a number from 0 (forward_kl) to 1 "
                "(reverse_kl); write it as in jsd:0.5"
            )
        return DistillLoss(weight, beta)
    if colon or kind not in FORMS:
        near = difflib.get_close_matches(kind, FORMS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(FORMS)}"
        raise ValueError(f"--distill_loss {text}: {form!r} is not a divergence; {hint}")
    return DistillLoss(weight, FORMS[kind])
