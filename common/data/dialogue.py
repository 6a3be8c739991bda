"""Dialogue templates: messages to text, text to token ids and response mask.

One tokenisation of the whole text gives both: a token belongs to the response if its character offset does.
Parts are never tokenised separately, so tokens at borders are those of the whole text.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from common.data.example import BadRow, Message, Turn
from common.data.tokenizer import adds_bos

_JINJA = Path(__file__).with_name("human_assistant.jinja")
BATCH_TEXTS = 64  # texts tokenised per call
EXCHANGE = (Message("user", "probe question"), Message("assistant", "probe reply"))


class Segment(NamedTuple):
    """A part of a row's text; the segments of a row, end to end, are its exact text."""

    text: str
    is_response: bool


class Tokenised(NamedTuple):
    """Token ids of a row, with its response mask (True = a token of the response)."""

    input_ids: list[int]
    response_mask: list[bool]
    straddles: bool  # a token crosses from context into response
    is_truncated: bool = False


class Template(ABC):
    """Text and tokens of a dialogue. Subclasses write the text: `_segments` and `_text_after_reply`."""

    name: str
    description: str  # for people
    _form = ""  # everything besides the name that determines the text
    keeps_headers = False  # role headers must not be cut: rows are shortened by turns, see `shorten`
    is_verbatim = False  # white space around a message is kept
    _lead = ""  # BOS as text, before a dialogue

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Keep a private copy of the tokenizer's fast core, whose offsets are not trimmed."""
        self.tokenizer = tokenizer
        self.eot_token: str = tokenizer.eos_token
        self.eot_id: int = tokenizer.eos_token_id
        self.closing_ids: list[int] = []  # after the end-of-turn token of a dialogue's last reply
        self.bos_id: int | None = tokenizer.bos_token_id if adds_bos(tokenizer) else None
        # A byte-level post-processor may trim spaces from offsets, which would hide a straddling token.
        self._fast = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._fast.post_processor = processors.ByteLevel(trim_offsets=False)
        self._fast.no_padding()
        self._fast.no_truncation()

    def segments(
        self,
        prompt: Sequence[Message],
        response: str | Message | None,
        *,
        learn_all_turns: bool = False,
        tools: str = "",
    ) -> list[Segment]:
        """The text of a dialogue: context segments, and the response, which ends with the end-of-turn token.

        With `response` None the text ends where the model's reply starts. `learn_all_turns` marks the
        assistant's turns in `prompt` as responses too, each with its end-of-turn token; those that are not
        `is_learned` stay context. `tools` is a JSON list. Raises BadRow if the template cannot render
        this dialogue; RewritesPast if it changes earlier turns when another follows.
        """
        reply = Message("assistant", response) if isinstance(response, str) else response
        return self._segments(tuple(prompt), reply, learn_all_turns, tools)

    @abstractmethod
    def _segments(
        self, prompt: tuple[Message, ...], reply: Message | None, learn_all_turns: bool, tools: str
    ) -> list[Segment]:
        """See `segments`."""

    @abstractmethod
    def continued(self, messages: Sequence[Message]) -> list[Segment]:
        """The text of a dialogue whose last message is the start of a reply, which the model continues."""

    @abstractmethod
    def _text_after_reply(self, messages: Sequence[Message]) -> str:
        """Text of messages after a reply's end-of-turn token, up to the start of the next reply."""

    @property
    def chat_template(self) -> Any:
        """The chat template of an export's tokenizer."""
        return self.tokenizer.chat_template

    def text_segments(self, text: str) -> list[Segment]:
        """A plain text, trained on as a whole, and the end-of-turn token."""
        return [Segment(self._without_eot(text) + self.eot_token, True)]

    def prompt_text(self, prompt: Sequence[Message], tools: str = "") -> str:
        """The exact text of a prompt, up to the start of the model's reply."""
        return "".join(segment.text for segment in self.segments(prompt, None, tools=tools))

    def shorten(self, prompt: Sequence[Message], max_tokens: int, tools: str = "") -> tuple[Message, ...]:
        """A prompt of at most `max_tokens`, or one question: the oldest turns are dropped, each as a whole.

        A system message stays.
        """
        system = tuple(prompt[:1]) if prompt[0].role == "system" else ()
        starts = [index for index, message in enumerate(prompt) if message.role == "user"][1:]
        shorter = [tuple(prompt), *(system + tuple(prompt[index:]) for index in starts)]
        first = bisect_left(shorter, True, key=lambda turns: self._count_tokens(turns, tools) <= max_tokens)
        return shorter[min(first, len(shorter) - 1)]

    def _count_tokens(self, prompt: Sequence[Message], tools: str) -> int:
        return len(self.tokenise_batch([self.segments(prompt, None, tools=tools)])[0].input_ids)

    def continue_ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of messages after a reply: from its end-of-turn token to the start of the next reply.

        They depend on these messages only, not on the tokens of the reply. Raises BadRow if the template
        cannot render them.
        """
        text = self._text_after_reply(messages)
        eot, *ids = self._fast.encode(self.eot_token + text, add_special_tokens=False).ids
        assert eot == self.eot_id
        return ids

    def encode(self, segments: Sequence[Segment], max_tokens: int) -> Tokenised:
        """Ids and response mask of a row of at most `max_tokens`; see `truncate`."""
        return truncate(self.tokenise_batch([segments])[0], max_tokens, bos_id=self.bos_id)

    def tokenise_batch(self, rows: Sequence[Sequence[Segment]]) -> list[Tokenised]:
        """Ids and response masks of many rows, each from one tokenisation; bos is added at most once."""
        # Offsets take one Python tuple per token: all documents at once would need too much memory.
        result: list[Tokenised] = []
        for start in range(0, len(rows), BATCH_TEXTS):
            batch = [self._led(segments) for segments in rows[start : start + BATCH_TEXTS]]
            texts = ["".join(segment.text for segment in segments) for segments in batch]
            encodings = self._fast.encode_batch(texts, add_special_tokens=False)
            result += [self._tokenised(segments, enc) for segments, enc in zip(batch, encodings, strict=True)]
        return result

    def _lead_with_bos(self) -> None:
        """Tokenise BOS with the text, as other programs do with `chat_template`, if that makes a difference:
        Llama 2's tokenizer adds a space to the start of a text, but not after BOS.
        """
        if self.bos_id is not None:
            bos = self.tokenizer.bos_token
            plain, led = (self._fast.encode(f"{x}\n", add_special_tokens=False).ids for x in ("", bos))
            if led != [self.bos_id, *plain]:
                self._lead = bos
                self._form += bos

    def _led(self, segments: Sequence[Segment]) -> Sequence[Segment]:
        """A dialogue after `_lead`; a text that is learned as a whole stays as it is."""
        has_lead = not self._lead or segments[0].is_response or segments[0].text.startswith(self._lead)
        return segments if has_lead else [Segment(self._lead, False), *segments]

    def _tokenised(self, segments: Sequence[Segment], encoding) -> Tokenised:
        input_ids: list[int] = encoding.ids
        spans: list[tuple[int, int]] = encoding.offsets
        starts = [span[0] for span in spans]
        ends = list(accumulate(len(segment.text) for segment in segments))
        borders = [bisect_left(starts, end) for end in ends]  # first token after each segment
        mask: list[bool] = []
        for segment, border in zip(segments, borders, strict=True):
            mask += [segment.is_response] * (border - len(mask))
        mask += [False] * (len(input_ids) - len(mask))
        straddles = any(
            response.is_response and border > 0 and spans[border - 1][1] > end
            for response, border, end in zip(segments[1:], borders, ends, strict=False)
        )
        if self.bos_id is not None and input_ids[:1] != [self.bos_id]:
            input_ids = [self.bos_id, *input_ids]
            mask = [False, *mask]
        return Tokenised(input_ids, mask, straddles)

    def digest(self) -> str:
        """Digest of the vocabulary, the added tokens, the special ids and the template."""
        parts = [self.name, self._fast.to_str(), self.eot_token, self.eot_id, self.bos_id, self._form]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def _without_eot(self, text: str) -> str:
        """A reply without the end-of-turn text, which some data sets include: it must occur only once."""
        bare = text.rstrip()
        return bare[: -len(self.eot_token)] if bare.endswith(self.eot_token) else text


class HumanAssistantTemplate(Template):
    r"""The form of Anthropic/hh-rlhf: "\n\nHuman: q\n\nAssistant:" + " reply" + eot."""

    name = "human_assistant"
    description = "Human:/Assistant: text"
    _LABELS = {"system": "", "user": "\n\nHuman: ", "assistant": "\n\nAssistant: "}

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """See `Template`."""
        super().__init__(tokenizer)
        self._lead_with_bos()

    @property
    def chat_template(self) -> str:
        """The form as a chat template of transformers, with an end-of-turn token after each reply."""
        bos = "" if self.bos_id is None else "{{- bos_token }}"
        values = f"{json.dumps(self._LABELS)}, {json.dumps(self.is_verbatim)}"
        return f"{{%- set labels, by_letter = {values} %}}{bos}\n{_JINJA.read_text().strip()}"

    def _segments(
        self, prompt: tuple[Message, ...], reply: Message | None, learn_all_turns: bool, tools: str
    ) -> list[Segment]:
        if tools:
            raise self._cannot_render("tools")
        context = self._context(prompt, learn_all_turns)
        return context if reply is None else [*context, self._response(reply)]

    def continued(self, messages: Sequence[Message]) -> list[Segment]:
        """See `Template.continued`; every earlier reply ends with the end-of-turn token."""
        *prompt, start = messages
        return [*self._context(prompt, True), Segment(f" {start.content.strip()}", False)]

    def _context(self, prompt: Sequence[Message], learn_all_turns: bool) -> list[Segment]:
        """Segments up to the start of the reply; white space around turns is stripped."""
        result: list[Segment] = []
        context = ""
        cue = self._LABELS["assistant"].rstrip()
        if "system" in [message.role for message in prompt[1:]]:
            raise self._cannot_render("a system message after the first message")
        for message in prompt:
            if message.role not in self._LABELS:
                raise self._cannot_render(f"turns of {message.role}")
            response = self._response(message)
            if learn_all_turns and message.role == "assistant" and message.is_learned:
                result += [Segment(context + cue, False), response]
                context = ""
            else:
                context += self._LABELS[message.role] + message.content.strip()
        return [*result, Segment(context + cue, False)]

    def _response(self, reply: Message) -> Segment:
        if reply.extras:
            raise self._cannot_render(next(iter(json.loads(reply.extras))))
        return Segment(f" {self._without_eot(reply.content).strip()}{self.eot_token}", True)

    def _cannot_render(self, part: str) -> BadRow:
        return BadRow(f"--template {self.name} cannot render {part}; --template chat may")

    def _text_after_reply(self, messages: Sequence[Message]) -> str:
        return "".join(segment.text for segment in self._context((*EXCHANGE, *messages), True)[2:])


class OneLineTemplate(HumanAssistantTemplate):
    """DeepSpeed-Chat's own form: " Human: q Assistant:" + " reply" + eot, turns on one line."""

    name = "one_line"
    description = "Human: Assistant: text on one line"
    _LABELS = {"system": "", "user": " Human: ", "assistant": " Assistant: "}


