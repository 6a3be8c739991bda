"""Muon (arXiv:2502.16982): orthogonalised updates for matrices of hidden layers, AdamW for the rest.

torch's Muon needs whole matrices, but under ZeRO a rank has only a contiguous part of each. DeepSpeed's Muon
clips its updates, whose norm grows with the number of matrices, so learning rates lose their meaning. Here
the gradient is clipped, and momentum is sharded as AdamW's moments are, like the weights that a rank updates.
"""

import re
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from common.ranks import distributed
from common.ranks.zero3 import OwnedRun, find_owned_runs, is_sharded

MOMENTUM = 0.95
STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # kellerjordan.github.io/posts/muon
RMS = 0.2  # of an AdamW update (figure of the paper), so that AdamW's learning rates suit Muon


def shape_of(parameter: nn.Parameter) -> torch.Size:
    """Shape of the whole parameter."""
    return parameter.ds_shape if is_sharded(parameter) else parameter.shape


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether the parameter is a matrix, or the stacked matrices of experts, in one of a model's layers.

    Embeddings and heads are outside the list of layers; LoRA factors do not count.
    """
    shape = shape_of(parameter)
    is_matrix = len(shape) in (2, 3) and min(shape[-2:]) > 1
    return is_matrix and "lora_" not in name and re.search(r"(^|\.)\d+\.", name) is not None


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """Matrices (..., rows, columns) with the same singular vectors and singular values near 1.

    Newton-Schulz iteration with coefficients that raise small values fast; the results are within 0.7 to 1.2.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


class Muon(torch.optim.AdamW):
    """AdamW, and Muon for groups with `is_muon`; every rank must call `step`.

    If ZeRO shards the states, each matrix is assembled on one rank, round robin, and its update is sent to
    all ranks.
    """

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        super().__init__(groups, **options)
        # By id, because ZeRO replaces the parameters of a group by its flat tensors.
        self._are_matrices = {id(p) for group in groups if group["is_muon"] for p in group["params"]}
        self.matrices: dict[torch.Tensor, list[OwnedRun]] = defaultdict(list)  # by the key of their states
        self._is_distributed = False

    def attach(self, engine: Any) -> None:
        """Find the matrices in the tensors that this engine's optimizer updates."""
        self._is_distributed = engine.zero_optimization() and distributed.world_size() > 1
        for run in find_owned_runs(engine):
            if id(run.parameter) in self._are_matrices:
                self.matrices[run.owner].append(run)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters that have a gradient."""
        gradients = {}
        for group in self.param_groups:
            for owner in group["params"] if group["is_muon"] else ():
                if owner.grad is not None:
                    self._step_matrices(owner, group)
                gradients[owner] = owner.grad
                owner.grad = None  # so that AdamW skips it
        super().step()
        for owner, gradient in gradients.items():
            owner.grad = gradient

    def _step_matrices(self, owner: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[owner]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=owner.device)
            state["exp_avg"] = torch.zeros_like(owner)
        state["step"] += 1
        weights, gradients, momenta = (t.view(-1) for t in (owner, owner.grad, state["exp_avg"]))
        num_at_once = distributed.world_size() if self._is_distributed else 1
        for first in range(0, len(self.matrices[owner]), num_at_once):
            runs = self.matrices[owner][first : first + num_at_once]
            own_slices = [slice(run.offset, run.offset + run.numel) for run in runs]
            parts = [_nesterov_update(momenta[m], gradients[m]) for m in own_slices]
            updates = self._orthogonalise_together(
                [_as_whole_matrix(*pair) for pair in zip(runs, parts, strict=True)]
            )
            for run, m, update in zip(runs, own_slices, updates, strict=True):
                update *= RMS * max(update.shape[-2:]) ** 0.5
                part = update.view(-1)[run.start : run.start + run.numel].to(owner.device, torch.float32)
                decay = 1 - group["lr"] * group["weight_decay"]
                weights[m] = weights[m].float() * decay - group["lr"] * part

    def _orthogonalise_together(self, wholes: list[torch.Tensor]) -> list[torch.Tensor]:
        """Orthogonalised matrices, on all ranks, from zeros in which each rank has filled in its part."""
        if not self._is_distributed:
            return [orthogonalise(whole) for whole in wholes]
        for rank, whole in enumerate(wholes):
            dist.reduce(whole, rank)
        if distributed.rank() < len(wholes):
            own = wholes[distributed.rank()]
            own.copy_(orthogonalise(own))
        for rank, whole in enumerate(wholes):
            dist.broadcast(whole, rank)
        return wholes


def _nesterov_update(momentum: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Nesterov update (n,), after updating the momentum (n,)."""
    moved = momentum.float().lerp(gradient.float(), 1 - MOMENTUM)
    momentum.copy_(moved)
    return gradient.float().lerp(moved, MOMENTUM)


def _as_whole_matrix(run: OwnedRun, part: torch.Tensor) -> torch.Tensor:
    """A whole matrix of zeros with this rank's part filled in, in the dtype of the iteration."""
    dtype = torch.bfloat16 if distributed.has_gpu() else torch.float32
    whole = torch.zeros(shape_of(run.parameter), dtype=dtype, device=distributed.device())
    whole.view(-1)[run.start : run.start + run.numel] = part.to(whole)
    return whole
