"""common/data/tokenizer.py: one end-of-turn id, a padding token, and ids that never move."""

import copy

import pytest
from tokenizers import processors

from common.data.tokenizer import adds_bos, load_tokenizer, prepare_tokenizer, vocabulary_difference


def test_pad_falls_back_to_eos_and_no_id_changes(tmp_path, make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path / "without")
    loaded = load_tokenizer(str(tmp_path / "without"))
    assert loaded.pad_token_id == loaded.eos_token_id == tokenizer.eos_token_id
    assert loaded.get_vocab() == tokenizer.get_vocab() and len(loaded) == len(tokenizer)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained(tmp_path / "own")
    loaded = load_tokenizer(str(tmp_path / "own"))
    assert loaded.pad_token == "<pad>" and loaded.pad_token_id != loaded.eos_token_id


def test_no_eos_names_both_cures(make_tokenizer):
    with pytest.raises(ValueError, match="no eos token.*--eot_token.*--add_eot_token"):
        prepare_tokenizer(make_tokenizer(eos=None))


def test_eot_of_several_ids_names_the_cure(make_tokenizer):
    with pytest.raises(ValueError, match=r"--eot_token <turn>: .*splits it into \d+ tokens.*--add_eot_token"):
        prepare_tokenizer(make_tokenizer(), eot_token="<turn>")


def test_add_eot_token_gives_one_new_id_at_the_end(make_tokenizer):
    tokenizer = make_tokenizer()
    num_before, vocabulary = len(tokenizer), tokenizer.get_vocab()
    prepare_tokenizer(tokenizer, eot_token="<turn>", add_eot_token=True)
    assert tokenizer.eos_token_id == num_before and len(tokenizer) == num_before + 1
    assert tokenizer("hi<turn>", add_special_tokens=False).input_ids[-1] == num_before
    assert vocabulary.items() <= tokenizer.get_vocab().items()


def test_eot_that_the_vocabulary_holds_keeps_its_id(make_tokenizer):
    tokenizer = make_tokenizer()
    token = next(t for t in tokenizer.get_vocab() if t.isalpha() and t.isascii() and len(t) >= 3)
    token_id, num_before = tokenizer.get_vocab()[token], len(tokenizer)
    prepare_tokenizer(tokenizer, eot_token=token)
    assert (tokenizer.eos_token_id, len(tokenizer)) == (token_id, num_before)
    assert tokenizer(f"x{token}", add_special_tokens=False).input_ids[-1] == token_id


def test_a_folder_without_tokenizer_names_flag_and_value(tmp_path):
    told = f"--actor_model_name_or_path {tmp_path}: no tokenizer could be loaded"
    with pytest.raises(ValueError, match=told):
        load_tokenizer(str(tmp_path), flag="--actor_model_name_or_path")


def test_vocabulary_difference(tiny_tokenizer, make_tokenizer):
    more = copy.deepcopy(tiny_tokenizer)
    more.add_special_tokens({"pad_token": "<pad>"})
    assert vocabulary_difference(tiny_tokenizer, more) is None
    assert "'<pad>' is" in vocabulary_difference(more, tiny_tokenizer)
    other = make_tokenizer(vocab_size=300)
    assert "tokens (the other vocabulary has 300) differ" in vocabulary_difference(tiny_tokenizer, other)


def test_adds_bos(make_tokenizer):
    tokenizer = make_tokenizer()
    assert not adds_bos(tokenizer)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    assert not adds_bos(tokenizer)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    assert adds_bos(tokenizer)
