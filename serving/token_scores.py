"""How likely a model holds each token of a text, and what it would rather have seen.

# T tokens, K likeliest ones, V vocabulary
"""

from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from common.models.loading import compute_hidden
from common.models.model_inputs import build_model_inputs
from common.models.policy_model import read_logit_transform

_PLACES_AT_A_TIME = 128  # whose logits are held together


class TokenScore(NamedTuple):
    """A token's log-probability after those before it, and the likeliest tokens there, with theirs."""

    logprob: float
    top: list[tuple[int, float]]


@torch.inference_mode()
def score_tokens(
    model: PreTrainedModel, token_ids: list[int], *, num_top: int, num_valid_tokens: int
) -> list[TokenScore]:
    """Return T - 1 scores, of all tokens but the first, in fp32 at temperature 1; `num_top` below V."""
    ids = torch.tensor(token_ids)
    inputs = build_model_inputs(ids, torch.tensor([len(token_ids)]), is_packed=False, device=model.device)
    hidden = compute_hidden(model, inputs)[0, :-1]  # (T - 1, H)
    form, head = read_logit_transform(model), model.get_output_embeddings()
    found: list[TokenScore] = []
    for places, targets in zip(
        hidden.split(_PLACES_AT_A_TIME), ids[1:].to(model.device).split(_PLACES_AT_A_TIME), strict=True
    ):
        logits = form.transform(head(places).float())[:, :num_valid_tokens]
        logprobs = logits.log_softmax(-1)
        own = logprobs.gather(1, targets.unsqueeze(1)).squeeze(1).tolist()
        values, tokens = (part.tolist() for part in logprobs.topk(num_top, dim=-1))
        found += [
            TokenScore(logprob, list(zip(ids, tops, strict=True)))
            for logprob, ids, tops in zip(own, tokens, values, strict=True)
        ]
    return found
