"""Admission: who may enter, decided by credits. Pure: ``now`` is given, nothing is waited for.

A credit is the right to be in flight; there are fewer credits than slots and queue places, so that
an overload is answered at the door with a typed rejection and memory stays flat. What an adaptive
limit, fairness or priorities need to know comes through the same three calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blockflow.core.errors import RequestError
from blockflow.core.metrics import RateMeter
from blockflow.core.routing import TaskRoute

_MIN_RETRY_MS = 5
_MAX_RETRY_MS = 1000
_UNKNOWN_RETRY_MS = 100
_SHARE_FREED = 8


@dataclass(frozen=True, slots=True)
class Admit:
    """The request may enter."""


@dataclass(frozen=True, slots=True)
class Reject:
    """The request is answered with ``error`` at once."""

    error: RequestError


ADMIT = Admit()


class Admission:
    """Credits in total and per client.

    Args:
        max_inflight: requests in flight at once.
        max_inflight_per_client: of which one client may have this many.
        max_bytes: retained input bytes at once.
    """

    __slots__ = ("_completions", "max_bytes", "max_inflight", "max_inflight_per_client")

    def __init__(self, max_inflight: int, max_inflight_per_client: int, max_bytes: int) -> None:
        if max_inflight < 1 or max_inflight_per_client < 1:
            raise ValueError("credits must be positive")
        self.max_inflight = max_inflight
        self.max_inflight_per_client = max_inflight_per_client
        self.max_bytes = max_bytes
        self._completions = RateMeter()

    def decide(
        self, *, inflight: int, of_client: int, charged: int, nbytes: int, now_ns: int
    ) -> Admit | Reject:
        """May one more request of ``nbytes`` enter?

        ``inflight`` and ``of_client`` count the requests in flight, ``charged`` their input bytes.
        """
        if inflight >= self.max_inflight:
            return self._reject(f"all {self.max_inflight} credits are in use", inflight, now_ns)
        if of_client >= self.max_inflight_per_client:
            return self._reject(
                f"this client has {of_client} requests in flight, its share of the credits",
                of_client,
                now_ns,
            )
        if charged + nbytes > self.max_bytes:
            return self.no_space(nbytes, inflight, now_ns)
        return ADMIT

    def no_space(self, nbytes: int, inflight: int, now_ns: int) -> Reject:
        """The memory for retained inputs is used up (also said when no slot is free)."""
        return self._reject(f"no room for {nbytes} bytes of input now", inflight, now_ns)

    def check_tasks(
        self,
        tasks: Sequence[TaskRoute],
        rows_of: Callable[[str], int],
        rows: int,
        inflight: int,
        now_ns: int,
    ) -> None:
        """May ``rows`` more rows of these tasks enter, by the tasks' own bounds?

        A request that is larger than the bound itself runs when nothing else of the task does.

        Raises:
            RequestError: OVERLOADED.
        """
        for task in tasks:
            there = rows_of(task.name)
            if task.max_inflight_rows and there and there + rows > task.max_inflight_rows:
                why = f"task {task.name!r} has {there} of {task.max_inflight_rows} rows under way"
                raise self._reject(why, inflight, now_ns).error

    def completed(self, now_ns: int) -> None:
        """A request left; the rate of these calls says when a credit will be free."""
        self._completions.add(1, now_ns)

    def retry_after_ms(self, inflight: int, now_ns: int) -> int:
        """When a retry makes sense: the time in which an eighth of what is in flight completes.

        Waiting for one credit only would bring all who were turned away back at the same moment.
        """
        rate = self._completions.rate(now_ns)
        if rate <= 0.0:
            return _UNKNOWN_RETRY_MS
        ms = 1000.0 * max(1, inflight // _SHARE_FREED) / rate
        return int(min(max(ms, _MIN_RETRY_MS), _MAX_RETRY_MS))

    def _reject(self, why: str, inflight: int, now_ns: int) -> Reject:
        after = self.retry_after_ms(inflight, now_ns)
        return Reject(
            RequestError(
                "OVERLOADED",
                why,
                hint=f"try again in {after} ms",
                retry_after_ms=after,
            )
        )
