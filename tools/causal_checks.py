"""A causal LM under our own passes, against transformers' with the same weights, one row at a time.

# S rows, N scored tokens, R response, V vocabulary
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from common.data.collators import pad_rows
from common.generation.decode_state import SamplingOptions
from common.generation.generate import Generation, Generator
from common.generation.inference_module import share_weights
from common.models.loading import plain_model
from common.models.model_inputs import ModelInputs, build_model_inputs
from common.models.policy_model import PolicyModel
from common.models.varlen_attention import FLASH_ATTENTION, NAME, takes_packed
from tools.findings import Finding, compare, guarded, tolerance_of

TIE = 1e-3  # logits closer than this change places with the order of additions
_CHUNK_TOKENS = 8  # few enough that a small vocabulary too is scored in several chunks
_WHY_SCORES = "PPO's ratios and KL are differences of these"
_WHY_PADDING = "rows of a batch must not see one another's lengths"
_WHY_TEXTS = "PPO learns from what is generated here"
_WHY_SAMPLED = "the sampler's and the scorer's numbers meet in PPO's ratio"
_WHY_FLAT = "--packed trains on such rows"


class PlainScores(NamedTuple):
    """What transformers says of the rows."""

    logprobs: torch.Tensor  # (N,) float64 of every token but each row's first, padded vocabulary left out
    largest: float  # of all logits, without sign
    padded_share: float  # the largest probability that the vocabulary's padding would have together


@dataclass(frozen=True)
class Subject:
    """A model on its device, in eval mode, and what it is asked."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    rows: list[list[int]]
    dtype: str
    max_new_tokens: int

    @property
    def num_valid_tokens(self) -> int:
        """Ids from here on are padding of the vocabulary."""
        return len(self.tokenizer)

    @cached_property
    def plain(self) -> PlainScores:
        """transformers' scores of the rows."""
        return score_plainly(self.model, self.rows, self.num_valid_tokens)

    @cached_property
    def tolerance(self) -> float:
        """How far apart log-probabilities may be."""
        return tolerance_of(self.dtype, self.plain.largest)


def find_causal(subject: Subject) -> Iterator[Finding]:
    """Yield what all checks of one process find."""
    yield from guarded("log-probabilities", check_scores, subject)
    yield from guarded("greedy texts", check_generation, subject)
    yield from guarded("end to end", check_flat, subject)


@contextmanager
def torchs_attention(model: PreTrainedModel) -> Iterator[None]:
    """Put torch's attention, transformers' own choice, in the place of a kernel that we chose."""
    ours = model.config._attn_implementation
    if ours not in (NAME, FLASH_ATTENTION):
        yield
        return
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(ours)


def plain_logits(model: PreTrainedModel, row: Sequence[int]) -> torch.Tensor:
    """Return transformers' logits (T, V) of a row alone, without mask and positions of ours."""
    return model(input_ids=torch.tensor([row], device=model.device), use_cache=False).logits[0]


def score_plainly(model: PreTrainedModel, rows: Sequence[Sequence[int]], num_valid: int) -> PlainScores:
    """Return the log-softmax of transformers' logits, row by row."""
    logprobs, largest, padded = [], 0.0, 0.0
    with torchs_attention(model):
        for row in rows:
            logits = plain_logits(model, row)[:-1].double()
            chosen = torch.tensor(row[1:], device=logits.device).unsqueeze(1)
            logprobs.append(logits[:, :num_valid].log_softmax(-1).gather(1, chosen).squeeze(1))
            largest = max(largest, float(logits.abs().max()))
            padded = max(padded, float(logits.softmax(-1)[:, num_valid:].sum(-1).max()))
    return PlainScores(torch.cat(logprobs), largest, padded)


def build_policy(subject: Subject) -> PolicyModel:
    """Return the model that scores tokens, its head in small chunks."""
    policy = PolicyModel(subject.model, num_valid_tokens=subject.num_valid_tokens).eval()
    policy.options = replace(policy.options, chunk_tokens=_CHUNK_TOKENS)
    return policy


