"""The client's protocol without I/O: pending requests, deadlines, connection state, outcomes.

Takes events and ``now`` (nanoseconds of any monotonic clock), gives back outcomes; the
:class:`~blockflow.client.connection.Connection` owns socket, thread and clock. Every request that
:meth:`ClientCore.submit` takes gets exactly one outcome, by its deadline plus :data:`GRACE_NS`
whatever the Dispatcher does.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from blockflow.client.catalog import PROBE_WAIT_NS, Catalog
from blockflow.client.counters import Counters
from blockflow.client.outcome import Failed, Link, Outcome, answered, misfit, per_task
from blockflow.client.request import Pending, Upload, duplicate, expired, too_many
from blockflow.client.sharing import INVITE_ID, Sharing
from blockflow.client.window import Window
from blockflow.core import limits
from blockflow.core.errors import BlockFlowError, RequestError, WireError
from blockflow.wire.client import (
    Cancel,
    Description,
    Invitation,
    Place,
    Reply,
    Request,
    TaskResult,
    decode_to_client,
    encode_to_dispatcher,
    request_id_of,
)
from blockflow.wire.grants import Direction
from blockflow.wire.tensor import TensorDesc

GRACE_NS = 100_000_000
"""How long after its deadline a request still waits for the Dispatcher's own word on it."""


