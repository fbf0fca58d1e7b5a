"""Register: the books about requests in flight: who they are, whose, how many, until when. Pure."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection
from typing import Any

from blockflow.core.errors import RequestError
from blockflow.dispatcher.entry import Entry
from blockflow.dispatcher.plan import Plan, Planner
from blockflow.dispatcher.waiting import WaitingRoom
from blockflow.wire.data import REQUEST_ID_BYTES

_HEAP_SLACK = 256


class Register:
    """What the in-flight table knows of its requests.

    Args:
        incarnation: of the Dispatcher; part of every ticket.
        planner: is told which requests are under way.

    Attributes:
        charged: bytes of all retained inputs.
    """

    def __init__(self, incarnation: int, planner: Planner) -> None:
        self._prefix = incarnation.to_bytes(REQUEST_ID_BYTES // 2, "big")
        self._planner = planner
        self._room = WaitingRoom(planner)
        self._count = 0
        self._by_ticket: dict[bytes, Entry] = {}
        self._by_id: dict[tuple[bytes, bytes], Entry] = {}
        self._repeatable: dict[bytes, Entry] = {}
        self._of_client: defaultdict[bytes, int] = defaultdict(int)
        self._rows: defaultdict[str, int] = defaultdict(int)
        self._versions: defaultdict[int, int] = defaultdict(int)
        self._deadlines: list[tuple[int, bytes]] = []
        self.charged = 0

    def __len__(self) -> int:
        return len(self._by_ticket)

    def __contains__(self, entry: Entry) -> bool:
        return entry.ticket in self._by_ticket

    @property
    def entries(self) -> Collection[Entry]:
        """The requests in flight."""
        return self._by_ticket.values()

    @property
    def waiting(self) -> int:
        """Requests that are not under way at the moment."""
        return len(self._room.waiting)

    def may_not_wait(self, client: bytes, nbytes: int, places: int, max_bytes: int) -> str:
        """As :meth:`WaitingRoom.refusal`."""
        return self._room.refusal(client, nbytes, places, max_bytes)

    def rows_of(self, task: str) -> int:
        """Rows of one task in flight."""
        return self._rows.get(task, 0)

    def of_client(self, client: bytes) -> int:
        """Requests that this client has in flight."""
        return self._of_client.get(client, 0)

    def find(self, request_id: bytes, digest: bytes) -> Entry | None:
        """The request in flight that is the same one, whichever connection it came by."""
        entry = self._repeatable.get(request_id)
        return entry if entry is not None and entry.digest == digest else None

    def alike(self, request_id: bytes, shape: bytes) -> bool:
        """Whether one of this name is in flight that :meth:`find` may find; ``shape`` is what its
        digest begins with."""
        entry = self._repeatable.get(request_id)
        return entry is not None and entry.digest.startswith(shape)

    def named(self, client: bytes, request_id: bytes) -> Entry | None:
        """The request in flight that this client calls so."""
        return self._by_id.get((client, request_id))

    def check_new(self, client: bytes, request_id: bytes) -> None:
        """Raises RequestError DUPLICATE_REQUEST when this client has the id in flight."""
        if (client, request_id) in self._by_id:
            raise RequestError(
                "DUPLICATE_REQUEST",
                f"request {request_id.hex()} is in flight",
                where=request_id.hex(),
                hint="the running one is not touched; choose another id",
            )

    def oldest_version(self) -> int | None:
        """Lowest route version of a request in flight; None when there is none."""
        return min(self._versions) if self._versions else None

    def soonest_deadline(self) -> int | None:
        """Of the requests in flight."""
        heap = self._deadlines
        while heap and heap[0][1] not in self._by_ticket:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    # --- coming and going

    def admit(
        self,
        client: bytes,
        request_id: bytes,
        tasks: tuple[str, ...],
        plan: Plan,
        *,
        rows: int,
        deadline_ns: int,
        received_ns: int,
        retained: Any,
        charged: int,
        digest: bytes = b"",
        again: bool = False,
    ) -> Entry:
        """A request enters; from here on it gets exactly one reply.

        With an outline for a plan it waits (``waits_for`` of the entry says for what); else it is
        to be sent on its way.

        Raises:
            RequestError: DUPLICATE_REQUEST.
        """
        self.check_new(client, request_id)
        self._count += 1
        ticket = self._prefix + self._count.to_bytes(REQUEST_ID_BYTES - len(self._prefix), "big")
        entry = Entry(
            client,
            request_id,
            ticket,
            tasks,
            plan,
            rows,
            deadline_ns,
            received_ns,
            retained,
            charged,
            digest,
            again,
        )
        self._by_ticket[ticket] = entry
        self._by_id[client, request_id] = entry
        self._of_client[client] += 1
        if digest:
            self._repeatable[request_id] = entry
        for task in tasks:
            self._rows[task] += rows
        if plan.absent:
            self._room.park(entry)
        else:
            self._set_out(plan)
        self.charged += charged
        heapq.heappush(self._deadlines, (deadline_ns, ticket))
        if len(self._deadlines) > 2 * len(self._by_ticket) + _HEAP_SLACK:
            # Most requests end long before their deadline: their places must not pile up.
            self._deadlines = [d for d in self._deadlines if d[1] in self._by_ticket]
            heapq.heapify(self._deadlines)
        return entry

    def attach(self, client: bytes, entry: Entry) -> None:
        """The request has come again by another connection: its reply goes there.

        Raises:
            RequestError: DUPLICATE_REQUEST: another one has its name there.
        """
        self.check_new(client, entry.request_id)
        self._detach(entry)
        entry.client = client
        self._by_id[client, entry.request_id] = entry
        self._of_client[client] += 1

    def _set_out(self, plan: Plan) -> None:
        self._planner.take(plan)
        self._versions[plan.version] += 1

    def _arrived(self, plan: Plan) -> None:
        self._planner.give_back(plan)
        _count_down(self._versions, plan.version)

    def _strike_out(self, entry: Entry, under_way: bool) -> None:
        """It has ended; ``under_way``: on its plan, and not between two attempts."""
        del self._by_ticket[entry.ticket]
        self._detach(entry)
        if entry.digest and self._repeatable.get(entry.request_id) is entry:
            del self._repeatable[entry.request_id]
        self.charged -= entry.charged
        for task in entry.tasks:
            _count_down(self._rows, task, entry.rows)
        if under_way:
            self._arrived(entry.plan)

    def _detach(self, entry: Entry) -> None:
        """Its client waits for no reply of it any more. Idempotent."""
        if self._by_id.pop((entry.client, entry.request_id), None) is not None:
            _count_down(self._of_client, entry.client)


def _count_down(counter: dict[Any, int], key: Any, by: int = 1) -> None:
    left = counter[key] - by
    if left:
        counter[key] = left
    else:
        del counter[key]
