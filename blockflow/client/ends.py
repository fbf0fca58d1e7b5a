"""Tells the owners of requests how these ended, in the client's thread, which waits for nobody.

An exception that a signal's handler raises (Ctrl-C, the time limit of a job queue) may leave the
lock of a future taken for ever: on a ``with``'s way in or out, or amid those of all the requests
that ``concurrent.futures.wait`` looks at; and that of the event which this waits in. Whoever took a
future's can still wait for the answer, and gives the lock up in doing so. All others are to be
served on.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from blockflow.client.outcome import Outcome
from blockflow.core.records import record

log = logging.getLogger("blockflow.client")

_PATIENCE_S = 0.05
"""Nobody who is at work holds such a lock for so long."""

_FIRST_NS, _LONGEST_NS = 5_000_000, 500_000_000


@record
class Owner:
    """Of a request: ``tell`` gets its outcome, exactly once, and takes locks in passing. Whether
    nobody holds one of them, ``is_free`` says, be it after so many seconds."""

    tell: Callable[[Outcome], None]
    is_free: Callable[[float], bool]


class Ends:
    """Who is to be told of what; used from the client's thread alone.

    Attributes:
        late: who could not be told yet: :meth:`retry`.
    """

    def __init__(self) -> None:
        self._owners: dict[bytes, Owner] = {}
        self.late: deque[tuple[Owner, Outcome]] = deque()
        self._pause_ns = _FIRST_NS
        self._due_ns = 0

    def __len__(self) -> int:
        return len(self._owners) + len(self.late)

    def expect(self, request_id: bytes, owner: Owner) -> None:
        """``owner`` waits for the end of this request."""
        self._owners[request_id] = owner

    def expected(self) -> list[bytes]:
        """The requests that have not ended."""
        return list(self._owners)

    def tell(self, outcome: Outcome) -> bool:
        """Tell the owner; False: there is none."""
        owner = self._owners.pop(outcome.request_id, None)
        if owner is not None:
            self.tell_to(owner, outcome)
        return owner is not None

    def tell_to(self, owner: Owner, outcome: Outcome) -> None:
        """Tell this one, as soon as its lock is free."""
        if owner.is_free(0.0 if self.late else _PATIENCE_S):
            _tell(owner, outcome)
        else:
            self.late.append((owner, outcome))
            # It may be free in a moment, whoever else has one that never will be.
            self._pause_ns, self._due_ns = _FIRST_NS, 0

    def next_wakeup(self) -> int | None:
        """When :meth:`retry` should run next."""
        return self._due_ns if self.late else None

    def retry(self, now_ns: int) -> None:
        """Tell those whose locks have become free."""
        if not self.late or now_ns < self._due_ns:
            return
        count = len(self.late)
        for _ in range(count):
            owner, outcome = self.late.popleft()
            if owner.is_free(0.0):
                _tell(owner, outcome)
            else:
                self.late.append((owner, outcome))
        stuck = len(self.late) == count
        self._pause_ns = min(2 * self._pause_ns, _LONGEST_NS) if stuck else _FIRST_NS
        self._due_ns = now_ns + self._pause_ns

    def finish(self) -> None:
        """Retry until all are told."""
        while self.late:
            time.sleep(max(0, self._due_ns - time.monotonic_ns()) / 1e9)
            self.retry(time.monotonic_ns())


def _tell(owner: Owner, outcome: Outcome) -> None:
    """Hand an outcome to its owner, whose callbacks run in this."""
    try:
        owner.tell(outcome)
    except BaseException:  # a future logs others: SystemExit, and what frameworks end tests with
        log.exception("a callback wanted to end the client's thread")
