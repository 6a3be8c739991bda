"""The text of an answer that grows token by token: never half a character, and in the end the whole text."""

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
