"""What a check found, as one line, and how far apart two ways to compute a number may be.

No torch at run time in here: python -m tools.doctor works without it.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tools.painter import Painter, visible

if TYPE_CHECKING:
    import torch

# Of the largest number that is computed: rounding alone stays well below, an error in a formula well above.
RELATIVE = {"fp32": 3e-5, "bf16": 4e-2}
_NAME_WIDTH = 25
_STYLES = {True: "good", False: "bad", None: "note"}


@dataclass(frozen=True)
class Finding:
    """One line of the report; `is_ok` None is a remark that decides nothing."""

    name: str
    text: str
    is_ok: bool | None = None
    why: str = ""

    def line(self, painter: Painter, bad_word: str = "FAIL") -> str:
        """State, name, what was found, and why it matters; `bad_word` is the state of what is not ok."""
        state = {True: "ok", False: bad_word, None: "note"}[self.is_ok]
        shown = painter.paint(f"{state:<{len(bad_word) + 1}}", _STYLES[self.is_ok])
        shown += visible(f"{self.name:<{_NAME_WIDTH}}{self.text}")
        return shown + painter.paint(f"  ({self.why})", "context") if self.why else shown


def tolerance_of(dtype: str, largest: float) -> float:
    """How far apart numbers up to `largest` may be that are computed in different orders."""
    return RELATIVE[dtype] * max(largest, 1.0)


def compare(
    name: str, found: "torch.Tensor", expected: "torch.Tensor", tolerance: float, why: str
) -> Finding:
    """Return the finding on two tensors of one shape; NaN in either is a failure."""
    difference = float((found.double() - expected.double().to(found.device)).abs().max())
    return judge(name, difference, tolerance, why)


def judge(name: str, difference: float, tolerance: float, why: str, more: str = "") -> Finding:
    """Return the finding on the largest difference of two ways; NaN is a failure."""
    text = f"largest difference {difference:.1e}, at most {tolerance:.1e}{more}"
    return Finding(name, text, difference <= tolerance, why)


def guarded(name: str, check: Callable[..., Iterable[Finding]], *args: Any) -> Iterator[Finding]:
    """Yield what a check finds; what it raises is a failure of this name, and the next check still runs."""
    try:
        yield from check(*args)
    except Exception as error:  # the model's own code raises what it likes, and that it does is the finding
        yield Finding(name, told(error), is_ok=False)


def told(error: BaseException) -> str:
    """An error in one line: our own speak for themselves, others with their type."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return text if type(error) is ValueError and text else f"{type(error).__name__}: {text}"


def run_tool(main: Callable[[], Any]) -> None:
    """Run a tool's main function; Ctrl-C and a reader that has gone end it without a traceback."""
    try:
        code = main()
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    else:
        raise SystemExit(code)
