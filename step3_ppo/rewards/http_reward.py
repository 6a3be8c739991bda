"""`--reward http://HOST:PORT/PATH`: scores from a server. No torch in here.

POST {"prompts": [...], "responses": [...], "rows": [...]} is answered by {"scores": [...]};
serving/reward_server.py is such a server. Of an answer nothing but the numbers is used. A token of the
environment (access_token.py) goes with every request.
"""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx

from common.flags.access_token import CLIENT_VARIABLE, client_token
from step3_ppo.rewards.text_rewards import (
    REFUSE,
    Answers,
    Failures,
    RewardError,
    checked_scores,
    join,
    shortened,
)

MAX_CONNECTIONS = 8  # batches that are under way at the same time
NUM_TRIES, BACKOFF_SECONDS = 4, 1.0  # the pause behind a try doubles each time
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
# A score takes some 20 bytes; the rest leaves room for an error's page, of which the beginning is shown.
_ANSWER_BYTES, _SCORE_BYTES = 2**20, 256
_EXPECTED = 'a server must answer {"scores": [...]} with one number for each response'


class HttpReward:
    """A `TextReward` from a server; batches are sent at the same time.

    What may pass by itself (no connection, no answer in time, a status from 500 on) is tried again.
    """

    def __init__(
        self, url: str, *, timeout_seconds: float, batch_size: int = 64, failures: Failures = REFUSE
    ) -> None:
        """Nothing is sent yet. Raises ValueError when the environment's token is none."""
        self.url, self.timeout_seconds, self.batch_size = url, timeout_seconds, batch_size
        self.failures = failures
        # No compressed answers: a small one could unfold into a large one.
        headers = {"accept-encoding": "identity"}
        if token := client_token():
            headers["authorization"] = f"Bearer {token}"
        self._client = httpx.Client(
            timeout=timeout_seconds,
            trust_env=urlsplit(url).hostname not in _LOOPBACK,  # a proxy knows no way to this machine
            headers=headers,
            follow_redirects=False,  # the texts, and the token, are for the server that --reward names
        )
        self._threads = ThreadPoolExecutor(MAX_CONNECTIONS, thread_name_prefix="reward http")

    def score(self, answers: Answers) -> list[float]:
        """See `TextReward.score`."""
        return join(self._threads.map(self._score_batch, list(answers.batches(self.batch_size))))

    def close(self) -> None:
        """See `TextReward.close`."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _score_batch(self, batch: Answers) -> list[float]:
        where = f"reward {self.url}, for a batch of {len(batch)} (first: {batch.shown(0)})"
        try:
            text = self._ask(batch, where)
            try:
                content = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise RewardError(f"{where}: no JSON: {shortened(text)}; {_EXPECTED}") from error
            if not isinstance(content, dict) or "scores" not in content:
                raise RewardError(f'{where}: no "scores": {shortened(text)}; {_EXPECTED}')
            return checked_scores(self.url, content["scores"], batch, self.failures)
        except RewardError as error:
            return self.failures.bear(error, len(batch))

    def _ask(self, batch: Answers, where: str) -> str:
        """Return the text of a good answer, after some tries. Raises RewardError."""
        for attempt in range(NUM_TRIES):
            if attempt:
                time.sleep(BACKOFF_SECONDS * 2 ** (attempt - 1))
            try:
                status, headers, text = self._post(batch, where)
            except httpx.RequestError as error:
                failure = f"{type(error).__name__}: {error}"
                continue
            if 200 <= status < 300:
                return text
            failure = f"status {status}: {shortened(text)}"
            if status < 500:
                raise RewardError(f"{where}: {failure}; {_cure(status, headers)}")
        raise RewardError(
            f"{where}: failed {NUM_TRIES} times, the last time with {failure}; see that the server runs "
            f"there and answers within --reward_timeout_seconds {self.timeout_seconds:g}, or lower "
            "--reward_batch_size"
        )

    def _post(self, batch: Answers, where: str) -> tuple[int, httpx.Headers, str]:
        """Return status, headers and text of the answer, which is read as far as an answer may go.

        Raises httpx.RequestError, and RewardError for an answer that is too long or compressed.
        """
        content = {"prompts": batch.prompts, "responses": batch.responses, "rows": batch.rows}
        deadline = time.monotonic() + self.timeout_seconds
        limit, data = _ANSWER_BYTES + _SCORE_BYTES * len(batch), bytearray()
        with self._client.stream("POST", self.url, json=content) as answer:
            encoding = answer.headers.get("content-encoding", "identity")
            if encoding != "identity":
                raise RewardError(
                    f"{where}: its answer is compressed ({shortened(encoding)}), which was not asked for; "
                    "let the server answer plainly"
                )
            for part in answer.iter_raw():
                data += part
                if len(data) > limit:
                    raise RewardError(f"{where}: its answer has more than {limit} bytes; {_EXPECTED}")
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout("the answer came too slowly", request=answer.request)
            return answer.status_code, answer.headers, data.decode("utf-8", "replace")


def _cure(status: int, headers: httpx.Headers) -> str:
    """Return what a user can do about a status that is no answer."""
    if "location" in headers:
        target = shortened(headers["location"])
        return f"it sends us on to {target}; give that address to --reward, if you trust it"
    if status in (401, 403):
        return f"it wants a token: set {CLIENT_VARIABLE} to the server's"
    return "correct the address or what the server takes"
