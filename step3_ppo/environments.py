"""`--environment MODULE:CLASS`: multi-turn conversations with your own environment.

    class Doubler:
        max_turns = 4  # default: DEFAULT_MAX_TURNS
        num_threads = 1  # default: 1; more where step waits, for example for a server

        def reset(self, row: dict) -> list[dict]:  # the first messages to the model
            return row["messages"]

        def step(self, messages: list[dict]) -> tuple[list[dict], float, bool]:
            return [{"role": "user", "content": "Again."}], 1.0, False  # reply, reward, is_over

Each conversation has its own object of the class. `row` has the fields of the data set's row, among them
`messages`, the chat of its prompt; `step` gets all messages so far, the model's last reply at the end. The
score of a conversation is the sum of its rewards. With `num_threads` above 1, `step` of so many conversations
runs at a time: what they share must allow that. A response has the model's turns and the environment's
messages between them: sampled token ids are kept, only the environment's messages are tokenised.

# B prompts of a batch, N conversations of each, which are adjacent: B' = B x N
"""

import copy
import inspect
import json
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from common.data.dialogue import Template
from common.data.example import ROLES, BadRow, Message
from common.data.packed_batch import ROW_IDS, PackedBatch, pack_rows
from common.flags.plugins import get_from, import_own_module
from common.ranks.step_costs import COSTS
from step3_ppo.rewards.text_rewards import describe_error, quoted, read_number

DEFAULT_MAX_TURNS = 8
KIND = "environment"  # kind of its reward, and log name of its scores and its seconds
NUM_TURNS = "num_turns"  # key of a rollout batch: turns that the environment received

SHOWN_KEYS = ("name", "tool_calls", "tool_call_id", "reasoning_content")  # besides role and content
Chat = list[dict[str, str]]  # messages of a role and a content


def import_environment(target: str) -> type:
    """The class that `MODULE:CLASS` names; the working directory is searched last.

    Raises ValueError if it cannot be imported, or is not a class with the required methods.
    """
    flag = f"--environment {target}"
    module_name, colon, name = target.partition(":")
    if not (module_name and colon and name):
        raise ValueError(f"{flag} names no class; write MODULE:CLASS")
    try:
        kind = get_from(import_own_module(module_name), name)
    except ImportError as error:
        raise ValueError(f"{flag}: {error}") from error
    if not isinstance(kind, type):
        raise ValueError(f"{flag}: {name} is of type {type(kind).__name__}; name a class")
    cure = "define reset(self, row) and step(self, messages)"
    for method, arguments in (("reset", (None, {})), ("step", (None, []))):
        try:
            inspect.signature(getattr(kind, method, None)).bind(*arguments)
        except TypeError as error:
            raise ValueError(f"{flag}: {name} has no such {method} ({error}); {cure}") from error
    try:
        inspect.signature(kind).bind()
    except TypeError as error:
        raise ValueError(f"{flag}: {name}() must not require arguments ({error})") from error
    for limit in ("max_turns", "num_threads"):
        number = getattr(kind, limit, 1)
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"{flag}: {name}.{limit} {number!r} must be a whole number of at least 1")
    return kind


class ConversationFailed(Exception):
    """A conversation cannot continue; the message says what the environment did, and the cure."""


@dataclass
class Conversation:
    """State of a conversation."""

    environment: Any
    row_id: str
    messages: Chat
    num_known: int = 0  # tokens of its response up to the end of the environment's last reply
    num_turns: int = 0
    score: float = 0.0  # NaN after a failure


