"""PURE: text out of tokens that come one by one: what has been told never changes, and all of it together is
the text that a decoder gives for all tokens at once.
"""

import re
from collections.abc import Callable, Sequence

_HALF = "\ufffd"  # what a decoder gives for bytes that are no whole character, or none yet
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# "does n't" becomes "doesn't" where a tokenizer tidies up: so many characters may still move.
TIDIED_CHARACTERS = 4


class TextStream:
    """The text of one answer as it grows.

    `decode` gives the text of token ids, `token_texts` their names in the vocabulary. Held back is what
    later tokens may change: the bytes of half a character, white space that may be the end, a beginning of
    one of the texts `stop`, and `num_unsettled` characters. White space around an answer is dropped, unless
    the stream `keeps_space`.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        token_texts: Callable[[list[int]], Sequence[str]],
        *,
        stop: Sequence[str] = (),
        num_unsettled: int = 0,
        keeps_space: bool = False,
    ) -> None:
        self._decode, self._token_texts = decode, token_texts
        self._keeps_space = keeps_space
        self._stop, self._num_unsettled = tuple(filter(None, stop)), num_unsettled
        self.token_ids: list[int] = []
        self.told = ""
        self.is_stopped = False  # one of `stop` was found: no more tokens are wanted

    def add(self, token_ids: Sequence[int]) -> str:
        """Return what these tokens add to the text that is certain."""
        if self.is_stopped:
            return ""
        self.token_ids += token_ids
        text = self._decode(self.token_ids[: self._num_settled_tokens()]).rstrip(_HALF)
        text = self._without_start(text)
        text = text[: len(text) - self._num_unsettled] if self._num_unsettled else text
        cut = self._find_stop(text)
        if cut is not None:
            self.is_stopped = True
            return self._tell(self._without_end(text[:cut]))
        return self._tell(self._without_end(text[: len(text) - self._num_awaiting_stop(text)]))

    def finish(self) -> str:
        """Return the rest, when no more tokens come; `told` is then the whole answer."""
        if self.is_stopped:
            return ""
        text = self._without_start(self._decode(self.token_ids))
        cut = self._find_stop(text)
        self.is_stopped = cut is not None
        return self._tell(self._without_end(text[:cut]))

    def _without_start(self, text: str) -> str:
        return text if self._keeps_space else text.lstrip()

    def _without_end(self, text: str) -> str:
        return text if self._keeps_space else text.rstrip()

    def _tell(self, text: str) -> str:
        new = text[len(self.told) :] if text.startswith(self.told) else ""
        self.told += new
        return new

    def _num_settled_tokens(self) -> int:
        """Return how many tokens have a text that the next ones cannot change.

        A decoder of byte tokens (<0xE2>) takes a whole run of them, and gives none of its characters
        when the run does not end with a whole one.
        """
        texts = self._token_texts(self.token_ids)
        count = len(texts)
        while count and _BYTE_TOKEN.fullmatch(texts[count - 1]):
            count -= 1
        return count

    def _find_stop(self, text: str) -> int | None:
        """Return where the first of the stop texts begins, None without one."""
        return min((place for stop in self._stop if (place := text.find(stop)) >= 0), default=None)

    def _num_awaiting_stop(self, text: str) -> int:
        """Return how many characters at the end may be the beginning of a stop text."""
        return max(
            (n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0
        )
