"""Probe of cached decoding: compares log-probabilities of tokens decoded one by one with the model class's
own forward pass, on a small replica, before weights are loaded. It runs two decoding steps after prompts of
several lengths.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from common.data.packed_batch import pad_rows
from common.generation.decode import SamplingOptions
from common.generation.generate import Generator, PromptBatch
from common.generation.hybrid_engine import TransformersGenerator
from common.generation.inference_module import share_weights
from common.models.family_probe import difference, logprobs_of, plain_logits, small_model
from common.models.replica import measure_once
from common.models.transformers_internals import is_stateful
from common.ranks.failures import kind_and_line

LENGTHS = (5, 3, 4)
NUM_NEW = 3  # the first comes from the prompt pass
_STATES = ("linear", "conv", "mamba", "recurrent")


def why_not_generated(
    config: PreTrainedConfig, *, by_transformers: bool = False, trusts_code: bool = False
) -> str:
    """Why `Generator`, or transformers' `generate`, does not support a family; "" if it does."""
    return measure_once(_measure, config, by_transformers, trusts_code)


def _measure(config: PreTrainedConfig, by_transformers: bool, trusts_code: bool) -> str:
    name = f"the family {config.model_type}"
    try:
        model, rows = small_model(AutoModelForCausalLM, config, trusts_code, LENGTHS)
        plain_logits(model, rows[0])
    except Exception:  # the family's code may raise anything; family_probe reports it
        return ""
    options = SamplingOptions(NUM_NEW, stop_token_id=-1, pad_token_id=rows[0][0], do_sample=False)
    try:
        module = share_weights(model, by_onednn=False)  # the steps are compared, not roundings
        generator = TransformersGenerator(module) if by_transformers else Generator(module, num_slots=2)
        token_ids, logprobs = decode_rows(generator, rows, options)
        logits = response_logits(model, rows, token_ids)
        expected = logprobs_of(logits, torch.cat(token_ids))
        gap = difference(torch.cat(logprobs), expected, float(logits.abs().max()))
    except Exception as error:
        gap = kind_and_line(error)
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    has_state = is_stateful(model) or any(word in kind for kind in kinds for word in _STATES)
    if gap and has_state and not by_transformers:
        return f"{name} carries a state from token to token, but this decoder caches only keys and values"
    return gap and f"decoding with {name} differs from its own forward pass: {gap}"


def decode_rows(
    generator: Any, rows: list[list[int]], options: SamplingOptions, limits: torch.Tensor | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Token ids of a response to each row, and the log-probabilities under which they were sampled; `limits`
    are those of a PromptBatch.
    """
    device = generator.model.device
    ids, mask = (x.to(device) for x in pad_rows(rows, options.pad_token_id, on_left=True))
    sample_ids = torch.arange(len(rows), device=device)
    generation = generator.generate(PromptBatch(ids, mask, sample_ids, limits), options)
    columns = generation.response_ids, generation.logprobs
    return tuple(
        [x[is_own] for x, is_own in zip(column, generation.response_mask, strict=True)] for column in columns
    )


def response_logits(model: Any, rows: list[list[int]], responses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Logits (N, V) of the model class's own forward pass that predict the response tokens of all rows."""
    parts = []
    for row, response in zip(rows, responses, strict=True):
        logits = plain_logits(model, [*row, *response.tolist()])
        parts.append(logits[len(row) - 1 : -1])
    return torch.cat(parts)
