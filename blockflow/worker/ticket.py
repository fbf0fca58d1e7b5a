"""Ticket: one request's rows in this worker; Source: the tensor they lie in; Batch: what runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from blockflow.core.errors import BlockFlowError
from blockflow.tensormq.channel import InBuffer, OutBuffer
from blockflow.wire.data import PROBE_EPOCH, Item

FILL = 0
"""What stands in a padded batch's result beyond the own length of each ticket that goes on here."""


class Source:
    """A tensor that one or several tickets have their rows in; released by the last of them.

    Made from a received buffer, or from the output of another stage of this worker (then there is
    no socket and no slot between the two). Counting is done under the worker's lock.

    Attributes:
        dtype: of the tensor: its name, or torch's object.
        shape: of the tensor, without the rows.
        on_release: called by the last release, if not None.
    """

    __slots__ = ("_buffer", "_tensor", "_users", "dtype", "on_release", "shape")

    def __init__(
        self,
        dtype: Hashable,
        shape: tuple[int, ...],
        users: int,
        *,
        buffer: InBuffer | None = None,
        tensor: Any = None,
        on_release: Callable[[], None] | None = None,
    ) -> None:
        self.dtype = dtype
        self.shape = shape
        self._users = users
        self._buffer = buffer
        self._tensor = tensor
        self.on_release = on_release

    def tensor(self) -> Any:
        """The whole tensor (torch); made when the engine thread first asks for it."""
        if self._tensor is None and self._buffer is not None:
            self._tensor = self._buffer.tensor()
        return self._tensor

    def detach(
        self, copied: Callable[[Any], Any], on_release: Callable[[], None] | None = None
    ) -> bool:
        """Copy what lies in a slot that is held for it, and let go of the slot.

        Args:
            copied: gives a copy in memory of its own.
            on_release: called when nobody needs that any more.

        Returns:
            Whether there was one.

        Raises:
            RuntimeError: torch's, without memory for the copy; nothing has changed.
        """
        buffer = self._buffer
        let_go = self.on_release if buffer is None else buffer.release
        if let_go is None:
            return False
        if self._tensor is None and buffer is not None and buffer.bring_home():
            self.on_release = on_release
            return True
        self._tensor = copied(self.tensor())
        self._buffer, self.on_release = None, on_release
        let_go()
        return True

    @property
    def lender(self) -> int | None:
        """Incarnation of the worker in whose slot it lies, None when it lies in none."""
        handle = None if self._buffer is None else self._buffer.desc.handle
        return None if handle is None else handle.incarnation

    @property
    def nbytes(self) -> int:
        """Of the slot that it lies in; 0 where it lies in none."""
        buffer = self._buffer
        return 0 if buffer is None or self.lender is None else buffer.desc.nbytes

    @property
    def excess(self) -> int:
        """How many slots of its lender this process holds beyond its share: others may go without
        them."""
        spare = None if self._buffer is None else self._buffer.spare()
        return 0 if spare is None else max(0, -spare)

    def release(self) -> None:
        """One user less."""
        self._users -= 1
        if self._users == 0:
            self._tensor = None
            if self._buffer is not None:
                self._buffer.release()
            let_go, self.on_release = self.on_release, None
            if let_go is not None:  # it may know this source, and what both hold would stay
                let_go()


