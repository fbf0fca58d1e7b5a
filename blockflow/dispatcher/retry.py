"""RetryBudget: how much of the system's work may be re-runs. Pure.

Re-runs are the Dispatcher's own load on top of the clients'. Without a bound, a block that kills
its workers would keep the system busy with requests that it has served before.
"""

from __future__ import annotations

MAX_ATTEMPTS = 3
"""Runs of one request, the first included."""

SHARE = 0.1
"""Re-runs per admitted request, in the long run."""

_REFILL_NS = 60_000_000_000
"""An idle system's budget is full again after this long."""


class RetryBudget:
    """A token bucket that admitted requests fill and, slowly, time.

    It holds two tokens per request that may be in flight, and starts full: one death with a full
    house can always be re-run, and the next one as well (a request that kills its workers kills two
    before it is known).

    Args:
        max_inflight: requests in flight at once.
    """

    def __init__(self, max_inflight: int) -> None:
        self.capacity = float((MAX_ATTEMPTS - 1) * max_inflight)
        self._tokens = self.capacity
        self._admitted = 0
        self._since_ns: int | None = None

    def take(self, admitted: int, now_ns: int) -> bool:
        """May one request be run again now? If so, that is counted.

        Args:
            admitted: requests admitted since the start.
            now_ns: monotonic clock.
        """
        since = now_ns if self._since_ns is None else self._since_ns
        gained = SHARE * (admitted - self._admitted)
        gained += self.capacity * max(0, now_ns - since) / _REFILL_NS
        self._tokens = min(self.capacity, self._tokens + gained)
        self._admitted = admitted
        self._since_ns = max(now_ns, since)
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def left(self) -> int:
        """Whole tokens, as of the last :meth:`take`."""
        return int(self._tokens)
