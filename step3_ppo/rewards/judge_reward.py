"""`--reward judge:URL[:MODEL][#TEMPLATE_FILE]`: an LLM behind OpenAI's chat API scores responses, and
compares two. Does not import torch.

URL is the base of the API, as in http://127.0.0.1:8000/v1. A template file has the question to the judge and
the format of its reply, see `read_template`. Requests have temperature 0 and the run's seed; equal questions
are sent once (LLM-as-a-judge, arXiv:2306.05685).
"""

import hashlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.flags.access_token import JUDGE_VARIABLE, judge_token
from step3_ppo.rewards.http_reward import JsonClient
from step3_ppo.rewards.text_rewards import (
    Answers,
    Checked,
    RewardError,
    TextReward,
    checked_scores,
    quoted,
    read_number,
)

MAX_REQUESTS = 64  # concurrent, for any --reward_batch_size
DEFAULT_TEMPLATE = Path(__file__).with_name("judge_template.txt")
LAST_NUMBER = r"(-?\d+(?:\.\d+)?)"
FIELDS = {"score": ("prompt", "answer"), "pair": ("prompt", "first", "second")}  # of a template, by part
_VERDICTS = {"A": 1, "B": -1, "C": 0}
COSTS = ("calls", "cached", "prompt_tokens", "completion_tokens", "seconds")
_HEAD = ("range", "pattern", "max_tokens")


@dataclass(frozen=True)
class JudgeTemplate:
    """The questions to a judge, and the parsing of its replies."""

    score: str  # with {prompt} and {answer}
    pair: str  # with {prompt}, {first} and {second}
    low: float  # scores are clipped to [low, high]
    high: float
    pattern: re.Pattern[str] = re.compile(LAST_NUMBER)  # the group of its last match is the score
    max_tokens: int = 0  # of a reply; 0: the server's limit

    def read_score(self, reply: str) -> float:
        """Score in a reply, clipped to the range. Raises RewardError if there is none."""
        numbers = self.pattern.findall(reply)
        number = read_number(numbers[-1]) if numbers else None
        if number is None:
            raise RewardError(
                f"no score matches {self.pattern.pattern!r} in the reply {quoted(reply)}; ask for it in the "
                "template, or raise its max_tokens if the reply was cut off"
            )
        return min(max(number, self.low), self.high)


def read_verdict(reply: str) -> int:
    """1 if the first of two responses is preferred, -1 for the second, 0 for a tie.

    Reads the last [[A]], [[B]] or [[C]] of the reply. Raises RewardError if there is none.
    """
    verdicts = re.findall(r"\[\[([ABC])\]\]", reply)
    if not verdicts:
        raise RewardError(
            f"no [[A]], [[B]] or [[C]] in the reply {quoted(reply)}; ask for it in the template"
        )
    return _VERDICTS[verdicts[-1]]


def fill(template: str, **texts: str) -> str:
    """The template with the texts inserted for their names; placeholders inside a text are not filled."""
    return re.sub(r"\{(\w+)\}", lambda match: texts.get(match[1], match[0]), template)


def read_template(path: str) -> JudgeTemplate:
    """The template in a file, the built-in one for "".

    Lines NAME: VALUE (`range: LOW HIGH`, optionally `pattern: REGULAR_EXPRESSION`, `max_tokens: N`), then the
    line "--- score" and the question, and optionally "--- pair" and the question about two responses, by
    default the built-in one.

    Raises ValueError if the file does not exist or is invalid.
    """
    where = f"--reward judge:...#{path}"
    try:
        text = Path(path or DEFAULT_TEMPLATE).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{where}: the template cannot be read: {error}") from error
    head, *rest = re.split(r"^--- *(\w+) *$\n", text, flags=re.MULTILINE)
    parts = dict(zip(rest[::2], rest[1::2], strict=True))
    if "score" not in parts or parts.keys() - FIELDS.keys():
        raise ValueError(
            f"{where}: its parts are {', '.join(parts) or 'none'}; write the question after a line "
            "'--- score', and optionally one that compares two answers after '--- pair'"
        )
    for name, body in parts.items():
        missing = [f"{{{field}}}" for field in FIELDS[name] if f"{{{field}}}" not in body]
        if missing:
            raise ValueError(f"{where}: the part '--- {name}' lacks {', '.join(missing)}")
    if "pair" not in parts:
        parts["pair"] = read_template("").pair
    return JudgeTemplate(**{name: body.strip() for name, body in parts.items()}, **_read_head(head, where))


def _read_head(head: str, where: str) -> dict[str, Any]:
    """Values of the head as fields of `JudgeTemplate`. Raises ValueError."""
    lines = (line.partition(":") for line in head.splitlines() if line.strip())
    given = {name.strip(): value.strip() for name, _, value in lines}
    if unknown := given.keys() - set(_HEAD):
        raise ValueError(
            f"{where}: its head has unknown lines {', '.join(sorted(unknown))}; known: {', '.join(_HEAD)}"
        )
    limits = [read_number(word) for word in given.get("range", "").split()]
    if len(limits) != 2 or None in limits or not limits[0] < limits[1]:
        raise ValueError(
            f"{where}: 'range: {given.get('range', '')}' of its head must be two numbers, as in range: 1 10"
        )
    values: dict[str, Any] = {"low": limits[0], "high": limits[1]}
    if "pattern" in given:
        try:
            values["pattern"] = re.compile(given["pattern"])
        except re.error as error:
            raise ValueError(
                f"{where}: 'pattern: {given['pattern']}' is not a regular expression: {error}"
            ) from error
        if values["pattern"].groups != 1:
            raise ValueError(f"{where}: 'pattern: {given['pattern']}' must have one group, the score")
    if "max_tokens" in given:
        if not given["max_tokens"].isdecimal():
            raise ValueError(f"{where}: 'max_tokens: {given['max_tokens']}' must be a whole number")
        values["max_tokens"] = int(given["max_tokens"])
    return values


