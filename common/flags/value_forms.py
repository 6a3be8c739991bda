"""The type of a flag that is a number of steps, an epoch or a time. PURE."""

import re

UNITS = {"s": 1, "m": 60, "h": 3600}  # seconds


class Interval(str):
    """Text of a flag: a number of steps (0: never), `epoch`, or a time such as 90s, 30m or 2h.

    Raises ValueError for any other text.
    """

    steps: int  # 0 if not counted in steps
    seconds: int  # 0 if not a time

    def __new__(cls, text: str) -> "Interval":
        """Parse the text; the value stays a str for JSON and equality."""
        match = re.fullmatch(r"epoch|([0-9]{1,9})|([0-9]{0,6}[1-9][0-9]{0,6})([smh])", text)
        if match is None:
            raise ValueError(text)
        interval = super().__new__(cls, text)
        interval.steps = int(match[1] or 0)
        interval.seconds = int(match[2] or 0) * UNITS.get(match[3], 0)
        return interval

    def __bool__(self) -> bool:
        """Whether the interval is ever due."""
        return self == "epoch" or self.steps + self.seconds > 0

    def is_due(self, step: int, steps_per_epoch: int, seconds: float) -> bool:
        """Whether the interval has passed at the end of `step` (from 1), `seconds` after the last time."""
        if self.seconds:
            return seconds >= self.seconds
        num_steps = steps_per_epoch if self == "epoch" else self.steps
        return num_steps > 0 and step % num_steps == 0
