"""A saved model that answers conversations: for chat.py, prompt_eval.py and the arena.

# B conversations, N answers to each
"""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from common.data.dialogue import TEMPLATE_NAMES, Template
from common.data.example import Message
from common.data.packed_batch import pad_rows
from common.flags.args import Problems, TokenizerArguments, flag
from common.generation.decode import SamplingOptions
from common.generation.generate import Generator
from common.generation.inference_module import share_weights
from common.models.loading import DTYPES, ModelOptions, load_causal_lm
from common.models.lora import base_of_adapter, is_adapter, merge_adapter
from common.programs import startup
from common.ranks import distributed
from serving.text_stream import TIDIED_CHARACTERS, TextStream

_MIN_PROMPT_TOKENS = 8  # that stay, however long an answer may be
_ENDLESS_POSITIONS = 4096  # of a model without a limit of its own (ALiBi): what a terminal needs at most


@dataclass
class AnsweringArguments(TokenizerArguments):
    """In what form and precision a model answers."""

    template: str = flag("", "dialogue form; empty: what the model was trained with", choices=TEMPLATE_NAMES)
    dtype: str = flag(
        "", "weights and activations; empty: bf16 on a GPU that has it, else fp32", choices=tuple(DTYPES)
    )


@dataclass(frozen=True)
class Answer:
    """What a model said, and why it stopped there."""

    text: str
    token_ids: list[int]  # as sampled, the stop token included
    finish_reason: str  # "stop": it was at its end, or at a stop text; "length": at the limit; "cancelled"
    num_prompt_tokens: int


TextCallback = Callable[[int, str], bool]  # gets (number of the answer, its next text); True: no more of it


