"""What tests of formulas share: one check for right and wrong forms, a comparison, the largest
tensor, played ranks."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def judge(check: Callable[[Any], None], form: Any, is_right: bool) -> None:
    """Run the check on a form: the right one must pass it, a wrong one must fail it."""
    if is_right:
        check(form)
        return
    with pytest.raises(AssertionError):
        check(form)


def forms(right: Any, **wrong: Any) -> pytest.MarkDecorator:
    """Parametrise a test over ("form", "is_right"): ours, and wrong ones by name."""
    cases = [pytest.param(right, True, id="ours")]
    cases += [pytest.param(form, False, id=f"wrong_{name}") for name, form in wrong.items()]
    return pytest.mark.parametrize(("form", "is_right"), cases)


def close(actual: torch.Tensor, expected: Any, atol: float = 1e-6) -> None:
    """Assert that a tensor equals numbers (a tensor or lists) to an absolute tolerance, in float64."""
    if not isinstance(expected, torch.Tensor):
        expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=atol)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation makes."""

    num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.num_elements = max([self.num_elements, *sizes])
        return result


def play_ranks(programs: list[Callable[[Callable[[torch.Tensor], torch.Tensor]], Any]]) -> list[Any]:
    """Run one program a rank, each given a `reduce_sum` over all of them; return their results."""
    barrier = threading.Barrier(len(programs), timeout=20)
    totals: list[Any] = [None] * len(programs)
    results: list[Any] = [None] * len(programs)

    def run(rank: int) -> None:
        def reduce_sum(total: torch.Tensor) -> torch.Tensor:
            totals[rank] = total
            barrier.wait()
            total_of_all = torch.stack(totals).sum(0)
            barrier.wait()
            return total_of_all

        results[rank] = programs[rank](reduce_sum)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(programs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
