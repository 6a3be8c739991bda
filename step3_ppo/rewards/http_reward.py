"""`--reward http://HOST:PORT/PATH`: scores from a server. Does not import torch.

POST {"prompts": [...], "responses": [...], "rows": [...]} returns {"scores": [...]};
serving/reward_server.py is such a server. Only the numbers of a reply are used. A token from the environment
(access_token.py) is sent with every request.
"""

import asyncio
import json
import time
from typing import Any
from urllib.parse import urlsplit

import httpx

from common.flags.access_token import CLIENT_VARIABLE, client_token
from step3_ppo.rewards.text_rewards import (
    Answers,
    Checked,
    RewardError,
    TextReward,
    checked_scores,
    quoted,
)

MAX_CONNECTIONS = 8  # concurrent batches
NUM_TRIES, BACKOFF_SECONDS = 4, 1.0  # the pause after a try doubles each time
PASSING = (408, 429)  # retried statuses below 500: timeout, too many requests
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
# A score takes about 20 bytes; the rest leaves room for an error page, whose beginning is shown.
_ANSWER_BYTES = 2**20
_SCORE_BYTES = 256
_EXPECTED = 'a server must answer {"scores": [...]} with one number for each response'


class JsonClient:
    """A JSON client. Retries failures that may be temporary: no connection, a timeout, too many requests, a
    status of 500 or above.
    """

    def __init__(self, url: str, timeout_seconds: float, variable: str, token: str) -> None:
        """`token` (from the environment's `variable`) is sent with every request; nothing is sent yet."""
        self.url = url
        self.timeout_seconds = timeout_seconds
        self.variable = variable
        # No compressed replies: a small one could decompress to a large one.
        headers = {"accept-encoding": "identity", "content-type": "application/json"}
        if token:
            headers["authorization"] = f"Bearer {token}"
        self._options = {
            "timeout": timeout_seconds,
            "trust_env": urlsplit(url).hostname not in _LOOPBACK,  # a proxy cannot reach this machine
            "headers": headers,
            "follow_redirects": False,  # texts and token are only for the server of --reward
            "verify": httpx.create_ssl_context(),  # slow to create, so only once
        }

    def ask(self, content: Any, *, path: str = "", max_bytes: int = _ANSWER_BYTES) -> str:
        """Text of the response to a POST at the address and `path`, or to a GET if the content is None.

        Raises RewardError if all tries fail, the status is an error, or the response exceeds `max_bytes`.
        """
        failure = ""
        for attempt in range(NUM_TRIES):
            if attempt:
                time.sleep(BACKOFF_SECONDS * 2 ** (attempt - 1))
            try:
                status, location, text = asyncio.run(self._send(content, path, max_bytes))
            except TimeoutError:
                failure = f"no complete response within {self.timeout_seconds:g} s"
                continue
            except httpx.RequestError as error:
                failure = f"{type(error).__name__}: {error}"
                continue
            if 200 <= status < 300:
                return text
            failure = f"status {status}: {quoted(text)}"
            if status < 500 and status not in PASSING:
                raise RewardError(f"{failure}; {self._cure(status, location)}")
        raise RewardError(
            f"failed {NUM_TRIES} times, the last time with {failure}; check that the server runs there and "
            f"answers within --reward_timeout_seconds {self.timeout_seconds:g}, or lower --reward_batch_size"
        )

    async def _send(self, content: Any, path: str, max_bytes: int) -> tuple[int, str, str]:
        """Status, redirect address and text of the response.

        Raises TimeoutError if connecting, sending and reading together take longer than the limit, whatever
        the server sends; httpx.RequestError; RewardError if the response exceeds `max_bytes`.
        """
        data = bytearray()
        # httpx's own JSON encoder rejects a NaN or a lone surrogate in a row.
        body = {} if content is None else {"content": json.dumps(content)}
        async with (
            asyncio.timeout(self.timeout_seconds),
            httpx.AsyncClient(**self._options) as client,
            client.stream("POST" if body else "GET", self.url + path, **body) as answer,
        ):
            async for part in answer.aiter_raw():  # not decompressed: a compressed reply is not JSON
                data += part
                if len(data) > max_bytes:
                    raise RewardError(f"its answer has more than {max_bytes} bytes")
        return answer.status_code, answer.headers.get("location", ""), data.decode("utf-8", "replace")

    def _cure(self, status: int, location: str) -> str:
        """The cure for an error status, for messages."""
        if location:
            return f"it redirects to {quoted(location)}; use that address in --reward if you trust it"
        if status in (401, 403):
            return f"it requires a token: set {self.variable} to it"
        return "correct the address or the server"


class HttpReward(TextReward):
    """A reward from a server."""

    def __init__(self, url: str, args: Any) -> None:
        """Nothing is sent yet. Raises ValueError if the token in the environment is invalid."""
        super().__init__(url, args, num_threads=MAX_CONNECTIONS)
        self._client = JsonClient(url, args.reward_timeout_seconds, CLIENT_VARIABLE, client_token())

    def ask(self, batch: Answers) -> Checked:
        """See `TextReward.ask`; failed requests are retried."""
        content = {"prompts": batch.prompts, "responses": batch.responses, "rows": batch.rows}
        max_bytes = _ANSWER_BYTES + _SCORE_BYTES * len(batch)
        return checked_scores(_read_scores(self._client.ask(content, max_bytes=max_bytes)), batch)


def _read_scores(text: str) -> Any:
    try:
        return json.loads(text)["scores"]
    except (ValueError, RecursionError, TypeError, KeyError):  # TypeError: a list, a number
        raise RewardError(f'no JSON object with "scores": {quoted(text)}; {_EXPECTED}') from None
