"""CUDA graphs of the decode step: a pass of a small model is bound by launching its kernels one by one.

A graph holds for one number of rows and of positions; both are rounded up, so few are needed.
"""

from collections.abc import Callable

import torch
from torch import nn

POSITIONS_PER_BUCKET = 128


def round_rows(num_rows: int, num_slots: int) -> int:
    """Return the next power of two, at most `num_slots`: rows above the live ones cost next to nothing."""
    return min(1 << (num_rows - 1).bit_length(), num_slots)


def round_positions(upto: int, max_length: int) -> int:
    """Return the next multiple of the bucket, at most `max_length`."""
    return min(-(-upto // POSITIONS_PER_BUCKET) * POSITIONS_PER_BUCKET, max_length)


class DecodeGraphs:
    """Captured passes by (rows, positions), kept as long as the weights stay at their addresses."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._addresses: list[int] = []
        self._pool: object | None = None

    def check_weights(self) -> None:
        """Forget the graphs if a weight has moved; to be called before the first pass of a generation."""
        addresses = [parameter.data_ptr() for parameter in self.model.parameters()]
        if addresses != self._addresses:
            self.graphs.clear()
            self._pool = None
            self._addresses = addresses

    def run(
        self, rows: int, upto: int, run_pass: Callable[[int, int], None], state: list[torch.Tensor]
    ) -> None:
        """Run `run_pass(rows, upto)`, by its graph; `state` is what a pass changes."""
        graph = self.graphs.get((rows, upto))
        if graph is None:
            graph = self.graphs[rows, upto] = self._capture(rows, upto, run_pass, state)
        graph.replay()

    def _capture(
        self, rows: int, upto: int, run_pass: Callable[[int, int], None], state: list[torch.Tensor]
    ) -> torch.cuda.CUDAGraph:
        before = [tensor.clone() for tensor in state]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries make their work areas on first use, which no graph may
            run_pass(rows, upto)
        torch.cuda.current_stream().wait_stream(stream)
        for tensor, old in zip(state, before, strict=True):
            tensor.copy_(old)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run_pass(rows, upto)
        return graph
