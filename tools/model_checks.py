"""A causal LM or a reward model under our own passes, against transformers' plain pass, one row at a time.

# S rows, N scored tokens, V vocabulary
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from common.data.packed_batch import pack_rows, pad_rows, token_positions
from common.generation.decode import SamplingOptions
from common.generation.generate import Generator
from common.generation.inference_module import share_weights
from common.models.loading import plain_model
from common.models.model_inputs import ModelInputs, build_model_inputs
from common.models.policy_model import PolicyModel
from common.models.value_model import ValueModel
from common.models.varlen_attention import FLASH_ATTENTION, NAME, takes_packed
from tools.findings import Finding, compare, tolerance_of

UNPACKED = Finding(
    "packed rows", "padded rows are used: packed ones take a GPU, 16 bits, and attention that is told of them"
)
TIE = 1e-3  # logits closer than this change places with the order of additions


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

    def inputs(self, *, is_packed: bool) -> ModelInputs:
        """Return the rows as a pass of ours reads them."""
        return build_model_inputs(*pack_rows(self.rows), is_packed=is_packed, device=self.model.device)


def plain_outputs(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Return transformers' logits of each row alone, without mask and positions of ours, float64.

    They are (T, V) of a causal LM and (1,) of a classifier. The attention is torch's, transformers' own
    choice, in the place of a kernel that we chose.
    """
    ours = model.config._attn_implementation
    if ours in (NAME, FLASH_ATTENTION):
        model.set_attn_implementation("sdpa")
    try:
        ids = [torch.tensor([row], device=model.device) for row in rows]
        return [model(input_ids=row, use_cache=False).logits[0].double() for row in ids]
    finally:
        if ours in (NAME, FLASH_ATTENTION):
            model.set_attn_implementation(ours)


# ---- causal LMs -----------------------------------------------------------------------------------------


def score(subject: Subject, *, is_packed: bool) -> torch.Tensor:
    """Return (N,) log-probabilities in one pass of ours, of all tokens but each row's first."""
    policy = PolicyModel(subject.model, num_valid_tokens=subject.num_valid_tokens).eval()
    inputs = subject.inputs(is_packed=is_packed)
    token_ids, lengths = pack_rows(subject.rows)
    is_scored = token_positions(lengths) > 0
    return policy(inputs, inputs.token_slots[is_scored], token_ids[is_scored])[0]


class PlainScores(NamedTuple):
    """What transformers' logits say of the last tokens of a row."""

    logprobs: torch.Tensor  # (N,) float64, padded vocabulary left out
    behind: torch.Tensor  # (N,) the most logit that another token had above theirs
    largest: float  # logit, without its sign


def plain_scores(subject: Subject, row: Sequence[int], start: int) -> PlainScores:
    """Return transformers' scores of a row's tokens from `start` on."""
    [output] = plain_outputs(subject.model, [row])
    logits = output[start - 1 : -1, : subject.num_valid_tokens]
    chosen = torch.tensor(row[start:], device=logits.device, dtype=torch.int64).unsqueeze(1)
    behind = logits.amax(-1) - logits.gather(1, chosen).squeeze(1)
    return PlainScores(logits.log_softmax(-1).gather(1, chosen).squeeze(1), behind, float(output.abs().max()))


