"""WithdrawnRequests: what nobody waits for any more, remembered while it may still arrive. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from blockflow.core import limits
from blockflow.wire.data import Item

MOST = 4096
"""Requests remembered; beyond it the oldest are forgotten, and computed for nobody."""

_FORGET_NS = limits.MAX_DEADLINE_MS * 1_000_000


class WithdrawnRequests:
    """A bounded set of request ids with their newest withdrawn attempt.

    It is empty but for the minute after a withdrawal, and costs nothing then.
    """

    __slots__ = ("known",)

    def __init__(self) -> None:
        self.known: dict[bytes, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self.known)

    def __contains__(self, item: object) -> bool:
        if not isinstance(item, Item):
            return False
        known = self.known.get(item.request_id)
        return known is not None and item.attempt <= known[0]

    def add(self, requests: Iterable[tuple[bytes, int]], now_ns: int) -> None:
        """Remember (request id, attempt) each, until the latest deadline it can have."""
        known = self.known
        for request_id, attempt in requests:
            before = known.pop(request_id, (0, 0))
            known[request_id] = (max(attempt, before[0]), now_ns)
        self.forget(now_ns)

    def forget(self, now_ns: int) -> None:
        """Drop what cannot come any more, and the oldest of too many."""
        known = self.known
        while known:
            oldest = next(iter(known))
            if len(known) <= MOST and now_ns - known[oldest][1] < _FORGET_NS:
                return
            del known[oldest]
