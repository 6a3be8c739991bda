"""`--reward function:step3_ppo.rewards.examples.arithmetic:right_answer`: a rule with a verifiable answer.

The right answer is the row's field `answer`. The first number of a text counts; if the text has "####", as
the solutions of GSM8K have, the first number after the last "####".
"""

import re
from fractions import Fraction

_NUMBER = re.compile(r"-?\d+(?:,\d{3}(?!\d))*(?:\.\d+)?")


def right_answer(prompts: list[str], responses: list[str], rows: list[dict]) -> list[float]:
    """1 if the number in a response is the right answer, else 0.

    Raises ValueError if a row has no number as `answer`.
    """
    scores = []
    for response, row in zip(responses, rows, strict=True):
        answer = stated_number(str(row.get("answer")))
        if answer is None:
            raise ValueError(f"a row's answer, {row.get('answer')!r}, holds no number; correct the data")
        scores.append(float(stated_number(response) == answer))
    return scores


def stated_number(text: str) -> Fraction | None:
    """The first number after the last "####" of a text, such as 1,234 or -3.5; None if there is none."""
    match = _NUMBER.search(text.rpartition("####")[2])
    return Fraction(match[0].replace(",", "")) if match else None
