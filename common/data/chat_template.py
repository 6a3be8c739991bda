"""Chat templates: rows in the form of the tokenizer's own chat template; templates by name.

A row's segments are cut out of the text that the template renders for the whole conversation, which is the
text that other programs render.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from os.path import commonprefix
from typing import Any

from transformers import PreTrainedTokenizerFast

from common.data.dialogue import (
    EXCHANGE,
    HumanAssistantTemplate,
    OneLineTemplate,
    PlainTemplate,
    Segment,
    Template,
)
from common.data.example import BadRow, Message, RewritesPast, Turn

GAP = " ... "  # replaces the middle of a shortened question
BORDER_TOKENS = 4  # tokens next to a gap that may change


class OtherEndOfTurn(ValueError):
    """A chat template ends a turn with `token`, which is not the tokenizer's EOS."""

    def __init__(self, token: str, reason: str) -> None:
        super().__init__(reason)
        self.token = token


class ChatTemplate(Template):
    """The tokenizer's own chat template: a row is exactly the text that it renders."""

    name = "chat"
    description = "its chat template"
    keeps_headers = True

    def __init__(self, tokenizer: PreTrainedTokenizerFast, variables: str = "") -> None:
        """Find the end of a reply, the text after it, and the key of a thought by rendering probes.

        `variables` is a JSON object passed to every rendering. Raises ValueError if it is not an object, or
        the chat template is missing, leaves texts out or does not end a turn; OtherEndOfTurn if it ends a
        turn with another token than the tokenizer's EOS.
        """
        super().__init__(tokenizer)
        if not tokenizer.chat_template:
            raise ValueError(
                "--template chat: the tokenizer has no chat template; use --template human_assistant, or a "
                "tokenizer with a chat_template.jinja"
            )
        self._form = json.dumps(["whole", tokenizer.chat_template, variables])
        self._variables = _read_variables(variables)
        self._thought_key = ""  # key of a turn's reasoning
        question, reply = EXCHANGE
        shown = self._render(EXCHANGE)
        if question.content not in shown or reply.content not in shown:
            raise ValueError(
                "--template chat: the tokenizer's chat template leaves out the text of the user or of the "
                "assistant; use --template human_assistant, or fix the chat template"
            )
        self._lacks_bos = self.bos_id is not None and not shown.startswith(tokenizer.bos_token)
        if self._lacks_bos:  # the tokenizer adds it
            self._lead_with_bos()
        end = shown.rpartition(reply.content)[2]
        self.has_end = self.eot_token in end
        self._check_end(end)
        closing = end.partition(self.eot_token)[2]
        _, *self.closing_ids = self._fast.encode(self.eot_token + closing, add_special_tokens=False).ids
        for key in ("reasoning", "thinking", "reasoning_content"):
            thinks = reply._replace(extras=json.dumps({key: "probe thought"}))
            with suppress(BadRow):  # a template may reject the key
                if "probe thought" in self._render([question, thinks]):
                    self._thought_key = key

    def _check_end(self, end: str) -> None:
        """Raise if a reply is followed by a token other than EOS, or by none although a token starts the
        next turn.
        """
        if end.strip().startswith(self.eot_token):
            return
        after = self._render([*EXCHANGE, EXCHANGE[0]]).partition(EXCHANGE[1].content)[2]
        ids = self._fast.encode(after.strip(), add_special_tokens=False).ids
        token = self._fast.id_to_token(ids[0]) if ids else ""
        if end.strip():
            raise OtherEndOfTurn(
                token if end.strip().startswith(token) and token in self.tokenizer.get_added_vocab() else "",
                f"--template chat ends a turn with {end.strip()!r}, but the tokenizer's eos is "
                f"{self.eot_token!r}, so generation would not stop there; pass that token as --eot_token",
            )
        if token != self.eot_token and token in self.tokenizer.get_added_vocab():
            raise ValueError(
                f"--template chat writes no end of the assistant's turns, and the tokenizer's eos "
                f"{self.eot_token!r} does not follow them; pass --eot_token '{token}', which begins the next "
                "turn"
            )

    @property
    def chat_template(self) -> Any:
        """See `Template.chat_template`; variables default to their values in training, and it writes BOS if
        rows have one.
        """
        defaults = "".join(
            f"{{%- if {name} is not defined -%}}{{%- set {name} = {json.dumps(value)} -%}}{{%- endif -%}}"
            for name, value in self._variables.items()
        )
        if self._lacks_bos:
            defaults += "{{- bos_token -}}"
        template = self.tokenizer.chat_template
        if isinstance(template, dict):  # templates by name, such as one for tools
            return {name: defaults + text for name, text in template.items()}
        return defaults + template

    def _segments(
        self, prompt: tuple[Message, ...], reply: Message | None, learn_all_turns: bool, tools: str
    ) -> list[Segment]:
        """See `Template.segments`. Every segment is cut out of the text that the template renders."""
        if reply is None:
            return [Segment(self._render_question(prompt, tools), False)]
        whole = (*prompt, reply)
        learned = [i for i, m in enumerate(prompt) if m.role == "assistant" and m.is_learned]
        pieces: list[Segment] = []
        done = ""
        for turn in [*(learned if learn_all_turns else []), len(prompt)]:
            context, learnt = self._last_turn(whole[: turn + 1], tools)
            if not context.startswith(done):
                raise RewritesPast("the chat template renders a turn differently once another follows")
            pieces += [Segment(context[len(done) :], False), Segment(learnt, True)]
            done = context + learnt
        return pieces

    def continued(self, messages: Sequence[Message]) -> list[Segment]:
        """See `Template.continued`."""
        return [Segment(self._render(messages, continue_final_message=True), False)]

    def _render_question(self, prompt: Sequence[Message], tools: str) -> str:
        """The text of a prompt, with the generation prompt. Raises BadRow if it lacks a part of the row."""
        text = self._render(prompt, tools, add_generation_prompt=True)
        names = [tool_name(tool) for tool in json.loads(tools or "[]")]
        names += [name for message in prompt for name in called_tools(message)]
        parts = [("a message of the user", message.content) for message in prompt if message.role == "user"]
        self._check_shown(parts + [("a tool or a tool call", name) for name in names], text)
        return text

    def _last_turn(self, conversation: Sequence[Message], tools: str) -> tuple[str, str]:
        """The text up to a conversation's last reply, and the reply up to its end-of-turn token.

        Raises BadRow if the rendered reply does not follow the generation prompt, or is incomplete.
        """
        *prompt, reply = conversation
        asked = self._render_question(prompt, tools)
        shown = self._render(conversation, tools)
        if not shown.startswith(asked):
            at = len(commonprefix([asked, shown]))
            raise BadRow(
                f"the chat template's generation prompt is {asked[at:]!r}, but it renders this reply as "
                f"{shown[at : at + 40]!r}, which generation would never produce; "
                f"{self._cure(conversation, shown)}"
            )
        text = shown[len(asked) :]
        thought, _, said = reply.content.rpartition("</think>")
        reasoning = json.loads(reply.extras or "{}").get("reasoning_content", "")
        parts = [
            ("the reply", said),
            ("the thought", thought.rpartition("<think>")[2]),
            ("reasoning_content", reasoning),
            *(("tool_calls", name) for name in called_tools(reply)),
        ]
        self._check_shown(parts, text)
        head, end, _ = text.rpartition(self.eot_token)
        if end or not self.has_end:
            return asked, (head if end else text) + self.eot_token
        text = text.rstrip()
        last = self._fast.id_to_token(self._fast.encode(text, add_special_tokens=False).ids[-1])
        if last not in self.tokenizer.get_added_vocab():
            raise BadRow("the chat template does not end this reply, so the model would not learn to stop")
        return asked, text

    def _cure(self, conversation: Sequence[Message], shown: str) -> str:
        """A cure, for a message, that makes the generation prompt agree with the rendered reply."""
        *prompt, reply = conversation
        for name in ("enable_thinking", "thinking"):
            if shown.startswith(self._render(prompt, add_generation_prompt=True, **{name: False})):
                return f"pass --chat_template_kwargs '{json.dumps({name: False})}'"
        thinks = reply._replace(content=f"<think>\nprobe thought\n</think>\n\n{reply.content}")
        if self._render([*prompt, thinks]).startswith(self._render(prompt, add_generation_prompt=True)):
            return "give the thought that the template opens (reasoning_content)"
        return "use another --template"

    def _check_shown(self, parts: Sequence[tuple[str, str]], text: str) -> None:
        for name, part in parts:
            if self._without_eot(part).strip() not in text:
                raise BadRow(f"the chat template omits {name}: {part.strip()[:40]!r}")

    def _text_after_reply(self, messages: Sequence[Message]) -> str:
        after = self._render_question((*EXCHANGE, *messages), "").partition(EXCHANGE[1].content)[2]
        _, end, text = after.partition(self.eot_token)
        if not end:
            raise BadRow(
                f"the chat template does not end an earlier reply with {self.eot_token!r}, so a conversation "
                "cannot continue after a reply"
            )
        return text

    def shorten(self, prompt: Sequence[Message], max_tokens: int, tools: str = "") -> tuple[Message, ...]:
        """See `Template.shorten`; a single question that is too long loses its middle."""
        *head, last = super().shorten(prompt, max_tokens, tools)
        text = last.content.strip()
        spans = self._fast.encode(text, add_special_tokens=False).offsets
        num_gap = len(self._fast.encode(GAP, add_special_tokens=False).ids) + BORDER_TOKENS
        excess = self._count_tokens([*head, last], tools) - max_tokens
        num_kept = len(spans) - excess - num_gap
        if excess > 0 and num_kept >= 2:
            begin = spans[num_kept // 2 - 1][1]
            end = spans[num_kept // 2 - num_kept][0]
            last = last._replace(content=text[:begin] + GAP + text[end:])
        return (*head, last)

    def _render(self, messages: Sequence[Message], tools: str = "", **variables: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                [self._turn(message) for message in messages],
                tools=json.loads(tools) if tools else None,
                tokenize=False,
                **self._variables | variables,
            )
        except Exception as error:  # a template may raise any exception
            raise BadRow(f"the chat template rejects this dialogue: {error}") from error

    def _turn(self, message: Message) -> dict[str, Any]:
        """A message as the template expects it: a turn of a row unchanged, other texts stripped."""
        content = self._without_eot(message.content) if message.role == "assistant" else message.content
        is_verbatim = isinstance(message, Turn)
        turn = message.as_dict() | {"content": content if is_verbatim else content.strip()}
        if self._thought_key and "reasoning_content" in turn:
            turn[self._thought_key] = turn.pop("reasoning_content")
        return turn


def _read_variables(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text or "{}"))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f'--chat_template_kwargs {text}: {error}; give a JSON object, as {{"enable_thinking": false}}'
        ) from error


