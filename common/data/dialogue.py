"""Tokenizers with an end of turn; dialogue templates: messages to text, text to token ids and response mask.

One tokenisation of the whole text gives both: where a token starts, by its character offset, says whether it
belongs to the response. Nothing is tokenised in parts, so no token at a border differs from what the model
would read.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from common.data.example import BadRow, Message, Turn
from common.ranks.failures import first_line

GAP = " ... "  # stands where a question has lost its middle
BATCH_TEXTS = 64  # tokenised in one call


def load_tokenizer(
    name_or_path: str,
    *,
    eot_token: str | None = None,
    add_eot_token: bool = False,
    trust_remote_code: bool = False,
    flag: str = "--model_name_or_path",
) -> PreTrainedTokenizerFast:
    """Return a fast tokenizer whose eos ends a turn and whose pad is set.

    `eot_token` replaces the tokenizer's own eos; it must be one id already, unless `add_eot_token` lets it be
    a new one (the embeddings of the model must then grow). No existing id changes. PAD may be the same id as
    EOS. Raises ValueError: no tokenizer there, no fast one, no eos, or an end-of-turn token of several ids;
    `flag` is named.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name_or_path, use_fast=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # transformers raises OSError, KeyError, TypeError, ... by what is missing
        raise ValueError(
            f"{flag} {name_or_path}: no tokenizer could be loaded ({first_line(error)}); "
            "give a folder that holds tokenizer.json, or a hub name that can be reached"
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{flag} {name_or_path}: {type(tokenizer).__name__} has no fast form, and response masks need "
            "its character offsets; save the model with a tokenizer.json"
        )
    eot = eot_token or tokenizer.eos_token
    if not eot:
        raise ValueError(
            f"the tokenizer of {name_or_path} has no eos token, so no reply could end; name one of its "
            "tokens by --eot_token, or add a new one by --eot_token '<|endoftext|>' --add_eot_token"
        )
    if eot not in tokenizer.get_vocab() and not add_eot_token:
        pieces = tokenizer.tokenize(eot)
        raise ValueError(
            f"--eot_token {eot}: the tokenizer of {name_or_path} splits it into {len(pieces)} tokens "
            f"{pieces}; an end-of-turn token must be one id: pass --add_eot_token to add it"
            + (f", or leave --eot_token out to use {tokenizer.eos_token}" if tokenizer.eos_token else "")
        )
    is_one_id = tokenizer(eot, add_special_tokens=False).input_ids == [tokenizer.eos_token_id]
    if not (is_one_id and eot == tokenizer.eos_token and eot in tokenizer.all_special_tokens):
        # A token of the vocabulary keeps its id: this only stops the pre-tokenizer from splitting it.
        tokenizer.add_special_tokens({"eos_token": AddedToken(eot, special=True, normalized=False)})
    if tokenizer(eot, add_special_tokens=False).input_ids != [tokenizer.eos_token_id]:
        raise ValueError(
            f"--eot_token {eot}: the tokenizer of {name_or_path} still splits it; pass another token with "
            "--add_eot_token"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def adds_bos(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether the tokenizer itself puts its bos before a text."""
    if tokenizer.bos_token_id is None:
        return False
    return tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]


def num_token_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """The highest id of a token + 1: rows of a model from there on are padding of its vocabulary.

    It is not the number of tokens: some vocabularies leave ids out between their text and special tokens.
    """
    return max(tokenizer.get_vocab().values()) + 1


def vocabulary_difference(
    tokenizer_a: PreTrainedTokenizerFast, tokenizer_b: PreTrainedTokenizerFast
) -> str | None:
    """None when every token of a has the same id in b (b may hold more), else a sentence that names a few."""
    here, there = tokenizer_a.get_vocab(), tokenizer_b.get_vocab()
    different = sorted((i, token) for token, i in here.items() if there.get(token) != i)
    if not different:
        return None
    named = [f"{token!r} is {i} here and {there.get(token, 'absent')} there" for i, token in different[:3]]
    sizes = f"{len(here)} tokens (the other vocabulary has {len(there)})"
    return f"{len(different)} of {sizes} differ: {', '.join(named)}"


_EXCHANGE = (Message("user", "probe question"), Message("assistant", "probe reply"))


class Segment(NamedTuple):
    """A piece of text; the pieces of a row, end to end, are its exact text."""

    text: str
    is_response: bool


class Tokenised(NamedTuple):
    """Token ids of a row, with its response mask (True = a token of the response)."""

    input_ids: list[int]
    response_mask: list[bool]
    straddles: bool  # a token crosses from context into response
    is_truncated: bool = False


class Template(ABC):
    """Text of a dialogue, and its tokens. The subclasses say only how the text looks."""

    name: str
    _lead = " "  # stands before a reply
    _form = ""  # what decides the text besides the name
    keeps_headers = False  # what says who speaks must not be cut: rows are shortened by turns, see `shorten`
    is_to_the_letter = False  # a message stands as it is, white space around it too

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Keep a private copy of the tokenizer's fast core, whose offsets are not trimmed."""
        self.tokenizer = tokenizer
        self.eot_token: str = tokenizer.eos_token
        self.eot_id: int = tokenizer.eos_token_id
        self.bos_id: int | None = tokenizer.bos_token_id if adds_bos(tokenizer) else None
        # A byte-level post-processor trims spaces off the offsets, which would hide a token that straddles.
        self._fast = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._fast.post_processor = processors.ByteLevel(trim_offsets=False)
        self._fast.no_padding()
        self._fast.no_truncation()

    def segments(
        self, prompt: Sequence[Message], response: str | None, *, learn_all_turns: bool = False
    ) -> list[Segment]:
        """The text of a dialogue: context pieces, and the response, which ends with the end-of-turn token.

        With `response` None the text ends where the model's reply follows. `learn_all_turns` marks the
        assistant turns inside `prompt` as responses too, each with its end-of-turn token. Raises BadRow: the
        template cannot show this dialogue.
        """
        pieces = self._context(prompt, learn_all_turns)
        return pieces if response is None else [*pieces, self._response(response)]

    @abstractmethod
    def _context(self, prompt: Sequence[Message], learn_all_turns: bool) -> list[Segment]:
        """The pieces up to where the model's reply follows."""

    def text_segments(self, text: str) -> list[Segment]:
        """A plain text that is learnt as a whole, then the end-of-turn token."""
        return [Segment(self._without_eot(text) + self.eot_token, True)]

    def prompt_text(self, prompt: Sequence[Message]) -> str:
        """The exact text of a prompt, up to where the model's reply follows."""
        return "".join(segment.text for segment in self.segments(prompt, None))

    def shorten(self, prompt: Sequence[Message], max_tokens: int) -> tuple[Message, ...]:
        """A prompt less its oldest turns, whole, until it has `max_tokens` or one question is left.

        A system message stays.
        """
        system = tuple(prompt[:1]) if prompt[0].role == "system" else ()
        starts = [index for index, message in enumerate(prompt) if message.role == "user"][1:]
        shorter = [tuple(prompt), *(system + tuple(prompt[index:]) for index in starts)]
        first = bisect_left(shorter, True, key=lambda some: self._count_tokens(some) <= max_tokens)
        return shorter[min(first, len(shorter) - 1)]

    def _count_tokens(self, prompt: Sequence[Message]) -> int:
        return len(self.tokenise_batch([self.segments(prompt, None)])[0].input_ids)

    def continue_ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of what is said after a reply: from its end-of-turn token on to where the next follows.

        They depend on these messages alone, and not on how the reply was tokenised. Raises BadRow: the
        template cannot show them.
        """
        if self.is_to_the_letter:
            text = "".join(message.content for message in messages)
        else:
            text = "".join(piece.text for piece in self._context((*_EXCHANGE, *messages), True)[2:])
        eot, *ids = self._fast.encode(self.eot_token + text, add_special_tokens=False).ids
        assert eot == self.eot_id
        return ids

    def encode(self, segments: Sequence[Segment], max_tokens: int) -> Tokenised:
        """Ids and response mask of a row of at most `max_tokens`; see `truncate`."""
        return truncate(self.tokenise_batch([segments])[0], max_tokens, bos_id=self.bos_id)

    def tokenise_batch(self, rows: Sequence[Sequence[Segment]]) -> list[Tokenised]:
        """Ids and response masks of many rows, each from one tokenisation; bos is added at most once."""
        # Offsets are a Python tuple for every token, so long documents must not come all at once.
        result: list[Tokenised] = []
        for start in range(0, len(rows), BATCH_TEXTS):
            some = rows[start : start + BATCH_TEXTS]
            texts = ["".join(segment.text for segment in segments) for segments in some]
            encodings = self._fast.encode_batch(texts, add_special_tokens=False)
            result += [self._tokenised(segments, enc) for segments, enc in zip(some, encodings, strict=True)]
        return result

    def _tokenised(self, segments: Sequence[Segment], encoding) -> Tokenised:
        input_ids: list[int] = encoding.ids
        spans: list[tuple[int, int]] = encoding.offsets
        starts = [span[0] for span in spans]
        mask: list[bool] = []
        straddles, position = False, 0
        for segment in segments:
            if segment.is_response and position > 0:
                first = bisect_left(starts, position)
                straddles |= first > 0 and spans[first - 1][1] > position
            position += len(segment.text)
            last = bisect_left(starts, position)
            mask += [segment.is_response] * (last - len(mask))
        mask += [False] * (len(input_ids) - len(mask))
        if self.bos_id is not None and input_ids[:1] != [self.bos_id]:
            input_ids, mask = [self.bos_id, *input_ids], [False, *mask]
        return Tokenised(input_ids, mask, straddles)

    def digest(self) -> str:
        """Changes with the vocabulary, the added tokens, the special ids and the text of the template."""
        parts = [self.name, self._fast.to_str(), self.eot_token, self.eot_id, self.bos_id, self._form]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def _response(self, text: str) -> Segment:
        return Segment(f"{self._lead}{self._without_eot(text).strip()}{self.eot_token}", True)

    def _without_eot(self, text: str) -> str:
        """Some data sets end their replies with the end-of-turn text; it must not stand there twice."""
        bare = text.rstrip()
        return bare[: -len(self.eot_token)] if bare.endswith(self.eot_token) else text


class HumanAssistantTemplate(Template):
    r"""The form of Anthropic/hh-rlhf: "\n\nHuman: q\n\nAssistant:" + " reply" + eot."""

    name = "human_assistant"
    _LABELS = {"system": "", "user": "\n\nHuman: ", "assistant": "\n\nAssistant: "}

    def _context(self, prompt: Sequence[Message], learn_all_turns: bool) -> list[Segment]:
        """White space around a turn is dropped."""
        result: list[Segment] = []
        context, cue = "", self._LABELS["assistant"].rstrip()
        for message in prompt:
            if learn_all_turns and message.role == "assistant":
                result += [Segment(context + cue, False), self._response(message.content)]
                context = ""
            else:
                context += self._LABELS[message.role] + message.content.strip()
        return [*result, Segment(context + cue, False)]


class OneLineTemplate(HumanAssistantTemplate):
    """DeepSpeed-Chat's own form: " Human: q Assistant:" + " reply" + eot, turns on one line."""

    name = "one_line"
    _LABELS = {"system": "", "user": " Human: ", "assistant": " Assistant: "}


class PlainTemplate(HumanAssistantTemplate):
    """A bare prompt and its continuation, both to the letter; a dialogue of a row as Human:/Assistant:."""

    name = "plain"
    is_to_the_letter = True

    def segments(
        self, prompt: Sequence[Message], response: str | None, *, learn_all_turns: bool = False
    ) -> list[Segment]:
        """See `Template.segments`; a single user message that is no row's `Turn` stands as it is."""
        if [message.role for message in prompt] != ["user"] or isinstance(prompt[0], Turn):
            return super().segments(prompt, response, learn_all_turns=learn_all_turns)
        pieces = [Segment(prompt[0].content, False)]
        return pieces if response is None else pieces + self.text_segments(response)


class ChatTemplate(Template):
    """The tokenizer's own chat template."""

    name = "chat"
    keeps_headers = True

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Learn by a probe what stands between the prompt and the reply, and what ends the reply.

        Raises ValueError: there is no chat template, or it ends a turn by another token than the tokenizer's
        eos.
        """
        super().__init__(tokenizer)
        if not tokenizer.chat_template:
            raise ValueError(
                "--template chat: the tokenizer has no chat template; use --template human_assistant, or a "
                "tokenizer with a chat_template.jinja"
            )
        self._form = json.dumps(tokenizer.chat_template)
        question, reply = _EXCHANGE[0], _EXCHANGE[1].content
        before = self._render([question], add_generation_prompt=True)
        whole = self._render(_EXCHANGE, add_generation_prompt=False)
        at = whole.find(reply)
        self._lead = whole[len(before) : at] if whole.startswith(before) and at >= len(before) else ""
        end = whole[at + len(reply) :].strip() if at >= 0 else ""
        if end and not end.startswith(self.eot_token):
            raise ValueError(
                f"--template chat ends a turn by {end!r}, but the tokenizer's eos is {self.eot_token!r}, so "
                f"generation would not stop there; pass that token by --eot_token"
            )

    def _context(self, prompt: Sequence[Message], learn_all_turns: bool) -> list[Segment]:
        result: list[Segment] = []
        done = ""
        replies = [i for i, m in enumerate(prompt) if m.role == "assistant"] if learn_all_turns else []
        for turn in [*replies, len(prompt)]:
            context = self._render(prompt[:turn], add_generation_prompt=True)
            if not context.startswith(done):
                raise BadRow(
                    "this chat template rewrites earlier turns, so not all of them can be learnt in one row; "
                    "give a row of prompt and answer for each reply"
                )
            result.append(Segment(context[len(done) :], False))
            if turn < len(prompt):
                result.append(self._response(prompt[turn].content))
                done = context + result[-1].text
        return result

    def shorten(self, prompt: Sequence[Message], max_tokens: int) -> tuple[Message, ...]:
        """See `Template.shorten`; a question that is too long alone loses its middle."""
        *head, last = super().shorten(prompt, max_tokens)
        text, excess = last.content.strip(), self._count_tokens([*head, last]) - max_tokens
        spans = self._fast.encode(text, add_special_tokens=False).offsets if excess > 0 else []
        num_gap = len(self._fast.encode(GAP, add_special_tokens=False).ids)
        for margin in (0, 4, 16):  # tokens at the sides of the gap may come out otherwise than before
            num_kept = len(spans) - excess - num_gap - margin
            if excess <= 0 or num_kept < 2:
                break
            begin, end = spans[num_kept // 2 - 1][1], spans[num_kept // 2 - num_kept][0]
            last = last._replace(content=text[:begin] + GAP + text[end:])
            if self._count_tokens([*head, last]) <= max_tokens:
                break
        return (*head, last)

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                [{"role": message.role, "content": message.content.strip()} for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # a template is a program of its author's: it raises what it likes
            raise BadRow(f"the chat template refuses this dialogue: {error}") from error


_TEMPLATES = {t.name: t for t in (HumanAssistantTemplate, OneLineTemplate, ChatTemplate, PlainTemplate)}
TEMPLATE_NAMES = tuple(_TEMPLATES)


def build_template(name: str, tokenizer: PreTrainedTokenizerFast) -> Template:
    """Return the template called `name`, one of TEMPLATE_NAMES.

    Raises ValueError: unknown name, or a tokenizer that cannot serve it.
    """
    if name not in _TEMPLATES:
        raise ValueError(f"--template {name} is unknown; use one of {', '.join(TEMPLATE_NAMES)}")
    return _TEMPLATES[name](tokenizer)


def response_start(response_mask: Sequence[bool]) -> int:
    """Index of the first token of the response that ends the row; the row's length if there is none."""
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
    """A row of at most `max_tokens`: context is cut on its left (bos stays), then the response at its end.

    `min_context_tokens` of context are always kept, where there are so many; one at least, so that every
    response token has one before it that predicts it.
    `max_response_tokens` is the length to make room for when it is more than this row's own: the other answer
    of a pair, so that both keep the same context.
    """
    input_ids, mask = row.input_ids, row.response_mask
    start = response_start(mask)
    room = max(len(input_ids) - start, max_response_tokens)
    if start + room <= max_tokens:
        return row
    kept_context = min(start, max(max_tokens - room, min_context_tokens))
    end = min(len(input_ids), start + max_tokens - kept_context)
    kept = list(range(start - kept_context, end))
    if start > 0 and input_ids[0] == bos_id:
        kept[0] = 0
    return row._replace(
        input_ids=[input_ids[i] for i in kept], response_mask=[mask[i] for i in kept], is_truncated=True
    )
