"""Network: messages between processes under virtual time: in order, late, lost, doubled or not
taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from blockflow.bench.simulation.loop import EventLoop

_LEAST_NS = 20_000
_SPREAD_NS = 380_000
"""A hop on one host, from a socket to the other side's loop."""

Peer = int | bytes
"""A process by its incarnation, a client by its identity; 0 is the Manager."""


class Network:
    """What one peer sends another arrives in the order of sending, as with ZeroMQ.

    Attributes:
        happened: messages ``lost``, ``doubled`` and ``refused``.
        lose_next, double_next: so many of the next data messages are lost, or come twice.
    """

    def __init__(self, loop: EventLoop, rng: Random) -> None:
        self._loop = loop
        self._rng = rng
        self._latest: dict[tuple[Peer, Peer], int] = {}
        self._late: dict[Peer, int] = {}
        self._full: dict[Peer, int] = {}
        self.happened: Counter[str] = Counter()
        self.lose_next = 0
        self.double_next = 0

    def delay(self, peer: Peer, until_ns: int) -> None:
        """What ``peer`` sends stays under way until then."""
        self._late[peer] = max(until_ns, self._late.get(peer, 0))

    def fill(self, peer: Peer, until_ns: int) -> None:
        """Everybody's queue of data messages for ``peer`` has no room until then."""
        self._full[peer] = max(until_ns, self._full.get(peer, 0))

    def make_room(self) -> None:
        """All queues take messages again."""
        self._full.clear()

    def refused(self, peer: Peer) -> bool:
        """Whether the queue for ``peer`` does not take this data message."""
        if self._full.get(peer, 0) <= self._loop.now:
            return False
        self.happened["refused"] += 1
        return True

    def forget(self, peer: Peer) -> None:
        """It will never send or receive again."""
        self._late.pop(peer, None)
        self._full.pop(peer, None)
        self._latest = {k: t for k, t in self._latest.items() if peer not in k}

    def send(self, source: Peer, target: Peer, call: Callable[[int, Any], None], arg: Any) -> None:
        """``call(arrival, arg)`` when the message is there."""
        # randint would take as long as all the rest here.
        at = self._loop.now + _LEAST_NS + int(self._rng.random() * _SPREAD_NS)
        at = max(at, self._late.get(source, 0), self._latest.get((source, target), 0))
        self._latest[source, target] = at
        self._loop.plan(at, call, arg)

    def lost(self) -> bool:
        """Whether this data message never arrives."""
        if not self.lose_next:
            return False
        self.lose_next -= 1
        self.happened["lost"] += 1
        return True

    def doubled(self) -> bool:
        """Whether this data message arrives twice."""
        if not self.double_next:
            return False
        self.double_next -= 1
        self.happened["doubled"] += 1
        return True
