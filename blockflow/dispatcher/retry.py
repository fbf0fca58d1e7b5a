"""RetryBudget: how much of the system's work may be re-runs. Pure.

Re-runs are the Dispatcher's own load on top of the clients'. Without a bound, a block that kills
its workers would keep the system busy with requests that it has served before.
"""

from __future__ import annotations

MAX_ATTEMPTS = 3
"""Runs of one request, the first included."""

REQUESTS_PER_RERUN = 10
"""Admitted requests that one re-run is paid with: a tenth of the requests, in the long run."""

REST_NS = 60_000_000_000
"""After so long without a re-run one is always allowed."""


class RetryBudget:
    """A token bucket that admitted requests fill.

    It holds two tokens per request that may be in flight, and starts full: one death with a full
    house can always be re-run, and the next one as well (a request that kills its workers kills two
    before it is known). Time alone fills nothing: at a low load that would allow more re-runs than
    there are requests. Only, who has used it up and then rested may have one re-run a minute, so
    that a lone client is not denied its first one for hours.

    So there are never more re-runs, from any moment on, than a tenth of the requests admitted since
    then, and the capacity, and one a minute.

    Args:
        max_inflight: requests in flight at once.
    """

    def __init__(self, max_inflight: int) -> None:
        self.capacity = (MAX_ATTEMPTS - 1) * max_inflight
        self._paid = self.capacity * REQUESTS_PER_RERUN  # in requests, so that nothing is rounded
        self._admitted = 0
        self._last_ns = 0

    def take(self, admitted: int, now_ns: int) -> bool:
        """May one request be run again now? If so, that is counted.

        Args:
            admitted: requests admitted since the start.
            now_ns: monotonic clock.
        """
        most = self.capacity * REQUESTS_PER_RERUN
        self._paid = min(most, self._paid + admitted - self._admitted)
        self._admitted = admitted
        if self._paid >= REQUESTS_PER_RERUN:
            self._paid -= REQUESTS_PER_RERUN
        elif now_ns - self._last_ns < REST_NS:
            return False
        self._last_ns = now_ns
        return True

    def left(self) -> int:
        """Whole tokens, as of the last :meth:`take`."""
        return self._paid // REQUESTS_PER_RERUN
