"""The judge of the ranks, with a clock that the tests set."""

import pytest

from common.ranks.failures import CLOSED, OTHER, TIMEOUT
from common.ranks.watch.referee import (
    GONE_SECONDS,
    LEFT_SECONDS,
    SETTLE_SECONDS,
    SILENT_SECONDS,
    Referee,
    Verdict,
)

LIMIT = 100.0


class Ranks:
    """Three ranks that beat twice a second, but for those that are told not to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.referee = Referee(3, LIMIT, "in the start-up", self.now)
        self.silent: set[int] = set()
        self.calls = {rank: {"world": 0} for rank in range(3)}
        self.timed = ["world"]

    def beat(self) -> None:
        for rank in set(self.calls) - self.silent:
            place = f"at step {rank + 1} in the rollout"
            beat = {"place": place, "num_phases": 1, "calls": dict(self.calls[rank]), "timed": self.timed}
            self.referee.hear_beat(rank, beat, self.now)

    def wait(self, seconds: float) -> Verdict | None:
        """Let time go by; return the first verdict."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.25
            self.beat()
            verdict = self.referee.judge(self.now)
            if verdict:
                return verdict
        return None


@pytest.fixture
def ranks() -> Ranks:
    ranks = Ranks()
    ranks.beat()
    return ranks


def test_silence_alone_is_no_fault(ranks):
    """One call that holds the interpreter's lock, or a computer that is stopped and goes on."""
    ranks.silent = {0, 1, 2}
    assert ranks.wait(20 * LIMIT) is None


def test_an_end_without_a_word_is_a_death(ranks):
    ranks.wait(5)
    ranks.referee.hear_end(1, ranks.now)
    ranks.silent = {1}
    assert ranks.referee.judge(ranks.now + GONE_SECONDS / 2) is None
    assert ranks.referee.judge(ranks.now + GONE_SECONDS + 0.01).text.startswith(
        "rank 1 died at step 2 in the rollout"
    )


def test_an_end_after_a_goodbye_is_none(ranks):
    for rank in (2, 0, 1):
        ranks.referee.hear_goodbye(rank, 0, "", ranks.now)
        ranks.referee.hear_end(rank, ranks.now)
        ranks.silent.add(rank)
        assert ranks.wait(2 * LIMIT) is None


def test_the_first_failure_counts(ranks):
    ranks.referee.hear_failure(2, "at step 3 in the update", "ValueError: no")
    ranks.referee.hear_failure(0, "at step 3 in the rollout", "ValueError: neither")
    verdict = ranks.referee.judge(ranks.now)
    assert verdict == Verdict("rank 2 failed first, at step 3 in the update: ValueError: no")


def test_who_stands_still_is_named(ranks):
    """Two ranks waited until their time limit; of the third there is no sign of life."""
    ranks.silent = {1}
    assert ranks.wait(8) is None
    ranks.referee.hear_suspicion(0, TIMEOUT, "timed out", ranks.now)
    ranks.referee.hear_suspicion(2, TIMEOUT, "timed out", ranks.now)
    assert ranks.referee.judge(ranks.now) is None
    verdict = ranks.wait(2 * SETTLE_SECONDS)
    assert verdict.silent_rank == 1
    assert verdict.text == "rank 1 is stuck: no sign of life for 11 s; last seen at step 2 in the rollout"


def test_a_short_silence_is_borne(ranks):
    ranks.silent = {2}
    ranks.wait(SILENT_SECONDS + 1)
    ranks.silent = set()
    ranks.referee.hear_suspicion(0, CLOSED, "connection reset", ranks.now)
    assert "rank 0 failed first" in ranks.wait(2 * SETTLE_SECONDS).text


def test_who_does_not_come_is_named(ranks):
    """All beat; the one that has begun fewer collectives is the one that is waited for."""
    ranks.calls = {0: {"world": 7}, 1: {"world": 7}, 2: {"world": 6}}
    ranks.referee.hear_suspicion(1, TIMEOUT, "timed out", ranks.now)
    verdict = ranks.wait(2 * SETTLE_SECONDS)
    assert verdict.text.startswith("rank 2 is stuck at step 3 in the rollout: others wait for it")
    assert f"--collective_timeout {LIMIT:g}" in verdict.text and verdict.silent_rank is None