class ClientCore:
    """State of one connection: ``max_pending`` bounds the unanswered requests.

    Attributes:
        sharing: the granted memory.
        unclaimed: places of results that nobody waits for any more: to be released.
    """

    def __init__(
        self,
        address: str,
        *,
        connect_timeout_ns: int,
        max_pending: int,
        now_ns: int,
        sharing: Sharing | None = None,
    ) -> None:
        self.link = Link(address, connect_timeout_ns, now_ns)
        self.sharing = sharing or Sharing("off")
        self.counters = Counters()
        self.unclaimed: deque[Place] = deque()
        self._catalog = Catalog(self.link)
        self._max_pending = max_pending
        self._pending: dict[bytes, Pending] = {}
        self._undated: dict[bytes, Pending] = {}  # of these, who waits for the tasks' own deadline
        # Ended here, with a reply to come, which a later request of the same id would take for its
        # own: another one's result, and a word that slots were read which were not.
        self._owed: set[bytes] = set()
        self._outbox: deque[bytes] = deque()
        self._urgent: deque[bytes] = deque()
        self._timers: list[tuple[int, bytes]] = []
        self._window = Window()

    # --- calls -----------------------------------------------------------------------------------

    def submit(
        self,
        request_id: bytes,
        tasks: Sequence[str],
        desc: TensorDesc,
        body: Any,
        deadline_ms: int | None,
        now_ns: int,
        retries: int = 0,
    ) -> None:
        """Take one request; ``body`` is kept until it was sent.

        ``deadline_ms`` None means the shortest deadline that the topology gives the tasks. When the
        connection breaks with the request in flight, it is sent again up to ``retries`` times.

        Raises:
            RequestError: DUPLICATE_REQUEST or OVERLOADED; nothing is then kept.
        """
        if request_id in self._pending or request_id in self._catalog.open:
            raise duplicate(request_id, "a request with this id is in flight")
        if request_id in self._owed:
            why = "a request with this id has ended here, but its reply is still to come"
            raise duplicate(request_id, why)
        if len(self._pending) >= self._max_pending:
            raise too_many(self._max_pending, self.link.address)
        ms = limits.DEFAULT_DEADLINE_MS if deadline_ms is None else deadline_ms
        p = Pending(request_id, tuple(tasks), desc, body, now_ns, now_ns + ms * 1_000_000)
        p.retries, p.nbytes = retries, desc.nbytes
        self._pending[request_id] = p
        self._outbox.append(request_id)
        if deadline_ms is None:
            self._undated[request_id] = p
        if deadline_ms is not None or not self.link.up or not self._settle_deadline(p):
            self._arm(request_id, self._due(p))
        self.counters.submitted += 1

    def cancel(self, request_id: bytes, why: str = "cancelled by the caller") -> list[Outcome]:
        """End a request now; the Dispatcher is told when it has it already. Or a question."""
        error = RequestError("CANCELLED", why, where=request_id.hex())
        if (p := self._pending.get(request_id)) is None:
            return self._catalog.end(request_id, error)
        self._give_up(p)
        return [self._fail(p, error)]

    def ask(
        self, request_id: bytes, wanted: Iterable[str] | None, timeout_ms: int, now_ns: int
    ) -> None:
        """Ask for the published tasks; with ``wanted``, wait until these (or any) are there."""
        self._urgent.extend(self._catalog.ask(request_id, wanted, timeout_ms, now_ns))
        self._arm(request_id, self._catalog.due(request_id))

    def close(self) -> list[Outcome]:
        """End everything; :meth:`next_message` still gives the Cancels worth sending."""
        out = [o for rid in list(self._pending) for o in self.cancel(rid, "the client was closed")]
        return out + self._catalog.close()

    # --- the connection --------------------------------------------------------------------------

    def on_connected(self) -> None:
        """The handshake is done: what waits may be sent."""
        self.link.up = self.link.ever_up = True
        self.link.trouble, self.link.denied = "", False
        self.counters.connects += 1
        self.sharing.reset()
        self._urgent.extend(self._catalog.on_connected())

    def on_disconnected(self, now_ns: int) -> list[Outcome]:
        """What was sent is lost or will be answered to nobody; what was not, waits."""
        if not self.link.up:
            return []
        self.link.up = False
        self.link.since_ns = now_ns
        self.counters.disconnects += 1
        self._urgent.clear()
        self._owed.clear()
        self._window.reset()
        self.sharing.reset()
        out: list[Outcome] = []
        for p in list(self._pending.values()):
            if p.sent and p.sendings > p.retries:
                why = "the connection broke with the request in flight"
                out.append(self._fail(p, self.link.lost(why)))
                continue
            if p.sent:
                self.counters.retries += 1
                self._put_back(p)
        # All wait for something else now: what was armed before would only pile up, break by break.
        armed = [(self._due(p), rid) for rid, p in self._pending.items()]
        self._timers = sorted(armed + [(self._catalog.due(rid), rid) for rid in self._catalog.open])
        return out

    def on_denied(self) -> list[Outcome]:
        """The Dispatcher refuses this client's key, or its lack of one: waiting would not help."""
        self.link.denied = True
        error = self.link.lost("")
        unsent = [p for p in self._pending.values() if not p.sent]
        return [*(self._fail(p, error) for p in unsent), *self._catalog.end_all(error)]

    def next_message(self, now_ns: int) -> tuple[bytes, Any, bytes | None] | None:
        """Header, body (or None) and request id of what to send next; then call :meth:`sent`.

        A body that is an :class:`Upload` is to be written into its slot, and not sent.
        """
        if not self.link.up:
            return None
        urgent, invites = self._urgent, self.sharing.invites
        while not urgent and not invites and self._outbox:
            p = self._pending.get(self._outbox[0])
            if p is None or p.sent:
                self._outbox.popleft()  # cancelled or expired meanwhile
            elif p.request_id not in self._undated or self._knows_deadlines(p, now_ns):
                self._undated.pop(p.request_id, None)
                upload = self._upload(p, now_ns)
                if upload is None and not self._window.takes(p.nbytes):
                    self._ask_for_those_behind(now_ns)
                    break
                left_ms = -(-(p.deadline_ns - now_ns) // 1_000_000)
                left_ms = min(max(1, left_ms), limits.MAX_DEADLINE_MS)
                where = None if upload is None else (upload.slot.grant, upload.slot.index)
                request = Request(p.request_id, p.tasks, left_ms, p.desc, where, p.tries)
                return encode_to_dispatcher(request), upload or p.body, p.request_id
            elif not urgent:
                return None
        urgent.extend(invites)
        invites.clear()
        return (urgent[0], None, None) if urgent else None

    def sent(self, request_id: bytes | None) -> None:
        """The socket took the message of :meth:`next_message`."""
        if request_id is None:
            self._urgent.popleft()
            return
        self._outbox.popleft()
        p = self._pending[request_id]
        p.sent = True
        p.sendings += 1
        counters, nbytes = self.counters, p.nbytes
        p.number = self.sharing.sent(request_id, None if p.upload is None else p.upload.slot)
        if p.upload is None:
            if p.sendings > p.retries:
                p.body = None
            self._window.sent(p.number, request_id, nbytes)
            counters.message_uploads += 1
            counters.message_upload_bytes += nbytes
        else:
            counters.slot_uploads += 1
            counters.slot_upload_bytes += nbytes

    def _upload(self, p: Pending, now_ns: int) -> Upload | None:
        if p.upload is not None and not self.sharing.holds(p.upload.slot):
            p.upload = None
        if p.upload is None and not p.message_only:
            slot = self.sharing.take(p.nbytes, now_ns)
            if slot is not None:
                p.upload = Upload(slot, p.body)
        return p.upload

    def on_message(self, frames: Sequence[Any], now_ns: int) -> list[Outcome]:
        """Decode what the Dispatcher sent; nonsense is counted, never raised."""
        try:
            msg = decode_to_client(frames[0])
            if isinstance(msg, Description):
                self.counters.unasked += not self._catalog.expects(msg.request_id)
                described = self._catalog.on_description(msg)
                for p in list(self._undated.values()):
                    self._settle_deadline(p)
                return described
            if isinstance(msg, Invitation):
                self.counters.unasked += not self.sharing.on_invitation(msg, now_ns)
                return []
        except WireError as exc:
            self.counters.malformed += 1
            rid = request_id_of(frames[0])
            if rid == INVITE_ID and self.sharing.on_nonsense(str(exc), now_ns):
                return []
            bad = self._handled(rid)
            return [self._fail(bad, exc)] if bad is not None else self._catalog.end(rid, exc)
        return self._on_reply(msg, tuple(frames[1:]), now_ns)

    # --- time ------------------------------------------------------------------------------------

    def next_wakeup(self) -> int | None:
        """When :meth:`on_tick` should run next."""
        timers, pending = self._timers, self._pending
        while timers and timers[0][1] not in pending and timers[0][1] not in self._catalog.open:
            heapq.heappop(timers)  # it has ended, as most do long before their time
        return timers[0][0] if timers else None

    def on_tick(self, now_ns: int) -> list[Outcome]:
        """End what is overdue."""
        out: list[Outcome] = []
        while self._timers and self._timers[0][0] <= now_ns:
            _, rid = heapq.heappop(self._timers)
            if rid in self._catalog.open:
                if self._catalog.due(rid) <= now_ns:
                    outcomes, headers = self._catalog.on_tick(rid, now_ns)
                    out += outcomes
                    self._urgent.extend(headers)
                if rid in self._catalog.open:
                    self._arm(rid, self._catalog.due(rid))
            elif (p := self._pending.get(rid)) is not None:
                due = self._due(p)
                if due > now_ns:
                    self._arm(rid, due)
                elif not p.sent and self.link.gave_up(p.submitted_ns, now_ns):
                    out.append(self._fail(p, self.link.lost("no connection to send it on")))
                else:
                    self._give_up(p)
                    out.append(self._fail(p, expired(p)))
        return out

    def _arm(self, request_id: bytes, due_ns: int) -> None:
        heapq.heappush(self._timers, (due_ns, request_id))
        # What has ended stays behind until it is due, or could be sent: swept when it is the most.
        pending, questions = self._pending, self._catalog.open
        many = 4 * (len(pending) + len(questions)) + 256
        if len(self._timers) > many:
            self._timers = [t for t in self._timers if t[1] in pending or t[1] in questions]
            heapq.heapify(self._timers)
        if len(self._outbox) > many:
            self._outbox = deque([rid for rid in self._outbox if rid in pending])

    def _due(self, p: Pending) -> int:
        if p.sent:
            return p.deadline_ns + GRACE_NS
        if self.link.up:
            return p.deadline_ns
        return min(p.deadline_ns, self.link.gives_up_at(p.submitted_ns))

    def _knows_deadlines(self, p: Pending, now_ns: int) -> bool:
        """Ask for the tasks' own deadlines, for ``p``; False while nothing was heard of them."""
        known, headers = self._catalog.knows(now_ns)
        if headers:
            self._urgent.extend(headers)
            self._arm(p.request_id, now_ns + PROBE_WAIT_NS)
        return known

    def _ask_for_those_behind(self, now_ns: int) -> None:
        """The first request in the queue has to wait, and others with it: not for ever."""
        p = next(iter(self._undated.values()), None)
        if p is not None:
            self._knows_deadlines(p, now_ns)

    def _settle_deadline(self, p: Pending) -> bool:
        """Give ``p`` its tasks' own deadline; False: none is known."""
        own_ms = self._catalog.deadline_ms(p.tasks)
        if own_ms is not None:
            p.deadline_ns = p.submitted_ns + own_ms * 1_000_000
            self._undated.pop(p.request_id, None)
            self._arm(p.request_id, self._due(p))
        return own_ms is not None

    # --- ends ------------------------------------------------------------------------------------

    def _on_reply(self, msg: Reply, frames: tuple[Any, ...], now_ns: int) -> list[Outcome]:
        self._catalog.on_epoch(msg.epoch)
        results, places = msg.results, [r.place for r in msg.results if r.place is not None]
        p = self._handled(msg.request_id)
        if p is None:
            self.counters.late_replies += msg.request_id not in self._catalog.open
            self.unclaimed.extend(places)
            return self._catalog.on_refusal(msg)
        if p.upload is not None and self._send_again(p, results):
            return []
        results = per_task(results, p.tasks)
        if (wrong := misfit(results, p.tasks, frames, self.link.address)) is not None:
            self.counters.malformed += 1
            self.unclaimed.extend(places)
            return [self._fail(p, wrong)]
        del self._pending[msg.request_id]
        self.counters.answered += 1
        for nbytes in self.counters.count(results):
            self.sharing.want(Direction.RESULT, nbytes, now_ns)
        return [answered(msg, results, frames, p.submitted_ns, p.upload is not None)]

    def _handled(self, request_id: bytes | None) -> Pending | None:
        """A reply has come, and says, whatever it holds, that the request was read. Who waits?"""
        if request_id not in self._pending and request_id not in self._owed:
            self.counters.unasked += request_id not in self._catalog.open
            return None
        p = self._pending.get(request_id)
        number = 0 if p is None else p.number
        self.sharing.on_reply(request_id, number)
        self._window.on_reply(request_id, number)
        self._owed.discard(request_id)
        return p

    def _send_again(self, p: Pending, results: Sequence[TaskResult]) -> bool:
        """The Dispatcher did not find our slot, so that nothing has run: now in a message."""
        if not all(r.error is not None and r.error.code == "CONNECTION_LOST" for r in results):
            return False
        p.message_only = True
        p.sendings -= 1  # no retry is used up, and the Dispatcher is not told that it may have run
        self._put_back(p)
        return True

    def _put_back(self, p: Pending) -> None:
        """To be sent once more, from its body."""
        p.upload = None
        p.sent = False
        self._outbox.append(p.request_id)

    def _give_up(self, p: Pending) -> None:
        """Nobody waits for ``p`` any more: the Dispatcher, if it has it, shall know."""
        if p.sent:
            self._urgent.append(encode_to_dispatcher(Cancel(p.request_id)))
            self._owed.add(p.request_id)

    def _fail(self, p: Pending, error: BlockFlowError) -> Failed:
        del self._pending[p.request_id]
        self._undated.pop(p.request_id, None)
        if p.upload is not None and not p.sent:
            self.sharing.put_back(p.upload.slot)
        p.body = None
        self.counters.failed += 1
        return Failed(p.request_id, error)