class Environments:
    """The conversations of a run; their state is kept only while their batch is sampled.

    `first_failure` is the first since it was cleared.
    """

    def __init__(
        self, target: str, template: Template, decode: Callable[[Any], str], max_prompt_tokens: int
    ) -> None:
        """`decode` removes special tokens. Raises ValueError, see `import_environment`."""
        self.target = target
        self.kind = import_environment(target)
        self.template = template
        self.decode = decode
        self.max_prompt_tokens = max_prompt_tokens
        self.max_turns = getattr(self.kind, "max_turns", DEFAULT_MAX_TURNS)
        self.first_failure = ""

    def begin(self, prompts: PackedBatch, num_samples: int) -> tuple[PackedBatch, list[Conversation]]:
        """The prompts with the messages of `reset`, and the conversations (B',) that start with them.

        A conversation that cannot start has failed; the row's own prompt is used if no other conversation of
        the group gives one.
        """
        conversations = []
        all_ids = []
        texts = []
        fields = map(json.loads, prompts.texts("row_fields"))
        chats = map(json.loads, prompts.texts("messages"))
        own = (prompts.texts(ROW_IDS), prompts.texts("prompt_texts"), prompts.sequences("prompt_ids"))
        for row_fields, chat, row_id, text, ids in zip(fields, chats, *own, strict=True):
            row = row_fields | {"messages": chat}
            token_ids = ids.tolist()
            group = [self._begin(row, row_id) for _ in range(num_samples)]
            messages = next((c.messages for c in group if not math.isnan(c.score)), chat)
            for conversation in group:
                if conversation.messages != messages:
                    self._fail(conversation, "reset returned different messages within the group")
            if messages != chat:
                try:
                    token_ids, text = self._show(messages, row_fields.get("tools") or "")
                except BadRow as error:
                    for conversation in group:
                        self._fail(conversation, f"reset returned messages that cannot be shown: {error}")
            conversations += group
            all_ids.append(token_ids)
            texts.append(text)
        data, lengths = pack_rows(all_ids)
        prompts = prompts.with_key("prompt_ids", data, lengths=lengths)
        return prompts.with_texts("prompt_texts", texts), conversations

    def answer(
        self, conversations: Sequence[Conversation], ended: list[tuple[int, list[int]]]
    ) -> list[list[int] | None]:
        """Reply to ended turns of the model; see `common.generation.generate.TurnCallback`."""
        started = time.monotonic()
        asked = [(conversations[number], token_ids) for number, token_ids in ended]
        num_threads = getattr(self.kind, "num_threads", 1)
        if num_threads == 1:  # in this thread: what one thread has opened, another may not use
            answers = [self._answer(*pair) for pair in asked]
        else:
            with ThreadPoolExecutor(num_threads) as pool:
                answers = list(pool.map(lambda pair: self._answer(*pair), asked))
        COSTS.move(time.monotonic() - started, "generate", KIND)
        return answers

    def _begin(self, row: dict[str, Any], row_id: str) -> Conversation:
        conversation = Conversation(None, row_id, row["messages"])
        try:
            conversation.environment = self._call("__init__", self.kind)
            messages = self._call("reset", conversation.environment.reset, copy.deepcopy(row))
            conversation.messages = self._checked_chat("reset", messages)
        except ConversationFailed as error:
            self._fail(conversation, str(error))
        return conversation

    def _answer(self, conversation: Conversation, token_ids: list[int]) -> list[int] | None:
        conversation.num_turns += 1
        if math.isnan(conversation.score):
            return None
        reply = self.decode(token_ids[conversation.num_known :])
        reply = reply if self.template.is_verbatim else reply.strip()
        conversation.messages = [*conversation.messages, {"role": "assistant", "content": reply}]
        try:
            result = self._call("step", conversation.environment.step, copy.deepcopy(conversation.messages))
            if not isinstance(result, tuple | list) or len(result) != 3:
                shown = quoted(str(result))
                raise ConversationFailed(f"step returned {shown}; return (messages, reward, is over)")
            messages, reward, is_over = result
            number = None if isinstance(reward, str) else read_number(reward)
            if number is None:
                raise ConversationFailed(
                    f"step returned the reward {quoted(str(reward))}, not a finite number"
                )
            conversation.score += number
            if is_over or conversation.num_turns == self.max_turns:
                return None
            messages = self._checked_chat("step", messages)
            reply_ids = self.template.continue_ids(list(map(Message.from_dict, messages)))
        except (ConversationFailed, BadRow) as error:
            self._fail(conversation, str(error))
            return None
        conversation.messages += messages
        conversation.num_known = len(token_ids) + len(reply_ids)
        return reply_ids

    def _show(self, messages: Chat, tools: str | list) -> tuple[list[int], str]:
        """Token ids of a prompt, truncated like a row's, and its whole text; `tools` are the row's."""
        tools = tools if isinstance(tools, str) else json.dumps(tools)
        prompt = shorter = tuple(map(Message.from_dict, messages))
        if self.template.keeps_headers:
            shorter = self.template.shorten(prompt, self.max_prompt_tokens, tools)
        segments = self.template.segments(shorter, None, tools=tools)
        tokens = self.template.encode(segments, self.max_prompt_tokens)
        return tokens.input_ids, self.template.prompt_text(prompt, tools)

    def _call(self, name: str, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the environment. Raises ConversationFailed for any exception."""
        try:
            return method(*arguments)
        except BaseException as error:  # pytest's `fail` is not an Exception; Ctrl-C is not raised here
            raise ConversationFailed(f"{name} raised {describe_error(error)}") from error

    def _checked_chat(self, method: str, messages: Any) -> Chat:
        """A copy of the messages. Raises ConversationFailed if they are not valid."""
        roles = ROLES if self.template.keeps_headers else ROLES[:-1]
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            what = f"{method} returned {quoted(str(messages))} for messages"
            raise ConversationFailed(f"{what}; return a list of at least one, or is over = True")
        for message in messages:
            is_message = isinstance(message, dict) and isinstance(message.get("content"), str)
            if not is_message or message.get("role") not in roles:
                what = f"{method} returned the message {quoted(str(message))}"
                raise ConversationFailed(f"{what}; it needs a content and a role of {', '.join(roles)}")
        # Half of a surrogate pair cannot be encoded.
        content = [m["content"].encode(errors="replace").decode() for m in messages]
        kept = [{k: v for k, v in m.items() if k in ("role", *SHOWN_KEYS)} for m in messages]
        return [m | {"content": text} for m, text in zip(kept, content, strict=True)]

    def _fail(self, conversation: Conversation, reason: str) -> None:
        conversation.score = math.nan
        what = f"environment {self.target}, row {conversation.row_id}, turn {conversation.num_turns}"
        self.first_failure = self.first_failure or f"{what}: {reason}"


def scores_of(conversations: Sequence[Conversation]) -> torch.Tensor:
    """Sums (B',) fp32 of the rewards; NaN for a conversation that failed."""
    return torch.tensor([conversation.score for conversation in conversations], dtype=torch.float32)
