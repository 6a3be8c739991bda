"""The text of an answer that grows token by token: never half a character, and in the end the whole text."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from serving.text_stream import TextStream

BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}
WORDS = {"▁a": 256, "▁bc": 257, "d": 258, "▁": 259}


@pytest.fixture(scope="module")
def byte_fallback() -> PreTrainedTokenizerFast:
    """A tokenizer as Llama's: words with ▁ for a space, all else as tokens of a byte each."""
    core = Tokenizer(models.BPE(vocab=BYTES | WORDS, merges=[], byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=core)


def pieces(stream: TextStream, token_ids: list[int], size: int = 1) -> list[str]:
    """The texts that are told for each group of tokens, and at the end."""
    told: list[list[str]] = []
    stream.on_text = lambda text: told[-1].append(text)
    for first in range(0, len(token_ids), size):
        told.append([])
        stream.add(token_ids[first : first + size])
    told.append([])
    assert stream.finish().text == stream.text
    return ["".join(texts) for texts in told]


def byte_ids(tokenizer, text: str) -> list[int]:
    """The token of each byte of a text, in a byte-level vocabulary."""
    return tokenizer.convert_tokens_to_ids([bytes_to_unicode()[byte] for byte in text.encode()])


def test_a_character_of_four_tokens_comes_whole(tiny_tokenizer):
    ids = byte_ids(tiny_tokenizer, "a😀é!")
    assert pieces(TextStream(tiny_tokenizer), ids) == ["a", "", "", "", "😀", "", "é", "!", ""]


def test_characters_of_byte_tokens_come_whole(byte_fallback):
    ids = [256, *"é😀".encode(), 258]
    assert pieces(TextStream(byte_fallback), ids) == ["a", "", "é", "", "", "", "😀", "d", ""]
    broken = [256, *"é".encode(), 0xE2, 258]  # the decoder gives up on the whole run; what was told stays
    assert pieces(TextStream(byte_fallback), broken) == ["a", "", "é", "", "\ufffd\ufffdd", ""]


def test_white_space_waits_for_what_follows(tiny_tokenizer):
    ids = byte_ids(tiny_tokenizer, "\n a  b \n")
    assert pieces(TextStream(tiny_tokenizer), ids) == ["", "", "a", "", "", "  b", "", "", ""]


def test_an_answer_ends_before_a_stop_text(tiny_tokenizer):
    ids = byte_ids(tiny_tokenizer, "one \nHum, two \nHuman: three")
    stream = TextStream(tiny_tokenizer, stop=["\nHuman:", "zzz"])
    told = pieces(stream, ids)
    assert "".join(told) == stream.text == "one \nHum, two" and stream.is_stopped
    assert told[:9] == ["o", "n", "e", "", "", "", "", "", " \nHum,"], "a beginning of it is held back"


def test_a_stop_text_across_the_last_tokens_is_found_at_the_end(byte_fallback):
    stream = TextStream(byte_fallback, stop=["\n"])
    assert "".join(pieces(stream, [256, *b"\n"])) == "a" and stream.is_stopped


@settings(max_examples=150, deadline=None)
@given(
    ids=st.lists(st.sampled_from([256, 257, 258, 259, 0x20, 0x0A, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0x41])),
    size=st.integers(1, 3),
)
def test_put_together_it_is_the_decoders_text(byte_fallback, tiny_tokenizer, ids, size):
    for tokenizer in (byte_fallback, tiny_tokenizer):
        told, whole = (
            pieces(TextStream(tokenizer), ids, size),
            tokenizer.decode(ids, skip_special_tokens=True),
        )
        assert len("".join(told)) == len(whole.strip())
        if "\ufffd" not in whole:
            assert "".join(told) == whole.strip()
            assert not any("\ufffd" in piece for piece in told)


# ---- what a token costs


class Counting:
    """A tokenizer that counts the tokens that it decodes, each a character."""

    eos_token_id = None

    def __init__(self, tokenizer=None) -> None:
        self.tokenizer = tokenizer
        self.num_decoded = 0

    def decode(self, token_ids: list[int], **more) -> str:
        self.num_decoded += len(token_ids)
        return self.tokenizer.decode(token_ids, **more) if self.tokenizer else "".join(map(chr, token_ids))


LONG_TEXTS = {
    "words": "A sentence of some words, \n\n  and another. " * 40,
    "characters of two to four bytes": "é😀ß…" * 150,
    "spaces to the end": "a" + " \n" * 600,
}


@pytest.mark.parametrize("text", LONG_TEXTS.values(), ids=LONG_TEXTS.keys())
@pytest.mark.parametrize("keeps_space", [True, False])
def test_only_the_last_tokens_of_a_long_response_are_decoded(
    text, keeps_space, byte_fallback, tiny_tokenizer
):
    cases = [(tiny_tokenizer, byte_ids(tiny_tokenizer, text)), (byte_fallback, [256, *text.encode()])]
    for tokenizer, ids in cases:
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        counting = Counting(tokenizer)
        told = pieces(TextStream(counting, keeps_space=keeps_space), ids)
        assert "".join(told) == (whole if keeps_space else whole.strip())
        assert counting.num_decoded < 150 * len(ids), "a token costs what it costs at the beginning"
        num_waiting = max(len(list(group)) for is_text, group in itertools.groupby(told, bool) if not is_text)
        assert num_waiting <= 5 or text.endswith("\n"), "a character comes with its last byte"


def test_bytes_that_are_no_characters_are_not_held_back_for_ever(byte_fallback, tiny_tokenizer):
    broken = byte_ids(tiny_tokenizer, "€")[:1] * 1000
    for tokenizer, ids in ((tiny_tokenizer, broken), (byte_fallback, [256, *[0xE2] * 1000])):
        counting = Counting(tokenizer)
        told = pieces(TextStream(counting), [*ids, *ids[:1]])
        assert "".join(told) == tokenizer.decode([*ids, *ids[:1]]) and any(told[500:900])
        assert counting.num_decoded < 200 * len(ids)


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab \n", max_size=400),
    stop=st.lists(st.text("ab \n", min_size=1, max_size=6) | st.just("a" * 30), max_size=4),
    keeps_space=st.booleans(),
    size=st.integers(1, 3),
)
def test_a_response_ends_before_the_first_stop_text_wherever_it_is(text, stop, keeps_space, size):
    stream = TextStream(Counting(), stop=stop, keeps_space=keeps_space)
    told = "".join(pieces(stream, list(map(ord, text)), size))
    seen = text if keeps_space else text.lstrip()
    lead = len(text) - len(seen)
    heard = [text[lead:end] for end in range(size, len(text) + size, size)]  # by the end of each addition
    stopped = next((h for h in heard if any(s in h for s in stop)), None)
    first = None if stopped is None else min(f for f in map(stopped.find, stop) if f >= 0)
    expected = seen if first is None else seen[:first]
    assert told == (expected if keeps_space else expected.rstrip())
    assert stream.is_stopped == (first is not None)


class Compared(str):
    """A stop text that counts how often it is compared."""

    num_compared = 0

    def startswith(self, *text) -> bool:
        Compared.num_compared += 1
        return super().startswith(*text)


@pytest.mark.parametrize("keeps_space", [True, False])
@pytest.mark.parametrize("text", ["a", "ab", "a" * 99 + "c", "\n", "b" * 299 + "a"])
def test_the_longest_stop_texts_cost_little_a_token(text, keeps_space):
    stops = [Compared(x * 255 + "!") for x in ("a", "ab", "\n", "b")]
    Compared.num_compared = 0
    text = ("x" + text * 4000)[:4000]
    told = pieces(TextStream(Counting(), stop=stops, keeps_space=keeps_space), list(map(ord, text)))
    assert "".join(told) == (text if keeps_space else text.rstrip())
    assert Compared.num_compared < 40 * len(text)
