"""A causal language model that answers with log-probabilities of given tokens, never with all logits.

# S sequences, T positions, N scored tokens, V vocabulary
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from common.data.packed_batch import PackedBatch
from common.models.loading import compute_hidden, plain_model
from common.models.model_flops import ModelFlops
from common.models.model_inputs import ModelInputs, build_model_inputs
from common.models.output_head import (
    LogitOptions,
    Support,
    Truncation,
    read_logit_transform,
    sampling_support,
    summed_logprobs,
    token_scores,
)
from common.ranks import distributed


class ScoringHead(nn.Linear):
    """The output head: logits as ever, or with `token_ids` the scores of these tokens.

    It is called as a module, once a pass, so ZeRO 3 gathers its weight once however many chunks there are.
    """

    def forward(
        self,
        hidden: torch.Tensor,
        token_ids: torch.Tensor | None = None,
        options: LogitOptions | None = None,
        *,
        is_summed: bool = False,
        with_entropy: bool = False,
        support: Support | None = None,
        truncation: Truncation | None = None,
    ) -> Any:
        """Return logits (..., V), the scores of (N,) tokens, the sum of their log-probabilities, or the
        support that a sampler with this truncation had.
        """
        if token_ids is None or options is None:
            return super().forward(hidden)
        if truncation is not None:
            return tuple(sampling_support(hidden, self.weight, self.bias, token_ids, options, truncation))
        if is_summed:
            return summed_logprobs(hidden, self.weight, self.bias, token_ids, options)
        return tuple(
            token_scores(
                hidden,
                self.weight,
                self.bias,
                token_ids,
                options,
                with_entropy=with_entropy,
                support=support,
            )
        )


class PolicyModel(nn.Module):
    """Scores tokens by a causal LM (of transformers, or PEFT around one), which it holds as `causal_lm`."""

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
        self._flops: ModelFlops | None = None

    @property
    def flops(self) -> ModelFlops:
        """Return what passes cost, by what is trained when it is asked for first."""
        if self._flops is None:
            plain = plain_model(self.causal_lm)
            self._flops = ModelFlops(self.causal_lm, plain, plain.get_output_embeddings())
        return self._flops

    def forward(
        self,
        inputs: ModelInputs,
        slots: torch.Tensor,
        token_ids: torch.Tensor,
        *,
        is_summed: bool = False,
        with_entropy: bool = False,
        support: Support | None = None,
        truncation: Truncation | None = None,
        temperature: float | None = None,
    ) -> Any:
        """Return (logprobs, entropies) of `token_ids` (N,); with `is_summed` the sum of the former.

        `slots` (N,) int64 are those of the tokens themselves in the inputs, rows end to end; each is
        predicted from the slot before it. Slots and ids may be on the CPU. With `truncation` return the
        fields of the Support that the sampler had there. `temperature` takes the place of the model's own.
        """
        plain = plain_model(self.causal_lm)
        options = self.options if temperature is None else replace(self.options, temperature=temperature)
        self.flops.count(inputs, len(slots))
        hidden = compute_hidden(plain, inputs).flatten(0, 1)  # (S x T, H)
        hidden = hidden[slots.to(hidden.device) - 1]  # (N, H)
        return plain.get_output_embeddings()(
            hidden,
            token_ids.to(hidden.device),
            options,
            is_summed=is_summed,
            with_entropy=with_entropy,
            support=support,
            truncation=truncation,
        )


def compute_nll_sum(
    engine: Any, batch: PackedBatch, *, is_packed: bool = False, temperature: float | None = None
) -> torch.Tensor:
    """Return the negative log-likelihood summed over the targets of a batch, fp32 scalar.

    `engine` is a PolicyModel or its engine; the batch has input_ids and loss_mask.
    """
    token_ids, is_target = batch.data["input_ids"], batch.data["loss_mask"]
    lengths, device = batch.lengths["input_ids"], distributed.device()
    inputs = build_model_inputs(token_ids, lengths, is_packed=is_packed, device=device)
    slots = inputs.token_slots[is_target]
    return -engine(inputs, slots, token_ids[is_target], is_summed=True, temperature=temperature)


def count_targets(batch: PackedBatch) -> float:
    """Return how many tokens of a batch are learned."""
    return float(batch.data["loss_mask"].sum())


def language_model(module: nn.Module) -> nn.Module:
    """Return the causal LM inside a PolicyModel, or the module itself."""
    return module.causal_lm if isinstance(module, PolicyModel) else module
