"""DispatcherServer: the loop that owns the data sockets and does what the Controller asks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import zmq

from blockflow.core import limits
from blockflow.core.errors import RequestError
from blockflow.core.launchspec import DispatcherLaunch
from blockflow.core.routing import RouteTable
from blockflow.dispatcher.admission import Admission
from blockflow.dispatcher.clients import ClientPort
from blockflow.dispatcher.cpu_latency import CpuLatency
from blockflow.dispatcher.exchange import Exchange
from blockflow.dispatcher.grants import GrantDesk
from blockflow.dispatcher.heap import is_large
from blockflow.dispatcher.monitor import Snapshot, StatsThread
from blockflow.dispatcher.reading import FrameReader
from blockflow.dispatcher.repeats import ResultMemory
from blockflow.dispatcher.resources import client_protection, input_producer, remove_files
from blockflow.dispatcher.tensors import TensorDesk, waiting_bytes
from blockflow.tensormq.agent import Mailbox
from blockflow.tensormq.curve import Gatekeeper, LinkGuard
from blockflow.tensormq.janitor import grant_socket_path
from blockflow.tensormq.push import PushCache
from blockflow.tensormq.shm import ShmConsumer
from blockflow.tensormq.sockets import bind_pull, bind_router, remove_socket_files
from blockflow.wire.control import (
    ControlMessage,
    Drain,
    Drained,
    Monitor,
    PeerGone,
    Ping,
    Routes,
    RoutesApplied,
    Stop,
    Undrain,
)

_LOG = logging.getLogger("blockflow.dispatcher")

_RETURNS_AT_ONCE = 64
_REQUESTS_AT_ONCE = 32
_ROUND_NS = 5_000_000
"""Results come first, as they give credits back; neither side starves the other: so many messages,
or for so long, as copies of large tensors take milliseconds each."""

_FIRST_ROUTES_NS = 1_000_000_000
"""What clients send to a new Dispatcher waits for its first routes, but no longer than this: one
that replaces another gets them at once, and need not tell its predecessor's clients NOT_READY."""

_LAST_REPLIES_NS = 1_000_000_000
"""At the end there is a reply for each request in flight, more than a connection takes at once. For
so long they wait for clients that read; ZeroMQ has as long for what it has taken."""

_CLIENT_HWM, _RETURN_HWM = 64, 1024
_RETURN_FRAMES = 2
"""Of a result: its header, and the tensor where that is not in a slot."""

_INLINE_BYTES = 1 << 30

_CHORES_NS = 5_000_000
"""What nobody waits for is seen to when nothing comes, and as often as this while messages do."""