def called_tools(message: Message) -> list[str]:
    """Names of the tools that a message calls."""
    return [tool_name(call) for call in json.loads(message.extras or "{}").get("tool_calls", [])]


def tool_name(tool: Mapping[str, Any]) -> str:
    """Name of a tool, or of a call of one, in OpenAI's form or bare."""
    return str(tool.get("function", tool).get("name", ""))


_TEMPLATES = {t.name: t for t in (HumanAssistantTemplate, OneLineTemplate, ChatTemplate, PlainTemplate)}
TEMPLATE_NAMES = tuple(_TEMPLATES)


def build_template(name: str, tokenizer: PreTrainedTokenizerFast, variables: str = "") -> Template:
    """Build the template called `name`, one of TEMPLATE_NAMES; `variables` are for a chat template.

    Raises ValueError for an unknown name, or a tokenizer that does not support it.
    """
    if name not in _TEMPLATES:
        raise ValueError(f"--template {name} is unknown; use one of {', '.join(TEMPLATE_NAMES)}")
    if name == ChatTemplate.name:
        return ChatTemplate(tokenizer, variables)
    if variables:
        raise ValueError(
            f"--chat_template_kwargs {variables} has no effect with --template {name}; leave it out"
        )
    return _TEMPLATES[name](tokenizer)
