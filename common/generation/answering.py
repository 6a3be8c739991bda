"""A saved model that answers conversations: what chat.py and step 1's prompt_eval.py share.

# B conversations, N answers to each
"""

import dataclasses
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from common import distributed, startup
from common.args import Problems, TokenizerArguments, flag
from common.data.collators import pad_rows
from common.data.example import Message
from common.dialogue import TEMPLATE_NAMES, Encoded, Template, build_template
from common.generation.decode_state import SamplingOptions
from common.generation.generate import Generator
from common.generation.inference_module import share_weights
from common.models import DTYPES, ModelOptions, load_causal_lm
from common.saving.export import read_metadata

_MIN_PROMPT_TOKENS = 8  # that stay, however long an answer may be
_ENDLESS_POSITIONS = 4096  # of a model without a limit of its own (ALiBi): what a terminal needs at most


@dataclass
class AnsweringArguments(TokenizerArguments):
    """In what form, precision and luck a model answers."""

    template: str = flag("", "dialogue form; empty: what the model was trained with", choices=TEMPLATE_NAMES)
    dtype: str = flag(
        "", "weights and activations; empty: bf16 on a GPU that has it, else fp32", choices=tuple(DTYPES)
    )
    seed: int = flag(1234, "seed of the sampling")


class Answerer:
    """A model, the dialogue form that it is asked in, and how it samples.

    The memory of keys and values is kept from call to call, and so is the count of answers, which names their
    random numbers: the same calls give the same answers, and a question asked again gets another one.
    """

    def __init__(self, model: PreTrainedModel, template: Template, options: SamplingOptions) -> None:
        limit = getattr(model.config, "max_position_embeddings", None) or _ENDLESS_POSITIONS
        num_new = max(min(options.max_new_tokens, limit - _MIN_PROMPT_TOKENS), 1)
        self.template, self.options = template, dataclasses.replace(options, max_new_tokens=num_new)
        self.max_prompt_tokens, self._max_length = limit - num_new, limit
        self._generator = Generator(share_weights(model))
        self._num_answers = 0

    def answer(self, conversations: Sequence[Sequence[Message]], *, num_samples: int = 1) -> list[list[str]]:
        """Return `num_samples` answers to each conversation; all are generated in one call.

        An answer has fewer than max_new_tokens tokens where the model's positions leave no room for them.
        """
        device, tokenizer = distributed.device(), self.template.tokenizer
        rows = [self._prompt_ids(tuple(messages)) for messages in conversations]
        prompt_ids, prompt_mask = pad_rows(rows, self.options.pad_token_id, on_left=True)
        num_answers = len(rows) * num_samples
        sample_ids = torch.arange(self._num_answers, self._num_answers + num_answers, device=device)
        self._num_answers += num_answers
        # A longer conversation needs a larger block: its size doubles, so that few turns have to make one.
        doubled = 1 << (prompt_ids.shape[1] + self.options.max_new_tokens - 1).bit_length()
        self._generator.max_length = min(doubled, self._max_length)
        found = self._generator.generate(
            prompt_ids.to(device), prompt_mask.to(device), sample_ids, self.options, num_samples=num_samples
        )
        texts = [
            tokenizer.decode(ids[mask], skip_special_tokens=True).strip()
            for ids, mask in zip(found.response_ids, found.response_mask, strict=True)
        ]
        return [texts[first : first + num_samples] for first in range(0, num_answers, num_samples)]

    def _prompt_ids(self, messages: tuple[Message, ...]) -> list[int]:
        """Return the ids of a prompt that fits: as many of the last turns as there is room for, whole.

        A system message stays. A last turn that is too long alone loses its beginning.
        """
        whole = self._encode(messages)
        if not whole.truncated:
            return whole.input_ids
        system = messages[:1] if messages[0].role == "system" else ()
        turns = [index for index, message in enumerate(messages) if message.role == "user"][1:]
        shorter = [messages, *(system + messages[index:] for index in turns)]
        first = bisect_left(shorter, True, key=lambda some: not self._encode(some).truncated)
        return self._encode(shorter[min(first, len(shorter) - 1)]).input_ids

    def _encode(self, messages: tuple[Message, ...]) -> Encoded:
        return self.template.encode(self.template.segments(messages, None), self.max_prompt_tokens)


def load_template(
    flag_name: str, path: str, args: AnsweringArguments, problems: Problems, *, trained_path: str = ""
) -> Template | None:
    """Return the form that the model of `path` is asked in, or None after adding why it cannot answer.

    That is --template, or else what the model of `trained_path` (empty: of `path`) was trained with.
    """
    if startup.check_model(flag_name, path, args, problems) is None:
        return None
    tokenizer = startup.check_tokenizer(flag_name, path, args, problems)
    if tokenizer is None:
        return None
    name = args.template or read_metadata(trained_path or path).get("template", "human_assistant")
    try:
        return build_template(name, tokenizer)
    except ValueError as error:
        problems.add(f"{flag_name} {path}: {error}")
        return None


def load_answerer(path: str, template: Template, args: AnsweringArguments, **sampling: Any) -> Answerer:
    """Return the model of `path`, ready to answer; `sampling` are fields of SamplingOptions."""
    tokenizer = template.tokenizer
    model_options = ModelOptions(
        path,
        dtype=args.dtype or distributed.default_dtype_name(),
        dropout=0.0,
        trust_remote_code=args.trust_remote_code,
    )
    options = SamplingOptions(
        stop_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        num_valid_tokens=len(tokenizer),
        seed=args.seed,
        **sampling,
    )
    model = load_causal_lm(model_options, len(tokenizer)).to(distributed.device())
    return Answerer(model, template, options)
