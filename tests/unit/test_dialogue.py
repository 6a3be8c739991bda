"""common/data/dialogue.py: the exact text, one tokenisation for ids and mask, truncation."""

import copy

import pytest
from tokenizers import processors

from common.data.adapters.row_forms import read_row
from common.data.chat_template import build_template
from common.data.data_options import DataOptions
from common.data.dialogue import BATCH_TEXTS, Segment, Tokenised, response_start, truncate
from common.data.example import BadRow, Example, Message
from common.data.stage_rows import Item, RowBuilder
from common.data.token_cache import DataReport
from common.data.tokenizer import load_tokenizer, vocabulary_difference

QUESTION = (Message("user", "How are you today?"),)
SAID = (Message("system", "Be kind."), *QUESTION, Message("assistant", "Fine."))
CHAT_JINJA = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def response_text(template, row) -> str:
    ids = [i for i, is_response in zip(row.input_ids, row.response_mask, strict=True) if is_response]
    return template.tokenizer.decode(ids)


def with_bos(make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    assert build_template("human_assistant", tokenizer).bos_id is None, "to have one is not to put it"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    return tokenizer


def test_default_template_is_the_form_of_hh_rlhf(tiny_tokenizer):
    template = build_template("human_assistant", tiny_tokenizer)
    prompt = (*QUESTION, Message("assistant", "Fine."), Message("user", " Good! "))
    segments = template.segments(prompt, "Bye.")
    assert "".join(segment.text for segment in segments) == (
        "\n\nHuman: How are you today?\n\nAssistant: Fine.\n\nHuman: Good!\n\nAssistant: Bye.<|endoftext|>"
    )
    assert [segment.text for segment in segments if segment.is_response] == [" Bye.<|endoftext|>"]
    assert template.prompt_text(prompt).endswith("Good!\n\nAssistant:")


def test_one_line_is_the_form_of_deepspeed_chat(tiny_tokenizer):
    template = build_template("one_line", tiny_tokenizer)
    prompt = (*SAID, Message("user", " Good! "))
    segments = template.segments(prompt, "Bye.", learn_all_turns=True)
    assert [tuple(segment) for segment in segments] == [
        ("Be kind. Human: How are you today? Assistant:", False),
        (" Fine.<|endoftext|>", True),
        (" Human: Good! Assistant:", False),
        (" Bye.<|endoftext|>", True),
    ]
    (row,) = template.tokenise_batch([template.segments(QUESTION, "I am fine.")])
    whole = " Human: How are you today? Assistant: I am fine.<|endoftext|>"
    assert row.input_ids == tiny_tokenizer(whole).input_ids
    assert response_text(template, row) == " I am fine.<|endoftext|>"
    assert template.digest() != build_template("human_assistant", tiny_tokenizer).digest()


def test_ids_are_those_of_the_whole_text_and_the_mask_is_the_response(tiny_tokenizer):
    template = build_template("human_assistant", tiny_tokenizer)
    (row,) = template.tokenise_batch([template.segments(QUESTION, "I am fine é漢.")])
    whole = "\n\nHuman: How are you today?\n\nAssistant: I am fine é漢.<|endoftext|>"
    assert row.input_ids == tiny_tokenizer(whole).input_ids
    assert response_text(template, row) == " I am fine é漢.<|endoftext|>"
    assert row.input_ids.count(template.eot_id) == 1 and not row.is_truncated


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_a_straddling_token_belongs_to_the_side_it_starts_on_and_is_told(trim_offsets, make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    template = build_template("human_assistant", tokenizer)
    assert tokenizer.tokenize("x the")[-1] == "Ġthe"
    (row,) = template.tokenise_batch([[Segment("x ", False), Segment("the", True)]])
    assert row.straddles and not any(row.response_mask)  # " the" starts at the space, which is the prompt's
    (row,) = template.tokenise_batch([[Segment("x", False), Segment(" the", True)]])
    assert not row.straddles and row.response_mask[-1] and not row.response_mask[0]
    (row,) = template.tokenise_batch([[Segment("", False), Segment("the", True)]])
    assert not row.straddles and all(row.response_mask)
    (row,) = template.tokenise_batch([[Segment(" ", False), Segment("the", True)]])
    assert row.straddles and not any(row.response_mask)  # one token of context
    spaces = template.tokenise_batch([[Segment("x  ", False), Segment("<|endoftext|>", True)]])[0]
    *before, last = spaces.response_mask
    assert last and not any(before)  # white space stays the prompt's


def test_an_end_of_turn_in_the_data_is_not_doubled(tiny_tokenizer):
    for name in ("human_assistant", "plain"):
        template = build_template(name, tiny_tokenizer)
        for reply in ("Bye.<|endoftext|>", "Bye.<|endoftext|> \n"):
            segments = template.segments(QUESTION, reply)
            (row,) = template.tokenise_batch([segments])
            assert row.input_ids.count(template.eot_id) == 1
            *_, response = segments
            assert response == (f"{' ' if name == 'human_assistant' else ''}Bye.<|endoftext|>", True)


def test_plain_learns_the_reply_only_and_continues_without_marks(tiny_tokenizer):
    template = build_template("plain", tiny_tokenizer)
    assert template.segments(QUESTION, " Fine.") == [
        ("How are you today?", False),
        (" Fine.<|endoftext|>", True),
    ]
    turns = (Message("user", " Good."), Message("user", " Why?"))
    assert tiny_tokenizer.decode(template.continue_ids(turns)) == " Good. Why?"
    with pytest.raises(BadRow, match="tools"):
        template.segments(QUESTION, "Fine.", tools="[{}]")
    assert template.segments(SAID[:2], "Fine.", learn_all_turns=True)[-1] == (" Fine.<|endoftext|>", True)
    assert len(template.segments((*SAID, *QUESTION), "Bye.", learn_all_turns=True)) == 4


def test_the_start_of_a_reply_is_context(tiny_tokenizer):
    template = build_template("human_assistant", tiny_tokenizer)
    assert template.continued((*SAID[1:], *QUESTION, Message("assistant", " I am "))) == [
        ("\n\nHuman: How are you today?\n\nAssistant:", False),
        (" Fine.<|endoftext|>", True),
        ("\n\nHuman: How are you today?\n\nAssistant:", False),
        (" I am", False),
    ]


def test_rows_beyond_one_call_of_the_tokenizer_are_those_of_one_at_a_time(tiny_tokenizer):
    template = build_template("human_assistant", tiny_tokenizer)
    rows = [template.segments(QUESTION, "Fine. " * count) for count in range(1, BATCH_TEXTS + 2)]
    assert template.tokenise_batch(rows) == [template.tokenise_batch([row])[0] for row in rows]


@pytest.mark.parametrize(
    ("row", "is_dialogue"),
    [
        ({"prompt": "Hi?", "chosen": "Yes"}, False),
        ({"prompt": "\n\nHuman: Hi?\n\nAssistant:", "chosen": "Yes"}, True),
        ({"prompt": [{"role": "user", "content": "Hi?"}], "chosen": "Yes"}, True),
        ({"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Yes"}]}, True),
        ({"chosen": "\n\nHuman: Hi?\n\nAssistant: Yes", "rejected": "\n\nHuman: Hi?\n\nAssistant: No"}, True),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_plain_keeps_the_marks_of_a_dialogue_of_one_turn(row, is_dialogue, tiny_tokenizer):
    (example,) = read_row(row)
    text = build_template("plain", tiny_tokenizer).prompt_text(example.prompt)
    assert text == ("\n\nHuman: Hi?\n\nAssistant:" if is_dialogue else "Hi?")


def test_bos_is_added_once_and_survives_truncation(make_tokenizer):
    tokenizer = with_bos(make_tokenizer)
    template = build_template("human_assistant", tokenizer)
    segments = template.segments(QUESTION, "Fine.")
    (row,) = template.tokenise_batch([segments])
    assert row.input_ids[0] == tokenizer.bos_token_id
    assert row.input_ids.count(tokenizer.bos_token_id) == 1 and row.response_mask[0] is False
    cut = truncate(row, len(row.input_ids) - 4, bos_id=template.bos_id)
    assert cut.is_truncated and cut.input_ids == [row.input_ids[0], *row.input_ids[5:]]
    assert template.encode(segments, len(row.input_ids) - 4) == cut
    tokenizer.chat_template = "<s>" + CHAT_JINJA
    chat = build_template("chat", tokenizer)
    (row,) = chat.tokenise_batch([chat.segments(QUESTION, "Fine.")])
    assert row.input_ids.count(tokenizer.bos_token_id) == 1


def test_truncate_drops_the_prompt_on_the_left_then_the_response_on_the_right():
    row = Tokenised([1, 2, 3, 4, 5, 6], [False, False, False, True, True, True], False)
    assert truncate(row, 6) == row and not row.is_truncated
    assert truncate(row, 4) == ([3, 4, 5, 6], [False, True, True, True], False, True)
    assert truncate(row, 3) == (
        [3, 4, 5],
        [False, True, True],
        False,
        True,
    )  # one token stays to predict the first
    assert truncate(row, 4, bos_id=1).input_ids == [1, 4, 5, 6]
    assert truncate(row, 6, max_response_tokens=5) == ([3, 4, 5, 6], [False, True, True, True], False, True)
    prompt = Tokenised([1, 2, 3], [False] * 3, False)
    assert truncate(prompt, 2).input_ids == [2, 3]
    text = Tokenised([1, 2, 3], [True] * 3, False)
    assert truncate(text, 2).input_ids == [1, 2]


@pytest.mark.parametrize(("mask", "start"), [("", 0), ("r", 0), ("rr", 0), ("c", 1), ("crr", 1), ("rcr", 2)])
def test_a_response_starts_behind_the_last_token_of_context(mask, start):
    assert response_start([letter == "r" for letter in mask]) == start


def test_a_prompt_loses_its_oldest_turns_until_it_fits_with_its_tools(make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHAT_JINJA
    template = build_template("chat", tokenizer)
    turns = (*SAID[1:], *QUESTION, Message("assistant", "Fine."), *QUESTION)
    for system in ((), SAID[:1]):
        prompt = system + turns
        for tools in ("", '[{"type": "function", "function": {"name": "clock"}}]'):
            lengths = [template._count_tokens(system + turns[start:], tools) for start in (0, 2, 4)]
            assert lengths == sorted(lengths, reverse=True)
            assert template.shorten(prompt, lengths[0], tools) == prompt
            assert template.shorten(prompt, lengths[0] - 1, tools) == system + turns[2:]
            assert template.shorten(prompt, lengths[1], tools) == system + turns[2:]
            assert template.shorten(prompt, lengths[1] - 1, tools) == system + turns[4:]


def test_chat_template_of_the_tokenizer(make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_JINJA
    template = build_template("chat", tokenizer)
    prompt = (*SAID, Message("user", "Good!"))
    (row,) = template.tokenise_batch([template.segments(prompt, "Bye.")])
    assert tokenizer.decode(row.input_ids) == (
        "<|system|>\nBe kind.<|endoftext|>\n<|user|>\nHow are you today?<|endoftext|>\n<|assistant|>\nFine."
        "<|endoftext|>\n<|user|>\nGood!<|endoftext|>\n<|assistant|>\nBye.<|endoftext|>"
    )
    assert response_text(template, row) == "Bye.<|endoftext|>"
    (row,) = template.tokenise_batch([template.segments(prompt, "Bye.", learn_all_turns=True)])
    assert response_text(template, row) == "Fine.<|endoftext|>Bye.<|endoftext|>"


def test_a_chat_prompt_that_is_too_long_keeps_its_headers_and_system_prompt(make_tokenizer):
    """Old turns go first, whole; then the middle of the question; a long reply loses its end. There is
    room for the longer reply of a pair.
    """
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_JINJA
    template = build_template("chat", tokenizer)
    head = "<|system|>\nBe kind.<|endoftext|>\n<|user|>\n"
    question = "begin " + "How are you today? " * 40 + "end"

    def rows_of(prompt, reply, max_tokens) -> tuple[list[str], DataReport]:
        report = DataReport()
        item = Item(
            Example(prompt=prompt, chosen=reply, rejected=f"No, not at all. {reply}"), "row", "rows:1"
        )
        all_options = [DataOptions([], stage, max_tokens=max_tokens) for stage in (1, 2, 3)]
        rows = [RowBuilder(template, options, report).build([item]) for options in all_options]
        (sft,), (pair,), (prompt,) = rows
        ids = [sft["input_ids"], pair["chosen_ids"], pair["rejected_ids"], prompt["prompt_ids"]]
        assert max(map(len, ids)) <= max_tokens
        return [tokenizer.decode(row) for row in ids], report

    texts, report = rows_of((*SAID, Message("user", "Good!")), "Bye.", 66)
    assert all(text.startswith(f"{head}Good!<|endoftext|>\n<|assistant|>\n") for text in texts)
    assert report.num_truncated == 3
    for num_tokens in range(110, 130):
        texts, report = rows_of((*SAID, Message("user", question)), "Bye.", num_tokens)
        for text in texts:
            assert text.startswith(f"{head}begin How") and " ... " in text
            assert "end<|endoftext|>\n<|assistant|>\n" in text and "Fine." not in text
        assert texts[0].endswith("<|assistant|>\nBye.<|endoftext|>\n") and report.num_truncated == 3
    texts, report = rows_of((*SAID, Message("user", "Good!")), "Bye. " * 99, 140)
    assert all(text.startswith(head) for text in texts) and texts[0].count("Bye.") > 10
    assert not texts[0].endswith("\n"), "what follows a reply does not follow half of one"
    for num_tokens in range(24, 70):  # what follows a reply has room
        rows_of((Message("user", "Good!"),), "Bye.", num_tokens)


def test_chat_template_problems_name_the_cure(make_tokenizer):
    with pytest.raises(ValueError, match="no chat template; use --template human_assistant"):
        build_template("chat", make_tokenizer())
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_JINJA.replace("{{ eos_token }}", "<|im_end|>")
    with pytest.raises(ValueError, match=r"ends a turn with '<\|im_end\|>'.*pass that token as --eot_token"):
        build_template("chat", tokenizer)
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + (CHAT_JINJA)
    )
    with pytest.raises(BadRow, match="no system"):
        build_template("chat", tokenizer).segments((Message("system", "x"), *QUESTION), "y")


def test_digest_changes_with_tokenizer_and_template(tiny_tokenizer, make_tokenizer):
    more, chat = make_tokenizer(), make_tokenizer()
    more.add_tokens(["<new>"])
    digests = [
        build_template("human_assistant", t).digest() for t in (tiny_tokenizer, make_tokenizer(), more)
    ]
    digests.append(build_template("plain", tiny_tokenizer).digest())
    for chat.chat_template in (CHAT_JINJA, CHAT_JINJA + " "):
        digests.append(build_template("chat", chat).digest())
    assert digests[0] == digests[1] and len(set(digests)) == len(digests) - 1


# ---- the tokenizer: one end-of-turn id, a padding token, and ids that never move


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


@pytest.mark.parametrize(
    ("eos", "eot", "message"),
    [
        (None, None, "no EOS token.*--eot_token.*--add_eot_token"),
        ("<|endoftext|>", "<turn>", r"--eot_token <turn>: .*splits it into \d+ tokens.*--add_eot_token"),
    ],
)
def test_no_end_of_turn_of_one_id_names_the_cures(tmp_path, make_tokenizer, eos, eot, message):
    make_tokenizer(eos=eos).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(str(tmp_path), eot_token=eot)


@pytest.mark.parametrize("is_new", [False, True])
def test_an_end_of_turn_keeps_its_id_or_gets_a_new_one_at_the_end(tmp_path, make_tokenizer, is_new):
    before = make_tokenizer()
    before.save_pretrained(tmp_path)
    vocabulary = before.get_vocab()
    word = next(token for token in vocabulary if token.isalpha() and token.isascii() and len(token) >= 3)
    token, token_id = ("<turn>", len(before)) if is_new else (word, vocabulary[word])
    tokenizer = load_tokenizer(str(tmp_path), eot_token=token, add_eot_token=is_new)
    assert (tokenizer.eos_token_id, len(tokenizer)) == (token_id, len(before) + is_new)
    assert tokenizer(f"x{token}", add_special_tokens=False).input_ids[-1] == token_id
    assert vocabulary.items() <= tokenizer.get_vocab().items()


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