class PlainTemplate(HumanAssistantTemplate):
    """A bare prompt and its continuation, both unchanged; dialogues use Human:/Assistant: labels."""

    name = "plain"
    description = "plain text"
    is_verbatim = True

    def _segments(
        self, prompt: tuple[Message, ...], reply: Message | None, learn_all_turns: bool, tools: str
    ) -> list[Segment]:
        """See `Template.segments`; a single user message that is not a row's `Turn` is left unchanged."""
        if tools or [message.role for message in prompt] != ["user"] or isinstance(prompt[0], Turn):
            return super()._segments(prompt, reply, learn_all_turns, tools)
        context = [Segment(prompt[0].content, False)]
        if reply is None:
            return context
        self._response(reply)  # raises BadRow for a reply that the form cannot render
        return context + self.text_segments(reply.content)

    def _text_after_reply(self, messages: Sequence[Message]) -> str:
        return "".join(message.content for message in messages)


def response_start(response_mask: Sequence[bool]) -> int:
    """Index of the first token of the response at the end of the row; the row's length without one."""
    start = len(response_mask)
    while start > 0 and response_mask[start - 1]:
        start -= 1
    return start


def truncate(
    row: Tokenised,
    max_tokens: int,
    *,
    bos_id: int | None = None,
    max_response_tokens: int = 0,
    min_context_tokens: int = 1,
) -> Tokenised:
    """A row of at most `max_tokens`: context is truncated on its left (BOS stays), then the response at its
    end.

    At least `min_context_tokens` of context are kept if there are as many: 1 or more, so that every response
    token has one before it. `max_response_tokens`, if larger, replaces the length of this row's response:
    that of a pair's other response, so that both keep the same context.
    """
    input_ids, mask = row.input_ids, row.response_mask
    start = response_start(mask)
    room = max(len(input_ids) - start, max_response_tokens)
    if start + room <= max_tokens:
        return row
    kept_context = min(start, max(max_tokens - room, min_context_tokens))
    end = min(len(input_ids), start + max_tokens - kept_context)
    kept = list(range(start - kept_context, end))
    if input_ids[0] == bos_id:
        kept[0] = 0
    return row._replace(
        input_ids=[input_ids[i] for i in kept], response_mask=[mask[i] for i in kept], is_truncated=True
    )
