"""Text of a response, token by token, in chunks that never change and add up to the decoded text. PURE."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_HALF = "\ufffd"  # decoded from an invalid or incomplete character


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
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        stop: Sequence[str] = (),
        keeps_space: bool = False,
        on_text: Callable[[str], bool] | None = None,
    ) -> None:
        """`on_text` returns whether the response should end."""
        self.tokenizer = tokenizer
        self.stop = stop
        self.keeps_space = keeps_space
        self.on_text = on_text
        self.token_ids: list[int] = []
        self.text = ""
        self.is_stopped = False  # one of `stop` occurred: no more tokens are needed
        self.is_cancelled = False  # by `on_text`

    def add(self, token_ids: Sequence[int]) -> bool:
        """Add new tokens; return whether the response must end with them."""
        self.token_ids += token_ids
        self._give(self._decode(self.token_ids).rstrip(_HALF), is_whole=False)
        return self.is_stopped or self.is_cancelled

    def finish(self) -> Answer:
        """Emit the rest; return the whole response."""
        self._give(self._decode(self.token_ids), is_whole=True)
        is_finished = self.is_stopped or self.token_ids[-1:] == [self.tokenizer.eos_token_id]
        reason = "stop" if is_finished else "length"
        if self.is_cancelled:
            reason = "cancelled"
        return Answer(self.text, self.token_ids, reason)

    def _decode(self, token_ids: list[int]) -> str:
        spoken = [i for i in token_ids if i != self.tokenizer.eos_token_id]
        text = self.tokenizer.decode(spoken, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text if self.keeps_space else text.lstrip()

    def _give(self, text: str, *, is_whole: bool) -> None:
        """Emit the new and final part of a text that is the whole response or its beginning."""
        if self.is_stopped or self.is_cancelled:
            return
        stops = [index for index in map(text.find, self.stop) if index >= 0]
        if stops:
            self.is_stopped = True
            text = text[: min(stops)]
        elif not is_whole:
            text = text[: len(text) - self._num_awaiting_stop(text)]
        if not self.keeps_space:
            text = text.rstrip()
        new = text[len(self.text) :]
        self.text += new
        if new and self.on_text:
            self.is_cancelled = self.on_text(new)

    def _num_awaiting_stop(self, text: str) -> int:
        """Number of characters at the end that may be the beginning of a stop text."""
        lengths = [n for stop in self.stop for n in range(1, len(stop)) if text.endswith(stop[:n])]
        return max(lengths, default=0)
