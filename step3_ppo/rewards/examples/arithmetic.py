"""`--reward function:step3_ppo.rewards.examples.arithmetic:right_answer`: a rule whose answer can be checked.

The right answer is the row's field `answer`: the first number behind "####" where it has that, as in GSM8K.
"""

import re
from fractions import Fraction

_NUMBER = re.compile(r"-?\d+(?:,\d{3}(?!\d))*(?:\.\d+)?")


def right_answer(prompts: list[str], responses: list[str], rows: list[dict]) -> list[float]:
    """Return 1 where the first number of a response is the right answer, else 0.

    Raises:
        ValueError: a row has no number as `answer`.
    """
    scores = []
    for response, row in zip(responses, rows, strict=True):
        answer = first_number(str(row.get("answer")).rpartition("####")[2])
        if answer is None:
            raise ValueError(f"a row's answer, {row.get('answer')!r}, holds no number; correct the data")
        scores.append(float(first_number(response) == answer))
    return scores


def first_number(text: str) -> Fraction | None:
    """Return the first number of a text, such as 1,234 or -3.5; None where there is none."""
    found = _NUMBER.search(text)
    return Fraction(found[0].replace(",", "")) if found else None
