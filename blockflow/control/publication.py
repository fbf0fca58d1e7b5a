"""Publication: how a route version becomes true everywhere, in the order that loses nothing.

Workers learn the new routes first, so that no tensor arrives for an unknown next hop. Then the
Dispatcher's switch is the one atomic flip: from there on new requests take the new routes. When it
says that no request of an older version is in flight, what only the old routes used may stop.

Pure: messages and the time come in, instructions go out. A newer publication replaces one that is
under way; versions only grow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from blockflow.control.events import Instruction, Kill, Send
from blockflow.core.routing import RouteTable
from blockflow.wire.control import Routes


@dataclass(slots=True)
class Publication:
    """State of the latest publication.

    Attributes:
        version: the latest version handed in, 0 = none.
        flipped: the version that the Dispatcher works with.
        in_force: its table, None while there is no Dispatcher that has one of ours.
        drained: no request admitted under a version below this one is in flight.
        late: workers that did not acknowledge in time, ever; a count for people.
    """

    ack_ns: int
    flip_ns: int
    version: int = 0
    flipped: int = 0
    in_force: RouteTable | None = None
    drained: int = 0
    late: int = 0
    _waiting: set[int] = field(default_factory=set)
    _admission: RouteTable | None = None
    _dispatcher: int | None = None
    _sent: int = 0  # the latest version that the Dispatcher was sent
    _deadline_ns: int | None = None

    def publish(
        self,
        transit: RouteTable,
        admission: RouteTable,
        workers: Iterable[int],
        dispatcher: int,
        now_ns: int,
    ) -> list[Instruction]:
        """Begin to publish.

        Args:
            transit: for the workers: every stage that a request in flight may still visit.
            admission: for the Dispatcher: the stages that new requests may take.
            workers: incarnations that shall know before the flip.
            dispatcher: incarnation of the Dispatcher.
            now_ns: monotonic clock.
        """
        self.version = admission.version
        self._admission = admission
        self._dispatcher = dispatcher
        self._waiting = set(workers)
        self._deadline_ns = now_ns + self.ack_ns
        message = Routes(transit.to_dict())
        out: list[Instruction] = [Send(w, message) for w in sorted(self._waiting)]
        return out + self._flip_if_known(now_ns)

    def applied(self, incarnation: int, version: int, now_ns: int) -> list[Instruction]:
        """RoutesApplied came. Answers to older versions are of no interest."""
        if version != self.version:
            return []
        if incarnation == self._dispatcher:
            if self._sent == version:
                self.flipped, self.in_force = version, self._admission
                self._deadline_ns = None
            return []
        self._waiting.discard(incarnation)
        return self._flip_if_known(now_ns)

    def drained_below(self, incarnation: int, version: int) -> None:
        """Drained came from the Dispatcher. It may be of routes before those under way."""
        if incarnation == self._dispatcher and version <= self._sent:
            self.drained = max(self.drained, version)

    def gone(self, incarnation: int, now_ns: int) -> list[Instruction]:
        """A process died. With the Dispatcher die the requests in flight: nothing is left to drain,
        and its successor gets a publication of its own."""
        if incarnation == self._dispatcher:
            self._dispatcher = self.in_force = None
            self._deadline_ns = None
            self._waiting.clear()
            self.drained = self.version
            return []
        self._waiting.discard(incarnation)
        return self._flip_if_known(now_ns)

    def tick(self, now_ns: int) -> list[Instruction]:
        """A worker that does not answer must not hold up the others; a Dispatcher that does not is
        hung and is replaced."""
        if self._deadline_ns is None or now_ns < self._deadline_ns:
            return []
        if self._sent == self.version:
            self._deadline_ns = None
            return [] if self._dispatcher is None else [Kill(self._dispatcher)]
        self.late += len(self._waiting)
        self._waiting.clear()
        return self._flip_if_known(now_ns)

    def deadline(self) -> int | None:
        return self._deadline_ns

    def _flip_if_known(self, now_ns: int) -> list[Instruction]:
        known = self._sent == self.version
        if self._waiting or known or self._dispatcher is None or self._admission is None:
            return []
        self._sent = self.version
        self._deadline_ns = now_ns + self.flip_ns
        return [Send(self._dispatcher, Routes(self._admission.to_dict()))]
