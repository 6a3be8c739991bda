"""A reward model under our own pass, against transformers' sequence classification, a row at a time.

# S rows
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from common.models.loading import plain_model
from common.models.value_model import ValueModel
from common.models.varlen_attention import takes_packed
from tools.causal_checks import Subject, build_row_inputs, padded_rows_finding, torchs_attention
from tools.findings import Finding, compare, guarded, tolerance_of

_WHY_SCORES = "these are PPO's rewards"
_WHY_PADDING = "a score must not depend on the other rows of a batch"
_WHY_PAD_ID = "transformers looks for padding, our programs count lengths"


def find_scores(subject: Subject, value_model: ValueModel) -> Iterator[Finding]:
    """Yield what all checks of a reward model find; `subject.rows` end with the end-of-turn token."""
    yield from guarded("scores", check_scores, subject, value_model)


@contextmanager
def plain_classifier(model: PreTrainedModel, pad_token_id: int | None) -> Iterator[None]:
    """Leave transformers its own head and attention, and give it this pad id: None scores the last token."""
    config, ours = model.config.get_text_config(), type(model.score)
    own_pad = config.pad_token_id
    model.score.__class__, config.pad_token_id = nn.Linear, pad_token_id
    try:
        with torchs_attention(model):
            yield
    finally:
        model.score.__class__, config.pad_token_id = ours, own_pad


def score_plainly(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], pad_token_id: int | None
) -> torch.Tensor:
    """Return (S,) what transformers pools of each row alone."""
    with plain_classifier(model, pad_token_id):
        scores = [
            model(input_ids=torch.tensor([row], device=model.device), use_cache=False).logits for row in rows
        ]
    return torch.cat(scores).flatten()


@torch.inference_mode()
def check_scores(subject: Subject, value_model: ValueModel) -> list[Finding]:
    """Scores of a padded batch, what its padding does, the pad id, and rows end to end."""
    model, tokenizer, rows = plain_model(value_model.classifier), subject.tokenizer, subject.rows

    def score(*, is_packed: bool = False, fill: int | None = None) -> torch.Tensor:
        inputs = build_row_inputs(rows, model.device, is_packed=is_packed, fill=fill)
        return value_model(inputs, inputs.last_slots)

    plain, found = score_plainly(model, rows, None), score()
    tolerance = tolerance_of(subject.dtype, float(plain.abs().max()))
    # The end-of-turn token is in every row too: where it is PAD, a search for PAD would cut it off.
    fills = tokenizer.eos_token_id, tokenizer.pad_token_id, subject.num_valid_tokens - 1
    filled = torch.stack([score(fill=fill) for fill in fills])
    findings = [
        compare("scores", found, plain, tolerance, _WHY_SCORES),
        compare("what padding holds", filled, found.expand_as(filled), tolerance, _WHY_PADDING),
        describe_pad_id(subject, model, plain, tolerance),
    ]
    if takes_packed(model):
        findings.append(
            compare("end to end", score(is_packed=True), plain, tolerance, "--packed trains on such rows")
        )
    else:
        findings.append(padded_rows_finding(model))
    return findings


def describe_pad_id(
    subject: Subject, model: PreTrainedModel, plain: torch.Tensor, tolerance: float
) -> Finding:
    """Return what the saved pad id does to transformers' own scores: a remark where it is the end of turn."""
    pad, eos = model.config.get_text_config().pad_token_id, subject.tokenizer.eos_token_id
    if pad is None:
        text = "the config has none: transformers alone scores one row at a time, our programs any number"
        return Finding("pad id", text, None, _WHY_PAD_ID)
    pooled = score_plainly(model, subject.rows, pad)
    if pad == eos:
        difference = float((pooled.double() - plain.double()).abs().max())
        text = (
            f"{pad} is the end of turn too: transformers alone scores the token before it, up to "
            f"{difference:.1e} away from ours"
        )
        return Finding("pad id", text, None, _WHY_PAD_ID)
    return compare(f"pad id {pad}", pooled, plain, tolerance, _WHY_PAD_ID)
