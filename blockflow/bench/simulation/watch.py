"""Watch: who looks at a simulation is told everything here. Looking changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blockflow.bench.simulation.request import Exit, Request
    from blockflow.bench.simulation.simulator import Simulator
    from blockflow.bench.simulation.worker import SimWorker
    from blockflow.worker.ticket import Batch, Ticket


class InvariantBroken(BaseException):
    """A rule that must always hold does not: a defect in a policy, or in the simulator. It is no
    ``Exception``: the code that is judged goes on after those, and shall not after this one.

    Args:
        now: virtual nanoseconds.
    """

    def __init__(self, rule: str, now: int, what: str) -> None:
        super().__init__(f"{rule}: {what} (at {now / 1e6:.6f} ms)")
        self.what = what
        self.rule = rule
        self.now = now


class Watch:
    """Does nothing at any event; a rule overrides what it needs."""

    def began(self, simulator: Simulator) -> None:
        """Before the first event."""

    def came(self, request: Request, now: int) -> None:
        """A query is at the Dispatcher."""

    def left(self, request: Request, how: Exit, now: int) -> None:
        """A query leaves; ``request.exit`` is how it left before, None as it should be."""

    def queued(self, worker: SimWorker, ticket: Ticket, now: int) -> None:
        """A ticket begins to wait at its stage; the scheduler does not know it yet."""

    def chosen(self, worker: SimWorker, batch: Batch, now: int) -> None:
        """The policy has named a batch; it may still have to wait for a slot."""

    def started(self, worker: SimWorker, batch: Batch, now: int) -> None:
        """The engine begins with a batch."""

    def ended(self, worker: SimWorker, batch: Batch, now: int) -> None:
        """A batch's output leaves the stage; the scheduler does not know it yet."""

    def expired(self, worker: SimWorker, ticket: Ticket, now: int) -> None:
        """A waiting ticket's deadline has passed."""

    def slots(self, worker: SimWorker, now: int) -> None:
        """The number of slots out has changed."""

    def rested(self, worker: SimWorker, now: int) -> None:
        """A worker has done all that it wants to do now."""

    def finished(self, simulator: Simulator, now: int) -> None:
        """After the last event."""


_EVENTS = tuple(name for name in vars(Watch) if not name.startswith("_"))


class Watches(Watch):
    """Several watches as one; each is only called for what it overrides."""

    def __init__(self, watches: Iterable[Watch]) -> None:
        found = tuple(watches)
        for event in _EVENTS:
            setattr(self, event, _fan(found, event))


def _fan(watches: Iterable[Watch], event: str) -> Callable[..., None]:
    own = [w for w in watches if getattr(type(w), event) is not getattr(Watch, event)]
    calls = tuple(getattr(w, event) for w in own)

    def tell(*args: Any) -> None:
        for call in calls:
            call(*args)

    return tell