@dataclass(slots=True, eq=False)
class Ticket:
    """An :class:`Item` at the node that it shall run next, with its rows and time stamps.

    Attributes:
        key: names it in this worker.
        item: as received; ``item.hop`` is the node to run.
        stage: of that node.
        source: the tensor with its rows, from ``start`` on.
        arrival_ns: when it came into the worker.
        received_ns: when it came to this stage (the same, unless another stage here came before).
        ready_ns: when it began to wait.
        deadline_ns: on this host's monotonic clock.
        transit_ns: of the way to here; 0 within a worker.
        task: index of its task's share (:class:`~blockflow.batching.shares.TaskShare`).
        cut: its own dims after the rows, where they are a part of a padded batch's result and
            :data:`FILL` stands beyond them. None: they are the source's.
        apart: it runs unbatched at this stage: no output could hold its batch's.
        origin: of a further branch of its request here: the key that the first branch has kept.
    """

    key: int
    item: Item
    stage: int
    source: Source
    start: int
    arrival_ns: int
    received_ns: int
    ready_ns: int
    deadline_ns: int
    transit_ns: int
    task: int = 0
    cut: tuple[int, ...] | None = None
    apart: bool = False
    origin: int | None = None

    @property
    def probe(self) -> bool:
        """The control plane's readiness probe, and nobody's request."""
        return self.item.epoch == PROBE_EPOCH

    @property
    def rows(self) -> int:
        return self.item.rows

    @property
    def shape(self) -> tuple[int, ...]:
        """Dims after the rows."""
        return self.source.shape if self.cut is None else self.cut


@dataclass(slots=True, eq=False)
class Batch:
    """Tickets that run through a stage together.

    Attributes:
        stage: which.
        tickets: in row order of the output; changed by :meth:`keep` alone.
        rows, until_ns, shape, probe: of these tickets: their rows; when the last of them is too
            late, so that nobody waits for the output any more; dims after the rows of what the
            engine is given; the readiness probe, and nobody's request.
        keys: of all that its policy has named, also those that were taken out before it began.
        out: where the engine writes, None for a result that stays in this worker.
        started_ns: end of waiting.
        forward_ns: when its present forward was begun: who is run again alone has one of its own.
        limit_ns: how long one forward may take; 0 = as long as it likes.
        compute_from_ns, compute_to_ns: the engine's forward.
        result: the output tensor (torch).
        errors: by ticket key, for those that failed.
        copies: how often the output's bytes were copied.
        plan: what of its output goes where, as long as nobody fails.
        shipment: its messages, as far as they could be made before it was computed.
        pad_to: dims after the rows that every input is padded to; empty: nothing is padded.
        cuts: of a padded batch, by ticket key: the ticket's own dims after the rows in the output.
        alone: one ticket that was to run unbatched; no policy knows of it.
        replayable: its block may run a second time on the same requests.
        waits: a device has it to compute, and has not come to it: its forward is not begun.
        landing: it is computed on a device, and its output is on the way from there to the host.
    """

    stage: int
    tickets: tuple[Ticket, ...]
    out: OutBuffer | None = None
    started_ns: int = 0
    forward_ns: int = 0
    limit_ns: int = 0
    compute_from_ns: int = 0
    compute_to_ns: int = 0
    result: Any = None
    errors: dict[int, BlockFlowError] = field(default_factory=dict)
    copies: int = 0
    plan: Any = None
    shipment: Any = None
    pad_to: tuple[int, ...] = ()
    cuts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    alone: bool = False
    keys: tuple[int, ...] = ()
    replayable: bool = True
    waits: bool = False
    landing: bool = False
    rows: int = field(init=False)
    until_ns: int = field(init=False)
    shape: tuple[int, ...] = field(init=False)
    probe: bool = field(init=False)

    def __post_init__(self) -> None:
        # Asked for again and again on a batch's way, and worked out once.
        self.shape = self.pad_to or self.tickets[0].shape
        self.keep(self.tickets)

    def keep(self, tickets: tuple[Ticket, ...]) -> None:
        """Go on with these of its tickets only, or with none."""
        self.tickets = tickets
        rows = until_ns = 0
        for ticket in tickets:
            rows += ticket.item.rows
            if ticket.deadline_ns > until_ns:
                until_ns = ticket.deadline_ns
        self.rows, self.until_ns = rows, until_ns
        if tickets:
            self.probe = tickets[0].item.epoch == PROBE_EPOCH

    @property
    def overdue_ns(self) -> int | None:
        """When its present forward has taken too long; None = never."""
        return self.forward_ns + self.limit_ns if self.limit_ns else None
