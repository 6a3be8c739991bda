"""Critic and reward model: a backbone with a scalar head; values per token, one score per sequence.

It *is* transformers' AutoModelForSequenceClassification with one label, so a saved reward model loads with
plain `from_pretrained`, and it can be initialised from an SFT model, a base model or a reward model.

# N slots, S sequences, total tokens of all
"""

from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedConfig

from common.data.packed_batch import sum_by_sequence
from common.models.loading import (
    ModelOptions,
    init_weight,
    load_pretrained,
    plain_model,
    run_with_router,
)
from common.models.lora import LoraOptions, add_lora, share_backbone
from common.models.model_flops import ModelFlops
from common.models.model_inputs import ModelInputs
from common.models.router_loss import router_coefficient
from common.models.saved_adapters import POOLING, base_of, has_score_head, is_adapter, read_adapter_config
from common.ranks import distributed

POOLINGS = ("last", "mean")  # how a response's values form its score


class ScoreHead(nn.Linear):
    """A bias-free linear layer with fp32 outputs for weights of any dtype: scores keep their precision."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores (..., 1) fp32."""
        return F.linear(hidden.float(), self.weight.float())


class ValueModel(nn.Module):
    """Values per token over a sequence-classification model whose head is called `score`."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier
        self.router_coefficient = router_coefficient(plain_model(classifier))
        self.router_loss: torch.Tensor | None = None  # loss of the last training pass, see add_router_loss

    @cached_property
    def flops(self) -> ModelFlops:
        """FLOPs of passes; trained weights are those at the first access."""
        return ModelFlops(self.classifier, plain_model(self.classifier).score)

    @property
    def pooling(self) -> str:
        """How values form a score, one of POOLINGS: see `compute_scores`. Saved in the configuration."""
        return getattr(plain_model(self.classifier).config, POOLING, "last")

    def forward(self, inputs: ModelInputs, slots: torch.Tensor | None = None) -> torch.Tensor:
        """Values (N,) fp32 at `slots` (N,) int64 of the inputs; by default those of all tokens in the
        packed order.
        """
        plain = plain_model(self.classifier)
        slots = inputs.token_slots if slots is None else slots
        inputs, slots = inputs.to(distributed.device(), slots)
        self.flops.count(inputs, len(slots))
        return plain.score(run_with_router(self, plain, inputs)[slots]).squeeze(-1)


def compute_scores(
    model: Any, inputs: ModelInputs, lengths: torch.Tensor, is_response: torch.Tensor
) -> torch.Tensor:
    """Score (S,) fp32 of each sequence's response, end-of-turn token included: by the model's pooling, the
    value at its last token, or the mean of the values over its tokens.

    `model` is a ValueModel or its engine. lengths (S,) int64 and is_response (total,) bool, both on the CPU,
    are in the packed order; a response has at least one token. Its position comes from them, never from a
    search for PAD: PAD may be EOS.
    """
    if getattr(model, "module", model).pooling == "last":
        return model(inputs, inputs.last_slots)
    values = model(inputs, inputs.token_slots[is_response])
    counts = sum_by_sequence(torch.ones_like(values), is_response, lengths)
    return sum_by_sequence(values, is_response, lengths) / counts


def load_value_model(
    options: ModelOptions,
    num_tokens: int,
    lora: LoraOptions | None = None,
    *,
    seed: int = 0,
    owner: nn.Module | None = None,
    pooling: str = "",
) -> ValueModel:
    """A value model from a base, SFT or reward model; the head is new unless a saved one exists.

    `owner` is a model of the same base whose frozen backbone it shares: see `share_backbone`. `pooling` is
    one of POOLINGS; if empty, what the saved model, or adapter, records. Raises ValueError for a family
    without a `score` head in transformers. Every rank must call this.
    """
    saved = lora.folder if lora and lora.folder else options.name_or_path
    changes = {"num_labels": 1, POOLING: pooling or saved_pooling(saved)}
    classifier = load_pretrained(AutoModelForSequenceClassification, options, num_tokens, **changes)
    if not isinstance(getattr(classifier, "score", None), nn.Linear):
        raise ValueError(
            f"{options.name_or_path}: {type(classifier).__name__} has no linear `score` head; "
            "use a decoder family such as Llama, Qwen2, OPT, GPT-2, GPT-NeoX or BLOOM"
        )
    # The class is swapped in place so that the parameter, sharded or not, keeps its identity and its name.
    classifier.score.__class__ = ScoreHead
    if not has_saved_head(options.name_or_path):
        init_weight(classifier.score.weight, "score.weight", std=0.02, seed=seed)
    if owner is not None:
        share_backbone(classifier, owner)
    return ValueModel(add_lora(classifier, lora, seed) if lora else classifier)


def saved_pooling(name_or_path: str) -> str:
    """The pooling that a saved model records; for an adapter its own, or else its base's.

    Raises ValueError for an unknown one.
    """
    config = read_adapter_config(name_or_path) if is_adapter(name_or_path) else {}
    if POOLING not in config:
        config, _ = PreTrainedConfig.get_config_dict(base_of(name_or_path))
    pooling = config.get(POOLING, "last")
    if pooling not in POOLINGS:
        raise ValueError(
            f"{name_or_path}: its configuration says {POOLING} {pooling!r}; known: {', '.join(POOLINGS)}"
        )
    return pooling


def has_saved_head(name_or_path: str) -> bool:
    """Whether the saved model is a sequence classifier with one label, that is, has learned scores; for an
    adapter, whether it or its base is.
    """
    if is_adapter(name_or_path) and has_score_head(name_or_path):
        return True
    # Reads the plain file: remote code of a configuration must not run for this.
    config, _ = PreTrainedConfig.get_config_dict(base_of(name_or_path))
    is_classifier = any(n.endswith("ForSequenceClassification") for n in config.get("architectures") or [])
    num_labels = len(config.get("id2label") or {}) or config.get("num_labels", 2)
    return is_classifier and num_labels == 1
