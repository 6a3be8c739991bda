"""Conversations of other programs, as the server asks them: what transformers renders, or an error."""

import copy

import pytest
from test_chat_templates import NAMES, build_tokenizer

from common.data.chat_template import build_template
from common.data.example import Message
from serving.answering import Answerer

FORMS = [*NAMES, "human_assistant", "one_line"]
SAID = [("user", "Is it warm?"), ("assistant", "Yes."), ("user", "And tomorrow?")]
CONVERSATIONS = {
    "a prefilled reply": [*SAID, ("assistant", "It will be ")],
    "a prefilled first reply": [SAID[0], ("assistant", "\n It")],
    "two system messages": [("system", "Be brief."), ("system", "Be kind."), *SAID],
    "a late system message": [*SAID[:2], ("system", "Be brief."), SAID[2]],
    "a system message and a prefilled reply": [("system", "Be brief."), SAID[0], ("assistant", "Yes")],
}


def build(form: str, make_tokenizer) -> Answerer:
    """What encodes conversations, without a model."""
    answerer = Answerer.__new__(Answerer)
    if form in NAMES:
        answerer.template = build_template("chat", build_tokenizer(form, make_tokenizer))
    else:
        answerer.template = build_template(form, make_tokenizer())
    answerer.max_length = 100_000
    return answerer


def rendered(answerer: Answerer, turns) -> list[int] | None:
    """Ids of the exported chat template in transformers; None where it rejects or omits a message."""
    tokenizer = copy.deepcopy(answerer.template.tokenizer)
    tokenizer.chat_template = answerer.template.chat_template
    messages = [{"role": role, "content": content} for role, content in turns]
    is_open = turns[-1][0] == "assistant"
    kinds = {"continue_final_message": is_open, "add_generation_prompt": not is_open}
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **kinds)
    except Exception:
        return None
    if any(role == "system" and content not in text for role, content in turns):
        return None
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("turns", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
@pytest.mark.parametrize("form", FORMS)
def test_ids_are_those_of_transformers_or_the_conversation_is_rejected(form, turns, make_tokenizer):
    answerer = build(form, make_tokenizer)
    messages = [Message(*turn) for turn in turns]
    expected = rendered(answerer, turns)
    is_own_form = form not in NAMES
    if expected is None or (is_own_form and ("system" in [role for role, _ in turns[1:]])):
        with pytest.raises(ValueError, match="rejects|omits a system message|cannot render a system message"):
            answerer.encode(messages)
    else:
        assert answerer.encode(messages) == expected


def test_most_templates_take_each_conversation(make_tokenizer):
    answerers = [build(name, make_tokenizer) for name in NAMES]
    for turns in CONVERSATIONS.values():
        assert sum(rendered(answerer, turns) is not None for answerer in answerers) >= len(NAMES) // 2
