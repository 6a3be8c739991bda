"""A causal LM or a reward model under our own passes, against transformers' plain pass, one row at a time.

# S rows, N scored tokens, V vocabulary
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from common.data.packed_batch import pack_rows, pad_rows, token_positions
from common.generation.decode import SamplingOptions
from common.generation.generate import Generator
from common.generation.inference_module import share_weights
from common.models.model_inputs import (
    FLASH_ATTENTION,
    VARLEN_ATTENTION,
    ModelInputs,
    build_model_inputs,
    takes_packed,
)
from common.models.policy_model import PolicyModel
from common.models.value_model import ValueModel
from tools.terminal import paint, visible

# Of the largest number that is computed: rounding alone stays well below, an error in a formula well above.
RELATIVE = {"fp32": 3e-5, "bf16": 4e-2}
TIE = 1e-3  # logits closer than this change places with the order of additions
_STATES = {True: ("ok", "good"), False: ("FAIL", "bad"), None: ("note", "note")}


@dataclass(frozen=True)
class Finding:
    """One line of the report; `is_ok` None is a remark that decides nothing."""

    name: str
    text: str
    is_ok: bool | None = None
    why: str = ""

    def line(self) -> str:
        """Return state, name, what was found, and why it matters."""
        state, style = _STATES[self.is_ok]
        shown = paint(f"{state:<5}", style) + visible(f"{self.name:<25}{self.text}")
        return shown + paint(f"  ({self.why})", "context") if self.why else shown


def tolerance_of(dtype: str, largest: float) -> float:
    """Return how far apart numbers up to `largest` may be that are computed in different orders."""
    return RELATIVE[dtype] * max(largest, 1.0)


def compare(name: str, found: torch.Tensor, expected: torch.Tensor, tolerance: float, why: str) -> Finding:
    """Return the finding on two tensors of one shape; NaN in either is a failure."""
    difference = float((found.double() - expected.double().to(found.device)).abs().max())
    text = f"largest difference {difference:.1e}, at most {tolerance:.1e}"
    return Finding(name, text, difference <= tolerance, why)


@dataclass(frozen=True)
class Subject:
    """A model on its device, in eval mode, and what it is asked."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    rows: list[list[int]]
    dtype: str
    max_new_tokens: int


def plain_output(model: PreTrainedModel, row: Sequence[int]) -> torch.Tensor:
    """Return transformers' logits of a row alone, without mask and positions of ours, float64: (T, V) of a
    causal LM and (1,) of a classifier.

    The attention is torch's, transformers' own choice, in the place of a kernel that we chose.
    """
    ours = model.config._attn_implementation
    if ours in (VARLEN_ATTENTION, FLASH_ATTENTION):
        model.set_attn_implementation("sdpa")
    try:
        return model(input_ids=torch.tensor([row], device=model.device), use_cache=False).logits[0].double()
    finally:
        if ours in (VARLEN_ATTENTION, FLASH_ATTENTION):
            model.set_attn_implementation(ours)


