"""What a check of a model found, and how far apart two ways to compute a number may be."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from common.ranks.failures import first_line, kind_and_line
from tools.terminal import paint, visible

# Of the largest number that is computed: rounding alone stays well below, an error in a formula well above.
RELATIVE = {"fp32": 3e-5, "bf16": 4e-2}
_STATES = {True: ("ok", "good"), False: ("FAIL", "bad"), None: ("note", "note")}


@dataclass(frozen=True)
class Finding:
    """One line of the report; `is_ok` None is a remark that decides nothing."""

    name: str
    text: str
    is_ok: bool | None = None
    why: str = ""

    def line(self) -> str:
        """Return state, name, what was found, and why it matters."""
        state, style = _STATES[self.is_ok]
        shown = paint(f"{state:<5}", style) + visible(f"{self.name:<25}{self.text}")
        return shown + paint(f"  ({self.why})", "context") if self.why else shown


def tolerance_of(dtype: str, largest: float) -> float:
    """Return how far apart numbers up to `largest` may be that are computed in different orders."""
    return RELATIVE[dtype] * max(largest, 1.0)


def compare(name: str, found: torch.Tensor, expected: torch.Tensor, tolerance: float, why: str) -> Finding:
    """Return the finding on two tensors of one shape; NaN in either is a failure."""
    difference = float((found.double() - expected.double().to(found.device)).abs().max())
    text = f"largest difference {difference:.1e}, at most {tolerance:.1e}"
    return Finding(name, text, difference <= tolerance, why)


def guarded(name: str, check: Callable[..., Iterable[Finding]], *args: Any) -> Iterator[Finding]:
    """Yield what a check finds; what it raises is a failure of this name, and the next check still runs."""
    try:
        yield from check(*args)
    except Exception as error:  # the model's own code raises what it likes, and that it does is the finding
        yield Finding(name, told(error), is_ok=False)


def told(error: BaseException) -> str:
    """Return an error in one line: our own speak for themselves, others with their type."""
    return first_line(error) if type(error) is ValueError else kind_and_line(error)
