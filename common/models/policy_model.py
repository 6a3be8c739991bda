"""A causal language model that returns log-probabilities of given tokens instead of all logits.

# S sequences, T positions, N scored tokens, V vocabulary
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from common.data.packed_batch import PackedBatch
from common.models.loading import plain_model, run_with_router
from common.models.model_flops import ModelFlops
from common.models.model_inputs import ModelInputs, build_model_inputs
from common.models.output_head import LogitOptions, OutputHead, read_logit_transform
from common.models.router_loss import router_coefficient
from common.ranks import distributed


class ScoringHead(nn.Linear):
    """The output head: logits, or the result of a function of an OutputHead.

    It is called as a module, once per pass, so ZeRO 3 gathers its weight once for any number of chunks.
    """

    def forward(
        self,
        hidden: torch.Tensor,
        compute: Callable[[OutputHead], Any] | None = None,
        options: LogitOptions | None = None,
    ) -> Any:
        """Logits (..., V), or the result of `compute` for an OutputHead with these options."""
        head = OutputHead(hidden, self.weight, self.bias, options)
        return super().forward(hidden) if compute is None else compute(head)


class PolicyModel(nn.Module):
    """Scores tokens with a causal LM (transformers', or a PEFT wrapper), which it holds as `causal_lm`."""

    def __init__(self, causal_lm: nn.Module, *, num_valid_tokens: int, temperature: float = 1.0) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        plain = plain_model(causal_lm)
        head = plain.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ValueError(
                f"{type(plain).__name__} has no linear output head; its logits cannot be chunked"
            )
        own = read_logit_transform(plain.config)
        self.options = replace(own, num_valid_tokens=num_valid_tokens, temperature=temperature)
        # The class is swapped in place so that the parameter, sharded or tied, keeps its identity.
        head.__class__ = ScoringHead
        self.router_coefficient = router_coefficient(plain)
        self.router_loss: torch.Tensor | None = None  # loss of the last training pass, see add_router_loss

    @cached_property
    def flops(self) -> ModelFlops:
        """FLOPs of passes; trained weights are those at the first access."""
        return ModelFlops(self.causal_lm, plain_model(self.causal_lm).get_output_embeddings())

    def forward(
        self,
        inputs: ModelInputs,
        slots: torch.Tensor,
        token_ids: torch.Tensor,
        compute: Callable[[OutputHead, torch.Tensor], Any] = OutputHead.logprobs,
    ) -> Any:
        """Result of `compute`, such as a method of OutputHead, for `token_ids` (N,); by default their
        log-probabilities, and zeros for entropies.

        `slots` (N,) int64 are the positions that predict the tokens, `inputs.slots_before`. All tensors are
        on the CPU.
        """
        plain = plain_model(self.causal_lm)
        inputs, slots, token_ids = inputs.to(distributed.device(), slots, token_ids)
        self.flops.count(inputs, len(slots))
        hidden = run_with_router(self, plain, inputs)[slots]  # (N, H)
        return plain.get_output_embeddings()(hidden, partial(compute, token_ids=token_ids), self.options)


def compute_nll_sum(
    engine: Any, batch: PackedBatch, *, is_packed: bool = False, temperature: float | None = None
) -> torch.Tensor:
    """Negative log-likelihood summed over the targets of a batch, fp32 scalar.

    `engine` is a PolicyModel or its engine; the batch has input_ids and loss_mask.
    """
    token_ids = batch.data["input_ids"]
    is_target = batch.data["loss_mask"]
    sizes = None
    if "conversation" in batch.data:  # its rows share prefixes
        sizes = torch.unique_consecutive(batch.numbers("conversation"), return_counts=True)[1]
    inputs = build_model_inputs(token_ids, batch.lengths["input_ids"], is_packed=is_packed, group_sizes=sizes)
    slots = inputs.slots_before(is_target)
    return engine(inputs, slots, token_ids[is_target], partial(OutputHead.nll_sum, temperature=temperature))


def count_targets(batch: PackedBatch) -> float:
    """Number of learned tokens of a batch."""
    return float(batch.data["loss_mask"].sum())


def language_model(module: nn.Module) -> nn.Module:
    """The causal LM inside a PolicyModel, or the module itself."""
    return module.causal_lm if isinstance(module, PolicyModel) else module
