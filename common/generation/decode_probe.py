"""Whether what is generated with a family has the log-probabilities of its own forward pass: measured on a
replica before weights are loaded, by two decode steps behind prompts of several lengths.
"""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from common.data.packed_batch import pad_rows
from common.generation.decode import SamplingOptions
from common.generation.generate import Generator
from common.generation.hybrid_engine import TransformersGenerator
from common.generation.inference_module import share_weights
from common.models.family_probe import difference, logprobs_of, plain_logits, small_model
from common.models.replica import measure_once
from common.ranks.failures import kind_and_line

LENGTHS = (5, 3, 4)
NUM_NEW = 3  # the first of them needs no decode step
_STATES = ("linear", "conv", "mamba", "recurrent")


def why_not_generated(
    config: PreTrainedConfig, *, by_transformers: bool = False, trusts_code: bool = False
) -> str:
    """Why `Generator`, or transformers' `generate`, cannot be used with a family; nothing where it can be."""
    return measure_once(_measure, config, by_transformers, trusts_code)


def _measure(config: PreTrainedConfig, by_transformers: bool, trusts_code: bool) -> str:
    name = f"the family {config.model_type}"
    try:
        model, rows = small_model(AutoModelForCausalLM, config, trusts_code, LENGTHS)
        plain_logits(model, rows[0])
    except Exception:  # the family's own code raises what it likes; family_probe says so
        return ""
    try:
        gap = _difference(model, rows, by_transformers)
    except Exception as error:
        gap = kind_and_line(error)
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    has_state = model._is_stateful or any(word in kind for kind in kinds for word in _STATES)
    if gap and has_state and not by_transformers:
        return f"{name} keeps a state from token to token, and this decoder keys and values alone"
    return gap and f"what is decoded with {name} is not what its own forward pass computes: {gap}"


@torch.no_grad()
def _difference(model: Any, rows: list[list[int]], by_transformers: bool) -> str:
    """How far the log-probabilities of greedy responses are from the forward pass's, "" for rounding."""
    module = share_weights(model)
    generator: Any = TransformersGenerator(module) if by_transformers else Generator(module, num_slots=2)
    ids, mask = pad_rows(rows, rows[0][0], on_left=True)
    options = SamplingOptions(NUM_NEW, stop_token_id=-1, pad_token_id=rows[0][0], do_sample=False)
    generation = generator.generate(ids, mask, torch.arange(len(rows)), options, num_samples=1)
    expected, largest = [], 1.0
    for row, response in zip(rows, generation.response_ids, strict=True):
        logits = plain_logits(model, [*row, *response.tolist()])[len(row) - 1 : -1]
        expected.append(logprobs_of(logits, response))
        largest = max(largest, float(logits.abs().max()))
    return difference(generation.logprobs.flatten(), torch.cat(expected), largest)