class Answerer:
    """A model, the dialogue form that it is asked in, and how it samples.

    The memory of keys and values is kept from call to call, and so is the count of answers, which names their
    random numbers: the same calls give the same answers, and a question asked again gets another one.
    """

    def __init__(self, model: PreTrainedModel, template: Template, options: SamplingOptions) -> None:
        limit = getattr(model.config, "max_position_embeddings", None) or _ENDLESS_POSITIONS
        num_new = max(min(options.max_new_tokens, limit - _MIN_PROMPT_TOKENS), 1)
        self.template, self.options = template, dataclasses.replace(options, max_new_tokens=num_new)
        self.max_prompt_tokens, self.max_length = limit - num_new, limit
        self.model = model
        self._generator = Generator(share_weights(model))
        self._num_answers = 0

    def answer(
        self,
        conversations: Sequence[Sequence[Message]],
        *,
        num_samples: int = 1,
        on_text: TextCallback | None = None,
    ) -> list[list[str]]:
        """Return `num_samples` answers to each conversation; all are generated in one call.

        An answer has fewer than max_new_tokens tokens where the model's positions leave no room for them.
        `on_text`: see `respond`.
        """
        rows = [self._prompt_ids(tuple(messages)) for messages in conversations]
        answers = self.respond(rows, num_samples=num_samples, on_text=on_text)
        return [[answer.text for answer in of_one] for of_one in answers]

    def respond(
        self,
        rows: Sequence[list[int]],
        *,
        num_samples: int = 1,
        options: SamplingOptions | None = None,
        max_new_tokens: int = 0,
        stop: Sequence[str] = (),
        keeps_space: bool = False,
        first_sample_id: int | None = None,
        on_text: TextCallback | None = None,
    ) -> list[list[Answer]]:
        """Return `num_samples` answers to each prompt of token ids, which must leave room for one token.

        `options` with the Answerer's own max_new_tokens; `max_new_tokens` (0: those of the options) is a
        lower limit. An answer ends before the first of the texts `stop`, and loses the white
        space around it unless it `keeps_space`. `first_sample_id` names the random
        numbers of the first answer, the next are the others'; None: numbers that were not used yet.
        `on_text` gets the answers' texts piece by piece; put together they are the answers.
        """
        device, options = distributed.device(), options or self.options
        prompt_ids, prompt_mask = pad_rows(list(rows), options.pad_token_id, on_left=True)
        num_answers = len(rows) * num_samples
        if first_sample_id is None:
            first_sample_id, self._num_answers = self._num_answers, self._num_answers + num_answers
        sample_ids = torch.arange(first_sample_id, first_sample_id + num_answers, device=device)
        most = min(max_new_tokens or options.max_new_tokens, options.max_new_tokens)
        limits = [min(most, self.max_length - len(row)) for row in rows for _ in range(num_samples)]
        if min(limits, default=1) < 1:
            raise ValueError(f"a prompt has no room for an answer in the model's {self.max_length} positions")
        streams = [self._text_stream(stop, keeps_space) for _ in range(num_answers)]
        texts = _AnswerTexts(streams, options.stop_token_id, on_text)
        # A longer conversation needs a larger block: its size doubles, so that few turns have to make one.
        doubled = 1 << (prompt_ids.shape[1] + options.max_new_tokens - 1).bit_length()
        self._generator.max_length = min(doubled, self.max_length)
        found = self._generator.generate(
            prompt_ids.to(device),
            prompt_mask.to(device),
            sample_ids,
            options,
            num_samples=num_samples,
            limits=torch.tensor(limits, device=device),
            on_tokens=texts.add if on_text or stop else None,
        )
        answers = []
        for sample, (ids, mask) in enumerate(zip(found.response_ids, found.response_mask, strict=True)):
            token_ids = ids[mask].tolist()
            text, reason = texts.finish(sample, token_ids, bool(found.is_finished[sample]))
            answers.append(Answer(text, token_ids, reason, len(rows[sample // num_samples])))
        return [answers[first : first + num_samples] for first in range(0, num_answers, num_samples)]

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a whole conversation, however long, up to where the answer follows.

        Raises BadRow, a ValueError, when the template cannot show it.
        """
        segments = self.template.segments(tuple(messages), None)
        return self.template.encode(segments, sys.maxsize).input_ids

    def _text_stream(self, stop: Sequence[str], keeps_space: bool) -> TextStream:
        tokenizer = self.template.tokenizer
        return TextStream(
            lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
            tokenizer.convert_ids_to_tokens,
            stop=stop,
            keeps_space=keeps_space,
            num_unsettled=TIDIED_CHARACTERS if tokenizer.clean_up_tokenization_spaces else 0,
        )

    def _prompt_ids(self, messages: tuple[Message, ...]) -> list[int]:
        """Return the ids of a prompt that fits: see `Template.shorten`; what is too long still is cut."""
        shorter = self.template.shorten(messages, self.max_prompt_tokens)
        return self.template.encode(self.template.segments(shorter, None), self.max_prompt_tokens).input_ids


class _AnswerTexts:
    """The texts of answers while their tokens are sampled, and who wanted no more of them."""

    def __init__(self, streams: list[TextStream], stop_token_id: int, on_text: TextCallback | None) -> None:
        self.streams, self.stop_token_id, self.on_text = streams, stop_token_id, on_text
        self.cancelled: set[int] = set()

    def add(self, sample: int, token_ids: list[int]) -> bool:
        """Take new tokens; return whether the answer shall end with them."""
        stream = self.streams[sample]
        self._tell(sample, stream.add([i for i in token_ids if i != self.stop_token_id]))
        return stream.is_stopped or sample in self.cancelled

    def finish(self, sample: int, token_ids: list[int], is_finished: bool) -> tuple[str, str]:
        """Return the whole answer and why it ended; its tokens are taken now if none was before."""
        stream = self.streams[sample]
        if not stream.token_ids:
            stream.add([i for i in token_ids if i != self.stop_token_id])
        self._tell(sample, stream.finish())
        if sample in self.cancelled:
            return stream.told, "cancelled"
        return stream.told, "stop" if stream.is_stopped or is_finished else "length"

    def _tell(self, sample: int, text: str) -> None:
        if text and self.on_text and sample not in self.cancelled and self.on_text(sample, text):
            self.cancelled.add(sample)


def name_leading_words(flag_name: str, argv: list[str]) -> list[str]:
    """Return a command line whose words before the first flag are this flag's: `chat.py PATH`."""
    starts_with_word = bool(argv) and not argv[0].startswith("-")
    return [flag_name, *argv] if starts_with_word else argv


def load_template(
    flag_name: str, path: str, args: AnsweringArguments, problems: Problems, *, trained_path: str = ""
) -> Template | None:
    """Return the form that the model of `path` is asked in, or None after adding why it cannot answer.

    That is --template, or else what the model of `trained_path` (empty: of `path`) was trained with.
    """
    base = path
    if is_adapter(path):
        try:
            base = base_of_adapter(path)
        except ValueError as error:
            problems.add(f"{flag_name} {error}")
            return None
    if startup.check_model(flag_name, base, args, problems) is None:
        return None
    has_own = (Path(path) / "tokenizer_config.json").exists()  # adapters of other origin have none
    tokenizer = startup.check_tokenizer(flag_name, path if has_own else base, args, problems)
    if tokenizer is None:
        return None
    own = dataclasses.replace(args)  # each model has a template of its own
    template, notes = startup.find_template(flag_name, trained_path or path, own, tokenizer, problems)
    startup.print_note(*notes)
    return template


def load_answerer(path: str, template: Template, args: AnsweringArguments, **sampling: Any) -> Answerer:
    """Return the model of `path`, ready to answer; `sampling` are fields of SamplingOptions.

    Raises ValueError when its weights cannot be loaded.
    """
    tokenizer = template.tokenizer
    model_options = ModelOptions(
        base_of_adapter(path) if is_adapter(path) else path,
        dtype=distributed.dtype_name(args.dtype),
        dropout=0.0,
        trust_remote_code=args.trust_remote_code,
    )
    options = SamplingOptions(
        stop_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        num_valid_tokens=len(tokenizer),
        **sampling,
    )
    model = load_causal_lm(model_options, len(tokenizer))
    if is_adapter(path):
        model = merge_adapter(model, path)
    model = model.to(distributed.device())
    return Answerer(model, template, options)
