"""The critic and the reward model: a backbone with a scalar head, values per token, one score per sequence.

It *is* transformers' AutoModelForSequenceClassification with one label, so a saved reward model loads with
plain `from_pretrained` and an SFT model, a base model or a reward model can all be its beginning.

# N slots
"""

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedConfig

from common.models.loading import ModelOptions, compute_hidden, init_weight, load_pretrained, plain_model
from common.models.lora import LoraOptions, add_lora, share_backbone
from common.models.model_flops import ModelFlops
from common.models.model_inputs import ModelInputs
from common.models.saved_adapters import base_of, has_score_head, is_adapter
from common.ranks import distributed


class ScoreHead(nn.Linear):
    """A bias-free linear layer that answers in fp32 whatever its weights' dtype: scores keep their digits."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return scores (..., 1) fp32."""
        return F.linear(hidden.float(), self.weight.float())


class ValueModel(nn.Module):
    """Values per token over a sequence-classification model whose head is called `score`."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    @cached_property
    def flops(self) -> ModelFlops:
        """What passes cost, by what is trained when it is asked for first."""
        return ModelFlops(self.classifier, plain_model(self.classifier).score)

    def forward(self, inputs: ModelInputs, slots: torch.Tensor | None = None) -> torch.Tensor:
        """Return values (N,) fp32 at `slots` (N,) int64 of the inputs, rows end to end; by default those of
        all tokens in the packed order.

        A sequence's score is the value at its last token, end-of-turn token included: `inputs.last_slots`.
        It comes from the length, never from a search for PAD: PAD may be EOS.
        """
        plain = plain_model(self.classifier)
        slots = inputs.token_slots if slots is None else slots
        inputs, slots = inputs.to(distributed.device(), slots)
        self.flops.count(inputs, len(slots))
        return plain.score(compute_hidden(plain, inputs)[slots]).squeeze(-1)


def load_value_model(
    options: ModelOptions,
    num_tokens: int,
    lora: LoraOptions | None = None,
    *,
    seed: int = 0,
    owner: nn.Module | None = None,
) -> ValueModel:
    """Return a value model from a base, SFT or reward model; the head is new unless a saved one is there.

    `owner` is a model of the same base whose frozen backbone it shares: see `share_backbone`.
    Raises ValueError for a family without a `score` head in transformers.
    Every rank must call this.
    """
    classifier = load_pretrained(AutoModelForSequenceClassification, options, num_tokens, num_labels=1)
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


def has_saved_head(name_or_path: str) -> bool:
    """Whether the saved model is a sequence classifier of one label, that is: has learned scores; of an
    adapter, whether it or its base is.
    """
    if is_adapter(name_or_path) and has_score_head(name_or_path):
        return True
    # The plain file: a configuration's own code, which comes with some models, must not run for this.
    config, _ = PreTrainedConfig.get_config_dict(base_of(name_or_path))
    is_classifier = any(n.endswith("ForSequenceClassification") for n in config.get("architectures") or [])
    num_labels = len(config.get("id2label") or {}) or config.get("num_labels", 2)
    return is_classifier and num_labels == 1