def test_who_waits_is_not_the_one_that_does_not_come(ranks):
    """Of those that have not said anything one waits too, in another group of ranks."""
    ranks.calls = {0: {"world": 7}, 1: {"world": 7, "pair": 2}, 2: {"world": 7, "pair": 1}}
    ranks.referee.hear_suspicion(0, TIMEOUT, "timed out", ranks.now)
    assert ranks.wait(2 * SETTLE_SECONDS).text.startswith("rank 2 is stuck")


def test_a_connection_between_two_that_live(ranks):
    ranks.referee.hear_suspicion(2, CLOSED, "connection reset by peer", ranks.now)
    text = ranks.wait(2 * SETTLE_SECONDS).text
    assert text.startswith("rank 2 failed first, at step 3 in the rollout: connection reset by peer")
    assert "network" in text


def test_ranks_that_send_each_other_different_things(ranks):
    for rank in (0, 1, 2):
        ranks.referee.hear_suspicion(rank, OTHER, "sizes differ", ranks.now)
    assert "--check_collectives" in ranks.wait(2 * SETTLE_SECONDS).text


@pytest.mark.parametrize(("code", "is_a_fault"), [(0, False), (2, True), (75, True)])
def test_a_rank_that_leaves_alone(ranks, code, is_a_fault):
    """With an exit code it ends the others, after a time in which they may follow."""
    ranks.referee.hear_goodbye(1, code, "no such file", ranks.now)
    ranks.silent = {1}
    assert ranks.wait(LEFT_SECONDS - 1) is None
    verdict = ranks.wait(LIMIT)
    assert (verdict is not None) == is_a_fault
    if is_a_fault:
        assert verdict.text == (
            f"rank 1 left before the others, with exit code {code}, at step 2 in the rollout: no such file"
        )


def test_a_rank_that_left_is_missed(ranks):
    """Whatever its exit code, once another one waits for it."""
    ranks.referee.hear_goodbye(1, 0, "", ranks.now)
    ranks.silent = {1}
    ranks.wait(5)
    ranks.referee.hear_suspicion(0, CLOSED, "connection closed", ranks.now)
    assert ranks.wait(2 * SETTLE_SECONDS).text.startswith("rank 1 left before the others, with exit code 0")


def test_a_rank_that_lets_others_wait_for_too_long(ranks):
    """nccl does not say that somebody waits: the number of collectives does."""
    ranks.calls[0]["world"] = ranks.calls[1]["world"] = 1
    assert ranks.wait(LIMIT - 1) is None
    assert ranks.wait(2).text.startswith("rank 2 is stuck at step 3 in the rollout")


def test_a_rank_that_lets_others_wait_and_is_silent(ranks):
    ranks.calls[0]["world"] = 1
    ranks.calls[2]["world"] = 1
    ranks.silent = {1}
    verdict = ranks.wait(LIMIT + 1)
    assert verdict.silent_rank == 1 and verdict.text.startswith("rank 1 is stuck: no sign of life")


def test_a_rank_that_is_late_again_and_again(ranks):
    """It comes each time within the limit."""
    for call in range(1, 6):
        ranks.calls[0]["world"] = ranks.calls[1]["world"] = call
        assert ranks.wait(LIMIT - 1) is None
        ranks.calls[2]["world"] = call
        assert ranks.wait(1) is None


def test_a_group_with_a_limit_of_its_own(ranks):
    """Data are prepared by one rank for as long as it takes, the others wait in a group for that."""
    for rank in (1, 2):
        ranks.calls[rank]["patient"] = 1
    ranks.calls[0]["patient"] = 0
    assert ranks.wait(20 * LIMIT) is None


def test_the_time_in_which_the_judge_stood_still_does_not_count(ranks):
    """Ctrl-Z stops all ranks; the first to go on must not find the others silent."""
    ranks.calls[0]["world"] = 1
    ranks.referee.hear_suspicion(0, CLOSED, "connection reset", ranks.now)
    ranks.now += 10 * LIMIT
    assert ranks.referee.judge(ranks.now) is None
    assert "rank 0 failed first" in ranks.wait(2 * SETTLE_SECONDS).text