@torch.inference_mode()
def check_logprobs(subject: Subject) -> Iterator[Finding]:
    """Yield log-probabilities of a padded and of a packed batch, and what the vocabulary's padding is."""
    plain = [plain_scores(subject, row, 1) for row in subject.rows]
    expected = torch.cat([scores.logprobs for scores in plain])
    tolerance = tolerance_of(subject.dtype, max(scores.largest for scores in plain))
    why = "PPO's ratios and KL are differences of these"
    yield compare("log-probabilities", score(subject, is_packed=False), expected, tolerance, why)
    if takes_packed(subject.model):
        found = score(subject, is_packed=True)
        yield compare("packed rows", found, expected, tolerance, "--packed trains on such rows")
    else:
        yield UNPACKED
    num_rows = subject.model.get_output_embeddings().weight.shape[0]
    if num_rows > subject.num_valid_tokens:
        what = f"{num_rows:,} rows for {subject.num_valid_tokens:,} tokens"
        yield Finding("vocabulary", f"{what}: the rest is left out of every softmax")


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
        num_valid_tokens=subject.num_valid_tokens,
        do_sample=False,
    )
    prompt_ids = torch.arange(len(ids), device=device)
    generation = Generator(share_weights(subject.model), num_slots=len(rows) // 2).generate(
        ids.to(device), mask.to(device), prompt_ids, options, limits=torch.tensor(limits, device=device)
    )
    pairs = zip(generation.response_ids, generation.response_mask, strict=True)
    texts = [response[is_token].tolist() for response, is_token in pairs]
    plain = [plain_scores(subject, row + text, len(row)) for row, text in zip(rows, texts, strict=True)]
    tolerance = tolerance_of(subject.dtype, max(scores.largest for scores in plain))
    gaps = [scores.behind for scores in plain]
    yield text_finding(texts, limits, gaps, tokenizer.eos_token_id, max(TIE, tolerance))
    sampled = generation.logprobs[generation.response_mask]
    why = "the sampler's and the scorer's numbers meet in PPO's ratio"
    expected = torch.cat([scores.logprobs for scores in plain])
    yield compare("their log-probabilities", sampled, expected, tolerance, why)


def text_finding(
    texts: Sequence[Sequence[int]], limits: Sequence[int], gaps: Sequence[torch.Tensor], eos: int, tie: float
) -> Finding:
    """Return the finding on greedy texts: each token is the likeliest or ties, each text ends where it must.

    `gaps` (N,) of each text is what its tokens' logits lack to the largest; less than `tie` is a tie.
    """
    name, why = "cached decoding", "PPO learns from what is generated here"
    for i, (text, limit, behind) in enumerate(zip(texts, limits, gaps, strict=True), start=1):
        end = text.index(eos) + 1 if eos in text else limit
        if len(text) != end:
            return Finding(name, f"prompt {i}: ends after {len(text)} tokens, not {end}", False, why)
        if not float(behind.max()) < tie:  # NaN is no tie
            at = int(behind.argmax())
            what = f"prompt {i}, token {at + 1}: {text[at]} is not transformers' likeliest"
            gap = f"its logit is {float(behind[at]):.4f} lower; less than {tie:.1e} would be a tie"
            return Finding(name, f"{what}, {gap}", False, why)
    num_tokens, num_ties = sum(map(len, texts)), sum(int((behind > 0).sum()) for behind in gaps)
    ties = f", {num_ties} of them by a tie (logits less than {tie:.1e} apart)" if num_ties else ""
    told = f"{num_tokens} tokens of {len(texts)} texts are transformers' likeliest{ties}"
    return Finding(name, told, True, why)


# ---- reward models --------------------------------------------------------------------------------------


@torch.inference_mode()
def check_scores(subject: Subject, value_model: ValueModel) -> Iterator[Finding]:
    """Yield scores of a padded and of a packed batch, and what the saved pad id would do."""
    model = plain_model(value_model.classifier)
    config, ours = model.config.get_text_config(), type(model.score)
    pad, eos = config.pad_token_id, subject.tokenizer.eos_token_id
    # With its own head, and without a pad id, transformers scores the last token of a row.
    model.score.__class__, config.pad_token_id = nn.Linear, None
    try:
        expected = torch.cat(plain_outputs(model, subject.rows))
    finally:
        model.score.__class__, config.pad_token_id = ours, pad
    tolerance = tolerance_of(subject.dtype, float(expected.abs().max()))
    for name, is_packed, why in (
        ("scores", False, "these are PPO's rewards"),
        ("packed rows", True, "--packed trains on such rows"),
    ):
        if is_packed and not takes_packed(model):
            yield UNPACKED
            continue
        inputs = subject.inputs(is_packed=is_packed)
        yield compare(name, value_model(inputs, inputs.last_slots), expected, tolerance, why)
    why = "transformers looks for padding, our programs count lengths"
    if pad is None:
        text = "the config has none: transformers alone scores one row at a time, our programs any number"
        yield Finding("pad id", text, None, why)
    elif pad == eos:
        text = f"{pad} is the end of turn too: transformers alone scores the token before it"
        yield Finding("pad id", text, None, why)
