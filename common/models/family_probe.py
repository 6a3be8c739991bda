"""Probe of a model family: compares our forward passes with the class's own on a small replica, in a few
hundred milliseconds, before weights are loaded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from common.data.packed_batch import pack_rows, token_positions
from common.models.attention import (
    VARLEN_ATTENTION,
    install,
    narrow_last_layer,
    takes_own_kernels,
    takes_packed,
)
from common.models.loading import forward_accepts, set_dropout
from common.models.model_inputs import build_model_inputs
from common.models.policy_model import PolicyModel
from common.models.replica import build_replica, measure_once
from common.models.router_loss import router_coefficient
from common.models.transformers_internals import class_for
from common.models.value_model import ValueModel
from common.ranks.failures import kind_and_line

RELATIVE = 1e-4  # tolerance relative to the largest number: above rounding, below wrong tokens or weights
LENGTHS = (5, 9)
_HEAD = "its head is more than a matrix, or reads hidden states other than the text's"
_PADDING = "its tokens attend to the padding after them"


@dataclass(frozen=True)
class FamilyProbe:
    """Result of a probe: why the family cannot be used, and whether its rows can be packed."""

    refusal: str = ""
    packs: bool = True
    note: str = ""


def probe_family(auto_class: Any, config: PreTrainedConfig, *, trusts_code: bool = False) -> FamilyProbe:
    """Result of the comparison for a model of this configuration, the same on all ranks."""
    return measure_once(_measure, config, auto_class, trusts_code)


def _measure(config: PreTrainedConfig, auto_class: Any, trusts_code: bool) -> FamilyProbe:
    name = f"the family {config.model_type}"
    is_policy = auto_class is AutoModelForCausalLM
    is_known = trusts_code or class_for(auto_class, config) is not None
    if not is_policy and not is_known:
        return FamilyProbe(f"{name} has no classifier in transformers, which reward models and critics are")
    if is_known and config.is_encoder_decoder:
        return FamilyProbe(f"{name} has an encoder and a decoder; give a decoder-only model")
    try:
        model, rows = small_model(auto_class, config, trusts_code)
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        with_noise = [plain_logits(model, row) for row in rows]
        for owner in (model, model.config):
            set_dropout(owner, 0.0)
        plain = [plain_logits(model, row) for row in rows]
    except Exception as error:  # the family's own code may raise anything
        note = f"{name} could not be probed on a small model ({kind_and_line(error)}): its rows are "
        return FamilyProbe(
            packs=False, note=f"{note}padded, and its results are not checked against transformers"
        )
    refusal = f"{name} is not supported: our results for {type(model).__name__} differ from its own "
    refusal += "forward pass on a small random model: {}; docs/families.md lists the supported families"
    if not all(map(torch.equal, weights, model.parameters())):
        return FamilyProbe(refusal.format("this pass changes its weights"))
    largest = max(float(x.abs().max()) for x in plain)
    if difference(torch.cat(with_noise), torch.cat(plain), largest):
        text = "its routers add noise in evaluation too, which training here turns off; set "
        return FamilyProbe(refusal.format(f"{text}router_jitter_noise to 0 in config.json"))
    if is_policy:
        plain = [logprobs_of(x[:-1], row[1:]) for x, row in zip(plain, rows, strict=True)]
    forms = (
        ("single rows", [[row] for row in rows], False, _HEAD),
        ("padded rows", [rows], False, _PADDING),
        ("packed rows", [rows], True, ""),
    )
    compute = own_logprobs if is_policy else _last_values
    for form, batches, is_packed, cause in forms:
        model.packs_rows = is_packed
        if is_packed and not takes_packed(model):
            continue
        try:
            numbers = torch.cat([compute(model, batch, is_packed=is_packed) for batch in batches])
            numbers.sum().backward()
            gap = difference(numbers.detach(), torch.cat(plain), largest)
        except Exception as error:
            gap = kind_and_line(error)
            cause = ""
        if gap and is_packed:
            note = f"{name} gives different results for packed rows than for single rows ({gap})"
            return FamilyProbe(packs=False, note=f"{note}: its rows are padded")
        if gap:
            return FamilyProbe(refusal.format(", ".join(filter(None, (f"{form}: {gap}", cause)))))
    return FamilyProbe()


def small_model(
    auto_class: Any, config: PreTrainedConfig, trusts_code: bool, lengths: Sequence[int] = LENGTHS
) -> tuple[PreTrainedModel, list[list[int]]]:
    """The replica of a model, as `load_pretrained` would make it, and rows of token ids for it."""
    config.use_cache, config.num_labels = False, 1
    install()
    own = takes_own_kernels(class_for(auto_class, config), config)
    model = build_replica(
        auto_class,
        config,
        attn_implementation=VARLEN_ATTENTION if own else None,
        trust_remote_code=trusts_code,
    )
    if not router_coefficient(model):
        narrow_last_layer(model)
    text = model.config.get_text_config()
    named = [value for name, value in vars(text).items() if name.endswith("_token_id")]
    ids = [i for i in range(min(text.vocab_size, 80)) if i not in named][2:]
    return model, [[ids[(7 * row + 5 * k) % len(ids)] for k in range(n)] for row, n in enumerate(lengths)]


@torch.no_grad()
def plain_logits(model: PreTrainedModel, row: Sequence[int]) -> torch.Tensor:
    """Logits (T, V) float64 of the class's own forward pass over a single row; (1,) for a classifier."""
    token_ids = torch.tensor([row], device=model.device)
    more = {"attention_mask": torch.ones_like(token_ids)} if forward_accepts(model, "attention_mask") else {}
    return model(input_ids=token_ids, use_cache=False, **more).logits[0].double()


def logprobs_of(logits: torch.Tensor, token_ids: Sequence[int] | torch.Tensor) -> torch.Tensor:
    """Log-probabilities (N,) of tokens under logits (N, V)."""
    chosen = torch.as_tensor(token_ids, device=logits.device).unsqueeze(1)
    return logits.log_softmax(-1).gather(1, chosen).squeeze(1)


def difference(own: torch.Tensor, plain: torch.Tensor, largest: float) -> str:
    """Largest difference of two tensors, as text; "" for rounding. NaN in either is a difference."""
    gap = float((own.double() - plain).abs().max())
    return "" if gap <= RELATIVE * max(largest, 1.0) else f"off by {gap:.2g}"


def own_logprobs(
    model: Any, rows: list[list[int]], *, is_packed: bool, num_valid_tokens: int | None = None
) -> torch.Tensor:
    """Log-probabilities (N,) that training computes for all tokens but each row's first."""
    token_ids, lengths = pack_rows(rows)
    inputs = build_model_inputs(token_ids, lengths, is_packed=is_packed)
    is_scored = token_positions(lengths) > 0
    policy = PolicyModel(model, num_valid_tokens=num_valid_tokens).train()
    return policy(inputs, inputs.slots_before(is_scored), token_ids[is_scored])[0]


def _last_values(model: Any, rows: list[list[int]], *, is_packed: bool) -> torch.Tensor:
    """Values (S,) that training computes at the rows' last tokens."""
    if not isinstance(getattr(model, "score", None), nn.Linear):
        raise ValueError(f"{type(model).__name__} has no linear `score` head")
    inputs = build_model_inputs(*pack_rows(rows), is_packed=is_packed)
    return ValueModel(model).train()(inputs, inputs.last_slots)
