"""`--reward http://HOST:PORT/PATH`: scores from a server. No torch in here.

POST {"prompts": [...], "responses": [...], "rows": [...]} is answered by {"scores": [...]};
step2_reward/serve.py is such a server.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx

from step3_ppo.rewards.text_rewards import Answers, RewardError, checked_scores, join, shortened

MAX_CONNECTIONS = 8  # batches that are under way at the same time
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


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
    ) -> None:
        """Nothing is sent yet.

        What may pass by itself (no connection, no answer in time, a status from 500 on) is tried again
        `num_retries` times, after a pause of `backoff_seconds` that doubles each time.
        """
        self.url, self.timeout_seconds, self.batch_size = url, timeout_seconds, batch_size
        self.num_retries, self.backoff_seconds = num_retries, backoff_seconds
        # A proxy named in the environment knows no way to this machine.
        uses_proxy = urlsplit(url).hostname not in _LOOPBACK
        self._client = httpx.Client(timeout=timeout_seconds, trust_env=uses_proxy)
        self._threads = ThreadPoolExecutor(MAX_CONNECTIONS, thread_name_prefix="reward http")

    def score(self, answers: Answers) -> list[float]:
        """See `TextReward.score`."""
        return join(self._threads.map(self._score_batch, list(answers.batches(self.batch_size))))

    def close(self) -> None:
        """See `TextReward.close`."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _score_batch(self, batch: Answers) -> list[float]:
        content = {"prompts": batch.prompts, "responses": batch.responses, "rows": batch.rows}
        for attempt in range(self.num_retries + 1):
            if attempt:
                time.sleep(self.backoff_seconds * 2 ** (attempt - 1))
            try:
                answer = self._client.post(self.url, json=content)
            except httpx.RequestError as error:
                failure = f"{type(error).__name__}: {error}"
                continue
            if answer.status_code < 500:
                return self._read(answer, batch)
            failure = f"status {answer.status_code}: {shortened(answer.text)}"
        raise RewardError(
            f"reward {self.url} failed {self.num_retries + 1} times for a batch of {len(batch)} (first: "
            f"{batch.shown(0)}), the last time with {failure}; see that the server runs there and answers "
            f"within --reward_timeout_seconds {self.timeout_seconds:g}, or lower --reward_batch_size"
        )

    def _read(self, answer: httpx.Response, batch: Answers) -> list[float]:
        beginning = f"it answered {shortened(answer.text)}"
        where = f"reward {self.url}, for a batch of {len(batch)} (first: {batch.shown(0)})"
        if not answer.is_success:
            raise RewardError(
                f"{where}: status {answer.status_code}; {beginning}; correct the address or what the server "
                "takes"
            )
        try:
            content: Any = answer.json()
        except ValueError as error:
            raise RewardError(
                f'{where}: no JSON; {beginning}; a server must answer {{"scores": [...]}}'
            ) from error
        if not isinstance(content, dict) or "scores" not in content:
            raise RewardError(f'{where}: no "scores"; {beginning}; a server must answer {{"scores": [...]}}')
        try:
            return checked_scores(self.url, content["scores"], batch)
        except RewardError as error:
            raise RewardError(f"{error}; {beginning}") from None
