"""`--reward http://HOST:PORT/PATH`: scores from a server. No torch in here.

POST {"prompts": [...], "responses": [...], "rows": [...]} is answered by {"scores": [...]};
serving/reward_server.py is such a server. Of an answer nothing but the numbers is used. A token of the
environment (access_token.py) goes with every request.
"""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx

from common.flags.access_token import CLIENT_VARIABLE, client_token
from step3_ppo.rewards.text_rewards import Answers, Failures, RewardError, checked_scores, join, shortened

MAX_CONNECTIONS = 8  # batches that are under way at the same time
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
# A score takes some 20 bytes; the rest leaves room for an error's page, of which the beginning is shown.
_ANSWER_BYTES, _SCORE_BYTES = 2**20, 256


class HttpReward:
    """A `TextReward` from a server; batches are sent at the same time."""

    def __init__(
        self,
        url: str,
        *,
        timeout_seconds: float,
        batch_size: int = 64,
        num_retries: int = 3,
        backoff_seconds: float = 1.0,
        failures: Failures | None = None,
    ) -> None:
        """Nothing is sent yet.

        What may pass by itself (no connection, no answer in time, a status from 500 on) is tried again
        `num_retries` times, after a pause of `backoff_seconds` that doubles each time. Raises ValueError when
        the environment's token is none.
        """
        self.url, self.timeout_seconds, self.batch_size = url, timeout_seconds, batch_size
        self.failures = failures or Failures()
        self.num_retries, self.backoff_seconds = num_retries, backoff_seconds
        # A proxy named in the environment knows no way to this machine.
        uses_proxy = urlsplit(url).hostname not in _LOOPBACK
        # No compressed answers: a small one could unfold into a large one.
        headers = {"accept-encoding": "identity"}
        token = client_token()
        if token:
            headers["authorization"] = f"Bearer {token}"
        # A redirect is not followed: the texts, and the token, are for the server that --reward names.
        self._client = httpx.Client(
            timeout=timeout_seconds, trust_env=uses_proxy, headers=headers, follow_redirects=False
        )
        self._threads = ThreadPoolExecutor(MAX_CONNECTIONS, thread_name_prefix="reward http")

    def score(self, answers: Answers) -> list[float]:
        """See `TextReward.score`."""
        return join(self._threads.map(self._score_or_bear, list(answers.batches(self.batch_size))))

    def close(self) -> None:
        """See `TextReward.close`."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _score_or_bear(self, batch: Answers) -> list[float]:
        try:
            return self._score_batch(batch)
        except RewardError as error:
            return self.failures.bear(error, len(batch))

    def _score_batch(self, batch: Answers) -> list[float]:
        content = {"prompts": batch.prompts, "responses": batch.responses, "rows": batch.rows}
        for attempt in range(self.num_retries + 1):
            if attempt:
                time.sleep(self.backoff_seconds * 2 ** (attempt - 1))
            try:
                status, headers, text = self._post(content, batch)
            except httpx.RequestError as error:
                failure = f"{type(error).__name__}: {error}"
                continue
            if status < 500:
                return self._read(status, headers, text, batch)
            failure = f"status {status}: {shortened(text)}"
        raise RewardError(
            f"reward {self.url} failed {self.num_retries + 1} times for a batch of {len(batch)} (first: "
            f"{batch.shown(0)}), the last time with {failure}; see that the server runs there and answers "
            f"within --reward_timeout_seconds {self.timeout_seconds:g}, or lower --reward_batch_size"
        )

    def _post(self, content: dict[str, Any], batch: Answers) -> tuple[int, httpx.Headers, str]:
        """Return status, headers and text of the answer, which is read as far as an answer may go.

        Raises httpx.RequestError, and RewardError for an answer that is too long or compressed.
        """
        deadline = time.monotonic() + self.timeout_seconds
        limit, data = _ANSWER_BYTES + _SCORE_BYTES * len(batch), bytearray()
        with self._client.stream("POST", self.url, json=content) as answer:
            encoding = answer.headers.get("content-encoding", "identity")
            if encoding != "identity":
                raise RewardError(
                    f"{self._where(batch)}: its answer is compressed ({shortened(encoding)}), which was not "
                    "asked for; let the server answer plainly"
                )
            for part in answer.iter_raw():
                data += part
                if len(data) > limit:
                    raise RewardError(
                        f"{self._where(batch)}: its answer has more than {limit} bytes; "
                        'a server must answer {"scores": [...]} with one number for each response'
                    )
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout("the answer came too slowly", request=answer.request)
            return answer.status_code, answer.headers, data.decode("utf-8", "replace")

    def _where(self, batch: Answers) -> str:
        return f"reward {self.url}, for a batch of {len(batch)} (first: {batch.shown(0)})"

    def _read(self, status: int, headers: httpx.Headers, text: str, batch: Answers) -> list[float]:
        beginning, where = f"it answered {shortened(text)}", self._where(batch)
        if not 200 <= status < 300:
            raise RewardError(f"{where}: status {status}; {beginning}; {_cure(status, headers)}")
        try:
            content: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RewardError(
                f'{where}: no JSON; {beginning}; a server must answer {{"scores": [...]}}'
            ) from error
        if not isinstance(content, dict) or "scores" not in content:
            raise RewardError(f'{where}: no "scores"; {beginning}; a server must answer {{"scores": [...]}}')
        try:
            return checked_scores(self.url, content["scores"], batch, self.failures)
        except RewardError as error:
            raise RewardError(f"{error}; {beginning}") from None


def _cure(status: int, headers: httpx.Headers) -> str:
    """Return what a user can do about a status that is no answer."""
    if "location" in headers:
        place = shortened(headers["location"])
        return f"it sends us on to {place}; give that address to --reward, if you trust it"
    if status in (401, 403):
        return f"it wants a token: set {CLIENT_VARIABLE} to the server's"
    return "correct the address or what the server takes"
