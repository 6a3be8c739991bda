"""A step that must not be made. No torch in here."""

from typing import Any


class StepRefused(RuntimeError):
    """A step was refused before anything was changed; the message names the cause and the cure.

    Every rank raises it alike. `batches` is what the step was to be made of, where that is known.
    """

    def __init__(self, message: str, batches: list[Any] | None = None) -> None:
        super().__init__(message)
        self.batches = batches or []


class TooManyBadSteps(RuntimeError):
    """More steps were refused than --max_bad_steps: the run ends with its state saved."""
