"""Worker: startup, running, termination; its data thread's loop (thesis, section 3.6.1).

Four threads, each with its own duty: *data* (the process's main thread: receiving, queues,
policies, sending), *engine* (loading and computing, :mod:`blockflow.worker.runner`), *control*
(pings and the lifeline, :class:`blockflow.tensormq.agent.ControlAgent`) and *monitor* (KPIs). They
speak with the data thread by its mailbox. One short cut: what the engine thread has computed it
sends on and replaces by the next batch itself, under the lock that the data thread gives up only to
sleep. The way through a second thread would cost a wake-up, 50 to 100 us, at every hop.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import zmq

import blockflow
from blockflow.core.errors import BlockFlowError, RequestError
from blockflow.core.launchspec import WorkerLaunch
from blockflow.core.routing import RouteTable
from blockflow.tensormq.agent import ControlAgent, Mailbox
from blockflow.tensormq.janitor import remove_leavings
from blockflow.tensormq.sockets import new_context
from blockflow.wire import control
from blockflow.worker.monitor import AskKpi, Snapshot
from blockflow.worker.parts import Parts, open_parts
from blockflow.worker.runner import Computed, Loaded
from blockflow.worker.ticket import Batch

_LOG = logging.getLogger("blockflow.worker")

EXIT_OK = 0
EXIT_START_FAILED = 2
EXIT_STUCK = 3
"""A forward exceeded its block's time-out: a thread cannot be interrupted, so the process ends."""

_NEVER_NS = 1 << 63
_BURST = 64
"""Messages read in one go before finished work is looked after again."""
_STOP_S = 30.0
"""How long a running batch may take to finish after Stop (its block's time-out may be shorter)."""
_END_S = 2.0
"""How long the next hops have to read the last outputs, and the engine to free its memory."""


class _Wake:
    """Mail that only wakes the data thread: look again at what there is to do, and until when."""