def split_target(target: str) -> tuple[str, str, str]:
    """Address, model ("" for the server's only one) and template file of `URL[:MODEL][#TEMPLATE_FILE]`.

    Raises ValueError without an http address; a model follows the path of the address.
    """
    address, _, path = target.partition("#")
    match = re.fullmatch(r"(https?://[^/\s]+(?:/[^:\s]*)?)(?::(\S+))?", address)
    if not match:
        raise ValueError(
            f"--reward judge:{target}: {address!r} is not an address; write judge:http://HOST:PORT/v1, and "
            "a model after its path, as in judge:http://HOST:PORT/v1:MODEL"
        )
    return match[1].rstrip("/"), match[2] or "", path


class JudgeReward(TextReward):
    """A reward from an LLM that scores each response in a separate request."""

    def __init__(self, target: str, args: Any) -> None:
        """Read the template; nothing is sent yet. Raises ValueError, see `read_template`, `judge_token`."""
        url, self._model, path = split_target(target)
        super().__init__(f"judge:{target}", args, num_threads=min(args.reward_batch_size, MAX_REQUESTS))
        self.template = read_template(path)
        self.costs: Counter[str] = Counter()  # by names in COSTS, since the last gathering
        self._known: dict[bytes, float] = {}  # number read from a reply, by hash of the question
        self._client = JsonClient(url, args.reward_timeout_seconds, JUDGE_VARIABLE, judge_token())
        self._lock = threading.Lock()

    def score(self, answers: Answers) -> list[float]:
        """See `TextReward.score`; equal responses to a prompt are one question."""
        ones = list(answers.batches(1))
        questions = [self._question_about(one) for one in ones]
        unique = dict(zip(questions, ones, strict=True))
        scores = dict(zip(unique, self._map_threads(self._score, unique.values()), strict=True))
        self.costs["cached"] += len(questions) - len(unique)
        return [score for question in questions for score in scores[question]]

    def ask(self, batch: Answers) -> Checked:
        """See `TextReward.ask`; the batch is one response."""
        return checked_scores([self._judge(self._question_about(batch), self.template.read_score)], batch)

    def prefer(self, prompts: Sequence[str], responses: Sequence[str], others: Sequence[str]) -> list[float]:
        """Preference for each response: 1 if the judge prefers it in both orders, 0 if the other, else 0.5.

        NaN for a failure that --reward_on_error tolerates. Equal responses tie without a request. Raises
        RewardError.
        """
        return list(self._map_threads(self._prefer, prompts, responses, others))

    def _prefer(self, prompt: str, response: str, other: str) -> float:
        if response == other:
            return 0.5
        try:
            first, second = (
                self._judge(fill(self.template.pair, prompt=prompt, first=a, second=b), read_verdict)
                for a, b in ((response, other), (other, response))
            )
        except RewardError as error:
            self.fail(f"reward {self.name}, for two answers to {quoted(prompt)}: {error}")
            return float("nan")
        return {2: 1.0, -2: 0.0}.get(first - second, 0.5)

    def _map_threads(self, work: Callable[..., Any], *columns: Iterable[Any]) -> Iterable[Any]:
        return self._threads.map(work, *columns) if self._threads else map(work, *columns)

    def _question_about(self, one: Answers) -> str:
        return fill(self.template.score, prompt=one.prompts[0], answer=one.responses[0])

    def _judge(self, question: str, read: Callable[[str], float]) -> float:
        """Number read from the judge's reply, cached by question."""
        key = hashlib.blake2b(question.encode("utf-8", "replace"), digest_size=16).digest()
        if key in self._known:
            self._count(cached=1)
            return self._known[key]
        content = {
            "model": self._find_model(),
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "seed": self.args.seed,
        }
        if self.template.max_tokens:
            content["max_tokens"] = self.template.max_tokens
        started = time.monotonic()
        try:
            answer = self._client.ask(content, path="/chat/completions")
        finally:
            self._count(calls=1, seconds=time.monotonic() - started)
        reply, usage = _read_reply(answer)
        self._count(**usage)
        self._known[key] = value = read(reply)
        return value

    def _find_model(self) -> str:
        """Name of the model, requested from the server if the flag has none. Raises RewardError."""
        with self._lock:
            if not self._model:
                answer = self._client.ask(None, path="/models")
                try:
                    names = [str(model["id"]) for model in json.loads(answer)["data"]]
                except (ValueError, RecursionError, TypeError, KeyError):
                    raise RewardError(
                        f"no list of models: {quoted(answer)}; name one after the address"
                    ) from None
                if len(names) != 1:
                    listed = quoted(", ".join(names))
                    raise RewardError(
                        f"it serves {len(names)} models, {listed}; name one after the address, as URL:MODEL"
                    )
                self._model = names[0]
            return self._model

    def _count(self, **numbers: float) -> None:
        with self._lock:
            self.costs.update(numbers)


def _read_reply(text: str) -> tuple[str, dict[str, int]]:
    """Text of a chat completion, and its numbers of prompt and reply tokens.

    Raises RewardError.
    """
    try:
        answer = json.loads(text)
        reply = answer["choices"][0]["message"]["content"]
        usage = answer.get("usage") or {}
        counts = {name: int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")}
    except (ValueError, RecursionError, TypeError, KeyError, IndexError, AttributeError, OverflowError):
        reply, counts = None, {}
    if not isinstance(reply, str):
        raise RewardError(
            f"no text in the chat completion: {quoted(text)}; the address must be the root of OpenAI's API, "
            "as in http://HOST:PORT/v1"
        )
    return reply, counts
