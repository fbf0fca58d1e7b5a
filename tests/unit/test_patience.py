"""How long the HTTP server waits for a request: pure, and with a clock that is set."""

from __future__ import annotations

import pytest

from blockflow.control.rest import patience
from blockflow.control.rest.patience import WHOLE_S, Clock, allowance


class TestAllowance:
    def test_nobody_waits_for_a_thread(self) -> None:
        assert allowance(0, 32) == WHOLE_S

    @pytest.mark.parametrize("threads", [1, 8, 32])
    @pytest.mark.parametrize("waiting", [1, 7, 40, 512, 10_000])
    def test_all_that_wait_have_had_a_thread_within_two_seconds(
        self, threads: int, waiting: int
    ) -> None:
        """The last of them waits for those in the threads and for those before it."""
        rounds = 1 + waiting / threads
        assert rounds * allowance(waiting, threads) <= 2.0 + 1e-9

    def test_the_more_wait_the_less_there_is(self) -> None:
        given = [allowance(n, 32) for n in (0, 1, 10, 100, 1000)]
        assert given == sorted(given, reverse=True)


class TestClock:
    @pytest.fixture
    def now(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        now = [100.0]
        monkeypatch.setattr(patience.time, "monotonic", lambda: now[0])
        return now

    def test_the_time_begins_with_the_first_wait_and_goes_on(self, now: list[float]) -> None:
        clock = Clock(lambda: 10.0)
        clock.restart()
        now[0] += 50
        assert clock.left() == 10
        now[0] += 4
        assert clock.left() == 6
        now[0] += 6
        assert clock.left() <= 0
        clock.restart()
        assert clock.left() == 10

    def test_it_obeys_what_holds_now(self, now: list[float]) -> None:
        allowed = [30.0]
        clock = Clock(lambda: allowed[0])
        assert clock.left() == 30
        now[0] += 3
        allowed[0] = 2.0
        assert clock.left() < 0

    def test_what_it_was_restarted_with_is_the_most(self, now: list[float]) -> None:
        clock = Clock(lambda: 30.0)
        clock.restart(1.0)
        assert clock.left() == 1.0
