"""Tokenizers whose EOS ends a turn."""

from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from common.ranks.failures import first_line


def load_tokenizer(
    name_or_path: str,
    *,
    eot_token: str | None = None,
    add_eot_token: bool = False,
    trust_remote_code: bool = False,
    flag: str = "--model_name_or_path",
) -> PreTrainedTokenizerFast:
    """A fast tokenizer whose EOS ends a turn and whose PAD is set.

    `eot_token` replaces the tokenizer's own EOS; it must be a single token already, unless `add_eot_token`
    allows a new one (the embeddings of the model must then grow). Existing ids do not change. PAD may be the
    same id as EOS. Raises ValueError, with `flag`, if there is no fast tokenizer, no EOS, or the end-of-turn
    token has several ids.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name_or_path, use_fast=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # OSError, KeyError, TypeError, ..., depending on what is missing
        raise ValueError(
            f"{flag} {name_or_path}: no tokenizer could be loaded ({first_line(error)}); "
            "give a folder that holds tokenizer.json, or a hub name that can be reached"
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{flag} {name_or_path}: {type(tokenizer).__name__} has no fast version, and response masks need "
            "its character offsets; save the model with a tokenizer.json"
        )
    eot = eot_token or tokenizer.eos_token
    if not eot:
        raise ValueError(
            f"the tokenizer of {name_or_path} has no EOS token, so no reply could end; name one of its "
            "tokens by --eot_token, or add a new one by --eot_token '<|endoftext|>' --add_eot_token"
        )
    if eot not in tokenizer.get_vocab() and not add_eot_token:
        pieces = tokenizer.tokenize(eot)
        raise ValueError(
            f"--eot_token {eot}: the tokenizer of {name_or_path} splits it into {len(pieces)} tokens "
            f"{pieces}; an end-of-turn token must be one id: pass --add_eot_token to add it"
            + (f", or leave --eot_token out to use {tokenizer.eos_token}" if tokenizer.eos_token else "")
        )
    if not set_end_of_turn(tokenizer, eot):
        raise ValueError(
            f"--eot_token {eot}: the tokenizer of {name_or_path} still splits it; pass another token with "
            "--add_eot_token"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def set_end_of_turn(tokenizer: PreTrainedTokenizerFast, token: str) -> bool:
    """Make `token` the tokenizer's EOS; return whether it is a single token. Existing ids do not change."""
    is_one_id = tokenizer(token, add_special_tokens=False).input_ids == [tokenizer.eos_token_id]
    if not (is_one_id and token == tokenizer.eos_token and token in tokenizer.all_special_tokens):
        # A token of the vocabulary keeps its id: this only stops the pre-tokenizer from splitting it.
        tokenizer.add_special_tokens({"eos_token": AddedToken(token, special=True, normalized=False)})
    return tokenizer(token, add_special_tokens=False).input_ids == [tokenizer.eos_token_id]


def adds_bos(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether the tokenizer adds its BOS before a text."""
    bos_id = tokenizer.bos_token_id
    return bos_id is not None and tokenizer("a").input_ids[:1] == [bos_id]


def num_token_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """The highest token id + 1; embedding rows from there on are padding of the vocabulary.

    This is not the number of tokens: some vocabularies have gaps between text and special tokens.
    """
    return max(tokenizer.get_vocab().values()) + 1


def vocabulary_difference(
    tokenizer_a: PreTrainedTokenizerFast, tokenizer_b: PreTrainedTokenizerFast
) -> str | None:
    """None if every token of a has the same id in b (b may have more), else a sentence that names a few."""
    here = tokenizer_a.get_vocab()
    there = tokenizer_b.get_vocab()
    different = sorted((i, token) for token, i in here.items() if there.get(token) != i)
    if not different:
        return None
    named = [f"{token!r} is {i} here and {there.get(token, 'absent')} there" for i, token in different[:3]]
    sizes = f"{len(here)} tokens (the other vocabulary has {len(there)})"
    return f"{len(different)} of {sizes} differ: {', '.join(named)}"
