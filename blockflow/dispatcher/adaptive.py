"""AdaptiveLimit: how many requests of a task may be in flight so that queues stay short. Pure.

A gradient limit, as Netflix's concurrency-limits (Gradient2) and TCP Vegas have it, with one
difference: nothing has to be guessed about the latency without load. Every result says how long it
waited and how long it was worked on at each block, so a queue is seen as such, whatever the batch
sizes and models are. As CoDel does, a window is judged by its *least* queueing: a burst drains
within it, a standing queue does not. How long a first queue may stand before it counts as one is a
share of the time that the requests have: what an outage of a second has left can take several to
drain, and who has given half a minute would rather wait than be refused.
"""

from __future__ import annotations

import math

QUEUE_FACTOR = 3.0
"""A request may wait this many times as long as it is worked on: while one batch is computed the
next one fills, and a slower block further down the path gets its share of the wait."""

MIN_QUEUE_NS = 50_000_000
"""Waiting of this length is no queue yet: on a busy machine even a wake-up takes milliseconds."""

WINDOW_NS = 100_000_000
WINDOW_SAMPLES = 10
"""A window ends when both are there; it is the time in which the limit may move once."""

PATIENCE = 1 / 8
"""Share of the time to the deadlines for which requests may queue before the limit leaves ``most``;
once it has, every window counts."""

_SMOOTH = 0.5
_FORGET_NS = 5_000_000_000
"""What was learnt of the queue's speed is too old after that."""

_LEAST = 4
_PER_STAGE = 2
_BATCHES = 2


class AdaptiveLimit:
    """The limit in force, between ``floor`` and ``most``.

    It falls when requests queue and the limit is what they press against, by half of the way to
    what Little's law asks for: the first time only when they have queued for a while. When the
    queue eats up half of the time to their deadlines it goes all that way at once. It rises while
    it is pressed against and they do not queue; unused, it goes back to ``most``, so that a burst
    after a quiet time meets no memory of an old overload. What clients hold in flight by
    themselves, below half of the limit, is their choice.

    Args:
        most: the configured credits; the limit begins there.
        stages: length of the task's path: with fewer than two requests per stage in flight, one at
            work and one that waits, some stage would idle.
        batch_rows: rows of the largest batch on the path: with fewer requests than two such
            batches in flight, a policy that waits for company could wait in vain, and the limit
            would take that wait for a queue.

    Attributes:
        limit: requests that may be in flight.
    """

    __slots__ = (
        "_begin_ns",
        "_end_ns",
        "_estimate",
        "_excess",
        "_lateness",
        "_learnt_ns",
        "_patience_ns",
        "_peak",
        "_samples",
        "_service_ns",
        "_sojourn_ns",
        "_standing_ns",
        "_target",
        "_weight",
        "floor",
        "limit",
        "most",
    )

    def __init__(self, most: int, stages: int = 1, batch_rows: int = 1) -> None:
        if most < 1:
            raise ValueError("credits must be positive")
        self.most = most
        self.floor = min(most, max(_LEAST, _PER_STAGE * stages, _BATCHES * batch_rows))
        self.limit = most
        self._service_ns = 0
        self._estimate: tuple[float, float] | None = None  # in flight, sojourn
        self._learnt_ns = 0
        self._begin_ns = 0  # of the window: when its first request came back
        self._end_ns: int | None = None
        self._standing_ns: int | None = None  # since when every window has met a queue
        self._restart()

    def _restart(self) -> None:
        self._samples = 0
        self._peak = 0
        self._excess = self._lateness = self._patience_ns = math.inf
        self._target = 0.0
        self._weight = 0
        self._sojourn_ns = 0

    def sample(
        self, ahead: int, queued_ns: int, worked_ns: int, budget_ns: int, now_ns: int
    ) -> None:
        """A request has come back.

        Args:
            ahead: requests of the task in flight when it was admitted, itself included.
            queued_ns: that it waited, at all blocks of its path.
            worked_ns: that it was worked on.
            budget_ns: from its receipt to its deadline: half of it at most may be waited for.
        """
        self._service_ns = worked_ns
        half = max((budget_ns - worked_ns) / 2, 1.0)
        allowed = min(max(QUEUE_FACTOR * worked_ns, MIN_QUEUE_NS), half)
        sojourn = max(queued_ns + worked_ns, 1)
        self._samples += 1
        self._peak = max(self._peak, ahead)
        self._excess = min(self._excess, queued_ns / allowed)
        self._lateness = min(self._lateness, queued_ns / half)
        self._patience_ns = min(self._patience_ns, PATIENCE * budget_ns)
        # Little's law: what was in flight, scaled by how much shorter the way shall become. It
        # holds for requests of before the last move of the limit as well.
        self._target += ahead * (allowed + worked_ns) / sojourn
        self._weight += ahead
        self._sojourn_ns += sojourn
        self._move(now_ns)

    def expired(self, ahead: int, budget_ns: int, now_ns: int) -> None:
        """A request's deadline has passed before it came back: it queued all the time."""
        worked = min(self._service_ns, budget_ns // 2)
        self.sample(ahead, budget_ns - worked, worked, budget_ns, now_ns)

    def wait_ns(self, ahead: int, now_ns: int) -> int:
        """How long a request would be under way that finds ``ahead`` before it: a low estimate.

        0 when nothing is known: without recent requests that met at least half as many, since
        batches and pipelines make many requests much quicker than a few would let expect.
        """
        if self._estimate is None or now_ns - self._learnt_ns > _FORGET_NS:
            return 0
        inflight, sojourn = self._estimate
        if ahead > 2 * inflight:
            return 0
        return int(sojourn * ahead / inflight)

    def _may_pass(self, now_ns: int) -> bool:
        """Whether the queue may go as it came: with the burst or the fault that has made it."""
        if self._standing_ns is None or self.limit < self.most:
            return False
        return now_ns - self._standing_ns < self._patience_ns

    def _move(self, now_ns: int) -> None:
        if self._samples == 1:
            self._begin_ns = now_ns
        if self._end_ns is None:
            self._end_ns = now_ns + WINDOW_NS
        if now_ns < self._end_ns or self._samples < WINDOW_SAMPLES:
            return
        limit = float(self.limit)
        if self._excess <= 1.0:
            self._standing_ns = None
        elif self._standing_ns is None:
            self._standing_ns = self._begin_ns
        if self._lateness > 1.0:
            # What waits now will be computed for nothing: there is no time for half measures.
            limit = min(self._target / self._samples, limit)
        elif self._excess > 1.0 and 2 * self._peak >= limit and not self._may_pass(now_ns):
            target = min(self._target / self._samples, limit)
            limit += _SMOOTH * (target - limit)
        elif self._excess <= 1.0 and 2 * self._peak < limit:
            limit *= 2
        elif self._excess <= 1.0:
            limit += math.sqrt(limit)
        self.limit = min(max(round(limit), self.floor), self.most)
        self._estimate = (self._weight / self._samples, self._sojourn_ns / self._samples)
        self._learnt_ns = now_ns
        self._end_ns = now_ns + WINDOW_NS
        self._restart()