def score(
    policy: PolicyModel,
    rows: Sequence[Sequence[int]],
    *,
    is_packed: bool = False,
    fill: int | None = None,
    starts: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return (N,) log-probabilities in one pass; of each row those from its place in `starts` on (default 1).

    `fill` is put where rows are padded.
    """
    inputs = build_row_inputs(rows, plain_model(policy.causal_lm).device, is_packed=is_packed, fill=fill)
    counted = [
        torch.arange(len(row)) >= start for row, start in zip(rows, starts or [1] * len(rows), strict=True)
    ]
    is_scored = torch.cat(counted).to(inputs.input_ids.device)
    slots = inputs.token_slots[is_scored]
    return policy(inputs, slots, inputs.input_ids.flatten()[slots])[0]


def build_row_inputs(
    rows: Sequence[Sequence[int]], device: torch.device, *, is_packed: bool = False, fill: int | None = None
) -> ModelInputs:
    """Return the rows as a pass of ours reads them; `fill` is put where they are padded."""
    ids, lengths = torch.cat([torch.tensor(row) for row in rows]), torch.tensor([len(row) for row in rows])
    inputs = build_model_inputs(ids, lengths, is_packed=is_packed, device=device)
    if fill is not None:
        inputs.input_ids[~inputs.is_token] = fill
    return inputs


@torch.inference_mode()
def check_scores(subject: Subject) -> list[Finding]:
    """Log-probabilities of a padded batch, what its padding does, and the vocabulary's padding."""
    policy, plain = build_policy(subject), subject.plain
    found = score(policy, subject.rows)
    findings = [compare("log-probabilities", found, plain.logprobs, subject.tolerance, _WHY_SCORES)]
    fills = subject.tokenizer.pad_token_id, subject.num_valid_tokens - 1
    filled = torch.stack([score(policy, subject.rows, fill=fill) for fill in fills])
    findings.append(
        compare("what padding holds", filled, found.expand_as(filled), subject.tolerance, _WHY_PADDING)
    )
    num_rows = subject.model.get_output_embeddings().weight.shape[0]
    if num_rows > subject.num_valid_tokens:
        text = (
            f"{num_rows:,} rows for {subject.num_valid_tokens:,} tokens: the rest is left out of every "
            f"softmax, and would have up to {plain.padded_share:.2%} of it"
        )
        findings.append(Finding("vocabulary", text))
    return findings


@torch.inference_mode()
def check_generation(subject: Subject) -> list[Finding]:
    """Greedy texts in fewer slots than there are prompts, and their log-probabilities."""
    # Different ends: a prompt that waits enters while others are in their middle.
    limits = [max(subject.max_new_tokens - 2 * (i % 3), 1) for i in range(len(subject.rows))]
    num_slots = max(len(subject.rows) // 2, 1)
    generation = generate_greedily(subject, limits, num_slots)
    texts = [
        ids[mask].tolist()
        for ids, mask in zip(generation.response_ids, generation.response_mask, strict=True)
    ]
    with torchs_attention(subject.model):
        expected = [generate_plainly(subject, *of_row) for of_row in zip(subject.rows, limits, strict=True)]
        findings = [compare_texts(subject, texts, expected, num_slots)]
    wholes = [row + text for row, text in zip(subject.rows, texts, strict=True)]
    scored = score(build_policy(subject), wholes, starts=[len(row) for row in subject.rows])
    sampled = generation.logprobs[generation.response_mask]
    findings.append(compare("their log-probabilities", sampled, scored, subject.tolerance, _WHY_SAMPLED))
    return findings


def generate_greedily(subject: Subject, limits: Sequence[int], num_slots: int) -> Generation:
    """Return our texts of all rows, each with its own limit."""
    tokenizer, device = subject.tokenizer, subject.model.device
    ids, mask = pad_rows(subject.rows, tokenizer.pad_token_id, on_left=True)
    options = SamplingOptions(
        subject.max_new_tokens,
        stop_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        num_valid_tokens=subject.num_valid_tokens,
        do_sample=False,
    )
    generator = Generator(share_weights(subject.model), num_slots=num_slots)
    of_each = torch.tensor(limits, device=device)
    return generator.generate(
        ids.to(device), mask.to(device), torch.arange(len(ids), device=device), options, limits=of_each
    )


def generate_plainly(subject: Subject, row: Sequence[int], limit: int) -> list[int]:
    """Return transformers' greedy text of one row."""
    model, tokenizer = subject.model, subject.tokenizer
    num_rows = model.get_output_embeddings().weight.shape[0]
    # What a generation_config.json adds (penalties, more stop tokens) is no part of the comparison.
    model.generation_config = GenerationConfig()
    options = GenerationConfig(
        max_new_tokens=limit,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        suppress_tokens=list(range(subject.num_valid_tokens, num_rows)) or None,
        use_cache=True,
    )
    ids = torch.tensor([row], device=model.device)
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options)
    return whole[0, len(row) :].tolist()


def compare_texts(
    subject: Subject, texts: Sequence[list[int]], expected: Sequence[list[int]], num_slots: int
) -> Finding:
    """Return the finding on texts: where the first differs, whether that is a tie, or how many are equal."""
    tie = max(TIE, subject.tolerance)
    num_equal, ties = 0, []
    for i, (ours, theirs) in enumerate(zip(texts, expected, strict=True)):
        k = first_difference(ours, theirs)
        num_equal += k
        if ours == theirs:
            continue
        if k == min(len(ours), len(theirs)):
            told = f"prompt {i + 1}: ends after {len(ours)} tokens, transformers' after {len(theirs)}"
            return Finding("greedy texts", told, False, _WHY_TEXTS)
        logits = plain_logits(subject.model, subject.rows[i] + ours[:k])[-1]
        here, there = float(logits[ours[k]]), float(logits[theirs[k]])
        told = (
            f"prompt {i + 1}, token {k + 1}: {ours[k]} here (its logit {here:.4f}), {theirs[k]} by "
            f"transformers ({there:.4f})"
        )
        if not abs(here - there) < tie:
            return Finding(
                "greedy texts", f"{told}; less than {tie:.1e} apart would be a tie", False, _WHY_TEXTS
            )
        ties.append(f"; a tie, logits less than {tie:.1e} apart, at {told}")
    told = f"{num_equal} tokens of {len(texts)} texts in {num_slots} slots equal transformers'{''.join(ties)}"
    return Finding("greedy texts", told, True, _WHY_TEXTS)


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Return how many tokens two texts have in common at their beginning."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((k for k, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


@torch.inference_mode()
def check_flat(subject: Subject) -> list[Finding]:
    """Rows end to end in one, where the attention takes them."""
    if not takes_packed(subject.model):
        return [padded_rows_finding(subject.model)]
    found = score(build_policy(subject), subject.rows, is_packed=True)
    return [compare("end to end", found, subject.plain.logprobs, subject.tolerance, _WHY_FLAT)]


def padded_rows_finding(model: PreTrainedModel) -> Finding:
    """Return the remark on a model whose sequences are not laid end to end, with the reason."""
    reason = f"{type(model).__name__} does not tell its attention where sequences begin"
    if model.device.type != "cuda":
        reason = "only a GPU has a kernel for them"
    elif model.dtype == torch.float32:
        reason = "the kernel takes 16 bits, --dtype bf16"
    return Finding("end to end", f"padded rows are used: {reason}")
