"""Withdrawals: workers are told of requests that nobody waits for any more.

A request that its client has cancelled, or whose client is gone, may still wait in queues, and so
may one that has failed as another worker on its way has died, and the attempt before the present
one, in the queues of workers that live. One message to each worker on its way, straight from the
Dispatcher, lets them drop it on arrival or in the queue. Nothing depends on its delivery: what is
not withdrawn comes back late and is dropped. A passed deadline needs no word: every item carries
the time that it had left when it was sent, and a worker counts from then on: it starts nothing that
the Dispatcher has answered as too late.
"""

from __future__ import annotations

from collections.abc import Iterable

from blockflow.core import limits
from blockflow.core.errors import BlockFlowError
from blockflow.core.routing import RouteTable
from blockflow.dispatcher.entry import Entry
from blockflow.dispatcher.plan import Plan
from blockflow.tensormq.push import PushCache
from blockflow.wire.data import Withdraw, encode_withdraw

_UNDER_WAY = ("CANCELLED", "WORKER_LOST", "POISON")
"""What a request may have ended with while it waits at some worker yet."""


class Withdrawals:
    """Collects what has been given up and tells the workers.

    Args:
        incarnation: of the Dispatcher.
        push: sockets to the workers.

    Attributes:
        sent: requests withdrawn, counted per worker that was told.
        due: what was collected, by endpoint: then :meth:`send`.
    """

    def __init__(self, incarnation: int, push: PushCache) -> None:
        self._incarnation = incarnation
        self._push = push
        self._endpoints: dict[int, str] = {}
        self._present: dict[int, str] = {}
        self.due: dict[str, list[tuple[bytes, int]]] = {}
        self.sent = 0

    def publish(self, table: RouteTable) -> None:
        """Workers' addresses; requests of the routes before may still visit those of then."""
        self._present = {r.incarnation: r.endpoint for r in table.stages.values()}
        self._endpoints.update(self._present)

    def forget_retired(self) -> None:
        """All requests of the routes before have ended."""
        self._endpoints = dict(self._present)

    def peer_gone(self, incarnation: int) -> None:
        """There is nobody there to be told."""
        self._endpoints.pop(incarnation, None)
        self._present.pop(incarnation, None)

    def ended(self, entry: Entry) -> None:
        """``entry`` has ended: does it still run somewhere?"""
        if entry.waits_for:
            return
        ends = [end for end in entry.plan.ends if _given_up(entry, end)]
        if ends:
            self.give_up(entry.ticket, entry.attempt, entry.plan, ends)

    def give_up(self, ticket: bytes, attempt: int, plan: Plan, ends: Iterable[int]) -> None:
        """Nobody waits for these ends of an attempt, or of one before it."""
        visited: set[int] = set()
        for end in ends:
            visited.update([plan.incarnations[node] for node in plan.lineage[end]])
        for incarnation in visited:
            endpoint = self._endpoints.get(incarnation)
            if endpoint is not None:
                self.due.setdefault(endpoint, []).append((ticket, attempt))

    def send(self) -> None:
        """Tell the workers what was collected."""
        most = limits.MAX_WITHDRAWN_PER_MESSAGE
        for endpoint, requests in self.due.items():
            for i in range(0, len(requests), most):
                part = tuple(requests[i : i + most])
                # A worker that takes no messages has other troubles, and forgets by deadlines.
                if self._push.send(endpoint, [encode_withdraw(Withdraw(self._incarnation, part))]):
                    self.sent += len(part)
        self.due = {}


def _given_up(entry: Entry, end: int) -> bool:
    """Whether a task ended by the client's will, or a worker's death, and not by what came back."""
    outcome = entry.outcomes.get(end)
    return outcome is None or (isinstance(outcome, BlockFlowError) and outcome.code in _UNDER_WAY)