def plain_logprobs(
    subject: Subject, rows: Sequence[Sequence[int]], starts: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return transformers' log-probabilities (N,) float64 of each row's tokens from its start on, what their
    logits lack to the largest (N,), and the tolerance of these numbers. Padded vocabulary is left out.
    """
    logprobs, gaps, largest = [], [], 0.0
    for row, start in zip(rows, starts, strict=True):
        logits = plain_output(subject.model, row)[start - 1 : -1, : len(subject.tokenizer)]
        token_ids = torch.tensor(row[start:], device=logits.device, dtype=torch.int64)
        chosen = logits.gather(1, token_ids.unsqueeze(1)).squeeze(1)
        logprobs.append(chosen - logits.logsumexp(-1))
        gaps.append(logits.amax(-1) - chosen)
        largest = max(largest, float(logits.abs().max()))
    return torch.cat(logprobs), torch.cat(gaps), tolerance_of(subject.dtype, largest)


def compare_layouts(
    name: str,
    subject: Subject,
    compute: Callable[[ModelInputs], torch.Tensor],
    expected: torch.Tensor,
    tolerance: float,
    why: str,
) -> Iterator[Finding]:
    """Yield the findings on what one pass of ours over all rows computes, padded and packed."""
    for is_packed in (False, True):
        name, why = ("packed rows", "--packed trains on such rows") if is_packed else (name, why)
        if is_packed and not takes_packed(subject.model):
            text = "padded rows are used: packed ones take a GPU, 16 bits, and attention that is told of them"
            yield Finding(name, text)
            continue
        packed = pack_rows(subject.rows)
        inputs = build_model_inputs(*packed, is_packed=is_packed, device=subject.model.device)
        yield compare(name, compute(inputs), expected, tolerance, why)


@torch.inference_mode()
def check_logprobs(subject: Subject) -> Iterator[Finding]:
    """Yield log-probabilities of all tokens but each row's first, and what the vocabulary's padding is."""
    num_tokens = len(subject.tokenizer)
    expected, _, tolerance = plain_logprobs(subject, subject.rows, [1] * len(subject.rows))
    policy = PolicyModel(subject.model, num_valid_tokens=num_tokens).eval()
    token_ids, lengths = pack_rows(subject.rows)
    is_scored = token_positions(lengths) > 0

    def score(inputs: ModelInputs) -> torch.Tensor:
        return policy(inputs, inputs.token_slots[is_scored], token_ids[is_scored])[0]

    why = "PPO's ratios and KL are differences of these"
    yield from compare_layouts("log-probabilities", subject, score, expected, tolerance, why)
    num_rows = subject.model.get_output_embeddings().weight.shape[0]
    if num_rows > num_tokens:
        text = f"{num_rows:,} rows for {num_tokens:,} tokens: the rest is left out of every softmax"
        yield Finding("vocabulary", text)


@torch.inference_mode()
def check_generation(subject: Subject) -> Iterator[Finding]:
    """Yield whether cached decoding, in fewer slots than there are prompts, takes transformers' likeliest
    tokens and gives them transformers' log-probabilities.
    """
    tokenizer, device, rows = subject.tokenizer, subject.model.device, subject.rows
    # Different ends: a prompt that waits enters while others are in their middle.
    limits = [max(subject.max_new_tokens - 2 * (i % 3), 1) for i in range(len(rows))]
    ids, mask = pad_rows(rows, tokenizer.pad_token_id, on_left=True)
    options = SamplingOptions(
        subject.max_new_tokens,
        stop_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        num_valid_tokens=len(subject.tokenizer),
        do_sample=False,
    )
    prompt_ids = torch.arange(len(ids), device=device)
    generation = Generator(share_weights(subject.model), num_slots=len(rows) // 2).generate(
        ids.to(device), mask.to(device), prompt_ids, options, limits=torch.tensor(limits, device=device)
    )
    pairs = zip(rows, generation.response_ids, generation.response_mask, strict=True)
    texts = [row + response[is_token].tolist() for row, response, is_token in pairs]
    expected, gaps, tolerance = plain_logprobs(subject, texts, [len(row) for row in rows])
    yield likeliest_finding(gaps, max(TIE, tolerance))
    sampled = generation.logprobs[generation.response_mask]
    why = "the sampler's and the scorer's numbers meet in PPO's ratio"
    yield compare("their log-probabilities", sampled, expected, tolerance, why)


def likeliest_finding(gaps: torch.Tensor, tie: float) -> Finding:
    """Return whether each token of greedy texts is transformers' likeliest; `gaps` (N,) is what their logits
    lack to the largest, and less than `tie` is a tie.
    """
    largest, num_wrong = float(gaps.max()), int((~(gaps < tie)).sum())  # NaN is no tie
    if num_wrong:
        text = f"{num_wrong} of {len(gaps)} tokens are not transformers' likeliest"
        text += f": a logit is {largest:.4f} lower; less than {tie:.1e} would be a tie"
    else:
        text = f"{len(gaps)} tokens are transformers' likeliest, {int((gaps > 0).sum())} of them by a tie"
    return Finding("cached decoding", text, num_wrong == 0, "PPO learns from what is generated here")


@torch.inference_mode()
def check_scores(subject: Subject, value_model: ValueModel) -> Iterator[Finding]:
    """Yield scores of a padded and of a packed batch, whatever the saved pad id is."""
    config = subject.model.config.get_text_config()
    pad, config.pad_token_id = config.pad_token_id, None  # without it transformers scores the last token
    try:
        expected = torch.cat([plain_output(subject.model, row) for row in subject.rows])
    finally:
        config.pad_token_id = pad
    tolerance = tolerance_of(subject.dtype, float(expected.abs().max()))

    def score(inputs: ModelInputs) -> torch.Tensor:
        return value_model(inputs, inputs.last_slots)

    yield from compare_layouts("scores", subject, score, expected, tolerance, "these are PPO's rewards")