class DispatcherServer:
    """One thread's work: requests, results, routes.

    Args:
        launch: the birth certificate.
        context: ZeroMQ context of this process.
        mailbox: what the control thread passes on (control messages) and the monitor asks.
        tell: sends a message to the Controller, from any thread.
        clock: monotonic nanoseconds.
        heard: is told each Ping that this loop has seen: it is alive.
        cpu_latency: None: of this machine.

    Raises:
        BlockFlowError: PORT_IN_USE, NO_SPACE, INVALID_REQUEST; nothing is left behind then.

    Attributes:
        endpoint: where workers send results.
        client_endpoints: where clients connect, ports resolved.
        state: ``running``, ``draining`` or ``stopping``; read by the control thread.
    """

    def __init__(
        self,
        launch: DispatcherLaunch,
        context: zmq.Context[zmq.Socket[bytes]],
        mailbox: Mailbox[ControlMessage | Snapshot],
        tell: Callable[[ControlMessage], None],
        clock: Callable[[], int] = time.monotonic_ns,
        heard: Callable[[int], None] = lambda seq: None,
        cpu_latency: CpuLatency | None = None,
    ) -> None:
        self._launch = launch
        self._incarnation = launch.incarnation
        self._mailbox = mailbox
        self._tell = tell
        self._clock = clock
        self._heard = heard
        self._cpu_latency = cpu_latency or CpuLatency()
        self._poller = zmq.Poller()
        self._hosts: dict[int, str] = {}
        self._drained = 0
        self._wait_ms = self._chores_ns = 0
        self._empty_due = False
        self.state = "running"
        run_dir = Path(launch.run_dir)
        keeper = Gatekeeper(context)
        link = LinkGuard(keeper, run_dir)
        protection = client_protection(launch, keeper)
        router, self.client_endpoints = bind_router(
            context, launch.client_endpoints, limits.MAX_MESSAGE_BYTES, _CLIENT_HWM, protection
        )
        with ExitStack() as undo:  # of what this Dispatcher has made itself, and nothing else
            undo.callback(remove_socket_files, launch.client_endpoints)
            undo.callback(router.close, 0)
            self._returns, self.endpoint = bind_pull(
                context,
                launch.transport,
                run_dir,
                launch.incarnation,
                hwm=_RETURN_HWM,
                protect=link.bind(launch.transport),
            )
            undo.callback(remove_socket_files, [self.endpoint])
            undo.callback(self._returns.close, 0)
            producer = input_producer(launch, run_dir)
            undo.pop_all()
        self._reader = FrameReader(self._returns, _RETURN_FRAMES)
        self._push = PushCache(context, self._poller, protect=link.connect)
        self._clients = ClientPort(router, self.client_endpoints, encrypted=protection is not None)
        side = grant_socket_path(run_dir, launch.incarnation)
        self._grants = GrantDesk(side, self._poller)
        self._desk = TensorDesk(producer, ShmConsumer(run_dir), self._grants)
        self.exchange = Exchange(
            launch.incarnation,
            Admission(
                launch.max_inflight,
                launch.max_inflight_per_client,
                launch.arena_bytes or _INLINE_BYTES,
                launch.adaptive_limit,
            ),
            self._desk,
            self._grants,
            self._clients,
            self._push,
            ResultMemory(launch.result_memory_bytes),
            clock,
        )
        self._stats = StatsThread(
            launch.incarnation, launch.monitor_hz, mailbox.put, tell, producer.usage
        )
        for source in (self._returns, self._clients.departures, mailbox.fileno()):
            self._poller.register(source, zmq.POLLIN)
        self._opens_ns: int | None = clock() + _FIRST_ROUTES_NS

    def begin(self) -> None:
        """Start its last thread; it is ready then. Raises RuntimeError: it gets none."""
        self._stats.start()

    def run(self, signalled: Callable[[], bool] = lambda: False) -> None:
        """Serve until Stop. Every request in flight is answered before this returns, unless it was
        a signal to this process alone (``signalled``): then another Dispatcher takes its place, and
        clients that see the connection break send their requests to that one."""
        while self.state != "stopping":
            self.step(self._wait_ms)
        if signalled():
            return
        self.exchange.abort_all(
            RequestError("BLOCK_UNAVAILABLE", "the system is shutting down", hint="try again later")
        )
        end_ns = self._clock() + _LAST_REPLIES_NS
        while self._clients.blocked and self._clock() < end_ns:
            self._clients.departures.poll(self._clients.next_look_ms())
            self._guarded("connections", self._clients.on_departures, self._clock())
            self._guarded("the last replies", self.exchange.tick, self._clock())

    def step(self, timeout_ms: int) -> None:
        """One round: wait for at most ``timeout_ms``, then handle what has come."""
        events = dict(self._poller.poll(timeout_ms))
        guarded, notes = self._guarded, self._mailbox.fileno()
        if self._returns in events:
            self._serve_returns()
        if self._clients.socket in events:
            self._serve_clients()
        if self._clients.departures in events:
            guarded("connections", self._clients.on_departures, self._clock())
        # After the requests: what a client had sent before it went is served with its memory.
        for source in events:
            if isinstance(source, int) and self._grants.watches(source):
                guarded("a grant", self._grants.on_event, source, self._clock())
        if notes in events:
            for note in self._mailbox.drain():
                guarded("a note of the Controller", self._on_note, note)
        guarded("messages that wait", self._push.flush)
        now = self._clock()
        guarded("what is due", self.exchange.tick, now)
        self._cpu_latency.hold(self.exchange.wakefulness.wanted_us(now))
        if now >= self._chores_ns or not events:  # a heartbeat comes whatever happens
            self._chores_ns = now + _CHORES_NS
            guarded("connections", self._clients.look, now, self._held_bytes)
            guarded("grants", self._grants.tick, now)
            guarded("its memory", self._desk.ebb, now)
        if self._drained < self.exchange.planner.version or self._empty_due:
            self._report_drained()
        if self._opens_ns is not None:
            self._open_when_due(self._opens_ns)
        self._wait_ms = self._left_ms()

    def _open_when_due(self, due_ns: int) -> None:
        """Serve clients once there are routes, or when there will be none for now."""
        if self.exchange.planner.table is not None or self._clock() >= due_ns:
            self._poller.register(self._clients.socket, zmq.POLLIN)
            self._opens_ns = None

    def close(self) -> None:
        """Close sockets (replies get up to a second to leave), remove all files. Once."""
        self._stats.close()
        self._push.close()
        self._returns.close()
        self._clients.close()
        self._grants.close()
        self._desk.close()
        self._cpu_latency.close()
        remove_files(self._launch)

    def _left_ms(self) -> int:
        """For so long there is nothing to do, unless something comes; -1 = until then."""
        left, now = self._clients.next_look_ms(), self._clock()
        for due in (self.exchange.next_due(), self._grants.next_due(), self._opens_ns):
            if due is not None:
                ms = max(0, -((now - due) // 1_000_000))  # rounded up: not a moment too early
                left = ms if left is None else min(left, ms)
        return -1 if left is None else left

    def _serve_returns(self) -> None:
        end_ns = self._clock() + _ROUND_NS
        for _ in range(_RETURNS_AT_ONCE):
            frames = self._reader.read()
            if not frames:
                return
            if is_large(frames):
                self._clients.watch.large(self._clock())
            try:
                self.exchange.on_return(frames)
            except Exception:
                self.exchange.defect("a result")
            if not self._reader.waits or self._clock() >= end_ns:
                return

    def _serve_clients(self) -> None:
        end_ns = self._clock() + _ROUND_NS
        for _ in range(_REQUESTS_AT_ONCE):
            try:
                received = self._clients.receive(self._clock())
                if received is None:
                    return
                self.exchange.on_client(*received)
            except Exception:
                self.exchange.defect("a request")
            if not self._clients.more() or self._clock() >= end_ns:
                return

    def _held_bytes(self) -> int:
        """Inputs and results that are kept in this process's own memory."""
        results = self.exchange.memory.nbytes + waiting_bytes(self.exchange.table.entries)
        return self._desk.frames.nbytes + results

    def _guarded(self, what: str, act: Callable[..., object], *given: Any) -> None:
        try:
            act(*given)
        except Exception:
            self.exchange.defect(what)

    # --- the Controller

    def _on_note(self, note: ControlMessage | Snapshot) -> None:
        if isinstance(note, Snapshot):
            exchange = self.exchange
            limit = exchange.admission.limit
            note.answer.put(exchange.stats.sample(self._clock(), self._gauges(), limit))
        elif isinstance(note, Ping):
            self._heard(note.seq)
        elif isinstance(note, Routes):
            self._on_routes(note)
        elif isinstance(note, PeerGone):
            self._on_peer_gone(note)
        elif isinstance(note, Drain):
            self.state = "draining"
            self.exchange.closed_because = "the system is draining"
            self._empty_due = True
        elif isinstance(note, Undrain):
            self.state = "running"
            self.exchange.closed_because = ""
            self._empty_due = False
        elif isinstance(note, Monitor):
            self._stats.set_rate(note.hz)
        elif isinstance(note, Stop):
            self.state = "stopping"
        else:
            _LOG.warning("%s is not for a Dispatcher", type(note).__name__)

    def _on_routes(self, note: Routes) -> None:
        try:
            table = RouteTable.from_dict(note.table)
        except ValueError as exc:
            _LOG.error("route table refused: %s", exc)
            return
        if table.version < self.exchange.planner.version:
            _LOG.error("route table %d is older than the present one", table.version)
            return
        self._desk.set_devices({r.incarnation: r.device for r in table.stages.values()})
        self.exchange.publish(table)
        self._cpu_latency.retry()
        for route in table.stages.values():
            self._hosts[route.incarnation] = route.endpoint
        self._tell(RoutesApplied(self._incarnation, table.version))

    def _on_peer_gone(self, note: PeerGone) -> None:
        endpoint = self._hosts.pop(note.incarnation, None)
        unsent = [] if endpoint is None else self._push.drop(endpoint)
        self.exchange.peer_gone(note.incarnation, note.at_work, unsent)

    def _report_drained(self) -> None:
        table, latest = self.exchange.table, self.exchange.planner.version
        if self._drained < latest:
            oldest = table.oldest_version()
            version = latest if oldest is None else min(oldest, latest)
            if version > self._drained:
                # Of each of several that drain: what an earlier update has replaced can go.
                self._drained = version
                self._tell(Drained(self._incarnation, version))
                if version == latest:
                    self._forget_retired()
        if self._empty_due and not len(table):
            self._tell(Drained(self._incarnation))
            self._empty_due = False

    def _forget_retired(self) -> None:
        """Nothing is in flight to or from workers that are in no route any more.

        Their arenas stay mapped until PeerGone: a drained block's worker may come back.
        """
        routes = self.exchange.planner.table
        current = {r.incarnation for r in routes.stages.values()} if routes else set()
        for incarnation in [i for i in self._hosts if i not in current]:
            del self._hosts[incarnation]
        self.exchange.withdrawals.forget_retired()
        self.exchange.on_unsent(self._push.retain(set(self._hosts.values())))

    def _gauges(self) -> dict[str, Any]:
        exchange = self.exchange
        return {
            "state": self.state,
            "inflight": len(exchange.table),
            "inflight_bytes": exchange.table.charged,
            "dropped": dict(exchange.table.dropped),
            "recovery": exchange.table.gauges(),
            "result_memory": exchange.memory.gauges(),
            "backlog_bytes": self._clients.backlog_bytes(),
            "evicted": self._clients.evicted,
            "turned_away": self._clients.peers.turned_away,
            "unread": self._clients.watch.ended,
            "admission": exchange.admission.figures(),
            "withdrawn": exchange.withdrawals.sent,
            "legs": self._desk.legs.to_dict(),
            "grants": self._grants.gauges(),
            "cpu_latency": self._cpu_latency.gauges(),
            "epoch": exchange.planner.epoch,
            "version": exchange.planner.version,
        }