class Worker:
    """One worker process; :meth:`run` is its life.

    Args:
        launch: its birth certificate.
        lifeline_fd: read end of the manager's pipe, None without.
    """

    def __init__(self, launch: WorkerLaunch, lifeline_fd: int | None) -> None:
        self._launch = launch
        self._run_dir = Path(launch.run_dir)
        self._mailbox: Mailbox[Any] = Mailbox()
        self._state = "loading"
        self._context = new_context()
        self._agent = ControlAgent(
            endpoint=launch.controller,
            incarnation=launch.incarnation,
            on_message=self._mailbox.put,
            state=lambda: self._state,
            on_orphaned=self._remove_files,
            lifeline_fd=lifeline_fd,
            context=self._context,
        )
        self._poller = zmq.Poller()
        self._poller.register(self._mailbox.fileno(), zmq.POLLIN)
        self._reading = False
        self._lock = threading.Lock()
        """Guards the executor and the sending sockets; free while the data thread sleeps."""
        self._serving: Parts | None = None
        self._sleeps_until_ns = _NEVER_NS
        self._loaded: Loaded | None = None
        self._drain_asked = False
        self._stopping = False

    # --- life ------------------------------------------------------------------------------------

    def run(self) -> int:
        """Live until Stop or SIGTERM; returns the exit status."""
        for sig in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sig, lambda *_: self._mailbox.put(control.Stop()))
        launch = self._launch
        self._agent.start()
        self._agent.send(
            control.Hello(
                "worker", launch.name, launch.incarnation, os.getpid(), blockflow.__version__
            )
        )
        status = EXIT_OK
        parts: Parts | None = None
        try:
            parts = open_parts(
                launch,
                self._context,
                self._poller,
                self._from_engine,
                self._mailbox.put,
                self._agent.send,
            )
            if self._load(parts):
                self._ready(parts)
                status = self._serve(parts)
        except BlockFlowError as exc:
            _LOG.error("start-up of %s failed: %s", launch.name, exc)
            self._agent.send(control.StartFailed(launch.incarnation, exc.to_dict()))
            status = EXIT_START_FAILED
        self._terminate(parts, status)
        return status

    def _load(self, parts: Parts) -> bool:
        """Startup: load and warm up while control messages are served; False when told to stop.

        Raises:
            BlockFlowError: why a block cannot be loaded.
        """
        parts.runner.start()
        parts.runner.load(Path(self._launch.repository))
        while self._loaded is None and not self._stopping:
            self._poller.poll()
            self._read_mailbox(parts)
        if self._loaded is not None and self._loaded.error is not None:
            raise self._loaded.error
        return not self._stopping

    def _ready(self, parts: Parts) -> None:
        launch, loaded = self._launch, self._loaded
        if loaded is None:
            return
        self._state = "draining" if self._drain_asked else "ready"
        parts.monitor.start(launch.monitor_hz)
        self._agent.send(
            control.Ready(
                launch.incarnation, parts.endpoint, load_ms=loaded.load_ms, warm_ms=loaded.warm_ms
            )
        )

    def _serve(self, parts: Parts) -> int:
        """Running: returns the exit status once there is nothing more to do."""
        with self._lock:
            self._serving = parts
            try:
                return self._loop(parts)
            finally:
                self._serving = None

    def _loop(self, parts: Parts) -> int:
        executor, pull, push = parts.executor, parts.pull, parts.push
        end_ns: int | None = None
        while True:
            now = time.monotonic_ns()
            if executor.give_up_overdue(now):
                return EXIT_STUCK
            if self._stopping:
                end_ns = end_ns or now + int(_STOP_S * 1e9)
                if not executor.busy:
                    return EXIT_OK
                if now > end_ns:
                    return EXIT_STUCK
            else:
                executor.step(now)
            if self._drain_asked and executor.idle and not push.pending():
                self._drain_asked = False
                version = parts.delivery.routes.version
                self._agent.send(control.Drained(self._launch.incarnation, version))
            self._watch(pull, not executor.full)
            wakes = [w for w in (executor.next_wake_ns(), end_ns) if w is not None]
            self._sleeps_until_ns = min(wakes, default=_NEVER_NS)
            timeout = _timeout_ms(self._sleeps_until_ns)
            self._lock.release()
            try:
                events = self._poller.poll(timeout)
            finally:
                self._lock.acquire()
            # Results first: their slots and the engine are what everything else waits for.
            if self._mailbox:
                self._read_mailbox(parts)
            for socket, _ in events:
                if socket is pull:
                    self._receive(parts, _BURST)
                elif not isinstance(socket, int):
                    push.flush()

    def _from_engine(self, message: Loaded | Computed) -> None:
        """Called by the engine thread: send the result and start the next batch, if that is all."""
        if isinstance(message, Computed):
            with self._lock:
                parts = self._serving
                # A socket with waiting messages may be in the data thread's poll: leave it alone.
                if parts is not None and not parts.push.sockets_waiting():
                    try:
                        self._go_on(parts, message.batch)
                    except Exception as exc:  # a defect: it ends the process, not just this thread
                        self._mailbox.put(exc)
                    return
        self._mailbox.put(message)

    def _go_on(self, parts: Parts, batch: Batch) -> None:
        executor = parts.executor
        executor.computed(batch)
        if not self._stopping:
            executor.step(time.monotonic_ns())
        if (
            self._stopping
            or self._drain_asked
            or not self._reading
            or parts.push.pending()
            or (executor.next_wake_ns() or _NEVER_NS) < self._sleeps_until_ns
        ):
            self._mailbox.put(_Wake())

    def _terminate(self, parts: Parts | None, status: int) -> None:
        """Answer for everything that is here, then leave nothing behind."""
        self._state, self._stopping = "stopping", True
        if parts is not None:
            self._watch(parts.pull, False)
            self._receive(parts, 1 << 20)
            parts.executor.refuse_all(
                RequestError("BLOCK_UNAVAILABLE", "the worker is being stopped")
            )
            self._await_next_hops(parts)
            parts.pull.close(0)
            parts.monitor.close()
            parts.delivery.close()
            parts.consumer.close()
            parts.runner.close(_END_S if status == EXIT_OK else 0.0)
            if parts.shm is not None:
                parts.shm.close()
        self._remove_files()
        self._agent.close()
        self._context.term()  # waits for what was sent to leave; LINGER bounds that
        self._mailbox.close()

    def _await_next_hops(self, parts: Parts) -> None:
        """Give the next hops time to read the last outputs: the arena goes with this process."""
        end = time.monotonic() + _END_S
        while time.monotonic() < end:
            parts.push.flush()
            if parts.shm is not None:
                parts.shm.sweep()
            if not parts.push.pending() and (parts.shm is None or not parts.shm.outstanding()):
                return
            self._poller.poll(1)
            self._mailbox.drain()

    def _remove_files(self) -> None:
        remove_leavings(self._run_dir, self._launch.incarnation)

    # --- the data thread's inputs ----------------------------------------------------------------

    def _receive(self, parts: Parts, limit: int) -> None:
        """Read at most ``limit`` messages; whatever they hold, this goes on."""
        pull, executor = parts.pull, parts.executor
        for _ in range(limit):
            try:
                header = last = pull.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            now = time.monotonic_ns()
            frame: Any | None = None
            if header.more:
                frame = last = pull.recv(zmq.NOBLOCK, copy=False)
                while last.more:  # nobody sends a third frame
                    last = pull.recv(zmq.NOBLOCK, copy=False)
                    frame = b""
            executor.receive(header.bytes, frame, now)
            if not self._stopping and executor.step(time.monotonic_ns()):
                # The engine has work and needs the interpreter lock to begin it: sleep soon.
                return

    def _watch(self, pull: zmq.Socket[bytes], wanted: bool) -> None:
        if wanted == self._reading:
            return
        self._reading = wanted
        if wanted:
            self._poller.register(pull, zmq.POLLIN)
        else:
            self._poller.unregister(pull)

    def _read_mailbox(self, parts: Parts) -> None:
        for message in self._mailbox.drain():
            match message:
                case Computed():
                    parts.executor.computed(message.batch)
                case Loaded():
                    self._loaded = message
                case _Wake():
                    pass
                case Exception():
                    raise message
                case AskKpi():
                    parts.monitor.answer(self._snapshot(parts))
                case _:
                    self._obey(parts, message)

    def _obey(self, parts: Parts, message: control.ControlMessage) -> None:
        launch = self._launch
        match message:
            case control.Routes():
                self._set_routes(parts, message)
            case control.PeerGone():
                parts.delivery.peer_gone(message.incarnation)
                parts.consumer.peer_gone(message.incarnation)
            case control.Drain():
                self._drain_asked = True
                self._state = "draining" if self._loaded else self._state
            case control.Undrain():
                self._drain_asked = False
                self._state = "ready" if self._loaded else self._state
            case control.Stop():
                self._stopping = True
            case control.Monitor():
                parts.monitor.set_rate(message.hz)
            case control.SetPolicy():
                try:
                    parts.scheduler.set_policy(message.stage, message.policy, time.monotonic_ns())
                except (BlockFlowError, KeyError) as exc:
                    _LOG.error("policy of stage %d stays: %s", message.stage, exc)
            case _:
                _LOG.warning("%s is not for %s", type(message).__name__, launch.name)

    def _set_routes(self, parts: Parts, message: control.Routes) -> None:
        try:
            table = RouteTable.from_dict(message.table)
        except (KeyError, TypeError, ValueError) as exc:
            _LOG.error("route table refused: %s", exc)
            return
        if table.version < parts.delivery.routes.version:
            return  # overtaken by a newer one
        parts.delivery.set_routes(table)
        self._agent.send(control.RoutesApplied(self._launch.incarnation, table.version))

    def _snapshot(self, parts: Parts) -> Snapshot:
        counters = {
            "malformed": parts.intake.malformed,
            "undeliverable": parts.delivery.undeliverable,
            "unsent": parts.push.pending(),
        }
        return Snapshot(parts.executor.snapshot(time.monotonic_ns()), counters)


def _timeout_ms(until_ns: int) -> int | None:
    """Whole milliseconds until then, rounded up; None = for ever."""
    if until_ns == _NEVER_NS:
        return None
    return max(0, -((time.monotonic_ns() - until_ns) // 1_000_000))
