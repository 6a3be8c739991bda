"""Text of a response, token by token, in chunks that never change and add up to the decoded text. PURE."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_HALF = "\ufffd"  # decoded from an invalid or incomplete character
_MIN_DECODED = 64  # last tokens, which are decoded together: a decoder may treat the first ones differently
_MAX_DECODED = 128
_CHARACTER_TOKENS = 4  # a character has at most four bytes, and so four tokens


@dataclass(frozen=True)
class Answer:
    """A model's response, and why it ended."""

    text: str
    token_ids: list[int]  # as sampled, including the stop token
    finish_reason: str  # "stop": end of turn or stop text; "length": token limit; "cancelled"


class TextStream:
    """The text of one response as it grows, passed to `on_text`, without a stop token.

    Text that later tokens may change is held back: the bytes of an incomplete character, white space that may
    be the end, and the beginning of one of the texts in `stop`. White space around a response is stripped,
    unless the stream `keeps_space`. A tokenizer's clean-up ("does n't" becomes "doesn't") is not applied: it
    changes earlier text.

    A token costs about the same wherever it is in a response: only the last tokens are decoded, and only
    text that was held back is compared with `stop`.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        stop: Sequence[str] = (),
        keeps_space: bool = False,
        on_text: Callable[[str], None] | None = None,
        is_gone: Callable[[], bool] = bool,
    ) -> None:
        """`is_gone` returns whether the response should end now."""
        self.tokenizer = tokenizer
        self.stop = stop
        self.keeps_space = keeps_space
        self.on_text = on_text
        self.is_gone = is_gone
        self.token_ids: list[int] = []
        self.text = ""
        self.is_stopped = False  # one of `stop` occurred: no more tokens are needed
        self._first = 0  # of the last tokens, which are decoded together
        self._num_told = 0  # characters of their text that are in `text`
        self._held = ""  # text of earlier tokens that is held back
        self._num_compared = 0  # characters that are held back and at which none of `stop` begins

    def add(self, token_ids: Sequence[int]) -> bool:
        """Add new tokens; return whether the response must end with them."""
        self.token_ids += token_ids
        text = self._decode(self._first)
        self._give(text.rstrip(_HALF), is_whole=False)
        limit = _MAX_DECODED + _CHARACTER_TOKENS * text.endswith(_HALF)  # the character may be completed
        if len(self.token_ids) - self._first > limit:
            self._decode_fewer(text)
        return self.is_stopped or self.is_gone()

    def finish(self) -> Answer:
        """Emit the rest; return the whole response."""
        self._give(self._decode(self._first), is_whole=True)
        is_finished = self.is_stopped or self.token_ids[-1:] == [self.tokenizer.eos_token_id]
        reason = "stop" if is_finished else "length"
        if self.is_gone():
            reason = "cancelled"
        return Answer(self.text, self.token_ids, reason)

    def _decode(self, first: int) -> str:
        """Text of the tokens from `first` on."""
        spoken = [i for i in self.token_ids[first:] if i != self.tokenizer.eos_token_id]
        text = self.tokenizer.decode(spoken, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text if first or self.keeps_space else text.lstrip()

    def _decode_fewer(self, text: str) -> None:
        """Leave out the first of the tokens that are decoded together to `text`: theirs will not change."""
        latest = len(self.token_ids) - _MIN_DECODED
        candidates = range(latest, latest - _CHARACTER_TOKENS, -1)  # one is not in the middle of a character
        first = next((first for first in candidates if text.endswith(self._decode(first))), latest)
        end = self._decode(first)
        num_before = len(text) - len(end)
        self._held += text[self._num_told : num_before]
        self._num_told = max(self._num_told - num_before, 0)
        self._first = first

    def _give(self, last_text: str, *, is_whole: bool) -> None:
        """Emit the new and final part of the text, which ends with that of the last tokens."""
        if self.is_stopped or self.is_gone():
            return
        held = self._held + last_text[self._num_told :]
        is_stripped = not self.text and not self.keeps_space
        num_spaces = is_stripped * (len(held) - len(held.lstrip()))  # before the response
        begin = max(self._num_compared, num_spaces)
        stops = [index for stop in self.stop if (index := held.find(stop, begin)) >= 0]
        if stops:
            self.is_stopped = True
            end = min(stops)
        else:
            end = len(held) if is_whole else self._first_awaiting_stop(held, begin)
        new = held[num_spaces:end]
        if not self.keeps_space:
            new = new.rstrip()
        self._num_compared = end
        if new:
            self.text += new
            num_told = num_spaces + len(new)
            self._num_compared -= num_told
            self._num_told += max(num_told - len(self._held), 0)
            self._held = self._held[num_told:]
            if self.on_text:
                self.on_text(new)

    def _first_awaiting_stop(self, text: str, begin: int) -> int:
        """Index, from `begin` on, at which the end of the text may be the beginning of a stop text."""
        for first in range(begin, len(text)):
            if any(stop.startswith(text[first:]) for stop in self.stop):
                return first
        return len(text)
